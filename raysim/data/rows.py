"""Rows of prepared sets: columns and types, as arrays and in Arrow's format.

Inputs are uint8 images, float32 arrays of any shape, or int32 token sequences; targets are an int64 class, uint8 labels
(0 or 1 for each), float32 numbers, or the int32 tokens that follow.
"""

from __future__ import annotations

import errno
import hashlib
import math
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from raysim.base.errors import DataError
from raysim.base.ram import memory_fault

SPLITS = ("train", "validation", "test")

BATCH_BYTES = 16 << 20  # largest size of a batch of inputs; few batches are in memory at a time for a set of any size

#: Column -> types allowed in a file.
KINDS: dict[str, tuple[str, ...]] = {
    "input": ("uint8", "float32", "int32"),
    "target": ("int64", "uint8", "float32", "int32"),
    "domain": ("int64",),
    "split": ("int8",),
}


class SetRows(NamedTuple):
    """Rows of a set, with types as in KINDS.

    inputs: (n, height, width, channels) images, (n, ...) arrays, (n, length) tokens; targets: (n,) or (n, ...);
    domains, splits: (n,).
    """

    inputs: np.ndarray
    targets: np.ndarray
    domains: np.ndarray | None = None
    splits: np.ndarray | None = None

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """The batch's columns under their names in a file, in order; missing columns are left out."""
        return {name: values for name, values in zip(KINDS, self, strict=True) if values is not None}

    @staticmethod
    def of(columns: Mapping[str, np.ndarray]) -> SetRows:
        """The inverse of `columns`."""
        return SetRows(**{f"{name}s": values for name, values in columns.items()})


def typed(batch: SetRows, where: str) -> SetRows:
    """Return the batch with contiguous columns of the types in KINDS; (n,) integer targets become int64 classes.

    Raises:
      DataError: another type or shape of inputs or targets.
    """
    inputs, targets = batch.inputs, batch.targets
    if str(inputs.dtype) not in KINDS["input"]:
        mend = "images must be uint8, 0 to 255; numbers float32; tokens int32"
        raise DataError(f"inputs of type {inputs.dtype}", where, mend)
    if inputs.dtype == np.uint8 and inputs.ndim != 4:
        what = f"images of shape {inputs.shape[1:]}"
        raise DataError(what, where, "give (n, height, width, channels); numbers besides pixels as float32")
    if inputs.ndim < 2 or (inputs.dtype == np.int32 and inputs.ndim != 2):
        raise DataError(f"inputs of shape {inputs.shape}", where, "give (n, ...) numbers, or (n, length) tokens")
    if np.issubdtype(targets.dtype, np.integer) and targets.ndim == 1:
        targets = targets.astype(np.int64, copy=False)
    if str(targets.dtype) not in KINDS["target"] or (targets.dtype == np.int32 and targets.shape != inputs.shape):
        what = f"targets of shape {targets.shape} and type {targets.dtype} for inputs of shape {inputs.shape}"
        mend = "give one class, uint8 labels, float32 numbers, or an int32 token for each input token"
        raise DataError(what, where, mend)
    columns = SetRows(inputs, targets, batch.domains, batch.splits).columns
    fixed = {"domain": np.int64, "split": np.int8}
    return SetRows.of({name: np.ascontiguousarray(values, fixed.get(name)) for name, values in columns.items()})


def update(digest: hashlib._Hash, columns: Mapping[str, np.ndarray]) -> None:
    """Add the columns of a batch to the checksum of a set."""
    for values in columns.values():
        digest.update(values.data)


def record_of(columns: Mapping[str, np.ndarray]) -> pa.RecordBatch:
    """Return the columns, `input` first, as an Arrow record batch; contiguous columns are not copied."""
    return pa.record_batch(list(map(_column, columns.values())), names=list(columns))


# `pa.array` and `to_numpy` are not used, since they import pandas: 0.3 s, and memory, in every process that uses a set.
def _column(values: np.ndarray) -> pa.Array:
    content = pa.py_buffer(np.ascontiguousarray(values))
    entries = pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), values.size, [None, content])
    if values.ndim == 1:
        return entries
    kind = pa.fixed_shape_tensor(pa.from_numpy_dtype(values.dtype), list(values.shape[1:]))
    rows = pa.FixedSizeListArray.from_arrays(entries, int(np.prod(kind.shape)))
    return pa.ExtensionArray.from_storage(kind, rows)


def columns_of(record: pa.RecordBatch) -> dict[str, np.ndarray]:
    """The inverse of `record_of`: views of the record, and hence of the file if the file is memory-mapped."""
    columns = {}
    for name in record.schema.names:
        kind, column = record.schema.field(name).type, record[name]
        is_tensor = isinstance(kind, pa.FixedShapeTensorType)
        values = np.from_dlpack(column.storage.flatten() if is_tensor else column)
        columns[name] = values.reshape(-1, *kind.shape) if is_tensor else values
    order = dict.fromkeys((*KINDS, *columns))  # columns outside KINDS, such as `row`, come last
    return {name: columns[name] for name in order if name in columns}


def cut_at(values: np.ndarray, sizes: Sequence[int] | np.ndarray) -> list[np.ndarray]:
    """Return consecutive views of values with the given sizes."""
    return [values[start:end] for start, end in pairwise([0, *np.cumsum(sizes, dtype=np.int64).tolist()])]


def in_batches(
    inputs: np.ndarray,
    targets: np.ndarray,
    rows: int | None = None,
    *,
    domains: np.ndarray | None = None,
    splits: np.ndarray | None = None,
) -> Iterator[SetRows]:
    """Yield slices of arrays as batches for `write_set`. rows: of a batch; `batch_rows` by default."""
    rows = rows or batch_rows(inputs.shape[1:], inputs.itemsize)
    columns = SetRows(inputs, targets, domains, splits).columns
    for start in range(0, len(targets), rows):
        yield SetRows.of({name: values[start : start + rows] for name, values in columns.items()})


def batch_rows(shape: tuple[int, ...], itemsize: int = 1) -> int:
    """Return the rows of a batch of inputs with the given shape: 4096, fewer above BATCH_BYTES, at least 1.

    Raises:
      DataError: one input alone does not fit into memory.
    """
    size = math.prod(map(int, shape)) * itemsize
    if text := memory_fault(size):
        raise DataError(f"an input of shape {tuple(map(int, shape))} {text}", "", "choose a smaller size")
    return max(1, min(4096, BATCH_BYTES // max(1, size)))


@contextmanager
def damaged(path: Path) -> Iterator[None]:
    """Turn errors in reading a source file into a DataError that names the file."""
    try:
        yield
    except (OSError, ValueError, TypeError, LookupError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"not readable ({type(error).__name__}: {error})", str(path), "fetch the file again") from error


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """Turn a full disk, an exceeded quota or an exceeded file size limit into a DataError; other errors pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        mend = "free disk space, or choose another folder; nothing was kept"
        raise DataError(f"no space left ({error})", str(folder), mend) from error


def check_range(values: np.ndarray, limit: int, where: str, *, first: int = 0, column: str = "label") -> None:
    """Raise DataError at the first value outside 0..limit-1; its row, counted from `first`, is appended to `where`."""
    wrong = np.argwhere((values < 0) | (values >= limit))
    if len(wrong):
        mend = f"check the {column}s or the {'class' if column == 'label' else column} names"
        what = f"{column} {values[tuple(wrong[0])]} outside 0..{limit - 1}"
        raise DataError(what, f"{where} {first + int(wrong[0, 0])}", mend)
