"""What stands below and beside the accuracies: average gains, averages over tables, and seconds relative to one row."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from raysim.config import nearest
from raysim.reporting.contents import Extra
from raysim.reporting.metrics import BESIDE, ReportMetric, by_round
from raysim.reporting.published import Label, Published, canonical, is_same, match
from raysim.reporting.render import Entry, Line, accuracy, header_of, published_line, signed
from raysim.reporting.tables import (
    Cell,
    Column,
    Place,
    Table,
    all_columns,
    all_rows,
    bounds_of,
    cell_of,
    heading,
    mean_and_std,
)

#: What stands above the table of the other accuracy.
CHOSEN = "The same runs. The best round is chosen with a look at the test set; the last one is not."

#: How the published tables call the row of gains, their unit and that of times.
AVERAGE = "average over methods"
GAINS = ("avg_gain_points", "avg_gain_vs_1_layer_points")
TIMES = ("time_rel_fedavg",)


def with_gains(tables: Sequence[Table], gain: str | None, theirs: Sequence[Published]) -> list[Table]:
    """The tables with a mean difference for each column that has pairs.

    Args:
      gain: "FLFA": of the rows "X + FLFA" against "X"; "fa_layers=1": of the columns against the one where that label
        has that value, row by row. None: of nothing.
    Raises:
      LookupError: there is not one pair; its text names the nearest.
    """
    if gain is None:
        return list(tables)
    with_them = [replace(table, gains=_gains(table, gain, theirs), gain_name=gain_label(gain)) for table in tables]
    if not any(table.gains for table in with_them):
        label, is_label, value = gain.partition("=")
        wanted = f"column label {label} with the value {value}" if is_label else f"pair of rows X and X + {gain}"
        known = [name for table in tables for name in (table.names if is_label else table.rows)]
        raise LookupError(f"no table has a {wanted}. {nearest(label, known)}")
    return with_them


def _gains(table: Table, gain: str, theirs: Sequence[Published]) -> dict[Column, Cell]:
    """The gain of each column over the cells it is counted from."""
    bases = {place: table.cells[base] for place, base in _bases(table, gain).items() if base in table.cells}
    gains = {}
    for column in table.columns:
        cells = {row: cell for row, cell in table.column_cells(column).items() if (row, column) in bases}
        if cells:
            labels = {**next(iter(cells.values())).labels, "method": AVERAGE}
            scores: dict[Label, float] = {row: cell.mean - bases[row, column].mean for row, cell in cells.items()}
            gains[column] = cell_of(labels, scores, match(theirs, labels, metrics=GAINS))
    return gains


def _bases(table: Table, gain: str) -> dict[Place, Place]:
    """Place of a cell -> place of the cell that its gain is counted from."""
    label, is_label, value = gain.partition("=")
    places = list(itertools.product(table.rows, table.columns))
    if not is_label:
        plain = {canonical(f"{row}+{gain}"): row for row in table.rows}
        return {(row, column): (plain[canonical(row)], column) for row, column in places if canonical(row) in plain}
    if label not in table.names:
        return {}
    axis = table.names.index(label)
    others = {column: column[:axis] + column[axis + 1 :] for column in table.columns}
    bases = {others[column]: column for column in table.columns if is_same(column[axis], value)}
    return {(row, c): (row, bases[others[c]]) for row, c in places if bases.get(others[c], c) != c}


def other_accuracy(tables: Sequence[Table], rows: str) -> list[Extra]:
    """The last accuracies beside tables of the best ones, or the reverse; nothing beside other metrics.

    Args:
      rows: the label of the rows.
    """
    name = BESIDE.get(tables[0].metric.name)
    if name is None:
        return []
    metric = ReportMetric(name)
    extras = []
    for table in tables:
        lines: list[Line] = []
        for row in table.rows:
            cells = [table.cells.get((row, column)) for column in table.columns]
            scores = [[metric.score_of(folder) for folder in cell.folders.values()] if cell else [] for cell in cells]
            known = [[score for score in each if score is not None] for each in scores]
            texts = [accuracy(*mean_and_std(each), metric.digits) if each else "-" for each in known]
            lines.append((row, tuple(map(Entry, texts))))
        extras.append(Extra(f"{table.title}: {metric.title}", CHOSEN, header_of(table, rows), lines))
    return extras


def relative_times(tables: Sequence[Table], rows: str, baseline: str, theirs: Sequence[Published]) -> list[Extra]:
    """Training seconds per round of each cell over the baseline row's in the same column, paired by seed.

    Args:
      rows: the label of the rows.
    """
    caption = (
        f"Mean seconds of training in a round divided by those of {baseline} with the same seed: without the first "
        "round, without aggregation and evaluation. Runs that shared a machine disturbed each other."
    )
    extras = []
    for table in tables:
        lines: list[Line] = []
        for row in table.rows:
            cells = [table.cells.get((row, column)) for column in table.columns]
            bases = [table.cells.get((baseline, column)) for column in table.columns]
            ratios = list(map(_ratio, cells, bases))
            if any(ratio is not None for ratio in ratios):
                printed = [match(theirs, cell.labels, metrics=TIMES) if cell else None for cell in cells]
                lines.append((row, tuple(Entry("-" if ratio is None else f"{ratio:.2f}") for ratio in ratios)))
                lines += published_line([_beside(*pair) for pair in zip(ratios, printed, strict=True)])
        if lines:
            extras.append(Extra(f"Relative time: {table.title}", caption, header_of(table, rows, "time"), lines))
    return extras


def _ratio(cell: Cell | None, base: Cell | None) -> float | None:
    if cell is None or base is None:
        return None
    seeds = [seed for seed in cell.folders if seed in base.folders]
    times = [(mean_train_seconds(cell.folders[seed]), mean_train_seconds(base.folders[seed])) for seed in seeds]
    ratios = [one / other for one, other in times if one and other]
    return float(np.mean(ratios)) if ratios else None


def _beside(ratio: float | None, printed: Published | None) -> str:
    if printed is None or printed.value is None:
        return ""
    return f"{printed.value:.2f}" + ("" if ratio is None else f" ({signed(ratio - printed.value)})")


def mean_train_seconds(folder: Path) -> float | None:
    """Mean seconds of training in a round, without the first one, in which everything is started and compiled."""
    seconds = list(by_round(folder, "system/train_s").values())[1:]
    return float(np.mean(seconds)) if seconds else None


def averages_of(tables: Sequence[Table]) -> dict[Place, Cell]:
    """(row, column) -> the mean of its means over the tables that have it, each with the same weight."""
    means: dict[Place, dict[Label, float]] = {}
    for index, table in enumerate(tables):
        for place, cell in table.cells.items():
            means.setdefault(place, {})[index] = cell.mean
    return {place: cell_of({}, scores) for place, scores in means.items()}


def best_on_average(tables: Sequence[Table]) -> dict[Column, list[tuple[str, Cell]]]:
    """Column -> its rows with a cell in the most tables, best average first: only these compare. Bounds are left out.

    A column that only one table has, or only one such row, is left out.
    """
    means, bounds = averages_of(tables), bounds_of(tables)
    sign = -1 if tables[0].metric.mode == "max" else 1
    ranked = {}
    for column in all_columns(tables):
        rows = {row: means[row, column] for row in all_rows(tables) if (row, column) in means and row not in bounds}
        most = max((average.n for average in rows.values()), default=0)
        whole = [(row, average) for row, average in rows.items() if average.n == most]
        if most > 1 and len(whole) > 1:
            ranked[column] = sorted(whole, key=lambda item: sign * item[1].mean)
    return ranked


def averages(tables: Sequence[Table], rows: str) -> list[Extra]:
    """The averages as a table: a line for each row, with the number of tables where not all have it."""
    means, best = averages_of(tables), {column: rows[0][1] for column, rows in best_on_average(tables).items()}
    digits, bounds = tables[0].metric.digits, bounds_of(tables)
    if not best:
        return []

    def entry(row: str, column: Column) -> Entry:
        if (row, column) not in means:
            return Entry("-")
        average, most = means[row, column], best[column]
        few = f" ({average.n} of {most.n})" if average.n != most.n else ""
        is_first = not few and row not in bounds and round(average.mean, digits) == round(most.mean, digits)
        return Entry(f"{average.mean:.{digits}f}{few}", "best" if is_first else "")

    caption = (
        f"Mean of the means above over {max(average.n for average in best.values())} tables, each weighing the same; "
        f"the {tables[0].metric.first} **bold**, among the rows that all of them have."
    )
    header = [rows, *(heading(tables[0].names, column, tables[0].metric.quantity) for column in best)]
    lines = [(row, tuple(entry(row, column) for column in best)) for row in all_rows(tables)]
    return [Extra("Average over tables", caption, header, lines)]


def base_of(row: str, rows: Sequence[str], baseline: str | None) -> str | None:
    """What a row is compared with: the row X of "X + something" if there is one, else the baseline; never itself."""
    bases = [other for other in rows if canonical(row).startswith(f"{canonical(other)}+")]
    base = max(bases, key=len) if bases else baseline
    return None if base == row else base


def gain_label(gain: str) -> str:
    """Name of the line with the gains."""
    label, is_label, value = gain.partition("=")
    return f"Avg. gain over {heading((label,), (value,))}" if is_label else f"Avg. gain of + {gain}"
