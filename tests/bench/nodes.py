"""The Ray Data pipeline with resized images: one node of one CPU against two of them.

Both nodes are `ray start` processes on this machine, so it needs two cores that nobody else uses. Each measurement is a
process of its own: Ray reads its token when it is imported. One and two nodes take turns, twice.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import ray

from raysim.data.arrow import write_set
from raysim.data.federation import build_shards
from raysim.data.pipeline import write_with_ray_data
from raysim.data.shard_files import write_serially
from raysim.data.sources import set_path
from raysim.plan.check import check
from tests.bench.shards import batches_of
from tests.support.nodes import PROJECT, Cluster, wait_for


class Load(NamedTuple):
    """Images of a size, resized to another."""

    count: int
    size: int
    resized: int


#: In the first, large images travel between the nodes (0.8 GB in all).
LOADS = {"resize": Load(4_000, 64, 256), "tiny": Load(200, 32, 64)}


def main(names: tuple[str, ...] = ("resize",)) -> None:
    for name in names:
        load = LOADS[name]
        size, resized = f"{load.size}x{load.size}", f"{load.resized}x{load.resized}"
        print(f"{name}: {load.count} images of {size} resized to {resized}, one CPU a node", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            for text in compare(load, Path(folder)):
                print(f"    {text}", flush=True)


def compare(load: Load, root: Path, turns: int = 2) -> list[str]:
    """Lines: one process without Ray, one node, two nodes."""
    shape = (load.size, load.size, 3)
    write_set(set_path(root, "bench"), "bench", map(str, range(10)), batches_of(load.count, shape))
    data = {"name": "bench", "root": str(root), "stored_size": load.resized}
    raw = {"data": data, "partition": {"scheme": "iid", "num_clients": 100}, "model": {"name": "cnn"}}
    spent: dict[str, list[float]] = {}
    # A node of one CPU would end a process whenever a second one is idle, and start another for the next task.
    with Cluster(head_cpus=1, idle_workers=4, store_mb=1_000) as cluster:
        spent["one process"] = measured(raw, cluster, 0)
        for number in (1, 2) * turns:
            if number == 2:
                cluster.add("second", cpus=1)
            spent.setdefault("one node" if number == 1 else "two nodes", []).extend(measured(raw, cluster, number))
            if number == 2:
                cluster.kill("second")
                shutil.rmtree(cluster.folder / "second")
    one = median(spent["one node"])
    return [
        f"{who:>12}: {median(times):6.2f} s ({min(times):.2f} to {max(times):.2f}), {median(times) / one:.2f} of one node"
        for who, times in spent.items()
    ]


def measured(raw: dict[str, object], cluster: Cluster, num_nodes: int) -> list[float]:
    """Seconds of three builds by a driver on the head (0 nodes: without Ray); the first starts workers and is left out."""
    command = [sys.executable, "-m", "tests.bench.nodes", str(num_nodes), json.dumps(raw)]
    environment = {**cluster.environment, "RAY_ADDRESS": cluster.address}
    made = subprocess.run(command, cwd=PROJECT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(made.stdout.splitlines()[-1])


def drive(num_nodes: int, raw: dict) -> None:
    """The driver's part: print the seconds of three builds."""
    manifest, shards = check(raw, "the bench").manifest, Path(raw["data"]["root"]) / "shards"
    if num_nodes:
        ray.init(log_to_driver=False, logging_level="ERROR")
        wait_for(lambda: sum(node["Alive"] for node in ray.nodes()) == num_nodes)
    spent = []
    for _ in range(4):
        shutil.rmtree(shards, ignore_errors=True)
        began = time.perf_counter()
        build_shards(manifest, shards, write_with_ray_data if num_nodes else write_serially)
        spent.append(time.perf_counter() - began)
    print(json.dumps(spent[1:]))


if __name__ == "__main__":
    drive(int(sys.argv[1]), json.loads(sys.argv[2]))
