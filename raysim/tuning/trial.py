"""One trial, in a worker: a run that tells Tune about its rounds and stops, or is changed, when Tune says so."""

from __future__ import annotations

import copy
import csv
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ray import tune

from raysim.assemble import check
from raysim.config import TuneGroup
from raysim.engine.metrics import RoundRecord
from raysim.engine.simulation import Stopped
from raysim.run import execute
from raysim.sweep import assign
from raysim.tuning.outcome import SUMMARY_METRICS, is_finished, progress_rows

#: Seconds that a trial waits for another process to leave its run directory, and Tune for a trial to close its actors.
WAIT_S = 60.0

#: What pbt hands from a good trial to a bad one, besides the checkpoints: the history of the parameters.
HISTORY = ("progress.csv", "clients.parquet", "mutations.csv")


def make_trainable(
    raws: Mapping[str, dict[str, Any]], groups: Mapping[str, tune.PlacementGroupFactory], settings: TuneGroup
) -> Any:
    """The function that Tune runs for {"trial": name, mutated key: value}, each time in the placement group of that trial.

    What pbt clones it clones with the name; which trial it is that runs says Tune's own name of it.

    Args:
      raws, groups: trial -> its complete configuration, and what it reserves.
    """

    def run_trial(point: dict[str, Any]) -> None:
        name = tune.get_context().get_trial_name()
        _run_trial(copy.deepcopy(raws[name]), {**point, "trial": name}, settings)

    return tune.with_resources(run_trial, lambda point: groups[point["trial"]])


def _run_trial(raw: dict[str, Any], point: Mapping[str, Any], settings: TuneGroup) -> None:
    # Read by Tune in this process before it lets in the next trial.
    os.environ["TUNE_FUNCTION_THREAD_TIMEOUT_S"] = str(int(WAIT_S))
    folder = Path(raw["storage"]) / raw["name"]
    reporter = _Reporter(settings, folder)
    try:
        if is_finished(folder):  # for the scheduler to compare with
            reporter.tell_again(progress_rows(folder))
        else:
            _run(raw, point, settings, reporter)
    except Stopped:
        sys.exit(0)  # how Tune itself ends the thread of a trial
    reporter.finish()


def _run(raw: dict[str, Any], point: Mapping[str, Any], settings: TuneGroup, reporter: _Reporter) -> None:
    mutable = tuple(settings.mutations)
    for key in mutable:
        assign(raw, key, point[key])
    if mutable:
        raw["checkpoint"] = {**raw["checkpoint"], "every_s": 0.0}  # pbt hands on what is there after a round
    plan = check(raw, f"trial {point['trial']}", has_room=True)
    reporter.num_rounds = plan.num_rounds
    handed = tune.get_checkpoint() if mutable else None

    def prepare(folder: Path) -> None:
        if handed is not None:
            with handed.as_directory() as source:
                take_over(folder, Path(source))

    def start(folder: Path, first_round: int, num_rounds: int) -> None:
        if mutable:
            note_mutations(folder, first_round, {key: point[key] for key in mutable})
        else:  # this sweep's scheduler has not seen what a resumed trial did before
            reporter.tell_again([row for row in progress_rows(folder) if int(row["round"]) < first_round])

    execute(plan, on_start=start, on_round=reporter.round, prepare=prepare, mutable=mutable, wait_s=WAIT_S)


class _Reporter:
    """Tells Tune about rounds.

    The last round is told when the run is complete, so that nothing stops it there; pbt, which may change a trial at
    whatever it hears, never hears of it and only hears of rounds that it has asked for, each with a checkpoint.
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
        if self._last is not None and self._settings.scheduler != "pbt":
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
        elif self._settings.scheduler != "pbt":
            _report(result)
        elif (round_index + 1) % self._settings.perturbation_interval == 0:
            with tempfile.TemporaryDirectory() as copy:
                hand_over(self._folder, Path(copy))
                _report(result, tune.Checkpoint.from_directory(copy))


def _report(result: dict[str, Any], checkpoint: Any = None) -> None:
    try:
        tune.report(result, checkpoint=checkpoint)
    except SystemExit as error:
        raise Stopped from error


# --- population based training ----------------------------------------------------------------------------------------


def hand_over(folder: Path, target: Path) -> None:
    """Copy what another trial needs to go on from here."""
    shutil.copytree(folder / "checkpoints", target / "checkpoints")
    for name in HISTORY:
        if (folder / name).is_file():
            shutil.copy2(folder / name, target / name)


def take_over(folder: Path, source: Path) -> None:
    """Make the run directory go on from what was handed over, which may be its own of some rounds ago.

    Its rows and events so far are then those of the parameters that it goes on with, whichever trial they came from.
    """
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    shutil.copytree(source / "checkpoints", folder / "checkpoints")
    for name in HISTORY:
        if (source / name).is_file():
            shutil.copy2(source / name, folder / name)


def note_mutations(folder: Path, first_round: int, values: Mapping[str, Any]) -> None:
    """mutations.csv: from which round on the parameters at hand were trained with which values."""
    path = folder / "mutations.csv"
    rows: list[list[str]] = []
    if path.is_file():
        with open(path, newline="") as file:
            rows = [row for row in list(csv.reader(file))[1:] if int(row[0]) < first_round]
    now = [repr(float(value)) for value in values.values()]
    if not rows or rows[-1][1:] != now:
        rows.append([str(first_round), *now])
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([["round", *values], *rows])
