"""Heat maps of gains: of pairs of a row and a column, with what they gain beyond their parts, and of rows in each column."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from raysim.reporting.contents import ReportContents
from raysim.reporting.published import is_same
from raysim.reporting.significance import Effect, effect_of
from raysim.reporting.tables import Cell, Column, Place, Table, text

#: Inches of a cell, and of the names beside the cells.
CELL, NAMES = (0.52, 0.3), 1.7


def maps(report: ReportContents) -> Iterator[Figure]:
    """For each table two heat maps: gains over the cell of the baseline and `gain`, and what is left of them beyond the parts."""
    for table in report.tables:
        base = base_of(table, report.baseline, report.group.gain)
        if base is not None and len(gains := gains_over(table, base)) > 1:
            yield _figure(table, base, gains)


def gains(report: ReportContents) -> Iterator[Figure]:
    """For each table a heat map: the gain of every row over the baseline in the same column, where it wins and where it loses."""
    for table in report.tables:
        if report.baseline is None or len(table.columns) < 2 or not (found := gains_in_columns(table, report.baseline)):
            continue
        rows = [row for row in table.rows if any(place[0] == row for place in found)]
        columns = [column for column in table.columns if any(place[1] == column for place in found)]
        size = CELL[0] * len(columns) + NAMES + 0.8, CELL[1] * len(rows) + 1.6
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        _heat(axes, rows, columns, {place: effect.mean for place, effect in found.items()}, certain_places(found))
        axes.set_xlabel(", ".join(table.names), fontsize=8)
        axes.set_title(f"{table.title}: gain over {report.baseline}", fontsize=9)
        yield figure


def gains_in_columns(table: Table, baseline: str) -> dict[Place, Effect]:
    """Place -> the paired difference of its runs to the baseline's in its column, where both are."""
    found: dict[Place, Effect] = {}
    for (row, column), cell in table.cells.items():
        if row != baseline and (zero := table.cells.get((baseline, column))) is not None:
            found |= _paired({(row, column): cell}, zero)
    return found


def certain_places(gains: Mapping[Place, Effect]) -> set[Place]:
    """Where the interval leaves out 0."""
    return {place for place, effect in gains.items() if effect.is_certain}


def base_of(table: Table, baseline: str | None, gain: str | None) -> Place | None:
    """The cell that gains are counted from: the baseline's row, and the column that `gain`, "label=value", names."""
    label, is_label, value = (gain or "").partition("=")
    if baseline is None or not is_label or table.names != (label,):
        return None
    column = next((column for column in table.columns if is_same(column[0], value)), None)
    return None if column is None or (baseline, column) not in table.cells else (baseline, column)


def gains_over(table: Table, base: Place) -> dict[Place, Effect]:
    """Place -> the paired difference of its runs to those of the base with the same seeds, where there are any."""
    return _paired(table.cells, table.cells[base])


def _paired(cells: Mapping[Place, Cell], zero: Cell) -> dict[Place, Effect]:
    found = {}
    for place, cell in cells.items():
        if seeds := [seed for seed in cell.scores if seed in zero.scores]:
            found[place] = effect_of([cell.scores[seed] for seed in seeds], [zero.scores[seed] for seed in seeds])
    return found


def beyond_parts(gains: Mapping[Place, Effect], base: Place) -> dict[Place, float]:
    """Place -> its gain less the gains of its row alone and of its column alone; above 0: the two help each other.

    Only for pairs of two parts that are not the base's own, and of which each ran alone.
    """
    row, column = base
    return {
        (own_row, own_column): effect.mean - gains[own_row, column].mean - gains[row, own_column].mean
        for (own_row, own_column), effect in gains.items()
        if own_row != row and own_column != column and {(own_row, column), (row, own_column)} <= gains.keys()
    }


def _figure(table: Table, base: Place, gains: Mapping[Place, Effect]) -> Figure:
    width = 2 * (CELL[0] * len(table.columns) + NAMES) + 0.6
    figure = Figure(figsize=(width, CELL[1] * len(table.rows) + 2.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    named = f"{base[0]} and {text(base[1][0])}"
    columns = [base[1], *(column for column in table.columns if column != base[1])]
    _heat(left, table.rows, columns, {place: effect.mean for place, effect in gains.items()}, certain_places(gains))
    left.set_title(f"gain over {named}, {table.metric.axis}", fontsize=9)
    _heat(right, table.rows, columns, beyond_parts(gains, base), set())
    right.set_title("gain beyond the sum of both parts' own", fontsize=9)
    figure.suptitle(table.title, fontsize=9)
    return figure


def _heat(
    axes: Axes, rows: Sequence[str], columns: Sequence[Column], values: Mapping[Place, float], certain: set[Place]
) -> None:
    """Cells with their numbers, red below 0, blue above; grey where there is none, bold where it is certain."""
    grid = np.array([[values.get((row, column), np.nan) for column in columns] for row in rows])
    known = np.abs(grid[np.isfinite(grid)])
    # One run that went to pieces would take all colour from the others.
    limit = max(float(np.quantile(known, 0.9)), 1e-9) if known.size else 1.0
    axes.set_facecolor("#dddddd")
    image = axes.imshow(grid, cmap="RdBu", vmin=-limit, vmax=limit, aspect="auto")
    for (down, across), value in np.ndenumerate(grid):
        if np.isfinite(value):
            weight = "bold" if (rows[down], columns[across]) in certain else "normal"
            colour = "white" if abs(value) > 0.7 * limit else "black"
            words = f"{value:+.1f}".replace("-", "−")
            axes.text(across, down, words, ha="center", va="center", fontsize=6, weight=weight, color=colour)
    names = [", ".join(map(text, column)) for column in columns]
    axes.set_xticks(range(len(columns)), names, rotation=60, ha="right", fontsize=7)
    axes.set_yticks(range(len(rows)), rows, fontsize=7)
    axes.figure.colorbar(image, ax=axes, extend="both", shrink=0.8)
