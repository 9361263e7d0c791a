"""The shards of a partitioned set: one file for many clients, which trainers memory-map."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from filelock import FileLock

from raysim.core.errors import DataError
from raysim.data.arrow import ImageSet, describe, write_set
from raysim.data.faults import explained
from raysim.data.manifest import Manifest
from raysim.data.validation import fit_to

#: Of the index; folders of another form are built again.
FORM = 2

#: Clients per shard file: a shard is written by one task and mapped whole.
CLIENTS_PER_SHARD = 64


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
    """The files of a federation: clients contiguous, CLIENTS_PER_SHARD to a file, then the held-out sets."""
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
    for other in manifest.test_sets:
        place = str(folder / f"test-{other.name}.arrow")
        tasks.append(ShardTask(other.path, place, other.rows, other.labels, like=manifest.set_path))
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
    mend = "free some space there, or set data.root to a folder that can be written"
    with explained("cannot write shards", cache, mend, OSError):
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f".{folder.name}.lock"):
            if not is_sound(folder, manifest):
                _build(manifest, folder, write)
    return folder


def is_sound(folder: Path, manifest: Manifest) -> bool:
    """Whether a shard folder is what was built for a manifest: its index, and every file with the checksum of its rows."""
    try:
        index = json.loads((folder / "index.json").read_text())
        sizes: dict[str, int] = index.pop("files")
        if index != json.loads(_index_text(manifest)):
            return False
        if any((folder / name).stat().st_size != size for name, size in sizes.items()):
            return False
        for path in sorted(folder.glob("*.arrow")):
            ImageSet(path).verify()
    except (OSError, ValueError, KeyError, AttributeError, DataError):
        return False
    return True


def _index_text(manifest: Manifest, **more: object) -> str:
    index = {
        "form": FORM,
        "manifest": manifest.checksum,
        "clients_per_shard": CLIENTS_PER_SHARD,
        "class_counts": manifest.class_counts,
        "num_test": len(manifest.test),
        "num_validation": len(manifest.validation),
        "domains": manifest.domains,
        "domain_counts": manifest.domain_counts,
        "test_domains": manifest.test_domains,
        "test_sizes": manifest.test_sizes,
        "test_sets": {other.name: len(other.rows) for other in manifest.test_sets},
    }
    return json.dumps(index | more, default=np.ndarray.tolist) + "\n"


def _build(manifest: Manifest, folder: Path, write: Callable[[list[ShardTask]], None]) -> None:
    for leftover in folder.parent.glob(f".{folder.name}.*.part"):  # of a killed run: the lock is ours
        shutil.rmtree(leftover, ignore_errors=True)
    building = folder.parent / f".{folder.name}.{os.getpid()}.part"
    building.mkdir()
    try:
        write(shard_tasks(manifest, building))
        sizes = {path.name: path.stat().st_size for path in sorted(building.iterdir())}
        (building / "index.json").write_text(_index_text(manifest, files=sizes))
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)


class Federation:
    """Memory-mapped shards: each client's examples, the validation set and the test sets.

    Attributes:
      class_counts: (num_clients, classes) int64; sizes: (num_clients,) int64 training examples.
      domains, domain_counts, test_domains, test_sizes: see `Manifest`; None where it has none.
      test_sets: examples of each further test set.

    Args:
      fetch: fetch(name) copies a missing file into the folder, on a node without the driver's disk. A file is fetched
        when it is first needed, once per node.
    """

    def __init__(self, folder: Path, fetch: Callable[[str], None] | None = None):
        self.folder = folder
        self._fetch = fetch
        if fetch is not None:  # always anew: it says how long the files must be
            folder.mkdir(parents=True, exist_ok=True)
            fetch("index.json")
        mend = "delete this folder; the next run rebuilds it"
        with explained("the shard index is missing or damaged", folder, mend, OSError, ValueError):
            index = json.loads((folder / "index.json").read_text())
        self._sizes: dict[str, int] = index["files"]
        self._per_shard: int = index["clients_per_shard"]
        self.class_counts = np.array(index["class_counts"], dtype=np.int64)
        self.sizes = self.class_counts.sum(axis=1)
        self.num_test: int = index["num_test"]
        self.num_validation: int = index["num_validation"]
        self.domains: list[str] = index["domains"]
        self.domain_counts, self.test_domains, self.test_sizes = (
            None if index[name] is None else np.array(index[name], dtype=np.int64)
            for name in ("domain_counts", "test_domains", "test_sizes")
        )
        self.test_sets: dict[str, int] = index["test_sets"]
        self._starts = np.cumsum([0, *self.sizes])
        self._maps: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def client(self, client: int) -> tuple[np.ndarray, np.ndarray]:
        """(images (n, height, width, channels) uint8, labels (n,) int64) of one client: read-only views, no copy."""
        shard = client // self._per_shard
        images, labels = self.held_out(f"clients-{shard:05d}")
        start, end = self._starts[client : client + 2] - self._starts[shard * self._per_shard]
        return images[start:end], labels[start:end]

    def test_range(self, client: int) -> tuple[int, int]:
        """(start, end) of the client's own test rows; all of them where nobody has own ones."""
        if self.test_sizes is None:
            return 0, self.num_test
        end = int(self.test_sizes[: client + 1].sum())
        return end - int(self.test_sizes[client]), end

    def held_out(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(images, labels) of a file: "validation", "test" or, for a further test set, "test-NAME"."""
        if name not in self._maps:
            self._maps[name] = self._open(name).whole()
        return self._maps[name]

    def _open(self, name: str) -> ImageSet:
        """A file of the federation; one that was fetched is verified when this process first maps it."""
        path = self.folder / f"{name}.arrow"
        for attempt in range(2):
            self._need(f"{name}.json")
            self._need(f"{name}.arrow")
            if self._fetch is None:  # the run that started here verified the folder
                break
            try:
                ImageSet(path).verify()
                break
            except DataError:
                if attempt:
                    raise
                path.unlink(missing_ok=True)
                describe(path).unlink(missing_ok=True)
        return ImageSet(path)

    def _need(self, name: str) -> None:
        """Make sure that a file is on this node, at its length; several processes of a node fetch it once."""
        if self._fetch is None or self._is_whole(name):
            return
        with FileLock(self.folder / f".{name}.lock"):
            if not self._is_whole(name):
                self._fetch(name)
        if not self._is_whole(name):
            what = f"{name} arrived with another length than the index says ({self._sizes[name]} bytes)"
            raise DataError(what, str(self.folder), "check the free space there; the next run fetches it again")

    def _is_whole(self, name: str) -> bool:
        path = self.folder / name
        return path.is_file() and path.stat().st_size == self._sizes[name]
