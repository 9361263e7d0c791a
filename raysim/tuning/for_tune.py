"""Resources of trials, schedulers and callbacks for Ray Tune, from the configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ray import tune
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, MedianStoppingRule, TrialScheduler

from raysim.base.errors import ConfigError, Fault, refuse
from raysim.base.settings import Spec
from raysim.base.user_places import words_of
from raysim.config import Config
from raysim.engine.ray.room import autoscales, find_room
from raysim.engine.ray.session import offered
from raysim.engine.schedule import fitting
from raysim.plan.find import find
from raysim.plan.resources import gpu_share, named_resources, resources_text
from raysim.tuning.plan import Sweep

Bundle = dict[str, float]

#: Callbacks that are named without a module.
NONE: dict[str, Callable[..., object]] = {}


def bundles_of(config: Config, gpus: float, *, may_grow: bool = False) -> list[Bundle]:
    """Return the bundles of a trial's placement group: first the driver's, then one for each trainer.

    A serial trial is one process with the resources of a trainer. On Ray the driver and the server need no CPU of their
    own (an empty first bundle). With `{min, max}`, a trial has the least number of trainers, because more trials use a
    sweep's cores better.

    Args:
      gpus: number of GPUs of the cluster; with 0, trials run on CPUs.
    """
    wanted, share = config.resources, gpu_share(config, gpus, may_grow=may_grow)
    trainer = {"CPU": wanted.cpus, **({"GPU": share} if share else {}), **wanted.custom}
    return [trainer] if config.is_serial(in_sweep=True) else [{}, *([trainer] * wanted.least)]


def check_room(sweep: Sweep, nodes: Sequence[Bundle]) -> None:
    """Check that every trial fits on the empty nodes; Tune would wait forever otherwise.

    Raises:
      ConfigError: names the bundle that has no place.
    """
    there = "; ".join(resources_text(node) for node in nodes)
    first: dict[str, str] = {}  # fault -> first trial with the fault
    for trial in sweep.checked:
        if bundles := _unplaced(trial.config, nodes):
            of = f", one of {len(bundles)} of a trial," if len(bundles) > 1 else ""
            text = f"bundle {resources_text(bundles[0])}{of} does not fit into Ray, whose nodes have {there}"
            first.setdefault(f"{text}; lower resources.trainers or the share of each, or set auto", trial.name)
    refuse((Fault(f"trial {name}", text) for text, name in first.items()), f"the resources of {sweep.folder.name}")


def _unplaced(config: Config, nodes: Sequence[Bundle], *, may_grow: bool = False) -> list[Bundle]:
    """Return the bundles of a trial, which are all equal, if they do not fit on the empty nodes; else none."""
    gpus = sum(node.get("GPU", 0.0) for node in nodes)
    bundles = [bundle for bundle in bundles_of(config, gpus, may_grow=may_grow) if bundle]
    return bundles if sum(fitting(node, bundles[0]) for node in nodes) < len(bundles) else []


def ray_nodes() -> list[Bundle]:
    """Return CPUs, GPUs and custom resources of each node of the running Ray."""
    return [named_resources(node) for node in offered()]


def nodes_with_room(sweep: Sweep, say: Callable[[str], None]) -> list[Bundle]:
    """Wait until every trial fits, while Ray's autoscaler starts nodes.

    Raises:
      ConfigError: names the bundle that has no place. NoRoom: nodes did not come in time.
    """
    if not autoscales():
        check_room(sweep, ray_nodes())
        return ray_nodes()
    for trial in sweep.checked:
        if bundles := _unplaced(trial.config, ray_nodes(), may_grow=True):
            count, wait_s = len(bundles), trial.config.resources.wait_s
            find_room(bundles[0], count, least=count, wait_s=wait_s, say=say, may_grow=True)
    return ray_nodes()


def make_scheduler(sweep: Sweep) -> TrialScheduler:
    """Return Tune's scheduler of the sweep; metric and mode come from Tune's configuration."""
    settings = sweep.base.tune
    if settings.scheduler == "asha":
        return ASHAScheduler(
            time_attr="training_iteration",
            max_t=max(trial.num_rounds for trial in sweep.checked),
            grace_period=settings.grace_rounds,
            stop_last_trials=False,
        )
    if settings.scheduler == "median":
        # Infinite: a trial never pauses while there are few trials to compare with, since a pause costs rounds. Tune's
        # annotation is int, but Tune only compares.
        return MedianStoppingRule(
            time_attr="training_iteration",
            grace_period=settings.grace_rounds,
            min_time_slice=math.inf,  # type: ignore[arg-type]
        )
    return FIFOScheduler()


def make_callbacks(specs: Sequence[Spec], made: Sequence[object] = ()) -> list[tune.Callback]:
    """Return Ray Tune's callbacks, such as MLflow's, and the user's.

    Args:
      made: callback objects, which are returned as well.
    Raises:
      ConfigError: unknown name, or an object that is not a callback.
    """
    callbacks: list[object] = [*made]
    for index, spec in enumerate(specs):
        try:
            callbacks.append(find(spec.name, NONE, "callback")(**spec.options))
        except Exception as error:  # a callback class of a package or the user may raise anything
            raise ConfigError([Fault(f"tune.callbacks[{index}]", words_of(error))], "the sweep") from error
    others = [type(each).__name__ for each in callbacks if not isinstance(each, tune.Callback)]
    refuse((Fault("callbacks", f"must be a ray.tune.Callback, got type {name}") for name in others), "the sweep")
    return [each for each in callbacks if isinstance(each, tune.Callback)]
