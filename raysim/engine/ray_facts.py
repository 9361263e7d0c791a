"""What `raysim doctor` asks Ray: the nodes of a running cluster, its dashboard, and what a job's upload would hold.

Apart from `engine/ray` because nothing here runs a federation, and because it looks into Ray's own packaging.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants
from ray._private.runtime_env import packaging
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

#: What a dashboard takes: the limit of `ray job submit --working-dir`.
UPLOAD_LIMIT = ray_constants.DASHBOARD_CLIENT_MAX_SIZE


@dataclass(frozen=True)
class NodeFacts:
    """One node of a cluster as a task on it, or a connection to it, found it.

    Attributes:
      versions: of "python", "ray", "torch" and "raysim" (with a digest of its sources); "" where it is not installed.
      gpus: that Ray offers; gpu_names: that PyTorch sees.
      unreachable_ports: (what listens there, port) pairs that this process cannot connect to.
      error: why no task could run there; the rest is then empty.
    """

    name: str
    cpus: float = 0.0
    gpus: float = 0.0
    gpu_names: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    store_bytes: int = 0
    shm_bytes: int = 0
    temp_dir: str = ""
    temp_free_bytes: int = 0
    temp_total_bytes: int = 1
    sees_storage: bool = False
    unreachable_ports: tuple[tuple[str, int], ...] = ()
    error: str = ""


def upload(folder: Path, *, most: int = 50_000) -> list[tuple[int, str]]:
    """(bytes, path) of every file that `ray job submit --working-dir FOLDER` would send, largest first.

    Ray's own walk over the folder, with its default exclusions, .gitignore and .rayignore; files are not compressed.
    Raises:
      ValueError: more than `most` files; it is probably not a project's folder.
    """
    folder = folder.absolute()
    found: list[tuple[int, str]] = []

    def add(path: Path) -> None:
        if path.is_file():
            found.append((path.stat().st_size, path.relative_to(folder).as_posix()))
            if len(found) > most:
                raise ValueError(f"more than {most} files")

    silent = logging.Logger("raysim.upload")
    excludes = [packaging._get_excludes(folder, ray_constants.get_runtime_env_default_excludes())]
    with_gitignore = os.environ.get(ray_constants.RAY_RUNTIME_ENV_IGNORE_GITIGNORE, "0") != "1"
    silent.addHandler(logging.NullHandler())
    packaging._dir_travel(folder, excludes, add, include_gitignore=with_gitignore, logger=silent)
    return sorted(found, reverse=True)


@contextlib.contextmanager
def connected(address: str) -> Iterator[None]:
    """Connected to the Ray at an address, as a driver; it is left running.

    Raises:
      ConnectionError: nobody answers there, or the token is not theirs.
    """
    if ray.is_initialized():
        yield
        return
    host, _, port = address.rpartition(":")
    if port.isdigit() and not can_connect(host.strip("[]"), int(port)):
        raise ConnectionError(f"nothing answers at {address}")
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (RayError, RuntimeError, ConnectionError, ValueError) as error:
        raise ConnectionError(str(error).partition("\n")[0]) from error
    try:
        yield
    finally:
        ray.shutdown()


def can_connect(host: str, port: int, timeout_s: float = 5.0) -> bool:
    """Whether somebody listens on a TCP port."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s):
            return True
    except OSError:
        return False


def dashboard_error(url: str) -> str:
    """Why jobs cannot be submitted to a dashboard, "" if they can."""
    from ray.job_submission import JobSubmissionClient

    try:
        JobSubmissionClient(url).list_jobs()
    except (RuntimeError, ConnectionError, RayError, OSError) as error:
        return str(error).partition("\n")[0] or type(error).__name__
    return ""


def dashboard_url() -> str:
    """URL of the connected Ray's dashboard, "" if it has none."""
    node: Any = ray._private.worker._global_node
    place = node.webui_url
    return f"http://{place}" if place else ""


def ask_nodes(probe: Path | None, content: str, *, wait_s: float = 180.0) -> list[NodeFacts]:
    """The facts of every node that is alive, the head first.

    Args:
      probe: a file in the storage that this process wrote; content: what it holds.
    """
    ask = ray.remote(_question())
    alive = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda n: not _is_head(n))
    # No CPUs, so that a busy cluster answers, too; without the variable a task without GPUs would not see any.
    options: dict[str, Any] = {"num_cpus": 0, "max_retries": 0}
    options["runtime_env"] = {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}}
    asked = []
    for node in alive:
        place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        asked.append(ask.options(scheduling_strategy=place, **options).remote(str(probe) if probe else "", content))
    ray.wait(asked, num_returns=len(asked), timeout=wait_s)
    return [_node_facts(node, ref) for node, ref in zip(alive, asked, strict=True)]


def facts_here() -> dict[str, Any]:
    """What a node answers, of this process."""
    return _question()("", "")


def _is_head(node: dict[str, Any]) -> bool:
    return "node:__internal_head__" in node["Resources"]


def _node_facts(node: dict[str, Any], ref: Any) -> NodeFacts:
    offered = node["Resources"]
    address = node["NodeManagerAddress"]
    listening = {"node manager": node["NodeManagerPort"], "object manager": node["ObjectManagerPort"]}
    closed = tuple((what, port) for what, port in listening.items() if not can_connect(address, port))
    role = "head" if _is_head(node) else "worker"
    name = f"{role} {node['NodeManagerHostname']} ({address}, {node['NodeID'][:6]})"
    try:
        answer = ray.get(ref, timeout=0)
    except RayError as error:
        reason = "no answer" if "timed out" in str(error) else str(error).strip().rpartition("\n")[2]
        return NodeFacts(name, unreachable_ports=closed, error=f"{reason} ({type(error).__name__})")
    return NodeFacts(
        name,
        cpus=offered.get("CPU", 0.0),
        gpus=offered.get("GPU", 0.0),
        store_bytes=int(offered.get("object_store_memory", 0)),
        unreachable_ports=closed,
        **answer,
    )


def _question() -> Callable[[str, str], dict[str, Any]]:
    """The task that a node runs. A nested function travels by value: it runs where there is no raysim, or another one."""

    def answer(probe: str, content: str) -> dict[str, Any]:
        import hashlib
        import importlib.metadata
        import importlib.util
        import platform
        import shutil
        from pathlib import Path

        def version(name: str) -> str:
            try:
                return importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                return ""

        versions = {"python": platform.python_version(), "ray": version("ray"), "torch": version("torch")}
        found = importlib.util.find_spec("raysim")
        versions["raysim"] = ""
        if found is not None and found.origin is not None:
            folder = Path(found.origin).parent
            digest = hashlib.sha256()
            for file in sorted(folder.rglob("*.py")):
                digest.update(file.relative_to(folder).as_posix().encode() + file.read_bytes())
            versions["raysim"] = f"{version('raysim') or 'uploaded'} (sources {digest.hexdigest()[:8]})"
        try:
            import torch

            names = tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        except (ImportError, OSError, RuntimeError):
            names = ()
        temp_dir = "/tmp"
        import ray

        if ray.is_initialized():
            node: Any = ray._private.worker._global_node
            temp_dir = node.get_session_dir_path()
        disk = shutil.disk_usage(temp_dir)
        try:
            sees = bool(probe) and Path(probe).read_text() == content
        except OSError:
            sees = False
        return {
            "versions": versions,
            "gpu_names": names,
            "shm_bytes": shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0,
            "temp_dir": temp_dir,
            "temp_free_bytes": disk.free,
            "temp_total_bytes": disk.total,
            "sees_storage": sees,
        }

    return answer
