"""Divisions of a set: the client and the split of each example, partition files, and label statistics.

A partition file is CSV or Parquet with the columns `example,client,split`, or JSON with a list of such rows. An example
is a row of the prepared set, counted from 0. Splits are train, validation, test and unused; held-out examples have a
client only if clients have held-out examples of their own. Without the column `split`, the settings of `data` choose
the held-out examples, and the file assigns the remaining examples to clients; JSON may then also be an object, client:
[examples]. The order of the rows has no effect.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow.csv import ConvertOptions, read_csv
from pyarrow.parquet import read_table, write_table

from raysim.base.errors import DataError, explained
from raysim.base.texts import cells
from raysim.base.untrusted import read_json, regular_file
from raysim.data.splits import TEST, TRAIN, VALIDATION

#: Names of the values of a split column; UNUSED: examples in no split.
UNUSED = 3
SPLITS = {"train": TRAIN, "validation": VALIDATION, "test": TEST, "unused": UNUSED}

#: A table of more rows is written as Parquet: as CSV, a million clients take 130 MB.
MOST_CSV_ROWS = 200_000

#: Name -> (rows,) values; objects where they are names.
Table = dict[str, np.ndarray]

#: Errors raised by reading a malformed partition file.
MISREAD = (OSError, ValueError, TypeError, AttributeError, OverflowError)

#: Client number of an example without a client.
NOBODY = -1


@dataclass(frozen=True)
class Division:
    """Client and split of every example of a set.

    Attributes:
      owners: (n,) int64, NOBODY for examples without a client.
      splits: (n,) int64 values of SPLITS.
    """

    owners: np.ndarray
    splits: np.ndarray
    num_clients: int

    @staticmethod
    def of(parts: Sequence[np.ndarray], validation: np.ndarray, test: np.ndarray, num_examples: int) -> Division:
        """Return the division in which clients train on their parts, except for the held-out rows."""
        owners, splits = np.full(num_examples, NOBODY), np.full(num_examples, UNUSED)
        rows = np.concatenate(parts)
        owners[rows], splits[rows] = np.repeat(np.arange(len(parts)), [len(part) for part in parts]), TRAIN
        splits[validation], splits[test] = VALIDATION, TEST
        return Division(owners, splits, len(parts))

    def rows(self, split: int) -> np.ndarray:
        """Return the rows of a split: client after client, in ascending order for each client."""
        rows = np.flatnonzero(self.splits == split)
        return rows[np.argsort(self.owners[rows], kind="stable")]

    def sizes(self, *splits: int) -> np.ndarray:
        """Return (num_clients,) int64: the number of examples of each client in the given splits."""
        is_counted = (self.owners != NOBODY) & np.isin(self.splits, splits)
        return np.bincount(self.owners[is_counted], minlength=self.num_clients)

    def reordered(self, order: np.ndarray) -> Division:
        """Return the division with renumbered clients. order: (num_clients,) int64, old numbers in the new order."""
        return replace(self, owners=np.where(self.owners == NOBODY, NOBODY, np.argsort(order)[self.owners]))

    def without_last(self, count: int) -> tuple[Division, np.ndarray]:
        """Return (the division without its last clients, (k,) rows of the removed clients, client after client)."""
        left = self.num_clients - count
        rows = np.flatnonzero(self.owners >= left)
        rows = rows[np.lexsort((self.splits[rows], self.owners[rows]))]
        return Division(self.owners, np.where(self.owners >= left, UNUSED, self.splits), left), rows

    @property
    def table(self) -> Table:
        """Table of a partition file, with all columns and a row for each example of the set."""
        names = np.array(list(SPLITS), object)[self.splits]
        return {"example": np.arange(len(names)), "client": np.ma.masked_equal(self.owners, NOBODY), "split": names}


@dataclass(frozen=True)
class DivisionFile:
    """Content of a partition file, for all examples of a set.

    Attributes:
      where: description of the file, for messages.
      owners: (n,) int64, NOBODY for examples without a client.
      splits: (n,) int64 values of SPLITS; None for a file without a split column.
    """

    where: str
    owners: np.ndarray
    splits: np.ndarray | None

    def division(self, num_clients: int) -> Division:
        """Return the complete division, for a file with splits.

        Raises:
          DataError: a training example without a client; held-out examples of which only some have a client.
        """
        assert self.splits is not None
        self.of(np.flatnonzero(self.splits == TRAIN))
        for name in ("validation", "test"):
            rows = np.flatnonzero(self.splits == SPLITS[name])
            has_owner = self.owners[rows] != NOBODY
            if has_owner.any() and not has_owner.all():
                what = f"{name} example {rows[~has_owner][0]} has no client, and example {rows[has_owner][0]} has one"
                raise DataError(what, self.where, f"give all {name} examples a client, or none")
        return Division(np.where(self.splits == UNUSED, NOBODY, self.owners), self.splits, num_clients)

    def of(self, rows: np.ndarray) -> np.ndarray:
        """Return (n,) clients of the given training rows.

        Raises:
          DataError: a row has no client.
        """
        owners = self.owners[rows]
        if (owners == NOBODY).any():
            what = f"example {rows[owners == NOBODY][0]}, which is to be trained on, has no client"
            raise DataError(what, self.where, "give the example a client, or split unused")
        return owners


def read_division(path: Path, *, num_examples: int, num_clients: int) -> DivisionFile:
    """Read a partition file for a set of `num_examples` examples.

    Raises:
      DataError: the file cannot be read, lacks a column, names an example or a client that does not exist, an example
        twice, or an unknown split, or has splits but not every example.
    """
    where = f"partition file {path}"
    mend = "write example,client or example,client,split"
    with explained("cannot be read", where, mend, *MISREAD):
        examples, clients, names = _columns(_READ.get(path.suffix, _table_of_csv)(regular_file(path)))
    _check_examples(examples, num_examples, where)
    wrong = np.flatnonzero((clients < NOBODY) | (clients >= num_clients))
    if len(wrong):
        what = f"example {examples[wrong[0]]} belongs to client {clients[wrong[0]]} of {num_clients}"
        mend = f"correct it, or set partition.num_clients to {clients.max() + 1}; clients are counted from 0"
        raise DataError(what, where, mend)
    owners = np.full(num_examples, NOBODY)
    owners[examples] = clients
    if names is None:
        return DivisionFile(where, owners, None)
    codes = np.array([SPLITS.get(name or "", -1) for name in names])
    if (codes < 0).any():
        unknown = int(np.argmax(codes < 0))
        what = f"split {names[unknown]!r} of example {examples[unknown]}"
        raise DataError(what, where, f"choose one of {', '.join(SPLITS)}")
    if len(examples) < num_examples:
        missing = np.setdiff1d(np.arange(num_examples), examples)
        what = f"example {missing[0]} is missing ({len(missing)} of {num_examples} in all)"
        raise DataError(what, where, "name every example of the set; give the examples without a client split unused")
    splits = np.empty(num_examples, np.int64)
    splits[examples] = codes
    return DivisionFile(where, owners, splits)


def _check_examples(examples: np.ndarray, num_examples: int, where: str) -> None:
    outside = examples[(examples < 0) | (examples >= num_examples)]
    if len(outside):
        what = f"example {outside[0]} of a set with {num_examples}"
        raise DataError(what, where, "examples are rows of the prepared set, counted from 0")
    seen, counts = np.unique(examples, return_counts=True)
    if (counts > 1).any():
        raise DataError(f"example {seen[counts > 1][0]} appears {counts.max()} times", where, "name it once")


def _table_of_csv(path: Path) -> pa.Table:
    types = {"example": pa.int64(), "client": pa.int64(), "split": pa.string()}
    options = ConvertOptions(column_types=types, include_missing_columns=False)
    return read_csv(path, convert_options=options)


def _table_of_json(path: Path) -> pa.Table:
    """Read JSON with a list of rows, or with an object client: [examples]."""
    rows = read_json(path)
    if isinstance(rows, dict):
        rows = [{"example": example, "client": int(client)} for client, held in rows.items() for example in held]
    return pa.Table.from_pylist(rows)


#: File name suffix -> reader; other suffixes are read as CSV.
_READ = {".json": _table_of_json, ".parquet": read_table}


def _columns(table: pa.Table) -> tuple[np.ndarray, np.ndarray, Sequence[str | None] | None]:
    """Return (examples, clients, split names or None). Raises ValueError: a column or an example is missing."""
    if missing := {"example", "client"} - set(table.column_names):
        lacking = " and ".join(f"no column {name}" for name in sorted(missing))
        raise ValueError(f"{lacking}; there is {', '.join(table.column_names) or 'none'}")
    examples, clients = (table[name].cast(pa.int64()) for name in ("example", "client"))
    if examples.null_count:
        raise ValueError("a row has no example")
    splits = table["split"].to_pylist() if "split" in table.column_names else None
    return np.array(examples), np.array(clients.fill_null(NOBODY)), splits


def label_entropy(class_counts: np.ndarray) -> np.ndarray:
    """Return (num_clients,) label entropies in bits: 0 for a single class, log2(classes) for equal counts.

    Args:
      class_counts: (num_clients, classes).
    """
    shares = class_counts / np.maximum(1, class_counts.sum(axis=1, keepdims=True))
    logs = np.log2(shares, out=np.zeros_like(shares), where=shares > 0)
    return np.abs((shares * logs).sum(axis=1))


def partition_table(
    class_counts: np.ndarray, classes: Sequence[str] = (), validation_counts: np.ndarray | None = None
) -> Table:
    """Return a table with a row per client: examples, classes, label entropy in bits, largest class and its share.

    Args:
      class_counts: (num_clients, classes).
      classes: names of classes, each for a column with its number of examples; no such columns if empty.
      validation_counts: (classes,) of the server's validation set, whose row `validation` is the last row.
    """
    names, counts = np.arange(len(class_counts)).astype(object), class_counts
    if validation_counts is not None and validation_counts.sum():
        names, counts = np.append(names, "validation"), np.concatenate([class_counts, validation_counts[None]])
    sizes = counts.sum(axis=1)
    return {
        "client": names,
        "examples": sizes,
        "classes": np.count_nonzero(counts, axis=1),
        "label_entropy_bits": label_entropy(counts).round(4),
        "largest_class": counts.argmax(axis=1),
        "largest_share": (counts.max(axis=1) / np.maximum(1, sizes)).round(4),
        **{f"class {name}": counts[:, i] for i, name in enumerate(classes)},
    }


def table_file(table: Table) -> tuple[str, bytes]:
    """Return (file name suffix, content) of a table's file: CSV, or Parquet above MOST_CSV_ROWS rows."""
    columns = list(table.values())
    if len(columns[0]) > MOST_CSV_ROWS:
        content = pa.BufferOutputStream()
        arrays = [pa.array(values.astype(str) if values.dtype == object else values) for values in columns]
        write_table(pa.table(arrays, list(table)), content)
        return ".parquet", content.getvalue().to_pybytes()
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(cells(table))
    writer.writerows(map(cells, zip(*(values.tolist() for values in columns), strict=True)))
    return ".csv", text.getvalue().encode()
