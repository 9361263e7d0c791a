"""What `raysim doctor` looks at: this installation, the disks, a job's upload, and every node of a running cluster."""

from __future__ import annotations

import os
import shutil
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raysim.engine.ray_facts import NodeFacts

PACKAGES = ("ray", "torch", "torchvision", "timm", "peft", "medmnist", "shap", "scikit-learn", "pyarrow", "tensorboard")

#: Bytes below which a disk is called full: Ray's logs and spilled objects, and the runs, need more.
MIN_DISK = 2 * 2**30

#: Bytes of an object store below which the updates of a round may have to go through the disk.
MIN_STORE = 2**30

#: Share of a disk above which Ray takes no more objects (its local_fs_capacity_threshold).
FULL = 0.95

Finding = tuple[bool, str]


def findings(address: str | None, storage: Path, working_dir: Path) -> Iterator[Finding]:
    """(whether it is well, a line) for each thing looked at.

    Args:
      address: of a running Ray (host:port or auto) or of its dashboard (http://...); None: no cluster is looked at.
      storage: folder for run directories. working_dir: what a job would upload.
    """
    yield from installation()
    yield from disks(storage)
    yield from upload(working_dir)
    if not address:
        yield (
            True,
            "no cluster looked at: give --address or set RAY_ADDRESS, or submit `python -m raysim doctor` as a job",
        )
    else:
        yield from cluster(address, storage)


# --- this process -----------------------------------------------------------------------------------------------------


def installation() -> Iterator[Finding]:
    """Versions, cores, memory and GPUs of this machine."""
    yield (3, 11) <= sys.version_info[:2] <= (3, 13), f"Python {sys.version.split()[0]} (3.11 to 3.13)"
    for name in PACKAGES:
        try:
            yield True, f"{name} {version(name)}"
        except PackageNotFoundError:
            yield False, f"{name} is not installed: pip install -c constraints.txt -e ."
    try:
        import torchvision

        boxes = torchvision.ops.nms  # fails to resolve where torch and torchvision do not fit each other
        yield boxes is not None, "torch and torchvision fit each other"
    except (ImportError, RuntimeError, AttributeError) as error:
        yield False, f"torch and torchvision do not fit each other ({error}): use the versions of constraints.txt"
    import psutil
    import torch

    memory = psutil.virtual_memory()
    yield (
        True,
        f"{os.cpu_count()} CPUs, {memory.available / 2**30:.0f} of {memory.total / 2**30:.0f} GiB of memory free",
    )
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    yield True, f"GPUs: {', '.join(names) if names else 'none, trainers use CPUs'}"


def disks(storage: Path) -> Iterator[Finding]:
    """Free space where Ray and the runs write, and whether the storage can be written."""
    for place in (".", "/dev/shm", "/tmp"):
        if os.path.isdir(place):
            yield _disk(shutil.disk_usage(place).free, place)
    try:
        _write_probe(storage, "").unlink()
    except OSError as error:
        yield False, f"storage {storage} cannot be written ({error}): set storage, or RAYSIM_HOME, to a folder that can"
        return
    yield _disk(shutil.disk_usage(_existing(storage)).free, f"{storage} (storage)")


def _disk(free_bytes: int, place: str) -> Finding:
    is_enough = free_bytes > MIN_DISK
    return is_enough, f"{_size(free_bytes)} free in {place}" + (
        "" if is_enough else ": Ray and the runs need 2 GiB or more"
    )


def upload(working_dir: Path) -> Iterator[Finding]:
    """What `ray job submit --working-dir` would send, with its largest files."""
    from raysim.engine import ray_facts

    try:
        files = ray_facts.upload(working_dir)
    except ValueError as error:
        yield (
            False,
            f"a job from {working_dir.absolute()} would upload {error}: start from the clone, or write a .rayignore",
        )
        return
    size, limit = sum(count for count, _ in files), ray_facts.UPLOAD_LIMIT
    largest = "".join(f"\n         {_size(count):>10}  {name}" for count, name in files[:10])
    line = f"a job from here would upload {len(files)} files, {_size(size)} (at most {_size(limit)}); the largest:{largest}"
    if size >= limit:
        line += "\n     too much: name what the run does not need in .rayignore, and put data below RAYSIM_HOME of the cluster"
    yield size < limit, line


# --- a cluster --------------------------------------------------------------------------------------------------------


def cluster(address: str, storage: Path) -> Iterator[Finding]:
    """Every node of a running Ray, and its dashboard."""
    from raysim.engine import ray_facts

    if address.startswith(("http://", "https://")):
        yield _dashboard(address, ray_facts.dashboard_error(address))
        yield (
            True,
            "the nodes are seen from within: ray job submit --working-dir . -- python -m raysim doctor",
        )
        return
    content, probe = uuid.uuid4().hex, None
    try:
        with ray_facts.connected(address):
            yield True, f"connected to Ray at {address}"
            url = ray_facts.dashboard_url()
            yield _dashboard(url, ray_facts.dashboard_error(url) if url else "")
            try:
                probe = _write_probe(storage, content)
            except OSError:
                probe = None  # a finding of its own already
            nodes = ray_facts.ask_nodes(probe, content)
            yield from node_findings(nodes, ray_facts.facts_here()["versions"], storage)
    except ConnectionError as error:
        yield (
            False,
            f"cannot connect to Ray at {address} ({error}): is it running, is its port open from here, and do RAY_AUTH_MODE "
            "and the token (RAY_AUTH_TOKEN or ~/.ray/auth_token) match?",
        )
    finally:
        if probe is not None:
            probe.unlink(missing_ok=True)


def _dashboard(url: str, error: str) -> Finding:
    if not url:
        return False, "no dashboard: `ray job submit` needs one; start the head with --include-dashboard=true"
    if error:
        return False, (
            f"the dashboard at {url} does not answer ({error}): it listens on the head's loopback unless started with "
            "--dashboard-host; go through `ray dashboard CLUSTER.yaml`, and give the token"
        )
    return True, f"the dashboard at {url} takes jobs"


def node_findings(nodes: Sequence[NodeFacts], here: Mapping[str, str], storage: Path) -> Iterator[Finding]:
    """What is well and what is not on each node.

    Args:
      here: versions of the driver, which those of the nodes must equal.
    """
    for node in nodes:
        if node.error:
            yield False, f"{node.name}: ran no task: {node.error}; look at `ray status` and at the node's logs"
            continue
        yield _versions(node, here)
        yield _gpus(node)
        yield _store(node)
        is_full = node.temp_free_bytes < (1 - FULL) * node.temp_total_bytes
        line = f"{node.name}: {_size(node.temp_free_bytes)} free in {node.temp_dir}"
        if is_full or node.temp_free_bytes < MIN_DISK:
            yield False, f"{line}: Ray needs 2 GiB and a disk below 95 %; start it with another --temp-dir"
        else:
            yield True, line
        if node.sees_storage:
            yield True, f"{node.name}: sees {storage}"
        else:
            yield (
                False,
                (
                    f"{node.name}: does not see what the driver writes to {storage}: mount shared storage on every node and "
                    "set RAYSIM_HOME to it (a single run needs it on the head alone, a sweep everywhere)"
                ),
            )
    closed = [f"{what} port {port} of {node.name}" for node in nodes for what, port in node.unreachable_ports]
    if closed:
        yield False, f"cannot reach {', '.join(closed)}: open the ports of cluster/env.sh between the nodes"
    else:
        yield True, f"the ports of {len(nodes)} node{'s' if len(nodes) != 1 else ''} can be reached"


def _versions(node: NodeFacts, here: Mapping[str, str]) -> Finding:
    there = ", ".join(f"{name} {text}" if text else f"no {name}" for name, text in node.versions.items())
    others = [
        f"{name} {here[name]}" for name, text in node.versions.items() if _core(name, text) != _core(name, here[name])
    ]
    if not others:
        return True, f"{node.name}: {there}"
    return False, (
        f"{node.name}: {there}; the driver has {', '.join(others)}: install the same on every node (constraints.txt), "
        "or submit with --working-dir ., which brings raysim along"
    )


def _core(name: str, text: str) -> str:
    """The part of a version that must be equal: Python without its last number, torch without +cpu or +cu130."""
    return text.rpartition(".")[0] if name == "python" else text.partition("+")[0]


def _gpus(node: NodeFacts) -> Finding:
    line = f"{node.name}: {node.cpus:g} CPUs, {node.gpus:g} GPUs"
    if node.gpus and not node.gpu_names:
        return False, f"{line}, but PyTorch sees none: check nvidia-smi there, and that torch is a CUDA build"
    if node.gpu_names and not node.gpus:
        return True, f"{line}; {', '.join(node.gpu_names)} is there, but Ray was not told: ray start --num-gpus"
    return True, line + (f" ({', '.join(node.gpu_names)})" if node.gpu_names else "")


def _store(node: NodeFacts) -> Finding:
    line = f"{node.name}: object store {_size(node.store_bytes)}, /dev/shm {_size(node.shm_bytes)}"
    if node.store_bytes > node.shm_bytes:
        return (
            False,
            f"{line}: Ray keeps objects on a disk; enlarge /dev/shm (docker --shm-size), or --object-store-memory less",
        )
    if node.store_bytes < MIN_STORE:
        return False, f"{line}: below 1 GiB large rounds spill to disk; start Ray with more --object-store-memory"
    return True, line


def _write_probe(storage: Path, content: str) -> Path:
    """A new file in the storage; in the folder that it would be made in if it is not there yet."""
    probe = _existing(storage) / f".raysim-doctor-{uuid.uuid4().hex}"
    probe.write_text(content)
    return probe


def _existing(folder: Path) -> Path:
    return next(place for place in (folder, *folder.absolute().parents) if place.is_dir())


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
