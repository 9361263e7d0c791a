"""Schedule of clients: cohorts and client blocks from configuration and data sizes only, tasks also from trainers."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

import numpy as np

from raysim.base.errors import RaysimError
from raysim.core.cohorts import choose_cohort, without_dropouts
from raysim.core.method import Crowd, Method, Sampling
from raysim.core.seeding import derive_seed, numpy_generator
from raysim.core.stack import Stack
from raysim.core.timetable import Flight, Timetable, Turn
from raysim.engine.messages import Packed, RoundMessage
from raysim.training.local import LocalSettings, num_local_steps

T = TypeVar("T")

#: A cohort is cut into at most this many client blocks: enough to balance trainers, few enough for little overhead.
BLOCKS_PER_COHORT = 32
#: Blocks are grouped into about this many tasks per trainer and round. With a hundred tiny clients two were 6 % faster
#: than four; fewer, longer tasks lose more work when a worker is killed.
TASKS_PER_TRAINER = 2


@dataclass(frozen=True)
class ClientBlock:
    """Clients of a cohort that one trainer trains in order. work: number of optimiser steps."""

    index: int
    clients: tuple[int, ...]
    work: int


#: For each trainer its tasks in order; a task is a sequence of client blocks.
Queues = Sequence[Sequence[Sequence[ClientBlock]]]


@dataclass(frozen=True)
class Phase:
    """Consecutive rounds with the same methods and the same kind of local work.

    Attributes:
      sampling: sampling of cohorts, see `choose_cohort`.
      dropout: probability that a chosen client never reports.
      stragglers: probability that a client does only a share of its work, uniform in [straggler_work, 1).
      least_clients: see `cut_blocks`.
    """

    methods: tuple[Method, ...]
    settings: LocalSettings
    rounds: int
    cohort_size: int
    dropout: float = 0.0
    stragglers: float = 0.0
    straggler_work: float = 1.0
    sampling: Sampling = "fixed"
    least_clients: int = 1

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

    def turn_of(self, table: Timetable, round_index: int, seconds_of: Callable[[np.ndarray], np.ndarray]) -> Turn:
        """See `Timetable.turn`."""
        return table.turn(
            round_index,
            self.cohort_size,
            seconds_of,
            arrivals=self.stack.arrivals,
            dropout=self.dropout,
            sampling=self.sampling,
        )

    def num_steps(self, client: int, num_examples: int, skip_single: bool, seed: int, round_index: int) -> int:
        """Return the number of optimiser steps of a client in a round."""
        share = self.share_of(client, seed, round_index)
        return num_local_steps(num_examples, self.settings, skip_single=skip_single, share=share)


@dataclass
class Turns:
    """Clients of each round, and the models that the clients received.

    Attributes:
      population: number of clients.
      timetable: simulated time; None: rounds take no simulated time.
      begun: client of the round -> the round whose model the client received.
      sent: round -> message of the round, for rounds in which a client still at work began.
      bytes_up: (index of a phase, bytes that a client of the phase sends).
    """

    seed: int
    population: int
    timetable: Timetable | None = None
    begun: dict[int, int] = field(default_factory=dict)
    sent: dict[int, RoundMessage] = field(default_factory=dict)
    bytes_up: tuple[int, int] = (-1, 0)

    def next(
        self,
        phase: Phase,
        message: RoundMessage,
        *,
        steps_of: Callable[[int], int],
        down: Callable[[], int],
        up: Callable[[], int],
    ) -> Turn:
        """Choose the clients whose updates end the round.

        Args:
          message: the message of the round.
          steps_of: steps_of(client) -> local steps of a client that begins in this round.
          down, up: return the bytes that a client receives and sends; `up` is called once per phase, before the round's
            clients train, so that the choice of clients does not depend on their updates.
        """
        index, table = message.round_index, self.timetable
        if table is None:
            size, sampling = phase.cohort_size, phase.sampling
            clients = choose_cohort(self.population, size, seed=self.seed, round_index=index, sampling=sampling)
            clients = without_dropouts(clients, phase.dropout, seed=self.seed, round_index=index)
            turn = Turn(clients, np.full(len(clients), index))
        else:
            if self.bytes_up[0] != message.phase_index:
                self.bytes_up = message.phase_index, up()
            size_bytes = down(), self.bytes_up[1]

            def seconds_of(clients: np.ndarray) -> np.ndarray:
                steps = np.array([steps_of(each) for each in clients.tolist()])
                return table.speeds.seconds(clients, steps, *size_bytes)

            self.sent = self._needed() | {index: message}
            turn = phase.turn_of(table, index, seconds_of)
        self.begun = dict(zip(turn.clients.tolist(), turn.begun.tolist(), strict=True))
        return turn

    def _needed(self) -> dict[int, RoundMessage]:
        """Return round -> message, for the rounds in which a client at work began."""
        rounds = {flight.begun for flight in self.timetable.flights} if self.timetable else set()
        return {begun: message for begun, message in self.sent.items() if begun in rounds}

    def message_for(self, message: RoundMessage, begun: int) -> RoundMessage:
        """Return the message of round `begun`, for training in the round of `message`."""
        if begun == message.round_index:
            return message
        return replace(self.sent[begun], is_scored=message.is_scored, staleness=message.round_index - begun)

    def metrics(self, turn: Turn, round_index: int) -> dict[str, float]:
        """Simulated seconds, late clients and mean staleness of a round; empty without a timetable."""
        if self.timetable is None:
            return {}
        stale = float((round_index - turn.begun).mean()) if len(turn.begun) else 0.0
        late = float(turn.num_late)
        return {"time/simulated_s": self.timetable.now_s, "clients/late": late, "clients/staleness": stale}

    def state(self) -> Packed:
        """Return simulated time, clients at work and their messages for a checkpoint; None without a timetable."""
        if self.timetable is None:
            return None
        sent = [vars(message) for message in self._needed().values()]
        flights = [[*flight] for flight in self.timetable.flights]
        state = {"now_s": self.timetable.now_s, "bytes_up": self.bytes_up, "flights": flights, "sent": sent}
        return state | {"speeds": self.timetable.speeds.sha256}

    def restore(self, state: Packed) -> None:
        """Restore a state of a checkpoint.

        Raises:
          RaysimError: the speeds of the clients changed.
        """
        if self.timetable is not None:
            if state["speeds"] != self.timetable.speeds.sha256:
                raise RaysimError(
                    "the speeds of the clients changed since the run began", "time.traces", "restore the file"
                )
            self.timetable.now_s, self.bytes_up = state["now_s"], tuple(state["bytes_up"])
            self.timetable.flights = [Flight(*flight) for flight in state["flights"]]
            self.sent = {sent["round_index"]: RoundMessage(**sent) for sent in state["sent"]}


def fitting(room: Mapping[str, float], share: Mapping[str, float]) -> int:
    """Return how many trainers fit on a node or in a bundle.

    A share of a GPU belongs to a single GPU: two trainers with 0.4 fit on each GPU.

    Args:
      room: resources of the node or bundle.
      share: resources of a trainer.
    """

    def count(name: str, each: float) -> int:
        there = room.get(name, 0.0)
        if name == "GPU" and each < 1 <= there:
            return int(there) * int(1 / each + 1e-9)
        return int(there / each + 1e-9)

    return min(count(name, each) for name, each in share.items() if each)


def crowd_of(method: str, population: int, seed: int) -> Crowd:
    """Return the population, from which a method draws a fixed subset; the same at the server and at all trainers.

    seed: seed of the run.
    """
    return Crowd(population, derive_seed(seed, f"crowd/{method}"))


def cut_blocks(
    clients: Sequence[int], work: Sequence[int], first: int = 0, *, least_clients: int = 1
) -> list[ClientBlock]:
    """Cut clients into client blocks, clients with most work first. Blocks do not depend on the number of trainers.

    Args:
      work: number of optimiser steps of each client.
      first: index of the first block.
      least_clients: fewest clients of a block on average; a smaller cohort is still cut into two blocks.
    """
    # Ids break ties, so that blocks do not depend on the order in which clients are listed.
    members = sorted(zip(work, clients, strict=True), key=lambda member: (-member[0], member[1]))
    count = BLOCKS_PER_COHORT
    if least_clients > 1:  # a power of two, which 2, 4, 8, ... trainers share evenly
        count = min(count, 2 ** max(1, int(math.log2(max(1, len(members) // least_clients)))))
    groups = _cut(members, [amount for amount, _ in members], count)
    return [
        ClientBlock(index, tuple(client for _, client in group), sum(amount for amount, _ in group))
        for index, group in enumerate(groups, first)
    ]


def assign_blocks(blocks: Sequence[ClientBlock], num_trainers: int) -> list[list[list[ClientBlock]]]:
    """Return each trainer's queue of tasks. Blocks with most work come first, each to the least loaded trainer.

    Tasks may depend on the number of trainers, since the fold is exact in any grouping.
    """
    loads = [(0, trainer) for trainer in range(num_trainers)]
    queues: list[list[ClientBlock]] = [[] for _ in range(num_trainers)]
    for block in sorted(blocks, key=lambda b: (-b.work, b.index)):
        load, trainer = heapq.heappop(loads)
        queues[trainer].append(block)
        heapq.heappush(loads, (load + block.work, trainer))
    return [_cut(queue, [block.work for block in queue], TASKS_PER_TRAINER) for queue in queues]


def _cut(items: Sequence[T], work: Sequence[int], count: int) -> list[list[T]]:
    """Split items into at most `count` groups of neighbours with similar work."""
    groups: dict[int, list[T]] = {}
    before, total = 0, max(1, sum(work))
    for item, more in zip(items, work, strict=True):
        groups.setdefault(before * count // total, []).append(item)
        before += more
    return list(groups.values())
