"""Pools: where tasks of a round run. The serial pool is the twin that tests compare Ray with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from raysim.engine.plan import ClientBlock
from raysim.engine.trainer import Trainer
from raysim.training.evaluate import Score


@dataclass(frozen=True)
class TaskResult:
    """One finished task: its report (here), its vectors and memories (handles; the pool knows where they lie)."""

    report: dict[str, Any]
    vectors: Any
    memories: tuple[Any, ...]


class Pool(Protocol):
    """What the server asks of its trainers. A handle is whatever `put` returned; None stands for None."""

    def begin_round(self) -> int:
        """How many trainers a round that begins now can be planned for; at least one."""
        ...

    def take_counts(self) -> dict[str, float]:
        """What the round took in machines: trainers, nodes, sum_mb (partial sums that came from other nodes),
        redone_blocks (trained again because a trainer or a node was lost)."""
        ...

    def put(self, value: Any) -> Any: ...
    def get(self, handle: Any) -> Any: ...

    def train(
        self, message: dict[str, Any], queues: Sequence[Sequence[Sequence[ClientBlock]]], memories: dict[int, Any]
    ) -> Iterator[TaskResult]:
        """Run every trainer's queue of tasks; results in order of completion. memories: client -> handle."""
        ...

    def fold(
        self, name: str, parts: Sequence[tuple[TaskResult, Any, np.ndarray]], constants: np.ndarray
    ) -> list[np.ndarray]:
        """Partial sums over task results, computed where they lie. parts: (result, packed weights, kept rows)."""
        ...

    def map_updates(
        self, function: Callable[[Any, Any], Any], shared: Any, parts: Sequence[tuple[TaskResult, np.ndarray]]
    ) -> list[list[Any]]:
        """function(update, shared) for every kept client; one list per part, in its order."""
        ...

    def evaluate(self, point: dict[str, Any], slices: Sequence[tuple[str, int, int]]) -> list[Score]:
        """Scores of a model (see `Trainer.evaluate`) on slices (set, start, end) of held-out sets, in their order."""
        ...

    def map_features(
        self, function: Callable[..., Any], shared: Any, point: dict[str, Any], slices: Sequence[tuple[int, int]]
    ) -> list[Any]:
        """function(features, labels, shared) of slices of the test set (see `Trainer.map_features`), in their order."""
        ...


class SerialPool:
    """One trainer in this process; no Ray. Same classes, same arrays, same order-free arithmetic."""

    def __init__(self, make_trainer: Callable[[], Trainer], keeps_memory: bool):
        self._trainer = make_trainer()
        self._keeps_memory = keeps_memory

    def begin_round(self) -> int:
        return 1

    def take_counts(self) -> dict[str, float]:
        return {"trainers": 1, "nodes": 1, "sum_mb": 0.0, "redone_blocks": 0}

    def put(self, value: Any) -> Any:
        return value

    def get(self, handle: Any) -> Any:
        return handle

    def train(
        self, message: dict[str, Any], queues: Sequence[Sequence[Sequence[ClientBlock]]], memories: dict[int, Any]
    ) -> Iterator[TaskResult]:
        for tasks in queues:
            for blocks in tasks:
                clients = [client for block in blocks for client in block.clients]
                report, vectors, kept = self._trainer.train(message, blocks, [memories.get(c) for c in clients])
                yield TaskResult(report, vectors, tuple(kept) if self._keeps_memory else ())

    def fold(
        self, name: str, parts: Sequence[tuple[TaskResult, Any, np.ndarray]], constants: np.ndarray
    ) -> list[np.ndarray]:
        requests = [(weights, rows) for _, weights, rows in parts]
        return [self._trainer.fold(name, requests, constants, *(result.vectors for result, _, _ in parts))]

    def map_updates(
        self, function: Callable[[Any, Any], Any], shared: Any, parts: Sequence[tuple[TaskResult, np.ndarray]]
    ) -> list[list[Any]]:
        return [self._trainer.map_updates(function, shared, [rows], result.vectors) for result, rows in parts]

    def evaluate(self, point: dict[str, Any], slices: Sequence[tuple[str, int, int]]) -> list[Score]:
        return [self._trainer.evaluate(name, point, start, end) for name, start, end in slices]

    def map_features(
        self, function: Callable[..., Any], shared: Any, point: dict[str, Any], slices: Sequence[tuple[int, int]]
    ) -> list[Any]:
        return [self._trainer.map_features(function, shared, point, start, end) for start, end in slices]
