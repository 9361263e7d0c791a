"""A running Ray: start, resources, and translation of Ray's errors."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, TypedDict, TypeVar

import ray
from ray._private import node as ray_node
from ray._private import ray_constants, utils
from ray._private.state import state
from ray.exceptions import (
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from raysim.base.errors import ClusterLost, RaysimError
from raysim.engine.ray import forking
from raysim.engine.ray.forking import ADDRESS, ForkServer

Answer = TypeVar("Answer")

#: The handle of an actor, and a reference to what lies in Ray's store. Any: Ray adds `.remote` to functions in a way that a
#: type checker cannot follow, and a reference is to whatever a task returned.
Actor = Any
Ref = Any

#: What Ray raises when an actor's process is gone, by itself, with its node, or by Ray's memory monitor.
ENDS = (RayActorError, WorkerCrashedError, NodeDiedError, OutOfMemoryError)

#: The same, and what it raises when objects are gone that lay on a node.
LOSSES = (*ENDS, ObjectLostError)


#: Seconds between two looks at a cluster that is waited for, or that may be gone.
PAUSE_S = 5.0

#: Seconds without an answer after which a cluster is lost. Ray itself ends the process after 60, and being left takes it 20.
GONE_S = 20.0

#: How often a local Ray is started before its own limit of 30 s, which cannot be set, is an error; and what Ray then says.
STARTS, SLOW_START = 3, "timed out during startup"


class Node(TypedDict):
    """Ray's record of a node, as far as it is used here."""

    NodeID: str
    Alive: bool
    Resources: dict[str, float]


#: Where Ray is started and ended for `ray_ahead`, one after the other.
_STARTER = ThreadPoolExecutor(1, "ray-ahead")
#: Losses after which this process left a Ray; see `end_process`.
_LEFT: list[ClusterLost] = []
#: Of the local Ray that this process has started.
_FORK_SERVERS: list[ForkServer] = []
_BEGUN: ContextVar[Future[None] | None] = ContextVar("begun", default=None)


@contextlib.contextmanager
def ray_ahead() -> Iterator[None]:
    """Begin to start Ray and return at once: the processes of a local Ray take as long as importing PyTorch.

    A `ray_session` in the block waits for it. After the block Ray is ended, without waiting for that either, also if
    there was no session: an error is then told before Ray is gone. The process does not end before.
    """
    if ray.is_initialized():
        yield
        return
    begun = _STARTER.submit(_start)
    token = _BEGUN.set(begun)
    try:
        yield
    finally:
        _BEGUN.reset(token)
        _STARTER.submit(end_ray)


@contextlib.contextmanager
def ray_session(on_step: Callable[[str], None] = lambda _: None, patience_s: float = 0.0) -> Iterator[None]:
    """Connect to the current Ray, to RAY_ADDRESS, or to a new local Ray; only the local Ray is shut down.

    After ClusterLost in the block the next session is a new connection, or a new local Ray.

    Args:
      on_step: on_step(what begins now, in words).
      patience_s: seconds to wait for a cluster that does not answer.
    """
    begun, address = _BEGUN.get(), os.environ.get("RAY_ADDRESS")
    if begun is None and ray.is_initialized():
        yield
        return
    on_step(f"connecting to Ray at {address}" if address else "starting Ray on this machine")
    if begun is None:
        patiently(_start, patience_s, on_step)
    else:
        begun.result()
        with contextlib.suppress(ValueError):  # not the main thread; there Ray would have set the first handler
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup wants it
                    signal.signal(number, lambda number, _: sys.exit(number))
    try:
        yield
    except ClusterLost as error:
        _LEFT.append(error)
        if begun is not None:  # the next session begins by itself
            _BEGUN.set(None)
            _STARTER.submit(end_ray).result()
        raise
    finally:
        if begun is None:
            on_step(_ending())
            end_ray()


def patiently(call: Callable[[], Answer], patience_s: float, on_step: Callable[[str], None]) -> Answer:
    """Repeat a failing call() for the given seconds; a change of the reason is reported."""
    deadline, said = time.monotonic() + patience_s, ""
    while True:
        try:
            return call()
        except Exception as error:  # Ray raises no class of its own where a cluster is not whole
            if time.monotonic() >= deadline:
                raise
            if (reason := " ".join(str(error).split())[:300]) != said:
                on_step(f"waiting for the cluster, at most {patience_s:g} s: {reason}")
                said = reason
            time.sleep(PAUSE_S)


def wait_for_end(on_step: Callable[[str], None]) -> None:
    """Return once the Ray of `ray_ahead` is ended; on_step: see `ray_session`."""
    on_step(_ending())
    _STARTER.submit(lambda: None).result()


def end_process(status: int) -> None:
    """Exit with a status after a lost Ray, whose threads would crash a normal exit."""
    if _LEFT:
        _STARTER.submit(end_ray).result()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _ending() -> str:
    return "disconnecting from Ray" if os.environ.get("RAY_ADDRESS") else "ending Ray"


def _start() -> None:
    address = os.environ.get("RAY_ADDRESS")
    if address and not can_connect(address):  # Ray would try for minutes
        mend = "start the cluster, correct RAY_ADDRESS, or unset RAY_ADDRESS to start Ray on this machine"
        raise RaysimError("no Ray cluster answers", f"RAY_ADDRESS={address}", mend)
    is_ours = not address
    logging.getLogger("ray").setLevel(logging.ERROR)  # it warns of a start outside the main thread
    for attempts_left in reversed(range(STARTS)):
        try:
            with contextlib.ExitStack() as stack:
                if is_ours:
                    stack.enter_context(_on_loopback())
                    stack.enter_context(few_processes())
                ray.init(
                    address or "local",
                    include_dashboard=False if is_ours else None,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )
            return
        except Exception as error:  # Ray raises no class of its own here
            end_ray()
            if SLOW_START not in str(error):
                raise
            if not attempts_left:
                load, cpus = os.getloadavg()[0], os.cpu_count()
                mend = f"the machine has {cpus} CPUs and a load of {load:.0f}: start again when the load is lower"
                raise RaysimError(
                    f"Ray did not start in {STARTS} attempts of 30 s", "Ray on this machine", mend
                ) from error


def end_ray() -> None:
    """Disconnect from Ray, and end a local Ray."""
    ray.shutdown()
    while _FORK_SERVERS:
        _FORK_SERVERS.pop().close()


@contextlib.contextmanager
def few_processes() -> Iterator[None]:
    """Start a Ray in the block without dashboard, autoscaler and log monitor, and on Linux with forked workers.

    Ray has no public switches for these processes. A version of Ray without the private names starts as usual.
    """
    replacements: list[tuple[object, str, object]] = [
        (ray_node.Node, f"start_{process}", _nothing) for process in ("monitor", "log_monitor", "api_server")
    ]
    # What the node's agent asks before it loads its part of the dashboard.
    replacements.append((utils, "get_dashboard_dependency_error", lambda: ImportError("no dashboard is wanted")))
    with contextlib.ExitStack() as stack:
        if sys.platform == "linux":  # forks are unsafe on macOS, and unknown to Windows
            _FORK_SERVERS.append(ForkServer())
            os.environ[ADDRESS] = _FORK_SERVERS[-1].address
            stack.callback(os.environ.pop, ADDRESS)
            replacements.append((ray_constants, "SETUP_WORKER_FILENAME", forking.__file__))
        for owner, name, value in replacements:
            stack.enter_context(_replaced(owner, name, value))
        yield


def _nothing(*_: object, **__: object) -> None:
    """Start no process."""


@contextlib.contextmanager
def _replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Replace an existing attribute in the block; a missing attribute stays missing."""
    before = vars(owner).get(name)
    if before is not None:
        setattr(owner, name, value)
    try:
        yield
    finally:
        if before is not None:
            setattr(owner, name, before)


def _on_loopback() -> AbstractContextManager[None]:
    """Bind a Ray started in the block to 127.0.0.1, unreachable from other machines.

    On macOS and Windows Ray does so by itself. `ray.init(_node_ip_address="127.0.0.1")` takes the machine's own address.
    """
    return _replaced(ray_constants, "ENABLE_RAY_CLUSTER", False)


def is_in_group() -> bool:
    """Whether this process runs in a placement group, as a trial of a sweep."""
    return ray.util.get_current_placement_group() is not None


def placements() -> list[dict[str, float]]:
    """Return the resources of each place for a trainer: bundles of the placement group, else nodes."""
    group = ray.util.get_current_placement_group()
    return offered() if group is None else list(group.bundle_specs)


def offered() -> list[dict[str, float]]:
    """Return each node's resources, minus the resources of the current Ray task or actor."""
    context = ray.get_runtime_context()
    try:
        held: dict[str, float] = context.get_assigned_resources()
    except AssertionError:  # how Ray says that this process is a driver
        held = {}
    own = context.get_node_id()
    return [
        {
            name: amount - (held.get(name, 0) if node["NodeID"] == own else 0)
            for name, amount in node["Resources"].items()
        }
        for node in live_nodes()
    ]


def this_node() -> str:
    """Return Ray's id of this process's node."""
    node: str = ray.get_runtime_context().get_node_id()
    return node


def live_nodes() -> list[Node]:
    """Return Ray's records of live nodes, without draining nodes, where nothing new starts."""
    going = going_nodes()
    return [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in going]


def going_nodes() -> frozenset[str]:
    """Return Ray's ids of draining nodes, which were given notice and will disappear.

    They are asked for once a second at most.
    """
    return _going_nodes(int(time.monotonic()))


@lru_cache(maxsize=1)
def _going_nodes(second: int) -> frozenset[str]:
    return frozenset(state.get_draining_nodes())


def can_connect(address: str) -> bool:
    """Whether somebody listens at HOST:PORT; true for another address, such as "auto", which Ray itself knows."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return True
    place = host.strip("[]"), int(port)
    with contextlib.suppress(OSError, OverflowError), socket.create_connection(place, timeout=5.0):
        return True
    return False


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Raise the remote error without Ray's wrapper."""
    try:
        yield
    except LOSSES as error:
        raise RaysimError(
            f"a worker process or a worker's result was lost and could not be replaced ({error})",
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
