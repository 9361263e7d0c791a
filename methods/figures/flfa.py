"""Figures of FLFA's paper."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from raysim.folders.run_folder import RunFolder
from raysim.reporting.contents import ReportContents, choosing, selection_shares
from raysim.reporting.figures import cell_lines, column_title, grouped_bars, line_figure, rounds_of
from raysim.reporting.panels import legend, pages, panel_grid, wrap
from raysim.reporting.significance import base_row
from raysim.reporting.tables import Cell, Column, Table, heading, label_text

#: Numbers that `diagnostics` logs of the features, and their names in figures.
DISTANCES = {
    "intra": "intra-class distance",
    "inter": "inter-class distance",
    "separability": "separability (inter / intra)",
}


def _below(table: Table, column: Column) -> str:
    """Return the name of the column as a second line, if the table has several columns."""
    return f"\n{wrap(heading(table.names, column))}" if len(table.columns) > 1 else ""


def representation(report: ReportContents) -> Iterator[Figure]:
    """Distances of the classifier's inputs on the test set; shaded: standard deviation over seeds.

    Three panels for each column of a table.

    Missing: no run logged distances of features; add diagnostics to its methods.
    """
    for table in report.tables:
        lines = {name: cell_lines(table, rounds_of, f"diagnostics/{name}") for name in DISTANCES}
        columns = [column for column in table.columns if any(column in by_column for by_column in lines.values())]
        panels = [
            (wrap(DISTANCES[name]) + _below(table, column), lines[name].get(column, {}))
            for column in columns
            for name in DISTANCES
        ]
        for some in pages(panels):
            yield line_figure(table.title, some, report.styles, across=len(DISTANCES))


def drift(report: ReportContents) -> Iterator[Figure]:
    """Reduction of local drift against the named row, in runs with the same seed; above 0: less drift.

    "X + something" is compared with row X if there is one; any other row with the baseline, or with the first row. A
    figure for each table, a panel for each column.

    Missing: no two rows logged drift with the same seed; add diagnostics to their methods.
    """
    for table in report.tables:
        baseline = report.baseline if report.baseline in table.rows else table.rows[0]
        panels, styles = [], {}
        for column in table.columns:
            drifts = {row: rounds_of(cell, "diagnostics/drift") for row, cell in table.column_cells(column).items()}
            lines = {}
            for row, drift in drifts.items():
                base = base_row(row, list(drifts), baseline)
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
    """Histogram of the layers' agreement S in round 1, pooled over seeds; g1 is the skewness of each seed.

    A panel for each column, of its first row that logged S. Before that round FLFA is plain backpropagation, so rows do not
    differ. In each run, FLFA decides by the run's own g1.

    Missing: no run logged agreement in its first round; add diagnostics or flfa to its methods.
    """
    panels: list[tuple[str, list[np.ndarray]]] = []
    for table in report.tables:
        for column in table.columns:
            name = wrap(label_text(table.labels)) + _below(table, column)
            logged = (_first_agreement(cell) for cell in table.column_cells(column).values())
            panels += islice(((name, values) for values in logged if values), 1)
    for some in pages(panels):
        figure, all_axes = panel_grid(len(some))
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
    """Return (layers,) for each seed: S in round 0, from `diagnostics` if listed, else from FLFA's candidates."""
    parts = []
    for folder in cell.folders.values():
        for index, arrays in islice(RunFolder(folder).logged_arrays(), 1):
            names = [name for name in ("diagnostics.agreement", "flfa.agreement") if index == 0 and name in arrays]
            parts += [arrays[name] for name in names[:1]]
    return parts


def selection(report: ReportContents) -> Iterator[Figure]:
    """How often FLFA chose a layer of each layer block; a diamond is the published percentage.

    A figure for each table.

    Missing: no run logged which layers FLFA chose.
    """
    for table in report.tables:
        shares = selection_shares(table, report.theirs)
        if shares:
            figure, (axes,) = panel_grid(1, width=min(14.0, 2.5 + 0.7 * len(shares)), height=3.2)
            grouped_bars(axes, shares, choosing(table, shares), report.styles, edge=1.0, cap=2)
            axes.set_xticks(range(len(shares)), [wrap(b.replace(" (", "\n("), 14) for b in shares], fontsize=7)
            axes.set(ylabel="chosen (%)", title=table.title, ylim=(0, None))
            legend(figure, [axes])
            yield figure
