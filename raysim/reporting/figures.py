"""Figures of the numbers in the tables: bars, and lines along a number; listed in `raysim.reporting.drawing`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from operator import itemgetter
from typing import Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from raysim.base.texts import literal, number
from raysim.folders.run_folder import RunFolder
from raysim.reporting.contents import ReportContents
from raysim.reporting.measure import recorded
from raysim.reporting.panels import (
    COLOURS,
    DASHES,
    Style,
    Styles,
    band,
    legend,
    pages,
    panel_grid,
    rounds_below,
    scale_decreasing,
    styles_of,
    wrap,
    zoom,
)
from raysim.reporting.published import Label, canonical
from raysim.reporting.tables import Cell, Column, Table, all_rows, heading, label_text, text

#: Name below a group of bars -> row -> cell.
Groups = Mapping[str, Mapping[str, Cell]]

#: Share of a group's width that its bars fill.
BARS = 0.84


def numeric_label(tables: Sequence[Table]) -> str | None:
    """Return the first column label whose values are all numbers or missing, with two or more in some table."""
    for place, name in enumerate(tables[0].names):
        values = [{column[place] for column in table.columns} - {None} for table in tables]
        numbers = [number(value) for value in set.union(*values)]
        if all(value is not None and math.isfinite(value) for value in numbers) and max(map(len, values)) > 1:
            return name
    return None


#: Letters per inch in the name of a tick, and largest number of groups of bars in a figure.
LETTERS, MOST_GROUPS = 13, 60


def bars(report: ReportContents) -> Iterator[Figure]:
    """Means; error bars are the standard deviation, a diamond is the published mean.

    One group of bars per column of a single table; of several tables, per column at the smallest alpha (without alpha,
    of the first numeric column label).

    Missing: no table holds a number, or there are more than 60 columns.
    """
    tables, title = report.tables, report.tables[0].title
    groups = _by_column(tables[0])
    if len(tables) > 1:
        name = "alpha" if "alpha" in tables[0].names else numeric_label(tables) or ""
        chosen = [(table, labels) for table in tables for labels in _at_smallest(table, name)]
        smallest = {labels.get(name) for _, labels in chosen}
        is_one = len(smallest) == 1  # then only the title shows it
        title, groups = f"{name} = {text(next(iter(smallest)))}" if is_one and name else "", {}
        for table, labels in chosen:
            rest: dict[str, Label] = {key: text(value) for key, value in labels.items() if not (is_one and key == name)}
            groups[label_text({**table.labels, **rest})] = table.column_cells(tuple(labels.values()))
    if len(groups) > MOST_GROUPS:
        return
    yield bar_figure(groups, report.styles, all_rows(tables), title=title, axis=report.axis)


def _at_smallest(table: Table, name: str) -> list[dict[str, Label | None]]:
    """Return the labels of the columns where a label has its smallest number; of all columns if none has a number."""
    columns = [dict(zip(table.names, column, strict=True)) for column in table.columns]
    numbers = [value for labels in columns if (value := number(labels.get(name))) is not None]
    return [labels for labels in columns if not numbers or number(labels.get(name)) == min(numbers)]


def _by_column(table: Table) -> dict[str, dict[str, Cell]]:
    """Return name of a column -> row -> cell."""
    return {heading(table.names, column, table.metric.quantity): table.column_cells(column) for column in table.columns}


def bar_figure(groups: Groups, styles: Styles, order: Sequence[str], *, title: str, axis: str) -> Figure:
    """Draw groups of bars side by side; the axis is cut if starting at zero would hide the differences."""
    rows = [row for row in order if any(row in group for group in groups.values())]
    width = min(14.0, max(4.6, 1.0 + len(groups) * (0.45 + 0.24 * len(rows))))
    figure, (axes,) = panel_grid(1, width=width, height=3.2)
    grouped_bars(axes, groups, rows, styles, edge=0.4, cap=min(2.5, 20 * BARS / len(rows)))
    cells = [cell for group in groups.values() for cell in group.values()]
    ends = [cell.mean + sign * (cell.std or 0.0) for cell in cells for sign in (-1, 1)]
    ends += [c.published.value for c in cells if c.n and c.published and c.published.value is not None]
    zoom(axes, min(ends), max(ends), name=axis)
    letters = min(18, int(LETTERS * width / max(1, len(groups))))
    names = ["\n".join(wrap(part, letters) for part in name.split(" / ")) for name in groups]
    axes.set_xticks(range(len(groups)), names)
    axes.set_xlim(-0.55, len(groups) - 0.45)
    axes.set_title(literal(title))
    legend(figure, [axes])
    return figure


def grouped_bars(axes: Axes, groups: Groups, rows: Sequence[str], styles: Styles, *, edge: float, cap: float) -> None:
    """Draw a group of bars at each index, with error bars for known deviations; a diamond is the published mean.

    Args:
      edge: width of the line around a bar. cap: size of the caps of error bars.
    """
    step = BARS / len(rows)
    for index, row in enumerate(rows):
        offset, style = (index - (len(rows) - 1) / 2) * step, styles[row]
        places = {at + offset: group[row] for at, group in enumerate(groups.values()) if row in group}
        x, cells = list(places), list(places.values())
        means = [cell.mean for cell in cells]
        stds = [math.nan if cell.std is None else cell.std for cell in cells]
        axes.bar(x, means, step * 0.92, label=row, color=style.colour, hatch=style.hatch, edgecolor="white", lw=edge)
        axes.errorbar(x, means, stds, fmt="none", ecolor="#777777", elinewidth=1.0, capsize=cap)
        for at, cell in places.items():
            if cell.n and cell.published and cell.published.value is not None:
                value = cell.published.value
                axes.plot(at, value, "D", markersize=4, color="white", markeredgecolor="black", label="published")


def ranks(report: ReportContents) -> Iterator[Figure]:
    """Means, the best on top; error bars are the standard deviation, the line is the baseline.

    A panel for each column of a table.

    Missing: no table holds a number.
    """
    for table in report.tables:
        groups = {name: group for name, group in _by_column(table).items() if group}
        if not groups:
            continue
        figure, panels = panel_grid(len(groups), across=3, width=4.2, height=0.8 + 0.2 * max(map(len, groups.values())))
        rounded = "{:.1f}" if table.metric.is_share else "{:#.3g}"
        for axes, (name, group) in zip(panels, groups.items(), strict=True):
            rows = sorted(group, key=lambda row: group[row].mean, reverse=report.measure.mode == "min")
            means, stds = [group[row].mean for row in rows], [group[row].std or 0.0 for row in rows]
            colours = [COLOURS[1] if row == report.baseline else COLOURS[0] for row in rows]
            drawn = [std or math.nan for std in stds]
            axes.barh(range(len(rows)), means, 0.8, xerr=drawn, color=colours, ecolor="#777777")
            for place, (mean, std) in enumerate(zip(means, stds, strict=True)):
                number = axes.annotate(rounded.format(mean), (mean + std, place), (3, 0), textcoords="offset points")
                number.set(va="center", fontsize=7)
                number.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.4})  # over the line
            if report.baseline in group:
                axes.axvline(group[report.baseline].mean, color=COLOURS[1], linewidth=0.8)
            axes.set_yticks(range(len(rows)), list(map(literal, rows)), fontsize=8)
            axes.margins(x=0.12, y=0.01)  # room for the numbers
            axes.grid(visible=False, axis="y")
            axes.set_xlabel(report.measure.axis)
            axes.set_title(literal(name))
        figure.suptitle(literal(table.title))
        yield figure


def lines(report: ReportContents) -> Iterator[Figure]:
    """The metric as heterogeneity grows from left to right; shaded: standard deviation.

    A panel for each table.

    Missing: no column label has two numbers or more.
    """
    if name := numeric_label(report.tables):
        yield along(report, name, xlabel=name)


def along(
    report: ReportContents, name: str, *, xlabel: str, width: float = 3.1, height: float = 2.5, has_levels: bool = False
) -> Figure:
    """Draw a panel per table, with a line per row and combination of the column labels other than `name`.

    Args:
      has_levels: whether rows without the label `name` are drawn as horizontal lines.
    """
    figure, panels = panel_grid(len(report.tables), width=width, height=height)
    for axes, table in zip(panels, report.tables, strict=True):
        ticks: set[float] = set()
        others = tuple(other for other in table.names if other != name)
        for row in table.rows:
            style, series = report.styles[row], _series(table, row, name)
            for index, (rest, points) in enumerate(series.items()):
                dash = style.dash if len(series) == 1 else DASHES[index % len(DASHES)]
                label = f"{row}, {heading(others, rest)}" if others else row
                ticks |= _line(axes, points, replace(style, dash=dash), label=label)
            for cell in table.row_cells(row).values() if has_levels and not series else ():
                axes.axhline(cell.mean, color=style.colour, linewidth=style.width, linestyle="--", label=row)
                if cell.std is not None:
                    low, high = cell.mean - cell.std, cell.mean + cell.std
                    axes.axhspan(low, high, color=style.colour, alpha=0.15, linewidth=0)
        if ticks:
            scale_decreasing(axes, list(ticks))
        axes.set(title=wrap(table.title), xlabel=xlabel, ylabel=table.metric.axis)
    legend(figure, panels)
    return figure


def _series(table: Table, row: str, name: str) -> dict[Column, list[tuple[float, Cell]]]:
    """Return a row's points along a numeric label, ascending, for each combination of the other column labels."""
    place = table.names.index(name)
    series: dict[Column, list[tuple[float, Cell]]] = {}
    for column, cell in table.row_cells(row).items():
        x = number(column[place])
        if x is not None:
            series.setdefault(column[:place] + column[place + 1 :], []).append((x, cell))
    return {rest: sorted(points, key=itemgetter(0)) for rest, points in series.items()}


def _line(
    axes: Axes, points: Sequence[tuple[float, Cell]], style: Style, *, label: str, shade: str = "", size: float = 4
) -> set[float]:
    """Draw a line with a band; return the positions of its points.

    Args:
      shade: colour of the band, by default the colour of the line. size: size of the markers.
    """
    x, cells = zip(*points, strict=True)
    means, is_strong = [cell.mean for cell in cells], style.width > 2
    (line,) = axes.plot(x, means, style.dash, color=style.colour, marker=style.marker, label=label)
    line.set(markersize=size, linewidth=style.width, zorder=3 + is_strong)
    band(axes, x, means, [cell.std for cell in cells], shade or style.colour)
    return set(x)


def integration(report: ReportContents) -> Iterator[Figure]:
    """Base methods dashed, with the addition solid; shaded: standard deviation (grey: base method).

    A panel for each table and pair of rows.

    Missing: no column label has two numbers, or no row is another one with an addition, such as FedProx + FedVG and
    FedProx.
    """
    tables, name = report.tables, numeric_label(report.tables)
    names = {row: canonical(row) for row in all_rows(tables)}
    pairs = [(base, joint) for base in names for joint in names if names[joint].startswith(f"{names[base]}+")]
    if name is None or not pairs:
        return
    styles = styles_of([joint for _, joint in pairs])
    figure, panels = panel_grid(len(tables) * len(pairs), across=len(pairs), width=2.2, height=2.0)
    for axes, (table, (base, joint)) in zip(panels, product(tables, pairs), strict=True):
        solid, ticks = replace(styles[joint], dash="-", width=1.5), set()
        for row, style, shade in ((base, replace(solid, dash="--"), "#555555"), (joint, solid, solid.colour)):
            for points in _series(table, row, name).values():
                ticks |= _line(axes, points, style, label=row, shade=shade, size=3.5)
        if ticks:
            scale_decreasing(axes, list(ticks))
            axes.tick_params(axis="x", labelrotation=90)
            axes.set_xlabel(name)
        else:
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
        axes.set_title(base if table is tables[0] else "")
        is_first = (base, joint) == pairs[0]
        axes.set_ylabel(wrap(f"{table.title}{' (%)' * table.metric.is_share}", 20) if is_first else "")
    legend(figure, panels, across=len(pairs) if len(pairs) > 1 else 2)
    yield figure


#: Label of a line -> [rounds, seeds], or [times, seeds].
Lines = Mapping[str, pd.DataFrame]


def curves(report: ReportContents) -> Iterator[Figure]:
    """By round, on the test set; shaded: standard deviation over seeds.

    The metric's column of progress.csv, for keys of summary.json the main metric on the test set: a figure for each table, a
    panel for each column.

    Missing: no run recorded the metric by round.
    """
    return _curves(report, lambda cell: rounds_of(cell, cell.metric.column, cell.metric.scale))


def time_curves(report: ReportContents) -> Iterator[Figure]:
    """As curves, over simulated time in hours; each seed is interpolated between its evaluations.

    Missing: no run has simulated time, or none recorded the metric by round.
    """
    return _curves(report, _over_time, xlabel="simulated time (h)")


def _curves(report: ReportContents, measure: Callable[[Cell], pd.DataFrame], *, xlabel: str = "") -> Iterator[Figure]:
    """Yield the figures of each table, with a panel per column and a line per row."""
    for table in report.tables:
        for panels in column_pages(table, measure):
            figure = line_figure(table.title, panels, report.styles, ylabel=table.metric.axis, xlabel=xlabel)
            for axes in figure.axes:
                axes.title.set_fontsize("large")
            yield figure


def _over_time(cell: Cell) -> pd.DataFrame:
    """Return [times in hours, seeds]: a cell's metric, from its seeds' latest first to earliest last evaluation."""
    seeds: dict[Label, list[tuple[float, float]]] = {}
    for seed, folder in cell.folders.items():
        times, values = recorded(folder, "time/simulated_s"), recorded(folder, cell.metric.column)
        seeds[seed] = [(times[index] / 3600, cell.metric.scale * values[index]) for index in values if index in times]
    if not seeds or not all(seeds.values()):
        return pd.DataFrame()
    start, end = max(points[0][0] for points in seeds.values()), min(points[-1][0] for points in seeds.values())
    grid = np.linspace(start, max(start, end), 200)
    return pd.DataFrame({seed: np.interp(grid, *np.transpose(points)) for seed, points in seeds.items()}, index=grid)


def rounds_of(cell: Cell, name: str, scale: float = 1.0, *, join: Literal["inner", "outer"] = "inner") -> pd.DataFrame:
    """Return [rounds counted from 1, seeds]: a column of progress.csv in the rounds that every seed recorded.

    With `join="outer"`, in the rounds that any seed recorded.
    """
    seeds = {}
    for seed, folder in cell.folders.items():
        values = recorded(folder, name).items()
        seeds[seed] = pd.Series({index + 1: scale * value for index, value in values}, dtype=float)
    return pd.concat(seeds, axis=1, join=join).sort_index() if seeds else pd.DataFrame()


def cell_lines(table: Table, measure: Callable[..., pd.DataFrame], *options: object) -> dict[Column, Lines]:
    """Return column -> row -> measure(cell, *options), without empty frames."""
    lines: dict[Column, Lines] = {}
    for column in table.columns:
        frames = {row: measure(cell, *options) for row, cell in table.column_cells(column).items()}
        lines[column] = {row: frame for row, frame in frames.items() if not frame.empty}
    return {column: frames for column, frames in lines.items() if frames}


def column_pages(table: Table, measure: Callable[[Cell], pd.DataFrame]) -> Iterator[list[tuple[str, Lines]]]:
    """Yield the panels of each figure: (title of a column, lines of the column); see `cell_lines`."""
    return pages((column_title(table, column), lines) for column, lines in cell_lines(table, measure).items())


def column_title(table: Table, column: Column) -> str:
    return wrap(heading(table.names, column)) if table.names else ""


def line_figure(
    title: str,
    panels: Sequence[tuple[str, Lines]],
    styles: Styles,
    *,
    ylabel: str = "",
    xlabel: str = "",
    width: float = 3.1,
    across: int = 4,
) -> Figure:
    """Draw a panel for each (title, lines): the mean over seeds, and a band for the standard deviation.

    Args:
      xlabel: label of the horizontal axis; "round" if empty.
    """
    figure, all_axes = panel_grid(len(panels), across=across, width=width)
    for axes, (name, lines) in zip(all_axes, panels, strict=True):
        for label, frame in lines.items():
            # Where a seed diverged, the line has a gap instead of the mean of the other seeds.
            mean, std = frame.mean(axis=1, skipna=False), frame.std(axis=1, skipna=False)
            style = styles[label]
            marker = style.marker if len(mean) == 1 else ""
            (line,) = axes.plot(mean.index, mean, style.dash, marker=marker, color=style.colour, label=label)
            line.set_linewidth(style.width)
            band(axes, mean.index, mean, std, style.colour)
        axes.set_title(name, fontsize=9)
        axes.set_ylabel(ylabel)
        axes.set_xlabel(xlabel) if xlabel else rounds_below(axes)
    figure.suptitle(literal(title), fontsize=10)
    legend(figure, all_axes)
    return figure


def named_runs(tables: Sequence[Table]) -> Iterator[tuple[str, RunFolder]]:
    """Yield (name, run) for the first seed of every cell; a name omits a single table, a single row, missing labels."""
    for table in tables:
        for row, column in product(table.rows, table.columns):
            cell = table.cells.get((row, column))
            if cell is not None and cell.folders:
                parts = [table.title] * (len(tables) > 1) + [row] * (len(table.rows) > 1)
                parts += [heading(table.names, column)] * bool(table.names)
                yield ", ".join(parts) or row, RunFolder(next(iter(cell.folders.values())))
