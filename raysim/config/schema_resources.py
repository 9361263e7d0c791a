"""The schemas of `resources`, where a run computes, and of `time`, the simulated time of a run."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from raysim.base.settings import Settings, Spec
from raysim.config.keys import Group, key, written_as


def _is_span(span: dict[str, int]) -> dict[str, int]:
    if missing := {"min", "max"} - set(span):
        raise ValueError(f"has no {' and no '.join(sorted(missing))}; write {{min: 4, max: 40}}")
    if span["min"] > span["max"]:
        raise ValueError(f"has min {span['min']} above max {span['max']}; exchange them")
    return span


AtLeastOne = Annotated[int, Field(ge=1)]


class ResourcesGroup(Group):
    """A serial run ignores Ray's keys silently, so that a file works with both backends."""

    backend: Literal["auto", "ray", "serial"] = key(
        "auto",
        "serial: in one process, without Ray; ray: a server and trainers on Ray; auto: serial if one trainer would do all "
        "the work, otherwise ray; results have the same bits with every value",
    )
    device: Literal["auto", "cpu", "cuda", "xpu", "mps"] = key(
        "auto",
        "device that trains; auto: the machine's accelerator, or the CPU if there is none or only Apple's; "
        "cuda: also AMD's GPUs; mps: Apple's GPUs, not for methods that compute in float64",
    )
    trainers: (
        AtLeastOne | Literal["auto"] | Annotated[dict[Literal["min", "max"], AtLeastOne], AfterValidator(_is_span)]
    ) = key(
        "auto",
        "number of trainer processes; {min: 4, max: 40}: a run begins with all trainers that fit, 4 to 40, and "
        "adds trainers when nodes join",
    )
    cpus_per_trainer: Annotated[float, Field(gt=0, le=4096)] | Literal["auto"] = key(
        "auto", "number of cores and threads of a trainer, also in a serial run; auto: 1"
    )
    gpus_per_trainer: Annotated[float, Field(ge=0)] | Literal["auto"] = key(
        "auto", "number of GPUs of a trainer; below 1: a share of one GPU"
    )
    custom: dict[str, Annotated[float, Field(gt=0)]] = key(
        {},
        "further resources of a trainer, by Ray's names: {mig_1g_10gb: 1}, or for a type of GPU {'accelerator_type:A100': 0.001}",
    )
    client_timeout_s: Annotated[float, Field(gt=0)] | Literal["auto"] = key(
        "auto",
        "seconds without an answer after which a trainer on Ray is ended and the trainer's clients go to the remaining "
        "trainers; "
        "auto: 20 times the longest time to an answer so far, and at least 60 s; no limit if local.compile is set; a "
        "trainer that uses no CPU time is ended after 60 s",
    )
    wait_s: float = key(
        3600.0,
        "seconds to wait for room on a busy cluster, for an autoscaler's nodes, or for a lost cluster, before the run fails",
        gt=0,
    )
    restarts: int = key(
        3,
        "how often a run resumes automatically from the last checkpoint after losing the server, the server's node or the "
        "connection to the cluster; in a sweep, how often each trial resumes after losing the trial's process or node",
        ge=0,
    )

    @property
    def least(self) -> int:
        """Trainers without which a run does not begin; auto is one."""
        if isinstance(self.trainers, dict):
            return self.trainers["min"]
        return 1 if self.trainers == "auto" else self.trainers

    @property
    def most(self) -> float:
        """Largest number of trainers of a run; auto is limited by the resources."""
        if isinstance(self.trainers, dict):
            return self.trainers["max"]
        return math.inf if self.trainers == "auto" else self.trainers

    @property
    def cpus(self) -> float:
        """Cores of a trainer; auto is one."""
        return 1.0 if self.cpus_per_trainer == "auto" else self.cpus_per_trainer


def _are_hours(shares: list[float]) -> list[float]:
    if shares and (len(shares) != 24 or max(shares) < 0.01):
        raise ValueError(f"must be 24 numbers, the largest at least 0.01, got {len(shares)} numbers")
    return shares


#: A number for all clients, or {distribution of scipy.stats: {option: value}} for a draw of each client.
Speed = Annotated[float, Field(ge=0, allow_inf_nan=False)] | Annotated[Spec, written_as(Settings)]


class TimeGroup(Group):
    """Simulated time; affects results only through the clients that a deadline, over-selection or a method chooses."""

    step_s: Speed = key(
        1.0, "seconds of a local step: a number, or a distribution of scipy.stats such as {lognorm: {s: 1, scale: 0.5}}"
    )
    down_mbps: Speed | None = key(
        None, "megabits per second from server to client, in the form of step_s; null: no limit"
    )
    up_mbps: Speed | None = key(
        None, "megabits per second from client to server, in the form of step_s; null: no limit"
    )
    latency_s: Speed = key(0.0, "seconds that a message takes in addition to the transfer, in the form of step_s")
    traces: str | None = key(
        None,
        "CSV file with a column client (0, 1, ...) and a column for each key among step_s, down_mbps, up_mbps and "
        "latency_s that the file replaces",
    )
    available: Annotated[list[Annotated[float, Field(ge=0, le=1)]], AfterValidator(_are_hours)] = key(
        [], "share of the clients that can begin work, for each of the 24 hours of a day; empty: all clients, always"
    )
    deadline_s: float | None = key(None, "seconds after which a round ends; later updates are lost", gt=0)
    over_selection: float = key(
        1.0,
        "number of clients that begin a round, as a multiple of the cohort size; the round ends when the first updates "
        "fill the cohort, and later updates are lost",
        ge=1,
    )
