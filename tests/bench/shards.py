"""The Ray Data pipeline against the serial writer and a plain rewrite of the file by pyarrow, on one node."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import ray

from raysim.data.arrow import PreparedSet, write_set
from raysim.data.manifest import PartitionSpec, make_manifest
from raysim.data.pipeline import write_with_ray_data
from raysim.data.rows import batch_rows
from raysim.data.shard_files import Write, write_serially
from raysim.data.sources import set_path
from tests.support.federations import build_shards

OBJECT_STORE_MB = 100

#: Images, their shape, clients: many small clients, large images in few clients, and more shard files than anybody has.
SETS = {"W": (60_000, (32, 32, 3), 1000), "large": (20_000, (224, 224, 3), 100), "many": (200_000, (8, 8, 3), 100_000)}


def main() -> None:
    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=OBJECT_STORE_MB * 10**6,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    for name in SETS:
        with tempfile.TemporaryDirectory() as folder:
            sharding(name, Path(folder))
    ray.shutdown()


def sharding(name: str, root: Path) -> None:
    """Shards of a set by Ray Data and serially, each the second time: the first starts workers and takes the memory."""
    count, shape, num_clients = SETS[name]
    path = set_path(root, "bench")
    write_set(path, "bench", map(str, range(10)), batches_of(count, shape))
    size = path.stat().st_size / 1e6
    spec = PartitionSpec(scheme="iid", num_clients=num_clients, test=1 / 6, validation=0)
    manifest = make_manifest(PreparedSet(path), spec)
    print(f"{name}: {count} images of {size:.0f} MB into {num_clients} clients, object store {OBJECT_STORE_MB} MB")
    writers: dict[str, Write] = {"Ray Data": write_with_ray_data, "one process": write_serially}
    for who, write in writers.items():
        for _ in range(2):
            shutil.rmtree(root / "shards", ignore_errors=True)
            peak = PeakMemory()
            began = time.perf_counter()
            build_shards(manifest, root / "shards", write)
            spent = time.perf_counter() - began
            used = peak.stop()
        text = f"{spent:6.2f} s, {size / spent:6.0f} MB/s, private memory grew by {used:.0f} MB at most"
        print(f"    {who:>12}: {text}", flush=True)
    began = time.perf_counter()
    with pa.OSFile(str(root / "plain.arrow"), "wb") as sink:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        with pa.ipc.new_file(sink, reader.schema) as writer:
            for index in range(reader.num_record_batches):
                writer.write_batch(reader.get_batch(index))
    plain = time.perf_counter() - began
    print(f"    a plain copy by pyarrow, in order, one process: {plain:6.2f} s, {size / plain:6.0f} MB/s", flush=True)


def batches_of(count: int, shape: tuple[int, int, int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Random images, of which there are 256 different ones, so that any number fits into memory."""
    different = np.random.default_rng(0).integers(0, 256, (256, *shape), dtype=np.uint8)
    for start in range(0, count, batch_rows(shape)):
        rows = np.arange(start, min(start + batch_rows(shape), count))
        yield different[rows % 256], rows % 10


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
