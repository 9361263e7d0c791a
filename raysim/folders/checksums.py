"""The seal of a finished run: checksums of its results."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from raysim.folders.files import file_digest


def seal_of(folder: Path, paths: Iterable[Path]) -> str:
    """Lines as `sha256sum` writes them, one for each of the files that is there."""
    names = (path.relative_to(folder).as_posix() for path in paths if path.is_file())
    return "".join(f"{file_digest(folder / name)}  {name}\n" for name in names)


def read_seal(text: str) -> dict[str, str]:
    """File -> its SHA-256, from such lines; others are left out."""
    pairs = (line.partition("  ") for line in text.splitlines())
    return {name: digest for digest, _, name in pairs if len(digest) == 64 and name}
