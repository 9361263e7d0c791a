"""Number of trainers and resources of each trainer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from raysim.base.errors import Fault, refuse
from raysim.config import Config
from raysim.engine.schedule import fitting

#: Least part of a GPU for a trainer if this part and the number of trainers are auto, and in a trial of a sweep.
AUTO_GPU = 0.25

#: Names that cannot be custom resources.
RESERVED = ("CPU", "GPU", "memory", "object_store_memory")


class Resources(NamedTuple):
    """Resources of a run: trainer processes, with CPUs and a fraction of a GPU each."""

    trainers: int
    cpus_per_trainer: float
    gpus_per_trainer: float


def check_resources(config: Config) -> list[Fault]:
    """Check a run's resources on this machine; a cluster's resources are known only after connecting."""
    wanted, cores, faults = config.resources, os.cpu_count() or 1, []
    if wanted.gpus_per_trainer != "auto" and wanted.gpus_per_trainer > 1 and wanted.gpus_per_trainer % 1:
        text = f"{wanted.gpus_per_trainer:g} is neither a fraction of a GPU nor a whole number of GPUs; round it"
        faults.append(Fault("resources.gpus_per_trainer", text))
    if wanted.device not in ("auto", "cpu") and wanted.gpus_per_trainer == 0:
        text = f"{wanted.device} has no part in a run with gpus_per_trainer 0; set auto, or gpus_per_trainer to auto"
        faults.append(Fault("resources.device", text))
    if taken := [name for name in wanted.custom if name in RESERVED or name.startswith("node:")]:
        text = f"{', '.join(taken)} is Ray's own; set resources.cpus_per_trainer or gpus_per_trainer"
        faults.append(Fault("resources.custom", text))
    if config.is_serial() or os.environ.get("RAY_ADDRESS") or wanted.trainers == "auto":
        return faults
    total = wanted.least * wanted.cpus
    if total > cores:
        need = f"{wanted.least} trainers with {wanted.cpus:g} CPUs each need {total:g}, the machine has {cores}"
        remedy = "lower resources.trainers or resources.cpus_per_trainer, or set auto"
        faults.append(Fault("resources.trainers", f"{need}; {remedy}"))
    return faults


def resolve_resources(config: Config, rooms: Sequence[Mapping[str, float]], *, may_grow: bool = False) -> Resources:
    """Return the resources with which a run starts; without a GPU, trainers use CPUs. docs/placement.md has examples.

    `auto`: one CPU a trainer, as many trainers as CPUs; with GPUs at most four trainers on each GPU, and for each
    trainer the largest part with which all trainers fit.

    Args:
      rooms: resources, by Ray's names, of each node or bundle; a trainer uses a single room.
      may_grow: Ray's autoscaler may start nodes for resources that do not fit, and reports nodes that it cannot start.
    Raises:
      ConfigError: the run needs more resources than there are.
    """
    wanted = config.resources
    if not may_grow:
        refuse([fault for name in wanted.custom if (fault := _missing(name, rooms))], "the resources")
    named = [room for room in rooms if all(room.get(name, 0.0) >= each for name, each in wanted.custom.items())]
    gpus = sum(room.get("GPU", 0.0) for room in named)
    is_auto = wanted.gpus_per_trainer == "auto"
    gpu = gpu_share(config, gpus, may_grow=may_grow)
    if not gpu and wanted.device not in ("auto", "cpu"):
        remedy = "start its nodes with `ray start --num-gpus`, or set auto"
        refuse(
            [Fault("resources.device", f"{wanted.device} was asked for, and no node has a GPU; {remedy}")],
            "the resources",
        )
    places = [room for room in named if room.get("GPU") or not gpu]

    def fits(gpu: float) -> int:
        return sum(fitting(room, {"CPU": wanted.cpus, "GPU": gpu, **wanted.custom}) for room in places)

    trainers = int(min(max(wanted.least, fits(gpu)), wanted.most))
    if gpu and is_auto:
        parts = [1.0 if count == 1 else int(1e4 / count) / 1e4 for count in range(1, trainers + 1)]
        smallest = gpu if may_grow else parts[-1] if gpus >= 1 else int(1e4 * gpus / trainers) / 1e4
        gpu = next((part for part in parts if fits(part) >= trainers), smallest)
    taken = Resources(trainers, wanted.cpus, gpu)
    if not may_grow and fits(gpu) < trainers:
        text = f"{trainers} trainers with {resources_text(share_of(taken, config))} each were asked for"
        listed = "; ".join(resources_text(named_resources(place)) for place in places)
        text += f", and the nodes have room for {fits(gpu)} ({listed}); lower it or the share of each, or set auto"
        refuse([Fault("resources.trainers", text)], "the resources")
    return taken


def gpu_share(config: Config, gpus: float, *, may_grow: bool = False) -> float:
    """Return the part of a GPU, or the number of GPUs, of a trainer; with `auto`, the least part.

    Args:
      gpus: number of GPUs; if 0, trainers use CPUs, unless nodes may join and the run sets a number of GPUs.
    """
    wanted = config.resources
    if wanted.device == "cpu" or (not gpus and not (may_grow and wanted.gpus_per_trainer != "auto")):
        return 0.0
    return AUTO_GPU if wanted.gpus_per_trainer == "auto" else float(wanted.gpus_per_trainer)


def share_of(taken: Resources, config: Config) -> dict[str, float]:
    """Return the resources of each trainer, by Ray's names."""
    gpu = {"GPU": taken.gpus_per_trainer} if taken.gpus_per_trainer else {}
    return {"CPU": taken.cpus_per_trainer, **gpu, **config.resources.custom}


def named_resources(room: Mapping[str, float]) -> dict[str, float]:
    """Return a node's CPUs, GPUs and custom resources, without Ray's internal resources."""
    names = (name for name in room if name not in ("memory", "object_store_memory") and not name.startswith("node:"))
    return {name: room[name] for name in names if room[name]}


def _missing(name: str, rooms: Sequence[Mapping[str, float]]) -> Fault | None:
    """Return a fault for a resource that no node has, with the known resources."""
    if any(room.get(name) for room in rooms):
        return None
    names = {each for room in rooms for each in named_resources(room) if each not in RESERVED}
    there = f"there are {', '.join(sorted(names))}" if names else "start the nodes with `ray start --resources`"
    return Fault("resources.custom", f"no node has {name!r}; {there}")


def resources_text(share: Mapping[str, float]) -> str:
    """Return resources as a message shows them: "{CPU: 1, GPU: 0.25}"."""
    return "{" + ", ".join(f"{name}: {each:g}" for name, each in share.items()) + "}"
