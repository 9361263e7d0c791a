"""Image sets on disk: Arrow IPC files with a fixed-shape uint8 `image`, an int64 `label`, and where the set has them an
int64 `domain` and an int8 `split` (0 train, 1 validation, 2 test)."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from filelock import FileLock

from raysim.core.commands import command
from raysim.core.errors import DataError, explained
from raysim.core.memory import memory_fault
from raysim.core.reading import read_json, regular_file
from raysim.core.texts import all_visible, visible
from raysim.folders.files import replaced_file

SPLITS = ("train", "validation", "test")
BATCH_BYTES = 16 << 20  # of pixels; a few batches are in memory at a time, whatever the size of the set
KINDS = {"image": np.uint8, "label": np.int64, "domain": np.int64, "split": np.int8}


def _prepare(path: Path, *options: str) -> str:
    """What to do about a set that cannot be used, by the path of its file ROOT/NAME/NAME.arrow."""
    return f"run `{command('raysim', 'prepare', path.stem, '--out', path.parent.parent, *options)}`"


class SetRows(NamedTuple):
    """Rows of a set. images: (n, height, width, channels) uint8; labels, domains: (n,) int64; splits: (n,) int8."""

    images: np.ndarray
    labels: np.ndarray
    domains: np.ndarray | None = None
    splits: np.ndarray | None = None

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """The columns that the batch has, under their names in the file, in its order."""
        return {name: values for name, values in zip(KINDS, self, strict=True) if values is not None}

    @staticmethod
    def of(columns: Mapping[str, np.ndarray]) -> SetRows:
        """The inverse of `columns`."""
        return SetRows(**{f"{name}s": values for name, values in columns.items()})


@dataclass(frozen=True)
class SetInfo:
    """What a set is. shape: (height, width, channels); checksum: SHA-256 over pixels, labels, domains and splits.

    source: where it came from, in words; source_checksum: SHA-256 over the source files, empty if there were none.
    resize: how its images were resized when it was prepared, in words; empty: not, or prepared before this was written down.
    made_by: fingerprint of the user's own reader and its sources, see `reader_api.fingerprint`; empty for other sets.
    read_from: folder or file of the sources when it was made; empty if there were none.
    """

    name: str
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    num_examples: int
    checksum: str
    source: str = ""
    domains: tuple[str, ...] = ()
    source_checksum: str = ""
    made_by: str = ""
    read_from: str = ""
    resize: str = ""

    @staticmethod
    def read(path: Path) -> SetInfo:
        """The description of the set whose Arrow file is `path`; descriptions from before a field have its default.

        Raises:
          OSError, ValueError, TypeError: it is missing or damaged.
        """
        fields = read_json(describe(path))
        if not isinstance(fields, dict):
            raise ValueError(f"no keys and values but {type(fields).__name__}")
        if wrong := [name for name, value in fields.items() if not _is_sound(name, value)]:
            raise ValueError(f"{wrong[0]} is {fields[wrong[0]]!r:.100}")
        lists = {name: tuple(all_visible(value)) for name, value in fields.items() if isinstance(value, list)}
        return SetInfo(**(fields | lists))

    def to_json(self) -> str:
        """What `read` reads."""
        return json.dumps(asdict(self), indent=1) + "\n"


def _is_sound(name: str, value: object) -> bool:
    """Whether a field of a description has a value of its type."""
    if name == "shape":
        return isinstance(value, list) and len(value) == 3 and all(type(each) is int and each > 0 for each in value)
    if name in ("classes", "domains"):
        is_list = isinstance(value, list) and all(isinstance(each, str) for each in value)
        return is_list and (bool(value) or name == "domains")
    return type(value) is int if name == "num_examples" else isinstance(value, str)


def describe(path: Path) -> Path:
    """The JSON description beside a set's Arrow file."""
    return path.with_suffix(".json")


def is_prepared(path: Path) -> bool:
    """Whether a set is there with its description, which is written before it."""
    return path.is_file() and describe(path).is_file()


def made_once(path: Path, there: Callable[[], SetInfo | None], make: Callable[[], SetInfo]) -> SetInfo:
    """The set at a path, made if it is not there, by one process at a time.

    Args:
      there: the set if it is there as wanted; asked again once other processes are done.
    """
    if info := there():
        return info
    root = path.parent.parent
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / f".{path.stem}.lock"):
        return there() or make()


def write_set(
    path: Path,
    name: str,
    classes: Iterable[str],
    batches: Iterable[SetRows | tuple[np.ndarray, np.ndarray]],
    source: str = "",
    *,
    domains: Iterable[str] = (),
    **about: str,
) -> SetInfo:
    """Write a set whole or not at all.

    Args:
      batches: (images, labels[, domains, splits]), one record batch each; all batches have the same columns.
      domains: names of the domains, where the batches have that column.
      about: what else `SetInfo` says: source_checksum, made_by, read_from, resize.
    Raises:
      DataError: a label outside the classes, images of different shapes, no example at all, or no space on the disk.
    """
    classes, domains = tuple(map(visible, classes)), tuple(map(visible, domains))
    digest, count, shape, writer = hashlib.sha256(), 0, None, None
    with full_disk(path.parent), replaced_file(path) as data, replaced_file(describe(path)) as description:
        for columns in batches:
            batch = SetRows(*columns)
            shape = shape or batch.images.shape[1:]
            batch = _checked(batch, shape, name, count)
            _check_codes(batch, classes, domains, f"{name}, row", count)
            record = record_of(batch.columns)
            if writer is None:
                schema, writer = record.schema, pa.ipc.new_file(str(data), record.schema)
            if record.schema != schema:
                raise DataError("some batches have a domain or a split and some not", name, "give it to all or to none")
            update(digest, batch.columns)
            writer.write_batch(record)
            count += len(batch.labels)
        if writer is None or shape is None:
            raise DataError("no examples", name, "check the source files")
        writer.close()
        info = SetInfo(name, classes, tuple(shape), count, digest.hexdigest(), source, domains, **about)
        description.write_text(info.to_json())
        # The data make the set complete: the old ones go before the description changes, the new ones come after.
        path.unlink(missing_ok=True)
    return info


def _check_codes(batch: SetRows, classes: Sequence[str], domains: Sequence[str], where: str, first: int) -> None:
    """DataError at the first label, domain or split of a batch that has no name."""
    limits = {"label": len(classes), "domain": len(domains), "split": len(SPLITS)}
    for column, values in batch.columns.items():
        if column in limits:
            check_range(values, limits[column], where, first=first, column=column)


def _checked(batch: SetRows, shape: tuple[int, ...], name: str, first: int) -> SetRows:
    """The batch with contiguous columns of the right types, or a DataError naming the first wrong row."""
    images, row = batch.images, f"{name}, row"
    if images.dtype != np.uint8:
        raise DataError(f"pixels of type {images.dtype}", f"{row} {first}", "images must be uint8, 0 to 255")
    if not all(shape):
        raise DataError(f"images of shape {shape} without a pixel", f"{row} {first}", "give images with pixels")
    if images.shape[1:] != shape:
        what = f"image of shape {images.shape[1:]} among images of shape {shape}"
        raise DataError(what, f"{name}, from row {first}", "resize them to one size")
    for column, values in batch.columns.items():
        if column != "image" and values.shape != (len(images),):
            what = f"{column}s of shape {values.shape} for {len(images)} images"
            raise DataError(what, f"{row} {first}", "one an image")
    return SetRows.of({name: np.ascontiguousarray(values, KINDS[name]) for name, values in batch.columns.items()})


def update(digest: hashlib._Hash, columns: Mapping[str, np.ndarray]) -> None:
    """Add the columns of a batch to the checksum of a set."""
    for values in columns.values():
        digest.update(values.data)


def record_of(columns: Mapping[str, np.ndarray]) -> pa.RecordBatch:
    """Columns, `image` first, as Arrow has them; nothing is copied."""
    images, *others = columns.values()
    kind = pa.fixed_shape_tensor(pa.uint8(), list(images.shape[1:]))
    pixels = pa.FixedSizeListArray.from_arrays(_column(images.reshape(-1)), int(np.prod(kind.shape)))
    return pa.record_batch([pa.ExtensionArray.from_storage(kind, pixels), *map(_column, others)], names=list(columns))


# Neither `pa.array` nor `to_numpy`: they import pandas, 0.3 s and its memory in every process that reads or writes a set.


def _column(values: np.ndarray) -> pa.Array:
    content = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, content])


def columns_of(record: pa.RecordBatch) -> dict[str, np.ndarray]:
    """The inverse of `record_of`: views of the record, which are views of the file where that is mapped."""
    columns = {name: np.from_dlpack(record[name]) for name in record.schema.names if name != "image"}
    pixels = np.from_dlpack(record["image"].storage.flatten())
    return {"image": pixels.reshape(-1, *record.schema.field("image").type.shape), **columns}


class ImageSet:
    """A memory-mapped set: no pixel is read before it is asked for.

    batches: as they were written, views of the mapped file; starts: (len(batches) + 1,), their first rows, and the end.
    """

    def __init__(self, path: Path):
        self.path = path
        if not path.is_file():
            raise DataError(f"no prepared set {path.stem!r}", str(path), f"{_prepare(path)}, or correct data.root")
        again = _prepare(path, "--again")
        damage = f"its description {describe(path).name} is missing or damaged"
        with explained(damage, path, again, OSError, ValueError, TypeError, AttributeError):
            self.info = SetInfo.read(path)
        # What is missing or of another type in a table that somebody made by hand is an error of pyarrow's or of Python's own.
        kinds = (pa.ArrowException, OSError, ValueError, TypeError, LookupError, AttributeError)
        with explained("not a readable Arrow IPC file of a set", path, again, *kinds):
            reader = pa.ipc.open_file(pa.memory_map(str(regular_file(path))))
            self.batches = [SetRows.of(columns_of(reader.get_batch(i))) for i in range(reader.num_record_batches)]
            for name, values in ((name, values) for batch in self.batches for name, values in batch.columns.items()):
                if values.dtype != KINDS[name]:
                    raise ValueError(f"column {name} of type {values.dtype}")
        self.starts = np.cumsum([0, *(len(batch.labels) for batch in self.batches)])
        says = "where the description says"
        if len(self) != self.info.num_examples:
            raise DataError(f"{len(self)} examples {says} {self.info.num_examples}", str(path), again)
        for shape in {batch.images.shape[1:] for batch in self.batches} - {self.info.shape}:
            raise DataError(f"images of shape {shape} {says} {self.info.shape}", str(path), again)

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def labels(self) -> np.ndarray:
        """(n,) int64."""
        return np.concatenate([batch.labels for batch in self.batches])

    @property
    def domains(self) -> np.ndarray | None:
        """(n,) int64, which of `info.domains` an example is from; None if the set has none."""
        return self._optional("domain")

    @property
    def splits(self) -> np.ndarray | None:
        """(n,) int8: 0 train, 1 validation, 2 test, as published with the set; None if it has no official split."""
        return self._optional("split")

    def _optional(self, column: str) -> np.ndarray | None:
        parts = [batch.columns[column] for batch in self.batches if column in batch.columns]
        return np.concatenate(parts) if parts else None

    def verify(self) -> None:
        """Read the whole set; DataError if it does not have the checksum of its description, or values outside its names."""
        digest = hashlib.sha256()
        for first, batch in zip(self.starts.tolist(), self.batches, strict=False):
            _check_codes(batch, self.info.classes, self.info.domains, f"{self.path}, row", first)
            update(digest, batch.columns)
        if digest.hexdigest() != self.info.checksum:
            what = f"checksum {digest.hexdigest()[:16]} where the description says {self.info.checksum[:16]}"
            raise DataError(what, str(self.path), f"the file was damaged or changed; {_prepare(self.path, '--again')}")

    def take(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(images, labels) of the given rows, in their order; reads only these."""
        images = np.empty((len(rows), *self.info.shape), np.uint8)
        labels = np.empty(len(rows), np.int64)
        owners = np.searchsorted(self.starts, rows, side="right") - 1
        for index in np.unique(owners):
            places, batch = np.flatnonzero(owners == index), self.batches[index]
            local = rows[places] - self.starts[index]
            images[places], labels[places] = batch.images[local], batch.labels[local]
        return images, labels

    def whole(self) -> tuple[np.ndarray, np.ndarray]:
        """(images, labels) of a set written as one record batch: views of the mapped file."""
        if len(self.batches) == 1:
            return self.batches[0].images, self.batches[0].labels
        return self.take(np.arange(len(self)))


def in_batches(
    images: np.ndarray,
    labels: np.ndarray,
    rows: int | None = None,
    *,
    domains: np.ndarray | None = None,
    splits: np.ndarray | None = None,
) -> Iterator[SetRows]:
    """Slices of arrays as `write_set` takes them; of `batch_rows` rows by default."""
    rows = rows or batch_rows(images.shape[1:])
    columns = SetRows(images, labels, domains, splits).columns
    for start in range(0, len(labels), rows):
        yield SetRows.of({name: values[start : start + rows] for name, values in columns.items()})


def batch_rows(shape: tuple[int, ...]) -> int:
    """Rows of a batch of images of this shape: 4096, fewer where that exceeds BATCH_BYTES, and at least 1.

    Raises:
      DataError: one image alone does not fit into memory.
    """
    size = math.prod(map(int, shape))
    if text := memory_fault(size):
        raise DataError(f"an image of shape {tuple(map(int, shape))} {text}", "", "choose a smaller size")
    return max(1, min(4096, BATCH_BYTES // max(1, size)))


# --- faults of files, as users see them -----------------------------------------------------------------------------


@contextmanager
def damaged(path: Path) -> Iterator[None]:
    """Errors while a source file is read become a DataError that names the file."""
    try:
        yield
    except (OSError, ValueError, TypeError, LookupError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"not readable ({type(error).__name__}: {error})", str(path), "fetch the file again") from error


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """A full disk, a spent quota and a file over the limit become a DataError; other errors pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        mend = "free some, or choose another folder; nothing was kept"
        raise DataError(f"no space left ({error})", str(folder), mend) from error


def check_range(values: np.ndarray, limit: int, where: str, *, first: int = 0, column: str = "label") -> None:
    """DataError at the first value outside 0..limit-1; its row is counted from `first` and appended to `where`."""
    wrong = np.flatnonzero((values < 0) | (values >= limit))
    if len(wrong):
        mend = f"check the {column}s or the {'class' if column == 'label' else column} names"
        raise DataError(f"{column} {values[wrong[0]]} outside 0..{limit - 1}", f"{where} {first + int(wrong[0])}", mend)
