"""Image sets on disk: Arrow IPC files with a fixed-shape uint8 `image`, an int64 `label`, and where the set has them an
int64 `domain` and an int8 `split` (0 train, 1 validation, 2 test)."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from raysim.core.errors import DataError

SPLITS = ("train", "validation", "test")
BATCH_BYTES = 16 << 20  # of pixels; a few batches are in memory at a time, whatever the size of the set


class Batch(NamedTuple):
    """Rows of a set. images: (n, height, width, channels) uint8; labels, domains: (n,) int64; splits: (n,) int8."""

    images: np.ndarray
    labels: np.ndarray
    domains: np.ndarray | None = None
    splits: np.ndarray | None = None


@dataclass(frozen=True)
class SetInfo:
    """What a set is. shape: (height, width, channels); checksum: SHA-256 over pixels, labels, domains and splits.

    source: where it came from, in words; source_checksum: SHA-256 over the source files, empty if there were none.
    """

    name: str
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    num_examples: int
    checksum: str
    source: str = ""
    domains: tuple[str, ...] = ()
    source_checksum: str = ""


def write_set(
    path: Path,
    name: str,
    classes: Iterable[str],
    batches: Iterable[Batch | tuple[np.ndarray, np.ndarray]],
    source: str = "",
    *,
    domains: Iterable[str] = (),
    source_checksum: str = "",
) -> SetInfo:
    """Write a set whole or not at all.

    Args:
      batches: (images, labels[, domains, splits]), one record batch each; all batches have the same columns.
      domains: names of the domains, where the batches have that column.
    Raises:
      DataError: a label outside the classes, images of different shapes, no example at all, or no space on the disk.
    """
    classes, domains = tuple(classes), tuple(domains)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    with _full_disk(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    digest, count, shape, schema, writer = hashlib.sha256(), 0, None, None, None
    try:
        for given in batches:
            batch = Batch(*given)
            if shape is None or schema is None:
                shape, schema = batch.images.shape[1:], _schema(batch)
                with _full_disk(path):
                    writer = pa.ipc.new_file(str(temporary), schema)
            batch = _checked(batch, shape, (len(classes), len(domains)), f"{name}, row", count)
            if _schema(batch) != schema:
                raise DataError("some batches have a domain or a split and some not", name, "give it to all or to none")
            _update(digest, batch)
            count += len(batch.labels)
            assert writer is not None
            with _full_disk(path):
                writer.write_batch(_record_batch(batch, schema))
        if writer is None or shape is None:
            raise DataError("no examples", name, "check the source files")
        with _full_disk(path):
            writer.close()
            info = SetInfo(name, classes, tuple(shape), count, digest.hexdigest(), source, domains, source_checksum)
            _publish(temporary, path, info)
    finally:
        temporary.unlink(missing_ok=True)
        describe(temporary).unlink(missing_ok=True)
    return info


def _checked(batch: Batch, shape: tuple[int, ...], counts: tuple[int, int], where: str, first: int) -> Batch:
    """The batch with contiguous columns of the right types, or a DataError naming the first wrong row."""
    images, labels, domains, splits = batch
    if images.dtype != np.uint8:
        raise DataError(f"pixels of type {images.dtype}", f"{where} {first}", "images must be uint8, 0 to 255")
    if images.shape[1:] != shape:
        raise DataError(
            f"image of shape {images.shape[1:]} among images of shape {shape}",
            f"{where.replace(', row', ', from row')} {first}",
            "resize them to one size",
        )
    known = {"label": (labels, counts[0]), "domain": (domains, counts[1]), "split": (splits, len(SPLITS))}
    for column, (values, limit) in known.items():
        if values is None:
            continue
        if values.shape != (len(images),):
            raise DataError(
                f"{column}s of shape {values.shape} for {len(images)} images", f"{where} {first}", "one an image"
            )
        check_range(values, limit, where, first=first, column=column)
    return Batch(
        np.ascontiguousarray(images),
        np.ascontiguousarray(labels, np.int64),
        None if domains is None else np.ascontiguousarray(domains, np.int64),
        None if splits is None else np.ascontiguousarray(splits, np.int8),
    )


def check_range(values: np.ndarray, limit: int, where: str, *, first: int = 0, column: str = "label") -> None:
    """DataError at the first value outside 0..limit-1; its row is counted from `first` and appended to `where`."""
    wrong = np.flatnonzero((values < 0) | (values >= limit))
    if len(wrong):
        mend = f"check the {column}s or the {'class' if column == 'label' else column} names"
        raise DataError(f"{column} {values[wrong[0]]} outside 0..{limit - 1}", f"{where} {first + int(wrong[0])}", mend)


def _update(digest: Any, batch: Batch) -> None:
    for column in batch:
        if column is not None:
            digest.update(column.data)


def _schema(batch: Batch) -> pa.Schema:
    fields = [("image", pa.fixed_shape_tensor(pa.uint8(), list(batch.images.shape[1:]))), ("label", pa.int64())]
    fields += [("domain", pa.int64())] if batch.domains is not None else []
    return pa.schema(fields + ([("split", pa.int8())] if batch.splits is not None else []))


def _record_batch(batch: Batch, schema: pa.Schema) -> pa.RecordBatch:
    kind = schema.field("image").type
    storage = pa.FixedSizeListArray.from_arrays(pa.array(batch.images.reshape(-1)), int(np.prod(kind.shape)))
    others = [pa.array(column) for column in batch[1:] if column is not None]
    return pa.record_batch([pa.ExtensionArray.from_storage(kind, storage), *others], schema=schema)


def _publish(temporary: Path, path: Path, info: SetInfo) -> None:
    """Put both files in place. The description makes the set complete, so the old one goes first and the new one last."""
    describe(temporary).write_text(json.dumps(asdict(info), indent=1) + "\n")
    for written in (temporary, describe(temporary)):
        with open(written, "rb") as file:
            os.fsync(file.fileno())
    describe(path).unlink(missing_ok=True)
    os.replace(temporary, path)
    os.replace(describe(temporary), describe(path))


@contextmanager
def _full_disk(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise DataError(
            f"no space left ({error})", str(path.parent), "free some, or choose another folder; nothing was kept"
        ) from error


def describe(path: Path) -> Path:
    """The JSON description beside a set's Arrow file."""
    return path.with_suffix(".json")


class ImageSet:
    """A memory-mapped set: no pixel is read before it is asked for."""

    def __init__(self, path: Path):
        self.path = path
        self.info = _read_info(path)
        try:
            reader = pa.ipc.open_file(pa.memory_map(str(path)))
            batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(
                f"not a readable Arrow IPC file ({error})", str(path), "run `raysim prepare --again` for this set"
            ) from error
        self._images = [_pixels(batch) for batch in batches]
        self._labels = [batch.column("label").to_numpy() for batch in batches]
        self._domains = _optional(batches, "domain")
        self._splits = _optional(batches, "split")
        self._starts = np.cumsum([0, *(len(labels) for labels in self._labels)])
        if int(self._starts[-1]) != self.info.num_examples:
            raise DataError(
                f"{self._starts[-1]} examples where the description says {self.info.num_examples}",
                str(path),
                "run `raysim prepare --again` for this set",
            )

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def labels(self) -> np.ndarray:
        """(n,) int64."""
        return np.concatenate(self._labels)

    @property
    def domains(self) -> np.ndarray | None:
        """(n,) int64, which of `info.domains` an example is from; None if the set has none."""
        return None if self._domains is None else np.concatenate(self._domains)

    @property
    def splits(self) -> np.ndarray | None:
        """(n,) int8: 0 train, 1 validation, 2 test, as published with the set; None if it has no official split."""
        return None if self._splits is None else np.concatenate(self._splits)

    def batches(self) -> Iterator[Batch]:
        """The record batches as they were written: views of the mapped file."""
        for i, images in enumerate(self._images):
            domains = None if self._domains is None else self._domains[i]
            yield Batch(images, self._labels[i], domains, None if self._splits is None else self._splits[i])

    def verify(self) -> None:
        """Read the whole set; DataError if it does not have the checksum of its description."""
        digest = hashlib.sha256()
        for batch in self.batches():
            _update(digest, batch)
        if digest.hexdigest() != self.info.checksum:
            raise DataError(
                f"checksum {digest.hexdigest()[:16]} where the description says {self.info.checksum[:16]}",
                str(self.path),
                "the file was damaged or changed; run `raysim prepare --again` for this set",
            )

    def take(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(images, labels) of the given rows, in their order; reads only these."""
        images = np.empty((len(rows), *self.info.shape), np.uint8)
        labels = np.empty(len(rows), np.int64)
        chunk = np.searchsorted(self._starts, rows, side="right") - 1
        for index in np.unique(chunk):
            mine = np.flatnonzero(chunk == index)
            local = rows[mine] - self._starts[index]
            images[mine], labels[mine] = self._images[index][local], self._labels[index][local]
        return images, labels

    def whole(self) -> tuple[np.ndarray, np.ndarray]:
        """(images, labels) of a set written as one record batch: views of the mapped file."""
        if len(self._images) == 1:
            return self._images[0], self._labels[0]
        return self.take(np.arange(len(self)))


def _pixels(batch: pa.RecordBatch) -> np.ndarray:
    shape = batch.schema.field("image").type.shape
    return batch.column("image").storage.flatten().to_numpy(zero_copy_only=True).reshape(-1, *shape)


def _optional(batches: list[pa.RecordBatch], column: str) -> list[np.ndarray] | None:
    if not batches or column not in batches[0].schema.names:
        return None
    return [batch.column(column).to_numpy() for batch in batches]


def _read_info(path: Path) -> SetInfo:
    if not path.is_file():
        raise DataError(
            f"no prepared set {path.stem!r}", str(path), f"run `raysim prepare {path.stem}`, or correct data.root"
        )
    try:
        fields = json.loads(describe(path).read_text())
        return SetInfo(
            fields["name"],
            tuple(fields["classes"]),
            tuple(fields["shape"]),
            fields["num_examples"],
            fields["checksum"],
            fields["source"],
            tuple(fields.get("domains", ())),
            fields.get("source_checksum", ""),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"its description {describe(path).name} is missing or damaged ({error})",
            str(path),
            "run `raysim prepare --again` for this set",
        ) from error


def in_batches(
    images: np.ndarray,
    labels: np.ndarray,
    rows: int | None = None,
    *,
    domains: np.ndarray | None = None,
    splits: np.ndarray | None = None,
) -> Iterator[Batch]:
    """Slices of arrays as `write_set` takes them; of `batch_rows` rows unless told."""
    rows = rows or batch_rows(images.shape[1:])
    for start in range(0, len(labels), rows):
        part = slice(start, start + rows)
        yield Batch(
            images[part],
            labels[part],
            None if domains is None else domains[part],
            None if splits is None else splits[part],
        )


def batch_rows(shape: tuple[int, ...]) -> int:
    """Rows of a batch of images of this shape: 4096, fewer where that exceeds BATCH_BYTES, and at least 1."""
    return max(1, min(4096, BATCH_BYTES // max(1, int(np.prod(shape)))))
