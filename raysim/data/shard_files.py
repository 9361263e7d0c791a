"""Writing of shard files from prepared sets: the plan, and the steps shared by the serial and the Ray Data writer.

The manifest fixes the place of each row, so rows are not shuffled. The files are laid out at their full length; each
window of rows is read, resized, and written to its places in the files, in any order and by any process. A file is
complete when all its places are filled: its description with the checksum is then written, which readers require.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa

from raysim.base.errors import DataError, explained
from raysim.data.arrow import PreparedSet, SetInfo, describe
from raysim.data.fitting import fit_to
from raysim.data.manifest import Manifest
from raysim.data.rows import check_range, columns_of, record_of, update

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

#: Minimum number of clients in a shard file, which is mapped whole; maximum number of clients' files for more clients.
LEAST_CLIENTS, MOST_FILES = 64, 512

#: Minimum and maximum bytes of a window's inputs, as read or as written, whichever is larger; in between, a set is cut
#: into eight windows.
LEAST_WINDOW, MOST_WINDOW = 8 << 20, 64 << 20

#: Inputs smaller than this are written through a memory map, since a call for each run of adjacent places took most of
#: the time. A map writes whole pages, which is safe because a single machine writes; the space is reserved in advance,
#: so that writing to the map cannot fail on a full disk.
PAGE_BYTES = 4096 if hasattr(os, "posix_fallocate") else 0

#: Maximum bytes of inputs gathered for one write.
WRITE_BYTES = 4 << 20


@dataclass(frozen=True)
class RowSource:
    """A set from which rows are read.

    Attributes:
      path: path of the Arrow file.
      first: number of the set's first row among the rows of all sources; starts: first row of each record batch, and
        the end.
      shape: of one input.
    """

    path: str
    first: int
    starts: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class ShardFile:
    """A file to write. count: number of rows; source: path of the set that the rows are read from."""

    path: str
    count: int
    source: str


class Window(NamedTuple):
    """Rows [start, end) of a source, which are in memory together."""

    source: RowSource
    start: int
    end: int


class Filled(NamedTuple):
    """Written rows: (n,) numbers of the file, (n,) places in the file, and (n, ...) targets."""

    numbers: np.ndarray
    places: np.ndarray
    targets: np.ndarray


@dataclass(frozen=True)
class ShardPlan:
    """Assignment of rows of the sources to places in the files.

    Attributes:
      rows, numbers, places, labels: (m,), sorted by row: number of the row among the rows of all sources, number of the
        file, place in the file, and label written there, -1 for the row's own target. A row may have many places, as in
        a sweep.
      info: description of the federation's set, with the shape and type of the inputs in the files.
      inputs_at: byte offset of the first input, the same in each file.
    """

    sources: tuple[RowSource, ...]
    files: tuple[ShardFile, ...]
    rows: np.ndarray
    numbers: np.ndarray
    places: np.ndarray
    labels: np.ndarray
    info: SetInfo
    inputs_at: int

    def windows(self) -> Iterator[Window]:
        """Yield the windows that contain a planned row."""
        for source in self.sources:
            row_bytes = max(map(math.prod, (source.shape, self.info.shape))) * np.dtype(self.info.input_type).itemsize
            size = min(max(LEAST_WINDOW, source.starts[-1] * row_bytes // 8), MOST_WINDOW)
            length = max(1, size // row_bytes)
            for start in range(0, source.starts[-1], length):
                end = min(start + length, source.starts[-1])
                first, last = np.searchsorted(self.rows, (source.first + start, source.first + end))
                if first < last:
                    yield Window(source, start, end)


#: Writes all windows of a plan and yields the places filled by each window.
Write = Callable[[ShardPlan], Iterable[Filled]]


class _Wanted(NamedTuple):
    """A planned file of a federation: rows of a set in order, optionally with replaced labels."""

    name: str
    set_path: str
    rows: np.ndarray
    labels: np.ndarray | None = None


def clients_per_shard(num_clients: int) -> int:
    """Return the number of clients in a file; a million clients share at most MOST_FILES files."""
    return max(LEAST_CLIENTS, math.ceil(num_clients / MOST_FILES))


def _wanted(manifest: Manifest) -> Iterator[_Wanted]:
    """Yield the planned files of a federation: of consecutive clients, then of the held-out sets."""
    set_path, count = manifest.set_path, clients_per_shard(len(manifest.clients))
    for number, start in enumerate(range(0, len(manifest.clients), count)):
        rows = np.concatenate(manifest.clients[start : start + count])
        yield _Wanted(f"clients-{number:05d}", set_path, rows)
    if len(manifest.validation):
        path = manifest.external[0] if manifest.external else set_path
        yield _Wanted("validation", path, manifest.validation, manifest.validation_labels)
    if len(manifest.test):
        yield _Wanted("test", set_path, manifest.test)
    if len(manifest.unseen):
        yield _Wanted("unseen", set_path, manifest.unseen)
    for other in manifest.test_sets:
        yield _Wanted(f"test-{other.name}", other.path, other.rows, other.labels)


def shard_plan(folders: Sequence[tuple[Manifest, Path]]) -> ShardPlan:
    """Plan the files of federations with the same set and shape of inputs, each in its own folder; rows are read once."""
    manifest = folders[0][0]
    wanted = [(each, folder / f"{each.name}.arrow") for manifest, folder in folders for each in _wanted(manifest)]
    sources: dict[str, RowSource] = {}
    first = 0
    for each, _ in wanted:
        if each.set_path not in sources:
            rows_of = PreparedSet(Path(each.set_path))
            starts, info = tuple(rows_of.starts.tolist()), rows_of.info
            sources[each.set_path] = RowSource(each.set_path, first, starts, info.shape)
            first += len(rows_of)
    rows = np.concatenate([each.rows + sources[each.set_path].first for each, _ in wanted])
    order = np.argsort(rows, kind="stable")
    labels = [np.full(len(each.rows), -1, np.int64) if each.labels is None else each.labels for each, _ in wanted]
    sizes = [len(each.rows) for each, _ in wanted]
    info = PreparedSet(Path(manifest.set_path)).info
    info = replace(info, shape=manifest.input_shape or info.shape, domains=(), mean=(), deviation=())
    return ShardPlan(
        sources=tuple(sources.values()),
        files=tuple(ShardFile(str(path), len(each.rows), each.set_path) for each, path in wanted),
        rows=rows[order],
        numbers=np.repeat(np.arange(len(wanted), dtype=np.int32), sizes)[order],
        places=np.concatenate([np.arange(size) for size in sizes])[order],
        labels=np.concatenate(labels)[order],
        info=info,
        inputs_at=_input_place(info),
    )


def read_window(window: Window, shape: tuple[int, ...]) -> pa.Table:
    """Return columns input, target and row (its global number), with inputs of a shape. The file is memory-mapped."""
    source = window.source
    records = []
    with explained("cannot read the set", source.path, "look at the file", pa.ArrowInvalid, OSError):
        reader = pa.ipc.open_file(pa.memory_map(source.path))
        for index, (start, end) in enumerate(pairwise(source.starts)):
            low, high = max(start, window.start), min(end, window.end)
            if low < high:
                columns = columns_of(reader.get_batch(index).slice(low - start, high - low))
                columns = {"input": fit_to(columns["input"], shape), "target": columns["target"]}
                records.append(record_of({**columns, "row": np.arange(source.first + low, source.first + high)}))
    return pa.Table.from_batches(records)


def scatter(plan: ShardPlan, table: pa.Table) -> Filled:
    """Write the rows of a window to their places in the files. Repetition after a lost worker has no further effect."""
    # The record batches are combined, since each of many files may get only a few rows of a batch.
    columns = columns_of(table.combine_chunks().to_batches()[0])
    inputs, first_row = columns["input"], columns["row"][0]
    first, last = np.searchsorted(plan.rows, (first_row, columns["row"][-1] + 1))
    order = first + np.lexsort((plan.places[first:last], plan.numbers[first:last]))
    rows, numbers, places = plan.rows[order] - first_row, plan.numbers[order], plan.places[order]
    write = _map_rows if inputs[0].nbytes < PAGE_BYTES else _write_rows
    for start, end in _runs(numbers):
        file = plan.files[numbers[start]]
        write(file, plan.inputs_at, inputs, rows[start:end], places[start:end])
    targets, given = columns["target"][rows], plan.labels[order]
    return Filled(numbers, places, np.where(given < 0, targets, given) if (given >= 0).any() else targets)


def _map_rows(file: ShardFile, inputs_at: int, inputs: np.ndarray, rows: np.ndarray, places: np.ndarray) -> None:
    """Write inputs[rows] as `_write_rows` does, through a memory map of the file."""
    np.memmap(file.path, inputs.dtype, "r+", inputs_at, (file.count, *inputs.shape[1:]))[places] = inputs[rows]


def _write_rows(file: ShardFile, inputs_at: int, inputs: np.ndarray, rows: np.ndarray, places: np.ndarray) -> None:
    """Write inputs[rows] to increasing places of a file whose inputs start at byte `inputs_at`."""
    size, limit = inputs[0].nbytes, max(1, WRITE_BYTES // inputs[0].nbytes)
    descriptor = os.open(file.path, os.O_WRONLY)
    try:
        for start, end in _runs(places - np.arange(len(places))):
            for low in range(start, end, limit):
                chosen = rows[low : min(low + limit, end)]
                # A single row is written without a copy.
                content = inputs[chosen] if len(chosen) > 1 else inputs[chosen[0]]
                _write_at(descriptor, content, inputs_at + int(places[low]) * size)
    finally:
        os.close(descriptor)


def _write_at(descriptor: int, values: np.ndarray, at: int) -> None:
    content = np.ascontiguousarray(values).reshape(-1).data.cast("B")
    while content:
        done = os.pwrite(descriptor, content, at)
        content, at = content[done:], at + done


def _runs(values: np.ndarray) -> list[tuple[int, int]]:
    """Return (start, end) of each run of equal adjacent values."""
    edges = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    return list(pairwise(edges)) if len(values) else []


def write_serially(plan: ShardPlan) -> Iterator[Filled]:
    """Write all windows in this process, in sequence."""
    for window in plan.windows():
        yield scatter(plan, read_window(window, plan.info.shape))


def write_files(plan: ShardPlan, write: Write, on_progress: Callable[[int, int], None]) -> None:
    """Write the files of a plan; a file's description, written last, marks the file as complete.

    Args:
      on_progress: on_progress(rows written, rows in all).
    Raises:
      DataError: a label outside the classes, or unfilled places. OSError: no space on the disk.
    """
    for file in plan.files:
        _lay_out(file, plan.info)
    targets = [np.zeros((file.count, *plan.info.target_shape), plan.info.target_type) for file in plan.files]
    is_filled = [np.zeros(file.count, bool) for file in plan.files]
    left, num_done = np.array([file.count for file in plan.files]), 0
    with ThreadPoolExecutor() as pool:
        empty = np.flatnonzero(left == 0).tolist()
        finished = [pool.submit(_finish, plan, number, targets[number]) for number in empty]
        for filled in write(plan):
            for start, end in _runs(filled.numbers):
                number, places = filled.numbers[start], filled.places[start:end]
                num_new = np.count_nonzero(~is_filled[number][places])
                targets[number][places] = filled.targets[start:end]
                is_filled[number][places] = True
                left[number] -= num_new
                if num_new and not left[number]:
                    finished.append(pool.submit(_finish, plan, number, targets[number]))
            num_done += len(filled.numbers)
            on_progress(num_done, len(plan.rows))
        if left.any():
            what, where = f"{left.sum()} rows were not written", plan.files[int(left.argmax())].path
            raise DataError(what, where, "start it again")
        for future in finished:
            future.result()


def _lay_out(file: ShardFile, info: SetInfo) -> None:
    """Write a file of one record batch without inputs; reserve the space first, which fails at once on a full disk."""
    with open(file.path, "wb+") as target:
        kind = np.dtype(info.input_type)
        size = file.count * math.prod(info.shape) * kind.itemsize
        target.truncate(size)
        if size and hasattr(os, "posix_fallocate"):  # not on macOS
            os.posix_fallocate(target.fileno(), 0, size)
        zeros = np.zeros(0, kind) if not size else np.memmap(target, kind, "r", shape=(size // kind.itemsize,))
        record = record_of(_blank(zeros.reshape(file.count, *info.shape), info))
        target.seek(0)
        with pa.ipc.new_file(pa.PythonFile(_Sparse(target, size), "w"), record.schema) as writer:
            writer.write_batch(record)
        target.truncate()


def _blank(inputs: np.ndarray, info: SetInfo) -> dict[str, np.ndarray]:
    """Return the columns of a file with known inputs and unknown targets."""
    return {"input": inputs, "target": np.zeros((len(inputs), *info.target_shape), info.target_type)}


class _Sparse(io.RawIOBase):
    """A file that skips a write of exactly the inputs' size, unless small: other data could have the same size."""

    def __init__(self, file: BinaryIO, size: int):
        self._file, self._size = file, size

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell()

    def write(self, content: ReadableBuffer) -> int:
        size = memoryview(content).nbytes
        if size == self._size > WRITE_BYTES:
            self._file.seek(size, os.SEEK_CUR)
        else:
            self._file.write(content)
        return size


def _input_place(info: SetInfo) -> int:
    """Return the byte offset of the inputs; the header has a fixed length for any number of rows."""
    sink = pa.BufferOutputStream()
    record = record_of(_blank(np.zeros((1, *info.shape), info.input_type), info))
    with pa.ipc.new_file(sink, record.schema) as writer:
        writer.write_batch(record)
    content = sink.getvalue()
    return _entries(pa.ipc.open_file(content).get_batch(0), "input").address - content.address


def _entries(record: pa.RecordBatch, name: str) -> pa.Buffer:
    column = record[name]
    return (column.storage.flatten() if isinstance(column, pa.ExtensionArray) else column).buffers()[1]


def _finish(plan: ShardPlan, number: int, targets: np.ndarray) -> None:
    """Write the targets of a file with complete inputs, then the description with the checksum of the stored data."""
    file = plan.files[number]
    path = Path(file.path)
    if plan.info.groups is plan.info.classes:
        check_range(targets, len(plan.info.classes), f"{path.stem}, row")
    whole = pa.memory_map(str(path)).read_buffer()
    record = pa.ipc.open_file(whole).get_batch(0)
    if file.count:
        assert _entries(record, "input").address - whole.address == plan.inputs_at, path
        with open(path, "rb+") as target:
            _write_at(target.fileno(), targets, _entries(record, "target").address - whole.address)
    digest = hashlib.sha256()
    update(digest, columns_of(record))
    info = replace(plan.info, name=path.stem, num_examples=file.count, source=file.source)
    describe(path).write_text(replace(info, checksum=digest.hexdigest()).to_json())
