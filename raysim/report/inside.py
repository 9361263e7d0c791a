"""Figures of what `diagnostics` logs: each function takes tables and returns a matplotlib Figure.

representation: FLFA, figure 2. drift_reduction: figure 3. agreement: figure 4. spectrum: UniVarFL, figure 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from raysim.report.gains import base_of
from raysim.report.panels import NothingToDraw, Style, grid, legend, wrap
from raysim.report.published import Label
from raysim.report.tables import Cell, Column, Table, describe, heading
from raysim.report.traces import MOST_PANELS, by_round, column_cells, mean_line, rounds_below

Styles = Mapping[str, Style]

#: What `diagnostics` logs of the features, and how it is called in figures.
DISTANCES = {
    "intra": "intra-class distance",
    "inter": "inter-class distance",
    "separability": "separability (inter / intra)",
}


def _below(table: Table, column: Column) -> str:
    """The column in a second line, where there are several."""
    return f"\n{wrap(heading(table.names, column))}" if len(table.columns) > 1 else ""


def _title(axes: Axes, table: Table, column: Column) -> None:
    axes.set_title(wrap(heading(table.names, column)) if table.names else "", fontsize=9)


def representation(table: Table, styles: Styles) -> Figure:
    """Intra-class and inter-class distance and their ratio by round: three panels for each column."""
    found = {
        (column, name): {
            row: lines for row, cell in column_cells(table, column).items() if (lines := _metric(cell, name))
        }
        for column in table.columns
        for name in DISTANCES
    }
    columns = [column for column in table.columns if any(found[column, name] for name in DISTANCES)][:MOST_PANELS]
    if not columns:
        raise NothingToDraw("no run logged distances of features; add diagnostics to its methods")
    figure, panels = grid(len(columns) * len(DISTANCES), across=len(DISTANCES))
    places = [(column, name) for column in columns for name in DISTANCES]
    for axes, (column, name) in zip(panels, places, strict=True):
        for row, (rounds, values) in found[column, name].items():
            mean_line(axes, rounds, np.array(list(values.values())), styles[row], label=row)
        axes.set_title(wrap(DISTANCES[name]) + _below(table, column), fontsize=9)
        rounds_below(axes)
    figure.suptitle(table.title, fontsize=10)
    legend(figure, panels)
    return figure


def _metric(cell: Cell, name: str) -> tuple[list[int], dict[Label, np.ndarray]] | None:
    return by_round(cell, f"diagnostics/{name}")


def drift_reduction(table: Table, styles: Styles, baseline: str | None) -> Figure:
    """Drift of the base minus that of a row, in runs with one seed, whose rounds have the same clients.

    The base of "X + something" is X where there is such a row, that of any other row is the baseline (the first row, if
    none was named).
    """
    baseline = baseline if baseline in table.rows else table.rows[0]
    lines: dict[Column, dict[str, tuple[list[int], np.ndarray]]] = {}
    for column in table.columns:
        cells = column_cells(table, column)
        for row, cell in cells.items():
            base = base_of(row, list(cells), baseline)
            reduced = _reduction(cell, cells[base]) if base in cells else None
            if reduced is not None:
                lines.setdefault(column, {})[f"{row} against {base}"] = reduced
    if not lines:
        raise NothingToDraw("no two rows logged drift with the same seed; add diagnostics to their methods")
    columns = list(lines)[:MOST_PANELS]
    figure, panels = grid(len(columns), width=3.6)
    for axes, column in zip(panels, columns, strict=True):
        for name, (rounds, values) in lines[column].items():
            mean_line(axes, rounds, values, styles[name.rpartition(" against ")[0]], label=name)
        axes.axhline(0, color="#444444", linewidth=0.8, linestyle=":")
        _title(axes, table, column)
        axes.set_ylabel("reduction of local drift")
        rounds_below(axes)
    figure.suptitle(table.title, fontsize=10)
    legend(figure, panels)
    return figure


def _reduction(cell: Cell, base: Cell) -> tuple[list[int], np.ndarray] | None:
    """(rounds, [seeds, rounds]): the base's drift minus the cell's."""
    mine, theirs = _metric(cell, "drift"), _metric(base, "drift")
    if mine is None or theirs is None:
        return None
    rounds = [r for r in mine[0] if r in theirs[0]]
    seeds = [seed for seed in mine[1] if seed in theirs[1]]
    if not rounds or not seeds:
        return None
    kept, other = ([known.index(r) for r in rounds] for known in (mine[0], theirs[0]))
    return rounds, np.array([theirs[1][seed][other] - mine[1][seed][kept] for seed in seeds])


def agreement(tables: Sequence[Table]) -> Figure:
    """Histogram of S over layers in the first round; a panel for each column, from its first row that logged it.

    Up to that round FLFA is plain backpropagation, so rows do not differ. g1 is the skewness that FLFA decides by, one for
    each run (seed), since each run decides for itself.
    """
    found: list[tuple[str, list[np.ndarray]]] = []
    for table in tables:
        for column in table.columns:
            values = next(
                (v for cell in column_cells(table, column).values() if len(v := _first_agreement(cell))), None
            )
            if values is not None:
                found.append((wrap(describe(table.labels)) + _below(table, column), values))
    if not found:
        raise NothingToDraw("no run logged agreement in its first round; add diagnostics or flfa to its methods")
    from matplotlib.ticker import MaxNLocator

    figure, panels = grid(min(len(found), MOST_PANELS))
    for axes, (name, values) in zip(panels, found, strict=False):
        pooled = np.concatenate(values)
        axes.hist(pooled, bins=min(30, max(8, len(pooled) // 4)), color="#0072B2", edgecolor="white", linewidth=0.4)
        decisions = [f"{g1:+.2f} ({'lowest' if g1 > 0 else 'highest'})" for g1 in map(_skewness, values)]
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.set_title(f"{name}\n{wrap('g1 = ' + ', '.join(decisions), 44)}", fontsize=9)
        axes.set(xlabel="agreement S", ylabel="layers")
    return figure


def _skewness(values: np.ndarray) -> float:
    """g1 = m3 / m2^1.5 (central moments); 0 where all values are equal."""
    centred = values - values.mean()
    spread = float(np.mean(centred**2))
    return float(np.mean(centred**3)) / spread**1.5 if spread > 0 else 0.0


def _first_agreement(cell: Cell) -> list[np.ndarray]:
    """For each seed (layers,): S in round 0, of `diagnostics` where it was listed, else of FLFA's candidates."""
    parts = []
    for folder in cell.folders.values():
        arrays = _arrays(folder / "arrays" / "round_00000.npz")
        name = next((n for n in ("diagnostics.agreement", "flfa.agreement") if n in arrays), None)
        if name is not None:
            parts.append(arrays[name])
    return parts


def _arrays(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        return {}
    with np.load(path, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def all_arrays(folder: Path, name: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(values, columns) of an array in every round that logged it."""
    for path in sorted((folder / "arrays").glob("round_*.npz")):
        arrays = _arrays(path)
        if name in arrays:
            yield arrays[name], arrays.get(f"{name}:columns", np.arange(len(arrays[name])))


def spectrum(table: Table, styles: Styles) -> Figure:
    """Singular values of the classifier over the largest one, mean over seeds; one panel a column.

    The axis is logarithmic where they span more than a factor of 20.
    """
    found = {
        column: {row: values for row, cell in column_cells(table, column).items() if len(values := _last_spectra(cell))}
        for column in table.columns
    }
    columns = [column for column in table.columns if found[column]][:MOST_PANELS]
    if not columns:
        raise NothingToDraw("no run logged singular values; add diagnostics to its methods")
    figure, panels = grid(len(columns), width=3.4)
    for axes, column in zip(panels, columns, strict=True):
        for row, values in found[column].items():
            mean_line(axes, range(1, values.shape[1] + 1), values, styles[row], label=row)
        if min(values.min() for values in found[column].values()) < 1 / 20:
            axes.set_yscale("log")
        else:
            axes.set_ylim(0, None)
        _title(axes, table, column)
        axes.set_ylabel("relative singular value")
        rounds_below(axes)
        axes.set_xlabel("index")
    figure.suptitle(table.title, fontsize=10)
    legend(figure, panels)
    return figure


def _last_spectra(cell: Cell) -> np.ndarray:
    """[seeds, values]: what each seed logged last, divided by the largest."""
    spectra = []
    for folder in cell.folders.values():
        logged = [values for values, _ in all_arrays(folder, "diagnostics.singular_values")]
        if logged and logged[-1][0] > 0:
            spectra.append(logged[-1] / logged[-1][0])
    return np.array(spectra) if spectra else np.zeros((0, 0))
