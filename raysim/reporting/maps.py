"""Heat maps of gains, and plots of a search along the drawn settings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from raysim.base.texts import literal, number
from raysim.reporting.contents import ReportContents
from raysim.reporting.measure import ReportMetric
from raysim.reporting.panels import legend, panel_grid
from raysim.reporting.published import is_same
from raysim.reporting.runs import ReportedRun
from raysim.reporting.significance import Effect, effect_of
from raysim.reporting.tables import Column, Place, Table, paired, text

#: Width and height of a cell, and width of the names beside the cells, in inches.
CELL, NAMES = (0.52, 0.3), 1.7


def pair_map(report: ReportContents) -> Iterator[Figure]:
    """Left: mean gain of each pair over the one of the baseline, by seed; bold: its 95 % interval leaves out 0. Right: what
    that gain is beyond the sum of the gains that row and column have alone. Grey: no run.

    Missing: it needs report.baseline, report.gain as label=value, and that label as the only column label.
    """
    for table in report.tables:
        base = base_of(table, report.baseline, report.group.gain)
        if base is not None and len(gains := gains_over(table, base)) > 1:
            yield _figure(table, base, gains)


def gains(report: ReportContents) -> Iterator[Figure]:
    """Mean gain of each row over the baseline in the same column, by seed: blue is better, red worse. Bold: its 95 % interval
    leaves out 0.

    Missing: it needs report.baseline and two columns or more.
    """
    for table in report.tables:
        over = gains_over(table, report.baseline) if report.baseline is not None else {}
        effects = {place: gain for place, gain in over.items() if place[0] != report.baseline}
        if len(table.columns) < 2 or not effects:
            continue
        rows = [row for row in table.rows if any(place[0] == row for place in effects)]
        columns = [column for column in table.columns if any(place[1] == column for place in effects)]
        size = CELL[0] * len(columns) + NAMES + 0.8, CELL[1] * len(rows) + 1.6
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        _heat(axes, rows, columns, effects, table.metric)
        axes.set_xlabel(", ".join(table.names), fontsize=8)
        axes.set_title(literal(f"{table.title}: {_called(table.metric)} {report.baseline}"), fontsize=9)
        yield figure


def base_of(table: Table, baseline: str | None, gain: str | None) -> Place | None:
    """Return the place that gains refer to: the baseline's row, and the column of `gain` ("label=value"); or None."""
    label, is_label, value = (gain or "").partition("=")
    if baseline is None or not is_label or table.names != (label,):
        return None
    column = next((column for column in table.columns if is_same(column[0], value)), None)
    return None if column is None or (baseline, column) not in table.cells else (baseline, column)


def gains_over(table: Table, base: Place | str) -> dict[Place, Effect]:
    """Return place -> paired difference to the base runs with the same seeds; places without a pair are left out.

    Args:
      base: a place, or a row, whose cell in the same column is the base.
    """
    effects = {}
    for (row, column), cell in table.cells.items():
        zero = table.cells.get(base if isinstance(base, tuple) else (base, column))
        if zero is not None and (scores := paired(cell, zero))[0]:
            effects[row, column] = effect_of(*scores)
    return effects


def beyond_parts(gains: Mapping[Place, Effect], base: Place) -> dict[Place, float]:
    """Return place -> gain beyond the sum of the row's and the column's gain; positive for a synergy.

    Only for places outside the base's row and column; the row's and the column's part must also have run alone.
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
    _heat(left, table.rows, columns, gains, table.metric)
    left.set_title(literal(f"{_called(table.metric)} {named}"), fontsize=9)
    beyond = {place: Effect(gain, None, None, None, 1) for place, gain in beyond_parts(gains, base).items()}
    _heat(right, table.rows, columns, beyond, table.metric)
    right.set_title("gain beyond the sum of both parts' own", fontsize=9)
    figure.suptitle(table.title, fontsize=9)
    return figure


def _called(metric: ReportMetric) -> str:
    """Return the beginning of a title: "gain in accuracy (%) over"; "difference in loss to" if lower is better."""
    return f"gain in {metric.axis} over" if metric.mode == "max" else f"difference in {metric.axis} to"


def _heat(
    axes: Axes, rows: Sequence[str], columns: Sequence[Column], gains: Mapping[Place, Effect], metric: ReportMetric
) -> None:
    """Draw cells with numbers: blue is better, red worse, grey missing; bold if the effect is certain."""
    values = {place: effect.mean for place, effect in gains.items()}
    grid = np.array([[values.get((row, column), np.nan) for column in columns] for row in rows])
    magnitudes = np.abs(grid[np.isfinite(grid)])
    # The largest 10 % are clipped: one diverged run would otherwise leave the other cells without colour.
    limit = max(float(np.quantile(magnitudes, 0.9)), 1e-9) if magnitudes.size else 1.0
    axes.set_facecolor("#dddddd")
    rounded = "{:+.1f}" if metric.is_share else "{:+.2g}"
    cmap = "RdBu" if metric.mode == "max" else "RdBu_r"
    image = axes.imshow(grid, cmap=cmap, vmin=-limit, vmax=limit, aspect="auto")
    for (down, across), value in np.ndenumerate(grid):
        if np.isfinite(value):
            weight = "bold" if gains[rows[down], columns[across]].is_certain else "normal"
            colour = "white" if abs(value) > 0.7 * limit else "black"
            words = rounded.format(value).replace("-", "−")
            axes.text(across, down, words, ha="center", va="center", fontsize=6, weight=weight, color=colour)
    names = [literal(", ".join(map(text, column))) for column in columns]
    axes.set_xticks(range(len(columns)), names, rotation=60, ha="right", fontsize=7)
    axes.set_yticks(range(len(rows)), list(map(literal, rows)), fontsize=7)
    axes.figure.colorbar(image, ax=axes, extend="both", shrink=0.8)


#: Smallest number of values of a label drawn from a range, and ratio of values above which its axis is logarithmic.
VALUES, SPAN = 5, 20


def space(report: ReportContents) -> Iterator[Figure]:
    """Every run along the settings that were drawn from ranges; a cross is a run that did not finish.

    A panel for each label, and one with both as a plane where there are two.

    Missing: no label in report.ignore has five numbers or more.
    """
    drawn = [name for name in report.group.ignore if _is_drawn(report.finished, name)]
    if not drawn:
        return
    scored_runs = [(run, report.measure.score(run)) for run in report.finished]
    scores = [(run, score) for run, score in scored_runs if score is not None and math.isfinite(score)]
    is_plane = len(drawn) > 1 and any(all(name in run.labels for name in drawn[:2]) for run, _ in scores)
    figure, panels = panel_grid(len(drawn) + is_plane, width=4.0, height=3.0)
    for axes, name in zip(panels, drawn, strict=False):
        for row, style in report.styles.items():
            row_scores = [(run, score) for run, score in scores if text(run.labels.get(report.group.rows)) == row]
            points = [(x, score) for run, score in row_scores if (x := number(run.labels.get(name))) is not None]
            if points:
                places, values = zip(*points, strict=True)
                axes.scatter(places, values, s=14, color=style.colour, marker=style.marker, label=row, alpha=0.8)
            elif row_scores:
                mean = sum(score for _, score in row_scores) / len(row_scores)
                axes.axhline(mean, color=style.colour, linestyle="--", label=f"{row}, mean")
        lost = [x for run in report.runs if not run.is_finished and (x := number(run.labels.get(name))) is not None]
        if lost:
            bottom = axes.get_xaxis_transform()
            axes.plot(lost, [0.02] * len(lost), "x", ms=5, color="#d62728", transform=bottom, label="not finished")
        _scale(axes, report.finished, name, "x")
        axes.set_ylabel(report.measure.axis)
    if is_plane:
        _both(panels[-1], report, scores, drawn[:2])
    legend(figure, panels)
    yield figure


def _both(
    axes: Axes, report: ReportContents, scores: Sequence[tuple[ReportedRun, float]], names: Sequence[str]
) -> None:
    """Draw two labels as a plane: a dot per run, coloured by the metric; a cross is a run that did not finish."""

    def place(run: ReportedRun) -> list[float]:
        return [value for name in names if (value := number(run.labels.get(name))) is not None]

    x, y, colours = zip(*((*place(run), score) for run, score in scores if len(place(run)) == 2), strict=True)
    dots = axes.scatter(x, y, c=colours, s=24, cmap="viridis")
    axes.figure.colorbar(dots, ax=axes, label=report.measure.axis)
    if lost := [place(run) for run in report.runs if not run.is_finished and len(place(run)) == 2]:
        x, y = zip(*lost, strict=True)
        axes.scatter(x, y, marker="x", s=24, color="#d62728", label="not finished")
    for name, axis in zip(names, "xy", strict=True):
        _scale(axes, report.finished, name, axis)


def _is_drawn(runs: Sequence[ReportedRun], name: str) -> bool:
    values = {run.labels[name] for run in runs if name in run.labels}
    return len(values) >= VALUES and all(number(value) is not None for value in values)


def _scale(axes: Axes, runs: Sequence[ReportedRun], name: str, axis: str) -> None:
    values = [value for run in runs if (value := number(run.labels.get(name))) is not None]
    is_wide = min(values) > 0 and max(values) / min(values) > SPAN
    axes.set(**{f"{axis}label": name, f"{axis}scale": "log" if is_wide else "linear"})
