"""Room for a run's trainers, the actors in it, and the pool that its server works with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raysim.core.errors import RaysimError
from raysim.engine.plan import fitting
from raysim.engine.ray.pool import RayPool
from raysim.engine.ray.session import Actor, placements
from raysim.engine.ray.slots import TrainerActor
from raysim.engine.trainer import Trainer


@dataclass(frozen=True)
class TrainerStarter:
    """How and where trainers are started: the first ones in the placement group, later ones wherever there is room."""

    make_trainer: Callable[[], Trainer]
    cpus: float
    gpus: float
    group: PlacementGroup
    num_reserved: int
    placement: str

    def __call__(self, index: int) -> Actor:
        elsewhere = "SPREAD" if self.placement == "spread" else "DEFAULT"
        place = PlacementGroupSchedulingStrategy(self.group) if index < self.num_reserved else elsewhere
        actor = ray.remote(TrainerActor).options(num_cpus=self.cpus, num_gpus=self.gpus, scheduling_strategy=place)
        return actor.remote(self.make_trainer, self.gpus)

    def capacity(self) -> int:
        """Trainers that all nodes of the cluster together have room for."""
        return sum(fitting(cpus, gpus, self.cpus, self.gpus) for cpus, gpus in placements())


@contextmanager
def pool_of_trainers(
    make_trainer: Callable[[], Trainer],
    *,
    num_trainers: int,
    cpus_per_trainer: float,
    gpus_per_trainer: float,
    keeps_memory: bool,
    wait_s: float = 30.0,
    placement: str = "pack",
    is_growing: bool = False,
) -> Iterator[RayPool]:
    """The trainers of a run, which build themselves while this process builds its server, and end with the block.

    The server stays with its pool in the process that calls this, the driver's: a run survives the loss of any other
    node, and one process less has to load PyTorch.

    Args:
      wait_s: seconds to wait for room for all trainers before giving up.
      placement: "pack" trainers on few nodes, or "spread" them over many.
      is_growing: start more trainers on nodes that join; not in a placement group of somebody else (a Tune trial).
    Raises:
      RaysimError: the resources are not free within `wait_s` seconds.
    """
    bundle = {"CPU": cpus_per_trainer, **({"GPU": gpus_per_trainer} if gpus_per_trainer else {})}
    current = ray.util.get_current_placement_group()
    group = current or _reserve([bundle] * num_trainers, placement, wait_s)
    starter = TrainerStarter(make_trainer, cpus_per_trainer, gpus_per_trainer, group, num_trainers, placement)
    capacity = starter.capacity if is_growing and current is None else None
    pool = RayPool(starter, num_trainers, keeps_memory, capacity, gpus_per_trainer)
    try:
        yield pool
    finally:
        pool.slots.close()
        if current is None:
            remove_placement_group(group)


def _reserve(bundles: list[dict[str, float]], placement: str, wait_s: float) -> PlacementGroup:
    """A placement group for the trainers: room for all of them, or a clear error instead of a silent wait.

    Raises:
      RaysimError: the resources are not free within `wait_s` seconds.
    """
    group: PlacementGroup = ray.util.placement_group(bundles, strategy=placement.upper())
    if not group.wait(wait_s):
        remove_placement_group(group)
        free = {name: amount for name, amount in ray.available_resources().items() if name in ("CPU", "GPU")}
        raise RaysimError(
            f"no room within {wait_s:g} s for {len(bundles)} trainers with {bundles[0]} each; free now: {free}",
            "the Ray cluster",
            "lower resources.trainers or the share of each, or wait until other jobs have ended",
        )
    return group
