"""Data of a configuration: prepared sets, the stored size of images, and the partition."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from raysim.base.commands import command
from raysim.base.errors import DataError, Fault, UserCodeError, explained
from raysim.base.ram import memory_fault
from raysim.base.uri import is_uri
from raysim.config import JOB_VARIABLE, Config, data_cache, nearest
from raysim.data.arrow import PreparedSet, SetInfo
from raysim.data.manifest import Manifest, PartitionSpec, make_manifest
from raysim.data.sources import SOURCES, fetch_set, prepare, set_path
from raysim.data.splits import ValidationSpec
from raysim.folders.files import file_digest
from raysim.plan.find import open_user_set, read_mapping

T = TypeVar("T")


@dataclass(frozen=True)
class Sets:
    """Prepared sets of a run: the training set, the set of the validation rows, further test sets by name.

    input_shape: shape of the stored images; empty: as in the training set.
    """

    images: PreparedSet
    external: PreparedSet | None
    tests: Mapping[str, PreparedSet]
    input_shape: tuple[int, ...] = ()

    @property
    def info(self) -> SetInfo:
        """Return the description of the training set, with the shape of the stored images."""
        info = self.images.info  # the moments in the description are those of the images as prepared
        return replace(info, shape=self.input_shape, mean=(), deviation=()) if self.input_shape else info


def or_faults(make: Callable[[], T], key: str) -> tuple[T | None, list[Fault]]:
    """Return the result of `make`, or an error of data or user code as a fault."""
    try:
        return make(), []
    except UserCodeError as error:
        return None, [Fault(key, str(error))]
    except DataError as error:
        place = next((place for place in ("partition", "data.stored_size") if error.where.startswith(place)), "data")
        return None, [Fault(place, str(error))]


def open_sets(config: Config) -> Sets:
    """Open every set that the configuration names.

    Raises:
      DataError: a set is missing and cannot be prepared, or is damaged.
    """
    external, reader = config.data.validation_set.external.name, config.data.reader
    images = _open_set(config, config.data.name) if reader is None else _sound(open_user_set(config, reader))
    other = _open_set(config, external) if external else None
    tests = {name: _open_set(config, name) for name in config.data.test_sets}
    return Sets(images, other, tests, _input_shape(config.data.stored_size, images.info))


def _input_shape(size: int | None, info: SetInfo) -> tuple[int, ...]:
    """Return the shape of stored images; empty if it is the shape of the set's images."""
    key = "data.stored_size"
    if size is not None and not info.is_images:
        what = f"{info.name} holds {info.input_type} inputs of shape {info.shape}, no images"
        raise DataError(what, key, "remove the key, which applies to images only")
    if size is None or info.shape[:2] == (size, size):
        return ()
    shape = (size, size, info.shape[2])
    if text := memory_fault(5 * math.prod(shape)):  # an image in bytes and in floats
        raise DataError(f"an image of shape {shape} {text}", key, f"lower {key}")
    return shape


def _open_set(config: Config, name: str) -> PreparedSet:
    return _sound(PreparedSet(_set_file(config, name)))


def _sound(images: PreparedSet) -> PreparedSet:
    """Return a set with a verified checksum."""
    state = images.path.stat()
    _verify(images.path, state.st_size, state.st_mtime_ns)
    return images


@lru_cache(maxsize=256)
def _verify(path: Path, size: int, changed: int) -> None:
    """Verify a set once per process, and again after a change of the file."""
    PreparedSet(path).verify()


def _set_file(config: Config, name: str) -> Path:
    if is_uri(config.data.root):
        return set_path(fetch_set(config.data.root, name, data_cache(config)), name)
    root = Path(config.data.root)
    path = set_path(root, name)
    if path.is_file():
        return path
    if name not in SOURCES:
        raise DataError(f"no prepared set {name!r}", str(path), nearest(name, list(SOURCES)))
    if SOURCES[name].has_files:
        raise DataError(f"no prepared set {name!r}", str(path), _how_to_prepare(name, root))
    with explained("cannot write there", root, "set data.root to a folder of yours", OSError):
        prepare(name, root)
    return path


def _how_to_prepare(name: str, root: Path) -> str:
    is_fetched = "download" in SOURCES[name].options
    words = ["--root", "FILES", *(["--download"] if is_fetched else []), "--out", root]
    make = f"`{command('raysim', 'prepare', name, *words)}`"
    if JOB_VARIABLE in os.environ:
        return (
            f"a job sees the disks of its cluster: run {make} on the cluster, or set data.root to a folder there, or "
            "to a URI such as s3://bucket/data"
        )
    files = "fetches the files to the folder FILES" if is_fetched else "reads the files in the folder FILES"
    return f"run {make}, which {files}; or correct data.root"


#: A set's file, checksum, names of outputs, and shape of an input: a partition depends on nothing else of a set.
_Source = tuple[Path, str, tuple[str, ...], tuple[int, ...]]


def draw_partition(config: Config, sets: Sets) -> Manifest:
    """Return the partition of the sets; the same partition is drawn once in a process.

    Raises:
      DataError: the partition cannot be drawn.
    """

    def source(images: PreparedSet) -> _Source:
        return images.path, images.info.checksum, tuple(images.info.classes), tuple(images.info.shape)

    external = source(sets.external) if sets.external else None
    tests = tuple((name, source(images)) for name, images in sets.tests.items())
    manifest = _manifest_of(partition_spec(config), source(sets.images), external, tests)
    if isinstance(manifest, DataError):
        raise manifest
    return replace(manifest, input_shape=sets.input_shape)


@lru_cache(maxsize=64)
def _manifest_of(
    spec: PartitionSpec, images: _Source, external: _Source | None, tests: tuple[tuple[str, _Source], ...]
) -> Manifest | DataError:
    others = {name: PreparedSet(path) for name, (path, *_) in tests}
    try:
        return make_manifest(PreparedSet(images[0]), spec, PreparedSet(external[0]) if external else None, others)
    except DataError as error:  # cached as well: ten seconds pass until no draw has succeeded
        return error


def partition_spec(config: Config) -> PartitionSpec:
    """Return the partition settings for the data layer; keys of equal names have equal meanings in both."""
    part, data, chosen = config.partition, config.data, config.data.validation_set
    scheme, from_clients = part.scheme, chosen.from_clients
    file = part.file if scheme.name == "file" and part.file else ""
    return PartitionSpec(
        **part.model_dump(exclude={"scheme", "form", "num_clients", "seed", "file"}),
        scheme=scheme.name,
        options=json.dumps(scheme.options, sort_keys=True, default=str) if scheme.options else "",
        file=file,
        file_sha256=_digest(file) if file else "",
        **data.model_dump(include={"test", "validation", "fraction", "split", "unseen_choice"}),
        form="" if config.is_joint else part.form or "",
        num_clients=config.num_clients + config.num_unseen,
        num_unseen=config.num_unseen,
        within_clients=data.split_within_clients,
        validation_set=ValidationSpec(
            **chosen.model_dump(exclude={"external", "from_clients"}),
            client_share=from_clients.share,
            clients=tuple(from_clients.clients) if from_clients.share else (),
            mapping=read_mapping(chosen.external.mapping) if chosen.external.mapping else (),
            unique=chosen.external.unique,
        ),
        seed=config.seed if part.seed is None else part.seed,
    )


def _digest(path: str) -> str:  # of the content: partitions are cached by content, not by path
    mend = "give the path of a CSV, Parquet or JSON file; a run's examples.csv is one"
    with explained("cannot be read", f"partition file {path}", mend, OSError):
        return file_digest(Path(path))
