"""The pool on Ray: tasks go to trainer actors, and what is lost is made again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

#: Stands for the state in a message that is sent apart from it.
NO_STATE = np.empty(0, np.float32)

#: Whom a task that was not handed out is with.
NOBODY = Watched(None, Process("", 0, -1), "")

#: Up to here a request goes along with each call, as Ray sends small arguments; through the store it takes 1.5 ms more.
INLINE_BYTES = 100_000

#: Sums of nodes that are fetched at a time: those of all nodes would fill the object store of this one.
SUM_BYTES = 2**26

#: Entries of updates that are brought together for each trainer at a time: 64 MiB.
COLUMN_ENTRIES = 2**24


@dataclass
class ClientTask:
    """Blocks to train, with everything for a repetition; later, the trainer that holds their vectors.

    Attributes:
      message, state: handles of the message without its state, and of that; memories: of what the clients kept before
        this round.
      slot, asked: who has it, or had it. A slot may have got another actor since.
      refs: reports, then new memories.
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
    def words(self) -> str:
        """What the task is about, for people."""
        clients = [client for block in self.blocks for client in block.clients]
        return f"training of clients {', '.join(map(str, clients[:8]))}{' ...' if len(clients) > 8 else ''}"

    @property
    def is_with_its_trainer(self) -> bool:
        """Whether the task's trainer is still in its slot."""
        return self.slot is not None and self.slot.actor is self.asked.actor and not self.slot.is_retired


@dataclass
class LastState:
    """The state sent last. The scored state usually starts the next round, and then travels once."""

    ref: Ref | None = None

    def put(self, sent: Sent) -> tuple[Ref, Ref]:
        """Handles of a message, or of a model to be scored, without its state, and of the state."""
        # By bits: 0.0 and -0.0 are equal and lead to different results.
        last = None if self.ref is None else cast(np.ndarray, ray.get(self.ref))
        if last is None or not np.array_equal(last.view(np.uint32), sent.state.view(np.uint32)):
            self.ref = ray.put(sent.state)
        return ray.put(replace(sent, state=NO_STATE)), self.ref


class RayPool:
    """A `Pool` of trainer actors, with the calls of `SerialPool`; lives in the server's process.

    Trainers may be lost at any time, alone or with their node. A task depends on its arguments alone, so whoever does
    it again gets the same bits: the tasks of a lost trainer go to those who have nothing left to do, and updates that
    were lost with their trainer are trained again when they are asked for. The tasks of a trainer whose device has no
    memory left for a client go to the others; only the last one of all cannot do better, and its error ends the run.

    Updates stay in the memory of the trainer that made them, until the next round. Only sums travel: those of a node's
    trainers are added there, except on the server's own node, where they are in reach as they are.

    Args:
      capacity: how many trainers there is room for in all, asked before every round; 0: their number is fixed.
    """

    def __init__(self, slots: TrainerSlots, keeps_memory: bool, capacity: Callable[[], int] = lambda: 0):
        self.slots, self._keeps_memory, self._capacity = slots, keeps_memory, capacity
        self._here = ray.get_runtime_context().get_node_id()
        self._planned: list[TrainerSlot] = []
        self._redone_blocks = self._sum_bytes = 0
        self._state = LastState()

    def begin_round(self) -> int:
        with plain_errors():
            # The first round waits for every trainer; a later one begins with those that are there, at least one.
            self.slots.wait_for(1 if self._planned else len(self.slots))
            self.slots.leave()
            self.slots.grow(self._capacity())
        self._planned = self.slots.ready()
        return len(self._planned)

    def take_counts(self) -> dict[str, float]:
        nodes, sum_mb = len({slot.node for slot in self._planned}), self._sum_bytes / 1e6
        counts = {
            "trainers": len(self._planned),
            "nodes": nodes,
            "sum_mb": sum_mb,
            "redone_blocks": self._redone_blocks,
        }
        self._redone_blocks = self._sum_bytes = 0
        return {name: float(count) for name, count in counts.items()}

    def take_notes(self) -> list[str]:
        notes, self.slots.watch.notes = self.slots.watch.notes, []
        return notes

    def put(self, value: Packed) -> Handle:
        return ray.put(value)

    def get(self, handle: Handle) -> Packed:
        return ray.get(cast(Ref, handle))

    def train(self, message: RoundMessage, queues: Queues, memories: Mapping[int, Handle]) -> Iterator[TaskResult]:
        sent, state = self._state.put(message)  # once a round: every task gets the references, every node one copy
        planned: list[tuple[TrainerSlot | None, ClientTask]] = []
        for position in zip_longest(*queues):  # every trainer's first task before anybody's second
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
        # All tasks are queued at their trainers at once: nobody waits for the server between two of them.
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
            # One that has started wakes this loop as well, and one that was lost before: Ray may have placed it on a node
            # that is gone, which it takes for alive for some 15 s. Nobody but `poll` asks for another one then.
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
        task.slot, task.asked = slot, slot.asked_for(task.words)
        self.slots.watch.asked(slot.actor)
        # Each memory is an argument of its own: Ray passes references inside a list on without resolving them.
        call = slot.actor.train.options(num_returns=1 + len(task.memories))
        is_last = slot.node in self.slots.going
        refs = call.remote(task.message, task.state, task.blocks, is_last, *task.memories)
        task.refs = refs if task.memories else [refs]
        return task.refs[0]

    def _finished(self, task: ClientTask) -> Reports | None:
        """Return the reports of a finished task; None if the task or its result is lost and must be repeated."""
        try:
            reports = cast(Reports, ray.get(task.refs[0]))
            if (
                task.asked.process.node != self._here
            ):  # what clients keep outlives the round, so it must outlive the node
                task.refs[1:] = [ray.put(memory) for memory in ray.get(task.refs[1:])]
            return reports
        except LOSSES as error:
            ended = self.slots.watch.ended.get(task.asked.actor)
            task.tries += 2 if ended else 1  # a second wait of that length is enough
            if task.tries > RETRIES:
                if ended:
                    raise RaysimError(*ended) from error
                raise
            # Every task in the queue of a dead trainer fails like this; the first one of them replaces the trainer.
            if isinstance(error, ENDS) and task.slot is not None and task.is_with_its_trainer:
                self.slots.replace(task.slot)
        except RayTaskError as error:
            if isinstance(error.cause, NodeIsGoing):
                self.slots.going |= {task.asked.process.node}
                return None
            if not isinstance(error.cause, OutOfMemory) or task.slot is None or not self.slots.retire(task.slot):
                raise
        # Counts all that is handed out once more, also what the dead trainer had not begun: Ray does not say how far it was.
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
        # All trainers are asked before anybody's answer is waited for.
        partials = {one.actor.call.remote(call, own): one for one, own in parts.items()}
        self.slots.watch.all(partials)
        by_node: dict[str, dict[Ref, Watched]] = {}
        for ref, one in partials.items():
            by_node.setdefault(one.process.node, {})[ref] = one
        here: list[Answer] = self._answers(by_node.pop(self._here, {}).items())
        # One sum of the model's size leaves a node, however many trainers it has.
        away = dict(_added_there(own) for own in by_node.values())
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
            own = _by_trainer(asked, "columns")
            clients = ray.put([one.clients for some in own.values() for one in some])
            entries = (cuts[0].end - cuts[0].start) * sum(len(some.clients) for _, some in asked)
            count = min(len(own), len(cuts))  # who works; all give their rows
            at_once = count * max(1, COLUMN_ENTRIES // entries)
            answers: list[Packed] = []
            for first in range(0, len(cuts), at_once):
                few = cuts[first : first + at_once]
                shares = [few[number::count] or few[:1] for number in range(count)]
                # All are asked for their rows before anybody works: a trainer that waits for rows could not give its own.
                rows = [one.actor.columns.options(num_returns=count).remote(some, shares) for one, some in own.items()]
                dealt = zip(*([row] if count == 1 else row for row in rows), strict=True)
                calls = [
                    (one.actor.call.remote(sent, share, clients, *part), one)
                    for one, share, part in zip([*own][:count], shares, dealt, strict=True)
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
        (sent, state), asked = self._state.put(point), ray.put(call)

        def attempt() -> list[Answer]:
            ready = self.slots.staying()[: len(slices)]
            # Dealt like cards, one call a trainer: it then loads the model once.
            dealt = [slices[number :: len(ready)] for number in range(len(ready))]
            calls = [
                (slot.actor.score.remote(asked, sent, state, own), slot.asked_for("evaluation"))
                for slot, own in zip(ready, dealt, strict=True)
            ]
            shares: list[list[Answer]] = self._answers(calls)
            return [shares[number % len(ready)][number // len(ready)] for number in range(len(slices))]

        return self._with_recovery(attempt)

    def _train_lost(self, tasks: Sequence[ClientTask]) -> None:
        """Train the blocks of lost trainers again, elsewhere."""
        while lost := [task for task in tasks if not task.is_with_its_trainer]:
            self._redone_blocks += sum(len(task.blocks) for task in lost)
            for _ in self._run((None, task) for task in lost):
                pass

    def _with_recovery(self, attempt: Callable[[], list[Answer]]) -> list[Answer]:
        """Call a function on trainers; repeat without lost trainers."""
        with plain_errors():
            for tries in range(1 + RETRIES):
                self.slots.wait_for(1)
                try:
                    return attempt()
                except LOSSES:
                    if tries == RETRIES:
                        raise
                self.slots.check(self.slots.ready())
        raise AssertionError("unreachable")


def _by_trainer(asked: Iterable[tuple[ClientTask, TaskClients]], what: str) -> dict[Watched, list[TaskClients]]:
    """Return trainer -> clients by task whose vectors the trainer holds."""
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
        del part  # else it would stay in the store until the next one is there
    return total, size_bytes
