"""The seal of a run that came to its end: checksums of its results."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from raysim.core.errors import DataError
from raysim.folders.files import file_digest


def seal_of(folder: Path, paths: Iterable[Path]) -> str:
    """Lines as `sha256sum` writes them, one for each of the files that is there."""
    names = (path.relative_to(folder).as_posix() for path in paths if path.is_file())
    return "".join(f"{file_digest(folder / name)}  {name}\n" for name in names)


def read_seal(text: str) -> dict[str, str]:
    """File -> its SHA-256, from such lines; others are left out."""
    pairs = (line.partition("  ") for line in text.splitlines())
    return {name: digest for digest, _, name in pairs if len(digest) == 64 and name}


def refuse_changed(folder: Path, seal: Path, paths: Iterable[Path]) -> None:
    """Compare files of a run with the lines that `seal` holds; those that are missing, or not sealed, pass.

    Raises:
      DataError: one is not as the run wrote it.
    """
    digests = read_seal(seal.read_text(errors="replace"))
    for path in paths:
        name = path.relative_to(folder).as_posix()
        if name in digests and path.is_file() and file_digest(path) != digests[name]:
            remedy = "put the file back, or delete this folder to run it anew"
            raise DataError(f"{name} is not as the run wrote it", str(folder), remedy)
