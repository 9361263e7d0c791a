"""Where image sets come from: one reader per name. A reader returns class names and batches of pixels and labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from raysim.core.errors import DataError
from raysim.data.arrow import ImageSet, SetInfo, in_batches, write_set

Batches = Iterable[tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Source:
    """A kind of set: what it is, and read(files) -> (class names, batches)."""

    description: str
    read: Callable[[Path | None], tuple[tuple[str, ...], Batches]]


def read_digits(files: Path | None) -> tuple[tuple[str, ...], Batches]:
    """scikit-learn's handwritten digits: 1,797 real 8 x 8 images in 17 grey levels, bundled with the library."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = np.rint(digits.images * (255.0 / 16.0)).astype(np.uint8)[..., None]
    return tuple(str(name) for name in digits.target_names), in_batches(pixels, digits.target.astype(np.int64))


SOURCES = {
    "digits": Source("scikit-learn's handwritten digits, 8 x 8 grey, 10 classes (bundled)", read_digits),
}


def set_path(root: Path, name: str) -> Path:
    """Where the Arrow file of a set lies below a data root."""
    return root / name / f"{name}.arrow"


def prepare(name: str, root: Path, files: Path | None = None, *, again: bool = False) -> SetInfo:
    """Convert a named set to Arrow below `root`; a set that is there already is kept, unless `again`."""
    if name not in SOURCES:
        raise DataError(f"unknown data set {name!r}", "prepare", f"known: {', '.join(SOURCES)}")
    path = set_path(root, name)
    if path.is_file() and not again:
        return ImageSet(path).info
    classes, batches = SOURCES[name].read(files)
    return write_set(path, name, classes, batches, source=SOURCES[name].description)
