"""Prepared sets that lie elsewhere: any file system that pyarrow knows by a URI (s3://, gs://, hdfs://, file://)."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pyarrow as pa
from filelock import FileLock
from pyarrow import fs

from raysim.core.errors import DataError
from raysim.data.arrow import describe


def is_remote(root: str) -> bool:
    """Whether a data root is a URI rather than a folder."""
    return "://" in root


def fetch_set(root: str, name: str, cache: Path) -> Path:
    """A local data root that holds the set `name` of the data root at a URI.

    Both files of the set are copied once, and again when its description (with the checksum) changed; runs that start
    together copy once.
    Trainers map files, which a remote object cannot be.

    Args:
      cache: folder for the copies.
    Raises:
      DataError: the URI is not understood, or the set is not there.
    """
    try:
        system, base = fs.FileSystem.from_uri(root)
        local = cache / hashlib.sha256(root.encode()).hexdigest()[:12]
        (local / name).mkdir(parents=True, exist_ok=True)
        with FileLock(local / f".{name}.lock"):
            source, target = f"{base}/{name}/{name}", local / name / f"{name}.arrow"
            with system.open_input_stream(f"{source}.json") as file:
                description = file.read()
            known = describe(target)
            if not (target.is_file() and known.is_file() and known.read_bytes() == description):
                known.unlink(missing_ok=True)
                _copy(system, f"{source}.arrow", target)
                known.write_bytes(description)  # last: it makes the set complete
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"cannot read set {name!r} ({error})",
            root,
            f"correct data.root, or put the folder that `raysim prepare {name}` writes there",
        ) from error
    return local


def _copy(system: fs.FileSystem, source: str, target: Path) -> None:
    temporary = target.with_name(f".{target.name}.part")
    fs.copy_files(source, str(temporary), source_filesystem=system, destination_filesystem=fs.LocalFileSystem())
    temporary.replace(target)
