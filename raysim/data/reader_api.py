"""What readers take and return (a request, the contents), and their checks of source files."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import numpy as np

from raysim.core.errors import DataError
from raysim.data.arrow import SetRows
from raysim.data.faults import damaged
from raysim.folders.files import file_digest

Item = TypeVar("Item")
Paths = list[str]  # of the images of one batch
ParallelMap = Callable[[Callable[[Paths], np.ndarray], Sequence[Paths]], Iterator[np.ndarray]]
#: Classes, or domains, of a set: ImageNet-21k has 21,841.
MOST_CLASSES = 100_000
PARTS = {"train": 0, "val": 1, "valid": 1, "validation": 1, "test": 2}  # what published splits are called


def map_in_threads(work: Callable[[Item], np.ndarray], items: Sequence[Item]) -> Iterator[np.ndarray]:
    """work(item) for each item, in order, on all cores (Pillow decodes outside the GIL); looks a few items ahead."""
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(workers) as pool:
        waiting: deque[Future[np.ndarray]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


class Resize(NamedTuple):
    """How image files are brought to a square of `size` pixels, with antialiasing.

    way: "crop" brings the shorter side to the size and cuts the middle out, "squash" brings both sides to it.
    """

    size: int
    way: Literal["crop", "squash"] = "crop"
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"

    def __str__(self) -> str:
        done = "squashed" if self.way == "squash" else "shorter side, the middle cut out"
        return f"{self.size} x {self.size}, {done}, {self.interpolation}"


@dataclass(frozen=True)
class ReaderOptions:
    """What a user may ask of a reader. size: pixels; resize, interpolation: see `Resize`; None is the reader's default."""

    size: int | None = None
    download: bool = False
    count: int | None = None
    seed: int | None = None
    domains: int | None = None
    resize: Literal["crop", "squash"] | None = None
    interpolation: Literal["bilinear", "bicubic"] | None = None

    @property
    def image_resize(self) -> Resize | None:
        """What is done to image files; None: they stay as they are."""
        if self.size is None:
            return None
        return Resize(self.size, self.resize or "crop", self.interpolation or "bilinear")


@dataclass(frozen=True)
class Request:
    """One preparation. origin: who publishes the files; parallel_map: how images are decoded; mode: "RGB", or "L" for grey."""

    name: str
    origin: str = ""
    files: Path | None = None
    options: ReaderOptions = ReaderOptions()
    parallel_map: ParallelMap = map_in_threads
    mode: str = "RGB"

    @property
    def root(self) -> Path:
        """The folder (or file) with the source files; DataError if none was given or it is no file or folder."""
        if self.files is None:
            mend = f"give --root FOLDER; they are from {self.origin}; `raysim prepare` lists what --download fetches"
            raise DataError(f"{self.name} needs its source files", "", mend)
        if self.options.download and not self.files.exists():
            self.files.mkdir(parents=True, exist_ok=True)
        if not (
            self.files.is_file() or self.files.is_dir()
        ):  # a pipe would be waited for, a device read without an end
            raise DataError("no such file or folder", str(self.files), f"give --root; they are from {self.origin}")
        return self.files


@dataclass(frozen=True)
class Contents:
    """What a reader gives: names, batches in a fixed order, and the files that it read.

    num_examples: for the progress bar; None where it is not known before the end.
    shape: (height, width, channels), where that is known before the first batch.
    """

    classes: tuple[str, ...]
    batches: Iterable[SetRows]
    files: Sequence[Path] = ()
    num_examples: int | None = None
    domains: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()


def numbered(largest: int, where: Path | str, column: str = "label") -> tuple[str, ...]:
    """0 to the largest value of a column, in words: the names of classes that have none.

    Raises:
      DataError: more than MOST_CLASSES.
    """
    if largest >= MOST_CLASSES:
        what = f"{column} {largest} would make {largest + 1:,} of them, more than {MOST_CLASSES:,}"
        raise DataError(what, str(where), f"give {column}s from 0 on, without gaps")
    return tuple(map(str, range(largest + 1)))


def need(path: Path, origin: str, md5: str | None = None) -> Path:
    """The path of a source file that exists and has the published MD5; else DataError."""
    expected = f" (MD5 {md5})" if md5 else ""
    if not path.is_file():
        raise DataError(f"missing file {path.name}{expected}", str(path.parent), f"get it from {origin}")
    if md5 and (actual := _digest(path, "md5")) != md5:
        raise DataError(
            f"the MD5 checksum is {actual}, and {md5} is published", str(path), f"fetch it again from {origin}"
        )
    return path


def files_checksum(files: Sequence[Path], on_progress: Callable[[int, int], None] = lambda *_: None) -> str:
    """SHA-256 over the names and contents of files in their order; empty for no files.

    Args:
      on_progress: on_progress(files read, files in all).
    """
    if not files:
        return ""
    whole, base = hashlib.sha256(), Path(os.path.commonpath([path.parent for path in files]))
    with ThreadPoolExecutor() as pool:
        for count, (path, digest) in enumerate(zip(files, pool.map(_digest, files), strict=True), 1):
            on_progress(count, len(files))
            whole.update(f"{digest}  {path.relative_to(base).as_posix()}\n".encode())
    return whole.hexdigest()


def _digest(path: Path, kind: str = "sha256") -> str:
    with damaged(path):
        return file_digest(path, kind)


def split_codes(parts: Sequence[str]) -> np.ndarray:
    """(n,) int8 code of each part's name; a set without a labelled test part is tested on its validation part.

    The labels of Tiny-ImageNet's and ImageNet's test images were never published: papers test on the validation images.
    """
    codes = np.array([PARTS[part] for part in parts], np.int8)
    if 2 not in codes:
        codes[codes == 1] = 2
    return codes
