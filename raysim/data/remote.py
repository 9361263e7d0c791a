"""Prepared sets that lie elsewhere: any file system that pyarrow knows by a URI (s3://, gs://, hdfs://, file://)."""

from __future__ import annotations

import hashlib
from pathlib import Path

from filelock import FileLock

from raysim.core.errors import explained
from raysim.data.arrow import describe
from raysim.folders.filesystems import FAILURES, remote_folder


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
    with explained(f"cannot read set {name!r}", root, mend, *FAILURES):
        there = remote_folder(root)
        local = cache / hashlib.sha256(root.encode()).hexdigest()[:12]
        (local / name).mkdir(parents=True, exist_ok=True)
        with FileLock(local / f".{name}.lock"):
            target = local / name / f"{name}.arrow"
            description = there.read(f"{name}/{name}.json")
            if description is None:
                raise FileNotFoundError(f"there is no {name}/{name}.json")
            known = describe(target)
            if not (target.is_file() and known.is_file() and known.read_bytes() == description):
                known.unlink(missing_ok=True)
                there.fetch(local, [f"{name}/{name}.arrow"])
                known.write_bytes(description)  # last: it makes the set complete
    return local
