"""The verb: `raysim tune`, from the command line's words to what the terminal shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from raysim.sweep import Raw
from raysim.terminal import err, out, say
from raysim.tuning.driver import SweepEnded, run_sweep
from raysim.tuning.outcome import Outcome, ranked, write_results
from raysim.tuning.plan import Sweep, SweepTrial, plan_sweep
from raysim.tuning.resources import draws

#: Lines of the table, and of each list of trials without a result: results.csv has them all.
MOST_ROWS = 10


def tune(raw: Raw, source: str, *, is_scaled: bool = False) -> int:
    """Run a sweep, write what became of it, and return the exit status: 0, 1 (some trial has no result) or 128 + signal.

    Args:
      raw: of `read_sweep`; source: its file.
    Raises:
      ConfigError, RunExists: as plan_sweep and run_sweep.
    """
    sweep = plan_sweep(raw, source, draws, is_scaled=is_scaled)
    try:
        outcomes = run_sweep(sweep, say)
    except SweepEnded as end:
        err.print("stopped by a signal; the same command runs what is not finished")
        return 128 + end.signal_number
    write_results(sweep, outcomes)
    out.print(best_trials(sweep, ranked(sweep, outcomes), outcomes))
    for status in ("failed", "unfinished"):
        names = [name for name, outcome in outcomes.items() if outcome.status == status]
        for name in names[:MOST_ROWS]:
            err.print(f"{status}: {name}: {outcomes[name].message}".rstrip(": "), markup=False)
        if len(names) > MOST_ROWS:
            err.print(f"{status}: {len(names) - MOST_ROWS} more, see results.csv")
    out.print(f"sweep directory: {sweep.folder}  (results.csv, best.yaml for `raysim run`)", markup=False)
    out.print(f"TensorBoard:     tensorboard --logdir {sweep.folder}", markup=False)
    if all(outcome.is_finished for outcome in outcomes.values()):
        return 0
    err.print("the same command runs what is not finished")
    return 1


def best_trials(sweep: Sweep, trials: Sequence[SweepTrial], outcomes: Mapping[str, Outcome]) -> Table:
    """The first of these trials, best first, with the labels that tell them apart."""
    metric = sweep.base.tune.metric
    num_finished = sum(outcome.is_finished for outcome in outcomes.values())
    table = Table(title=f"{sweep.folder.name}: best of {num_finished} finished trials, of {len(outcomes)}")
    labels = [outcome.labels for outcome in outcomes.values()]
    names = [name for name in labels[0] if len({repr(each.get(name)) for each in labels}) > 1] or list(labels[0])
    for column in (*names, metric, "best round", "seconds", ""):
        table.add_column(column, justify="left" if column in names else "right")
    for trial in trials[:MOST_ROWS]:
        outcome = outcomes[trial.name]
        numbers = [f"{outcome.score:.4f}", str(outcome.best_round), f"{outcome.seconds:.1f}"]
        status = "" if outcome.status == "completed" else outcome.status
        table.add_row(*(_short(outcome.labels.get(name, "")) for name in names), *numbers, status)
    return table


def _short(label: object) -> str:
    return f"{label:.6g}" if isinstance(label, float) else str(label)
