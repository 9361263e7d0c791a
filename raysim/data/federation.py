"""A partitioned set: the manifest (who has which rows) and the shards that trainers memory-map."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from raysim.core.errors import DataError
from raysim.core.seeding import derive_seed, numpy_generator
from raysim.data.arrow import ImageSet, write_set
from raysim.data.partition import SCHEMES
from raysim.data.splits import split, split_officially, split_within
from raysim.data.validation import ValidationSpec, arrange, external_rows, fit_to

#: Clients per shard file: a shard is written by one task and mapped whole.
CLIENTS_PER_SHARD = 64


@dataclass(frozen=True)
class PartitionSpec:
    """How a set becomes a federation; with the set's checksum it determines the manifest.

    Attributes:
      form: of the scheme; empty: its first.
      test, validation: fractions of the whole set (of each client if `within_clients`), rounded down.
      split: "fraction", or "official" for the set's own split, which then says what the test rows are.
      within_clients: partition everything first, then hold out inside each client (the order of FedVG's code).
    """

    scheme: str = "dirichlet"
    form: str = ""
    alpha: float = 0.1
    num_clients: int = 20
    min_samples: int = 1
    shards_per_client: int = 2
    domains_per_client: int = 1
    samples_per_client: int | None = None
    test: float = 0.25
    validation: float = 0.10
    split: str = "fraction"
    within_clients: bool = False
    validation_set: ValidationSpec = field(default_factory=ValidationSpec)
    seed: int = 0


@dataclass(frozen=True)
class Manifest:
    """Rows of the set: per client, for the server's validation set (in its order) and for the test.

    Attributes:
      class_counts: (num_clients, classes) int64.
      validation_labels: (n,) int64 where they are not the set's own (noise, or an external set); else None.
      external: (path, checksum) of the set that `validation` counts rows of; None: this set.
    """

    set_path: str
    set_checksum: str
    spec: PartitionSpec
    clients: tuple[np.ndarray, ...]
    validation: np.ndarray
    test: np.ndarray
    class_counts: np.ndarray
    validation_labels: np.ndarray | None = None
    external: tuple[str, str] | None = None

    @cached_property
    def checksum(self) -> str:
        digest = hashlib.sha256(self.set_checksum.encode())
        for part in (*self.clients, self.validation, self.test):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(np.ascontiguousarray(part, np.int64).data)
        if self.validation_labels is not None:
            digest.update(b"labels" + self.validation_labels.tobytes())
        if self.external is not None:
            digest.update(b"external" + self.external[1].encode())
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
            "spec": asdict(self.spec),
            "sizes": self.sizes.tolist(),
            "class_counts": self.class_counts.tolist(),
            "clients": [rows.tolist() for rows in self.clients],
            "validation": self.validation.tolist(),
            "test": self.test.tolist(),
            "validation_labels": None if self.validation_labels is None else self.validation_labels.tolist(),
            "external": self.external,
        }
        return json.dumps(fields) + "\n"


def make_manifest(images: ImageSet, spec: PartitionSpec, external: ImageSet | None = None) -> Manifest:
    """Split and partition a set: a pure function of its columns (labels, domains, splits) and the spec.

    Args:
      external: the set that the validation set comes from; the rows that `spec.validation` holds out then stay unused.
    """
    labels = images.labels
    rng = numpy_generator(derive_seed(spec.seed, "split"))
    if spec.within_clients:
        parts = _partition(images, np.arange(len(images)), spec)
        clients, validation, test = split_within(parts, test=spec.test, validation=spec.validation, rng=rng)
    else:
        if spec.split == "official":
            splits = getattr(images, "splits", None)
            training, validation, test = split_officially(splits, validation=spec.validation, rng=rng)
        else:
            training, validation, test = split(len(images), test=spec.test, validation=spec.validation, rng=rng)
        clients = _partition(images, training, spec)
    num_classes = len(images.info.classes)
    counts = np.stack([np.bincount(labels[rows], minlength=num_classes) for rows in clients]).astype(np.int64)

    rng = numpy_generator(derive_seed(spec.seed, "validation-set"))
    targets, origin = labels[validation], None
    if external is not None:
        validation, targets = external_rows(external, images.info.classes, spec.validation_set, rng)
        origin = (str(external.path), external.info.checksum)
    validation, targets = arrange(validation, targets, num_classes, spec.validation_set, rng)
    is_own = external is None and (labels[validation] == targets).all()
    return Manifest(
        str(images.path),
        images.info.checksum,
        spec,
        tuple(clients),
        validation,
        test,
        counts,
        None if is_own else targets,
        origin,
    )


def _partition(images: ImageSet, rows: np.ndarray, spec: PartitionSpec) -> list[np.ndarray]:
    """The given rows by client: the scheme's function, with those fields of the spec that it takes."""
    forms = SCHEMES[spec.scheme]
    scheme = forms[spec.form or next(iter(forms))]
    domains = getattr(images, "domains", None)
    known = {**vars(spec), "domains": None if domains is None else domains[rows]}
    known["rng"] = numpy_generator(derive_seed(spec.seed, "partition"))
    wanted = list(inspect.signature(scheme).parameters)[2:]
    parts = scheme(images.labels[rows], spec.num_clients, **{name: known[name] for name in wanted})
    return [rows[part] for part in parts]


@dataclass(frozen=True)
class ShardTask:
    """One file to write: these rows of the set, in this order.

    Attributes:
      labels: to be written instead of the set's own.
      like: the set whose classes and image shape the file gets; None: those of the set the rows are from.
    """

    set_path: str
    target: str
    rows: np.ndarray
    labels: np.ndarray | None = None
    like: str | None = None


def write_shard(task: ShardTask) -> None:
    """Copy rows of a set into one Arrow file with a single record batch, so that it maps as one array."""
    source = ImageSet(Path(task.set_path))
    info = source.info if task.like is None else ImageSet(Path(task.like)).info
    images, labels = source.take(task.rows)
    batch = (fit_to(images, info.shape), labels if task.labels is None else task.labels)
    target = Path(task.target)
    write_set(target, target.stem, info.classes, [batch], source=task.set_path)


def shard_tasks(manifest: Manifest, folder: Path) -> list[ShardTask]:
    """The files of a federation: clients contiguous, CLIENTS_PER_SHARD to a file, then validation and test."""
    tasks = []
    for number, start in enumerate(range(0, len(manifest.clients), CLIENTS_PER_SHARD)):
        rows = np.concatenate(manifest.clients[start : start + CLIENTS_PER_SHARD])
        tasks.append(ShardTask(manifest.set_path, str(folder / f"clients-{number:05d}.arrow"), rows))
    if len(manifest.validation):
        path, target = manifest.external[0] if manifest.external else manifest.set_path, folder / "validation.arrow"
        labels = manifest.validation_labels
        tasks.append(ShardTask(path, str(target), manifest.validation, labels, like=manifest.set_path))
    if len(manifest.test):
        tasks.append(ShardTask(manifest.set_path, str(folder / "test.arrow"), manifest.test))
    return tasks


def write_serially(tasks: list[ShardTask]) -> None:
    """Write shards in this process (runs without Ray)."""
    for task in tasks:
        write_shard(task)


def build_shards(manifest: Manifest, cache: Path, write: Callable[[list[ShardTask]], None] = write_serially) -> Path:
    """The folder with a manifest's shards; built once, whole or not at all, and reused by every run that needs it.

    Args:
      write: writes the files of all tasks; the Ray Data pipeline does it in parallel.
    """
    folder = cache / manifest.checksum[:24]
    if (folder / "index.json").is_file():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    building = cache / f".{folder.name}.{os.getpid()}.part"
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    try:
        write(shard_tasks(manifest, building))
        index = {
            "manifest": manifest.checksum,
            "clients_per_shard": CLIENTS_PER_SHARD,
            "class_counts": manifest.class_counts.tolist(),
            "num_test": len(manifest.test),
            "num_validation": len(manifest.validation),
        }
        (building / "index.json").write_text(json.dumps(index) + "\n")
        try:
            os.rename(building, folder)
        except OSError:
            if not (folder / "index.json").is_file():  # not simply another run that was faster
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


class Federation:
    """Memory-mapped shards: each client's examples, the validation set and the test set.

    Attributes:
      class_counts: (num_clients, classes) int64; sizes: (num_clients,) int64 training examples.
    """

    def __init__(self, folder: Path):
        self.folder = folder
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
            self._maps[name] = ImageSet(self.folder / f"{name}.arrow").whole()
        return self._maps[name]
