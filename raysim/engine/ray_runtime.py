"""All of raysim's Ray: starting it, the actors, and the pool. Nothing else of the engine knows that Ray exists."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import ray
import torch
from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError, RayError, RayTaskError, WorkerCrashedError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from raysim.core.errors import OutOfMemory, RaysimError
from raysim.engine.plan import ClientBlock, fitting
from raysim.engine.pool import Pool, TaskResult
from raysim.engine.server import RoundRecord, Server
from raysim.engine.trainer import Trainer
from raysim.training.evaluate import Score

#: How often a task is tried again after its worker died, before the run gives up on it.
TASK_RETRIES = 3

#: Seconds that a round waits while not a single trainer can be had, before the run gives up.
START_S = 120.0

#: What Ray raises when a worker process or a whole node, with all objects that lay there, is gone.
LOSSES = (RayActorError, ObjectLostError, WorkerCrashedError, NodeDiedError)

T = TypeVar("T")


@contextlib.contextmanager
def ray_session(num_cpus: int | None = None) -> Iterator[None]:
    """A running Ray: the one that is there, the one RAY_ADDRESS names, or a local one, which alone is shut down."""
    if ray.is_initialized():
        yield
        return
    address = os.environ.get("RAY_ADDRESS")
    local: dict[str, Any] = {} if address else {"num_cpus": num_cpus, "include_dashboard": False}
    ray.init(address=address or "local", log_to_driver=False, logging_level=logging.ERROR, **local)
    try:
        yield
    finally:
        ray.shutdown()


def available() -> tuple[float, float]:
    """(CPUs, GPUs) that this job may use: those of its placement group if it has one, else of the running Ray."""
    group = ray.util.get_current_placement_group()
    if group is not None:
        bundles = group.bundle_specs
        return sum(b.get("CPU", 0) for b in bundles), sum(b.get("GPU", 0) for b in bundles)
    total = ray.cluster_resources()
    return total.get("CPU", 0), total.get("GPU", 0)


def is_in_group() -> bool:
    """Whether this process lives in a placement group: it is then a trial of a sweep, and the group is all it has."""
    return ray.util.get_current_placement_group() is not None


def rooms() -> list[tuple[float, float]]:
    """(CPUs, GPUs) of each place that a trainer must fit into: the bundles of the placement group, else the nodes."""
    group = ray.util.get_current_placement_group()
    places = _nodes() if group is None else group.bundle_specs
    return [(place.get("CPU", 0), place.get("GPU", 0)) for place in places]


def _nodes() -> list[dict[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


class _ShardHost:
    """Hands out the files of a shard folder; lives on the driver's node."""

    def __init__(self, folder: str):
        self._folder = Path(folder)

    def read(self, name: str) -> np.ndarray:
        return np.fromfile(self._folder / name, dtype=np.uint8)


def shard_fetcher(folder: str, name: str) -> tuple[Path, Callable[[str], None] | None]:
    """(folder to map, fetch) for the process that calls this.

    Where the driver's folder can be seen (one machine, a shared disk) it is used as it is. Elsewhere files come from
    the host actor of that name through the object store, into this node's temporary folder.
    """
    if (Path(folder) / "index.json").is_file():
        return Path(folder), None
    local = Path(tempfile.gettempdir()) / f"raysim-shards-{os.getuid()}" / Path(folder).name

    def fetch(file: str) -> None:
        host = ray.get_actor(name)
        temporary = local / f".{file}.{os.getpid()}.part"
        content: Any = ray.get(host.read.remote(file))
        content.tofile(temporary)
        os.replace(temporary, local / file)

    return local, fetch


class _TrainerActor:
    """A trainer in its own process, built by its first call, whose errors then arrive as they were raised."""

    def __init__(self, make_trainer: Callable[[], Trainer], gpu_share: float = 0.0):
        self._make_trainer, self._gpu_share = make_trainer, gpu_share

    def start(self) -> str:
        """Build the trainer; the id of the node that it is on."""
        self._trainer = self._make_trainer()
        self.limit_memory(self._gpu_share)
        return ray.get_runtime_context().get_node_id()

    def limit_memory(self, share: float) -> None:
        if share:
            self._trainer.limit_memory(share)

    def train(self, message: dict[str, Any], blocks: Sequence[ClientBlock], *memories: Any) -> tuple[Any, ...]:
        """(report, vectors), then each client's memory as an object of its own, so that old ones can be freed singly."""
        if not memories:
            count = sum(len(block.clients) for block in blocks)
            report, vectors, _ = self._trainer.train(message, blocks, [None] * count)
            return report, vectors
        report, vectors, kept = self._trainer.train(message, blocks, memories)
        return report, vectors, *kept

    def fold(self, name: str, requests: Any, constants: np.ndarray, *vectors: Any) -> np.ndarray:
        return self._trainer.fold(name, requests, constants, *vectors)

    def add(self, *partials: np.ndarray) -> np.ndarray:
        """The sum of this node's partial sums: they lie on one grid, so it is exact."""
        total = partials[0].copy()
        for partial in partials[1:]:
            total += partial
        return total

    def map_updates(self, function: Any, shared: Any, rows: Any, *vectors: Any) -> list[Any]:
        return self._trainer.map_updates(function, shared, rows, *vectors)

    def evaluate(self, name: str, point: dict[str, Any], start: int, end: int) -> Score:
        return self._trainer.evaluate(name, point, start, end)

    def map_features(self, function: Any, shared: Any, point: dict[str, Any], start: int, end: int) -> Any:
        return self._trainer.map_features(function, shared, point, start, end)

    def ping(self) -> int:
        return self._trainer.ping()


@dataclass
class _Place:
    """A trainer's place in the pool.

    Attributes:
      actor: who fills it now; started: what its `start` will return; node: where it is, "" until it has started.
      failures: starts that failed, one after the other.
      is_retired: its device had no memory left for one more trainer; nobody fills it any more.
    """

    index: int
    actor: Any
    started: Any
    node: str = ""
    failures: int = 0
    is_retired: bool = False


@dataclass
class _Task:
    """Some blocks to train, with all that it takes to train them once more; later, where the results lie.

    Attributes:
      message: handle; memories: handles of what the clients kept before this round.
      place, actor, node: who has it, or had it, and where.
      refs: report, vectors, then new memories.
    """

    message: Any
    blocks: list[ClientBlock]
    memories: list[Any]
    place: _Place | None = None
    actor: Any = None
    node: str = ""
    refs: list[Any] = field(default_factory=list)
    tries: int = 0


class RayPool:
    """Trainer actors behind the same interface as `SerialPool`; lives in the server's process.

    Trainers may be lost at any time, alone or with their node. A task depends on its arguments alone, so whoever does
    it again gets the same bits: the tasks of a lost trainer go to those who have nothing left to do, and results that
    lay on a lost node are trained again when they are asked for. A lost trainer is started anew wherever its share of
    the resources is, or becomes, free; until then the run goes on without it.

    A trainer whose device has no memory left for a client is ended for good: its memory goes to the others there, which
    do its tasks. Only the last one of all cannot do better, and its error ends the run.

    Only sums travel: those of a node's trainers are added there, except on the server's own node, where they are in
    reach as they are. Updates stay where they were made. (Ray hands over results below 100 kB with the task's reply.)

    Args:
      start: start(index) -> a new actor for that place.
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
        self._start, self._keeps_memory, self._capacity = start, keeps_memory, capacity
        self._gpu_share = gpu_share
        self._gpu_shares: dict[str, float] = {}  # by node, where trainers were ended
        self._here = ray.get_runtime_context().get_node_id()
        self._places: list[_Place] = []
        self._grow(num_trainers)
        self._planned: list[_Place] = []
        self._redone_blocks = self._sum_bytes = 0

    # --- trainers -----------------------------------------------------------------------------------------------------

    def _grow(self, count: int) -> None:
        for index in range(len(self._places), count):
            actor = self._start(index)
            self._places.append(_Place(index, actor, actor.start.remote()))

    def _ready(self) -> list[_Place]:
        return [place for place in self._places if place.node]

    def _starting(self) -> list[_Place]:
        return [place for place in self._places if not place.node and not place.is_retired]

    def _poll(self, timeout_s: float = 0.0) -> None:
        """Note who has started since; what building a trainer raised is raised here."""
        starting = {place.started: place for place in self._starting()}
        done, _ = ray.wait(list(starting), timeout=timeout_s) if starting else ([], [])
        while done:
            place = starting.pop(done[0])
            try:
                place.node, place.failures = ray.get(done[0]), 0
            except RayError as error:
                place.failures += 1
                if not isinstance(error, LOSSES) or place.failures > TASK_RETRIES:
                    raise
                self._replace(place)
            done, _ = ray.wait(list(starting), timeout=0) if starting else ([], [])

    def _replace(self, place: _Place) -> None:
        """Start another actor in a lost one's place; it waits for room if its node is gone."""
        ray.kill(place.actor)
        place.actor, place.node = self._start(place.index), ""
        place.started = place.actor.start.remote()

    def _retire(self, place: _Place) -> bool:
        """End a trainer for good, if it is not the last; those left on its node may use its share of the memory."""
        if len(self._ready()) + len(self._starting()) < 2:
            return False
        node, place.node, place.is_retired = place.node, "", True
        ray.kill(place.actor)
        left = [other for other in self._ready() if other.node == node]
        share = self._gpu_shares.get(node, self._gpu_share) * (len(left) + 1) / max(1, len(left))
        self._gpu_shares[node] = share
        for other in left:
            other.actor.limit_memory.remote(share)
        return True

    def _check(self, places: Iterable[_Place]) -> None:
        """Replace those who do not answer: their process has ended."""
        for place, answer in [(place, place.actor.ping.remote()) for place in places]:
            try:
                ray.get(answer)
            except LOSSES:
                self._replace(place)

    def _wait_for(self, count: int) -> None:
        """Wait until so many trainers are ready; after START_S seconds, one is enough.

        Raises:
          RaysimError: there is none.
        """
        deadline = time.monotonic() + START_S
        self._poll()
        while len(self._ready()) < count and time.monotonic() < deadline:
            self._poll(timeout_s=max(0.0, deadline - time.monotonic()))
        if not self._ready():
            raise RaysimError(
                f"not one of {len(self._places)} trainers could be started within {START_S:g} s",
                "the Ray cluster",
                "look at its nodes (ray status); run the same command again to resume from the last checkpoint",
            )

    def begin_round(self) -> int:
        with _plain_errors():
            if self._capacity is not None:
                self._grow(self._capacity())
            # At first for all of them, then for nobody who is not there.
            self._wait_for(1 if self._planned else len(self._places))
        self._planned = self._ready()
        return len(self._planned)

    def take_counts(self) -> dict[str, float]:
        counts = {
            "trainers": len(self._planned),
            "nodes": len({place.node for place in self._planned}),
            "sum_mb": self._sum_bytes / 1e6,
            "redone_blocks": self._redone_blocks,
        }
        self._redone_blocks = self._sum_bytes = 0
        return counts

    # --- training -----------------------------------------------------------------------------------------------------

    def put(self, value: Any) -> Any:
        return ray.put(value)

    def get(self, handle: Any) -> Any:
        return ray.get(handle)

    def train(
        self, message: dict[str, Any], queues: Sequence[Sequence[Sequence[ClientBlock]]], memories: dict[int, Any]
    ) -> Iterator[TaskResult]:
        sent = ray.put(message)
        planned: list[tuple[_Place | None, _Task]] = []
        depth = max((len(tasks) for tasks in queues), default=0)
        for position in range(depth):  # every trainer's first task before anybody's second
            for place, tasks in zip(self._planned, queues, strict=True):
                if position < len(tasks):
                    blocks = list(tasks[position])
                    clients = [client for block in blocks for client in block.clients]
                    mine = [memories.get(client) for client in clients] if self._keeps_memory else []
                    planned.append((place, _Task(sent, blocks, mine)))
        with _plain_errors():
            for task, report in self._run(planned):
                yield TaskResult(report, task, tuple(task.refs[2:]))

    def _run(self, planned: Iterable[tuple[_Place | None, _Task]]) -> Iterator[tuple[_Task, dict[str, Any]]]:
        """Each task with its report as it is finished; tasks without a place go to whoever has nothing left to do."""
        pending: dict[Any, _Task] = {}
        waiting: deque[_Task] = deque()
        for place, task in planned:
            if place is None:
                waiting.append(task)
            else:
                pending[self._submit(task, place)] = task
        while pending or waiting:
            if waiting:
                self._poll()
                if not pending:
                    self._wait_for(1)
                busy = {task.place.index for task in pending.values() if task.place}
                for place in self._ready():
                    if place.index not in busy and waiting:
                        task = waiting.popleft()
                        pending[self._submit(task, place)] = task
            starting = [place.started for place in self._starting()] if waiting else []
            ready, _ = ray.wait([*pending, *starting], num_returns=1)
            for ref in ready:
                if ref in pending:
                    task = pending.pop(ref)
                    report = self._finished(task)
                    if report is None:
                        waiting.append(task)
                    else:
                        yield task, report

    def _submit(self, task: _Task, place: _Place) -> Any:
        task.place, task.actor, task.node = place, place.actor, place.node
        call = place.actor.train.options(num_returns=2 + len(task.memories))
        task.refs = call.remote(task.message, task.blocks, *task.memories)
        return task.refs[0]

    def _finished(self, task: _Task) -> dict[str, Any] | None:
        """The report of a task that has ended; None if it is to be done again, since it or what it made is lost."""
        try:
            report = ray.get(task.refs[0])
            if task.node != self._here:  # what clients keep outlives the round, so it must outlive the node
                task.refs[2:] = [ray.put(memory) for memory in ray.get(task.refs[2:])]
        except LOSSES as error:
            task.tries += 1
            if task.tries > TASK_RETRIES:
                raise
            self._redone_blocks += len(task.blocks)
            place = task.place
            is_its = place is not None and place.actor is task.actor and not place.is_retired
            if isinstance(error, RayActorError) and place is not None and is_its:
                self._replace(place)
            return None
        except RayTaskError as error:
            if not isinstance(error.cause, OutOfMemory) or task.place is None or not self._retire(task.place):
                raise
            self._redone_blocks += len(task.blocks)
            return None
        return report

    # --- what runs where the updates lie ------------------------------------------------------------------------------

    def fold(
        self, name: str, parts: Sequence[tuple[TaskResult, Any, np.ndarray]], constants: np.ndarray
    ) -> list[np.ndarray]:
        def attempt() -> list[np.ndarray]:
            shares: dict[int, list[tuple[_Task, Any, np.ndarray]]] = {}
            for (result, weights, rows), place in zip(parts, self._near([part[0] for part in parts]), strict=True):
                shares.setdefault(place.index, []).append((result.vectors, weights, rows))
            nodes: dict[str, list[tuple[_Place, Any]]] = {}
            for index, share in shares.items():
                place = self._places[index]
                requests = [(weights, rows) for _, weights, rows in share]
                vectors = [task.refs[1] for task, _, _ in share]
                nodes.setdefault(place.node, []).append(
                    (place, place.actor.fold.remote(name, requests, constants, *vectors))
                )
            asked: list[tuple[str, Any]] = []
            for node, made in nodes.items():
                partials = [partial for _, partial in made]
                if node != self._here and len(made) > 1:
                    partials = [made[0][0].actor.add.remote(*partials)]
                asked += [(node, partial) for partial in partials]
            sums = ray.get([partial for _, partial in asked])
            self._sum_bytes += sum(
                partial.nbytes for (node, _), partial in zip(asked, sums, strict=True) if node != self._here
            )
            return sums

        return self._persist(attempt, [part[0] for part in parts])

    def map_updates(
        self, function: Callable[[Any, Any], Any], shared: Any, parts: Sequence[tuple[TaskResult, np.ndarray]]
    ) -> list[list[Any]]:
        common = ray.put(shared)

        def attempt() -> list[list[Any]]:
            places = self._near([result for result, _ in parts])
            return ray.get(
                [
                    place.actor.map_updates.remote(function, common, [rows], result.vectors.refs[1])
                    for (result, rows), place in zip(parts, places, strict=True)
                ]
            )

        return self._persist(attempt, [result for result, _ in parts])

    def evaluate(self, point: dict[str, Any], slices: Sequence[tuple[str, int, int]]) -> list[Score]:
        sent = ray.put(point)
        return self._in_slices(lambda actor, name, start, end: actor.evaluate.remote(name, sent, start, end), slices)

    def map_features(
        self, function: Callable[..., Any], shared: Any, point: dict[str, Any], slices: Sequence[tuple[int, int]]
    ) -> list[Any]:
        common, sent = ray.put(shared), ray.put(point)
        return self._in_slices(
            lambda actor, start, end: actor.map_features.remote(function, common, sent, start, end), slices
        )

    def _in_slices(self, ask: Callable[..., Any], slices: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The answers for all slices, which the trainers take in turn."""

        def attempt() -> list[Any]:
            places = self._ready()
            return ray.get([ask(places[number % len(places)].actor, *part) for number, part in enumerate(slices)])

        return self._persist(attempt, [])

    def _near(self, results: Sequence[TaskResult]) -> list[_Place]:
        """For each task result a trainer: the one that made it, else one on its node, else any."""
        ready = self._ready()
        places = []
        for number, result in enumerate(results):
            task: _Task = result.vectors
            if task.place is not None and task.place.actor is task.actor and task.place.node:
                places.append(task.place)
            else:
                near = [place for place in ready if place.node == task.node] or ready
                places.append(near[number % len(near)])
        return places

    def _persist(self, attempt: Callable[[], T], results: Sequence[TaskResult]) -> T:
        """Do something with task results; where trainers or results are lost, make up for it and do it again."""
        with _plain_errors():
            for tries in range(1 + TASK_RETRIES):
                self._wait_for(1)
                try:
                    return attempt()
                except LOSSES:
                    if tries == TASK_RETRIES:
                        raise
                self._check(self._ready())
                alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
                lost = [result.vectors for result in results if result.vectors.node not in alive]
                self._redone_blocks += sum(len(task.blocks) for task in lost)
                for _ in self._run((None, task) for task in lost):
                    pass
        raise AssertionError("unreachable")


@dataclass(frozen=True)
class _Starter:
    """How and where trainers are started: the first ones in the placement group, later ones wherever there is room."""

    make_trainer: Callable[[], Trainer]
    cpus: float
    gpus: float
    group: PlacementGroup
    num_reserved: int
    placement: str

    def __call__(self, index: int) -> Any:
        place: Any = "SPREAD" if self.placement == "spread" else "DEFAULT"
        if index < self.num_reserved:
            place = PlacementGroupSchedulingStrategy(self.group)
        actor = ray.remote(_TrainerActor).options(num_cpus=self.cpus, num_gpus=self.gpus, scheduling_strategy=place)
        # Any: Ray adds .remote to methods in a way that a type checker cannot follow.
        handle: Any = actor.remote(self.make_trainer, self.gpus)
        return handle

    def capacity(self) -> int:
        """Trainers that all nodes of the cluster together have room for."""
        return sum(fitting(n.get("CPU", 0), n.get("GPU", 0), self.cpus, self.gpus) for n in _nodes())


class _ServerActor:
    """The server in its own process; its pool talks to the trainers directly, and they end with it."""

    def __init__(
        self, make_server: Callable[[Pool], Server], starter: _Starter, keeps_memory: bool, *, is_growing: bool
    ):
        torch.set_num_threads(1)  # the trainers have the cores; a server's work is small
        capacity = starter.capacity if is_growing else None
        pool = RayPool(starter, starter.num_reserved, keeps_memory, capacity, starter.gpus)
        self._server = make_server(pool)

    def call(self, name: str, *values: Any) -> Any:
        return getattr(self._server, name)(*values)


class RayServer:
    """The server actor as the simulation sees it: the same calls as `Server`.

    The server and the host of the shards stay on the driver's node: a run survives the loss of any other.

    Args:
      wait_s: seconds to wait for room for all trainers before giving up.
      shards: (folder on this node, actor name) to serve shard files to nodes that cannot see the folder.
      placement: "pack" trainers on few nodes, or "spread" them over many.
      is_growing: start more trainers on nodes that join; not in a placement group of somebody else (a Tune trial).
    """

    def __init__(
        self,
        make_server: Callable[[Pool], Server],
        make_trainer: Callable[[], Trainer],
        *,
        num_trainers: int,
        cpus_per_trainer: float,
        gpus_per_trainer: float,
        keeps_memory: bool,
        wait_s: float = 30.0,
        shards: tuple[str, str] | None = None,
        placement: str = "pack",
        is_growing: bool = False,
    ):
        bundle = {"CPU": cpus_per_trainer, **({"GPU": gpus_per_trainer} if gpus_per_trainer else {})}
        current = ray.util.get_current_placement_group()
        self._group = None if current is not None else _reserve([bundle] * num_trainers, placement, wait_s)
        group = self._group or current
        assert group is not None
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._actors: list[Any] = []
        if shards is not None:
            host = ray.remote(_ShardHost).options(num_cpus=0, name=shards[1], scheduling_strategy=here)
            self._actors.append(host.remote(shards[0]))
        starter = _Starter(make_trainer, cpus_per_trainer, gpus_per_trainer, group, num_trainers, placement)
        server = ray.remote(_ServerActor).options(num_cpus=0, scheduling_strategy=here)
        self._server: Any = server.remote(make_server, starter, keeps_memory, is_growing=is_growing and current is None)
        self._actors.append(self._server)

    def _call(self, name: str, *values: Any) -> Any:
        with _plain_errors():
            return ray.get(self._server.call.remote(name, *values))

    def wait_until_ready(self) -> None:
        """Return once every actor has built its parts: the first round then starts at once."""
        self._call("ready")

    def run_round(self, round_index: int) -> RoundRecord:
        return self._call("run_round", round_index)

    def snapshot(self) -> dict[str, Any]:
        return self._call("snapshot")

    def restore(self, snapshot: dict[str, Any]) -> None:
        self._call("restore", snapshot)

    def restore_memory(self, client: int, memory: Any) -> None:
        self._call("restore_memory", client, memory)

    def changed_clients(self) -> list[int]:
        return self._call("changed_clients")

    def client_memory(self, client: int) -> Any:
        return self._call("client_memory", client)

    def params_sha256(self) -> str:
        return self._call("params_sha256")

    def close(self) -> None:
        """End the actors; Ray itself stays as it was."""
        for actor in self._actors:
            ray.kill(actor)  # the trainers end with the server, which started them
        if self._group is not None:
            remove_placement_group(self._group)


def _reserve(bundles: list[dict[str, float]], placement: str, wait_s: float) -> PlacementGroup:
    """A placement group for the trainers: room for all of them, or a clear error instead of a silent wait.

    Raises:
      RaysimError: the resources are not free within `wait_s` seconds.
    """
    group = ray.util.placement_group(bundles, strategy=placement.upper())
    if not group.wait(wait_s):
        remove_placement_group(group)
        free = {name: amount for name, amount in ray.available_resources().items() if name in ("CPU", "GPU")}
        raise RaysimError(
            f"no room within {wait_s:g} s for {len(bundles)} trainers with {bundles[0]} each; free now: {free}",
            "the Ray cluster",
            "lower resources.trainers or the share of each, or wait until other jobs have ended",
        )
    return group


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise what was raised remotely, not Ray's wrapping of it."""
    try:
        yield
    except LOSSES as error:
        raise RaysimError(
            f"a worker process, or what it made, was lost and could not be replaced ({error})",
            "the Ray cluster",
            "look at the worker's log; run the same command again to resume from the last checkpoint",
        ) from error
    except RayTaskError as error:
        if isinstance(error.cause, RaysimError):
            raise error.cause from None
        raise
    except RayError as error:
        raise RaysimError(
            f"Ray failed ({type(error).__name__}: {error})",
            "the Ray cluster",
            "run the same command again to resume from the last checkpoint",
        ) from error
