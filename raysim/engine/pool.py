"""What the server asks of those who train."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from raysim.engine.messages import EvaluationPoint, PoolCounts, RoundMessage, Share, Slice, TaskResult
from raysim.engine.plan import ClientBlock


class Pool(Protocol):
    """What the server asks of its trainers: train, call where results lie, call on slices of a held-out set.

    A handle is whatever `put` returned; None stands for None. `call` names a function of `Trainer`.
    """

    def begin_round(self) -> int:
        """How many trainers a round that begins now can be planned for; at least one."""
        ...

    def take_counts(self) -> PoolCounts:
        """What was used since this was last asked."""
        ...

    def put(self, value: Any) -> Any: ...
    def get(self, handle: Any) -> Any: ...

    def train(
        self, message: RoundMessage, queues: Sequence[Sequence[Sequence[ClientBlock]]], memories: Mapping[int, Any]
    ) -> Iterator[TaskResult]:
        """Run every trainer's queue of tasks; results in order of completion. memories: client -> handle."""
        ...

    def at_results(
        self, call: str, request: Any, parts: Sequence[tuple[TaskResult, Share]], *, adds: bool = False
    ) -> list[Any]:
        """call(request, shares, *vectors of their tasks), run where the vectors lie.

        Returns:
          One answer a part, in order; with `adds`, partial sums that together are the sum over all parts.
        """
        ...

    def on_slices(self, call: str, point: EvaluationPoint, request: Any, slices: Sequence[Slice]) -> list[Any]:
        """call(point, request, slice) of every slice, in their order."""
        ...
