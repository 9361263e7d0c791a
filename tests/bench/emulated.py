"""What Ray measures on the emulated nodes of `tests.support.nodes.Cluster`, and what their processes hold."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.support.nodes import Cluster

#: Seconds after which all that has happened is in Ray's metrics: they are reported every 10 s.
REPORTED_S = 21.0


def metrics_of(cluster: Cluster, node: str) -> dict[tuple[str, str], float]:
    """(name, its label Type, Source, State or Name) of Ray's metrics of a node -> their sum over all other labels."""
    with urllib.request.urlopen(cluster.metrics[node], timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    found: dict[tuple[str, str], float] = {}
    for line in lines:
        if line.startswith("#") or not (parts := re.fullmatch(r"(\w+)\{(.*)\} (\S+)", line)):
            continue
        labels = dict(re.findall(r'(\w+)="([^"]*)"', parts[2]))
        label = next((labels[key] for key in ("Type", "Source", "Name", "State") if key in labels), "")
        found[parts[1], label] = found.get((parts[1], label), 0.0) + float(parts[3])
    return found


@dataclass
class NodeLoad:
    """What a node carried in a run, in bytes.

    Attributes:
      received: objects that came from other nodes. spilled: objects that went from the store to the disk.
      store: the most that its object store ever took. private: the most that its other processes held by themselves.
    """

    received: float = 0.0
    spilled: float = 0.0
    store: float = 0.0
    private: float = 0.0


def transfers(cluster: Cluster, node: str) -> NodeLoad:
    """What Ray says a node has received and spilled so far."""
    metrics = metrics_of(cluster, node)
    return NodeLoad(
        received=metrics.get(("ray_object_manager_bytes", "Received"), 0.0),
        spilled=metrics.get(("ray_spill_manager_objects_bytes", "Spilled"), 0.0),
    )


@dataclass
class Sampler:
    """Looks every `pause_s` seconds at what the nodes' processes hold, until `stop`.

    Attributes:
      loads: by node; only `store` and `private` are filled.
    """

    cluster: Cluster
    pause_s: float = 1.0
    loads: dict[str, NodeLoad] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._stop.wait(self.pause_s):
            for name, process in list(self.cluster._nodes.items()):
                load = self.loads.setdefault(name, NodeLoad())
                with contextlib.suppress(psutil.Error, OSError):
                    self._look(load, psutil.Process(process.pid))

    def _look(self, load: NodeLoad, leader: psutil.Process) -> None:
        private = 0
        for member in leader.children(recursive=True):
            with contextlib.suppress(psutil.Error, OSError):
                private += private_bytes(member.pid)
                if member.name() == "raylet":
                    load.store = max(load.store, store_bytes(member.pid))
        load.private = max(load.private, float(private))

    def stop(self) -> dict[str, NodeLoad]:
        self._stop.set()
        self._thread.join()
        return self.loads


def private_bytes(pid: int) -> int:
    """Memory of a process that is in no file and not shared; 0 for one that has just ended."""
    found = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return 1024 * int(found[1]) if found else 0


def store_bytes(raylet: int) -> float:
    """Shared memory that an object store has touched: it gives none of it back, so this is the most that it ever held."""
    size = 0
    for file in Path(f"/proc/{raylet}/fd").iterdir():
        with contextlib.suppress(OSError):
            if "plasma" in os.readlink(file):
                size = max(size, 512 * os.stat(file).st_blocks)
    return float(size)


def settle() -> None:
    """Wait until Ray has reported what happened."""
    time.sleep(REPORTED_S)
