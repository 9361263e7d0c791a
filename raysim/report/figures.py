"""Figures of accuracies: each function takes tables and returns a matplotlib Figure.

bars: FedVG, figure 1. lines: figures 3, 4, A.4. integration: figure 5. imbalance: figure 7. strategies: figure 9.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from raysim.report.panels import (
    DASHES,
    NothingToDraw,
    Style,
    band,
    grid,
    legend,
    scale_decreasing,
    styles_of,
    wrap,
    zoom,
)
from raysim.report.published import Label, canonical, number
from raysim.report.tables import Cell, Column, Table, all_rows, describe, heading, text

Styles = Mapping[str, Style]
Groups = dict[str, dict[str, Cell]]
T = TypeVar("T")


def numeric_label(tables: Sequence[Table]) -> str | None:
    """The first column label of which some table has two or more values, all of them numbers (or missing)."""
    for position, name in enumerate(tables[0].names if tables else ()):
        values = [{column[position] for column in table.columns} - {None} for table in tables]
        if all(number(v) is not None for found in values for v in found) and any(len(found) > 1 for found in values):
            return name
    return None


def bars(tables: Sequence[Table], styles: Styles) -> Figure:
    """Mean and deviation of every row: in each column of one table, or of several tables at the smallest alpha.

    A diamond is the published mean.
    """
    groups: Groups = {}
    if len(tables) == 1:
        (table,) = tables
        for column in table.columns:
            groups[heading(table.names, column)] = _rows_at(table, column)
        return _bars(groups, styles, all_rows(tables), title=table.title, axis=table.metric.axis)
    name = "alpha" if any("alpha" in table.names for table in tables) else numeric_label(tables)
    for table in tables:
        for column in _smallest(table, name):
            rest = [(n, v) for n, v in zip(table.names, column, strict=True) if n != name]
            groups[describe({**table.labels, **{n: text(v) for n, v in rest}})] = _rows_at(table, column)
    at = _at_smallest(tables, name)
    return _bars(groups, styles, all_rows(tables), title=at, axis=tables[0].metric.axis)


def _rows_at(table: Table, column: Column) -> dict[str, Cell]:
    return {row: table.cells[row, column] for row in table.rows if (row, column) in table.cells}


def _smallest(table: Table, name: str | None) -> list[Column]:
    """The columns with the smallest value of a label; all if there is no such label."""
    if name is None or name not in table.names:
        return list(table.columns)
    place = table.names.index(name)
    values = [number(column[place]) for column in table.columns]
    known = [value for value in values if value is not None]
    return [c for c, value in zip(table.columns, values, strict=True) if not known or value == min(known)]


def _at_smallest(tables: Sequence[Table], name: str | None) -> str:
    if name is None:
        return ""
    values = {
        text(c[table.names.index(name)]) for table in tables if name in table.names for c in _smallest(table, name)
    }
    return f"{name} = {', '.join(sorted(values))}"


def _bars(groups: Groups, styles: Styles, order: Sequence[str], *, title: str, axis: str) -> Figure:
    """Bars side by side in each group, with deviations and published means."""
    rows = [row for row in order if any(row in group for group in groups.values())]
    width = min(14.0, max(4.6, 1.0 + len(groups) * (0.45 + 0.24 * len(rows))))
    figure, (axes,) = grid(1, width=width, height=3.2)
    step = 0.84 / max(1, len(rows))
    lows, highs = [], []
    for place, row in enumerate(rows):
        found = [(index, group[row]) for index, group in enumerate(groups.values()) if row in group]
        x = [index + (place - (len(rows) - 1) / 2) * step for index, _ in found]
        means, stds = [cell.mean for _, cell in found], [cell.std or 0.0 for _, cell in found]
        colour, hatch = styles[row].colour, styles[row].hatch
        axes.bar(x, means, step * 0.92, label=row, color=colour, hatch=hatch, edgecolor="white", linewidth=0.4)
        axes.errorbar(x, means, stds, fmt="none", ecolor="#777777", elinewidth=1.0, capsize=min(2.5, 20 * step))
        lows += [m - s for m, s in zip(means, stds, strict=True)]
        highs += [m + s for m, s in zip(means, stds, strict=True)]
        theirs = [(at, c.published.value) for at, (_, c) in zip(x, found, strict=True) if c.n and c.published]
        for at, value in theirs:
            if value is not None:
                axes.plot(at, value, "D", markersize=4, color="white", markeredgecolor="black", label="published")
                lows.append(value)
                highs.append(value)
    if not highs:
        raise NothingToDraw("no table holds a number")
    zoom(axes, min(lows), max(highs), name=axis)
    names = ["\n".join(wrap(part, 18) for part in name.split(" / ")) for name in groups]
    axes.set_xticks(range(len(groups)), names)
    axes.set_xlim(-0.55, len(groups) - 0.45)
    axes.set_title(title)
    legend(figure, [axes])
    return figure


def lines(tables: Sequence[Table], styles: Styles) -> Figure:
    """Accuracy as a number decreases (alpha), one panel a table, the deviation shaded."""
    name = numeric_label(tables)
    if name is None:
        raise NothingToDraw("no column label has two numbers or more")
    figure, panels = grid(len(tables))
    for axes, table in zip(panels, tables, strict=True):
        _lines(axes, table, name, styles)
        axes.set(title=wrap(table.title), xlabel=name)
        axes.set_ylabel(table.metric.axis)
    legend(figure, panels)
    return figure


def _lines(axes: Axes, table: Table, name: str, styles: Styles, *, has_levels: bool = False) -> None:
    """A line for each row and each combination of the other column labels; a cell without the label may be a level."""
    others = _without(table.names, table.names.index(name))
    ticks: set[float] = set()
    for row in table.rows:
        style = styles[row]
        series = _series(table, row, name)
        for index, (rest, points) in enumerate(series.items()):
            look: dict[str, Any] = {"color": style.colour, "marker": style.marker, "markersize": 4}
            look |= {"linewidth": style.width, "zorder": 3 + (style.width > 2)}
            dash = style.dash if len(series) == 1 else DASHES[index % len(DASHES)]
            label = f"{row}, {heading(others, rest)}" if others else row
            ticks |= _line(axes, points, style.colour, linestyle=dash, label=label, **look)
        cells = [c for column, c in _cells(table, row) if number(column[table.names.index(name)]) is None]
        for cell in cells if has_levels and not series else ():
            axes.axhline(cell.mean, color=style.colour, linewidth=style.width, linestyle="--", label=row)
            if cell.std is not None:
                axes.axhspan(cell.mean - cell.std, cell.mean + cell.std, color=style.colour, alpha=0.15, linewidth=0)
    if ticks:
        scale_decreasing(axes, sorted(ticks))


def _line(axes: Axes, points: Sequence[tuple[float, Cell]], shade: str, **look: Any) -> set[float]:
    """A line with its band; returns where it has points."""
    x, cells = [point[0] for point in points], [point[1] for point in points]
    axes.plot(x, [cell.mean for cell in cells], **look)
    band(axes, x, [cell.mean for cell in cells], [cell.std for cell in cells], shade)
    return set(x)


def _cells(table: Table, row: str) -> list[tuple[Column, Cell]]:
    return [(column, table.cells[row, column]) for column in table.columns if (row, column) in table.cells]


def _series(table: Table, row: str, name: str) -> dict[Column, list[tuple[float, Cell]]]:
    """The points of a row along a numeric label, for each combination of the other column labels."""
    place = table.names.index(name)
    series: dict[Column, list[tuple[float, Cell]]] = {}
    for column, cell in _cells(table, row):
        x = number(column[place])
        if x is not None:
            series.setdefault(_without(column, place), []).append((x, cell))
    return {rest: sorted(points, key=lambda point: point[0]) for rest, points in series.items()}


def _without(values: tuple[T, ...], place: int) -> tuple[T, ...]:
    return values[:place] + values[place + 1 :]


def integration(tables: Sequence[Table]) -> Figure:
    """Base methods dashed, the same with an addition ("FedProx" and "FedProx + FedVG") solid, in the same colour.

    One panel for each table and pair; the base method's deviation is grey.
    """
    name = numeric_label(tables)
    if name is None:
        raise NothingToDraw("no column label has two numbers or more")
    pairs = _pairs(all_rows(tables))
    if not pairs:
        raise NothingToDraw("no row is another row with an addition, such as FedProx + FedVG beside FedProx")
    styles = styles_of([joint for _, joint in pairs])
    figure, panels = grid(len(tables) * len(pairs), across=len(pairs), width=2.2, height=2.0)
    for index, axes in enumerate(panels):
        line, place = divmod(index, len(pairs))
        table, (base, joint) = tables[line], pairs[place]
        style, ticks = styles[joint], set()
        for row, dash, shade in ((base, "--", "#555555"), (joint, "-", style.colour)):
            look: dict[str, Any] = {"color": style.colour, "marker": style.marker, "markersize": 3.5, "linestyle": dash}
            for points in _series(table, row, name).values() if row in table.rows else ():
                ticks |= _line(axes, points, shade, label=row, **look)
        if ticks:
            scale_decreasing(axes, sorted(ticks))
            axes.tick_params(axis="x", labelrotation=90)
            axes.set_xlabel(name)
        else:
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
        axes.set_title(base if line == 0 else "")
        axes.set_ylabel(wrap(f"{table.title}{' (%)' * table.metric.is_share}", 20) if place == 0 else "")
    legend(figure, panels, across=len(pairs) if len(pairs) > 1 else 2)
    return figure


def _pairs(rows: Sequence[str]) -> list[tuple[str, str]]:
    """(base, base + something) for every row that has both."""
    names = {row: canonical(row) for row in rows}
    return [(base, joint) for base in rows for joint in rows if names[joint].startswith(f"{names[base]}+")]


def imbalance(tables: Sequence[Table], styles: Styles) -> Figure:
    """Accuracy as the class imbalance ratio rho of the validation set decreases; a row without rho is a level line."""
    have = [table for table in tables if any(name.split(".")[-1] in ("rho", "imbalance") for name in table.names)]
    if not have:
        raise NothingToDraw("no column label rho")
    figure, panels = grid(len(have), width=3.6, height=2.8)
    for axes, table in zip(panels, have, strict=True):
        name = next(name for name in table.names if name.split(".")[-1] in ("rho", "imbalance"))
        _lines(axes, table, name, styles, has_levels=True)
        axes.set(title=wrap(table.title), xlabel=f"class imbalance ratio {name}")
        axes.set_ylabel(table.metric.axis)
    legend(figure, panels)
    return figure


def strategies(tables: Sequence[Table]) -> Figure:
    """Bars of the label `granularity` for each data set and model, at the smallest alpha."""
    cells = [cell for table in tables for cell in table.cells.values() if "granularity" in cell.labels]
    if not cells:
        raise NothingToDraw("no run has a label granularity")
    alphas = [value for cell in cells if (value := number(cell.labels.get("alpha"))) is not None]
    kept = [cell for cell in cells if not alphas or number(cell.labels.get("alpha")) == min(alphas)]
    groups: Groups = {}
    for cell in kept:
        rest: dict[str, Label] = {k: v for k, v in cell.labels.items() if k not in ("granularity", "alpha", "method")}
        groups.setdefault(describe(rest), {})[text(cell.labels["granularity"])] = cell
    coarse_first = ("model", "layer", "block")
    found = dict.fromkeys(row for group in groups.values() for row in group)
    rows = sorted(found, key=lambda row: [not canonical(row).startswith(name) for name in coarse_first])
    title = f"alpha = {min(alphas):g}" if alphas else ""
    return _bars(groups, styles_of(rows), rows, title=title, axis=tables[0].metric.axis)
