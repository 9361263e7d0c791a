"""What stands below and beside the accuracies: average gains, averages over tables, and seconds relative to one row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from raysim.config import nearest
from raysim.core.errors import ConfigError, Fault
from raysim.report.contents import Extra
from raysim.report.metrics import by_round
from raysim.report.published import Published, canonical, is_same, match
from raysim.report.render import PUBLISHED, Entry, Line, header_of, signed
from raysim.report.tables import Cell, Column, Gain, Table, all_rows, bounds_of, heading

#: How the published tables call the row of gains, their unit and that of times.
AVERAGE = "average over methods"
GAINS = ("avg_gain_points", "avg_gain_vs_1_layer_points")
TIMES = ("time_rel_fedavg",)

Pair = tuple[Cell, Cell]


def with_gains(tables: Sequence[Table], gain: str, theirs: Sequence[Published]) -> list[Table]:
    """The tables with a mean difference for each column that has pairs.

    Args:
      gain: "FLFA": of the rows "X + FLFA" against "X"; "fa_layers=1": of the columns against the one where that label
        has that value, row by row.
    Raises:
      ConfigError: there is not one pair.
    """
    label, is_label, value = gain.partition("=")
    found = [_against_column(table, label, value) if is_label else _against_row(table, gain) for table in tables]
    if not any(pairs for columns in found for pairs in columns.values()):
        wanted = f"column label {label} with the value {value}" if is_label else f"pair of rows X and X + {gain}"
        known = [n for table in tables for n in (table.names if is_label else table.rows)]
        fault = Fault("report.gain", f"no table has a {wanted}. {nearest(label, known)}")
        raise ConfigError([fault], "the report")
    return [
        replace(
            table,
            gains={column: _gain(pairs, theirs) for column, pairs in columns.items() if pairs},
            gain_name=gain_label(gain),
        )
        for table, columns in zip(tables, found, strict=True)
    ]


def _against_row(table: Table, addition: str) -> dict[Column, list[Pair]]:
    joints = {canonical(f"{row}+{addition}"): row for row in table.rows}
    pairs = [(row, joints[canonical(row)]) for row in table.rows if canonical(row) in joints]
    return {
        column: [(table.cells[a, column], table.cells[b, column]) for a, b in pairs if _has(table, column, a, b)]
        for column in table.columns
    }


def _has(table: Table, column: Column, *rows: str) -> bool:
    return all((row, column) in table.cells for row in rows)


def _against_column(table: Table, label: str, value: str) -> dict[Column, list[Pair]]:
    if label not in table.names:
        return {}
    place = table.names.index(label)
    found: dict[Column, list[Pair]] = {}
    for column in table.columns:
        rest = column[:place] + column[place + 1 :]
        for base in table.columns:
            is_base = base[:place] + base[place + 1 :] == rest and is_same(base[place], value)
            if is_base and base != column:
                rows = [row for row in table.rows if (row, column) in table.cells and (row, base) in table.cells]
                found[column] = [(table.cells[row, column], table.cells[row, base]) for row in rows]
    return found


def _gain(pairs: Sequence[Pair], theirs: Sequence[Published]) -> Gain:
    labels = {**pairs[0][0].labels, "method": AVERAGE}
    printed = match(theirs, labels, metrics=GAINS)
    mean = float(np.mean([cell.mean - base.mean for cell, base in pairs]))
    return Gain(mean, len(pairs), None if printed is None else printed.value)


def relative_times(
    tables: Sequence[Table], rows: str, baseline: str, seconds: Mapping[Path, float | None], theirs: Sequence[Published]
) -> list[Extra]:
    """Training seconds per round of each cell over the baseline row's in the same column, paired by seed.

    Args:
      rows: the label of the rows.
      seconds: run directory -> mean seconds of training in a round.
    """
    extras = []
    for table in tables:
        lines: list[Line] = []
        for row in table.rows:
            ratios = [_ratio(table, row, baseline, column, seconds) for column in table.columns]
            printed = [_printed_time(table.cells.get((row, column)), theirs) for column in table.columns]
            if any(ratio is not None for ratio in ratios):
                lines.append((row, tuple(Entry("-" if r is None else f"{r:.2f}") for r in ratios)))
                if any(value is not None for value in printed):
                    shown = [_beside(ratio, value) for ratio, value in zip(ratios, printed, strict=True)]
                    lines.append((PUBLISHED, tuple(Entry(text) for text in shown)))
        if lines:
            caption = (
                f"Mean seconds of training in a round divided by those of {baseline} with the same seed: without the first "
                "round, without aggregation and evaluation. Runs that shared a machine disturbed each other."
            )
            extras.append(Extra(f"Relative time: {table.title}", caption, header_of(table, rows), lines))
    return extras


def _ratio(table: Table, row: str, baseline: str, column: Column, seconds: Mapping[Path, float | None]) -> float | None:
    if not _has(table, column, row, baseline):
        return None
    mine, base = (table.cells[name, column].folders for name in (row, baseline))
    pairs = [(seconds.get(mine[seed]), seconds.get(base[seed])) for seed in mine if seed in base]
    known = [one / other for one, other in pairs if one and other]
    return float(np.mean(known)) if known else None


def _printed_time(cell: Cell | None, theirs: Sequence[Published]) -> float | None:
    printed = match(theirs, cell.labels, metrics=TIMES) if cell is not None else None
    return printed.value if printed is not None else None


def _beside(ours: float | None, theirs: float | None) -> str:
    if theirs is None:
        return ""
    return f"{theirs:.2f}" if ours is None else f"{theirs:.2f} ({signed(ours - theirs)})"


def mean_train_seconds(folder: Path) -> float | None:
    """Mean seconds of training in a round, without the first one, in which everything is started and compiled."""
    seconds = [value for _, value in by_round(folder, "system/train_s")][1:]
    return float(np.mean(seconds)) if seconds else None


@dataclass(frozen=True)
class Average:
    """Mean of a row's means in one column over tables; n: how many tables have both."""

    mean: float
    n: int


def averages_of(tables: Sequence[Table]) -> dict[tuple[str, Column], Average]:
    """(row, column) -> its average over the tables that have it."""
    means: dict[tuple[str, Column], list[float]] = {}
    for table in tables:
        for place, cell in table.cells.items():
            means.setdefault(place, []).append(cell.mean)
    return {place: Average(float(np.mean(found)), len(found)) for place, found in means.items()}


def best_on_average(tables: Sequence[Table]) -> dict[Column, list[tuple[str, Average]]]:
    """Column -> its rows with a cell in the most tables, best average first: only these compare. Bounds are left out.

    A column that only one table has, or only one such row, is left out.
    """
    found, bounds = averages_of(tables), bounds_of(tables)
    sign = -1 if tables[0].metric.mode == "max" else 1
    ranked = {}
    for column in dict.fromkeys(column for table in tables for column in table.columns):
        rows = [(row, found[row, column]) for row in all_rows(tables) if (row, column) in found and row not in bounds]
        most = max((average.n for _, average in rows), default=0)
        whole = [(row, average) for row, average in rows if average.n == most]
        if most > 1 and len(whole) > 1:
            ranked[column] = sorted(whole, key=lambda item: sign * item[1].mean)
    return ranked


def averages(tables: Sequence[Table], rows: str) -> list[Extra]:
    """The averages as a table: a line for each row, with the number of tables where not all have it."""
    found, ranked = averages_of(tables), best_on_average(tables)
    columns, digits = list(ranked), tables[0].metric.digits
    most = {column: rank[0][1].n for column, rank in ranked.items()}
    lines: list[Line] = []
    for row in all_rows(tables):
        entries = []
        for column in columns:
            average = found.get((row, column))
            if average is None:
                entries.append(Entry("-"))
                continue
            few = f" ({average.n} of {most[column]})" if average.n != most[column] else ""
            mark = "best" if row == ranked[column][0][0] else ""
            entries.append(Entry(f"{average.mean:.{digits}f}{few}", mark))
        lines.append((row, tuple(entries)))
    if not columns:
        return []
    caption = (
        f"Mean of the means above over {max(most.values())} tables, each weighing the same; the highest **bold**, among "
        "the rows that all of them have."
    )
    return [Extra("Average over tables", caption, [rows, *(heading(tables[0].names, c) for c in columns)], lines)]


def base_of(row: str, rows: Sequence[str], baseline: str | None) -> str | None:
    """What a row is compared with: the row X of "X + something" if there is one, else the baseline; never itself."""
    names = [other for other in rows if canonical(row).startswith(f"{canonical(other)}+")]
    found = max(names, key=len) if names else baseline
    return None if found == row else found


def gain_label(gain: str) -> str:
    """Name of the line with the gains."""
    label, is_label, value = gain.partition("=")
    return f"Avg. gain over {heading((label,), (value,))}" if is_label else f"Avg. gain of + {gain}"
