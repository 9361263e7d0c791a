"""Figures of UniVarFL's paper."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from raysim.reporting.contents import ReportContents
from raysim.reporting.figures import column_pages, line_figure
from raysim.reporting.measure import logged
from raysim.reporting.tables import Cell


def spectrum(report: ReportContents) -> Iterator[Figure]:
    """Singular values of the global classifier's weight, relative to the largest, in the last logged round.

    Mean over seeds; a figure for each table, a panel for each column. Logarithmic where the values span more than a factor of
    20.

    Missing: no run logged singular values; add diagnostics to its methods.
    """
    for table in report.tables:
        for panels in column_pages(table, _last_spectra):
            figure = line_figure(table.title, panels, report.styles, ylabel="relative singular value", width=3.4)
            for axes, (_, spectra) in zip(figure.axes, panels, strict=True):
                if min(frame.min(axis=None) for frame in spectra.values()) < 1 / 20:
                    axes.set_yscale("log")
                else:
                    axes.set_ylim(0, None)
                axes.set_xlabel("index")
            yield figure


def _last_spectra(cell: Cell) -> pd.DataFrame:
    """[values, seeds], from index 1: the values that each seed logged last, divided by the largest."""
    spectra = {}
    for seed, folder in cell.folders.items():
        *_, last = [np.zeros(1), *logged(folder, "diagnostics.singular_values").values()]
        if last[0] > 0:
            spectra[seed] = last / last[0]
    frame = pd.DataFrame(spectra)
    return frame.set_axis(frame.index + 1)
