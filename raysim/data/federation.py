"""A partitioned set: the manifest (who has which rows) and the shards that trainers memory-map."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from filelock import FileLock

from raysim.core.errors import DataError
from raysim.core.seeding import derive_seed, numpy_generator
from raysim.data.arrow import ImageSet, write_set
from raysim.data.partition import SCHEMES, split, stratified_order

#: Clients per shard file: a shard is written by one task and mapped whole.
CLIENTS_PER_SHARD = 64


@dataclass(frozen=True)
class PartitionSpec:
    """How a set becomes a federation; with the set's checksum it determines the manifest."""

    scheme: str = "dirichlet"
    alpha: float = 0.1
    num_clients: int = 20
    min_samples: int = 1
    test: float = 0.25
    validation: float = 0.10
    seed: int = 0


@dataclass(frozen=True)
class Manifest:
    """Rows of the set: per client, for the server's validation set (in class-stratified order) and for the test."""

    set_path: str
    set_checksum: str
    spec: PartitionSpec
    clients: tuple[np.ndarray, ...]
    validation: np.ndarray
    test: np.ndarray
    class_counts: np.ndarray
    """(num_clients, classes) int64."""

    @cached_property
    def checksum(self) -> str:
        digest = hashlib.sha256(self.set_checksum.encode())
        for part in (*self.clients, self.validation, self.test):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(np.ascontiguousarray(part, np.int64).data)
        return digest.hexdigest()

    @property
    def sizes(self) -> np.ndarray:
        """(num_clients,) int64 training examples."""
        return self.class_counts.sum(axis=1)

    def to_json(self) -> str:
        """The manifest as `partition.json` keeps it: everything needed to rebuild and to compare."""
        fields = {
            "checksum": self.checksum,
            "set_checksum": self.set_checksum,
            "spec": vars(self.spec),
            "sizes": self.sizes.tolist(),
            "class_counts": self.class_counts.tolist(),
            "clients": [rows.tolist() for rows in self.clients],
            "validation": self.validation.tolist(),
            "test": self.test.tolist(),
        }
        return json.dumps(fields) + "\n"


def make_manifest(images: ImageSet, spec: PartitionSpec) -> Manifest:
    """Split and partition a set: a pure function of its labels and the spec."""
    rng = numpy_generator(derive_seed(spec.seed, "split"))
    training, validation, test = split(len(images), test=spec.test, validation=spec.validation, rng=rng)
    labels = images.labels
    parts = SCHEMES[spec.scheme](
        labels[training],
        spec.num_clients,
        rng=numpy_generator(derive_seed(spec.seed, "partition")),
        alpha=spec.alpha,
        min_samples=spec.min_samples,
    )
    clients = tuple(training[part] for part in parts)
    num_classes = len(images.info.classes)
    counts = np.stack([np.bincount(labels[rows], minlength=num_classes) for rows in clients]).astype(np.int64)
    ordered = validation[stratified_order(labels[validation])]
    return Manifest(str(images.path), images.info.checksum, spec, clients, ordered, test, counts)


@dataclass(frozen=True)
class ShardTask:
    """One file to write: these rows of the set, in this order."""

    set_path: str
    target: str
    rows: np.ndarray


def write_shard(task: ShardTask) -> None:
    """Copy rows of a set into one Arrow file with a single record batch, so that it maps as one array."""
    source = ImageSet(Path(task.set_path))
    target = Path(task.target)
    write_set(target, target.stem, source.info.classes, [source.take(task.rows)], source=task.set_path)


def shard_tasks(manifest: Manifest, folder: Path) -> list[ShardTask]:
    """The files of a federation: clients contiguous, CLIENTS_PER_SHARD to a file, then validation and test."""
    tasks = []
    for number, start in enumerate(range(0, len(manifest.clients), CLIENTS_PER_SHARD)):
        rows = np.concatenate(manifest.clients[start : start + CLIENTS_PER_SHARD])
        tasks.append(ShardTask(manifest.set_path, str(folder / f"clients-{number:05d}.arrow"), rows))
    for name, rows in (("validation", manifest.validation), ("test", manifest.test)):
        if len(rows):
            tasks.append(ShardTask(manifest.set_path, str(folder / f"{name}.arrow"), rows))
    return tasks


def write_serially(tasks: list[ShardTask]) -> None:
    """Write shards in this process (runs without Ray)."""
    for task in tasks:
        write_shard(task)


def build_shards(manifest: Manifest, cache: Path, write: Callable[[list[ShardTask]], None] = write_serially) -> Path:
    """The folder with a manifest's shards: built once, whole or not at all, and reused by every run that needs it.

    Runs that start together wait for the one that builds; a folder whose files are missing, cut short or unreadable is
    built again.

    Args:
      write: writes the files of all tasks; the Ray Data pipeline does it in parallel.
    Raises:
      DataError: no space, or no permission, to write them.
    """
    folder = cache / manifest.checksum[:24]
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f".{folder.name}.lock"):
            if not is_sound(folder):
                _build(manifest, folder, write)
    except OSError as error:
        raise DataError(
            f"cannot write shards ({error.strerror or error})",
            str(cache),
            "free some space there, or set data.root to a folder that can be written",
        ) from error
    return folder


def is_sound(folder: Path) -> bool:
    """Whether a shard folder is complete: its index, and every file at its length with a readable Arrow footer."""
    try:
        index = json.loads((folder / "index.json").read_text())
        for name, size in index["files"].items():
            path = folder / name
            if path.stat().st_size != size:
                return False
            if path.suffix == ".arrow":
                ImageSet(path)
    except (OSError, ValueError, KeyError, DataError):
        return False
    return True


def _build(manifest: Manifest, folder: Path, write: Callable[[list[ShardTask]], None]) -> None:
    for leftover in folder.parent.glob(f".{folder.name}.*.part"):  # of a killed run: the lock is ours
        shutil.rmtree(leftover, ignore_errors=True)
    building = folder.parent / f".{folder.name}.{os.getpid()}.part"
    building.mkdir()
    try:
        write(shard_tasks(manifest, building))
        index = {
            "manifest": manifest.checksum,
            "clients_per_shard": CLIENTS_PER_SHARD,
            "class_counts": manifest.class_counts.tolist(),
            "num_test": len(manifest.test),
            "num_validation": len(manifest.validation),
            "files": {path.name: path.stat().st_size for path in sorted(building.iterdir())},
        }
        (building / "index.json").write_text(json.dumps(index) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)


class Federation:
    """Memory-mapped shards: each client's examples, the validation set and the test set.

    Attributes:
      class_counts: (num_clients, classes) int64; sizes: (num_clients,) int64 training examples.

    Args:
      fetch: fetch(name) puts a missing file of the folder there; on a node without the driver's disk it copies the
        file over. Files are asked for when they are first needed, each once per node.
    """

    def __init__(self, folder: Path, fetch: Callable[[str], None] | None = None):
        self.folder = folder
        self._fetch = fetch
        self._need("index.json")
        try:
            index = json.loads((folder / "index.json").read_text())
        except (OSError, ValueError) as error:
            raise DataError(
                f"the shard index is missing or damaged ({error})",
                str(folder),
                "delete this folder; the next run rebuilds it",
            ) from error
        self._per_shard: int = index["clients_per_shard"]
        self.class_counts = np.array(index["class_counts"], dtype=np.int64)
        self.sizes = self.class_counts.sum(axis=1)
        self.num_test: int = index["num_test"]
        self._ends = np.cumsum(self.sizes)
        self._maps: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def client(self, client: int) -> tuple[np.ndarray, np.ndarray]:
        """(images (n, height, width, channels) uint8, labels (n,) int64) of one client: read-only views, no copy."""
        shard = client // self._per_shard
        images, labels = self._map(f"clients-{shard:05d}")
        first = shard * self._per_shard
        base = self._ends[first - 1] if first else 0
        start, end = (self._ends[client - 1] if client else 0) - base, self._ends[client] - base
        return images[start:end], labels[start:end]

    def held_out(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(images, labels) of "validation" or "test"."""
        return self._map(name)

    def _map(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        if name not in self._maps:
            self._need(f"{name}.json")
            self._need(f"{name}.arrow")
            self._maps[name] = ImageSet(self.folder / f"{name}.arrow").whole()
        return self._maps[name]

    def _need(self, name: str) -> None:
        """Make sure that a file is on this node; several processes of a node fetch it once."""
        if self._fetch is None or (self.folder / name).is_file():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / f".{name}.lock"):
            if not (self.folder / name).is_file():
                self._fetch(name)
