"""Prepared sets that lie elsewhere: any file system that pyarrow knows by a URI (s3://, gs://, hdfs://, file://)."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pyarrow as pa
from filelock import FileLock
from pyarrow import fs

from raysim.data.arrow import describe
from raysim.data.faults import explained
from raysim.files import replaced_file


def is_remote(root: str) -> bool:
    """Whether a data root is a URI rather than a folder."""
    return "://" in root


def fetch_set(root: str, name: str, cache: Path) -> Path:
    """A local data root that holds the set `name` of the data root at a URI.

    Both files of the set are copied once, and again when its description (with the checksum) changed; runs that start
    together copy once. Trainers map files, which a remote object cannot be.

    Args:
      cache: folder for the copies.
    Raises:
      DataError: the URI is not understood, or the set is not there.
    """
    mend = f"correct data.root, or put the folder that `raysim prepare {name}` writes there"
    with explained(f"cannot read set {name!r}", root, mend, pa.ArrowException, OSError):
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
                with replaced_file(target) as copy:
                    here = fs.LocalFileSystem()
                    fs.copy_files(f"{source}.arrow", str(copy), source_filesystem=system, destination_filesystem=here)
                known.write_bytes(description)  # last: it makes the set complete
    return local
