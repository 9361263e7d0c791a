"""Checks that a run's records of rounds are complete, and unchanged since a checkpoint was written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from raysim.base.texts import round_name
from raysim.folders.files import file_digest
from raysim.folders.run_folder import RunFolder


class RecordChain:
    """A chain of SHA-256 for each kind of record: link = SHA-256(previous link, record), in the order of rounds.

    A checkpoint stores the links at its round, which cover the records of all earlier rounds only. A run that was
    killed while writing a later row can therefore resume, and a run whose earlier rows were changed cannot.

    Attributes:
      links: kind of record -> last link in hexadecimal; empty before the first record.
    """

    def __init__(self) -> None:
        self.links: dict[str, str] = {}

    def add_row(self, kind: str, row: Mapping[str, str]) -> None:
        """Add a row of a table. Empty cells are ignored, since later columns add empty cells to earlier rows."""
        filled = {name: text for name, text in row.items() if text}
        self._add(kind, json.dumps(filled, sort_keys=True))

    def add_file(self, kind: str, path: Path) -> None:
        """Add a file that is written only once. Raises OSError."""
        self._add(kind, f"{path.name} {file_digest(path)}")

    def _add(self, kind: str, record: str) -> None:
        self.links[kind] = hashlib.sha256(f"{self.links.get(kind, '')}{record}".encode()).hexdigest()


def record_chain(folder: RunFolder, before: int) -> RecordChain:
    """Return the chain over the stored records of all rounds below `before`. Raises RaysimError, OSError."""
    chain = RecordChain()
    for row in folder.progress_rows(before):
        chain.add_row(folder.progress.name, row)
    for part in folder.client_parts():
        if int(part.stem.rpartition("-")[2]) < before:
            chain.add_file(folder.clients.name, part)
    for round_index, path in folder.array_files().items():
        if round_index < before:
            chain.add_file(folder.arrays.name, path)
    return chain


def damaged_records(folder: RunFolder, before: int, links: Mapping[str, str]) -> str:
    """Return text on missing, damaged or changed records of rounds below `before`; empty if all are sound.

    Args:
      links: links of the chain when a checkpoint was written.
    """
    if missing := _missing(folder, before):
        return missing
    now = record_chain(folder, before).links
    changed = sorted(kind for kind, link in links.items() if now.get(kind) != link)
    since = f"since the checkpoint after {round_name(before - 1)}"
    return f"{' and '.join(changed)} changed {since}" if changed else ""


def _missing(folder: RunFolder, before: int) -> str:
    whole = set(range(before))
    lacking = whole - {int(row["round"]) for row in folder.progress_rows()}
    if lacking:
        return f"{folder.progress.name} lacks {round_name(min(lacking))}"
    there: set[int] = set()
    for part in folder.client_parts():
        try:
            there |= set(pq.read_table(part, columns=["round"]).column("round").to_pylist())
        except (pa.ArrowInvalid, OSError) as error:
            return f"{part.parent.name}/{part.name} is damaged ({error})"
    return f"{folder.clients.name} lacks {round_name(min(whole - there))}" if whole - there else ""
