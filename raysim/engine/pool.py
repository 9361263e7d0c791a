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

#: Requests of the server to its trainers: train, call where results lie, call on slices of a held-out set.
Pool: TypeAlias = "SerialPool | RayPool"


class SerialPool:
    """A `Pool` with a single trainer in this process, the reference for Ray's pools in tests.

    The same classes, the same arrays, the same order-free arithmetic; handles are the values themselves. `call` is a
    function of `Trainer`; the pool decides which trainer runs it.
    """

    def __init__(self, make_trainer: Callable[[], Trainer], keeps_memory: bool):
        self._trainer = make_trainer()
        self._keeps_memory = keeps_memory

    def begin_round(self) -> int:
        """Number of trainers for planning the next round; at least one."""
        return 1

    def take_counts(self) -> dict[str, float]:
        """Return the usage since the last call: trainers, nodes, and what was lost or sent.

        sum_mb: partial sums that came from other nodes; redone_blocks: client blocks handed out a second time after a loss,
        also those that a lost trainer had in its queue and had not begun.
        """
        return {"trainers": 1.0, "nodes": 1.0, "sum_mb": 0.0, "redone_blocks": 0.0}

    def take_notes(self) -> list[str]:
        """Lines for the user, since this was last asked."""
        return []

    def put(self, value: Packed) -> Handle:
        return value

    def get(self, handle: Handle) -> Packed:
        return handle

    def train(self, message: RoundMessage, queues: Queues, memories: Mapping[int, Handle]) -> Iterator[TaskResult]:
        """Run every trainer's queue of tasks; results in order of completion. memories: client -> handle."""
        for blocks in (blocks for tasks in queues for blocks in tasks):
            before = [memories.get(client) for block in blocks for client in block.clients]
            reports, after = self._trainer.train(message, blocks, before)
            yield TaskResult(reports, None, tuple(after) if self._keeps_memory else ())

    def at_results(
        self, call: partial[Answer], parts: Sequence[tuple[TaskResult, TaskClients]], *, adds: bool
    ) -> list[Answer]:
        """Run call(trainer, clients by task) in the trainers that hold the clients' vectors.

        Returns:
          One answer a part, in order; with `adds`, partial sums that together are the sum over all parts.
        """
        asked = [clients for _, clients in parts]
        return [call(self._trainer, some) for some in ([asked] if adds else [[one] for one in asked])]

    def on_columns(
        self, call: partial[list[Packed]], parts: Sequence[tuple[TaskResult, TaskClients]], cuts: Sequence[Columns]
    ) -> list[Packed]:
        """Return an answer per cut, in order, of call(trainer, cuts, clients, rows): see `mapped_columns`.

        A block of columns is brought together where it is worked on; few are in flight at a time.
        """
        asked = [clients for _, clients in parts]
        clients = [part.clients for part in asked]
        blocks = (call(self._trainer, [cut], clients, *self._trainer.columns(asked, [[cut]])) for cut in cuts)
        return [answer for answers in blocks for answer in answers]

    def on_slices(
        self, call: Callable[[Trainer, Sequence[Slice]], list[Answer]], point: EvaluationPoint, slices: Sequence[Slice]
    ) -> list[Answer]:
        """Return an answer per slice, in order, from call(trainer, slices), with the trainer's model at the point."""
        with self._trainer.global_model(point):
            return call(self._trainer, slices)
