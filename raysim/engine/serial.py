"""The pool without Ray: one trainer in this process. The twin that tests compare Ray with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from raysim.engine.messages import EvaluationPoint, PoolCounts, RoundMessage, Share, Slice, TaskResult
from raysim.engine.plan import ClientBlock
from raysim.engine.trainer import Trainer


class SerialPool:
    """A `Pool` of one trainer in this process: the same classes, the same arrays, the same order-free arithmetic."""

    def __init__(self, make_trainer: Callable[[], Trainer], keeps_memory: bool):
        self._trainer = make_trainer()
        self._keeps_memory = keeps_memory

    def begin_round(self) -> int:
        return 1

    def take_counts(self) -> PoolCounts:
        return PoolCounts(trainers=1, nodes=1)

    def put(self, value: Any) -> Any:
        return value

    def get(self, handle: Any) -> Any:
        return handle

    def train(
        self, message: RoundMessage, queues: Sequence[Sequence[Sequence[ClientBlock]]], memories: Mapping[int, Any]
    ) -> Iterator[TaskResult]:
        for tasks in queues:
            for blocks in tasks:
                clients = [client for block in blocks for client in block.clients]
                reports, vectors, kept = self._trainer.train(message, blocks, [memories.get(c) for c in clients])
                yield TaskResult(reports, vectors, tuple(kept) if self._keeps_memory else ())

    def at_results(
        self, call: str, request: Any, parts: Sequence[tuple[TaskResult, Share]], *, adds: bool = False
    ) -> list[Any]:
        function = getattr(self._trainer, call)
        if adds:
            return [function(request, [share for _, share in parts], *(result.vectors for result, _ in parts))]
        return [function(request, [share], result.vectors) for result, share in parts]

    def on_slices(self, call: str, point: EvaluationPoint, request: Any, slices: Sequence[Slice]) -> list[Any]:
        return [getattr(self._trainer, call)(point, request, part) for part in slices]
