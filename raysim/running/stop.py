"""When a run ends before its last round: conditions that look at its records alone, so that a resumed run agrees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raysim.config import StopGroup
from raysim.core.rounds import round_name
from raysim.running.record import judged


def reason_to_stop(stop: StopGroup, rows: Sequence[Mapping[str, str]], every: int) -> str:
    """Why the run ends after these rounds; empty if it goes on.

    A run ends after an evaluation, so that its last model is scored as that of every other run; without evaluations
    between the first and the last round (`every` 0) it may end after any round.

    Args:
      rows: of progress.csv, from the first round on.
      every: rounds between evaluations.
    """
    if not rows or stop == StopGroup() or (every and len(rows) % every):
        return ""
    scores = judged(rows, len(rows))
    best, best_round, last_round = scores["best_accuracy"], scores["best_round"], int(rows[-1]["round"])
    if stop.accuracy is not None and best is not None and best >= stop.accuracy:
        return f"accuracy {best:.4f} in {round_name(int(best_round or 0))}: {stop.accuracy:g} was asked for"
    if stop.patience is not None and best_round is not None and last_round - best_round >= stop.patience:
        return f"no better accuracy than {best:.4f} for {last_round - int(best_round)} rounds"
    seconds = sum(float(row["system/round_s"]) for row in rows)
    if stop.seconds is not None and seconds >= stop.seconds:
        return f"{seconds:.0f} s of rounds: {stop.seconds:g} s were allowed"
    return ""
