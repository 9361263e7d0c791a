"""Image sets on disk: Arrow IPC files with a fixed-shape uint8 `image` and an int64 `label`."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from raysim.core.errors import DataError

METADATA_KEY = b"raysim"


@dataclass(frozen=True)
class SetInfo:
    """What a set is. shape: (height, width, channels); checksum: SHA-256 over pixels and labels."""

    name: str
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    num_examples: int
    checksum: str
    source: str = ""


def write_set(
    path: Path, name: str, classes: Iterable[str], batches: Iterable[tuple[np.ndarray, np.ndarray]], source: str = ""
) -> SetInfo:
    """Write a set whole or not at all.

    Args:
      batches: (images (n, height, width, channels) uint8, labels (n,) int64), one record batch each.
    Raises:
      DataError: a label outside the classes, images of different shapes, or no example at all.
    """
    classes = tuple(classes)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    digest, count, shape, writer = hashlib.sha256(), 0, None, None
    try:
        for images, labels in batches:
            if shape is None:
                shape = images.shape[1:]
                writer = pa.ipc.new_file(str(temporary), _schema(shape))
            if images.shape[1:] != shape:
                raise DataError(
                    f"image of shape {images.shape[1:]} among images of shape {shape}",
                    f"{name}, from row {count}",
                    "resize them to one size",
                )
            if len(labels) and not (labels.min() >= 0 and labels.max() < len(classes)):
                row = count + int(np.flatnonzero((labels < 0) | (labels >= len(classes)))[0])
                raise DataError(
                    f"label {labels[row - count]} outside 0..{len(classes) - 1}",
                    f"{name}, row {row}",
                    "check the labels or the class names",
                )
            images, labels = np.ascontiguousarray(images, np.uint8), np.ascontiguousarray(labels, np.int64)
            digest.update(images.data)
            digest.update(labels.data)
            count += len(labels)
            assert writer is not None
            writer.write_batch(_record_batch(images, labels, shape))
        if writer is None or shape is None:
            raise DataError("no examples", name, "check the source files")
        writer.close()
        info = SetInfo(name, classes, tuple(shape), count, digest.hexdigest(), source)
        _stamp(temporary, path, info)
    finally:
        temporary.unlink(missing_ok=True)
    return info


def _schema(shape: tuple[int, ...]) -> pa.Schema:
    return pa.schema([("image", pa.fixed_shape_tensor(pa.uint8(), list(shape))), ("label", pa.int64())])


def _record_batch(images: np.ndarray, labels: np.ndarray, shape: tuple[int, ...]) -> pa.RecordBatch:
    kind = pa.fixed_shape_tensor(pa.uint8(), list(shape))
    storage = pa.FixedSizeListArray.from_arrays(pa.array(images.reshape(-1)), int(np.prod(shape)))
    return pa.record_batch([pa.ExtensionArray.from_storage(kind, storage), pa.array(labels)], schema=_schema(shape))


def _stamp(temporary: Path, path: Path, info: SetInfo) -> None:
    """The checksum is known only at the end, so the description stands beside the file; it makes the set complete."""
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
    describe(path).write_text(json.dumps(asdict(info), indent=1) + "\n")


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
                f"not a readable Arrow IPC file ({error})", str(path), "run `raysim prepare` again for this set"
            ) from error
        self._images = [_pixels(batch) for batch in batches]
        self._labels = [batch.column("label").to_numpy() for batch in batches]
        self._starts = np.cumsum([0, *(len(labels) for labels in self._labels)])
        if int(self._starts[-1]) != self.info.num_examples:
            raise DataError(
                f"{self._starts[-1]} examples where the description says {self.info.num_examples}",
                str(path),
                "run `raysim prepare` again",
            )

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def labels(self) -> np.ndarray:
        """(n,) int64."""
        return np.concatenate(self._labels)

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


def _read_info(path: Path) -> SetInfo:
    if not path.is_file():
        raise DataError("no such file", str(path), "run `raysim prepare` for this set, or correct data.root")
    try:
        fields = json.loads(describe(path).read_text())
        return SetInfo(
            fields["name"],
            tuple(fields["classes"]),
            tuple(fields["shape"]),
            fields["num_examples"],
            fields["checksum"],
            fields["source"],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"its description {describe(path).name} is missing or damaged ({error})",
            str(path),
            "run `raysim prepare` again for this set",
        ) from error


def in_batches(images: np.ndarray, labels: np.ndarray, rows: int = 4096) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Slices of arrays as `write_set` takes them."""
    for start in range(0, len(labels), rows):
        yield images[start : start + rows], labels[start : start + rows]
