"""Heat maps of gains, and what a search found along the settings that it drew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from raysim.reporting.contents import ReportContents
from raysim.reporting.panels import grid, legend
from raysim.reporting.published import is_same, number
from raysim.reporting.runs import ReportedRun
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


#: Fewest values of a label that was drawn from a range, and the span from which its axis is logarithmic.
VALUES, SPAN = 5, 20


def space(report: ReportContents) -> Iterator[Figure]:
    """A panel for each ignored label of many numbers and, where there are two of them, one with both and the metric as colour."""
    drawn = [name for name in report.group.ignore if _is_drawn(report.finished, name)]
    if not drawn:
        return
    figure, panels = grid(len(drawn) + (len(drawn) > 1), width=4.0, height=3.0)
    rows = {
        row: [run for run in report.finished if text(run.labels.get(report.group.rows)) == row] for row in report.styles
    }
    for axes, name in zip(panels, drawn, strict=False):
        for row, runs in rows.items():
            points = [
                (x, y)
                for run in runs
                if (x := number(run.labels.get(name))) is not None and (y := report.measure.score(run)) is not None
            ]
            if points:
                style = report.styles[row]
                places, scores = zip(*points, strict=True)
                axes.scatter(places, scores, s=14, color=style.colour, marker=style.marker, label=row, alpha=0.8)
            elif levels := [y for run in runs if (y := report.measure.score(run)) is not None]:
                axes.axhline(
                    sum(levels) / len(levels), color=report.styles[row].colour, linestyle="--", label=f"{row}, mean"
                )
        _scale(axes, report.finished, name, "x")
        axes.set_ylabel(report.measure.axis)
    if len(drawn) > 1:
        _both(panels[-1], report, drawn[0], drawn[1])
    legend(figure, panels)
    yield figure


def _both(axes: Axes, report: ReportContents, across: str, up: str) -> None:
    """The first two labels as a plane: a dot a run, coloured by the metric; a cross is a run that failed."""

    def places(runs: Sequence[ReportedRun]) -> list[tuple[float, float, ReportedRun]]:
        pairs = [(number(run.labels.get(across)), number(run.labels.get(up)), run) for run in runs]
        return [(x, y, run) for x, y, run in pairs if x is not None and y is not None]

    done = [(x, y, score) for x, y, run in places(report.finished) if (score := report.measure.score(run)) is not None]
    x, y, scores = zip(*done, strict=True)
    dots = axes.scatter(x, y, c=scores, s=24, cmap="viridis")
    axes.figure.colorbar(dots, ax=axes, label=report.measure.axis)
    if lost := places([run for run in report.runs if not run.is_finished]):
        axes.scatter(
            [x for x, _, _ in lost], [y for _, y, _ in lost], marker="x", s=24, color="#d62728", label="not finished"
        )
    _scale(axes, report.finished, across, "x")
    _scale(axes, report.finished, up, "y")


def _is_drawn(runs: Sequence[ReportedRun], name: str) -> bool:
    values = {run.labels[name] for run in runs if name in run.labels}
    return len(values) >= VALUES and all(number(value) is not None for value in values)


def _scale(axes: Axes, runs: Sequence[ReportedRun], name: str, axis: str) -> None:
    values = [value for run in runs if (value := number(run.labels.get(name))) is not None]
    if min(values) > 0 and max(values) / min(values) > SPAN:
        (axes.set_xscale if axis == "x" else axes.set_yscale)("log")
    (axes.set_xlabel if axis == "x" else axes.set_ylabel)(name)
