"""Files written whole or not at all."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def part_of(path: Path) -> Path:
    """Where to write what is to take the place of `path`: a name beside it that nobody else has.

    Drawn and not made of the process's number, which is 1 in every container.
    """
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")


@contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` to write to; it takes the place of `path`, durably, when the block ends well.

    Folders above it are made where they are missing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = part_of(path)
    try:
        yield temporary
        sync_file(temporary)
        os.replace(temporary, path)
        sync_folder(path.parent)  # the name, too
    finally:
        temporary.unlink(missing_ok=True)


def write_file(path: Path, content: bytes) -> None:
    """Whole or not at all, and durable."""
    with replaced_file(path) as temporary:
        temporary.write_bytes(content)


def file_digest(path: Path, kind: str = "sha256") -> str:
    """Digest of what a file holds, as hexadecimal digits. kind: a name that hashlib knows. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, kind).hexdigest()


def sync_file(path: Path) -> None:
    """Make what a file holds durable."""
    _sync(path, os.O_RDWR)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    _sync(folder, os.O_RDONLY)


def _sync(path: Path, mode: int) -> None:
    descriptor = os.open(path, mode)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
