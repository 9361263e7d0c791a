"""Connection to Ray: start and end, resources, and translation of Ray's errors."""

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
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any, TypeVar

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
from raysim.engine.ray.forking import ADDRESS, ForkServer, Models

Answer = TypeVar("Answer")

#: The handle of an actor, and a reference to an object in Ray's store. Both are Any: a type checker cannot follow Ray's
#: `.remote`, and a task may return any type.
Actor = Any
Ref = Any

#: Errors that Ray raises when an actor's process has ended: by itself, with its node, or by Ray's memory monitor.
ENDS = (RayActorError, WorkerCrashedError, NodeDiedError, OutOfMemoryError)

#: The errors in ENDS, and the error for lost objects of a node.
LOSSES = (*ENDS, ObjectLostError)


#: Seconds between two checks of a cluster that does not answer.
PAUSE_S = 5.0

#: Seconds without an answer after which a cluster counts as lost. Ray itself ends the process after 60 s, and
#: disconnecting from Ray takes 20 s.
GONE_S = 20.0

#: Number of attempts to start a local Ray, each with Ray's own limit of 30 s, which cannot be set; Ray's error message.
STARTS, SLOW_START = 3, "timed out during startup"


#: The thread that starts and ends Ray for `ray_ahead`.
_STARTER = ThreadPoolExecutor(1, "ray-ahead")
#: Losses after which this process disconnected from Ray; see `end_process`.
_LEFT: list[ClusterLost] = []
#: Fork servers of the local Ray that this process has started.
_FORK_SERVERS: list[ForkServer] = []
#: The start that `ray_ahead` has begun.
_BEGUN: ContextVar[Future[None] | None] = ContextVar("begun", default=None)


@contextlib.contextmanager
def ray_ahead(models: Models = ()) -> Iterator[None]:
    """Start Ray in a thread, since a local Ray takes as long to start as the import of PyTorch.

    A `ray_session` in the block waits for the start. After the block, the thread ends Ray, even if there was no
    session; the caller does not wait, so that an error is reported at once. The process ends only after Ray.

    Args:
      models: see `ForkServer`.
    """
    if ray.is_initialized():
        yield
        return
    begun = _STARTER.submit(_start, models)
    token = _BEGUN.set(begun)
    try:
        yield
    finally:
        _BEGUN.reset(token)
        _STARTER.submit(end_ray)


@contextlib.contextmanager
def ray_session(
    on_step: Callable[[str], None] = lambda _: None, patience_s: float = 0.0, models: Models = ()
) -> Iterator[None]:
    """Connect to the current Ray, to RAY_ADDRESS, or to a new local Ray; only the local Ray is shut down.

    After ClusterLost in the block, the next session is a new connection, or a new local Ray.

    Args:
      on_step: on_step(text) is called with the name of the step that begins.
      patience_s: seconds to wait for a cluster that does not answer.
      models: see `ForkServer`.
    """
    begun, address = _BEGUN.get(), os.environ.get("RAY_ADDRESS")
    if begun is None and ray.is_initialized():
        yield
        return
    on_step(f"connecting to Ray at {address}" if address else "starting Ray on this machine")
    if begun is None:
        patiently(partial(_start, models), patience_s, on_step)
    else:
        begun.result()
        with contextlib.suppress(ValueError):  # not the main thread, in which Ray itself would have handled SIGTERM
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                    signal.signal(number, lambda number, _: sys.exit(number))
    try:
        yield
    except ClusterLost as error:
        _LEFT.append(error)
        if begun is not None:  # the next session starts Ray itself
            _BEGUN.set(None)
            _STARTER.submit(end_ray).result()
        raise
    finally:
        if begun is None:
            on_step(_ending())
            end_ray()


def patiently(call: Callable[[], Answer], patience_s: float, on_step: Callable[[str], None]) -> Answer:
    """Repeat a failing call() for `patience_s` seconds; report the reason when it changes."""
    deadline, said = time.monotonic() + patience_s, ""
    while True:
        try:
            return call()
        except Exception as error:  # Ray has no error class for an incomplete cluster
            if time.monotonic() >= deadline:
                raise
            if (reason := " ".join(str(error).split())[:300]) != said:
                on_step(f"waiting for the cluster, at most {patience_s:g} s: {reason}")
                said = reason
            time.sleep(PAUSE_S)


def wait_for_end(on_step: Callable[[str], None]) -> None:
    """Wait until the Ray of `ray_ahead` has ended. on_step: see `ray_session`."""
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


def _start(models: Models = ()) -> None:
    address = os.environ.get("RAY_ADDRESS")
    if address and not can_connect(address):  # Ray would try for minutes
        mend = "start the cluster, correct RAY_ADDRESS, or unset RAY_ADDRESS to start Ray on this machine"
        raise RaysimError("no Ray cluster answers", f"RAY_ADDRESS={address}", mend)
    is_ours = not address
    logging.getLogger("ray").setLevel(logging.ERROR)  # suppresses Ray's warning of a start outside the main thread
    for attempts_left in reversed(range(STARTS)):
        try:
            with contextlib.ExitStack() as stack:
                if is_ours:
                    # Binds to 127.0.0.1, unreachable from other machines, as on macOS and Windows. With the option
                    # `_node_ip_address="127.0.0.1"`, Ray uses the machine's address.
                    stack.enter_context(_replaced(ray_constants, "ENABLE_RAY_CLUSTER", False))
                    stack.enter_context(few_processes(models))
                ray.init(
                    address or "local",
                    include_dashboard=False if is_ours else None,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )
            return
        except Exception as error:  # Ray has no error class for a failed start
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
def few_processes(models: Models = ()) -> Iterator[None]:
    """Run a Ray started in the block without dashboard, autoscaler and log monitor, and on Linux with forked workers.

    Ray has no public options for these processes. A version of Ray without the private names starts as usual.

    Args:
      models: see `ForkServer`.
    """
    replacements: list[tuple[object, str, object]] = [
        (ray_node.Node, f"start_{process}", _nothing) for process in ("monitor", "log_monitor", "api_server")
    ]
    # The node's agent calls this function before it loads its part of the dashboard.
    replacements.append((utils, "get_dashboard_dependency_error", lambda: ImportError("no dashboard is wanted")))
    with contextlib.ExitStack() as stack:
        if sys.platform == "linux":  # forks are unsafe on macOS, and unknown to Windows
            _FORK_SERVERS.append(ForkServer(models))
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


def is_in_group() -> bool:
    """Return whether this process runs in a placement group, as a trial of a sweep does."""
    return ray.util.get_current_placement_group() is not None


def placements() -> list[dict[str, float]]:
    """Return the resources of each bundle of the current placement group; without a group, of each node."""
    group = ray.util.get_current_placement_group()
    return offered() if group is None else list(group.bundle_specs)


def offered() -> list[dict[str, float]]:
    """Return each node's resources, minus the resources of the current Ray task or actor."""
    context = ray.get_runtime_context()
    try:
        held: dict[str, float] = context.get_assigned_resources()
    except AssertionError:  # raised by Ray in a driver process
        held = {}
    node_id = context.get_node_id()
    return [
        {
            name: amount - (held.get(name, 0) if node["NodeID"] == node_id else 0)
            for name, amount in node["Resources"].items()
        }
        for node in live_nodes()
    ]


def this_node() -> str:
    """Return Ray's id of this process's node."""
    node: str = ray.get_runtime_context().get_node_id()
    return node


def live_nodes() -> list[dict[str, Any]]:
    """Return Ray's records of live nodes, without draining nodes, on which nothing new starts."""
    going = going_nodes()
    return [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in going]


def going_nodes() -> frozenset[str]:
    """Return Ray's ids of draining nodes, which will shut down soon. Ray is asked at most once a second."""
    return _going_nodes(int(time.monotonic()))


@lru_cache(maxsize=1)
def _going_nodes(second: int) -> frozenset[str]:
    return frozenset(state.get_draining_nodes())


def can_connect(address: str) -> bool:
    """Return whether a process listens at HOST:PORT; True for addresses without a port, such as "auto"."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return True
    place = host.strip("[]"), int(port)
    with contextlib.suppress(OSError, OverflowError), socket.create_connection(place, timeout=5.0):
        return True
    return False


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Raise a remote RaysimError without Ray's wrapper, and Ray's own errors as RaysimError."""
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
