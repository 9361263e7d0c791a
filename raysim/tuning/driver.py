"""The driver of a sweep: gives the trials to Tune and says in plain lines what becomes of them."""

from __future__ import annotations

import logging
import math
import os
import pickle
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from ray import tune
from ray.tune.experiment import Trial
from ray.tune.search.basic_variant import BasicVariantGenerator

from raysim.engine.ray.session import LOSSES, ray_session
from raysim.engine.simulation import Interrupted, collected_signals
from raysim.run_folder import Mark, RunFolder
from raysim.tuning.outcome import Outcome, fill_twins, outcome, start_sweep
from raysim.tuning.plan import Sweep, SweepTrial
from raysim.tuning.ready import AllReady, make_ready
from raysim.tuning.resources import Bundle, check_room, group_of, make_scheduler, ray_nodes
from raysim.tuning.trial import make_trainable

#: Environment of the driver: no logger of Tune's own (each wants another package), no messages, few state files.
QUIET = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_GLOBAL_CHECKPOINT_S": "60",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
}

#: How often a trial goes on elsewhere after its process was lost, as with its node.
MOST_LOSSES = 3

#: Seconds between lines about progress, and how many of these there are at most.
PROGRESS_S, MOST_LINES = 30.0, 40


def run_sweep(sweep: Sweep, say: Callable[[str], None]) -> dict[str, Outcome]:
    """Run what is unfinished of a sweep, and return what became of every trial.

    Args:
      say: prints one line.
    Raises:
      ConfigError, RunExists: it cannot start, and nothing has been started.
      Interrupted: a signal ended the sweep; starting it again runs what is unfinished.
    """
    sweep.folder.mkdir(parents=True, exist_ok=True)
    with RunFolder(sweep.folder).locked(kind="sweep"):
        before = start_sweep(sweep)
        for name, faults in sweep.refused.items():
            say(f"refused: {name}: {'; '.join(map(str, faults))}")
        waiting = [trial for trial in sweep.trials if not trial.same_as and not before[trial.name].is_finished]
        if waiting:
            with ray_session():
                nodes = ray_nodes()
                check_room(sweep, nodes)
                say(_opening(sweep, len(waiting)))
                made = make_ready([trial.config for trial in waiting], say)
                watch = _Watch(sweep, waiting, say)
                try:
                    _tune(sweep, waiting, nodes, made, watch)
                    while again := watch.take_lost():
                        _tune(sweep, again, ray_nodes(), made, watch)
                finally:
                    fill_twins(sweep)
        fill_twins(sweep)
        return {trial.name: outcome(sweep, trial) for trial in sweep.trials}


def _opening(sweep: Sweep, num_waiting: int) -> str:
    count = len(sweep.trials)
    left = f"{num_waiting} of {count} trials to run" if num_waiting < count else f"{count} trials"
    twins = sum(bool(trial.same_as) for trial in sweep.trials)
    return f"{left} in {sweep.folder}" + (f" ({twins} only repeat another one)" if twins else "")


def _tune(sweep: Sweep, waiting: Sequence[SweepTrial], nodes: Sequence[Bundle], made: AllReady, watch: _Watch) -> None:
    settings = sweep.base.tune
    gpus = sum(node.get("GPU", 0.0) for node in nodes)
    # A scheduler compares with finished trials, too: these report their old rounds again.
    compares = settings.scheduler is not None
    trials = [trial for trial in sweep.trials if not trial.same_as] if compares else waiting
    raws = {trial.name: trial.config.model_dump(mode="json") for trial in trials}
    groups = {trial.name: group_of(trial.config, gpus) for trial in trials}
    work = sweep.folder / ".tune"
    shutil.rmtree(work, ignore_errors=True)
    for name in ("ray.tune", "ray.train"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with mock.patch.dict(os.environ, QUIET), collected_signals(_end_trials) as received:
        tune.Tuner(
            make_trainable(raws, groups, settings, made),
            param_space={"trial": tune.grid_search([trial.name for trial in trials])},
            tune_config=tune.TuneConfig(
                metric=settings.metric,
                mode=settings.mode,
                search_alg=BasicVariantGenerator(max_concurrent=settings.max_concurrent or 0),
                scheduler=make_scheduler(sweep),
                reuse_actors=True,  # a process that has imported PyTorch serves many trials
                trial_name_creator=lambda trial: trial.config["trial"],
                trial_dirname_creator=lambda trial: trial.trial_id,
            ),
            run_config=tune.RunConfig(storage_path=str(work), name="state", verbose=0, callbacks=[watch]),
        ).fit()
    shutil.rmtree(work, ignore_errors=True)
    if received:
        raise Interrupted(received[0], None)


class _Watch(tune.Callback):
    """Marks trials that Tune ends, and says a line for each; now and then one about how far the others are."""

    def __init__(self, sweep: Sweep, waiting: Sequence[SweepTrial], say: Callable[[str], None]):
        self._sweep, self._say = sweep, say
        self._trials = {trial.name: trial for trial in waiting}
        self._num_rounds = {trial.name: trial.num_rounds for trial in waiting}
        self._rounds = dict.fromkeys(self._trials, 0)
        self._spoke_at = time.monotonic()
        self._num_ended = self._num_lines = 0
        self._lost: list[SweepTrial] = []
        self._losses: Counter[str] = Counter()

    def take_lost(self) -> list[SweepTrial]:
        """Trials whose process was lost since this was last asked; they go on from their last checkpoint."""
        lost, self._lost = self._lost, []
        return lost

    def __getstate__(self) -> dict[str, object]:
        return {}  # Tune writes its callbacks to a file that nobody here reads back

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: object
    ) -> None:
        if str(trial) in self._rounds:
            self._rounds[str(trial)] = result["training_iteration"]

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: object) -> None:
        settings, last = self._sweep.base.tune, trial.last_result or {}
        score = f"{settings.metric} {last.get(settings.metric, math.nan):.4f}"
        rounds = f"round {last.get('training_iteration', 0)} of {self._num_rounds.get(str(trial))}"
        self._ended(str(trial), "STOPPED", f"stopped by {settings.scheduler} after {rounds}: {score}")

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: object) -> None:
        name = str(trial)
        if name in self._trials and _is_loss(trial):
            self._losses[name] += 1
            if self._losses[name] <= MOST_LOSSES:
                self._lost.append(self._trials[name])
                self._say(f"  {name} lost its process or its node; it will go on from its last checkpoint")
                return
        self._ended(name, "FAILED", _error_of(trial))

    def on_step_end(self, iteration: int, trials: list[Trial], **info: object) -> None:
        now = time.monotonic()
        # Each line waits a little longer than the one before, so that even a sweep of days says no more than so many.
        if now - self._spoke_at < PROGRESS_S * 1.15**self._num_lines or self._num_lines >= MOST_LINES:
            return
        self._spoke_at = now
        self._num_lines += 1
        share = sum(self._rounds.values()) / sum(self._num_rounds.values())
        running = sum(trial.status == "RUNNING" for trial in trials)
        text = f"{running} trials running" if running else "starting, or waiting for room in the Ray cluster"
        self._say(f"  {self._num_ended}/{len(self._trials)} done, {100 * share:.0f} % of all rounds, {text}")

    def _ended(self, name: str, mark: Mark, message: str) -> None:
        """Mark a trial that did not come to its own end, and say a line about it."""
        if name not in self._trials:  # it was finished before this sweep began
            return
        folder = RunFolder(self._sweep.folder / name)
        if folder.status.name == "unfinished":
            folder.mark(mark, f"{message}\n")
        self._num_ended += 1
        self._rounds[name] = self._num_rounds[name]
        self._spoke_at = time.monotonic()
        end = outcome(self._sweep, self._trials[name])
        score = "" if end.score is None else f"{self._sweep.base.tune.metric} {end.score:.4f}  "
        count = f"{self._num_ended:>{len(str(len(self._trials)))}}/{len(self._trials)}"
        text = end.message or f"{score}{end.seconds or 0:.1f} s"
        self._say(f"{count}  {name}  {'failed: ' if end.status == 'failed' else ''}{text}")


def _error_of(trial: Trial) -> str:
    """What Tune knows of a trial's end, in a line; the first line of its file is a date."""
    file = trial.error_file
    lines = Path(file).read_text(errors="replace").splitlines()[1:] if file and Path(file).is_file() else []
    reason = next((line.strip() for line in lines if line.strip()), "Its process ended without a word.")
    return f"{reason} It goes on from its last checkpoint when the sweep is started again."


def _is_loss(trial: Trial) -> bool:
    """Whether a trial ended because its process or its node did, not by an error of its own."""
    file = trial.pickled_error_file
    return bool(file) and Path(file).is_file() and isinstance(pickle.loads(Path(file).read_bytes()), LOSSES)


def _end_trials() -> None:
    """Tune, while it listens for SIGUSR1, ends its trials at it and returns; before that, the signal ends all at once."""
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGUSR1)
