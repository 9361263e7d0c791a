"""Figures of runs, round by round: the metric, the weights of clients, the norms of their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, product
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from raysim.core.rounds import round_name
from raysim.folders.run_folder import RunFolder
from raysim.reporting.contents import ReportContents
from raysim.reporting.panels import COLOURS, DASHES, MOST_PANELS, Styles, band, grid, legend, rounds_below, wrap
from raysim.reporting.tables import Cell, Column, Table, heading

#: Heat maps of one report.
MOST_MAPS = 6

#: Label of a line -> [rounds, seeds], or what else it runs along.
Lines = Mapping[str, pd.DataFrame]


def curves(report: ReportContents) -> Iterator[Figure]:
    """The metric's column of progress.csv per round (for keys of summary.json the accuracy on the test set).

    Mean over seeds, and the band of their deviation; a figure for each table, one panel a column.
    """
    for table in report.tables:
        metric = table.metric
        columns = measured(table, by_round, metric.column, metric.scale)
        if panels := [(column_title(table, column), lines) for column, lines in columns.items()]:
            yield line_figure(table.title, panels, report.styles, ylabel=metric.axis, title_size="large")


def by_round(cell: Cell, name: str, scale: float = 1.0) -> pd.DataFrame:
    """[rounds, counted from 1, seeds]: a column of progress.csv in the rounds for which every seed recorded it."""
    seeds = {}
    for seed, folder in cell.folders.items():
        rows = [row for row in RunFolder(folder).progress_rows() if row.get(name)]
        seeds[seed] = pd.Series({int(row["round"]) + 1: scale * float(row[name]) for row in rows}, dtype=float)
    return pd.concat(seeds, axis=1, join="inner").sort_index() if seeds else pd.DataFrame()


def measured(table: Table, measure: Callable[..., pd.DataFrame], *options: object) -> dict[Column, Lines]:
    """Column -> row -> measure(cell, *options), without empty ones; of the first columns that have any."""
    lines: dict[Column, Lines] = {}
    for column in table.columns:
        frames = {row: measure(cell, *options) for row, cell in table.column_cells(column).items()}
        lines[column] = {row: frame for row, frame in frames.items() if not frame.empty}
    return dict(islice(((column, frames) for column, frames in lines.items() if frames), MOST_PANELS))


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
            axes.plot(mean.index, mean, style.dash, color=style.colour, linewidth=style.width, label=label)
            band(axes, mean.index, mean, std, style.colour)
        axes.set_title(name, fontsize=title_size)
        axes.set_ylabel(ylabel)
        rounds_below(axes)
    figure.suptitle(title, fontsize=10)
    legend(figure, all_axes)
    return figure


def weights(report: ReportContents) -> Iterator[Figure]:
    """Aggregation weight of every client by round, one panel a cell (its first seed).

    The line of `report.client` is bold; if none is given, that of the balanced client (1) of partition nine_plus_one.
    """
    tables = ((name, run, run.client_rows()) for name, run in _named_runs(report.tables))
    runs = list(islice(((name, run, table) for name, run, table in tables if table is not None), MOST_PANELS))
    if not runs:
        return
    figure, panels = grid(len(runs), width=3.3, height=2.6)
    for axes, (name, run, table) in zip(panels, runs, strict=True):
        is_nine_plus_one = (run.read_config().get("partition") or {}).get("scheme") == "nine_plus_one"
        bold = 1 if report.group.client is None and is_nine_plus_one else report.group.client
        _weights(axes, table.to_pandas().sort_values("round", kind="stable"), bold)
        axes.set(title=wrap(name), ylabel="aggregation weight", ylim=(0, None))
        rounds_below(axes)
    legend(figure, panels)
    yield figure


def _weights(axes: Axes, rows: pd.DataFrame, bold: int | None) -> None:
    """A line for each client, from rows (round, client, weight); dotted: equal weights."""
    if "is_dropped" in rows:
        rows = rows[~rows["is_dropped"].astype(bool)]
    clients, num_rounds = rows.groupby("client"), rows["round"].nunique()
    for index, (client, line) in enumerate(clients):
        has_colours = len(clients) <= 2 * len(COLOURS)
        turn, place = divmod(index, len(COLOURS))
        colour, dash = (COLOURS[place], DASHES[turn]) if has_colours else ("#888888", "-")
        marker = "" if len(line) == num_rounds else "."  # points show in which rounds a client took part
        (drawn,) = axes.plot(
            line["round"] + 1, line["weight"], dash, color=colour, marker=marker, ms=3, lw=0.8, alpha=0.7
        )
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
