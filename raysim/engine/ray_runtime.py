"""All of raysim's Ray: starting it, the actors, and the pool. Nothing else of the engine knows that Ray exists."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from raysim.core.errors import RaysimError
from raysim.engine.plan import ClientBlock
from raysim.engine.pool import Pool, TaskResult
from raysim.engine.server import RoundRecord, Server
from raysim.engine.trainer import Trainer
from raysim.training.evaluate import Score

#: How often a task is tried again after its worker died, before the run gives up on it.
TASK_RETRIES = 3


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
    """A trainer in its own process. `max_restarts` and `max_task_retries` redo what a killed worker left unfinished:
    a task depends on its arguments alone, so doing it again gives the same bits."""

    def __init__(self, make_trainer: Callable[[], Trainer]):
        self._trainer = make_trainer()

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

    def map_updates(self, function: Any, shared: Any, rows: Any, *vectors: Any) -> list[Any]:
        return self._trainer.map_updates(function, shared, rows, *vectors)

    def evaluate(self, name: str, point: dict[str, Any], start: int, end: int) -> Score:
        return self._trainer.evaluate(name, point, start, end)

    def ping(self) -> int:
        return self._trainer.ping()


class RayPool:
    """Trainer actors behind the same interface as `SerialPool`."""

    def __init__(self, trainers: Sequence[Any], keeps_memory: bool):
        self._trainers = list(trainers)
        self._keeps_memory = keeps_memory
        self.num_trainers = len(self._trainers)

    def put(self, value: Any) -> Any:
        return ray.put(value)

    def get(self, handle: Any) -> Any:
        return ray.get(handle)

    def train(
        self, message: dict[str, Any], queues: Sequence[Sequence[Sequence[ClientBlock]]], memories: dict[int, Any]
    ) -> Iterator[TaskResult]:
        sent = ray.put(message)
        pending: dict[Any, tuple[int, list[Any]]] = {}
        depth = max((len(tasks) for tasks in queues), default=0)
        for position in range(depth):  # every trainer's first task before anybody's second
            for trainer, tasks in enumerate(queues):
                if position < len(tasks):
                    blocks = list(tasks[position])
                    clients = [client for block in blocks for client in block.clients]
                    mine = [memories.get(client) for client in clients] if self._keeps_memory else []
                    call = self._trainers[trainer].train.options(num_returns=2 + len(mine))
                    refs = call.remote(sent, blocks, *mine)
                    pending[refs[0]] = (trainer, refs)
        with _plain_errors():
            while pending:
                ready, _ = ray.wait(list(pending), num_returns=1)
                for ref in ready:
                    trainer, refs = pending.pop(ref)
                    yield TaskResult(trainer, ray.get(ref), refs[1], tuple(refs[2:]))

    def fold(
        self, name: str, parts: Sequence[tuple[TaskResult, Any, np.ndarray]], constants: np.ndarray
    ) -> list[np.ndarray]:
        sums = []
        for index, trainer in enumerate(self._trainers):
            mine = [part for part in parts if part[0].trainer == index]
            if mine:
                requests = [(weights, rows) for _, weights, rows in mine]
                sums.append(trainer.fold.remote(name, requests, constants, *(result.vectors for result, _, _ in mine)))
        with _plain_errors():
            return ray.get(sums)

    def map_updates(
        self, function: Callable[[Any, Any], Any], shared: Any, parts: Sequence[tuple[TaskResult, np.ndarray]]
    ) -> list[list[Any]]:
        common = ray.put(shared)
        calls = [
            self._trainers[result.trainer].map_updates.remote(function, common, [rows], result.vectors)
            for result, rows in parts
        ]
        with _plain_errors():
            return ray.get(calls)

    def evaluate(self, name: str, point: dict[str, Any], slices: Sequence[tuple[int, int]]) -> list[Score]:
        sent = ray.put(point)
        calls = [
            self._trainers[number % self.num_trainers].evaluate.remote(name, sent, start, end)
            for number, (start, end) in enumerate(slices)
        ]
        with _plain_errors():
            return ray.get(calls)


class _ServerActor:
    """The server in its own process; its pool talks to the trainers directly."""

    def __init__(self, make_server: Callable[[Pool], Server], trainers: Sequence[Any], keeps_memory: bool):
        torch.set_num_threads(1)  # the trainers have the cores; a server's work is small
        self._server = make_server(RayPool(trainers, keeps_memory))

    def call(self, name: str, *values: Any) -> Any:
        return getattr(self._server, name)(*values)


class RayServer:
    """The server actor as the simulation sees it: the same calls as `Server`.

    Args:
      wait_s: seconds to wait for room for all trainers before giving up.
      shards: (folder on this node, actor name) to serve shard files to nodes that cannot see the folder.
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
    ):
        bundle = {"CPU": cpus_per_trainer, **({"GPU": gpus_per_trainer} if gpus_per_trainer else {})}
        self._group, place = _reserve([bundle] * num_trainers, wait_s)
        self._host: Any = None
        if shards is not None:
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
            host = ray.remote(_ShardHost).options(num_cpus=0, name=shards[1], scheduling_strategy=here)
            self._host = host.remote(shards[0])
        trainer = ray.remote(_TrainerActor).options(
            num_cpus=cpus_per_trainer,
            num_gpus=gpus_per_trainer,
            max_restarts=-1,
            max_task_retries=TASK_RETRIES,
            scheduling_strategy=place,
        )
        # Any: Ray adds .remote to methods in a way that a type checker cannot follow.
        self._trainers: list[Any] = [trainer.remote(make_trainer) for _ in range(num_trainers)]
        server = ray.remote(_ServerActor).options(num_cpus=0)
        self._server: Any = server.remote(make_server, self._trainers, keeps_memory)

    def _call(self, name: str, *values: Any) -> Any:
        with _plain_errors():
            return ray.get(self._server.call.remote(name, *values))

    def wait_until_ready(self) -> None:
        """Return once every actor has built its parts: the first round then starts at once."""
        with _plain_errors():
            ray.get([self._server.call.remote("ready"), *(trainer.ping.remote() for trainer in self._trainers)])

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
        for actor in [self._server, *self._trainers, *([self._host] if self._host is not None else [])]:
            ray.kill(actor)
        if self._group is not None:
            remove_placement_group(self._group)


def _reserve(bundles: list[dict[str, float]], wait_s: float) -> tuple[PlacementGroup | None, Any]:
    """(placement group, scheduling strategy) for the trainers: all of them, or a clear error instead of a silent wait.

    Inside a placement group (a Tune trial) the trainers go into that one.
    Raises:
      RaysimError: the resources are not free within `wait_s` seconds.
    """
    if ray.util.get_current_placement_group() is not None:
        return None, "DEFAULT"
    group = ray.util.placement_group(bundles, strategy="PACK")
    if not group.wait(wait_s):
        remove_placement_group(group)
        free = {name: amount for name, amount in ray.available_resources().items() if name in ("CPU", "GPU")}
        raise RaysimError(
            f"no room within {wait_s:g} s for {len(bundles)} trainers with {bundles[0]} each; free now: {free}",
            "the Ray cluster",
            "lower resources.trainers or the share of each, or wait until other jobs have ended",
        )
    return group, PlacementGroupSchedulingStrategy(group)


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise what was raised remotely, not Ray's wrapping of it."""
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, RaysimError):
            raise error.cause from None
        raise
    except RayActorError as error:
        raise RaysimError(
            f"a worker process died and could not be replaced ({error})",
            "the Ray cluster",
            "look at the worker's log; run the same command again to resume from the last checkpoint",
        ) from error
    except RayError as error:
        raise RaysimError(
            f"Ray failed ({type(error).__name__}: {error})",
            "the Ray cluster",
            "run the same command again to resume from the last checkpoint",
        ) from error
