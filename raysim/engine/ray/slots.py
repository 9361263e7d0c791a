"""Trainer actors in slots: started, watched, replaced after a loss, ended if their device lacks memory."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import ray
from ray.exceptions import RayError

from raysim.base.errors import RaysimError
from raysim.base.user_places import user_errors
from raysim.engine.messages import Columns, EvaluationPoint, Packed, RoundMessage, Slice, TaskClients
from raysim.engine.ray.session import LOSSES, Actor, Ref, going_nodes
from raysim.engine.ray.watch import Process, Watch, Watched
from raysim.engine.schedule import ClientBlock
from raysim.engine.trainer import Trainer

Answer = TypeVar("Answer")

#: How often a call or a start is repeated after the loss of its worker, before the run ends.
RETRIES = 3

#: Seconds that the first round waits for all trainers; also, if no nodes may be added, seconds to wait for one trainer.
START_S = 120.0


class NoTrainer(RaysimError):
    """No trainer has started."""


class NodeIsGoing(RaysimError):
    """A trainer refuses a task, since its node is draining."""


class TrainerActor:
    """A trainer in a separate process, built by the first call, so that construction errors reach the caller."""

    def __init__(self, make_trainer: Callable[[], Trainer], gpu_share: float = 0.0):
        self._make_trainer, self._gpu_share = make_trainer, gpu_share

    def start(self) -> Process:
        """Build the trainer, and return its process."""
        self._trainer = self._make_trainer()
        if self._gpu_share:
            self._trainer.limit_memory(self._gpu_share)
        self._process = Process.own()
        going_nodes()  # the first call takes longest
        return self._process

    def train(
        self, message: RoundMessage, state: np.ndarray, blocks: Sequence[ClientBlock], is_last: bool, *memories: Packed
    ) -> object:
        """Return reports, then each client's memory as a separate object, so that old memories can be freed.

        Args:
          state: the state of `message`, which is sent separately.
          is_last: train even if this node is draining, since no other trainer is left.
        """
        if not is_last and self._process.node in going_nodes():  # checked here: queued calls cannot be cancelled
            raise NodeIsGoing(f"node {self._process.node[:8]} is going", "a trainer", "others train its clients")
        message = replace(message, state=state)
        count = sum(len(block.clients) for block in blocks)
        reports, kept = self._trainer.train(message, blocks, memories or [None] * count)
        return (reports, *kept) if memories else reports

    @user_errors()
    def call(self, function: Callable[..., Answer], *values: object) -> Answer:
        """Return function(trainer, *values)."""
        return function(self._trainer, *values)

    @user_errors()
    def score(
        self, function: Callable[..., Answer], point: EvaluationPoint, state: np.ndarray, slices: Sequence[Slice]
    ) -> Answer:
        """Return function(trainer, slices), with the model loaded from `point` and `state`."""
        with self._trainer.global_model(replace(point, state=state)):
            return function(self._trainer, slices)

    @user_errors()
    def columns(self, parts: Sequence[TaskClients], shares: Sequence[Sequence[Columns]]) -> object:
        """Return one array for each share, see `Trainer.columns`; a single array is returned without a list."""
        rows = self._trainer.columns(parts, shares)
        return rows if len(rows) > 1 else rows[0]

    def add(self, *partials: np.ndarray) -> np.ndarray:
        """Return the sum of the node's partial sums; exact, since they lie on a common grid."""
        total = partials[0].copy()
        for partial in partials[1:]:
            total += partial
        return total


@dataclass
class TrainerSlot:
    """A trainer's place in the pool.

    Attributes:
      actor: the current actor of the slot.
      started: reference to the result of the actor's `start`.
      process: the actor's process; None until the actor has started.
      failures: number of consecutive failed starts.
      is_retired: whether the slot stays empty: the trainer's device lacked memory, or the trainer failed to start.
    """

    index: int
    actor: Actor
    started: Ref
    process: Process | None = None
    failures: int = 0
    is_retired: bool = False

    @property
    def node(self) -> str:
        """Return the trainer's node; "" for a lost trainer."""
        return self.process.node if self.process else ""

    def asked_for(self, what: str) -> Watched:
        """Return a record of a call to this trainer. what: description of the call."""
        assert self.process is not None
        return Watched(self.actor, self.process, what)


class TrainerSlots:
    """The trainers of a pool.

    A lost trainer is started again on any node where its share of the resources is or becomes free; until then the run
    continues without it. A trainer whose device lacks memory is ended for good: the other trainers of the node may use
    its memory.

    Args:
      start: start(index) -> a new actor for the slot.
      gpu_share: each trainer's share of a GPU.
      timeout_s: see `Watch`.
      patience_s: seconds that a round waits if no trainer is ready.

    Attributes:
      going: nodes known to be draining.
    """

    def __init__(
        self,
        start: Callable[[int], Actor],
        count: int,
        gpu_share: float = 0.0,
        timeout_s: float | None = None,
        patience_s: float = START_S,
    ):
        self._start, self._gpu_share, self._patience_s = start, gpu_share, patience_s
        self.going: frozenset[str] = frozenset()
        self.watch = Watch(timeout_s)
        self._gpu_shares: dict[str, float] = {}  # share of each remaining trainer, by node with ended trainers
        self._slots: list[TrainerSlot] = []
        self.grow(count)

    def __len__(self) -> int:
        return len(self._slots)

    def grow(self, count: int) -> None:
        """Start trainers until there are `count` slots."""
        for index in range(len(self._slots), count):
            actor = self._start(index)
            self._slots.append(TrainerSlot(index, actor, actor.start.remote()))

    def ready(self) -> list[TrainerSlot]:
        return [slot for slot in self._slots if slot.node]

    def staying(self) -> list[TrainerSlot]:
        """Return ready trainers on staying nodes; if there are none, all ready trainers."""
        ready = self.ready()
        return [slot for slot in ready if slot.node not in self.going] or ready

    def leave(self) -> None:
        """Replace trainers on draining nodes; the last trainer stays until a replacement runs."""
        self.going = going_nodes()
        stays = self.staying()[:1]
        leaving = [slot for slot in self.ready() if slot.node in self.going and slot not in stays]
        for node, count in Counter(slot.node for slot in leaving).items():
            self.watch.notes.append(f"node {node[:8]} is draining; its trainers restart elsewhere: {count}")
        for slot in leaving:
            self.replace(slot)

    def starting(self) -> list[TrainerSlot]:
        return [slot for slot in self._slots if not slot.node and not slot.is_retired]

    def poll(self, timeout_s: float = 0.0) -> None:
        """Update the slots of trainers that have started or failed to start.

        Lost trainers are replaced. A trainer that cannot be built is retired; the error of the last trainer is raised.
        """
        starting = {slot.started: slot for slot in self.starting()}
        while starting:
            done, _ = ray.wait(list(starting), timeout=timeout_s)
            if not done:
                return
            slot, timeout_s = starting.pop(done[0]), 0.0  # waits for the first trainer only
            try:
                slot.process, slot.failures = ray.get(done[0]), 0
            except RayError as error:
                slot.failures += 1
                if isinstance(error, LOSSES) and slot.failures <= RETRIES:
                    self.replace(slot)
                elif self.retire(slot):  # as on a node that joined with a broken installation: the rest continue
                    cause = " ".join(str(getattr(error, "cause", error)).split())[:300]
                    self.watch.notes.append(f"a trainer could not be started and is left out: {cause}")
                else:
                    raise

    def replace(self, slot: TrainerSlot) -> None:
        """Start a new actor in a lost actor's slot, possibly on a new node."""
        ray.kill(slot.actor)
        slot.actor, slot.process = self._start(slot.index), None
        slot.started = slot.actor.start.remote()

    def retire(self, slot: TrainerSlot) -> bool:
        """End a trainer for good, unless it is the last; return whether it was ended.

        The node's other trainers may use its memory.
        """
        if len(self.ready()) + len(self.starting()) < 2:
            return False
        node, slot.process, slot.is_retired = slot.node, None, True
        ray.kill(slot.actor)
        left = [other for other in self.ready() if other.node == node]
        share = self._gpu_shares.get(node, self._gpu_share) * (len(left) + 1) / max(1, len(left))
        self._gpu_shares[node] = share
        for other in left:
            other.actor.call.remote(Trainer.limit_memory, share)
        return True

    def check(self, slots: Iterable[TrainerSlot]) -> None:
        """Replace the trainers of slots whose process has ended."""
        asked = [(slot, slot.actor.__ray_ready__.remote()) for slot in slots]
        self.watch.all({answer: slot.asked_for("whether it is there") for slot, answer in asked})
        for slot, answer in asked:
            try:
                ray.get(answer)
            except LOSSES:
                self.replace(slot)

    def wait_for(self, count: int) -> None:
        """Wait for the given number of trainers; after START_S seconds, for at least one.

        Raises:
          NoTrainer: no trainer is ready.
        """
        began = time.monotonic()
        self.poll()
        for enough, patience_s in ((count, START_S), (1, self._patience_s)):
            while (
                len(self.ready()) < enough and self.starting() and (left_s := began + patience_s - time.monotonic()) > 0
            ):
                self.poll(timeout_s=left_s)
        if not self.ready():
            raise NoTrainer(
                f"not one of {len(self._slots)} trainers could be started within {self._patience_s:g} s",
                "the Ray cluster",
                "look at the nodes (ray status); run the same command again to resume from the last checkpoint",
            )
