"""Figures of what `diagnostics` and `flfa` log."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from raysim.folders.run_folder import RunFolder
from raysim.reporting.contents import ReportContents
from raysim.reporting.gains import base_of
from raysim.reporting.panels import MOST_PANELS, grid, wrap
from raysim.reporting.tables import Cell, Column, Table, describe, heading
from raysim.reporting.traces import by_round, column_title, line_figure, measured

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
            for column in columns[:MOST_PANELS]
            for name in DISTANCES
        ]
        if panels:
            yield line_figure(table.title, panels, report.styles, across=len(DISTANCES))


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
        if panels:
            ylabel = "reduction of local drift"
            figure = line_figure(table.title, panels[:MOST_PANELS], styles, ylabel=ylabel, width=3.6)
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
    if not panels:
        return
    figure, all_axes = grid(min(len(panels), MOST_PANELS))
    for axes, (name, values) in zip(all_axes, panels, strict=False):
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
        panels = [(column_title(table, column), lines) for column, lines in columns.items()]
        if not panels:
            continue
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
    name, spectra = "diagnostics.singular_values", {}
    for seed, folder in cell.folders.items():
        logged = [arrays[name] for _, arrays in RunFolder(folder).logged_arrays() if name in arrays]
        if logged and logged[-1][0] > 0:
            spectra[seed] = logged[-1] / logged[-1][0]
    frame = pd.DataFrame(spectra)
    return frame.set_axis(frame.index + 1)
