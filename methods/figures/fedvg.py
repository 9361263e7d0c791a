"""Figures of FedVG's paper, and of its premise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, product
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from raysim.base.texts import number, round_name
from raysim.folders.run_folder import RunFolder
from raysim.reporting.contents import ReportContents
from raysim.reporting.figures import along, bar_figure, named_runs, rounds_of
from raysim.reporting.measure import logged
from raysim.reporting.panels import COLOURS, MARKERS, legend, pages, panel_grid, rounds_below, styles_of, wrap
from raysim.reporting.published import canonical
from raysim.reporting.tables import Cell, Column, Table, heading, label_text, text


def imbalance(report: ReportContents) -> Iterator[Figure]:
    """Accuracy over the class imbalance ratio of the validation set; shaded: standard deviation.

    A row without the label is a horizontal line.

    Missing: no column label rho.
    """
    name = next((name for name in report.tables[0].names if name.split(".")[-1] in ("rho", "imbalance")), None)
    if name is not None:
        yield along(report, name, xlabel=f"class imbalance ratio {name}", width=3.6, height=2.8, has_levels=True)


def strategies(report: ReportContents) -> Iterator[Figure]:
    """Strategies of aggregation; error bars are the standard deviation.

    The label `granularity` for each data set and model, at the smallest alpha.

    Missing: no run has a label granularity.
    """
    cells = [cell for cell in report.cells if "granularity" in cell.labels]
    if not cells:
        return
    alphas = [value for cell in cells if (value := number(cell.labels.get("alpha"))) is not None]
    cells = [cell for cell in cells if not alphas or number(cell.labels.get("alpha")) == min(alphas)]
    groups = _by_granularity(cells, ("granularity", "alpha", "method"))
    if sum(map(len, groups.values())) < len(cells):  # several methods have granularities
        groups = _by_granularity(cells, ("granularity", "alpha"))
    coarse_first = ("model", "layer", "block")
    rows = list(dict.fromkeys(row for group in groups.values() for row in group))
    rows.sort(key=lambda row: [not canonical(row).startswith(name) for name in coarse_first])
    title = f"alpha = {min(alphas):g}" if alphas else ""
    yield bar_figure(groups, styles_of(rows), rows, title=title, axis=report.measure.axis)


def _by_granularity(cells: Sequence[Cell], without: Sequence[str]) -> dict[str, dict[str, Cell]]:
    """Name of a group, by the other labels -> granularity -> cell."""
    groups: dict[str, dict[str, Cell]] = {}
    for cell in cells:
        rest = {key: value for key, value in cell.labels.items() if key not in without}
        groups.setdefault(label_text(rest), {})[text(cell.labels["granularity"])] = cell
    return groups


def weights(report: ReportContents) -> Iterator[Figure]:
    """Aggregation weight of each client; dotted: equal weights.

    A panel for the first seed of each cell. In partition nine_plus_one the line of client 1, the balanced one, is bold.

    Missing: no run recorded clients.
    """
    tables = ((name, run, run.client_rows()) for name, run in named_runs(report.tables))
    for runs in pages((name, run, table) for name, run, table in tables if table is not None):
        figure, panels = panel_grid(len(runs), width=3.3, height=2.6)
        for axes, (name, run, table) in zip(panels, runs, strict=True):
            is_nine_plus_one = (run.read_config().get("partition") or {}).get("scheme") == "nine_plus_one"
            _weights(axes, table.to_pandas().sort_values("round", kind="stable"), 1 if is_nine_plus_one else None)
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


#: Heat maps of one report.
MOST_MAPS = 6


def norms(report: ReportContents) -> Iterator[Figure]:
    """Gradient norms by client and layer, in the first and the last round that logged norms; at most 6 cells.

    A figure for each cell.

    Missing: no run logged gradient norms.
    """
    logged = ((name, read_norms(run.path)) for name, run in named_runs(report.tables))
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
    frames = {}
    for index, arrays in RunFolder(folder).logged_arrays():
        name = next((name for name in arrays if name.endswith(".norms") and arrays[name].ndim == 2), None)
        if name is not None:
            frames[index] = pd.DataFrame(arrays[name], arrays.get(f"{name}:clients"), arrays.get(f"{name}:columns"))
    return frames


#: SHOWN: drawn rounds: the first, the middle and the last logged round. SPAN: ratio above which the axis is
#: logarithmic.
SHOWN, SPAN = 3, 20


def premise(report: ReportContents) -> Iterator[Figure]:
    """Accuracy of each client's model on the test rows against its validation gradient, all seeds together; the title has
    their mean rank correlation over rounds and seeds. FedVG presumes -1.

    A panel for each cell of a table, with the first, the middle and the last logged round.

    Missing: no run logged premise; add diagnostics with measures: [premise] to its methods.
    """
    for table in report.tables:
        named = ((row, column, table.cells.get((row, column))) for column, row in product(table.columns, table.rows))
        points = ((f"{row}{_beside(table, column)}", cell, _points(cell)) for row, column, cell in named if cell)
        for panels in pages(panel for panel in points if panel[2]):
            yield _premise_figure(table.title, panels)


def _beside(table: Table, column: Column) -> str:
    return f", {heading(table.names, column)}" if table.names else ""


def _premise_figure(title: str, panels: Sequence[tuple[str, Cell, dict[int, np.ndarray]]]) -> Figure:
    figure, all_axes = panel_grid(len(panels), width=3.3, height=2.8)
    for axes, (name, cell, rounds) in zip(all_axes, panels, strict=True):
        for index, colour, marker in zip(rounds, COLOURS, MARKERS, strict=False):
            gradients, accuracies = rounds[index].T
            axes.plot(gradients, 100 * accuracies, marker, ms=3, color=colour, alpha=0.6, label=round_name(index))
        mean = rounds_of(cell, "diagnostics/accuracy_by_gradient", join="outer").stack().mean()
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
    indices = sorted(rounds)
    ends = sorted({indices[place * (len(indices) - 1) // (SHOWN - 1)] for place in range(SHOWN)}) if indices else []
    stacked = {index: np.concatenate(rounds[index]) for index in ends}
    usable = {index: values[np.isfinite(values).all(axis=1) & (values[:, 0] > 0)] for index, values in stacked.items()}
    return {index: values for index, values in usable.items() if len(values)}
