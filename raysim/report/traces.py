"""Figures of what happened inside runs, round by round: each function takes tables and returns a matplotlib Figure.

curves: accuracy per round. weights: FedVG, figure 8. norms: figure A.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from raysim.report.metrics import Metric
from raysim.report.panels import COLOURS, DASHES, NothingToDraw, Style, grid, legend, wrap
from raysim.report.published import Label
from raysim.report.tables import Cell, Column, Table, heading
from raysim.run_folder import RunFolder

#: Panels of one figure; more cannot be read on a page.
MOST_PANELS = 12

#: Heat maps of one report.
MOST_MAPS = 6


def curves(table: Table, styles: Mapping[str, Style]) -> Figure:
    """The metric's column of progress.csv per round (for keys of summary.json the accuracy on the test set).

    Mean over seeds, and the band of their deviation; one panel a column.
    """
    drawn = {
        column: {
            row: curve for row, cell in column_cells(table, column).items() if (curve := _curve(cell, table.metric))
        }
        for column in table.columns
    }
    columns = [column for column in table.columns if drawn[column]][:MOST_PANELS]
    if not columns:
        raise NothingToDraw(f"no run recorded {table.metric.column} by round")
    figure, panels = grid(len(columns))
    for axes, column in zip(panels, columns, strict=True):
        for row, (rounds, values) in drawn[column].items():
            mean_line(axes, rounds, values, styles[row], label=row)
        axes.set(title=wrap(heading(table.names, column)) if table.names else "", ylabel=table.metric.axis)
        rounds_below(axes)
    figure.suptitle(table.title, fontsize=10)
    legend(figure, panels)
    return figure


def mean_line(axes: Axes, rounds: Sequence[int], values: np.ndarray, style: Style, *, label: str) -> None:
    """The mean over seeds by round, and the band of their deviation. values: [seeds, rounds]."""
    mean = values.mean(0)
    axes.plot(rounds, mean, style.dash, color=style.colour, linewidth=style.width, label=label)
    if len(values) > 1:
        std = values.std(0, ddof=1)
        axes.fill_between(rounds, mean - std, mean + std, color=style.colour, alpha=0.15, linewidth=0)


def rounds_below(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))


def column_cells(table: Table, column: Column) -> dict[str, Cell]:
    """Row -> its cell in a column."""
    return {row: table.cells[row, column] for row in table.rows if (row, column) in table.cells}


def _curve(cell: Cell, metric: Metric) -> tuple[list[int], np.ndarray] | None:
    """(rounds that every seed evaluated, [seeds, rounds] values, shares in percent)."""
    found = by_round(cell, metric.column)
    return (found[0], metric.scale * np.array(list(found[1].values()))) if found else None


def by_round(cell: Cell, name: str) -> tuple[list[int], dict[Label, np.ndarray]] | None:
    """(rounds for which every seed recorded a metric, seed -> (rounds,) values); None where there are none."""
    found = {}
    for seed, folder in cell.folders.items():
        rows = [row for row in RunFolder(folder).progress_rows() if row.get(name)]
        found[seed] = {int(row["round"]): float(row[name]) for row in rows}
    rounds = sorted(set.intersection(*map(set, found.values()))) if found else []
    return (rounds, {seed: np.array([v[r] for r in rounds]) for seed, v in found.items()}) if rounds else None


def weights(tables: Sequence[Table], *, client: int | None) -> Figure:
    """Aggregation weight of every client by round, one panel a cell (its first seed).

    Args:
      client: whose line is bold; None: the balanced one (client 1) of partition nine_plus_one, else nobody's.
    """
    cells = [(name, cell) for name, cell in _named_cells(tables) if cell.folders and _first(cell).clients.exists()]
    if not cells:
        raise NothingToDraw("no run recorded clients")
    figure, panels = grid(min(len(cells), MOST_PANELS), width=3.3, height=2.6)
    for axes, (name, cell) in zip(panels, cells, strict=False):
        rounds, clients, values = _weights(cell)
        bold = client if client is not None else (1 if _is_nine_plus_one(cell) else None)
        known = np.unique(clients)
        for index, number in enumerate(known):
            chosen = clients == number
            is_full = chosen.sum() == len(np.unique(rounds))
            is_bold = bold is not None and number == bold
            turn, place = divmod(index, len(COLOURS)) if len(known) <= 2 * len(COLOURS) else (0, None)
            colour = "#888888" if place is None else COLOURS[place]
            look: dict[str, Any] = {"linewidth": 0.8, "alpha": 0.7, "linestyle": DASHES[turn]}
            if is_bold:
                colour, look = "#000000", {"linewidth": 2.2, "alpha": 1.0, "zorder": 5, "label": f"client {bold}"}
            marker = "" if is_full else "."  # points show in which rounds a client took part
            axes.plot(rounds[chosen], values[chosen], color=colour, marker=marker, markersize=3, **look)
        axes.axhline(1 / max(1.0, len(rounds) / len(np.unique(rounds))), color="#444444", linewidth=0.8, linestyle=":")
        axes.set(title=wrap(name), ylabel="aggregation weight", ylim=(0, None))
        rounds_below(axes)
    legend(figure, panels)
    return figure


def _named_cells(tables: Sequence[Table]) -> list[tuple[str, Cell]]:
    """Cells with what tells them apart: the table only if there are several, and so on."""
    named = []
    for table in tables:
        for row in table.rows:
            for column in table.columns:
                if (row, column) in table.cells:
                    parts = [table.title] * (len(tables) > 1) + [row] * (len(table.rows) > 1)
                    parts += [heading(table.names, column)] * bool(table.names)
                    named.append((", ".join(parts) or row, table.cells[row, column]))
    return named


def _first(cell: Cell) -> RunFolder:
    """Run directory of the first seed."""
    return RunFolder(next(iter(cell.folders.values()), Path()))


def _weights(cell: Cell) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(rounds, clients, weights) of the clients that were not dropped."""
    table = _first(cell).client_rows()
    assert table is not None
    columns = {name: table.column(name).to_numpy() for name in table.column_names}
    kept = ~columns["is_dropped"].astype(bool) if "is_dropped" in columns else slice(None)
    order = np.argsort(columns["round"][kept], kind="stable")
    rounds, clients, values = (columns[name][kept][order] for name in ("round", "client", "weight"))
    return rounds, clients, values


def _is_nine_plus_one(cell: Cell) -> bool:
    return (_first(cell).read_config().get("partition") or {}).get("scheme") == "nine_plus_one"


@dataclass(frozen=True)
class Norms:
    """Gradient norms of one round: [clients, columns]."""

    round_index: int
    values: np.ndarray
    clients: list[str]
    columns: list[str]


def norms(cell: Cell, *, title: str) -> Figure:
    """Gradient norms, client by layer, at the first and the last round that logged them; one logarithmic scale."""
    from matplotlib.colors import LogNorm

    found = read_norms(_first(cell).path)
    shown = [found[0], found[-1]] if len(found) > 1 else found
    positive = [item.values[np.isfinite(item.values) & (item.values > 0)] for item in shown]
    if not any(part.size for part in positive):
        raise NothingToDraw("no run logged gradient norms")
    low, high = min(p.min() for p in positive if p.size), max(p.max() for p in positive if p.size)
    scale = LogNorm(low, high if high > low else low * 1.01)
    height = 1.4 + 0.16 * max(len(item.clients) for item in shown) + 0.06 * max(map(len, shown[0].columns))
    figure = Figure(figsize=(1.5 + 4.2 * len(shown), float(np.clip(height, 3.0, 9.0))), layout="constrained")
    panels = figure.subplots(1, len(shown), squeeze=False)[0]
    for axes, item in zip(panels, shown, strict=True):
        drawn = np.ma.masked_invalid(np.where(item.values > 0, item.values, np.nan))
        image = axes.imshow(drawn, aspect="auto", cmap="viridis", norm=scale, interpolation="nearest")
        every, each = max(1, -(-len(item.columns) // 32)), max(1, -(-len(item.clients) // 40))
        axes.set_xticks(range(0, len(item.columns), every), item.columns[::every], rotation=90, fontsize=7)
        axes.set_yticks(range(0, len(item.clients), each), item.clients[::each], fontsize=7)
        axes.set(title=f"round {item.round_index}", xlabel="layer", ylabel="client")
    figure.colorbar(image, ax=list(panels), label="gradient norm", shrink=0.9)
    figure.suptitle(title, fontsize=10)
    return figure


def cells_with_norms(tables: Sequence[Table]) -> list[tuple[str, Cell]]:
    """(name, cell) of the first cells whose first seed logged norms."""
    return [(name, cell) for name, cell in _named_cells(tables) if cell.folders and read_norms(_first(cell).path)][
        :MOST_MAPS
    ]


def read_norms(folder: Path) -> list[Norms]:
    """The arrays `<method>.norms` that a run logged, in the order of rounds."""
    found = []
    for path in sorted((folder / "arrays").glob("round_*.npz")):
        with np.load(path, allow_pickle=False) as arrays:
            name = next((name for name in arrays.files if name.endswith(".norms")), None)
            if name is None or arrays[name].ndim != 2:
                continue
            values = arrays[name]
            clients = arrays.get(f"{name}:clients", np.arange(values.shape[0]))
            columns = arrays.get(f"{name}:columns", np.arange(values.shape[1]))
            found.append(Norms(int(path.stem.split("_")[1]), values, [*map(str, clients)], [*map(str, columns)]))
    return sorted(found, key=lambda item: item.round_index)
