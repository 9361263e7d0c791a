"""Atomic writes of files, and seals (checksums) of the files of a finished run."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from raysim.base.errors import DataError
from raysim.base.untrusted import regular_file


def partial_file(path: Path) -> Path:
    """Return an unused temporary path beside `path`, for an atomic replacement.

    The name is random, since a process number is not unique: it is 1 in every container.
    """
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")


@contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path, which replaces `path` durably if the block succeeds; parent folders are created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = partial_file(path)
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)  # the name, too
    finally:
        temporary.unlink(missing_ok=True)


def write_file(path: Path, content: bytes) -> None:
    """Write a file atomically and durably."""
    with replaced_file(path) as temporary:
        temporary.write_bytes(content)


def file_digest(path: Path, kind: str = "sha256") -> str:
    """Return a file's digest in hexadecimal. kind: name in hashlib. Raises OSError: unreadable, or a device."""
    with open(regular_file(path), "rb") as file:
        return hashlib.file_digest(file, kind).hexdigest()


def sync(path: Path) -> None:
    """Make the content of a file, or the entries of a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def seal_of(folder: Path, paths: Iterable[Path]) -> str:
    """Return a seal of the existing files: lines in the format of `sha256sum`. paths: below `folder`."""
    names = (path.relative_to(folder).as_posix() for path in paths if path.is_file())
    return "".join(f"{file_digest(folder / name)}  {name}\n" for name in names)


def seal_again(folder: Path, seal: Path, path: Path) -> None:
    """Update the line of one file in a seal."""
    name = path.relative_to(folder).as_posix()
    lines = [line for line in seal.read_text().splitlines() if not line.endswith(f"  {name}")]
    write_file(seal, ("\n".join(lines) + "\n" + seal_of(folder, [path])).encode())


def refuse_changed(folder: Path, seal: Path, paths: Iterable[Path]) -> None:
    """Compare files of a run with the lines of `seal`; missing and unsealed files pass.

    Raises:
      DataError: a file has changed since the run wrote it.
    """
    lines = (line.partition("  ") for line in seal.read_text(errors="replace").splitlines())
    digests = {name: digest for digest, _, name in lines if len(digest) == 64}
    for path in paths:
        name = path.relative_to(folder).as_posix()
        if name in digests and path.is_file() and file_digest(path) != digests[name]:
            remedy = "restore the file, or delete the folder and repeat the run"
            raise DataError(f"{name} has changed since the run wrote it", str(folder), remedy)
