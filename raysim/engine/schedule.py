"""Who trains when: cohorts and client blocks from the configuration and the data sizes alone, tasks from the trainers."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np

from raysim.core.method import Crowd, Method, Sampling
from raysim.core.seeding import derive_seed, numpy_generator
from raysim.core.stack import Stack
from raysim.training.local import LocalSettings, num_local_steps

T = TypeVar("T")

#: A cohort is cut into about this many client blocks: fine enough to balance, coarse enough to cost nothing.
BLOCKS_PER_COHORT = 32
#: Blocks are grouped into about this many tasks a trainer and round: two were measured 6 % faster than four with a
#: hundred tiny clients, and a task is what a killed worker costs.
TASKS_PER_TRAINER = 2


@dataclass(frozen=True)
class ClientBlock:
    """Clients of a cohort that are trained together, in order. work: optimiser steps."""

    index: int
    clients: tuple[int, ...]
    work: int


#: For each trainer its tasks, in order; a task is some client blocks.
Queues = Sequence[Sequence[Sequence[ClientBlock]]]


@dataclass(frozen=True)
class Phase:
    """Consecutive rounds with the same methods and the same kind of local work.

    Attributes:
      sampling: of cohorts, see `choose_cohort`.
      dropout: probability that a chosen client never reports.
      stragglers: chance that a client does only a share of its work, uniform in [straggler_work, 1).
    """

    methods: tuple[Method, ...]
    settings: LocalSettings
    rounds: int
    cohort_size: int
    dropout: float = 0.0
    stragglers: float = 0.0
    straggler_work: float = 1.0
    sampling: Sampling = "fixed"

    @cached_property
    def stack(self) -> Stack:
        return Stack(self.methods)

    def share_of(self, client: int, seed: int, round_index: int) -> float:
        """Return a client's share of its work in a round: 1, or for a straggler uniform in [straggler_work, 1)."""
        if self.stragglers == 0:
            return 1.0
        rng = numpy_generator(derive_seed(seed, "straggler", round_index, client))
        is_straggler, share = rng.random() < self.stragglers, rng.uniform(self.straggler_work, 1.0)
        return float(share) if is_straggler else 1.0

    def num_steps(self, client: int, num_examples: int, skip_single: bool, seed: int, round_index: int) -> int:
        """Optimiser steps of a client in a round."""
        share = self.share_of(client, seed, round_index)
        return num_local_steps(num_examples, self.settings, skip_single=skip_single, share=share)


def fitting(room: Mapping[str, float], share: Mapping[str, float]) -> int:
    """How many trainers with a share of each resource fit on a node, or in a bundle, that has so much of each.

    A share of a GPU lies on one GPU: 0.4 fits twice.
    """

    def count(name: str, each: float) -> int:
        there = room.get(name, 0.0)
        if name == "GPU" and each < 1 <= there:
            return int(there) * int(1 / each + 1e-9)
        return int(there / each + 1e-9)

    return min(count(name, each) for name, each in share.items() if each)


def choose_cohort(
    population: int, size: int, *, seed: int, round_index: int, sampling: Sampling = "fixed"
) -> np.ndarray:
    """Ids of this round's clients, ascending: the same for every method and machine. (size,) int64.

    With "poisson" each client takes part with the chance size / population, independently of the others: the number of
    clients varies and may be 0.
    """
    rng = numpy_generator(derive_seed(seed, "cohort", round_index))
    if sampling == "poisson":  # that many of them, each set as likely: the same distribution as a draw for each client
        size = int(rng.binomial(population, size / population))
    return np.sort(rng.choice(population, size=size, replace=False)).astype(np.int64)


def crowd_of(method: str, population: int, seed: int) -> Crowd:
    """All clients, for a method that draws a fixed subset; equal at the server and all trainers. seed: of the run."""
    return Crowd(population, derive_seed(seed, f"crowd/{method}"))


def without_dropouts(clients: np.ndarray, dropout: float, *, seed: int, round_index: int) -> np.ndarray:
    """Return the clients of a cohort without dropouts, ascending; at least one.

    Args:
      dropout: chance of each client, in [0, 1); drawn per round and client, so another cohort changes nobody's fate.
    """
    if dropout == 0 or not len(clients):
        return clients
    draws = np.array([numpy_generator(derive_seed(seed, "dropout-out", round_index, int(c))).random() for c in clients])
    stays = draws >= dropout
    return clients[stays] if stays.any() else clients[[int(draws.argmax())]]


def cut_blocks(clients: Sequence[int], work: Sequence[int], first: int = 0) -> list[ClientBlock]:
    """Client blocks, longest clients first; never a function of the number of trainers.

    Args:
      work: optimiser steps of each client.
      first: index of the first block.
    """
    # Ids break ties, so that blocks do not depend on the order in which clients are listed.
    members = sorted(zip(work, clients, strict=True), key=lambda member: (-member[0], member[1]))
    groups = _cut(members, [amount for amount, _ in members], BLOCKS_PER_COHORT)
    return [
        ClientBlock(index, tuple(client for _, client in group), sum(amount for amount, _ in group))
        for index, group in enumerate(groups, first)
    ]


def assign_blocks(blocks: Sequence[ClientBlock], num_trainers: int) -> list[list[list[ClientBlock]]]:
    """Return each trainer's queue of tasks: longest work first to the least loaded trainer.

    How blocks are grouped may depend on the trainers at hand, since the fold is exact in any grouping.
    """
    loads = [(0, trainer) for trainer in range(num_trainers)]
    queues: list[list[ClientBlock]] = [[] for _ in range(num_trainers)]
    for block in sorted(blocks, key=lambda b: (-b.work, b.index)):
        load, trainer = heapq.heappop(loads)
        queues[trainer].append(block)
        heapq.heappush(loads, (load + block.work, trainer))
    return [_cut(queue, [block.work for block in queue], TASKS_PER_TRAINER) for queue in queues]


def _cut(items: Sequence[T], work: Sequence[int], count: int) -> list[list[T]]:
    """Split items into about `count` groups of neighbours with similar work."""
    groups: list[list[T]] = []
    target, amount = sum(work) / count, 0
    for item, more in zip(items, work, strict=True):
        if not groups or amount >= target:
            groups.append([])
            amount = 0
        groups[-1].append(item)
        amount += more
    return groups
