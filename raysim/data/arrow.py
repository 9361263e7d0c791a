"""Prepared sets on disk: Arrow IPC files with columns `input` and `target` of fixed shape.

Optional columns are an int64 `domain` and an int8 `split` (0 train, 1 validation, 2 test). Inputs are uint8 images,
float32 arrays of any shape, or int32 token sequences; targets are an int64 class, uint8 labels (0 or 1 for each),
float32 numbers, or the int32 tokens that follow.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from filelock import FileLock

from raysim.base.commands import command
from raysim.base.errors import DataError, explained
from raysim.base.texts import all_visible, visible
from raysim.base.untrusted import read_json, regular_file
from raysim.data.rows import KINDS, SPLITS, SetRows, check_range, columns_of, full_disk, record_of, typed, update
from raysim.folders.files import replaced_file


def _prepare(path: Path, *options: str) -> str:
    """Return the remedy for an unusable set, from the path ROOT/NAME/NAME.arrow."""
    return f"run `{command('raysim', 'prepare', path.stem, '--out', path.parent.parent, *options)}`"


#: Checksum over the other fields of a description: fields that match it have the types that `to_json` wrote.
SEAL = "description_sha256"


@dataclass(frozen=True)
class SetInfo:
    """Description of a set. shape: of one input; checksum: SHA-256 over inputs, targets, domains and splits.

    task: task of the targets, see `raysim.training.tasks`; classes: names of the outputs: classes, labels, numbers, or
    tokens.
    input_type, target_type, target_shape: see KINDS; vocabulary: number of different input tokens, 0 without tokens.
    mean, deviation: for each entry of an input's last axis, over the training rows (all rows of a set without an
    official split), with pixels in [0, 1]; empty for tokens.
    source: origin of the set, in words; source_checksum: SHA-256 over the source files, empty without source files.
    columns: names of the entries of an input, for a table; reading: how each column of the table was read, in words.
    resize: how images were resized during preparation, in words; empty if they were not.
    options: other options of the reader, as on the command line; left_out: parts of the sources that the reader left
    out, in words.
    made_by: fingerprint of the user's own reader and its sources, see `reader_api.fingerprint`; empty for other sets.
    read_from: folder or file of the sources at preparation; empty without source files.
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
    reading: str = ""
    options: str = ""
    left_out: str = ""

    @property
    def is_images(self) -> bool:
        return self.input_type == "uint8"

    @property
    def groups(self) -> tuple[str, ...]:
        """Groups for counting rows: the classes, or a single group for targets without classes."""
        return self.classes if (self.target_type, self.target_shape) == ("int64", ()) else ("all",)

    @staticmethod
    def read(path: Path) -> SetInfo:
        """Read the description of the set at `path`.

        Raises:
          OSError, ValueError, TypeError: the description is missing or damaged.
        """
        fields = read_json(describe(path))
        if not isinstance(fields, dict):
            raise ValueError(f"no keys and values but {type(fields).__name__}")
        if fields.pop(SEAL, None) != _digest(fields):
            raise ValueError(f"a field was changed by hand: {SEAL} is the checksum of different values")
        lists = {name: tuple(value) for name, value in all_visible(fields).items() if isinstance(value, list)}
        return SetInfo(**(fields | lists))

    def to_json(self) -> str:
        """Return the text for `read`: all fields, and a checksum over them."""
        fields = asdict(self)
        return json.dumps(fields | {SEAL: _digest(fields)}, indent=1) + "\n"


def _digest(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def describe(path: Path) -> Path:
    """Return the path of the JSON description beside a set's Arrow file."""
    return path.with_suffix(".json")


def is_prepared(path: Path) -> bool:
    """Return whether a set and its description exist; `write_set` moves the description into place first."""
    return path.is_file() and describe(path).is_file()


def made_once(path: Path, there: Callable[[], SetInfo | None], make: Callable[[], SetInfo]) -> SetInfo:
    """Return the set at a path, created on first use by a single process.

    Args:
      there: returns the existing set if it can be reused, else None; called again after waiting for the lock.
      make: writes the set.
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
    **about: Any,
) -> SetInfo:
    """Write a set atomically: completely or not at all.

    Args:
      classes: names of the outputs, see `SetInfo`.
      batches: (inputs, targets[, domains, splits]), one record batch each; all batches have the same columns.
      about: further fields of `SetInfo`: domains (required if the batches have domains), task, vocabulary, columns,
        reading, left_out, options, source_checksum, made_by, read_from, resize.
    Raises:
      DataError: a target outside the classes, a number that is not finite, inputs of different shapes, no examples, or
        no space on the disk.
    """
    digest, count, writer, moments = hashlib.sha256(), 0, None, Moments()
    names = {key: tuple(map(visible, about.get(key, ()))) for key in ("domains", "columns")}
    info = SetInfo(name, tuple(map(visible, classes)), (), 0, "", source, **about | names)
    with full_disk(path.parent), replaced_file(path) as data, replaced_file(describe(path)) as description:
        for rows in batches:
            batch = typed(SetRows(*rows), f"{name}, row {count}")
            if writer is None:
                info = replace(info, shape=batch.inputs.shape[1:], target_shape=batch.targets.shape[1:])
                info = replace(info, input_type=str(batch.inputs.dtype), target_type=str(batch.targets.dtype))
            _check_shapes(batch, info, count)
            _check_values(batch, info, f"{name}, row", count)
            record = record_of(batch.columns)
            if writer is None:
                schema, writer = record.schema, pa.ipc.new_file(str(data), record.schema)
            if record.schema != schema:
                raise DataError("some batches lack a domain or a split", name, "give all batches both, or none")
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
        # The Arrow file makes the set complete: the old file is deleted before the description changes, and the new
        # file is moved into place last.
        path.unlink(missing_ok=True)
    return info


class Moments:
    """Mean and deviation of the training rows of a set for each entry of the last axis, batch by batch, in float64."""

    def __init__(self) -> None:
        self._count, self._first, self._sums = 0, np.zeros(1), np.zeros((2, 1))

    def add(self, batch: SetRows) -> None:
        """Add the training rows of a batch; all rows of a batch without splits."""
        rows = batch.inputs if batch.splits is None else batch.inputs[batch.splits == 0]
        if rows.dtype == np.int32 or not len(rows):  # tokens have no mean
            return
        values, scale = rows.reshape(-1, rows.shape[-1]), 255.0 if rows.dtype == np.uint8 else 1.0
        if not self._count:
            self._first = values[0] / scale
        length = max(1, (1 << 20) // values.shape[1])  # floats of a part at a time
        for start in range(0, len(values), length):
            part = values[start : start + length] / scale - self._first  # a large mean would cancel the deviation
            self._sums = self._sums + np.stack([part.sum(0), np.square(part).sum(0)])
        self._count += len(values)

    def result(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return (mean, population deviation); a constant entry has deviation 1; both are empty for tokens."""
        if not self._count:
            return (), ()
        mean, square = self._sums / self._count
        deviation = np.sqrt(np.maximum(square - mean**2, 0))
        deviation[deviation == 0] = 1.0
        return tuple((self._first + mean).tolist()), tuple(deviation.tolist())


def _check_values(batch: SetRows, info: SetInfo, where: str, first: int) -> None:
    """Raise DataError at the first class, label, token, domain or split out of range, or at a non-finite number."""
    limits = {"target": len(info.classes), "domain": len(info.domains), "split": len(SPLITS), "input": info.vocabulary}
    if info.target_type == "uint8":
        limits["target"] = 2
    names = {"target": "label" if info.target_type in ("int64", "uint8") else "token", "input": "token"}
    for column, values in batch.columns.items():
        if values.dtype == np.float32:
            wrong = ~np.isfinite(values).reshape(len(values), -1).all(1)
            if wrong.any():
                place, mend = f"{where} {first + int(wrong.argmax())}", "give finite numbers, or leave the row out"
                raise DataError(f"{column} that is not finite", place, mend)
        elif column != "input" or values.dtype == np.int32:
            check_range(values, limits[column], where, first=first, column=names.get(column, column))


def _check_shapes(batch: SetRows, info: SetInfo, first: int) -> None:
    """Raise DataError for a batch whose shapes or types differ from the set's, or whose columns differ in length."""
    kind = "image" if info.is_images else "input"
    if not all(info.shape):
        entry = "pixel" if info.is_images else "number"
        what = f"{kind}s of shape {info.shape} without a {entry}"
        raise DataError(what, f"{info.name}, row {first}", f"give {kind}s with {entry}s")
    inputs = (f"{kind}s", batch.inputs, info.shape, info.input_type)
    targets = ("targets", batch.targets, info.target_shape, info.target_type)
    for name, values, shape, dtype in (inputs, targets):
        if (values.shape[1:], str(values.dtype)) != (shape, dtype):
            what = f"{name} of shape {values.shape[1:]} and type {values.dtype} among {name} of shape {shape} and type {dtype}"
            mend = f"give all {name} the same shape and type; images may be resized to one size"
            raise DataError(what, f"{info.name}, from row {first}", mend)
    for column, values in batch.columns.items():
        if len(values) != len(batch.inputs) or (values.ndim != 1 and column in ("domain", "split")):
            name = {"target": "label"}.get(column, column)
            what = f"{name}s of shape {values.shape} for {len(batch.inputs)} {kind}s"
            raise DataError(what, f"{info.name}, row {first}", f"one an {kind}")


class PreparedSet:
    """A memory-mapped set: pixels are read on access.

    batches: record batches of the file, as views of the mapped file; starts: (len(batches) + 1,), the first row of each
    batch, and the end.
    """

    def __init__(self, path: Path):
        self.path = path
        if not path.is_file():
            raise DataError(f"no prepared set {path.stem!r}", str(path), f"{_prepare(path)}, or correct data.root")
        again = _prepare(path, "--again")
        damage = f"the description {describe(path).name} is missing or damaged"
        with explained(damage, path, again, OSError, ValueError, TypeError, AttributeError):
            self.info = SetInfo.read(path)
        # A file made by hand may lack columns or have other types: pyarrow or Python then raises one of these errors.
        kinds = (pa.ArrowException, OSError, ValueError, TypeError, LookupError, AttributeError)
        with explained("not a readable Arrow IPC file of a set", path, again, *kinds):
            reader = pa.ipc.open_file(pa.memory_map(str(regular_file(path))))
            self.batches = [SetRows.of(columns_of(reader.get_batch(i))) for i in range(reader.num_record_batches)]
            for name, values in ((name, values) for batch in self.batches for name, values in batch.columns.items()):
                if str(values.dtype) not in KINDS[name]:
                    raise ValueError(f"column {name} of type {values.dtype}")
        self.starts = np.cumsum([0, *(len(batch.targets) for batch in self.batches)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def targets(self) -> np.ndarray:
        """Targets of all rows: (n,) or (n, ...), see KINDS."""
        return np.concatenate([batch.targets for batch in self.batches])

    @property
    def labels(self) -> np.ndarray:
        """(n,) int64 group of each row, see `SetInfo.groups`: the class, or 0 for targets without classes."""
        return self.targets if self.info.groups is self.info.classes else np.zeros(len(self), np.int64)

    @property
    def domains(self) -> np.ndarray | None:
        """(n,) int64 index into `info.domains` of each row; None for a set without domains."""
        return self._optional("domain")

    @property
    def splits(self) -> np.ndarray | None:
        """(n,) int8 official split of each row: 0 train, 1 validation, 2 test; None without an official split."""
        return self._optional("split")

    def _optional(self, column: str) -> np.ndarray | None:
        parts = [batch.columns[column] for batch in self.batches if column in batch.columns]
        return np.concatenate(parts) if parts else None

    def verify(self) -> None:
        """Read the whole set; raise DataError for a wrong checksum, values out of range, or non-finite numbers."""
        digest = hashlib.sha256()
        for first, batch in zip(self.starts.tolist(), self.batches, strict=False):
            _check_values(batch, self.info, f"{self.path}, row", first)
            update(digest, batch.columns)
        if digest.hexdigest() != self.info.checksum:
            what = f"checksum {digest.hexdigest()[:16]} where the description says {self.info.checksum[:16]}"
            raise DataError(what, str(self.path), f"the file was damaged or changed; {_prepare(self.path, '--again')}")

    def take(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (inputs, targets) of the given rows, in the given order; reads no other rows."""
        inputs = np.empty((len(rows), *self.info.shape), self.info.input_type)
        targets = np.empty((len(rows), *self.info.target_shape), self.info.target_type)
        owners = np.searchsorted(self.starts, rows, side="right") - 1
        for index in np.unique(owners):
            places, batch = np.flatnonzero(owners == index), self.batches[index]
            local = rows[places] - self.starts[index]
            inputs[places], targets[places] = batch.inputs[local], batch.targets[local]
        return inputs, targets

    def whole(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (inputs, targets) of all rows: views of the mapped file for a single record batch, else copies."""
        if len(self.batches) == 1:
            return self.batches[0].inputs, self.batches[0].targets
        return self.take(np.arange(len(self)))
