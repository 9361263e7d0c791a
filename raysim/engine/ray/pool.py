"""The pool on Ray: tasks run in trainer actors, and lost tasks and updates are computed again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import TypeVar, cast

import numpy as np
import ray
from ray.exceptions import RayTaskError

from raysim.base.errors import OutOfMemory, RaysimError
from raysim.engine.messages import (
    Columns,
    EvaluationPoint,
    Handle,
    Packed,
    Reports,
    RoundMessage,
    Slice,
    TaskClients,
    TaskResult,
    message_bytes,
)
from raysim.engine.ray.session import ENDS, LOSSES, Ref, plain_errors
from raysim.engine.ray.slots import RETRIES, NodeIsGoing, TrainerSlot, TrainerSlots
from raysim.engine.ray.watch import Process, Watched
from raysim.engine.schedule import ClientBlock, Queues
from raysim.engine.trainer import Trainer

Answer = TypeVar("Answer")
Sent = TypeVar("Sent", RoundMessage, EvaluationPoint)

#: Placeholder for the state in a message whose state is sent separately.
NO_STATE = np.empty(0, np.float32)

#: Value of `ClientTask.asked` for a task that was not sent to a trainer.
NOBODY = Watched(None, Process("", 0, -1), "")

#: Requests up to this size are sent with each call; through the object store a request takes 1.5 ms more.
INLINE_BYTES = 100_000

#: Bytes of the nodes' sums that are fetched at a time: the sums of all nodes could fill the object store of this node.
SUM_BYTES = 2**26

#: Entries of updates that are sent to each trainer at a time: 64 MiB.
COLUMN_ENTRIES = 2**24


@dataclass
class ClientTask:
    """Client blocks to train, with all arguments to repeat the task; later also the trainer that holds the vectors.

    Attributes:
      message: handle of the message without its state.
      state: handle of the message's state.
      memories: handles of the clients' memories before this round.
      slot, asked: slot and actor of the trainer that got the task last. The slot may have another actor by now.
      refs: handles of the reports and of each new memory.
    """

    message: Ref
    state: Ref
    blocks: Sequence[ClientBlock]
    memories: Sequence[Handle]
    slot: TrainerSlot | None = None
    asked: Watched = NOBODY
    refs: list[Ref] = field(default_factory=list)
    tries: int = 0

    @property
    def is_with_its_trainer(self) -> bool:
        """Return whether the task's trainer is still in its slot."""
        return self.slot is not None and self.slot.actor is self.asked.actor and not self.slot.is_retired


class RayPool:
    """A `Pool` of trainer actors, with the methods of `SerialPool`; lives in the server's process.

    Trainers may be lost at any time, alone or with their node. A task depends on its arguments only, so any trainer
    that repeats the task gets the same bits. Tasks of a lost trainer go to idle trainers, and updates lost with a
    trainer are trained again when they are needed. If a trainer's device has not enough memory for a client, the
    trainer is ended and its tasks go to the other trainers; the out-of-memory error of the last trainer ends the run.

    Updates stay in the memory of the trainer that computed them until the next round. Only sums are sent, and columns
    of updates for `on_columns`. The sums of a node's trainers are added on the node, except on the server's node, where
    the server adds them.

    Args:
      capacity: returns the number of trainers for which there is room, before every round; 0: the number is fixed.
    """

    def __init__(self, slots: TrainerSlots, keeps_memory: bool, capacity: Callable[[], int] = lambda: 0):
        self.slots, self._keeps_memory, self._capacity = slots, keeps_memory, capacity
        self._here = ray.get_runtime_context().get_node_id()
        self._planned: list[TrainerSlot] = []
        self._redone_blocks = self._sum_bytes = 0
        self._state: Ref | None = None  # of the state that was sent last

    def begin_round(self) -> int:
        with plain_errors():
            # The first round waits for all trainers; later rounds begin with the trainers that are ready, at least one.
            self.slots.wait_for(1 if self._planned else len(self.slots))
            self.slots.leave()
            self.slots.grow(self._capacity())
        self._planned = self.slots.ready()
        return len(self._planned)

    def take_counts(self) -> dict[str, float]:
        counts = {"trainers": len(self._planned), "nodes": len({slot.node for slot in self._planned})}
        usage = {"sum_mb": self._sum_bytes / 1e6, "redone_blocks": self._redone_blocks}
        self._redone_blocks = self._sum_bytes = 0
        return {name: float(count) for name, count in (counts | usage).items()}

    def take_notes(self) -> list[str]:
        notes, self.slots.watch.notes = self.slots.watch.notes, []
        return notes

    def put(self, value: Packed) -> Handle:
        return ray.put(value)

    def get(self, handle: Handle) -> Packed:
        return ray.get(cast(Ref, handle))

    def _sent(self, sent: Sent) -> tuple[Ref, Ref]:
        """Return handles of a message or EvaluationPoint without its state, and of the state.

        A scored state usually starts the next round as well, and is then sent once.
        """
        # Bits are compared, since 0.0 and -0.0 are equal but may lead to different results.
        last = None if self._state is None else cast(np.ndarray, ray.get(self._state))
        if last is None or not np.array_equal(last.view(np.uint32), sent.state.view(np.uint32)):
            self._state = ray.put(sent.state)
        return ray.put(replace(sent, state=NO_STATE)), self._state

    def train(self, message: RoundMessage, queues: Queues, memories: Mapping[int, Handle]) -> Iterator[TaskResult]:
        sent, state = self._sent(message)  # once: every task gets the references, every node one copy
        planned: list[tuple[TrainerSlot | None, ClientTask]] = []
        for position in zip_longest(*queues):  # the first task of every trainer before any second task
            for slot, blocks in zip(self._planned, position, strict=True):
                if blocks is not None:
                    clients = [client for block in blocks for client in block.clients]
                    kept = [memories.get(client) for client in clients] if self._keeps_memory else []
                    planned.append((slot, ClientTask(sent, state, blocks, kept)))
        with plain_errors():
            for task, reports in self._run(planned):
                yield TaskResult(reports, task, tuple(task.refs[1:]))

    def _run(self, planned: Iterable[tuple[TrainerSlot | None, ClientTask]]) -> Iterator[tuple[ClientTask, Reports]]:
        """Yield finished tasks with their reports; waiting tasks go to free trainers."""
        pending: dict[Ref, ClientTask] = {}
        waiting: deque[ClientTask] = deque()
        # All tasks are queued at their trainers at once: no trainer waits for the server between two tasks.
        for slot, task in planned:
            if slot is None:
                waiting.append(task)
            else:
                pending[self._submit(task, slot)] = task
        while pending or waiting:
            self.slots.poll()
            if waiting:
                if not pending:
                    self.slots.wait_for(1)
                busy = {task.slot.index for task in pending.values() if task.slot}
                for slot in self.slots.staying():
                    if slot.index not in busy and waiting:
                        task = waiting.popleft()
                        pending[self._submit(task, slot)] = task
            # A starting trainer wakes this loop when it has started or was lost. Ray may place an actor on a lost node,
            # which Ray treats as alive for some 15 s; only `poll` then replaces the actor.
            starting = [slot.started for slot in self.slots.starting()]
            asked = {ref: task.asked for ref, task in pending.items()}
            ref = self.slots.watch.first(asked, also=starting)
            if ref in pending:
                task = pending.pop(ref)
                reports = self._finished(task)
                if reports is None:
                    waiting.append(task)
                else:
                    yield task, reports

    def _submit(self, task: ClientTask, slot: TrainerSlot) -> Ref:
        clients = [client for block in task.blocks for client in block.clients]
        what = f"training of clients {', '.join(map(str, clients[:8]))}{' ...' if len(clients) > 8 else ''}"
        task.slot, task.asked = slot, slot.asked_for(what)
        self.slots.watch.asked(slot.actor)
        # Each memory is a separate argument: Ray does not resolve references inside a list.
        call = slot.actor.train.options(num_returns=1 + len(task.memories))
        is_last = slot.node in self.slots.going
        refs = call.remote(task.message, task.state, task.blocks, is_last, *task.memories)
        task.refs = refs if task.memories else [refs]
        return task.refs[0]

    def _finished(self, task: ClientTask) -> Reports | None:
        """Return the reports of a finished task; None if the task or its result is lost and must be repeated."""
        try:
            reports = cast(Reports, ray.get(task.refs[0]))
            # Client memory outlives the round, so it must survive the loss of the node.
            if task.asked.process.node != self._here:
                task.refs[1:] = [ray.put(memory) for memory in ray.get(task.refs[1:])]
            return reports
        except LOSSES as error:
            ended = self.slots.watch.ended.get(task.asked.actor)
            task.tries += 2 if ended else 1  # after a timeout one repetition is enough: it may take as long again
            if task.tries > RETRIES:
                if ended:
                    raise RaysimError(*ended) from error
                raise
            # Every queued task of a dead trainer fails like this; the first failure replaces the trainer.
            if isinstance(error, ENDS) and task.slot is not None and task.is_with_its_trainer:
                self.slots.replace(task.slot)
        except RayTaskError as error:
            if isinstance(error.cause, NodeIsGoing):
                self.slots.going |= {task.asked.process.node}
                return None
            if not isinstance(error.cause, OutOfMemory) or task.slot is None or not self.slots.retire(task.slot):
                raise
        # Includes tasks that the dead trainer had not begun: Ray does not report the trainer's progress.
        self._redone_blocks += len(task.blocks)
        return None

    def at_results(
        self, call: partial[Answer], parts: Sequence[tuple[TaskResult, TaskClients]], *, adds: bool
    ) -> list[Answer]:
        asked = [(cast(ClientTask, result.place), clients) for result, clients in parts]
        sent = call if message_bytes(call.keywords) <= INLINE_BYTES else ray.put(call)

        def attempt() -> list[Answer]:
            self._train_lost([task for task, _ in asked])
            if adds:
                return self._added(sent, asked)
            calls = [(task.asked.actor.call.remote(sent, [clients]), task.asked) for task, clients in asked]
            return self._answers(calls)

        return self._with_recovery(attempt)

    def _added(self, call: object, asked: Iterable[tuple[ClientTask, TaskClients]]) -> list[Answer]:
        """Call each trainer once for all its parts; answers of a remote node are summed on the node."""
        parts = _by_trainer(asked, "sums")
        # All trainers are called before the first answer is awaited.
        partials = {one.actor.call.remote(call, part): one for one, part in parts.items()}
        self.slots.watch.all(partials)
        by_node: dict[str, dict[Ref, Watched]] = {}
        for ref, one in partials.items():
            by_node.setdefault(one.process.node, {})[ref] = one
        here: list[Answer] = self._answers(by_node.pop(self._here, {}).items())
        # Each node sends a single sum of the model's size, for any number of trainers.
        away = dict(_added_there(sums) for sums in by_node.values())
        self.slots.watch.all(away)
        if away:
            total, size_bytes = _brought([*away])
            self._sum_bytes += size_bytes
            here.append(cast(Answer, total))
        return here

    def on_columns(
        self, call: partial[list[Packed]], parts: Sequence[tuple[TaskResult, TaskClients]], cuts: Sequence[Columns]
    ) -> list[Packed]:
        asked = [(cast(ClientTask, result.place), clients) for result, clients in parts]
        sent = ray.put(call)

        def attempt() -> list[Packed]:
            self._train_lost([task for task, _ in asked])
            held = _by_trainer(asked, "columns")
            clients = ray.put([one.clients for some in held.values() for one in some])
            entries = (cuts[0].end - cuts[0].start) * sum(len(some.clients) for _, some in asked)
            count = min(len(held), len(cuts))  # trainers that call the function; all trainers send their rows
            at_once = count * max(1, COLUMN_ENTRIES // entries)
            answers: list[Packed] = []
            for first in range(0, len(cuts), at_once):
                few = cuts[first : first + at_once]
                shares = [few[number::count] or few[:1] for number in range(count)]
                # All trainers are asked for rows before any trainer calls the function: a waiting trainer cannot send.
                rows = [one.actor.columns.options(num_returns=count).remote(some, shares) for one, some in held.items()]
                dealt = zip(*([row] if count == 1 else row for row in rows), strict=True)
                calls = [
                    (one.actor.call.remote(sent, share, clients, *part), one)
                    for one, share, part in zip([*held][:count], shares, dealt, strict=True)
                ]
                worked: list[list[Packed]] = self._answers(calls)
                answers += [worked[number % count][number // count] for number in range(len(few))]
            return answers

        return self._with_recovery(attempt)

    def _answers(self, calls: Iterable[tuple[Ref, Watched]]) -> list[Answer]:
        """Return the answers in order."""
        asked = dict(calls)
        self.slots.watch.all(asked)
        answers: list[Answer] = ray.get([*asked])
        return answers

    def on_slices(
        self, call: Callable[[Trainer, Sequence[Slice]], list[Answer]], point: EvaluationPoint, slices: Sequence[Slice]
    ) -> list[Answer]:
        (sent, state), asked = self._sent(point), ray.put(call)

        def attempt() -> list[Answer]:
            ready = self.slots.staying()[: len(slices)]
            # Slices are dealt round robin, one call per trainer, so that each trainer loads the model once.
            dealt = [slices[number :: len(ready)] for number in range(len(ready))]
            calls = [
                (slot.actor.score.remote(asked, sent, state, part), slot.asked_for("evaluation"))
                for slot, part in zip(ready, dealt, strict=True)
            ]
            shares: list[list[Answer]] = self._answers(calls)
            return [shares[number % len(ready)][number // len(ready)] for number in range(len(slices))]

        return self._with_recovery(attempt)

    def _train_lost(self, tasks: Sequence[ClientTask]) -> None:
        """Train the blocks of lost trainers again on other trainers."""
        while lost := [task for task in tasks if not task.is_with_its_trainer]:
            self._redone_blocks += sum(len(task.blocks) for task in lost)
            for _ in self._run((None, task) for task in lost):
                pass

    def _with_recovery(self, attempt: Callable[[], list[Answer]]) -> list[Answer]:
        """Call attempt(); after the loss of a trainer, call it again, up to RETRIES times."""
        with plain_errors():
            for _ in range(RETRIES):
                self.slots.wait_for(1)
                with suppress(*LOSSES):
                    return attempt()
                self.slots.check(self.slots.ready())
            self.slots.wait_for(1)
            return attempt()


def _by_trainer(asked: Iterable[tuple[ClientTask, TaskClients]], what: str) -> dict[Watched, list[TaskClients]]:
    """Return trainer -> clients, by task, whose vectors the trainer holds. what: description of the call."""
    parts: dict[Watched, list[TaskClients]] = {}
    for task, clients in asked:
        parts.setdefault(task.asked._replace(what=what), []).append(clients)
    return parts


def _added_there(partials: Mapping[Ref, Watched]) -> tuple[Ref, Watched]:
    """Return the sum of a node's partial sums, added by a trainer on the node."""
    first, one = next(iter(partials.items()))
    return (one.actor.add.remote(*partials), one) if len(partials) > 1 else (first, one)


def _brought(refs: list[Ref]) -> tuple[np.ndarray, int]:
    """Return the sum of remote partial sums, fetched a few at a time, and the number of bytes fetched."""
    total, size_bytes, at_once = np.zeros(()), 0, 1
    while refs:
        some, refs = refs[:at_once], refs[at_once:]
        for part in ray.get(some):
            total = total + part if size_bytes == 0 else np.add(total, part, out=total)
            size_bytes, at_once = size_bytes + part.nbytes, max(1, SUM_BYTES // part.nbytes)
        del part  # otherwise it would stay in the object store until the next part arrives
    return total, size_bytes
