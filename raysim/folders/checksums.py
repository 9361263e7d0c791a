"""Checksums of what a run records: a chain that its checkpoints keep, and the seal of a finished run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from raysim.folders.files import file_digest


class RecordChain:
    """A chain of SHA-256 for each kind of record: link = SHA-256(link before, record), in the order of rounds.

    A checkpoint keeps the links of its time. They cover the records of all rounds before it and none after, so that a
    run that was killed in the middle of a later row goes on, and one whose earlier rows were changed does not.

    Attributes:
      links: kind of record -> hexadecimal digits; empty before the first record.
    """

    def __init__(self) -> None:
        self.links: dict[str, str] = {}

    def add_row(self, kind: str, row: Mapping[str, str]) -> None:
        """A row of a table. Empty cells do not count: columns that come later fill earlier rows with them."""
        filled = {name: text for name, text in row.items() if text}
        self._add(kind, json.dumps(filled, sort_keys=True))

    def add_file(self, kind: str, path: Path) -> None:
        """A file that is not written again. Raises OSError."""
        self._add(kind, f"{path.name} {file_digest(path)}")

    def _add(self, kind: str, record: str) -> None:
        self.links[kind] = hashlib.sha256(f"{self.links.get(kind, '')}{record}".encode()).hexdigest()


def seal_of(folder: Path, paths: Iterable[Path]) -> str:
    """Lines as `sha256sum` writes them, one for each of the files that is there."""
    names = (path.relative_to(folder).as_posix() for path in paths if path.is_file())
    return "".join(f"{file_digest(folder / name)}  {name}\n" for name in names)


def read_seal(text: str) -> dict[str, str]:
    """File -> its SHA-256, from such lines; others are left out."""
    pairs = (line.partition("  ") for line in text.splitlines())
    return {name: digest for digest, _, name in pairs if len(digest) == 64 and name}
