"""Data sets of `raysim prepare`, and their preparation.

To add a set, write a reader, and an entry of sets.yaml that names the reader. A reader takes a Request (the folder of
source files and the user's options) and returns Contents: class names and batches in a fixed order. Example for a set
stored as scans.npy (n, height, width) and grades.npy (n,), of which the last 1,000 are the official test images:

    def read_scans(request: Request) -> Contents:
        files = [need(request.root / name, request.origin) for name in ("scans.npy", "grades.npy")]
        images, labels = (np.load(path, mmap_mode="r") for path in files)
        splits = np.where(np.arange(len(labels)) < len(labels) - 1000, 0, 2).astype(np.int8)
        batches = in_batches(images[..., None], labels, splits=splits)
        return Contents(("mild", "severe"), batches, files, len(labels))

    SOURCES["scans"] = Source("knee scans, 64 x 64 grey, 2 grades", read_scans, "the Knee Project, knees.example.org")

Then `raysim prepare scans --root FILES --out data` writes data/scans/scans.arrow, which `data: {name: scans}` uses.
For sets of image files, see `read_folder` and the other readers in readers/trees.py, which only list paths and labels.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from raysim.base.errors import DataError, did_you_mean
from raysim.base.settings import Raw
from raysim.base.texts import name_fault
from raysim.data.arrow import PreparedSet, SetInfo, is_prepared, made_once, write_set
from raysim.data.facts import FACTS, SETS, checked
from raysim.data.reader_api import Contents, Request, files_checksum
from raysim.data.readers.arrays import read_medmnist
from raysim.data.readers.reader_options import DEFAULTS, ReaderOptions, option
from raysim.data.rows import SetRows
from raysim.folders.storage import Copy

OnProgress = Callable[[str, int, int | None], None]  # (unit of the step, number done, number in all or None)


@dataclass(frozen=True)
class Source:
    """A kind of set: description, reader, publisher of the files, and the reader's options.

    has_files: False for a set without source files, which is made on first use.
    """

    description: str
    read: Callable[[Request], Contents]
    origin: str = ""
    options: Sequence[str] = ()
    has_files: bool = True


def _source(reader: str, layout: Raw = MappingProxyType({}), facts: object = None, **about: Any) -> Source:
    """Return an entry of sets.yaml with its reader. layout: options of the reader; facts: see `raysim.data.facts`."""
    file, _, function = reader.partition(".")
    read = getattr(import_module(f"raysim.data.readers.{file}"), function)
    return Source(read=partial(read, **layout), **about)


SOURCES: dict[str, Source] = {
    **{name: _source(**about) for name, about in SETS["sets"].items()},
    **{
        name + suffix: Source(
            f"MedMNIST, {what}, {size} x {size}", read_medmnist, "https://medmnist.com", ("download",)
        )
        for name, what in SETS["medmnist"].items()
        for suffix, size in (("", 28), ("_64", 64), ("_128", 128), ("_224", 224))
    },
}


def set_path(root: Path, name: str) -> Path:
    """Return the path of a set's Arrow file below a data root.

    Raises:
      DataError: the name is not allowed, for example because it leads out of the root.
    """
    if fault := name_fault(name):
        raise DataError(f"a set cannot be called {name!r}", "", f"its name {fault}")
    return root / name / f"{name}.arrow"


def prepare(
    name: str,
    root: Path,
    files: Path | None = None,
    *,
    again: bool = False,
    save_as: str | None = None,
    options: ReaderOptions = DEFAULTS,
    on_progress: OnProgress = lambda *_: None,
) -> SetInfo:
    """Convert a named set to Arrow below `root`; an existing set is verified and kept, unless `again`.

    Args:
      files: the folder (or file) with the source files.
      save_as: the name of the prepared set, if not `name`.
    Raises:
      DataError: an unknown name, an option that the set does not have, an error in the files, or a set that differs
        from the FACTS of its final name.
    """
    if name not in SOURCES:
        mend = f"{did_you_mean(name, SOURCES)}`raysim prepare` lists the known ones; `data.reader` takes a reader of your own"
        raise DataError(f"unknown data set {name!r}", "prepare", mend)
    source, save_as = SOURCES[name], save_as or name
    for field in fields(options):
        if getattr(options, field.name) != field.default and field.name not in source.options:
            names = ", ".join(map(option, source.options)) or "none"
            raise DataError(f"{name} has no option {option(field.name)}", "", f"its options: {names}")
    if files is not None and not source.has_files:
        raise DataError(f"{name} is made here and reads no files", str(files), "drop --root")
    if options.size is None and (options.resize or options.interpolation):
        raise DataError("--resize and --interpolation say how images come to a size", name, "give --size, too")
    path, of_rows = set_path(root, save_as), options.of_rows(source.options)
    resizing = options.resizing if "resize" in source.options else ""

    def there() -> SetInfo | None:
        if again or not is_prepared(path):
            return None
        prepared = PreparedSet(path)
        for asked, given in ((resizing, prepared.info.resize), (of_rows, prepared.info.options)):
            if asked not in ("", given):
                what = f"the set exists with {given or 'no options'}, and {asked} is asked for"
                raise DataError(what, save_as, "give --again to replace the set, or --as NAME for a second set")
        prepared.verify()
        return prepared.info

    def make() -> SetInfo:
        facts = FACTS.get(save_as)
        mode = "L" if facts is not None and facts.shape is not None and facts.shape[2] == 1 else "RGB"
        contents = source.read(Request(name, source.origin, files, options, mode))
        if facts is not None:
            contents = checked(contents, facts, save_as, files, is_resized=options.size is not None)
        return write_set(
            path,
            save_as,
            contents.classes,
            _counted(contents, path.parent, on_progress),
            source=source.description,
            **contents.about,
            source_checksum=files_checksum(contents.files, partial(on_progress, "checksums of source files")),
            read_from=str(files.absolute()) if files is not None else "",
            resize=resizing,
            options=of_rows,
        )

    return made_once(path, there, make)


def _counted(contents: Contents, folder: Path, on_progress: OnProgress) -> Iterator[SetRows]:
    """Yield the batches; raise DataError at the first batch if the disk is too small for all."""
    done, count, free = 0, contents.num_examples, shutil.disk_usage(folder).free
    for batch in contents.batches:
        size_bytes = batch.inputs[:1].nbytes * (count or 0)
        if not done and size_bytes > free:
            what = f"{count:,} inputs take {size_bytes / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB are free"
            raise DataError(what, str(folder), "free space, choose another folder, or take fewer or smaller images")
        yield batch
        done += len(batch.targets)
        on_progress("images" if batch.inputs.dtype == np.uint8 else "inputs", done, count)


def fetch_set(root: str, name: str, cache: Path) -> Path:
    """Return a local data root with a copy of the set `name` from the data root at a URI.

    The set is copied on first use, and again when its files have changed; runs that start together copy it once. A copy
    is needed because trainers memory-map files.

    Args:
      cache: folder for the copies.
    Raises:
      DataError: the URI is not understood, or the set does not exist.
    """
    copy = Copy(root, cache / hashlib.sha256(root.encode()).hexdigest()[:12])
    copy.fetch(name)
    if not is_prepared(set_path(copy.folder, name)):
        mend = f"correct data.root, or put the folder that `raysim prepare {name}` writes to data.root"
        raise DataError(f"cannot read set {name!r} (no files {name}/{name}.json and {name}.arrow)", root, mend)
    return copy.folder
