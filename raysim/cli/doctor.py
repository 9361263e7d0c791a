"""`raysim doctor`: checks of this installation, the disks, and every node of a running cluster."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from raysim.base.uri import is_uri
from raysim.cli.terminal import LiveLine, say
from raysim.config import home_folder

if TYPE_CHECKING:
    from raysim.engine.ray.nodes import NodeFacts

PACKAGES = ("ray", "torch", "torchvision", "timm", "peft", "medmnist", "shap", "scikit-learn", "pyarrow", "tensorboard")

#: Free bytes below which a disk counts as full: Ray's logs and spilled objects, and the runs, need more.
MIN_DISK = 2 * 2**30

#: Used share of a disk above which Ray stores no more objects (Ray's local_fs_capacity_threshold).
FULL = 0.95

#: (whether a check passed, line about the check).
Finding = tuple[bool, str]


def examine(address: str | None) -> bool:
    """Print a line for each check of `raysim doctor`, and return whether all checks passed.

    Args:
      address: address of a running Ray, host:port or auto; without an address no cluster is checked.
    """
    storage, is_good = home_folder() / "runs", True
    parts = {"this installation": installation(), "the disks": disks(storage)}
    parts[f"the cluster at {address}"] = cluster(address, storage)
    with LiveLine() as live:
        for what, findings in parts.items():
            live.show(f"looking at {what}")
            for is_ok, line in findings:
                say(f"{'ok  ' if is_ok else 'FAIL'} {line}")
                is_good = is_good and is_ok
    return is_good


def _finding(is_ok: bool, line: str, fault: str) -> Finding:
    """Return a finding; a failed check adds the fault and the remedy."""
    return is_ok, line if is_ok else line + fault


def installation() -> Iterator[Finding]:
    """Yield findings on versions, cores, memory and GPUs of this machine."""
    yield (3, 11) <= sys.version_info[:2] <= (3, 13), f"Python {sys.version.split()[0]} (3.11 to 3.13)"
    for name in PACKAGES:
        try:
            yield True, f"{name} {version(name)}"
        except PackageNotFoundError:
            yield False, f"{name} is not installed: pip install {name}"
    fault = ""
    try:
        importlib.import_module("torchvision.ops")  # fails to import if torch and torchvision do not match
    except (ImportError, RuntimeError, AttributeError) as error:
        fault = f" ({error}): use the versions of constraints.txt"
    yield not fault, f"torch and torchvision {'do not ' if fault else ''}match{fault}"
    import psutil

    from raysim.folders.environment import gpu_names  # loads PyTorch

    free, total = psutil.virtual_memory().available / 2**30, psutil.virtual_memory().total / 2**30
    yield True, f"{os.cpu_count()} CPUs, {free:.0f} of {total:.0f} GiB of memory free"
    yield True, f"GPUs: {', '.join(gpu_names()) or 'none, trainers use CPUs'}"


def disks(storage: Path) -> Iterator[Finding]:
    """Yield findings on free space where Ray and the runs write, and on whether the storage can be written."""
    yield from (_disk(Path(place), place) for place in (".", "/dev/shm", "/tmp") if os.path.isdir(place))
    try:
        _write_probe(storage).unlink()
        yield _disk(_existing(storage), f"{storage} (storage)")
    except OSError as error:
        remedy = "set RAYSIM_HOME to a writable folder"
        yield False, f"storage {storage} cannot be written ({error}): {remedy}"


def _disk(folder: Path, name: str) -> Finding:
    free = shutil.disk_usage(folder).free
    return _finding(free > MIN_DISK, f"{free / 2**30:.1f} GiB free in {name}", ": Ray and the runs need 2 GiB or more")


def cluster(address: str | None, storage: Path) -> Iterator[Finding]:
    """Yield findings on every node of a running Ray."""
    if not address or is_uri(address):  # a URI is the address of a dashboard, which only handles jobs
        remedy = "give --address or set RAY_ADDRESS, or submit `python -m raysim doctor` as a job"
        yield True, f"no cluster looked at: {remedy}"
        return
    from raysim.engine.ray.nodes import ask_nodes, connected, question

    probe = None
    try:
        with connected(address):
            yield True, f"connected to Ray at {address}"
            with contextlib.suppress(OSError):  # `disks` reports it
                probe = _write_probe(storage)
            yield from node_findings(ask_nodes(str(probe or "")), question()("")["versions"], storage)
    except ConnectionError as error:
        token = "RAY_AUTH_MODE and the token (RAY_AUTH_TOKEN or ~/.ray/auth_token)"
        remedy = f"is it running, is its port open from here, and do {token} match?"
        yield False, f"cannot connect to Ray at {address} ({error}): {remedy}"
    finally:
        if probe is not None:
            probe.unlink(missing_ok=True)


def node_findings(nodes: Sequence[NodeFacts], here: Mapping[str, str], storage: Path) -> Iterator[Finding]:
    """Yield the findings of each node.

    Args:
      here: versions on the driver, which the nodes' versions must match (see `_core`).
      storage: a folder that all nodes should see.
    """
    for node in nodes:
        if node.error:
            yield False, f"{node.name}: ran no task: {node.error}; look at `ray status` and at the node's logs"
        else:
            checks = [_versions(node, here), _gpus(node), _temp(node), _storage(node, storage)]
            yield from ((is_ok, f"{node.name}: {line}") for is_ok, line in checks)


def _versions(node: NodeFacts, here: Mapping[str, str]) -> Finding:
    there = ", ".join(f"{name} {text}" if text else f"no {name}" for name, text in node.versions.items())
    others = [name for name, text in node.versions.items() if _core(name, text) != _core(name, here[name])]
    driver = ", ".join(f"{name} {here[name]}" for name in others)
    remedy = "install the same on every node (constraints.txt), or submit with --working-dir ."
    return _finding(not others, there, f"; the driver has {driver}: {remedy}, which brings raysim along")


def _core(name: str, text: str) -> str:
    """Return the relevant part of a version: Python without the last number, torch without +cpu or +cu130."""
    return text.rpartition(".")[0] if name == "python" else text.partition("+")[0]


def _gpus(node: NodeFacts) -> Finding:
    line, names = f"{node.cpus:g} CPUs, {node.gpus:g} GPUs", ", ".join(node.gpu_names)
    if names and not node.gpus:
        return True, f"{line}; {names} is present, but Ray does not use the GPU: ray start --num-gpus"
    fault = ", but PyTorch sees no GPU: check nvidia-smi on the node, and install a CUDA build of torch"
    return _finding(bool(names) or not node.gpus, f"{line} ({names})" if names else line, fault)


def _temp(node: NodeFacts) -> Finding:
    is_ok = node.temp_free_bytes >= max(MIN_DISK, (1 - FULL) * node.temp_total_bytes)
    fault = ": Ray needs 2 GiB and a disk below 95 %; start Ray with another --temp-dir"
    return _finding(is_ok, f"{node.temp_free_bytes / 2**30:.1f} GiB free in {node.temp_dir}", fault)


def _storage(node: NodeFacts, storage: Path) -> Finding:
    if node.sees_storage:
        return True, f"sees {storage}"
    remedy = "mount shared storage on every node and set RAYSIM_HOME to the mount"
    scope = "a single run needs the mount on the head only, a sweep on all nodes"
    return False, f"does not see the driver's files in {storage}: {remedy} ({scope})"


def _write_probe(storage: Path) -> Path:
    """Create an empty probe file in the storage, or in the nearest existing parent folder."""
    probe = _existing(storage) / f".raysim-doctor-{uuid.uuid4().hex}"
    probe.touch()
    return probe


def _existing(folder: Path) -> Path:
    return next(place for place in (folder, *folder.absolute().parents) if place.is_dir())
