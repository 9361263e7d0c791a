"""The server's requests to its trainers, and a pool with a single trainer in the same process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from raysim.engine.messages import (
    Columns,
    EvaluationPoint,
    Handle,
    Packed,
    RoundMessage,
    Slice,
    TaskClients,
    TaskResult,
)
from raysim.engine.schedule import Queues
from raysim.engine.trainer import Trainer

if TYPE_CHECKING:
    from raysim.engine.ray.pool import RayPool

Answer = TypeVar("Answer")

#: Interface of the server to its trainers: train, run functions on stored updates, run functions on held-out sets.
Pool: TypeAlias = "SerialPool | RayPool"


class SerialPool:
    """A `Pool` with a single trainer in this process, the reference for `RayPool` in tests.

    Classes, arrays and the order-independent arithmetic are those of `RayPool`; handles are the values themselves. The
    argument `call` is a function whose first argument is a trainer, which the pool chooses.
    """

    def __init__(self, make_trainer: Callable[[], Trainer], keeps_memory: bool):
        self._trainer = make_trainer()
        self._keeps_memory = keeps_memory

    def begin_round(self) -> int:
        """Prepare the next round, and return the number of trainers to plan with, at least one."""
        return 1

    def take_counts(self) -> dict[str, float]:
        """Return the usage since the last call.

        trainers, nodes: counts; sum_mb: partial sums received from other nodes; redone_blocks: client blocks sent again
        after a loss, including blocks that the lost trainer had queued but not begun.
        """
        return {"trainers": 1.0, "nodes": 1.0, "sum_mb": 0.0, "redone_blocks": 0.0}

    def take_notes(self) -> list[str]:
        """Return the lines for the user since the last call."""
        return []

    def put(self, value: Packed) -> Handle:
        return value

    def get(self, handle: Handle) -> Packed:
        return handle

    def train(self, message: RoundMessage, queues: Queues, memories: Mapping[int, Handle]) -> Iterator[TaskResult]:
        """Run every trainer's queue of tasks; yield results in order of completion. memories: client -> handle."""
        for blocks in (blocks for tasks in queues for blocks in tasks):
            before = [memories.get(client) for block in blocks for client in block.clients]
            reports, after = self._trainer.train(message, blocks, before)
            yield TaskResult(reports, None, tuple(after) if self._keeps_memory else ())

    def at_results(
        self, call: partial[Answer], parts: Sequence[tuple[TaskResult, TaskClients]], *, adds: bool
    ) -> list[Answer]:
        """Run call(trainer, clients by task) in the trainers that hold the clients' vectors.

        Returns:
          One answer per part, in order; with `adds`, partial sums whose total is the sum over all parts.
        """
        asked = [clients for _, clients in parts]
        return [call(self._trainer, some) for some in ([asked] if adds else [[one] for one in asked])]

    def on_columns(
        self, call: partial[list[Packed]], parts: Sequence[tuple[TaskResult, TaskClients]], cuts: Sequence[Columns]
    ) -> list[Packed]:
        """Return an answer per cut, in order, of call(trainer, cuts, clients, *rows); see `mapped_columns`.

        The rows of a block of columns are collected by the trainer that handles the block, a few blocks at a time.
        """
        asked = [clients for _, clients in parts]
        clients = [part.clients for part in asked]
        blocks = (call(self._trainer, [cut], clients, *self._trainer.columns(asked, [[cut]])) for cut in cuts)
        return [answer for answers in blocks for answer in answers]

    def on_slices(
        self, call: Callable[[Trainer, Sequence[Slice]], list[Answer]], point: EvaluationPoint, slices: Sequence[Slice]
    ) -> list[Answer]:
        """Return an answer per slice, in order, from call(trainer, slices), with the model loaded from `point`."""
        with self._trainer.global_model(point):
            return call(self._trainer, slices)
