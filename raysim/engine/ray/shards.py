"""Shard files for nodes that cannot see the driver's disk. Nothing here loads PyTorch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysim.engine.ray.session import LOSSES, Actor

#: How often a file is asked for again after its host was lost.
RETRIES = 5


class ShardHost:
    """Hands out the files of a shard folder; an actor on the driver's node."""

    def __init__(self, folder: str):
        self._folder = Path(folder)

    def read(self, name: str) -> np.ndarray:
        """(size,) uint8: the bytes of a file."""
        return np.fromfile(self._folder / name, dtype=np.uint8)


def shard_fetcher(folder: str, node: str) -> tuple[Path, Callable[[str], None] | None]:
    """(folder to map, fetch) for the process that calls this.

    Where the driver's folder can be seen (one machine, a shared disk) it is used as it is. Elsewhere files come from
    a host on the driver's node through the object store, into this node's temporary folder.

    Args:
      node: id of the driver's node.
    """
    if (Path(folder) / "index.json").is_file():
        return Path(folder), None
    local = Path(tempfile.gettempdir()) / f"raysim-shards-{os.getuid()}" / Path(folder).name

    def fetch(file: str) -> None:
        temporary = local / f".{file}.{os.getpid()}.part"
        _read(folder, node, file).tofile(temporary)
        # Several trainers of a node may fetch the same file; each of them puts a whole one there.
        os.replace(temporary, local / file)

    return local, fetch


def _read(folder: str, node: str, file: str) -> np.ndarray:
    """(size,) uint8: the bytes of a file on the driver's node."""
    for attempt in range(1 + RETRIES):
        try:
            contents: np.ndarray = ray.get(_host(folder, node).read.remote(file))
            return contents
        except LOSSES:
            _host.cache_clear()
            if attempt == RETRIES:
                raise
    raise AssertionError("unreachable")


@lru_cache(maxsize=1)  # a host ends when nobody keeps it
def _host(folder: str, node: str) -> Actor:
    """The host that all trainers of this job share, started by the first of them that cannot see the folder.

    A run that needs none has none. It ends with the trainer that started it; the next who asks starts another.
    """
    here = NodeAffinitySchedulingStrategy(node, soft=False)
    name = f"raysim-shards-{Path(folder).name}"
    options = {"num_cpus": 0, "name": name, "get_if_exists": True, "scheduling_strategy": here}
    return ray.remote(ShardHost).options(**options).remote(folder)
