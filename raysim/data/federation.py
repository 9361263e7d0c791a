"""The shards of a partitioned set: one file for many clients, which trainers memory-map."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from raysim.base.errors import DataError, explained
from raysim.base.untrusted import read_json
from raysim.data.arrow import PreparedSet, describe
from raysim.data.manifest import Manifest
from raysim.data.shard_files import Write, clients_per_shard, shard_plan, write_files, write_serially
from raysim.folders.files import partial_file

#: Version of the index format; folders of another version are rebuilt.
FORM = 4

COUNTS = "counts.safetensors"

#: Arrays of a manifest in COUNTS. As JSON, arrays of a million clients took seconds to read in every process.
ARRAYS = ("class_counts", "domain_counts", "test_domains", "test_sizes", "unseen_sizes")

#: Errors raised by reading a damaged index or COUNTS file.
DAMAGE = (OSError, ValueError, SafetensorError)


def build_all_shards(
    manifests: Sequence[Manifest],
    cache: Path,
    write: Write = write_serially,
    on_progress: Callable[[int, int], None] = lambda *_: None,
) -> list[Path]:
    """Return the shard folders of manifests: built once, atomically, and reused by later runs.

    Runs that start together wait for the first run to build; a folder with missing, truncated or damaged files is
    rebuilt. Manifests of the same set and shape of inputs are built together: each row is read and resized once.

    Args:
      write: writes the rows to the files; the Ray Data pipeline writes in parallel.
      on_progress: on_progress(rows written, rows in all), for each group of manifests that is built together.
    Raises:
      DataError: no space on the disk, or no permission to write.
    """
    folders = {manifest.checksum: cache / manifest.checksum[:24] for manifest in manifests}
    mend = "free space on the disk, or set data.root to a writable folder"
    with explained("cannot write shards", cache, mend, OSError), ExitStack() as locks:
        cache.mkdir(parents=True, exist_ok=True)
        for folder in sorted(folders.values()):  # the same order in all processes prevents a deadlock
            locks.enter_context(FileLock(cache / f".{folder.name}.lock"))
        together: dict[tuple[str, tuple[int, ...]], dict[Path, Manifest]] = {}
        for manifest in manifests:
            folder = folders[manifest.checksum]
            if not is_sound(folder, manifest):
                together.setdefault((manifest.set_path, manifest.input_shape), {})[folder] = manifest
        for missing in together.values():
            _build(missing, write, on_progress)
    return [folders[manifest.checksum] for manifest in manifests]


def is_sound(folder: Path, manifest: Manifest) -> bool:
    """Return whether a shard folder matches a manifest: index, file sizes, counts, and checksums of the Arrow files."""
    try:
        index: Any = read_json(folder / "index.json")
        sizes: dict[str, int] = index.pop("files")
        if index != json.loads(_index_text(manifest)):
            return False
        if any((folder / name).stat().st_size != size for name, size in sizes.items()):
            return False
        counts, wanted = _read_counts(folder), _counts_of(manifest)
        if set(counts) != set(wanted) or not all(np.array_equal(counts[name], wanted[name]) for name in wanted):
            return False
        for path in sorted(folder.glob("*.arrow")):
            PreparedSet(path).verify()
    except (*DAMAGE, KeyError, AttributeError, DataError):
        return False
    return True


def _counts_of(manifest: Manifest) -> dict[str, np.ndarray]:
    """Return the ARRAYS of a manifest that are not None."""
    arrays = {name: getattr(manifest, name) for name in ARRAYS}
    return {name: values for name, values in arrays.items() if values is not None}


def _read_counts(folder: Path) -> dict[str, np.ndarray]:
    return {name: values.astype(np.int64) for name, values in load_file(folder / COUNTS).items()}


def _index_text(manifest: Manifest, **more: object) -> str:
    index = {
        "form": FORM,
        "manifest": manifest.checksum,
        "clients_per_shard": clients_per_shard(len(manifest.clients)),
        "num_test": len(manifest.test),
        "num_validation": len(manifest.validation),
        "domains": manifest.domains,
        "test_sets": {other.name: len(other.rows) for other in manifest.test_sets},
    }
    return json.dumps(index | more) + "\n"


def _build(missing: Mapping[Path, Manifest], write: Write, on_progress: Callable[[int, int], None]) -> None:
    parts = {folder: partial_file(folder) for folder in missing}
    for folder in missing:
        for leftover in folder.parent.glob(f".{folder.name}.*.part"):  # of killed runs, since this process has the lock
            shutil.rmtree(leftover, ignore_errors=True)
    try:
        for part in parts.values():
            part.mkdir()
        write_files(shard_plan([(missing[folder], parts[folder]) for folder in missing]), write, on_progress)
        for folder, manifest in missing.items():
            counts = {name: values.astype(np.int32) for name, values in _counts_of(manifest).items()}
            save_file(counts, parts[folder] / COUNTS)
            sizes = {path.name: path.stat().st_size for path in sorted(parts[folder].iterdir())}
            (parts[folder] / "index.json").write_text(_index_text(manifest, files=sizes))
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(parts[folder], folder)
    finally:
        for part in parts.values():
            shutil.rmtree(part, ignore_errors=True)


def _sizes_of_every(every: int, sizes: np.ndarray | None) -> np.ndarray | None:
    """Return the sizes of consecutive parts when only every `every`-th row of the whole is kept."""
    return None if sizes is None else np.diff(-(-np.cumsum(sizes) // every), prepend=0)


class Federation:
    """Memory-mapped shards: each client's examples, the validation set and the test sets.

    Attributes:
      class_counts: (num_clients, classes) int64; sizes: (num_clients,) int64 training examples.
      domains, domain_counts, test_domains, test_sizes, unseen_sizes: see `Manifest`.
      test_sets: name -> number of examples, for each further test set.

    Args:
      fetch: fetch(name) copies a missing file into the folder, on a node without the driver's disk. A file is fetched
        when it is first needed, once per node.
      every: only every `every`-th row of the held-out sets is used, for measurements that are scaled up.
    """

    def __init__(self, folder: Path, fetch: Callable[[str], None] | None = None, every: int = 1):
        self.folder = folder
        self._fetch, self._every = fetch, every
        if fetch is not None:  # the index is fetched every time, since it has the file sizes
            folder.mkdir(parents=True, exist_ok=True)
            fetch("index.json")
        mend = "delete the folder; the next run rebuilds the shards"
        with explained("the shard index is missing or damaged", folder, mend, *DAMAGE):
            index: Any = read_json(folder / "index.json")
            self._sizes: dict[str, int] = index["files"]
            self._need(COUNTS)
            counts = _read_counts(folder)
        self._per_shard: int = index["clients_per_shard"]
        self.class_counts = counts["class_counts"]
        self.domain_counts, domains, *own_sizes = map(counts.get, ARRAYS[1:])
        self.test_domains = None if domains is None else domains[::every]
        self.test_sizes, self.unseen_sizes = (_sizes_of_every(every, sizes) for sizes in own_sizes)
        self.sizes = self.class_counts.sum(axis=1)
        self.num_test, self.num_validation = (-(-index[name] // every) for name in ("num_test", "num_validation"))
        self.domains: list[str] = index["domains"]
        self.test_sets: dict[str, int] = {name: -(-count // every) for name, count in index["test_sets"].items()}
        self._starts = np.concatenate([[0], np.cumsum(self.sizes)])
        self._maps: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def client(self, client: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (inputs (n, ...), targets (n, ...)) of a client, see `SetRows`, as read-only views."""
        shard = client // self._per_shard
        inputs, targets = self._file(f"clients-{shard:05d}")
        start, end = self._starts[client : client + 2] - self._starts[shard * self._per_shard]
        return inputs[start:end], targets[start:end]

    def test_range(self, client: int) -> tuple[int, int]:
        """Return (start, end) of the client's own test rows, or of all test rows if no client has its own."""
        if self.test_sizes is None:
            return 0, self.num_test
        end = int(self.test_sizes[: client + 1].sum())
        return end - int(self.test_sizes[client]), end

    def held_out(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (inputs, targets) of a held-out set: "validation", "test", "unseen", or "test-NAME" (further sets)."""
        inputs, targets = self._file(name)
        return inputs[:: self._every], targets[:: self._every]

    def _file(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        if name not in self._maps:
            self._maps[name] = self._open(name).whole()
        return self._maps[name]

    def _open(self, name: str) -> PreparedSet:
        """Open a file of the federation; a fetched file is verified when a process first maps it."""
        path = self.folder / f"{name}.arrow"
        for attempt in range(2):
            self._need(f"{name}.json")
            self._need(f"{name}.arrow")
            if self._fetch is None:  # the driver on this machine has verified the folder
                break
            try:
                PreparedSet(path).verify()
                break
            except DataError:
                if attempt:
                    raise
                path.unlink(missing_ok=True)
                describe(path).unlink(missing_ok=True)
        return PreparedSet(path)

    def _need(self, name: str) -> None:
        """Fetch a missing or incomplete file to this node, once per node."""
        if self._fetch is None or self._is_whole(name):
            return
        with FileLock(self.folder / f".{name}.lock"):
            if not self._is_whole(name):
                self._fetch(name)
        if not self._is_whole(name):
            what = f"{name} arrived with another length than the index says ({self._sizes[name]} bytes)"
            mend = "check the free space on the disk; the next run fetches the file again"
            raise DataError(what, str(self.folder), mend)

    def _is_whole(self, name: str) -> bool:
        path = self.folder / name
        return path.is_file() and path.stat().st_size == self._sizes[name]
