"""The server as an actor, and the start of the trainers."""

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
    """Starts trainers.

    Attributes:
      share: resources of a trainer, by Ray's names.
      num_trainers: number of trainers at the start.
      nodes: nodes with room for the first trainers; unused with `group`.
      most: most trainers to grow to; infinite: as many as there is room for; None: the number is fixed.
      timeout_s, patience_s: see `TrainerSlots`.
      group: placement group of a Ray Tune trial, in which all trainers run; None: Ray may place trainers on any node.
      begun: index -> actor whose process is starting already, at the same time as the server.
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
        """Start the processes of the first `num_trainers` trainers without waiting; return the actors."""
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
        """Return the number of trainers to grow to if possible; Ray's autoscaler starts nodes for pending trainers.

        0 if the number is fixed, as in a Ray Tune trial.
        """
        if self.most is None or self.group is not None:
            return 0
        if math.isfinite(self.most):
            return int(self.most)
        return sum(fitting(room, self.share) for room in placements())


class ServerActor:
    """The server in a process of its own; its pool calls the trainers directly.

    The server is built by the first call, so that construction errors reach the caller.
    """

    def __init__(self, make_server: Callable[[Pool], Server], starter: TrainerStarter, keeps_memory: bool):
        torch.set_num_threads(1)  # the cores are for the trainers; the server computes little
        keep_freed_memory()  # every round allocates sums of the model's size: fresh pages cost four times the addition
        slots = TrainerSlots(starter, starter.num_trainers, starter.gpus, starter.timeout_s, starter.patience_s)
        self._make_server = partial(make_server, RayPool(slots, keeps_memory, starter.capacity))

    @cached_property
    def _server(self) -> Server:
        return self._make_server()

    def call(self, function: Callable[Concatenate[Server, P], Answer], *values: P.args, **named: P.kwargs) -> Answer:
        """Return function(server, *values, **named)."""
        return function(self._server, *values, **named)


#: Remedy in the message of ClusterLost, shown when all `resources.restarts` are used.
GO_ON = "look at the logs of its nodes, and raise resources.restarts; the same command resumes from the last checkpoint"


def _in_actor(function: Callable[Concatenate[Server, P], Answer]) -> Callable[Concatenate[RayServer, P], Answer]:
    """Return a method of `RayServer` that runs a function of `Server` in the actor."""

    def call(server: RayServer, /, *values: P.args, **named: P.kwargs) -> Answer:
        with plain_errors():
            answer: Answer = server.answer(server.actor.call.remote(function, *values, **named))
        return answer

    return call


class RayServer:
    """Handle of the server actor, with the methods of `Server` that the simulation calls.

    The server runs on the driver's node, so a run survives the loss of any other node. The loss of the driver's node or
    of the head of the cluster raises ClusterLost. Errors of the run's code or configuration are raised unchanged.

    Args:
      deadline: time of time.monotonic until which the server waits for trainers whose room another job took.
      say: say(line) reports the wait.
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
        # All processes start at the same time: each one first imports PyTorch.
        server = ray.remote(ServerActor).options(num_cpus=0, scheduling_strategy=here)
        self._actors = starter.begin_all()
        self.actor: Actor = server.remote(make_server, starter, keeps_memory)
        self._actors.append(self.actor)

    def wait_until_ready(self) -> None:
        """Return when the server and the trainers are built.

        Raises:
          NoTrainer: no trainer has started by `deadline`, since another job took the room.
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
        """Return the server's answer.

        Raises:
          ClusterLost: the server is lost, or the head of the cluster accepts no connections for GONE_S seconds.
        """
        answered = time.monotonic()
        try:
            while not ray.wait([asked], timeout=PAUSE_S, fetch_local=False)[0]:
                if can_connect(self._head):
                    answered = time.monotonic()
                elif time.monotonic() - answered >= GONE_S:
                    raise ClusterLost("the head of the cluster was lost", self._head, GO_ON)
            return ray.get(asked)
        except RayTaskError:
            raise
        except RayError as error:
            reason = str(error).partition("\n")[0].rstrip(".")
            raise ClusterLost(f"the server was lost ({reason})", "the Ray cluster", GO_ON) from error

    def run_round(self, round_index: int) -> RoundRecord:
        """See `Server.run_round`. Raises ClusterLost also if all trainers were lost and none could be restarted."""
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
        """End the actors; Ray continues to run."""
        for actor in self._actors:
            ray.kill(actor)  # trainers of later rounds end with the server, which started them
