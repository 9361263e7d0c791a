"""The server actor, the trainers, and room for all of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
import torch
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from raysim.base.errors import ClusterLost
from raysim.engine.device import keep_freed_memory
from raysim.engine.pool import Pool
from raysim.engine.ray.pool import RayPool
from raysim.engine.ray.session import GONE_S, PAUSE_S, Actor, Ref, can_connect, placements, plain_errors
from raysim.engine.ray.slots import START_S, NoTrainer, TrainerActor, TrainerSlots
from raysim.engine.round_metrics import RoundRecord
from raysim.engine.schedule import fitting
from raysim.engine.server import Server
from raysim.engine.trainer import Trainer

Answer = TypeVar("Answer")
P = ParamSpec("P")


@dataclass(frozen=True)
class TrainerStarter:
    """How and where trainers are started.

    Attributes:
      share: of each resource, by Ray's names, that a trainer has.
      nodes: where the first ones have room, outside of a group.
      most: trainers to grow to; infinite: as many as there is room for; None: their number is fixed.
      timeout_s, patience_s: see `TrainerSlots`.
      group: of somebody else, a Tune trial's, that all must live in; None: later trainers go wherever there is room.
      begun: by index, those whose processes start already, beside the server's.
    """

    make_trainer: Callable[[], Trainer]
    share: Mapping[str, float]
    num_trainers: int
    nodes: Sequence[str] = ()
    most: float | None = None
    timeout_s: float | None = None
    patience_s: float = START_S
    group: PlacementGroup | None = field(default_factory=ray.util.get_current_placement_group)
    begun: dict[int, Actor] = field(default_factory=dict)

    def __call__(self, index: int) -> Actor:
        return self.begun.pop(index) if index in self.begun else self._begin()

    def begin_all(self) -> list[Actor]:
        """Begin to start the first `num_trainers`."""
        for index in range(self.num_trainers):
            self.begun[index] = self._begin(self.nodes[index] if self.nodes else "")
        return list(self.begun.values())

    def _begin(self, node: str = "") -> Actor:
        place: object = "DEFAULT"
        if self.group is not None:
            place = PlacementGroupSchedulingStrategy(self.group)
        elif node:
            place = NodeAffinitySchedulingStrategy(node, soft=True)
        custom = {name: each for name, each in self.share.items() if name not in ("CPU", "GPU")}
        actor = ray.remote(TrainerActor).options(
            num_cpus=self.share["CPU"], num_gpus=self.gpus, resources=custom, scheduling_strategy=place
        )
        return actor.remote(self.make_trainer, self.gpus)

    @property
    def gpus(self) -> float:
        return self.share.get("GPU", 0.0)

    def capacity(self) -> int:
        """Number of trainers that a run uses if possible; Ray's autoscaler starts nodes for pending trainers.

        0 where their number is fixed, as in a group of somebody else.
        """
        if self.most is None or self.group is not None:
            return 0
        if math.isfinite(self.most):
            return int(self.most)
        return sum(fitting(room, self.share) for room in placements())


class ServerActor:
    """The server in a process of its own; its pool calls the trainers directly.

    It is built by the first call, whose errors then arrive as they were raised.
    """

    def __init__(self, make_server: Callable[[Pool], Server], starter: TrainerStarter, keeps_memory: bool):
        torch.set_num_threads(1)  # the trainers have the cores; a server's work is small
        keep_freed_memory()  # sums of the model's size in every round: fresh pages cost four times the adding
        slots = TrainerSlots(starter, starter.num_trainers, starter.gpus, starter.timeout_s, starter.patience_s)
        self._make_server = partial(make_server, RayPool(slots, keeps_memory, starter.capacity))

    @cached_property
    def _server(self) -> Server:
        return self._make_server()

    def call(self, function: Callable[Concatenate[Server, P], Answer], *values: P.args, **named: P.kwargs) -> Answer:
        """function(server, *values)."""
        return function(self._server, *values, **named)


#: How to mend a loss, once the run has gone on by itself as often as it may.
GO_ON = "look at the logs of its nodes, and raise resources.restarts; the same command resumes from the last checkpoint"


def _in_actor(function: Callable[Concatenate[Server, P], Answer]) -> Callable[Concatenate[RayServer, P], Answer]:
    """A function of `Server` as one of `RayServer`, run in the actor."""

    def call(server: RayServer, /, *values: P.args, **named: P.kwargs) -> Answer:
        with plain_errors():
            answer: Answer = server.answer(server.actor.call.remote(function, *values, **named))
        return answer

    return call


class RayServer:
    """The server actor as the simulation sees it: the same calls as `Server`.

    The server stays on the driver's node: a run survives the loss of any other. What is lost with this one, or with the
    head of the cluster, is ClusterLost; faults of the run's own code, and of its configuration, are not.

    Args:
      deadline: on the clock of time.monotonic; until then trainers whose room another job took are waited for.
      say: prints a line on the wait.
    """

    def __init__(
        self,
        make_server: Callable[[Pool], Server],
        starter: TrainerStarter,
        *,
        keeps_memory: bool,
        deadline: float = 0.0,
        say: Callable[[str], None] = lambda line: None,
    ):
        self._deadline, self._say = deadline, say
        self._head = ray.get_runtime_context().gcs_address
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        # All at once: each process first imports PyTorch.
        server = ray.remote(ServerActor).options(num_cpus=0, scheduling_strategy=here)
        self._actors = starter.begin_all()
        self.actor: Actor = server.remote(make_server, starter, keeps_memory)
        self._actors.append(self.actor)

    def wait_until_ready(self) -> None:
        """Return once every actor has built its parts: the first round then starts at once.

        Raises:
          NoTrainer: another job took the room that was found, and has it still when the time to wait for room is over.
        """
        while True:
            try:
                self._ready()
                return
            except NoTrainer as error:
                if time.monotonic() > self._deadline:
                    raise
                self._say(f"waiting for room: {error.what}; another job took the room")

    def answer(self, asked: Ref) -> Any:
        """What the server answers.

        Raises:
          ClusterLost: it is gone, or nobody takes connections at the head of the cluster any more.
        """
        heard = time.monotonic()
        try:
            while not ray.wait([asked], timeout=PAUSE_S, fetch_local=False)[0]:
                if can_connect(self._head):
                    heard = time.monotonic()
                elif time.monotonic() - heard >= GONE_S:
                    raise ClusterLost("the head of the cluster was lost", self._head, GO_ON)
            return ray.get(asked)
        except RayTaskError:
            raise
        except RayError as error:
            reason = str(error).partition("\n")[0].rstrip(".")
            raise ClusterLost(f"the server was lost ({reason})", "the Ray cluster", GO_ON) from error

    def run_round(self, round_index: int) -> RoundRecord:
        """As `Server.run_round`. Raises ClusterLost also if all trainers were lost and none returns."""
        try:
            return self._run_round(round_index)
        except NoTrainer as error:
            raise ClusterLost(error.what, error.where, error.mend) from error

    _ready = _in_actor(Server.ready)
    _run_round = _in_actor(Server.run_round)
    snapshot = _in_actor(Server.snapshot)
    restore = _in_actor(Server.restore)
    restore_memory = _in_actor(Server.restore_memory)
    changed_clients = _in_actor(Server.changed_clients)
    client_memory = _in_actor(Server.client_memory)
    params_sha256 = _in_actor(Server.params_sha256)

    def close(self) -> None:
        """End the actors; Ray itself stays as it was."""
        for actor in self._actors:
            ray.kill(actor)  # trainers of later rounds end with the server, which started them
