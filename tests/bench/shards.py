"""`python -m tests.bench shards`: the Ray Data pipeline against a plain rewrite of the file by pyarrow."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pyarrow as pa
import ray

from raysim.data.arrow import ImageSet, in_batches, write_set
from raysim.data.federation import build_shards, shard_tasks
from raysim.data.manifest import PartitionSpec, make_manifest
from raysim.data.pipeline import write_with_ray_data
from raysim.data.sources import set_path
from tests.bench.workloads import images_of

OBJECT_STORE_MB = 100


def main() -> None:
    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=OBJECT_STORE_MB * 10**6,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    with tempfile.TemporaryDirectory() as folder:
        sharding(Path(folder))
    ray.shutdown()


def sharding(root: Path) -> None:
    """60,000 images into 1,000 clients."""
    count = 60_000
    images, labels = images_of(count)
    path = set_path(root, "bench60000")
    write_set(path, "bench60000", map(str, range(10)), in_batches(images, labels))
    size = path.stat().st_size / 1e6
    spec = PartitionSpec(scheme="dirichlet", alpha=0.3, num_clients=1000, test=1 / 6, validation=0)
    manifest = make_manifest(ImageSet(path), spec)
    write_with_ray_data(shard_tasks(manifest, root / "warm")[:6])  # starts Ray Data's own actors and both workers
    peak = PeakMemory()
    began = time.perf_counter()
    build_shards(manifest, root / "many", write_with_ray_data)
    spent = time.perf_counter() - began
    used = peak.stop()
    began = time.perf_counter()
    with pa.OSFile(str(root / "plain.arrow"), "wb") as sink:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        with pa.ipc.new_file(sink, reader.schema) as writer:
            for index in range(reader.num_record_batches):
                writer.write_batch(reader.get_batch(index))
    plain = time.perf_counter() - began
    print(f"sharding {count} images of {size:.0f} MB into 1,000 clients, object store {OBJECT_STORE_MB} MB")
    print(
        f"    Ray Data pipeline: {spent:6.2f} s, {size / spent:6.0f} MB/s, private memory grew by {used:.0f} MB at most"
    )
    print(f"    plain pyarrow rewrite, in order, one process: {plain:6.2f} s, {size / plain:6.0f} MB/s", flush=True)


class PeakMemory:
    """Samples the private memory of this process and its Ray workers every 50 ms; MB above the start."""

    def __init__(self) -> None:
        self._start = self._peak = private_memory()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    def _sample(self) -> None:
        while not self._stop.wait(0.05):
            self._peak = max(self._peak, private_memory())

    def stop(self) -> float:
        self._stop.set()
        self._thread.join()
        return self._peak - self._start


def private_memory() -> float:
    """MB that this process and its Ray workers hold themselves (RssAnon); pages of mapped files do not count."""
    total = 0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            if process.pid == os.getpid() or process.name().startswith("ray::"):
                status = Path(f"/proc/{process.pid}/status").read_text()
                total += sum(int(amount) for amount in re.findall(r"RssAnon:\s+(\d+) kB", status))
    return total / 1e3
