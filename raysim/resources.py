"""How many trainers there are, and what each of them gets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from raysim.config import Config
from raysim.core.errors import ConfigError, Fault
from raysim.engine.plan import fitting


class Resources(NamedTuple):
    """What a run takes: trainer processes, with CPUs and a fraction of a GPU each."""

    trainers: int
    cpus_per_trainer: float
    gpus_per_trainer: float


def check_resources(config: Config) -> list[Fault]:
    """Whether this machine has what a run asks for; what a cluster has is known only once connected."""
    wanted, cores = config.resources, os.cpu_count() or 1
    if wanted.backend == "serial" or os.environ.get("RAY_ADDRESS") or wanted.trainers == "auto":
        return []
    total = wanted.trainers * wanted.cpus
    if total <= cores:
        return []
    need = f"{wanted.trainers} trainers with {wanted.cpus:g} CPUs each need {total:g}, this machine has {cores}"
    remedy = "lower resources.trainers or resources.cpus_per_trainer, or set auto"
    return [Fault("resources.trainers", f"{need}; {remedy}")]


def resolve_resources(config: Config, cpus: float, gpus: float, rooms: Sequence[tuple[float, float]] = ()) -> Resources:
    """What a run takes of so many CPUs and GPUs; without a GPU everything runs on CPUs.

    `auto`: one CPU a trainer, as many trainers as CPUs; with GPUs at most four trainers on each.

    Args:
      rooms: (CPUs, GPUs) of each node, or bundle, where there are several: no trainer lies on two.
    Raises:
      ConfigError: more was asked for than there is.
    """
    wanted = config.resources
    needs_gpu = bool(gpus and wanted.gpus_per_trainer)
    least_share = 0.25 if wanted.gpus_per_trainer == "auto" else wanted.gpus_per_trainer
    share = least_share if needs_gpu else 0.0
    places = [room for room in rooms or [(cpus, gpus)] if room[1] or not share]
    fits = [fitting(room_cpus, room_gpus, wanted.cpus, share) for room_cpus, room_gpus in places]
    trainers = max(1, sum(fits)) if wanted.trainers == "auto" else wanted.trainers
    if needs_gpu and wanted.gpus_per_trainer == "auto":
        on_each = -(-trainers // int(gpus)) if gpus >= 1 else trainers / gpus
        if wanted.trainers == "auto":  # the fullest GPU decides
            counts = [-(-count // int(room[1])) for count, room in zip(fits, places, strict=True) if room[1] >= 1]
            on_each = max([on_each, *counts])
        share = 1.0 if on_each <= 1 else int(1e4 / on_each) / 1e4
    offers = {
        "resources.trainers": ("CPUs", wanted.cpus, cpus),
        "resources.gpus_per_trainer": ("GPUs", share, gpus),
    }
    faults = [
        Fault(
            key,
            f"{trainers} trainers with {each:g} {kind} each need more than the {there:g} {kind} "
            "that Ray offers this job",
        )
        for key, (kind, each, there) in offers.items()
        if trainers * each > there + 1e-9
    ]
    if faults:
        raise ConfigError(faults, "the resources")
    return Resources(trainers, wanted.cpus, share)
