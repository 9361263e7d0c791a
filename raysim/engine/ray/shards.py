"""Shard files for nodes that cannot see the driver's disk."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import ray

from raysim.engine.ray.session import Actor


class ShardHost:
    """Hands out the files of a shard folder; an actor on the driver's node."""

    def __init__(self, folder: str):
        self._folder = Path(folder)

    def read(self, name: str) -> np.ndarray:
        """(size,) uint8: the bytes of a file."""
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
        host: Actor = ray.get_actor(name)
        temporary = local / f".{file}.{os.getpid()}.part"
        ray.get(host.read.remote(file)).tofile(temporary)
        # Several trainers of a node may fetch the same file; each of them puts a whole one there.
        os.replace(temporary, local / file)

    return local, fetch
