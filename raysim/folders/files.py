"""Files written whole or not at all, and arrays in a file that are read when they are looked at."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np

from raysim.base.errors import DataError, explained
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
    """Return a file's digest as hexadecimal digits. kind: a name of hashlib. Raises OSError, also for a device."""
    with open(regular_file(path), "rb") as file:
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


class LoggedArrays(Mapping[str, np.ndarray]):
    """What methods logged in a round, by name. Raises DataError: the file is damaged; also when an array is looked at."""

    def __init__(self, path: Path):
        self._path = path
        with self._sound():
            self._file = np.load(path, allow_pickle=False)
            self._names = tuple(self._file.files)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise KeyError(name)
        with self._sound():
            return np.asarray(self._file[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def close(self) -> None:
        self._file.close()

    def _sound(self) -> AbstractContextManager[None]:
        # Of numpy's header, zip and zlib, each of which has its own.
        mend = "delete that file; what it holds is lost"
        return explained(f"{self._path.name} is damaged", self._path.parent, mend, Exception)


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
            remedy = "put the file back, or delete this folder to run it anew"
            raise DataError(f"{name} has changed since the run wrote it", str(folder), remedy)
