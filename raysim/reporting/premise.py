"""FedVG's premise as a figure: clients' accuracy against their validation gradient, as `diagnostics` logs both."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, product

import numpy as np
from matplotlib.figure import Figure

from raysim.core.rounds import round_name
from raysim.folders.run_folder import RunFolder
from raysim.reporting.contents import ReportContents
from raysim.reporting.panels import COLOURS, MARKERS, MOST_PANELS, grid, legend, wrap
from raysim.reporting.tables import Cell, Column, Table, heading
from raysim.reporting.traces import by_round

#: Rounds that are drawn: the first, the middle and the last of those that were logged. Span from which the axis is logarithmic.
SHOWN, SPAN = 3, 20


def premise(report: ReportContents) -> Iterator[Figure]:
    """A panel for each cell of a table: a point a client, all seeds together, in the first, middle and last logged round."""
    for table in report.tables:
        named = ((row, column, table.cells.get((row, column))) for column, row in product(table.columns, table.rows))
        points = ((f"{row}{_below(table, column)}", cell, _points(cell)) for row, column, cell in named if cell)
        panels = list(islice((panel for panel in points if panel[2]), MOST_PANELS))
        if panels:
            yield _figure(table.title, panels)


def _below(table: Table, column: Column) -> str:
    return f", {heading(table.names, column)}" if table.names else ""


def _figure(title: str, panels: list[tuple[str, Cell, dict[int, np.ndarray]]]) -> Figure:
    figure, all_axes = grid(len(panels), width=3.3, height=2.8)
    for axes, (name, cell, rounds) in zip(all_axes, panels, strict=True):
        for index, colour, marker in zip(rounds, COLOURS, MARKERS, strict=False):
            gradients, accuracies = rounds[index].T
            axes.plot(gradients, 100 * accuracies, marker, ms=3, color=colour, alpha=0.6, label=round_name(index))
        mean = by_round(cell, "diagnostics/accuracy_by_gradient").stack().mean()
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
        for index, arrays in RunFolder(folder).logged_arrays():
            if "diagnostics.premise" in arrays:
                rounds.setdefault(index, []).append(arrays["diagnostics.premise"])
    logged = sorted(rounds)
    ends = sorted({logged[place * (len(logged) - 1) // (SHOWN - 1)] for place in range(SHOWN)}) if logged else []
    stacked = {index: np.concatenate(rounds[index]) for index in ends}
    usable = {index: values[np.isfinite(values).all(axis=1) & (values[:, 0] > 0)] for index, values in stacked.items()}
    return {index: values for index, values in usable.items() if len(values)}
