"""Sets read by a function of the user's own, prepared when they are first used.

    def read(files, *, size=32):                        # files: pathlib.Path, data.files
        ...
        return images, labels                           # (n, height, width[, channels]) uint8, (n,) integers

`data: {name: mine, reader: "my_data:read", files: FOLDER}` writes data/mine/mine.arrow by it. Instead of the pair it may
return a mapping with `images`, `labels` and, where there are any, `classes` (names), `domains` and `splits` (integers, one
an image; splits: 0 train, 1 validation, 2 test), or, for what does not fit into memory, a `reader_api.Contents`.

The set is made anew when the function's file or options change, or a source file's name, size or time of change. Contents
of source files are not read for that: a large set would take minutes at every start. What a run goes by is the checksum
of the prepared examples, so a set made anew from the same examples is the same set.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from raysim.core.digest import source_digest
from raysim.core.errors import DataError
from raysim.core.own import own_errors, place_of
from raysim.core.own_code import own_function, with_given
from raysim.core.settings import Raw
from raysim.data.arrow import ImageSet, SetInfo, in_batches, is_prepared, made_once, write_set
from raysim.data.reader_api import Contents, files_checksum, numbered

#: In `SetInfo.source`, between the function and the name of its files.
FROM = " from "


def find_reader(name: str) -> Callable[..., object]:
    """The function behind `module:function`, with its own options as its signature; raises LookupError."""
    return with_given(own_function(name, "reader"), (), ("files",))


def prepare_own(
    name: str,
    read: Callable[..., object],
    path: Path,
    files: Path | None,
    options: Raw,
    *,
    again: bool = False,
) -> SetInfo:
    """Write a set by a function of the user's own, unless it is there as that function would write it.

    Args:
      read: the function; path: of the Arrow file; files: what it gets, the folder (or file) with the sources, or None.
    Raises:
      DataError, OwnCodeError: no such files, a set of another origin at `path`, or whatever the function does wrong.
    """
    made_by = fingerprint(read, files, options)
    source = f"{read.__module__}:{read.__qualname__}" + (f"{FROM}{files.name}" if files is not None else "")

    is_away = files is not None and not files.exists()

    def there() -> SetInfo | None:
        """What is there, if it is what the function would write."""
        if is_prepared(path) and not again:
            info = ImageSet(path).info
            if not info.made_by:
                what = f"there is a set {name!r} that no reader of yours wrote"
                raise DataError(what, str(path), "choose another data.name")
            # Where the sources are not, as on another machine, nothing can have changed them; another name is another source.
            if info.made_by == made_by or (is_away and (FROM not in info.source or info.source == source)):
                return info
        if is_away:
            raise DataError(f"no such file or folder for the set {name!r}", str(files), "correct data.files")
        return None

    def make() -> SetInfo:
        with own_errors(read):  # batches may be made only now
            contents = _contents(with_given(read, (), ("files",))(files=files, **options), read)
            return write_set(
                path,
                name,
                contents.classes,
                contents.batches,
                source=source,
                domains=contents.domains,
                source_checksum=files_checksum(contents.files),
                made_by=made_by,
            )

    return made_once(path, there, make)


def fingerprint(read: Callable[..., object], files: Path | None, options: Raw) -> str:
    """SHA-256 over what decides how a set comes out: the function's file, its options, and the state of the source files."""
    digest = hashlib.sha256(json.dumps([read.__qualname__, options], sort_keys=True, default=str).encode())
    try:
        digest.update(Path(inspect.getfile(read)).read_bytes())
    except (OSError, TypeError):  # written in a notebook
        digest.update(source_digest(read).encode())
    if files is not None:
        paths = sorted(files.rglob("*")) if files.is_dir() else [files]
        for path in paths:
            if path.is_file():
                state = path.stat()
                digest.update(f"{path.relative_to(files).as_posix()} {state.st_size} {state.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _contents(found: object, read: Callable[..., object]) -> Contents:
    """What a function returned, as contents."""
    where = place_of(read)
    if isinstance(found, Contents):
        return found
    if isinstance(found, tuple) and len(found) == 2:
        found = {"images": found[0], "labels": found[1]}
    known = ("images", "labels", "classes", "domains", "splits")
    if not isinstance(found, Mapping) or not {"images", "labels"} <= set(found) <= set(known):
        what = f"a reader returned {sorted(map(str, found)) if isinstance(found, Mapping) else type(found).__name__}"
        raise DataError(
            what, where, f"return (images, labels), or a mapping with these and perhaps {', '.join(known[2:])}"
        )
    columns = {key: None if found.get(key) is None else np.asarray(found[key]) for key in ("domains", "splits")}
    return array_contents(
        np.asarray(found["images"]), np.asarray(found["labels"]), where, found.get("classes"), **columns
    )


def array_contents(
    images: np.ndarray,
    labels: np.ndarray,
    where: str,
    classes: Sequence[str] | None = None,
    domains: np.ndarray | None = None,
    splits: np.ndarray | None = None,
) -> Contents:
    """Arrays as contents.

    Args:
      images: (n, height, width) or (n, height, width, channels) uint8; labels, domains, splits: (n,) integers.
      where: in messages; classes: names of the classes; their numbers if not given.
    Raises:
      DataError: other types or shapes.
    """
    if images.ndim not in (3, 4) or images.dtype != np.uint8:
        shape = "(n, height, width) or (n, height, width, channels) uint8"
        raise DataError(f"images of shape {images.shape} and type {images.dtype}", where, f"give them as {shape}")
    if labels.shape != (len(images),) or not np.issubdtype(labels.dtype, np.integer):
        given = f"labels of shape {labels.shape} and type {labels.dtype} for {len(images)} images"
        raise DataError(given, where, "give one whole number an image")
    images = images[..., None] if images.ndim == 3 else images
    names = classes if classes is not None else numbered(int(labels.max(initial=0)), where)
    return Contents(
        tuple(map(str, names)),
        in_batches(images, labels, domains=domains, splits=splits),
        num_examples=len(labels),
        domains=() if domains is None else numbered(int(domains.max(initial=0)), where, "domain"),
    )
