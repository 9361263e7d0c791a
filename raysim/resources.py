"""How many trainers there are, and what each of them gets."""

from __future__ import annotations

import os
from collections.abc import Sequence

from raysim.config import Config
from raysim.core.errors import ConfigError, Fault
from raysim.engine.plan import fitting


def check_resources(config: Config) -> list[Fault]:
    """More than this machine has is refused here; what a cluster has is known only once connected."""
    resources = config.resources
    cores = os.cpu_count() or 1
    if resources.backend == "serial" or os.environ.get("RAY_ADDRESS") or resources.trainers == "auto":
        return []
    per_trainer = 1.0 if resources.cpus_per_trainer == "auto" else resources.cpus_per_trainer
    if resources.trainers < 1:
        return [Fault("resources.trainers", f"must be >= 1 or auto, got {resources.trainers}")]
    if resources.trainers * per_trainer > cores:
        return [
            Fault(
                "resources.trainers",
                f"{resources.trainers} trainers with {per_trainer:g} CPUs each need {resources.trainers * per_trainer:g}, "
                f"this machine has {cores}; lower resources.trainers or resources.cpus_per_trainer, or set auto",
            )
        ]
    return []


def resolve_resources(
    config: Config, cpus: float, gpus: float, rooms: Sequence[tuple[float, float]] = ()
) -> tuple[int, float, float]:
    """(trainers, CPUs per trainer, GPUs per trainer) on so many CPUs and GPUs; without a GPU everything runs on CPUs.

    `auto`: one CPU a trainer, as many trainers as CPUs; with GPUs at most four trainers on each.

    Args:
      rooms: (CPUs, GPUs) of each node, or bundle, where there are several: no trainer lies on two.
    Raises:
      ConfigError: more was asked for than there is.
    """
    wanted = config.resources
    per_cpu = 1.0 if wanted.cpus_per_trainer == "auto" else float(wanted.cpus_per_trainer)
    asked_gpu = wanted.gpus_per_trainer
    share = 0.0
    if gpus and asked_gpu:
        share = 0.25 if asked_gpu == "auto" else float(asked_gpu)
    places = [room for room in rooms or [(cpus, gpus)] if room[1] or not share]
    fits = [fitting(room_cpus, room_gpus, per_cpu, share) for room_cpus, room_gpus in places]
    trainers = max(1, sum(fits)) if wanted.trainers == "auto" else wanted.trainers
    per_gpu = 0.0
    if gpus and asked_gpu == "auto":
        each = -(-trainers // int(gpus)) if gpus >= 1 else trainers / gpus
        if wanted.trainers == "auto":  # the fullest GPU decides
            each = max([each, *(-(-n // int(room[1])) for n, room in zip(fits, places, strict=True) if room[1] >= 1)])
        per_gpu = 1.0 if each <= 1 else int(1e4 / each) / 1e4
    elif gpus:
        per_gpu = float(asked_gpu)
    faults = []
    if trainers * per_cpu > cpus + 1e-9:
        faults.append(
            Fault(
                "resources.trainers",
                f"{trainers} trainers with {per_cpu:g} CPUs each need more than the {cpus:g} CPUs that Ray offers this job",
            )
        )
    if trainers * per_gpu > gpus + 1e-9:
        faults.append(
            Fault(
                "resources.gpus_per_trainer",
                f"{trainers} trainers with {per_gpu:g} GPUs each need more than the {gpus:g} GPUs that Ray offers this job",
            )
        )
    if faults:
        raise ConfigError(faults, "the resources")
    return trainers, per_cpu, per_gpu
