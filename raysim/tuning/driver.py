"""Driver of a sweep: gives trials to Tune and reports their outcomes."""

from __future__ import annotations

import logging
import math
import os
import pickle
import shutil
import signal
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.experiment import Trial
from ray.tune.search import Searcher

from raysim.base.errors import ConfigError, RaysimError, RunExists
from raysim.base.progress import Listener, clock
from raysim.base.uri import is_uri
from raysim.base.user_code import packed
from raysim.engine.ray.session import LOSSES, ray_session
from raysim.engine.simulation import Interrupted, collected_signals
from raysim.folders.run_folder import Mark, RunFolder
from raysim.folders.storage import Copy
from raysim.tuning.for_tune import Bundle, make_callbacks, make_scheduler, nodes_with_room, ray_nodes
from raysim.tuning.outcome import Outcome, fill_twins, known_score, outcome, start_sweep
from raysim.tuning.plan import Sweep
from raysim.tuning.planner import SweepTrial, refusals
from raysim.tuning.ready import AllReady, make_ready
from raysim.tuning.trial import WAIT_S, make_trainable, point_of

#: Environment of the driver: no loggers of Tune (each needs another package), no messages, few state files.
QUIET = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_GLOBAL_CHECKPOINT_S": "60",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # a trial without the metric ends no other trial; named at the end
}

#: Seconds between lines about progress, and largest number of lines.
PROGRESS_S, MOST_LINES = 30.0, 40


def run_sweep(sweep: Sweep, listener: Listener, callbacks: Sequence[object] = ()) -> tuple[Sweep, dict[str, Outcome]]:
    """Run the unfinished trials of a sweep; return the sweep with all trials, and their outcomes.

    Args:
      callbacks: of Ray Tune, in addition to the callbacks in the sweep's settings.
    Raises:
      ConfigError, RunExists: the sweep cannot start; nothing has been started.
      Interrupted: a signal ended the sweep; the same command runs unfinished trials.
    """
    tune_callbacks = make_callbacks(sweep.base.tune.callbacks, callbacks)
    sweep.folder.mkdir(parents=True, exist_ok=True)
    copy = Copy(sweep.place)
    with RunFolder(sweep.folder).locked(kind="sweep"):
        copy.fetch()
        before = start_sweep(sweep)
        for name, faults in sweep.refused.items():
            listener.say(f"refused: {name}: {'; '.join(map(str, faults))}")
        waiting = [trial for trial in sweep.trials if not trial.same_as and not before[trial.name].is_finished]
        if waiting or (sweep.search and sweep.search.num_left):
            models = {config.model.kind for config in (sweep.base, *(trial.config for trial in waiting))}
            with ray_session(on_step=listener.step, models=models):
                nodes = nodes_with_room(sweep, listener.say)
                listener.say(_opening(sweep, waiting))
                listener.step("looking for the shards of all trials")
                made = make_ready([trial.config for trial in waiting], listener.say)
                listener.step("starting the first trials")
                num_done = sum(before[trial.name].is_finished for trial in sweep.trials if not trial.same_as)
                source = _Source(sweep, waiting, _Watch(sweep, waiting, listener, num_done=num_done))
                try:
                    _tune_all(source, nodes, tune_callbacks, made)
                finally:
                    sweep = source.sweep
                    fill_twins(sweep)
        copy.fetch()
        fill_twins(sweep)
        if not is_uri(sweep.place):
            seal_stopped([sweep.folder / trial.name for trial in sweep.trials])
        if not sweep.trials:
            raise ConfigError([*refusals(sweep.refused, len(sweep.refused))], f"every trial of {sweep.folder.name}")
        return sweep, {trial.name: outcome(sweep, trial) for trial in sweep.trials}


def seal_stopped(folders: Sequence[Path]) -> None:
    """Seal the records of trials that a scheduler stopped, unless the trials have sealed their records.

    Tune may end a trial's process before the process seals them. A process holds the lock of its folder as long as it
    may write there.
    """
    for folder in map(RunFolder, folders):
        if folder.status.name == "stopped" and not folder.seal.exists():
            with suppress(RunExists), folder.locked(WAIT_S):
                folder.seal_records()


def _opening(sweep: Sweep, waiting: Sequence[SweepTrial]) -> str:
    count = sweep.num_trials
    num_left = len(waiting) + count - len(sweep.trials)
    left = f"{num_left} of {count} trials to run" if num_left < count else f"{count} trials"
    twins = sum(bool(trial.same_as) for trial in sweep.trials)
    repeats = f" ({twins} repeat another trial)" if twins else ""
    better = "largest" if sweep.base.tune.direction == "max" else "smallest"
    return f"{left} in {sweep.folder}{repeats}; best: the {better} {sweep.base.tune.metric}"


def _tune_all(source: _Source, nodes: Sequence[Bundle], callbacks: Sequence[tune.Callback], made: AllReady) -> None:
    """Run all trials; trials that lost their process are repeated from their checkpoints.

    Tune's `FailureConfig(max_failures)` is not used, since it also repeats trials after faults of their own code.
    """
    num_failures, is_left = 0, True
    while is_left:
        try:
            _tune(source, nodes, callbacks, made)
        except RuntimeError as error:  # Tune does not count a process ended by Ray's memory monitor as lost, and raises
            if not isinstance(error.__cause__, LOSSES):
                raise
            num_failures, reason = num_failures + 1, str(error.__cause__).partition("\n")[0]
            if num_failures > max(trial.config.resources.restarts for trial in source.sweep.trials):
                what = f"Ray ended processes of trials {num_failures} times ({reason})"
                mend = "lower tune.max_concurrent, or free memory; the same command resumes unfinished trials"
                raise RaysimError(what, source.sweep.folder.name, mend) from error
            source.watch.say(f"Ray ended processes of trials ({reason}); the trials resume")
        is_left = source.take_unfinished()
        nodes = ray_nodes() if is_left else nodes


def _tune(source: _Source, nodes: Sequence[Bundle], callbacks: Sequence[tune.Callback], made: AllReady) -> None:
    sweep, settings = source.sweep, source.sweep.base.tune
    gpus = sum(node.get("GPU", 0.0) for node in nodes)
    work = sweep.folder / ".tune"
    shutil.rmtree(work, ignore_errors=True)
    for name in ("ray.tune", "ray.train"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # Trials of a list may wait in line; a search chooses better the later it is asked.
    quiet = {**QUIET, "TUNE_MAX_PENDING_TRIALS_PG": "auto" if sweep.search else "200"}
    os.environ.update(quiet)
    with collected_signals(_end_trials) as received:
        tune.Tuner(
            make_trainable(packed(sweep.raw), gpus, settings, made),
            tune_config=tune.TuneConfig(
                metric=settings.metric,
                mode=settings.direction,
                num_samples=-1,  # the source ends the sweep
                search_alg=source,
                max_concurrent_trials=settings.max_concurrent,
                scheduler=make_scheduler(sweep),
                reuse_actors=True,  # a process that has imported PyTorch serves many trials
                trial_name_creator=lambda trial: trial.config["trial"],
                trial_dirname_creator=lambda trial: trial.trial_id,
            ),
            run_config=tune.RunConfig(
                storage_path=str(work), name="state", verbose=0, callbacks=[source.watch, *callbacks]
            ),
        ).fit()
    shutil.rmtree(work, ignore_errors=True)
    if received:
        raise Interrupted(received[0], None)


class _Source(Searcher):
    """Source of trials for Tune: waiting trials first, then proposals of the search, if any.

    Attributes:
      sweep: the sweep with all trials chosen so far.
    """

    def __init__(self, sweep: Sweep, waiting: Sequence[SweepTrial], watch: _Watch):
        super().__init__()
        self.sweep, self.watch = sweep, watch
        # A scheduler compares with finished trials, too, which therefore report their old rounds again.
        compares = sweep.base.tune.scheduler is not None
        self._queue = deque(trial for trial in sweep.trials if not trial.same_as) if compares else deque(waiting)
        self._given: dict[str, SweepTrial] = {}
        self._ends: dict[str, Outcome] = {}

    def __getstate__(self) -> dict[str, object]:
        return {}  # Tune pickles its source of trials; raysim never reads the file

    def take_unfinished(self) -> bool:
        """Queue first the trials that Tune started and did not finish; return whether any trial is left to run."""
        folders = {name: RunFolder(self.sweep.folder / name) for name in self._given}
        left = [trial for name, trial in self._given.items() if folders[name].status.name == "unfinished"]
        self._queue.extendleft(reversed(left))
        self._given = {}
        return bool(self._queue or (self.sweep.search and self.sweep.search.num_left))

    def suggest(self, trial_id: str) -> Any:  # a Point, or FINISHED, which Tune's annotation leaves out
        while not self._queue:
            if self.sweep.search is None or not self.sweep.search.num_left:
                return Searcher.FINISHED
            num_before = len(self.sweep.trials)
            self.sweep = self.sweep.grown(self._scores())
            new = [trial for trial in self.sweep.trials[num_before:] if not trial.same_as]
            self._queue.extend(new)
            self.watch.expect(new)
        trial = self._queue.popleft()
        self._given[trial.name] = trial
        return point_of(trial)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        pass  # the outcome is in the run directory

    def save(self, checkpoint_path: str) -> None:
        pass  # as above

    def _scores(self) -> dict[str, float | None]:
        """Return trial -> score; a duplicate has the score of its original."""
        for trial in self.sweep.trials:
            if not trial.same_as and not (trial.name in self._ends and self._ends[trial.name].is_finished):
                self._ends[trial.name] = outcome(self.sweep, trial)
        return {trial.name: known_score(self._ends[trial.same_as or trial.name]) for trial in self.sweep.trials}


class _Watch(tune.Callback):
    """Mark trials ended by Tune and report each; report progress of the running trials at intervals.

    Args:
      num_done: number of trials finished before this start of the sweep.
    """

    def __init__(self, sweep: Sweep, waiting: Sequence[SweepTrial], listener: Listener, *, num_done: int = 0):
        self._sweep, self._say, self._show, self._copy = sweep, listener.say, listener.show, Copy(sweep.place)
        self._trials: dict[str, SweepTrial] = {}
        self._rounds: dict[str, int] = {}
        self._resumed: dict[str, int] = {}  # earlier rounds, which a trial reports again at its start
        self._first: tuple[float, float] | None = None  # time of the first result, and the images at that time
        self._spoke_at = time.monotonic()
        self._num_before, self._num_ended, self._num_lines = num_done, num_done, 0
        self._losses: Counter[str] = Counter()
        self.expect(waiting)

    def say(self, line: str) -> None:
        """Print a line."""
        self._say(f"  {line}")

    def expect(self, trials: Sequence[SweepTrial]) -> None:
        """Add trials that will run."""
        self._trials |= {trial.name: trial for trial in trials}
        folders = {trial.name: RunFolder(self._sweep.folder / trial.name) for trial in trials}
        self._resumed |= {name: len(folder.progress_rows()) for name, folder in folders.items()}
        self._rounds |= {trial.name: self._resumed[trial.name] for trial in trials}

    @property
    def _count(self) -> int:
        """Return the number of trials, including trials still to be proposed by a search."""
        num_left = self._sweep.search.num_left if self._sweep.search else 0
        return self._num_before + len(self._trials) + num_left

    def __getstate__(self) -> dict[str, object]:
        return {}  # Tune pickles its callbacks; raysim never reads the file

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: object
    ) -> None:
        if str(trial) in self._rounds:
            self._rounds[str(trial)] = max(self._resumed[str(trial)], result["training_iteration"])

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: object) -> None:
        settings, last, sweep_trial = self._sweep.base.tune, trial.last_result or {}, self._trials.get(str(trial))
        if sweep_trial is not None:
            score = f"{settings.metric} {last.get(settings.metric, math.nan):.4f}"
            rounds = f"round {last.get('training_iteration', 0)} of {sweep_trial.num_rounds}"
            self._ended(sweep_trial.name, "STOPPED", f"stopped by {settings.scheduler} after {rounds}: {score}")

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: object) -> None:
        name = str(trial)
        if name in self._trials and _is_loss(trial):
            self._losses[name] += 1
            if self._losses[name] <= self._trials[name].config.resources.restarts:
                self._say(f"  {name} lost the process or the node; the trial resumes from the last checkpoint")
                return
        self._ended(name, "FAILED", _error_of(trial))

    def on_step_end(self, iteration: int, trials: list[Trial], **info: object) -> None:
        now = time.monotonic()
        # Intervals between lines grow, so that even a sweep of days prints at most MOST_LINES lines.
        is_due = now - self._spoke_at >= PROGRESS_S * 1.15**self._num_lines and self._num_lines < MOST_LINES
        if self._show is None and not is_due:
            return
        share, left = self._progress(now)
        running = sum(trial.status == "RUNNING" for trial in trials)
        text = f"{running} trials running" if running else "starting, or waiting for room in the Ray cluster"
        text = f"{self._num_ended}/{self._count} trials done, {100 * share:.0f} % of all images, {left}{text}"
        if self._show is not None:
            self._show(text)
        else:
            self._spoke_at = now
            self._num_lines += 1
            self._say(f"  {text}")

    def _progress(self, now: float) -> tuple[float, str]:
        """Return (share of the sweep's images that are done, text of the time left at the pace so far)."""
        work = {name: max(1, trial.cost.total.images + trial.cost.scored) for name, trial in self._trials.items()}

        def images(rounds: Mapping[str, int]) -> float:
            return sum(work[name] * rounds[name] / max(1, trial.num_rounds) for name, trial in self._trials.items())

        done = images(self._rounds)
        mean = sum(work.values()) / max(1, len(work))  # also for trials that are done or not chosen yet
        share = (self._num_before * mean + done) / max(1, self._count * mean)
        if self._first is None and done > images(self._resumed):
            self._first = now, done
        began, before = self._first or (now, done)
        if done == before:
            return share, ""
        left_s = (now - began) / (done - before) * (mean * (self._count - self._num_before) - done)
        return share, f"{clock(left_s)} left, "

    def _ended(self, name: str, mark: Mark, message: str) -> None:
        """Mark a trial that ended early, and report it."""
        if name not in self._trials:  # finished before this start of the sweep
            return
        self._copy.fetch(name)
        folder = RunFolder(self._sweep.folder / name)
        if folder.status.name == "unfinished":
            folder.mark(mark, f"{message}\n")
            self._copy.send()
        self._num_ended += 1
        self._rounds[name] = self._trials[name].num_rounds
        self._spoke_at = time.monotonic()
        end = outcome(self._sweep, self._trials[name])
        score = "" if end.score is None else f"{self._sweep.base.tune.metric} {end.score:.4f}  "
        count = f"{self._num_ended:>{len(str(self._count))}}/{self._count}"
        text = end.message or f"{score}{end.seconds or 0:.1f} s"
        self._say(f"{count}  {name}  {'failed: ' if end.status == 'failed' else ''}{text}")


def _error_of(trial: Trial) -> str:
    """Return the reason why a trial ended, in one line."""
    error = _raised(trial)
    if error is None:
        return "The process ended without a message."
    reason = " ".join(str(getattr(error, "cause", error)).split())
    more = " The trial resumes from the last checkpoint when the sweep is started again." if _is_loss(trial) else ""
    return f"{reason}{more}"


def _is_loss(trial: Trial) -> bool:
    """Whether a trial ended with its process or node, not by an error in the code."""
    return isinstance(_raised(trial), LOSSES)


def _raised(trial: Trial) -> BaseException | None:
    """Return the error that Tune stored for a trial."""
    file = trial.pickled_error_file
    error: BaseException | None = pickle.loads(Path(file).read_bytes()) if file and Path(file).is_file() else None
    return error


def _end_trials() -> None:
    """Run Tune so that SIGUSR1 ends the trials gracefully; before Tune listens, the signal ends everything at once."""
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGUSR1)
