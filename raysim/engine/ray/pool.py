"""The pool on Ray: tasks go to trainer actors, and what is lost is made again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayTaskError

from raysim.core.errors import OutOfMemory
from raysim.engine.messages import EvaluationPoint, PoolCounts, Reports, RoundMessage, Share, Slice, TaskResult
from raysim.engine.plan import ClientBlock
from raysim.engine.ray.session import LOSSES, live_nodes, plain_errors
from raysim.engine.ray.slots import RETRIES, TrainerSlot, TrainerSlots

T = TypeVar("T")


@dataclass
class Task:
    """Some blocks to train, with all that it takes to train them once more; later, where the results lie.

    Attributes:
      message: handle; memories: handles of what the clients kept before this round.
      slot, actor, node: who has it, or had it, and where.
      refs: reports, vectors, then new memories.
    """

    message: Any
    blocks: list[ClientBlock]
    memories: list[Any]
    slot: TrainerSlot | None = None
    actor: Any = None
    node: str = ""
    refs: list[Any] = field(default_factory=list)
    tries: int = 0


class RayPool:
    """A `Pool` of trainer actors; lives in the server's process.

    Trainers may be lost at any time, alone or with their node. A task depends on its arguments alone, so whoever does
    it again gets the same bits: the tasks of a lost trainer go to those who have nothing left to do, and results that
    lay on a lost node are trained again when they are asked for. The tasks of a trainer whose device has no memory left
    for a client go to the others; only the last one of all cannot do better, and its error ends the run.

    Only sums travel: those of a node's trainers are added there, except on the server's own node, where they are in
    reach as they are. Updates stay where they were made. (Ray hands over results below 100 kB with the task's reply.)

    Args:
      start: start(index) -> a new actor for that slot.
      capacity: how many trainers there is room for in all, asked before every round; None: their number is fixed.
      gpu_share: of a GPU that each trainer has.
    """

    def __init__(
        self,
        start: Callable[[int], Any],
        num_trainers: int,
        keeps_memory: bool,
        capacity: Callable[[], int] | None = None,
        gpu_share: float = 0.0,
    ):
        self.slots = TrainerSlots(start, num_trainers, gpu_share)
        self._keeps_memory, self._capacity = keeps_memory, capacity
        self._here = ray.get_runtime_context().get_node_id()
        self._planned: list[TrainerSlot] = []
        self._redone_blocks = self._sum_bytes = 0

    def begin_round(self) -> int:
        with plain_errors():
            if self._capacity is not None:
                self.slots.grow(self._capacity())
            # At first for all of them, then for nobody who is not there.
            self.slots.wait_for(1 if self._planned else len(self.slots))
        self._planned = self.slots.ready()
        return len(self._planned)

    def take_counts(self) -> PoolCounts:
        nodes = {slot.node for slot in self._planned}
        counts = PoolCounts(len(self._planned), len(nodes), self._sum_bytes / 1e6, self._redone_blocks)
        self._redone_blocks = self._sum_bytes = 0
        return counts

    def put(self, value: Any) -> Any:
        return ray.put(value)

    def get(self, handle: Any) -> Any:
        return ray.get(handle)

    # --- training -----------------------------------------------------------------------------------------------------

    def train(
        self, message: RoundMessage, queues: Sequence[Sequence[Sequence[ClientBlock]]], memories: Mapping[int, Any]
    ) -> Iterator[TaskResult]:
        sent = ray.put(message)
        planned: list[tuple[TrainerSlot | None, Task]] = []
        depth = max((len(tasks) for tasks in queues), default=0)
        for position in range(depth):  # every trainer's first task before anybody's second
            for slot, tasks in zip(self._planned, queues, strict=True):
                if position < len(tasks):
                    blocks = list(tasks[position])
                    clients = [client for block in blocks for client in block.clients]
                    kept = [memories.get(client) for client in clients] if self._keeps_memory else []
                    planned.append((slot, Task(sent, blocks, kept)))
        with plain_errors():
            for task, reports in self._run(planned):
                yield TaskResult(reports, task, tuple(task.refs[2:]))

    def _run(self, planned: Iterable[tuple[TrainerSlot | None, Task]]) -> Iterator[tuple[Task, Reports]]:
        """Each task with its reports as it is finished; tasks without a slot go to whoever has nothing left to do."""
        pending: dict[Any, Task] = {}
        waiting: deque[Task] = deque()
        for slot, task in planned:
            if slot is None:
                waiting.append(task)
            else:
                pending[self._submit(task, slot)] = task
        while pending or waiting:
            if waiting:
                self.slots.poll()
                if not pending:
                    self.slots.wait_for(1)
                busy = {task.slot.index for task in pending.values() if task.slot}
                for slot in self.slots.ready():
                    if slot.index not in busy and waiting:
                        task = waiting.popleft()
                        pending[self._submit(task, slot)] = task
            starting = [slot.started for slot in self.slots.starting()] if waiting else []
            ready, _ = ray.wait([*pending, *starting], num_returns=1)
            for ref in ready:
                if ref in pending:
                    task = pending.pop(ref)
                    reports = self._finished(task)
                    if reports is None:
                        waiting.append(task)
                    else:
                        yield task, reports

    def _submit(self, task: Task, slot: TrainerSlot) -> Any:
        task.slot, task.actor, task.node = slot, slot.actor, slot.node
        call = slot.actor.train.options(num_returns=2 + len(task.memories))
        task.refs = call.remote(task.message, task.blocks, *task.memories)
        return task.refs[0]

    def _finished(self, task: Task) -> Reports | None:
        """The reports of a task that has ended; None if it is to be done again, since it or what it made is lost."""
        try:
            reports = ray.get(task.refs[0])
            if task.node != self._here:  # what clients keep outlives the round, so it must outlive the node
                task.refs[2:] = [ray.put(memory) for memory in ray.get(task.refs[2:])]
        except LOSSES as error:
            task.tries += 1
            if task.tries > RETRIES:
                raise
            self._redone_blocks += len(task.blocks)
            slot = task.slot
            is_its = slot is not None and slot.actor is task.actor and not slot.is_retired
            if isinstance(error, RayActorError) and slot is not None and is_its:
                self.slots.replace(slot)
            return None
        except RayTaskError as error:
            if not isinstance(error.cause, OutOfMemory) or task.slot is None or not self.slots.retire(task.slot):
                raise
            self._redone_blocks += len(task.blocks)
            return None
        return reports

    # --- what runs where results lie, or on slices --------------------------------------------------------------------

    def at_results(
        self, call: str, request: Any, parts: Sequence[tuple[TaskResult, Share]], *, adds: bool = False
    ) -> list[Any]:
        tasks: list[Task] = [result.vectors for result, _ in parts]
        sent = ray.put(request)

        def attempt() -> list[Any]:
            slots = self._near(tasks)
            if adds:
                return self._added(
                    call, sent, [(s, t, share) for s, t, (_, share) in zip(slots, tasks, parts, strict=True)]
                )
            asked = [
                slot.actor.call.remote(call, sent, [share], task.refs[1])
                for slot, task, (_, share) in zip(slots, tasks, parts, strict=True)
            ]
            return ray.get(asked)

        return self._with_recovery(attempt, tasks)

    def _added(self, call: str, request: Any, parts: Sequence[tuple[TrainerSlot, Task, Share]]) -> list[Any]:
        """One call a trainer for all its parts; the answers of a node other than this one are added there."""
        shares: dict[int, list[tuple[Task, Share]]] = {}
        for slot, task, share in parts:
            shares.setdefault(slot.index, []).append((task, share))
        nodes: dict[str, list[tuple[TrainerSlot, Any]]] = {}
        for index, of_slot in shares.items():
            slot = self.slots[index]
            answer = slot.actor.call.remote(call, request, [s for _, s in of_slot], *(t.refs[1] for t, _ in of_slot))
            nodes.setdefault(slot.node, []).append((slot, answer))
        asked: list[tuple[str, Any]] = []
        for node, answers in nodes.items():
            partials = [partial for _, partial in answers]
            if node != self._here and len(answers) > 1:
                partials = [answers[0][0].actor.add.remote(*partials)]
            asked += [(node, partial) for partial in partials]
        sums = ray.get([partial for _, partial in asked])
        self._sum_bytes += sum(s.nbytes for (node, _), s in zip(asked, sums, strict=True) if node != self._here)
        return sums

    def on_slices(self, call: str, point: EvaluationPoint, request: Any, slices: Sequence[Slice]) -> list[Any]:
        sent, asked = ray.put(point), ray.put(request)

        def attempt() -> list[Any]:
            ready = self.slots.ready()
            return ray.get(
                [
                    ready[number % len(ready)].actor.call.remote(call, sent, asked, part)
                    for number, part in enumerate(slices)
                ]
            )

        return self._with_recovery(attempt, [])

    def _near(self, tasks: Sequence[Task]) -> list[TrainerSlot]:
        """For each finished task a trainer: the one that did it, else one on its node, else any."""
        ready = self.slots.ready()
        slots = []
        for number, task in enumerate(tasks):
            if task.slot is not None and task.slot.actor is task.actor and task.slot.node:
                slots.append(task.slot)
            else:
                near = [slot for slot in ready if slot.node == task.node] or ready
                slots.append(near[number % len(near)])
        return slots

    def _with_recovery(self, attempt: Callable[[], T], tasks: Sequence[Task]) -> T:
        """Do something with the results of tasks; where trainers or results are lost, make up for it and do it again."""
        with plain_errors():
            for tries in range(1 + RETRIES):
                self.slots.wait_for(1)
                try:
                    return attempt()
                except LOSSES:
                    if tries == RETRIES:
                        raise
                self.slots.check(self.slots.ready())
                alive = {node["NodeID"] for node in live_nodes()}
                lost = [task for task in tasks if task.node not in alive]
                self._redone_blocks += sum(len(task.blocks) for task in lost)
                for _ in self._run((None, task) for task in lost):
                    pass
        raise AssertionError("unreachable")
