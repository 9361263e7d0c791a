"""Prepared sets on disk: Arrow IPC files with an `input` and a `target` of fixed shape, and where the set has them an int64
`domain` and an int8 `split` (0 train, 1 validation, 2 test).

Inputs are uint8 images, float32 arrays of any shape, or int32 token sequences; targets are an int64 class, uint8 labels (0 or
1 for each), float32 numbers, or the int32 tokens that follow."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
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
BATCH_BYTES = 16 << 20  # of inputs; a few batches are in memory at a time, whatever the size of the set
#: Column -> the types that it may have in a file.
KINDS: dict[str, tuple[str, ...]] = {
    "input": ("uint8", "float32", "int32"),
    "target": ("int64", "uint8", "float32", "int32"),
    "domain": ("int64",),
    "split": ("int8",),
}
#: What files from before other inputs than images call these columns.
OLDER_NAMES = {"image": "input", "label": "target"}


def _prepare(path: Path, *options: str) -> str:
    """What to do about a set that cannot be used, by the path of its file ROOT/NAME/NAME.arrow."""
    return f"run `{command('raysim', 'prepare', path.stem, '--out', path.parent.parent, *options)}`"


class SetRows(NamedTuple):
    """Rows of a set, with types as in KINDS.

    inputs: (n, height, width, channels) images, (n, ...) arrays, (n, length) tokens; targets: (n,) or (n, ...); domains,
    splits: (n,).
    """

    inputs: np.ndarray
    targets: np.ndarray
    domains: np.ndarray | None = None
    splits: np.ndarray | None = None

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """The columns that the batch has, under their names in the file, in its order."""
        return {name: values for name, values in zip(KINDS, self, strict=True) if values is not None}

    @staticmethod
    def of(columns: Mapping[str, np.ndarray]) -> SetRows:
        """The inverse of `columns`."""
        return SetRows(**{f"{OLDER_NAMES.get(name, name)}s": values for name, values in columns.items()})


@dataclass(frozen=True)
class SetInfo:
    """What a set is. shape: of one input; checksum: SHA-256 over inputs, targets, domains and splits.

    task: what the targets are for, see `raysim.training.tasks`; classes: names of the outputs: classes, labels, numbers, or
    tokens.
    input_type, target_type, target_shape: see KINDS; vocabulary: how many different tokens the inputs have, 0 for others.
    mean, deviation: of the training rows, all rows where it has no official split, for each entry of an input's last axis, of
    pixels in [0, 1]; empty for tokens, and for sets from before this was written down.
    source: where it came from, in words; source_checksum: SHA-256 over the source files, empty if there were none.
    columns: names of the entries of an input, where a table had them.
    resize: how its images were resized when it was prepared, in words; empty: not, or prepared before this was written down.
    options: what else was asked of its reader, as on the command line; left_out: what the reader left out, in words.
    made_by: fingerprint of the user's own reader and its sources, see `reader_api.fingerprint`; empty for other sets.
    read_from: folder or file of the sources when it was made; empty if there were none.
    """

    name: str
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    num_examples: int
    checksum: str
    source: str = ""
    domains: tuple[str, ...] = ()
    source_checksum: str = ""
    made_by: str = ""
    read_from: str = ""
    resize: str = ""
    task: str = "classes"
    input_type: str = "uint8"
    target_type: str = "int64"
    target_shape: tuple[int, ...] = ()
    vocabulary: int = 0
    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()
    columns: tuple[str, ...] = ()
    options: str = ""
    left_out: str = ""

    @property
    def is_images(self) -> bool:
        return self.input_type == "uint8"

    @property
    def groups(self) -> tuple[str, ...]:
        """What rows are counted by: their classes; one group of all rows where the target is no class."""
        return self.classes if (self.target_type, self.target_shape) == ("int64", ()) else ("all",)

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
        names = {"classes", "domains", "columns"} & fields.keys()
        lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        lists |= {name: tuple(all_visible(fields[name])) for name in names}
        return SetInfo(**(fields | lists))

    def to_json(self) -> str:
        """What `read` reads."""
        return json.dumps(asdict(self), indent=1) + "\n"


def _is_sound(name: str, value: object) -> bool:
    """Whether a field of a description has a value of its type."""
    if name in ("shape", "target_shape"):
        is_list = isinstance(value, list) and all(type(each) is int and each > 0 for each in value)
        return is_list and (bool(value) or name == "target_shape")
    if name in ("mean", "deviation"):
        return isinstance(value, list) and all(isinstance(each, float) for each in value)
    if name in ("input_type", "target_type"):
        return value in KINDS[name.removesuffix("_type")]
    if name in ("classes", "domains", "columns"):
        is_list = isinstance(value, list) and all(isinstance(each, str) for each in value)
        return is_list and (bool(value) or name != "classes")
    return type(value) is int if name in ("num_examples", "vocabulary") else isinstance(value, str)


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
    task: str = "classes",
    vocabulary: int = 0,
    columns: Iterable[str] = (),
    left_out: str = "",
    options: str = "",
    source_checksum: str = "",
    made_by: str = "",
    read_from: str = "",
    resize: str = "",
) -> SetInfo:
    """Write a set whole or not at all.

    Args:
      classes: names of the outputs, see `SetInfo`.
      batches: (inputs, targets[, domains, splits]), one record batch each; all batches have the same columns.
      domains: names of the domains, where the batches have that column.
      vocabulary: how many different tokens the inputs have; 0: they are no tokens.
      task, columns, left_out, options, source_checksum, made_by, read_from, resize: see `SetInfo`.
    Raises:
      DataError: a target outside the classes, a number that is not finite, inputs of different shapes, no example at all, or
        no space on the disk.
    """
    digest, count, writer, moments = hashlib.sha256(), 0, None, Moments()
    info = SetInfo(name, tuple(map(visible, classes)), (), 0, "", source, tuple(map(visible, domains)), source_checksum)
    info = replace(info, made_by=made_by, read_from=read_from, resize=resize, options=options, left_out=left_out)
    info = replace(info, task=task, vocabulary=vocabulary, columns=tuple(map(visible, columns)))
    with full_disk(path.parent), replaced_file(path) as data, replaced_file(describe(path)) as description:
        for rows in batches:
            batch = _typed(SetRows(*rows), f"{name}, row {count}")
            if writer is None:
                info = _of_kind(info, batch)
            _check_shapes(batch, info, count)
            _check_values(batch, info, f"{name}, row", count)
            record = record_of(batch.columns)
            if writer is None:
                schema, writer = record.schema, pa.ipc.new_file(str(data), record.schema)
            if record.schema != schema:
                raise DataError("some batches have a domain or a split and some not", name, "give it to all or to none")
            update(digest, batch.columns)
            moments.add(batch)
            writer.write_batch(record)
            count += len(batch.targets)
        if writer is None:
            raise DataError("no examples", name, "check the source files")
        writer.close()
        mean, deviation = moments.result()
        info = replace(info, num_examples=count, checksum=digest.hexdigest(), mean=mean, deviation=deviation)
        description.write_text(info.to_json())
        # The data make the set complete: the old ones go before the description changes, the new ones come after.
        path.unlink(missing_ok=True)
    return info


def _of_kind(info: SetInfo, batch: SetRows) -> SetInfo:
    """The description with the types and shapes of a first batch."""
    info = replace(info, shape=batch.inputs.shape[1:], target_shape=batch.targets.shape[1:])
    return replace(info, input_type=str(batch.inputs.dtype), target_type=str(batch.targets.dtype))


class Moments:
    """Mean and deviation of the training rows of a set for each entry of the last axis, batch by batch, in float64."""

    def __init__(self) -> None:
        self._count, self._first, self._sums = 0, np.zeros(1), np.zeros((2, 1))

    def add(self, batch: SetRows) -> None:
        """Take the training rows of a batch; all rows where it has no splits."""
        rows = batch.inputs if batch.splits is None else batch.inputs[batch.splits == 0]
        if rows.dtype == np.int32 or not len(rows):  # tokens have no mean
            return
        values, scale = rows.reshape(-1, rows.shape[-1]), 255.0 if rows.dtype == np.uint8 else 1.0
        if not self._count:
            self._first = values[0] / scale
        length = max(1, (1 << 20) // values.shape[1])  # floats of a part at a time
        for start in range(0, len(values), length):
            part = values[start : start + length] / scale - self._first  # so that no large mean swallows the deviation
            self._sums = self._sums + np.stack([part.sum(0), np.square(part).sum(0)])
        self._count += len(values)

    def result(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """(mean, population deviation); an entry that never changes has deviation 1, and tokens have neither."""
        if not self._count:
            return (), ()
        mean, square = self._sums / self._count
        deviation = np.sqrt(np.maximum(square - mean**2, 0))
        deviation[deviation == 0] = 1.0
        return tuple((self._first + mean).tolist()), tuple(deviation.tolist())


def _check_values(batch: SetRows, info: SetInfo, where: str, first: int) -> None:
    """DataError at the first class, label, token, domain or split of a batch that has no name, or number that is not finite."""
    limits = {"target": len(info.classes), "domain": len(info.domains), "split": len(SPLITS), "input": info.vocabulary}
    if info.target_type == "uint8":
        limits["target"] = 2
    names = {"target": "label" if info.target_type in ("int64", "uint8") else "token", "input": "token"}
    for column, values in batch.columns.items():
        if values.dtype == np.float32:
            wrong = ~np.isfinite(values).reshape(len(values), -1).all(1)
            if wrong.any():
                what = f"{column} that is not finite"
                raise DataError(
                    what, f"{where} {first + int(wrong.argmax())}", "give finite numbers, or leave the row out"
                )
        elif column != "input" or values.dtype == np.int32:
            check_range(values, limits[column], where, first=first, column=names.get(column, column))


def _typed(batch: SetRows, where: str) -> SetRows:
    """The batch with contiguous columns of the types in KINDS: whole targets of one number are classes."""
    inputs, targets = batch.inputs, batch.targets
    if str(inputs.dtype) not in KINDS["input"]:
        mend = "images must be uint8, 0 to 255; other inputs float32, or int32 for tokens"
        raise DataError(f"inputs of type {inputs.dtype}", where, mend)
    if inputs.dtype == np.uint8 and inputs.ndim != 4:
        what = f"images of shape {inputs.shape[1:]}"
        raise DataError(what, where, "give (n, height, width, channels); numbers that are no pixels as float32")
    if inputs.ndim < 2 or (inputs.dtype == np.int32 and inputs.ndim != 2):
        raise DataError(f"inputs of shape {inputs.shape}", where, "give (n, ...) numbers, or (n, length) tokens")
    if np.issubdtype(targets.dtype, np.integer) and targets.ndim == 1:
        targets = targets.astype(np.int64, copy=False)
    if str(targets.dtype) not in KINDS["target"] or (targets.dtype == np.int32 and targets.shape != inputs.shape):
        what = f"targets of shape {targets.shape} and type {targets.dtype} for inputs of shape {inputs.shape}"
        mend = "give one class, uint8 labels, float32 numbers, or one int32 token for each of the input"
        raise DataError(what, where, mend)
    columns = SetRows(inputs, targets, batch.domains, batch.splits).columns
    fixed = {"domain": np.int64, "split": np.int8}
    return SetRows.of({name: np.ascontiguousarray(values, fixed.get(name)) for name, values in columns.items()})


def _check_shapes(batch: SetRows, info: SetInfo, first: int) -> None:
    """DataError where a batch does not fit the set, or its columns each other."""
    inputs, targets, row = batch.inputs, batch.targets, f"{info.name}, row"
    kind = "image" if info.is_images else "input"
    if not all(info.shape):
        entry = "a pixel" if info.is_images else "a number"
        raise DataError(
            f"{kind}s of shape {info.shape} without {entry}", f"{row} {first}", f"give {kind}s with {entry[2:]}s"
        )
    if inputs.shape[1:] != info.shape or str(inputs.dtype) != info.input_type:
        what = f"{kind} of shape {inputs.shape[1:]} among {kind}s of shape {info.shape}"
        if inputs.shape[1:] == info.shape:
            what = f"{inputs.dtype} inputs among {info.input_type} ones"
        raise DataError(
            what, f"{info.name}, from row {first}", "resize them to one size" if info.is_images else "give all alike"
        )
    if targets.shape[1:] != info.target_shape or str(targets.dtype) != info.target_type:
        what = f"targets of shape {targets.shape[1:]} and type {targets.dtype} among {info.target_shape} {info.target_type}"
        raise DataError(what, f"{info.name}, from row {first}", "give all alike")
    for column, values in batch.columns.items():
        shape = (len(inputs), *(info.target_shape if column == "target" else ()))
        if column != "input" and values.shape != shape:
            name = {"target": "label"}.get(column, column)
            what = f"{name}s of shape {values.shape} for {len(inputs)} {kind}s"
            raise DataError(what, f"{row} {first}", f"one an {kind}")


def update(digest: hashlib._Hash, columns: Mapping[str, np.ndarray]) -> None:
    """Add the columns of a batch to the checksum of a set."""
    for values in columns.values():
        digest.update(values.data)


def record_of(columns: Mapping[str, np.ndarray]) -> pa.RecordBatch:
    """Columns, `input` first, as Arrow has them; nothing is copied."""
    return pa.record_batch(list(map(_column, columns.values())), names=list(columns))


# Neither `pa.array` nor `to_numpy`: they import pandas, 0.3 s and its memory in every process that reads or writes a set.


def _column(values: np.ndarray) -> pa.Array:
    content = pa.py_buffer(np.ascontiguousarray(values))
    entries = pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), values.size, [None, content])
    if values.ndim == 1:
        return entries
    kind = pa.fixed_shape_tensor(pa.from_numpy_dtype(values.dtype), list(values.shape[1:]))
    rows = pa.FixedSizeListArray.from_arrays(entries, int(np.prod(kind.shape)))
    return pa.ExtensionArray.from_storage(kind, rows)


def columns_of(record: pa.RecordBatch) -> dict[str, np.ndarray]:
    """The inverse of `record_of`: views of the record, which are views of the file where that is mapped."""
    columns = {}
    for name in record.schema.names:
        kind, column = record.schema.field(name).type, record[name]
        if isinstance(kind, pa.FixedShapeTensorType):
            entries = np.from_dlpack(column.storage.flatten())
            columns[OLDER_NAMES.get(name, name)] = entries.reshape(-1, *kind.shape)
        else:
            columns[OLDER_NAMES.get(name, name)] = np.from_dlpack(column)
    return {name: columns[name] for name in sorted(columns, key=_place)}


def _place(column: str) -> int:
    """Where a column stands among the others; those of no set, such as `row`, come last."""
    return list(KINDS).index(column) if column in KINDS else len(KINDS)


class PreparedSet:
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
                if str(values.dtype) not in KINDS[name]:
                    raise ValueError(f"column {name} of type {values.dtype}")
        self.starts = np.cumsum([0, *(len(batch.targets) for batch in self.batches)])
        says = "where the description says"
        if len(self) != self.info.num_examples:
            raise DataError(f"{len(self)} examples {says} {self.info.num_examples}", str(path), again)
        for shape in {batch.inputs.shape[1:] for batch in self.batches} - {self.info.shape}:
            raise DataError(f"inputs of shape {shape} {says} {self.info.shape}", str(path), again)
        types = (self.info.input_type, self.info.target_type, self.info.target_shape)
        for batch in self.batches:
            stored = (str(batch.inputs.dtype), str(batch.targets.dtype), batch.targets.shape[1:])
            if stored != types:
                raise DataError(f"inputs and targets of type {stored} {says} {types}", str(path), again)

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def targets(self) -> np.ndarray:
        """(n,) or (n, ...), see KINDS."""
        return np.concatenate([batch.targets for batch in self.batches])

    @property
    def labels(self) -> np.ndarray:
        """(n,) int64: the group of each row, see `SetInfo.groups`: its class, or 0."""
        return self.targets if self.info.groups is self.info.classes else np.zeros(len(self), np.int64)

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
            _check_values(batch, self.info, f"{self.path}, row", first)
            update(digest, batch.columns)
        if digest.hexdigest() != self.info.checksum:
            what = f"checksum {digest.hexdigest()[:16]} where the description says {self.info.checksum[:16]}"
            raise DataError(what, str(self.path), f"the file was damaged or changed; {_prepare(self.path, '--again')}")

    def take(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(inputs, targets) of the given rows, in their order; reads only these."""
        inputs = np.empty((len(rows), *self.info.shape), self.info.input_type)
        targets = np.empty((len(rows), *self.info.target_shape), self.info.target_type)
        owners = np.searchsorted(self.starts, rows, side="right") - 1
        for index in np.unique(owners):
            places, batch = np.flatnonzero(owners == index), self.batches[index]
            local = rows[places] - self.starts[index]
            inputs[places], targets[places] = batch.inputs[local], batch.targets[local]
        return inputs, targets

    def whole(self) -> tuple[np.ndarray, np.ndarray]:
        """(inputs, targets) of a set written as one record batch: views of the mapped file."""
        if len(self.batches) == 1:
            return self.batches[0].inputs, self.batches[0].targets
        return self.take(np.arange(len(self)))


def in_batches(
    inputs: np.ndarray,
    targets: np.ndarray,
    rows: int | None = None,
    *,
    domains: np.ndarray | None = None,
    splits: np.ndarray | None = None,
) -> Iterator[SetRows]:
    """Slices of arrays as `write_set` takes them; of `batch_rows` rows by default."""
    rows = rows or batch_rows(inputs.shape[1:], inputs.itemsize)
    columns = SetRows(inputs, targets, domains, splits).columns
    for start in range(0, len(targets), rows):
        yield SetRows.of({name: values[start : start + rows] for name, values in columns.items()})


def batch_rows(shape: tuple[int, ...], itemsize: int = 1) -> int:
    """Rows of a batch of inputs of this shape: 4096, fewer where that exceeds BATCH_BYTES, and at least 1.

    Raises:
      DataError: one input alone does not fit into memory.
    """
    size = math.prod(map(int, shape)) * itemsize
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
    wrong = np.argwhere((values < 0) | (values >= limit))
    if len(wrong):
        mend = f"check the {column}s or the {'class' if column == 'label' else column} names"
        what = f"{column} {values[tuple(wrong[0])]} outside 0..{limit - 1}"
        raise DataError(what, f"{where} {first + int(wrong[0, 0])}", mend)
