"""`raysim tune`: the trials of a sweep on Ray Tune.

Part of the composition root, and the one place that imports `ray.tune` (the engine's Ray stays in `ray_runtime.py`, which
knows nothing of configurations). Tune gets a fixed list of trials and says which runs where and when, stops some (ASHA,
median) or changes some (PBT); each trial is a run like any other, with its own run directory and checkpoints. So Tune's
own files (`<sweep>/.tune`) matter only while it runs, and a sweep that ended early is restored by starting it again.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from filelock import FileLock, Timeout
from ray import tune
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, MedianStoppingRule
from ray.tune.search.basic_variant import BasicVariantGenerator
from ray.tune.search.sample import Domain

from raysim.assemble import check
from raysim.config import Config, TuneGroup, nearest
from raysim.core.errors import ConfigError, Fault, RunExists
from raysim.engine.ray_runtime import ray_session
from raysim.engine.server import RoundRecord
from raysim.engine.simulation import Stopped
from raysim.run import execute
from raysim.trials import SUMMARY_METRICS, Draw, Outcome, Sweep, SweepTrial, outcome, progress_rows, start_sweep

DOMAINS = (
    *("uniform", "quniform", "loguniform", "qloguniform", "randn", "qrandn"),
    *("randint", "qrandint", "lograndint", "qlograndint", "choice", "grid_search"),
)

#: Share of a GPU that a trainer of a trial gets where `gpus_per_trainer` is auto, as in a run with four trainers.
AUTO_GPU = 0.25

#: Seconds that a trial waits for a process of a killed sweep that is still in its run directory.
WAIT_S = 60.0

#: Environment of the driver: no logger of Tune's own (each wants another package), no messages, few state files.
QUIET = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "TUNE_GLOBAL_CHECKPOINT_S": "60",
    "RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
}

Bundle = dict[str, float]


def draws(name: str, arguments: Any) -> Draw:
    """What draws from a domain of Ray Tune, for a list or mapping of its arguments.

    Raises:
      ValueError: unknown domain, or arguments that it cannot take.
    """
    domain = _domain(name, arguments)

    def draw(generator: Any) -> Any:
        value = domain.sample(random_state=generator)
        return value.item() if hasattr(value, "item") else value

    return draw


def _domain(name: str, arguments: Any) -> Domain:
    if name not in DOMAINS:
        raise ValueError(f"unknown domain {name!r}. {nearest(name, DOMAINS)}")
    make = getattr(tune, name)
    if name == "choice":
        return make(list(arguments))
    try:
        return make(**arguments) if isinstance(arguments, Mapping) else make(*arguments)
    except TypeError as error:
        raise ValueError(f"{name} cannot take {arguments!r} ({error})") from error


# --- resources --------------------------------------------------------------------------------------------------------


def bundles_of(config: Config, gpus: float) -> list[Bundle]:
    """The placement group of a trial: what its driver, and then each trainer, reserves.

    A serial trial is one process with the CPUs of a trainer. On Ray the driver and the server need no CPU of their own
    (an empty first bundle); `trainers: auto` is one, because a sweep's cores are better used by more trials.

    Args:
      gpus: of the whole cluster; without any, trials run on CPUs.
    """
    wanted = config.resources
    cpus = 1.0 if wanted.cpus_per_trainer == "auto" else float(wanted.cpus_per_trainer)
    if wanted.backend == "serial":
        return [{"CPU": cpus}]
    share = AUTO_GPU if wanted.gpus_per_trainer == "auto" else float(wanted.gpus_per_trainer)
    trainer = {"CPU": cpus, **({"GPU": share} if gpus and share else {})}
    return [{}, *([trainer] * (1 if wanted.trainers == "auto" else wanted.trainers))]


def check_room(sweep: Sweep, nodes: Sequence[Bundle], gpus: float) -> None:
    """Whether every trial fits on these (empty) nodes: Tune would wait for ever for what does not.

    Raises:
      ConfigError: names the bundle that has no place.
    """
    faults: dict[str, str] = {}
    for trial in sweep.trials:
        bundles = bundles_of(trial.config, gpus)
        lacking = _without_room([bundle for bundle in bundles if bundle], nodes)
        if lacking is not None:
            asked = ", ".join(f"{name}: {amount:g}" for name, amount in lacking.items())
            there = "; ".join(", ".join(f"{name}: {amount:g}" for name, amount in node.items()) for node in nodes)
            of = f" (one of {len(bundles) - 1} for trainers)" if len(bundles) > 2 else ""
            text = (
                f"bundle {{{asked}}}{of} has no place in this Ray, whose nodes have {{{there}}}; lower resources.trainers "
                "or the share of each, or set auto"
            )
            faults.setdefault(text, trial.name)
    if faults:
        raise ConfigError([Fault(f"trial {name}", text) for text, name in faults.items()], "the resources")


def _without_room(bundles: Sequence[Bundle], nodes: Sequence[Bundle]) -> Bundle | None:
    """The first bundle that finds no node, largest first; None: all do."""
    free = [dict(node) for node in nodes]
    for bundle in sorted(bundles, key=lambda b: (b.get("GPU", 0.0), b.get("CPU", 0.0)), reverse=True):
        for node in free:
            if all(node.get(name, 0.0) + 1e-9 >= amount for name, amount in bundle.items()):
                for name, amount in bundle.items():
                    node[name] -= amount
                break
        else:
            return bundle
    return None


def _nodes() -> list[Bundle]:
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [{name: node[name] for name in ("CPU", "GPU") if node.get(name)} for node in nodes]


# --- one trial, in a worker -------------------------------------------------------------------------------------------


def _trainable(sweep: Sweep, gpus: float) -> Any:
    """The function that Tune runs for {"trial": name, mutated key: value}."""
    raws = {trial.name: trial.config.model_dump(mode="json") for trial in sweep.trials}
    groups = {trial.name: tune.PlacementGroupFactory(bundles_of(trial.config, gpus)) for trial in sweep.trials}
    settings = sweep.base.tune

    def run_trial(point: dict[str, Any]) -> None:
        _run_trial(raws[point["trial"]], point, settings)

    return tune.with_resources(run_trial, lambda point: groups[point["trial"]])


def _run_trial(raw: dict[str, Any], point: Mapping[str, Any], settings: TuneGroup) -> None:
    # Read by Tune in this process: the run has to close its actors before the next trial is let in.
    os.environ["TUNE_FUNCTION_THREAD_TIMEOUT_S"] = str(int(WAIT_S))
    plan = check(raw, f"trial {point['trial']}", has_room=True)
    reporter = _Reporter(settings, plan.num_rounds)
    try:
        execute(plan, on_start=reporter.start, on_round=reporter.round, wait_s=WAIT_S)
    except Stopped:
        sys.exit(0)  # how Tune itself ends the thread of a trial
    reporter.finish()


class _Reporter:
    """Tells Tune about rounds. The last one is told when the run is complete, so that no scheduler can stop it there."""

    def __init__(self, settings: TuneGroup, num_rounds: int):
        self._settings, self._num_rounds = settings, num_rounds
        self._best = -math.inf
        self._last: dict[str, Any] | None = None

    def start(self, folder: Path, first_round: int, num_rounds: int) -> None:
        """What a resumed trial did before is told again: this sweep's scheduler has not seen it."""
        for row in progress_rows(folder):
            if int(row["round"]) < first_round:
                metrics = {name: float(value) for name, value in row.items() if value and name != "round"}
                self._report(int(row["round"]), metrics)

    def round(self, record: RoundRecord) -> None:
        self._report(record.round_index, record.metrics)

    def finish(self) -> None:
        if self._last is not None:
            tune.report(self._last)

    def _report(self, round_index: int, metrics: Mapping[str, float]) -> None:
        known = {name: float(value) for name, value in metrics.items()}
        if "server/accuracy" in known:
            accuracy = known["server/accuracy"]
            self._best = max(self._best, accuracy)
            known |= dict.fromkeys(SUMMARY_METRICS, accuracy) | {"best_accuracy": self._best}
        if self._settings.metric not in known:
            return
        if math.isnan(known[self._settings.metric]):  # the worst there is: NaN has no place in a ranking
            known[self._settings.metric] = -math.inf if self._settings.mode == "max" else math.inf
        result = {"training_iteration": round_index + 1, **known}
        if round_index + 1 == self._num_rounds:
            self._last = result
            return
        try:
            tune.report(result)
        except SystemExit as error:
            raise Stopped from error


# --- the sweep, in the driver -----------------------------------------------------------------------------------------


def run_sweep(sweep: Sweep, say: Callable[[str], None]) -> dict[str, Outcome]:
    """Run what is unfinished of a sweep, and return what became of every trial.

    Args:
      say: prints one line.
    Raises:
      ConfigError, RunExists: it cannot start, and nothing has been started.
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
        waiting = [trial for trial in sweep.trials if not before[trial.name].is_finished]
        if waiting:
            with ray_session():
                gpus = ray.cluster_resources().get("GPU", 0.0)
                check_room(sweep, _nodes(), gpus)
                say(_opening(sweep, len(waiting)))
                _tune(sweep, waiting, gpus, _Watch(sweep, waiting, say))
        return {trial.name: outcome(sweep, trial) for trial in sweep.trials}
    finally:
        lock.release()


def _opening(sweep: Sweep, num_waiting: int) -> str:
    count = len(sweep.trials)
    left = f"{num_waiting} of {count} trials to run" if num_waiting < count else f"{count} trials"
    return f"{left} in {sweep.folder}"


def _tune(sweep: Sweep, waiting: Sequence[SweepTrial], gpus: float, watch: _Watch) -> None:
    settings = sweep.base.tune
    told = settings.scheduler in ("asha", "median")
    trials = (
        sweep.trials if told else waiting
    )  # finished ones only tell their rounds again, for the scheduler to compare
    points = [{"trial": trial.name} for trial in trials]
    work = sweep.folder / ".tune"
    shutil.rmtree(work, ignore_errors=True)
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    with _environment(QUIET), _terminable():
        tuner = tune.Tuner(
            _trainable(sweep, gpus),
            param_space={"trial": tune.choice([trial.name for trial in trials])},
            tune_config=tune.TuneConfig(
                metric=settings.metric,
                mode=settings.mode,
                num_samples=len(points),
                search_alg=BasicVariantGenerator(
                    points_to_evaluate=points, max_concurrent=settings.max_concurrent or 0
                ),
                scheduler=_scheduler(sweep),
                reuse_actors=True,  # a process that has imported PyTorch serves many trials
                trial_name_creator=lambda trial: trial.trial_id,
                trial_dirname_creator=lambda trial: trial.trial_id,
            ),
            run_config=tune.RunConfig(storage_path=str(work), name="state", verbose=0, callbacks=[watch]),
        )
        tuner.fit()
    shutil.rmtree(work, ignore_errors=True)


def _scheduler(sweep: Sweep) -> Any:
    settings = sweep.base.tune
    if settings.scheduler == "asha":
        return ASHAScheduler(
            max_t=max(trial.num_rounds for trial in sweep.trials),
            grace_period=settings.grace_rounds,
            reduction_factor=settings.reduction_factor,
            stop_last_trials=False,
        )
    if settings.scheduler == "median":
        # No yielding to others while there is too little to compare with: a pause costs rounds.
        return MedianStoppingRule(
            time_attr="training_iteration", grace_period=settings.grace_rounds, min_time_slice=sys.maxsize
        )
    return FIFOScheduler()


class _Watch(tune.Callback):
    """Plain lines for a sweep: one for each finished trial, and now and then how far the others are."""

    #: Seconds between lines about progress, and how many of these at most.
    every_s, most = 30.0, 40

    def __init__(self, sweep: Sweep, waiting: Sequence[SweepTrial], say: Callable[[str], None]):
        self._sweep, self._say = sweep, say
        self._trials = {trial.name: trial for trial in waiting}
        self._rounds = dict.fromkeys(self._trials, 0)
        self._began = self._spoke = time.monotonic()
        self._done = 0
        self._interval = self.every_s

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune writes its settings to a file that nobody here reads back

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        if trial.config["trial"] in self._rounds:
            self._rounds[trial.config["trial"]] = result["training_iteration"]

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        name = trial.config["trial"]
        if name not in self._trials:
            return
        folder = self._sweep.folder / name
        if not (folder / "COMPLETED").exists():
            last = trial.last_result or {}
            metric = self._sweep.base.tune.metric
            (folder / "STOPPED").write_text(
                f"stopped by {self._sweep.base.tune.scheduler} after {last.get('training_iteration', 0)} of "
                f"{self._trials[name].num_rounds} rounds, {metric} {last.get(metric, math.nan):.4f}\n"
            )
        self._finished(name)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        name = trial.config["trial"]
        if name in self._trials:
            mark = self._sweep.folder / name / "FAILED"
            if not mark.exists():  # its process died before it could say anything
                mark.parent.mkdir(exist_ok=True)
                mark.write_text(f"{_last_line(trial)}\n")
            self._finished(name)

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        now = time.monotonic()
        if now - self._spoke < self._interval:
            return
        self._spoke = now
        self._interval *= 1.0 if now - self._began < self.most / 2 * self.every_s else 1.1
        done = sum(self._rounds.values()) / sum(trial.num_rounds for trial in self._trials.values())
        running = [trial for trial in trials if trial.status == "RUNNING"]
        text = f"{len(running)} trials running" if running else "waiting for room in the Ray cluster"
        self._say(f"  {self._done}/{len(self._trials)} done, {100 * done:.0f} % of all rounds, {text}")

    def _finished(self, name: str) -> None:
        self._done += 1
        trial = self._trials[name]
        self._rounds[name] = trial.num_rounds
        self._spoke = time.monotonic()
        found = outcome(self._sweep, trial)
        score = "" if found.score is None else f"  {self._sweep.base.tune.metric} {found.score:.4f}"
        count = f"{self._done:>{len(str(len(self._trials)))}}/{len(self._trials)}"
        told = f"  {found.status}: {found.message}" if found.message else f"{score}  {found.seconds or 0:.1f} s"
        self._say(f"{count}  {name}{told}")


def _last_line(trial: Any) -> str:
    """What Tune knows of a trial's end, in a line."""
    error = trial.get_pickled_error() if hasattr(trial, "get_pickled_error") else None
    lines = str(error or "its process ended without a word").strip().splitlines()
    return lines[-1] if lines else type(error).__name__


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


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends a sweep as Ctrl-C does: Tune, which listens for SIGUSR1, too, ends the trials and returns."""
    try:
        before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGUSR1))
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
