"""A trial in a worker: a run that reports rounds to Tune and obeys Tune's decisions."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ray import tune

from raysim.base.direction import SUMMARY, best_round, main_of
from raysim.base.settings import Raw
from raysim.base.user_code import UserCode, receive
from raysim.config import Config, TuneGroup
from raysim.engine.device import accelerator, limit_memory, num_accelerators
from raysim.engine.round_metrics import RoundRecord
from raysim.engine.simulation import Stopped
from raysim.folders.run_folder import RunFolder
from raysim.folders.storage import local_copy, run_place
from raysim.plan.check import check
from raysim.plan.resources import gpu_share
from raysim.running.runner import execute
from raysim.tuning.for_tune import bundles_of
from raysim.tuning.planner import SweepTrial, backend_of
from raysim.tuning.ready import AllReady, ready_for

#: Remarks about a trial, which Ray keeps in the log of its process.
_log = logging.getLogger(__name__)

#: Seconds that a trial waits until another process leaves its run directory, and that Tune waits until a trial closes
#: its actors.
WAIT_S = 60.0


#: A trial as Tune sees it: name, labels (for Tune's callbacks), and configuration.
Point = dict[str, object]


def point_of(trial: SweepTrial) -> Point:
    """Message from Tune to a trial's process; without defaults, since Tune stores it in a file."""
    settings = trial.config.model_dump(mode="json", exclude_defaults=True)
    settings["resources"] = {**settings.get("resources", {}), "backend": backend_of(trial.config)}
    # Set, since otherwise the process would decide for this trial alone whether rows validate.
    if trial.config.data.split != "file":
        settings["data"] = {**settings.get("data", {}), "validation": trial.config.data.validation}
    return {**trial.config.labels, "trial": trial.name, "settings": json.dumps(settings)}


def make_trainable(code: UserCode, gpus: float, settings: TuneGroup, made: AllReady) -> Callable[[Point], None]:
    """Return the function run by Tune for each point, in the trial's placement group.

    Args:
      code: the user's own code for the trials.
      gpus: number of GPUs of the cluster.
      made: the data and weights of the trials.
    """

    def run_trial(point: Point, made: AllReady) -> None:
        receive(code)
        _run_trial(json.loads(str(point["settings"])), str(point["trial"]), settings, made)

    def group_of(point: Point) -> tune.PlacementGroupFactory:
        return tune.PlacementGroupFactory(bundles_of(Config.model_validate_json(str(point["settings"])), gpus))

    return tune.with_resources(tune.with_parameters(run_trial, made=made), group_of)


def _run_trial(raw: Raw, name: str, settings: TuneGroup, made: AllReady) -> None:
    # Tune reads the variable in this process before it starts the next trial here.
    os.environ["TUNE_FUNCTION_THREAD_TIMEOUT_S"] = str(int(WAIT_S))
    folder = RunFolder(local_copy(run_place(raw["storage"], raw["name"])))
    reporter = _Reporter(settings)
    try:
        if folder.status.is_finished:  # a scheduler compares with its rounds
            reporter.report_again(folder.progress_rows())
        else:
            ready = ready_for(Config.model_validate(raw), made)
            plan = check(raw, f"trial {name}", has_room=True, ready=ready)
            reporter.num_rounds = plan.num_rounds
            if plan.config.is_serial() and (share := gpu_share(plan.config, num_accelerators())):
                limit_memory(accelerator(), share)  # leaves memory to other trials

            def start(path: Path, first_round: int, num_rounds: int) -> None:
                # The scheduler has not seen the earlier rounds of a resumed trial.
                reporter.report_again(RunFolder(path).progress_rows(before=first_round))

            execute(plan, on_start=start, on_round=reporter.round, on_note=_log.warning, wait_s=WAIT_S)
    except Stopped:
        sys.exit(0)  # how Tune itself ends the thread of a trial
    reporter.finish()


class _Reporter:
    """Report rounds to Tune; the last round only after completion, so that Tune cannot stop the run.

    Each round is reported once, although a run that lost its server repeats the rounds since its checkpoint.
    """

    def __init__(self, settings: TuneGroup):
        self._settings = settings
        self.num_rounds, self._num_reported = -1, 0
        self._scores: dict[int, float] = {}
        self._validation: dict[int, float] = {}
        self._last: dict[str, float] | None = None

    def round(self, record: RoundRecord) -> None:
        self._report(record.round_index, record.metrics)

    def report_again(self, rows: Sequence[Mapping[str, str]]) -> None:
        """Report rounds of an earlier process, from rows of progress.csv."""
        for row in rows:
            numbers = {name: float(text) for name, text in row.items() if text and name != "round"}
            self._report(int(row["round"]), numbers)

    def finish(self) -> None:
        if self._last is not None:
            tune.report(self._last)

    def _report(self, round_index: int, metrics: Mapping[str, float]) -> None:
        if round_index < self._num_reported:
            return
        self._num_reported = round_index + 1
        numbers = {name: float(value) for name, value in metrics.items()}
        metric = self._settings.metric
        main = main_of(numbers)
        if f"server/{main}" in numbers:
            score = self._scores[round_index] = numbers[f"server/{main}"]
            self._validation[round_index] = numbers.get(f"server/validation_{main}", math.nan)
            best, chosen = best_round(self._scores, main), best_round(self._validation, main)
            numbers |= dict.fromkeys((form.format(main) for form in SUMMARY), score)
            numbers[f"best_{main}"] = math.nan if best is None else self._scores[best]
            numbers[f"{main}_at_best_validation"] = math.nan if chosen is None else self._scores[chosen]
        if metric not in numbers:
            return
        if math.isnan(numbers[metric]):  # the worst score, since NaN cannot be ranked
            numbers[metric] = -math.inf if self._settings.direction == "max" else math.inf
        result = {"training_iteration": round_index + 1, **numbers}
        if round_index + 1 == self.num_rounds:
            self._last = result
            return
        try:
            tune.report(result)
        except SystemExit as error:  # how Tune stops a trial
            raise Stopped from error
