"""The driver of a sweep: gives the trials to Tune and says in plain lines what becomes of them."""

from __future__ import annotations

import logging
import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from ray import tune
from ray.tune.search.basic_variant import BasicVariantGenerator

from raysim.core.errors import RunExists
from raysim.engine.ray.session import ray_session
from raysim.engine.simulation import collected_signals
from raysim.run_folder import RunFolder
from raysim.tuning.outcome import Outcome, outcome, start_sweep
from raysim.tuning.plan import Sweep, SweepTrial
from raysim.tuning.resources import Bundle, check_room, group_of, make_scheduler, ray_nodes
from raysim.tuning.trial import make_trainable
from raysim.tuning.twins import fill_twins

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

#: Seconds between lines about progress, and how many of these there are at most.
PROGRESS_S, MOST_LINES = 30.0, 40


class SweepEnded(Exception):
    """A signal ended the sweep; starting it again runs what is unfinished."""

    def __init__(self, signal_number: int):
        super().__init__(signal_number)
        self.signal_number = signal_number


def run_sweep(sweep: Sweep, say: Callable[[str], None]) -> dict[str, Outcome]:
    """Run what is unfinished of a sweep, and return what became of every trial.

    Args:
      say: prints one line.
    Raises:
      ConfigError, RunExists: it cannot start, and nothing has been started.
      SweepEnded: by a signal.
    """
    sweep.folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(sweep.folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise RunExists(
            f"sweep {sweep.folder.name!r} is running", str(sweep.folder), "wait for it, or choose another name"
        ) from error
    try:
        before = start_sweep(sweep)
        for name, faults in sweep.refused.items():
            say(f"refused: {name}: {'; '.join(map(str, faults))}")
        waiting = [trial for trial in sweep.trials if not trial.same_as and not before[trial.name].is_finished]
        if waiting:
            with ray_session():
                nodes = ray_nodes()
                check_room(sweep, nodes)
                say(_opening(sweep, len(waiting)))
                try:
                    _tune(sweep, waiting, nodes, _Watch(sweep, waiting, say))
                finally:
                    fill_twins(sweep)
        fill_twins(sweep)
        return {trial.name: outcome(sweep, trial) for trial in sweep.trials}
    finally:
        lock.release()


def _opening(sweep: Sweep, num_waiting: int) -> str:
    count = len(sweep.trials)
    left = f"{num_waiting} of {count} trials to run" if num_waiting < count else f"{count} trials"
    twins = sum(bool(trial.same_as) for trial in sweep.trials)
    return f"{left} in {sweep.folder}" + (f" ({twins} only repeat another one)" if twins else "")


def _tune(sweep: Sweep, waiting: Sequence[SweepTrial], nodes: Sequence[Bundle], watch: _Watch) -> None:
    settings = sweep.base.tune
    gpus = sum(node.get("GPU", 0.0) for node in nodes)
    # Finished trials only tell their rounds again, where the scheduler has to compare with them.
    trials = [trial for trial in sweep.trials if not trial.same_as]
    trials = trials if settings.scheduler in ("asha", "median") else list(waiting)
    points = [{"trial": trial.name} for trial in trials]
    raws = {trial.name: trial.config.model_dump(mode="json") for trial in trials}
    groups = {trial.name: group_of(trial.config, gpus) for trial in trials}
    work = sweep.folder / ".tune"
    shutil.rmtree(work, ignore_errors=True)
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    logging.getLogger("ray.train").setLevel(logging.CRITICAL)
    with _environment(QUIET), collected_signals(_end_trials) as received:
        tune.Tuner(
            make_trainable(raws, groups, settings),
            param_space={key: tune.choice([point[key] for point in points]) for key in points[0]},
            tune_config=tune.TuneConfig(
                metric=settings.metric,
                mode=settings.mode,
                num_samples=len(points),
                search_alg=BasicVariantGenerator(points, max_concurrent=settings.max_concurrent or 0),
                scheduler=make_scheduler(sweep),
                reuse_actors=True,  # a process that has imported PyTorch serves many trials
                trial_name_creator=lambda trial: trial.config["trial"],
                trial_dirname_creator=lambda trial: trial.trial_id,
            ),
            run_config=tune.RunConfig(storage_path=str(work), name="state", verbose=0, callbacks=[watch]),
        ).fit()
    shutil.rmtree(work, ignore_errors=True)
    if received:
        raise SweepEnded(received[0])


class _Watch(tune.Callback):
    """Marks trials that Tune ends, and says a line for each; now and then one about how far the others are."""

    def __init__(self, sweep: Sweep, waiting: Sequence[SweepTrial], say: Callable[[str], None]):
        self._sweep, self._say = sweep, say
        self._trials = {trial.name: trial for trial in waiting}
        self._rounds = dict.fromkeys(self._trials, 0)
        self._spoke = time.monotonic()
        self._done = self._num_lines = 0

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune writes its settings to a file that nobody here reads back

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        if str(trial) in self._rounds:
            self._rounds[str(trial)] = result["training_iteration"]

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        name = str(trial)
        if name not in self._trials:
            return
        settings, folder = self._sweep.base.tune, RunFolder(self._sweep.folder / name)
        if folder.status.name != "completed":
            last = trial.last_result or {}
            folder.mark(
                "STOPPED",
                f"stopped by {settings.scheduler} after round {last.get('training_iteration', 0)} of "
                f"{self._trials[name].num_rounds}: {settings.metric} {last.get(settings.metric, math.nan):.4f}\n",
            )
        self._finished(name)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        name = str(trial)
        if name not in self._trials:
            return
        folder = RunFolder(self._sweep.folder / name)
        if folder.status.name != "failed":  # its process died before it could say anything
            folder.mark("FAILED", f"{_error_of(trial)}\n")
        self._finished(name)

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        now = time.monotonic()
        # Each line waits a little longer than the one before, so that even a sweep of days says no more than so many.
        if now - self._spoke < PROGRESS_S * 1.15**self._num_lines or self._num_lines >= MOST_LINES:
            return
        self._spoke = now
        self._num_lines += 1
        share = sum(self._rounds.values()) / sum(trial.num_rounds for trial in self._trials.values())
        running = sum(trial.status == "RUNNING" for trial in trials)
        text = f"{running} trials running" if running else "starting, or waiting for room in the Ray cluster"
        self._say(f"  {self._done}/{len(self._trials)} done, {100 * share:.0f} % of all rounds, {text}")

    def _finished(self, name: str) -> None:
        self._done += 1
        trial = self._trials[name]
        self._rounds[name] = trial.num_rounds
        self._spoke = time.monotonic()
        found = outcome(self._sweep, trial)
        score = "" if found.score is None else f"{self._sweep.base.tune.metric} {found.score:.4f}  "
        count = f"{self._done:>{len(str(len(self._trials)))}}/{len(self._trials)}"
        told = found.message or f"{score}{found.seconds or 0:.1f} s"
        told = f"failed: {told}" if found.status == "failed" else told
        self._say(f"{count}  {name}  {told}")


def _error_of(trial: Any) -> str:
    """What Tune knows of a trial's end, in a line; the first line of its file is a date."""
    file = trial.error_file
    lines = Path(file).read_text(errors="replace").splitlines()[1:] if file and Path(file).is_file() else []
    told = next((line.strip() for line in lines if line.strip()), "Its process ended without a word.")
    return f"{told} It goes on from its last checkpoint when the sweep is started again."


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _end_trials() -> None:
    """Tune, while it listens for SIGUSR1, ends its trials at it and returns; before that, the signal ends all at once."""
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGUSR1)
