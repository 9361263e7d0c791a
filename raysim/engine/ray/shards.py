"""Shards and weights for nodes that cannot read the driver's disk. This module does not load PyTorch."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import ray
from filelock import FileLock
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysim.base.errors import RaysimError
from raysim.engine.ray.session import LOSSES, Actor, this_node
from raysim.folders.files import file_digest, partial_file

if TYPE_CHECKING:
    from raysim.data.shard_files import Filled, ShardPlan

#: How often the request for a file is repeated after the loss of its host.
RETRIES = 5


def write_shards(plan: ShardPlan) -> Iterator[Filled]:
    """Write shards as `shard_files.write_serially` does, with Ray Data on the running Ray.

    A set of one window has nothing to parallelise; this process writes its shards without Ray Data.
    """
    from raysim.data.shard_files import write_serially

    if len(list(islice(plan.windows(), 2))) < 2:
        yield from write_serially(plan)
        return
    from raysim.data.pipeline import write_with_ray_data  # takes a second; most runs find their shards written

    yield from write_with_ray_data(plan)


class FileHost:
    """Hands out the files of a folder; an actor on the driver's node."""

    def __init__(self, folder: str):
        self._folder = Path(folder)

    def read(self, name: str) -> np.ndarray:
        """Return (size,) uint8: the bytes of a file."""
        return np.fromfile(self._folder / name, dtype=np.uint8)


def shard_fetcher(folder: str, node: str) -> tuple[Path, Callable[[str], None] | None]:
    """Return (folder of the shards for this process, function that fetches a shard, or None).

    If this process can read the driver's folder (one machine, a shared disk), the folder is used, and fetch is None.
    Otherwise fetch(file) copies a file from a `FileHost` on the driver's node to this node's temporary folder.

    Args:
      node: id of the driver's node.
    """
    if (Path(folder) / "index.json").is_file():
        return Path(folder), None
    local = _local_folder() / Path(folder).name
    return local, lambda file: _copy(folder, node, file, local / file)


@cache
def fetched_file(path: str, sha256: str, node: str) -> Path:
    """Return a local path for a file of the driver's node, copied once per node if necessary.

    Args:
      sha256: SHA-256 of the file's contents.
      node: id of the driver's node.
    Raises:
      RaysimError: the copied file has other contents.
    """
    here = Path(path)
    # Another node may have another file there.
    if here.is_file() and (node == this_node() or file_digest(here) == sha256):
        return here
    local = _local_folder() / f"{sha256[:24]}{here.suffix}"
    local.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(local.with_name(f".{local.name}.lock")):
        for _ in range(2):
            if local.is_file() and file_digest(local) == sha256:
                return local
            _copy(str(here.parent), node, here.name, local)
    raise RaysimError(
        "a file changed while it was copied to another node", path, "change it before a run starts, or after"
    )


def _local_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"raysim-shards-{os.getuid()}"


def _copy(folder: str, node: str, file: str, target: Path) -> None:
    temporary = partial_file(target)
    _read(folder, node, file).tofile(temporary)
    # Several trainers of a node may fetch the same file; each of them replaces it by a complete file.
    os.replace(temporary, target)


def _read(folder: str, node: str, file: str) -> np.ndarray:
    """Return (size,) uint8: the bytes of a file on the driver's node."""
    for _ in range(RETRIES):
        with suppress(*LOSSES):
            return np.asarray(ray.get(_host(folder, node).read.remote(file)))
        _host.cache_clear()
    return np.asarray(ray.get(_host(folder, node).read.remote(file)))


@lru_cache(maxsize=2)  # one host for shards, one for weights; Ray ends a host without references
def _host(folder: str, node: str) -> Actor:
    """Return the job's shared host of a folder, started by the first process that asks for it.

    A run whose nodes can all read the folder starts no host. A host ends with the trainer that started it; the next
    request starts a new one.
    """
    here = NodeAffinitySchedulingStrategy(node, soft=False)
    name = f"raysim-files-{hashlib.sha256(folder.encode()).hexdigest()[:16]}"
    options = {"num_cpus": 0, "name": name, "get_if_exists": True, "scheduling_strategy": here}
    return ray.remote(FileHost).options(**options).remote(folder)
