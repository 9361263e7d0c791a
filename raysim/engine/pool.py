"""The protocol between the server and its trainers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

from raysim.engine.messages import (
    EvaluationPoint,
    Handle,
    Packed,
    PoolCounts,
    RoundMessage,
    Slice,
    TaskClients,
    TaskResult,
)
from raysim.engine.schedule import Queues

Answer = TypeVar("Answer")


class Pool(Protocol):
    """What the server asks of its trainers: train, call where results lie, call on slices of a held-out set.

    `call` is a function of `Trainer`; the pool decides which trainer runs it.
    """

    def begin_round(self) -> int:
        """How many trainers a round that begins now can be planned for; at least one."""
        ...

    def take_counts(self) -> PoolCounts:
        """What was used since this was last asked."""
        ...

    def take_notes(self) -> list[str]:
        """Lines for the user, since this was last asked."""
        ...

    def put(self, value: Packed) -> Handle: ...
    def get(self, handle: Handle) -> Packed: ...

    def train(self, message: RoundMessage, queues: Queues, memories: Mapping[int, Handle]) -> Iterator[TaskResult]:
        """Run every trainer's queue of tasks; results in order of completion. memories: client -> handle."""
        ...

    def at_results(
        self,
        call: Callable[..., Answer],
        request: object,
        parts: Sequence[tuple[TaskResult, TaskClients]],
        *,
        adds: bool,
    ) -> list[Answer]:
        """call(trainer, request, some clients of each of some tasks), run by the trainer that has their vectors.

        Returns:
          One answer a part, in order; with `adds`, partial sums that together are the sum over all parts.
        """
        ...

    def on_slices(
        self, call: Callable[..., list[Answer]], point: EvaluationPoint, request: object, slices: Sequence[Slice]
    ) -> list[Answer]:
        """One answer a slice, in their order, from call(trainer, point, request, slices) -> an answer for each of its own."""
        ...
