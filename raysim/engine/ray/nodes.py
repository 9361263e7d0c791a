"""Facts about the nodes of a running Ray, for `raysim doctor`."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysim.engine.ray.session import can_connect, live_nodes


@dataclass(frozen=True)
class NodeFacts:
    """A node of a cluster: Ray's record, and the answers of a task on the node.

    Attributes:
      gpus: number of GPUs that Ray offers.
      gpu_names: names of the GPUs that PyTorch sees.
      versions: versions of "python", "ray", "torch" and "raysim" (with a digest of its sources); "" if not installed.
      sees_storage: whether the node can read the probe file in the storage.
      error: why no task could run on the node; the fields that the task would fill then keep their defaults.
    """

    name: str
    cpus: float = 0.0
    gpus: float = 0.0
    gpu_names: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    temp_dir: str = ""
    temp_free_bytes: int = 0
    temp_total_bytes: int = 1
    sees_storage: bool = False
    error: str = ""


@contextlib.contextmanager
def connected(address: str) -> Iterator[None]:
    """Connect to the Ray cluster at an address as a driver; the cluster continues to run after the block.

    Raises:
      ConnectionError: nothing answers at the address, or the token is not the cluster's token.
    """
    if not can_connect(address):  # Ray itself would try for a minute
        raise ConnectionError(f"nothing answers at {address}")
    try:
        session = ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (RayError, RuntimeError, ConnectionError, ValueError) as error:
        raise ConnectionError(str(error).partition("\n")[0]) from error
    with session:
        yield


def ask_nodes(probe: str, *, wait_s: float = 180.0) -> list[NodeFacts]:
    """Return the facts of every live node, the head first.

    Args:
      probe: path of a file that this process wrote to the storage; "" if the file could not be written.
    """
    nodes = sorted(live_nodes(), key=_is_head, reverse=True)
    # No CPUs, so that a busy cluster answers, too. The variable lets a task without GPUs see the node's GPUs.
    environment = {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}}
    ask = ray.remote(num_cpus=0, max_retries=0, runtime_env=environment)(question())
    places = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
    answers = [ask.options(scheduling_strategy=place).remote(probe) for place in places]
    ray.wait(answers, num_returns=len(answers), timeout=wait_s)
    return [_node_facts(node, answer) for node, answer in zip(nodes, answers, strict=True)]


def _is_head(node: Mapping[str, Any]) -> bool:
    return "node:__internal_head__" in node["Resources"]


def _node_facts(node: Mapping[str, Any], answer: ray.ObjectRef[dict[str, Any]]) -> NodeFacts:
    kind, address = "head" if _is_head(node) else "worker", node["NodeManagerAddress"]
    try:
        facts = ray.get(answer, timeout=0)
    except RayError as error:
        reason = "no answer" if isinstance(error, GetTimeoutError) else str(error).strip().rpartition("\n")[2]
        facts = {"error": f"{reason} ({type(error).__name__})"}
    return NodeFacts(
        f"{kind} {node['NodeManagerHostname']} ({address}, {node['NodeID'][:6]})",
        cpus=node["Resources"].get("CPU", 0.0),
        gpus=node["Resources"].get("GPU", 0.0),
        **facts,
    )


def question() -> Callable[[str], dict[str, Any]]:
    """Return the task for a node. Ray pickles a nested function by value, so that nodes without raysim can run it."""

    def answer(probe: str) -> dict[str, Any]:
        versions = {"python": platform.python_version(), "ray": "", "torch": "", "raysim": ""}
        for name, distribution in (("ray", "ray"), ("torch", "torch"), ("raysim", "raysim-fl")):
            with contextlib.suppress(metadata.PackageNotFoundError):
                versions[name] = metadata.version(distribution)
        sources = util.find_spec("raysim")
        if sources is not None and sources.origin is not None:
            package, digest = Path(sources.origin).parent, hashlib.sha256()
            for file in sorted(package.rglob("*.py")):
                if file.parent != package / "cluster":  # only installed wheels have this folder
                    digest.update(file.read_bytes())
            versions["raysim"] = f"{versions['raysim'] or 'uploaded'} (sources {digest.hexdigest()[:8]})"
        gpu_names: tuple[str, ...] = ()
        with contextlib.suppress(ImportError, OSError, RuntimeError):
            import torch

            device_module = torch.get_device_module()  # not raysim's `accelerator`: a node may have no raysim
            gpu_names = tuple(map(device_module.get_device_name, range(torch.accelerator.device_count())))
        me = ray.get_runtime_context().get_node_id()
        # TEMP/session_.../sockets/raylet; Ray 2.52 has no `get_temp_dir`.
        temp_dir = next(Path(node["RayletSocketName"]).parents[2] for node in ray.nodes() if node["NodeID"] == me)
        disk = shutil.disk_usage(temp_dir)
        return {
            "versions": versions,
            "gpu_names": gpu_names,
            "temp_dir": str(temp_dir),
            "temp_free_bytes": disk.free,
            "temp_total_bytes": disk.total,
            "sees_storage": os.access(probe, os.R_OK),
        }

    return answer
