"""Figures of runs, round by round: the metric, the weights of clients, and what methods logged."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, product
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from raysim.base.texts import literal, round_name
from raysim.folders.run_folder import RunFolder
from raysim.reporting.contents import ReportContents, choosing, selection_shares
from raysim.reporting.figures import grouped_bars
from raysim.reporting.measure import logged
from raysim.reporting.panels import (
    COLOURS,
    MARKERS,
    Styles,
    band,
    grid,
    legend,
    pages,
    rounds_below,
    styles_of,
    wrap,
)
from raysim.reporting.significance import base_of
from raysim.reporting.tables import Cell, Column, Table, describe, heading

#: Heat maps of one report.
MOST_MAPS = 6

#: Label of a line -> [rounds, seeds], or what else it runs along.
Lines = Mapping[str, pd.DataFrame]


def curves(report: ReportContents) -> Iterator[Figure]:
    """The metric's column of progress.csv per round (for keys of summary.json the main metric on the test set).

    Mean over seeds, and the band of their deviation; a figure for each table, one panel a column.
    """
    for table in report.tables:
        columns = measured(table, scored_by_round)
        for panels in pages([(column_title(table, column), lines) for column, lines in columns.items()]):
            yield line_figure(table.title, panels, report.styles, ylabel=table.metric.axis, title_size="large")


def scored_by_round(cell: Cell) -> pd.DataFrame:
    """[rounds, seeds]: the column of the cell's own metric."""
    return by_round(cell, cell.metric.column, cell.metric.scale)


def by_round(cell: Cell, name: str, scale: float = 1.0, *, join: Literal["inner", "outer"] = "inner") -> pd.DataFrame:
    """[rounds, counted from 1, seeds]: a column of progress.csv in the rounds for which every seed recorded it.

    With `join` outer, in those for which any did.
    """
    seeds = {}
    for seed, folder in cell.folders.items():
        rows = [row for row in RunFolder(folder).progress_rows() if row.get(name)]
        seeds[seed] = pd.Series({int(row["round"]) + 1: scale * float(row[name]) for row in rows}, dtype=float)
    return pd.concat(seeds, axis=1, join=join).sort_index() if seeds else pd.DataFrame()


def measured(table: Table, measure: Callable[..., pd.DataFrame], *options: object) -> dict[Column, Lines]:
    """Column -> row -> measure(cell, *options), without empty ones."""
    lines: dict[Column, Lines] = {}
    for column in table.columns:
        frames = {row: measure(cell, *options) for row, cell in table.column_cells(column).items()}
        lines[column] = {row: frame for row, frame in frames.items() if not frame.empty}
    return {column: frames for column, frames in lines.items() if frames}


def column_title(table: Table, column: Column) -> str:
    return wrap(heading(table.names, column)) if table.names else ""


def line_figure(
    title: str,
    panels: Sequence[tuple[str, Lines]],
    styles: Styles,
    *,
    ylabel: str = "",
    width: float = 3.1,
    across: int = 4,
    title_size: float | str = 9,
) -> Figure:
    """A panel for each (title, lines): the mean over seeds by round, and the band of their deviation."""
    figure, all_axes = grid(len(panels), across=across, width=width)
    for axes, (name, lines) in zip(all_axes, panels, strict=True):
        for label, frame in lines.items():
            # Not over the other seeds where one diverged: the line has a gap there.
            mean, std = frame.mean(axis=1, skipna=False), frame.std(axis=1, skipna=False)
            style = styles[label]
            marker = style.marker if len(mean) == 1 else ""
            axes.plot(
                mean.index, mean, style.dash, marker=marker, color=style.colour, linewidth=style.width, label=label
            )
            band(axes, mean.index, mean, std, style.colour)
        axes.set_title(name, fontsize=title_size)
        axes.set_ylabel(ylabel)
        rounds_below(axes)
    figure.suptitle(literal(title), fontsize=10)
    legend(figure, all_axes)
    return figure


def weights(report: ReportContents) -> Iterator[Figure]:
    """Aggregation weight of every client by round, one panel a cell (its first seed).

    The line of `report.client` is bold; if none is given, that of the balanced client (1) of partition nine_plus_one.
    """
    tables = ((name, run, run.client_rows()) for name, run in _named_runs(report.tables))
    for runs in pages((name, run, table) for name, run, table in tables if table is not None):
        figure, panels = grid(len(runs), width=3.3, height=2.6)
        for axes, (name, run, table) in zip(panels, runs, strict=True):
            is_nine_plus_one = (run.read_config().get("partition") or {}).get("scheme") == "nine_plus_one"
            bold = 1 if report.group.client is None and is_nine_plus_one else report.group.client
            _weights(axes, table.to_pandas().sort_values("round", kind="stable"), bold)
            axes.set_title(wrap(name), fontsize=9)
            axes.set(ylabel="aggregation weight", ylim=(0, None))
            rounds_below(axes)
        legend(figure, panels)
        yield figure


def _weights(axes: Axes, rows: pd.DataFrame, bold: int | None) -> None:
    """A line for each client, from rows (round, client, weight); dotted: equal weights."""
    if "is_dropped" in rows:
        rows = rows[~rows["is_dropped"].astype(bool)]
    if rows.empty:
        return
    clients, num_rounds = rows.groupby("client"), rows["round"].nunique()
    styles = styles_of([str(client) for client in clients.groups])
    has_colours = len(styles) <= 2 * len(COLOURS)
    for client, line in clients:
        colour, dash = (styles[str(client)].colour, styles[str(client)].dash) if has_colours else ("#888888", "-")
        marker = "" if len(line) == num_rounds > 1 else "."  # points show in which rounds a client took part
        (drawn,) = axes.plot(line["round"] + 1, line["weight"], dash, color=colour, marker=marker)
        drawn.set(markersize=3, linewidth=0.8, alpha=0.7)
        if client == bold:
            drawn.set(color="#000000", linewidth=2.2, linestyle="-", alpha=1.0, zorder=5, label=f"client {bold}")
    axes.axhline(1 / max(1.0, len(rows) / num_rounds), color="#444444", linewidth=0.8, linestyle=":")


def _named_runs(tables: Sequence[Table]) -> Iterator[tuple[str, RunFolder]]:
    """The first seed's run of every cell, with what tells the cells apart: the table only if there are several, and so on."""
    for table in tables:
        for row, column in product(table.rows, table.columns):
            cell = table.cells.get((row, column))
            if cell is not None and cell.folders:
                parts = [table.title] * (len(tables) > 1) + [row] * (len(table.rows) > 1)
                parts += [heading(table.names, column)] * bool(table.names)
                yield ", ".join(parts) or row, RunFolder(next(iter(cell.folders.values())))


def norms(report: ReportContents) -> Iterator[Figure]:
    """Gradient norms, client by layer, at the first and the last round that logged them; a figure for each cell."""
    logged = ((name, read_norms(run.path)) for name, run in _named_runs(report.tables))
    for name, rounds in islice(((name, rounds) for name, rounds in logged if rounds), MOST_MAPS):
        ends = {index: rounds[index] for index in (min(rounds), max(rounds))}
        shown = {index: frame.where(np.isfinite(frame) & (frame > 0)) for index, frame in ends.items()}
        if any(frame.notna().any(axis=None) for frame in shown.values()):
            yield _heat_maps(name, shown)


def _heat_maps(title: str, rounds: Mapping[int, pd.DataFrame]) -> Figure:
    """[clients, layers] of each round side by side, on one logarithmic scale."""
    values = np.concatenate([frame.to_numpy().ravel() for frame in rounds.values()])
    low, high = np.nanmin(values), np.nanmax(values)
    scale = LogNorm(low, high if high > low else low * 1.01)
    names = [str(layer) for layer in next(iter(rounds.values()))]
    height = 1.4 + 0.16 * max(map(len, rounds.values())) + 0.06 * max(map(len, names))
    figure = Figure(figsize=(1.5 + 4.2 * len(rounds), float(np.clip(height, 3.0, 9.0))), layout="constrained")
    panels = figure.subplots(1, len(rounds), squeeze=False)[0]
    for axes, (index, frame) in zip(panels, rounds.items(), strict=True):
        image = axes.imshow(frame, aspect="auto", cmap="viridis", norm=scale, interpolation="nearest")
        every, each = math.ceil(frame.shape[1] / 32), math.ceil(len(frame) / 40)
        axes.set_xticks(range(0, frame.shape[1], every), frame.columns[::every], rotation=90, fontsize=7)
        axes.set_yticks(range(0, len(frame), each), frame.index[::each], fontsize=7)
        axes.set(title=round_name(index), xlabel="layer", ylabel="client")
    figure.colorbar(image, ax=list(panels), label="gradient norm", shrink=0.9)
    figure.suptitle(title, fontsize=10)
    return figure


def read_norms(folder: Path) -> dict[int, pd.DataFrame]:
    """Round -> [clients, layers], the array `<method>.norms` that a run logged."""
    found = {}
    for index, arrays in RunFolder(folder).logged_arrays():
        name = next((name for name in arrays if name.endswith(".norms") and arrays[name].ndim == 2), None)
        if name is not None:
            found[index] = pd.DataFrame(arrays[name], arrays.get(f"{name}:clients"), arrays.get(f"{name}:columns"))
    return found


#: What `diagnostics` logs of the features, and how it is called in figures.
DISTANCES = {
    "intra": "intra-class distance",
    "inter": "inter-class distance",
    "separability": "separability (inter / intra)",
}


def _below(table: Table, column: Column) -> str:
    """The column in a second line, where there are several."""
    return f"\n{wrap(heading(table.names, column))}" if len(table.columns) > 1 else ""


def representation(report: ReportContents) -> Iterator[Figure]:
    """Intra-class and inter-class distance and their ratio by round: three panels for each column of a table."""
    for table in report.tables:
        lines = {name: measured(table, by_round, f"diagnostics/{name}") for name in DISTANCES}
        columns = [column for column in table.columns if any(column in found for found in lines.values())]
        panels = [
            (wrap(DISTANCES[name]) + _below(table, column), lines[name].get(column, {}))
            for column in columns
            for name in DISTANCES
        ]
        for some in pages(panels):
            yield line_figure(table.title, some, report.styles, across=len(DISTANCES))


def drift_reduction(report: ReportContents) -> Iterator[Figure]:
    """Drift of the base minus that of a row, in runs with one seed, whose rounds have the same clients.

    The base of "X + something" is X where there is such a row, that of any other row is the baseline (the first row, if
    none was named). A figure for each table, one panel a column.
    """
    for table in report.tables:
        baseline = report.baseline if report.baseline in table.rows else table.rows[0]
        panels, styles = [], {}
        for column in table.columns:
            drifts = {row: by_round(cell, "diagnostics/drift") for row, cell in table.column_cells(column).items()}
            lines = {}
            for row, drift in drifts.items():
                base = base_of(row, list(drifts), baseline)
                if base in drifts:
                    base_drift, own_drift = drifts[base].align(drift, join="inner")
                    if not own_drift.empty:
                        lines[f"{row} against {base}"] = base_drift - own_drift
                        styles[f"{row} against {base}"] = report.styles[row]
            if lines:
                panels.append((column_title(table, column), lines))
        for some in pages(panels):
            figure = line_figure(table.title, some, styles, ylabel="reduction of local drift", width=3.6)
            for axes in figure.axes:
                axes.axhline(0, color="#444444", linewidth=0.8, linestyle=":")
            yield figure


def agreement(report: ReportContents) -> Iterator[Figure]:
    """Histogram of S over layers in the first round; a panel for each column, from its first row that logged it.

    Up to that round FLFA is plain backpropagation, so rows do not differ. g1 is the skewness that FLFA decides by, one for
    each run (seed), since each run decides for itself.
    """
    panels: list[tuple[str, list[np.ndarray]]] = []
    for table in report.tables:
        for column in table.columns:
            name = wrap(describe(table.labels)) + _below(table, column)
            logged = (_first_agreement(cell) for cell in table.column_cells(column).values())
            panels += islice(((name, values) for values in logged if values), 1)
    for some in pages(panels):
        figure, all_axes = grid(len(some))
        for axes, (name, values) in zip(all_axes, some, strict=True):
            pooled = np.concatenate(values)
            axes.hist(pooled, bins=min(30, max(8, len(pooled) // 4)), color="#0072B2", edgecolor="white", linewidth=0.4)
            decisions = [f"{g1:+.2f} ({'lowest' if g1 > 0 else 'highest'})" for g1 in map(_skewness, values)]
            axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
            axes.set_title(f"{name}\n{wrap('g1 = ' + ', '.join(decisions), 44)}", fontsize=9)
            axes.set(xlabel="agreement S", ylabel="layers")
        yield figure


def _skewness(values: np.ndarray) -> float:
    """g1 = m3 / m2^1.5 (central moments); 0 where all values are equal."""
    centred = values - values.mean()
    spread = float(np.mean(centred**2))
    return float(np.mean(centred**3)) / spread**1.5 if spread > 0 else 0.0


def _first_agreement(cell: Cell) -> list[np.ndarray]:
    """For each seed (layers,): S in round 0, of `diagnostics` where it was listed, else of FLFA's candidates."""
    parts = []
    for folder in cell.folders.values():
        for index, arrays in islice(RunFolder(folder).logged_arrays(), 1):
            names = [name for name in ("diagnostics.agreement", "flfa.agreement") if index == 0 and name in arrays]
            parts += [arrays[name] for name in names[:1]]
    return parts


def spectrum(report: ReportContents) -> Iterator[Figure]:
    """Singular values of the classifier over the largest one, mean over seeds; a figure for each table, one panel a column.

    The axis is logarithmic where they span more than a factor of 20.
    """
    for table in report.tables:
        columns = measured(table, _last_spectra)
        for panels in pages([(column_title(table, column), lines) for column, lines in columns.items()]):
            figure = line_figure(table.title, panels, report.styles, ylabel="relative singular value", width=3.4)
            for axes, (_, spectra) in zip(figure.axes, panels, strict=True):
                if min(frame.min(axis=None) for frame in spectra.values()) < 1 / 20:
                    axes.set_yscale("log")
                else:
                    axes.set_ylim(0, None)
                axes.set_xlabel("index")
            yield figure


def _last_spectra(cell: Cell) -> pd.DataFrame:
    """[values, seeds], from index 1: what each seed logged last, divided by the largest."""
    spectra = {}
    for seed, folder in cell.folders.items():
        *_, last = [np.zeros(1), *logged(folder, "diagnostics.singular_values").values()]
        if last[0] > 0:
            spectra[seed] = last / last[0]
    frame = pd.DataFrame(spectra)
    return frame.set_axis(frame.index + 1)


#: Rounds that are drawn: the first, the middle and the last of those that were logged. Span from which the axis is logarithmic.
SHOWN, SPAN = 3, 20


def premise(report: ReportContents) -> Iterator[Figure]:
    """A panel for each cell of a table: a point a client, all seeds together, in the first, middle and last logged round."""
    for table in report.tables:
        named = ((row, column, table.cells.get((row, column))) for column, row in product(table.columns, table.rows))
        points = ((f"{row}{_beside(table, column)}", cell, _points(cell)) for row, column, cell in named if cell)
        for panels in pages(panel for panel in points if panel[2]):
            yield _premise_figure(table.title, panels)


def _beside(table: Table, column: Column) -> str:
    return f", {heading(table.names, column)}" if table.names else ""


def _premise_figure(title: str, panels: Sequence[tuple[str, Cell, dict[int, np.ndarray]]]) -> Figure:
    figure, all_axes = grid(len(panels), width=3.3, height=2.8)
    for axes, (name, cell, rounds) in zip(all_axes, panels, strict=True):
        for index, colour, marker in zip(rounds, COLOURS, MARKERS, strict=False):
            gradients, accuracies = rounds[index].T
            axes.plot(gradients, 100 * accuracies, marker, ms=3, color=colour, alpha=0.6, label=round_name(index))
        mean = by_round(cell, "diagnostics/accuracy_by_gradient", join="outer").stack().mean()
        axes.set_title(f"{wrap(name)}\nmean rank correlation {mean:+.2f}", fontsize=9)
        gradients = np.concatenate([values[:, 0] for values in rounds.values()])
        is_wide = gradients.max() > SPAN * gradients.min()
        axes.set(xscale="log" if is_wide else "linear", xlabel="validation gradient", ylabel="accuracy (%)")
    figure.suptitle(title, fontsize=10)
    legend(figure, all_axes)
    return figure


def _points(cell: Cell) -> dict[int, np.ndarray]:
    """Round -> (clients of all seeds, 2) validation gradient and accuracy, without clients that have none."""
    rounds: dict[int, list[np.ndarray]] = {}
    for folder in cell.folders.values():
        for index, values in logged(folder, "diagnostics.premise").items():
            rounds.setdefault(index, []).append(values)
    known = sorted(rounds)
    ends = sorted({known[place * (len(known) - 1) // (SHOWN - 1)] for place in range(SHOWN)}) if known else []
    stacked = {index: np.concatenate(rounds[index]) for index in ends}
    usable = {index: values[np.isfinite(values).all(axis=1) & (values[:, 0] > 0)] for index, values in stacked.items()}
    return {index: values for index, values in usable.items() if len(values)}


def selection(report: ReportContents) -> Iterator[Figure]:
    """Bars of how often each layer block was chosen, a colour for each row; a figure for each table."""
    for table in report.tables:
        shares = selection_shares(table, report.theirs)
        if shares:
            figure, (axes,) = grid(1, width=min(14.0, 2.5 + 0.7 * len(shares)), height=3.2)
            grouped_bars(axes, shares, choosing(table, shares), report.styles, edge=1.0, cap=2)
            axes.set_xticks(range(len(shares)), [wrap(b.replace(" (", "\n("), 14) for b in shares], fontsize=7)
            axes.set(ylabel="chosen (%)", title=table.title, ylim=(0, None))
            legend(figure, [axes])
            yield figure
