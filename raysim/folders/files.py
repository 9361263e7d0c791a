"""Files written whole or not at all, and seals over the files of a finished run."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from raysim.base.errors import DataError
from raysim.base.reading import regular_file


def partial_file(path: Path) -> Path:
    """Return an unused temporary path beside `path`, for an atomic replacement.

    Drawn and not made of the process's number, which is 1 in every container.
    """
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")


@contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` to write to; it takes the place of `path`, durably, when the block ends well.

    Folders above it are made where they are missing.
    """
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
    """Whole or not at all, and durable."""
    with replaced_file(path) as temporary:
        temporary.write_bytes(content)


def file_digest(path: Path, kind: str = "sha256") -> str:
    """Return a file's digest as hexadecimal digits. kind: a name of hashlib. Raises OSError, also for a device."""
    with open(regular_file(path), "rb") as file:
        return hashlib.file_digest(file, kind).hexdigest()


def sync(path: Path) -> None:
    """Make the content of a file durable, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def seal_of(folder: Path, paths: Iterable[Path]) -> str:
    """Return lines in the format of `sha256sum` for the existing files."""
    names = (path.relative_to(folder).as_posix() for path in paths if path.is_file())
    return "".join(f"{file_digest(folder / name)}  {name}\n" for name in names)


def seal_again(folder: Path, seal: Path, path: Path) -> None:
    """Replace the line of one file in a seal."""
    name = path.relative_to(folder).as_posix()
    lines = [line for line in seal.read_text().splitlines() if not line.endswith(f"  {name}")]
    write_file(seal, ("\n".join(lines) + "\n" + seal_of(folder, [path])).encode())


def refuse_changed(folder: Path, seal: Path, paths: Iterable[Path]) -> None:
    """Compare files of a run with the lines of `seal`; missing and unsealed files pass.

    Raises:
      DataError: one has changed since the run wrote it.
    """
    lines = (line.partition("  ") for line in seal.read_text(errors="replace").splitlines())
    digests = {name: digest for digest, _, name in lines if len(digest) == 64}
    for path in paths:
        name = path.relative_to(folder).as_posix()
        if name in digests and path.is_file() and file_digest(path) != digests[name]:
            remedy = "restore the file, or delete the folder and repeat the run"
            raise DataError(f"{name} has changed since the run wrote it", str(folder), remedy)
