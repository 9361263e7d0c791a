"""One trial, in a worker: a run that tells Tune about its rounds and stops, or is changed, when Tune says so."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ray import tune

from raysim.check import check
from raysim.config import TuneGroup
from raysim.engine.metrics import RoundRecord
from raysim.engine.simulation import Stopped
from raysim.run_folder import RunFolder
from raysim.runner import execute
from raysim.tuning.outcome import SUMMARY_METRICS

#: Seconds that a trial waits for another process to leave its run directory, and Tune for a trial to close its actors.
WAIT_S = 60.0


def make_trainable(
    raws: Mapping[str, dict[str, Any]], groups: Mapping[str, tune.PlacementGroupFactory], settings: TuneGroup
) -> Any:
    """The function that Tune runs for {"trial": name}, each time in the placement group of that trial.

    Args:
      raws, groups: trial -> its complete configuration, and what it reserves.
    """

    def run_trial(point: dict[str, Any]) -> None:
        _run_trial(raws[point["trial"]], point["trial"], settings)

    return tune.with_resources(run_trial, lambda point: groups[point["trial"]])


def _run_trial(raw: dict[str, Any], name: str, settings: TuneGroup) -> None:
    # Read by Tune in this process before it lets in the next trial.
    os.environ["TUNE_FUNCTION_THREAD_TIMEOUT_S"] = str(int(WAIT_S))
    folder = Path(raw["storage"]) / raw["name"]
    reporter = _Reporter(settings, folder)
    try:
        if RunFolder(folder).status.is_finished:  # for the scheduler to compare with
            reporter.tell_again(RunFolder(folder).progress_rows())
        else:
            _run(raw, name, reporter)
    except Stopped:
        sys.exit(0)  # how Tune itself ends the thread of a trial
    reporter.finish()


def _run(raw: dict[str, Any], name: str, reporter: _Reporter) -> None:
    plan = check(raw, f"trial {name}", has_room=True)
    reporter.num_rounds = plan.num_rounds

    def start(folder: Path, first_round: int, num_rounds: int) -> None:
        # This sweep's scheduler has not seen what a resumed trial did before.
        reporter.tell_again(RunFolder(folder).progress_rows(before=first_round))

    execute(plan, on_start=start, on_round=reporter.round, wait_s=WAIT_S)


class _Reporter:
    """Tells Tune about rounds.

    The last round is told when the run is complete, so that nothing stops it there.
    """

    def __init__(self, settings: TuneGroup, folder: Path):
        self._settings, self._folder = settings, folder
        self.num_rounds = -1
        self._best = self._best_validation = -math.inf
        self._chosen = math.nan  # accuracy in the round with the best validation accuracy
        self._last: dict[str, Any] | None = None

    def round(self, record: RoundRecord) -> None:
        self._tell(record.round_index, record.metrics)

    def tell_again(self, rows: Sequence[Mapping[str, str]]) -> None:
        for row in rows:
            self._tell(int(row["round"]), {name: float(text) for name, text in row.items() if text and name != "round"})

    def finish(self) -> None:
        if self._last is not None:
            tune.report(self._last)

    def _tell(self, round_index: int, metrics: Mapping[str, float]) -> None:
        known = {name: float(value) for name, value in metrics.items()}
        metric = self._settings.metric
        if "server/accuracy" in known:
            accuracy = known["server/accuracy"]
            self._best = max(self._best, accuracy)
            validation = known.get("server/validation_accuracy", -math.inf)
            if validation > self._best_validation:
                self._best_validation, self._chosen = validation, accuracy
            known |= {**dict.fromkeys(SUMMARY_METRICS, accuracy), "best_accuracy": self._best}
            known["accuracy_at_best_validation"] = self._chosen
        if metric not in known:
            return
        if math.isnan(known[metric]):  # the worst there is: NaN has no place in a ranking
            known[metric] = -math.inf if self._settings.mode == "max" else math.inf
        result = {"training_iteration": round_index + 1, **known}
        if round_index + 1 == self.num_rounds:
            self._last = result
        else:
            _report(result)


def _report(result: dict[str, Any]) -> None:
    try:
        tune.report(result)
    except SystemExit as error:
        raise Stopped from error
