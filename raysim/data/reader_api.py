"""Argument and result of readers (`Request`, `Contents`), checks of source files, and users' own readers.

A set that is read by a user's function is prepared on first use:

    def read(files, *, size=32):                        # files: pathlib.Path, data.files
        ...
        return images, labels                           # (n, height, width[, channels]) uint8, (n,) integers

`data: {name: mine, reader: "my_data:read", files: FOLDER}` writes data/mine/mine.arrow with the function. Instead of
the pair, the function may return a mapping with `inputs`, `targets` and optionally `classes` (names of the outputs),
`domains` and `splits` (integers, one a row; splits: 0 train, 1 validation, 2 test), `task` and `vocabulary`. For data
larger than memory it may return a `reader_api.Contents`. For inputs other than images and targets other than classes,
see `raysim.arrays`.

The set is rewritten when the function's file or options change, or a source file's name, size or modification time.
Contents of source files are not compared, since reading a large set would take minutes at every start. Runs depend on
the checksum of the prepared examples, so a set rewritten with the same examples is the same set.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from raysim.base.digest import file_digest_of
from raysim.base.errors import DataError, explained
from raysim.base.settings import Raw
from raysim.base.user_code import user_function, with_given
from raysim.base.user_places import place_of, user_errors
from raysim.data.arrow import PreparedSet, SetInfo, is_prepared, made_once, write_set
from raysim.data.readers.reader_options import DEFAULTS, ReaderOptions
from raysim.data.rows import SetRows, damaged, in_batches
from raysim.folders.files import file_digest

Item = TypeVar("Item")
#: Classes, or domains, of a set: ImageNet-21k has 21,841.
MOST_CLASSES = 100_000
PARTS = {"train": 0, "val": 1, "valid": 1, "validation": 1, "test": 2}  # names of published splits -> split code


def map_in_threads(work: Callable[[Item], np.ndarray], items: Sequence[Item]) -> Iterator[np.ndarray]:
    """Yield work(item) for each item, in order, from threads on all cores (Pillow releases the GIL in decoding).

    Results of at most four items per core are in memory.
    """
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(workers) as pool:
        for start in range(0, len(items), 4 * workers):
            yield from pool.map(work, items[start : start + 4 * workers])


@dataclass(frozen=True)
class Request:
    """Request to a reader. origin: publisher of the files, "" for your own; mode: "RGB", or "L" for grey."""

    name: str
    origin: str = ""
    files: Path | None = None
    options: ReaderOptions = DEFAULTS
    mode: str = "RGB"

    @property
    def root(self) -> Path:
        """Folder or file with the source files; raises DataError if none was given or it does not exist."""
        if self.files is None:
            where = f"; the files are from {self.origin}; `raysim prepare` lists what --download fetches"
            raise DataError(f"{self.name} needs the source files", "", "give --root FOLDER" + where * bool(self.origin))
        if self.options.download and not self.files.exists():
            self.files.mkdir(parents=True, exist_ok=True)
        # Reading a pipe could block, and reading a device may never end.
        if not (self.files.is_file() or self.files.is_dir()):
            raise DataError("no such file or folder", str(self.files), "correct --root")
        return self.files


@dataclass(frozen=True)
class Contents:
    """Result of a reader: names, batches in a fixed order, and the files read.

    classes, task, vocabulary, columns, reading, left_out: see `SetInfo`.
    num_examples: for progress and a check of disk space; None if not known in advance.
    """

    classes: tuple[str, ...]
    batches: Iterable[SetRows]
    files: Sequence[Path] = ()
    num_examples: int | None = None
    domains: tuple[str, ...] = ()
    task: str = "classes"
    vocabulary: int = 0
    columns: tuple[str, ...] = ()
    reading: str = ""
    left_out: str = ""

    @property
    def about(self) -> dict[str, Any]:
        """Keyword arguments `about` of `write_set`."""
        names = ("domains", "task", "vocabulary", "columns", "reading", "left_out")
        return {name: getattr(self, name) for name in names}


def numbered(largest: int, where: Path | str, column: str = "label") -> tuple[str, ...]:
    """Return "0" to the largest value of a column as text, for classes without names.

    Raises:
      DataError: more than MOST_CLASSES.
    """
    if largest >= MOST_CLASSES:
        what = f"{column} {largest} would make {largest + 1:,} of them, more than {MOST_CLASSES:,}"
        raise DataError(what, str(where), f"give {column}s from 0 on, without gaps")
    return tuple(map(str, range(largest + 1)))


def need(path: Path, origin: str, md5: str | None = None) -> Path:
    """Return the path of a source file; raise DataError if the file is missing or its MD5 is not the published one."""
    expected = f" (MD5 {md5})" if md5 else ""
    if not path.is_file():
        raise DataError(f"missing file {path.name}{expected}", str(path.parent), f"get it from {origin}")
    if md5 and (actual := _digest(path, "md5")) != md5:
        what = f"the MD5 checksum is {actual}, and {md5} is published"
        raise DataError(what, str(path), f"fetch it again from {origin}")
    return path


def files_checksum(files: Sequence[Path], on_progress: Callable[[int, int], None] = lambda *_: None) -> str:
    """Return SHA-256 over the names and contents of files in the given order; empty for no files.

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
    """Return (n,) int8 split codes of names of parts; without a test part, the validation part is the test split.

    The labels of Tiny-ImageNet's and ImageNet's test images were never published: papers test on the validation images.
    """
    codes = np.array([PARTS[part] for part in parts], np.int8)
    if 2 not in codes:
        codes[codes == 1] = 2
    return codes


#: In `SetInfo.source`, between the function and the name of its files.
FROM = " from "


def find_reader(name: str) -> Callable[..., object]:
    """Return the function of `module:function`, with its options as signature; raises LookupError."""
    return with_given(user_function(name, "reader"), (), ("files",))


def prepare_user_set(name: str, read: Callable[..., object], path: Path, files: Path | None, options: Raw) -> SetInfo:
    """Write a set by a user's function, unless the function would write the existing set again.

    Args:
      read: the function; path: path of the Arrow file; files: argument of the function, the folder (or file) with the
        sources, or None.
    Raises:
      DataError, UserCodeError: missing source files, a set of another origin at `path`, or an error of the function.
    """
    made_by = fingerprint(read, files, options)
    source = f"{read.__module__}:{read.__qualname__}" + (f"{FROM}{files.name}" if files is not None else "")

    is_away = files is not None and not files.exists()

    def there() -> SetInfo | None:
        """Return the existing set if the function would write the same."""
        if is_prepared(path):
            info = PreparedSet(path).info
            if not info.made_by:
                what = f"the set {name!r} exists and was not written by your reader"
                raise DataError(what, str(path), "choose another data.name")
            # Missing sources, as on another machine, count as unchanged if their name is the same.
            if info.made_by == made_by or (is_away and (FROM not in info.source or info.source == source)):
                return info
        if is_away:
            raise DataError(f"no such file or folder for the set {name!r}", str(files), "correct data.files")
        return None

    def make() -> SetInfo:
        with user_errors(read):  # the function may create batches lazily, in `write_set`
            contents = _contents(with_given(read, (), ("files",))(files=files, **options), read)
            about = contents.about | {"source_checksum": files_checksum(contents.files), "made_by": made_by}
            return write_set(path, name, contents.classes, contents.batches, source, **about)

    return made_once(path, there, make)


def fingerprint(read: Callable[..., object], files: Path | None, options: Raw) -> str:
    """Return SHA-256 over a user's reader: the function's file, options, and names, sizes and times of source files."""
    digest = hashlib.sha256(json.dumps([read.__qualname__, options], sort_keys=True, default=str).encode())
    digest.update(file_digest_of(read).encode())
    if files is not None:
        paths, above = (sorted(files.rglob("*")), files) if files.is_dir() else ([files], files.parent)
        for path in paths:
            if path.is_file():
                state = path.stat()
                digest.update(f"{path.relative_to(above).as_posix()} {state.st_size} {state.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _contents(result: object, read: Callable[..., object]) -> Contents:
    """Convert the result of a user's reader to contents; raises DataError for an unsupported result."""
    where = place_of(read)
    if isinstance(result, Contents):
        return result
    if isinstance(result, tuple) and len(result) == 2:
        result = {"inputs": result[0], "targets": result[1]}
    names = ("inputs", "targets", "classes", "domains", "splits", "task", "vocabulary")
    if isinstance(result, Mapping):
        result = {{"images": "inputs", "labels": "targets"}.get(str(name), str(name)): result[name] for name in result}
    if not isinstance(result, Mapping) or not {"inputs", "targets"} <= set(result) <= set(names):
        what = f"a reader returned {sorted(result) if isinstance(result, Mapping) else type(result).__name__}"
        mend = f"return (inputs, targets), or a mapping with both and perhaps {', '.join(names[2:])}"
        raise DataError(what, where, mend)
    return array_contents(**result, where=where)


#: Task -> (numpy kinds allowed for targets, number of axes of the targets; None for any number).
TARGETS = {"classes": ("iu", 1), "labels": ("biu", 2), "regression": ("iuf", None), "tokens": ("iu", 2)}


def array_contents(
    inputs: object,
    targets: object,
    where: str,
    classes: Sequence[str] | None = None,
    domains: object = None,
    splits: object = None,
    task: str | None = None,
    vocabulary: int | None = None,
) -> Contents:
    """Return contents of arrays.

    Args:
      inputs: (n, height, width) or (n, height, width, channels) uint8 images; (n, ...) floats; (n, length) other integers:
        tokens.
      targets: (n,) integers: classes; (n, labels) 0 or 1; (n,) or (n, numbers) floats: regression; (n, length) tokens.
      domains, splits: (n,) integers.
      where: place named in messages; classes: names of the outputs; their numbers if not given.
      task: None: "classes" for (n,) integers, "regression" for floats, "tokens" for token inputs with targets of the
        same shape, else "labels". A user's own task leaves targets unchanged.
      vocabulary: number of tokens; None: the largest token + 1.
    Raises:
      DataError: other types or shapes.
    """
    with explained("arrays that are not rectangular", where, "give every row as many numbers", ValueError):
        x, y = (None if each is None else np.asarray(each) for each in (inputs, targets))
        given = {"domains": domains, "splits": splits}
        columns = {name: np.asarray(each) for name, each in given.items() if each is not None}
    if x is None or y is None:
        raise DataError(f"no {'inputs' if x is None else 'targets'}", where, "give inputs and targets as arrays")
    x, is_tokens = _as_stored(np.atleast_1d(x))
    for column, values in {"targets": y[:, 0] if y.ndim > 1 and y.shape[1] else y, **columns}.items():
        if values.shape != (len(x),) or not (column == "targets" or np.issubdtype(values.dtype, np.integer)):
            what = f"{column} of shape {values.shape} and type {values.dtype} for {len(x)} rows"
            raise DataError(what, where, "give one whole number a row" if column != "targets" else "give one a row")
    if task is None:
        integers = "tokens" if is_tokens and y.shape == x.shape else "labels" if y.ndim > 1 else "classes"
        task = "regression" if np.issubdtype(y.dtype, np.floating) else integers
    if task in TARGETS:
        kinds, axes = TARGETS[task]
        if y.dtype.kind not in kinds or axes not in (None, y.ndim):
            what = f"targets of shape {y.shape} and type {y.dtype} for the task {task}"
            raise DataError(what, where, "give targets of the task, or name another task")
        types = {"classes": np.int64, "labels": np.uint8, "regression": np.float32, "tokens": np.int32}
        if task == "labels" and ((y < 0) | (y > 1)).any():
            raise DataError("labels besides 0 and 1", where, "give 0 or 1 for each label of a row")
        y = y.astype(types[task])
    if is_tokens:
        largest = int(max(x.max(initial=0), y.max(initial=0) if task == "tokens" else 0))
        vocabulary = largest + 1 if vocabulary is None else vocabulary
    sizes = {"classes": int(y.max(initial=0)) + 1, "tokens": vocabulary or 0} if y.dtype.kind in "iu" else {}
    names = classes if classes is not None else numbered(sizes.get(task, y.shape[1] if y.ndim > 1 else 1) - 1, where)
    if isinstance(names, str) or not isinstance(names, Iterable):
        what = f"classes are {repr(names) if isinstance(names, str) else type(names).__name__}"
        raise DataError(what, where, "give a list of names")
    batches = in_batches(x, y, domains=columns.get("domains"), splits=columns.get("splits"))
    of_domains = numbered(int(columns["domains"].max(initial=0)), where, "domain") if "domains" in columns else ()
    return Contents(tuple(map(str, names)), batches, (), len(y), of_domains, task, vocabulary or 0)


def _as_stored(x: np.ndarray) -> tuple[np.ndarray, bool]:
    """Return (inputs in stored form, whether they are tokens); unsupported types and shapes are left to `typed`."""
    if x.dtype == np.uint8:
        return x[..., None] if x.ndim == 3 else x, False
    is_tokens = bool(np.issubdtype(x.dtype, np.integer))
    is_number = is_tokens or np.issubdtype(x.dtype, np.floating)
    return x.astype(np.int32 if is_tokens else np.float32) if is_number else x, is_tokens
