"""How often FLFA chose a layer of each layer block (its table 13), as tables and as a figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from raysim.folders.run_folder import RunFolder
from raysim.reporting.contents import Extra, ReportContents
from raysim.reporting.figures import grouped_bars
from raysim.reporting.panels import grid, legend, wrap
from raysim.reporting.published import Published, is_same
from raysim.reporting.render import PUBLISHED, Entry, Line, accuracy, signed
from raysim.reporting.tables import Cell, Table, mean_and_std

#: Layer block, in module order -> row -> percent of FLFA's choices (mean over seeds).
Shares = dict[str, dict[str, Cell]]


def selection_shares(table: Table, theirs: Sequence[Published]) -> Shares:
    """How often each row chose a layer of each block.

    The percentages of a seed are the means of those of its columns: a data set with more rounds weighs as much as any other.
    Where a published table has as many stages as there are blocks, they are taken to be the same in the same order, and
    the blocks get their names.
    """
    shares: Shares = {}
    for row in table.rows:
        cells = list(table.row_cells(row).values())
        runs = [(seed, _percentages(folder)) for cell in cells for seed, folder in cell.folders.items()]
        runs = [(seed, percentages) for seed, percentages in runs if len(percentages)]
        if not runs:
            continue
        # A block that a run does not name was never chosen there.
        by_run = pd.concat([percentages for _, percentages in runs], axis=1).fillna(0.0).T
        by_seed = by_run.groupby([seed for seed, _ in runs], sort=False).mean()
        strategy = cells[0].labels.get("strategy")
        stages = [p for p in theirs if p.metric == "selection_pct" and is_same(p.setting.get("strategy"), strategy)]
        are_blocks = len(stages) == len(by_seed.columns)
        for place, (block, scores) in enumerate(by_seed.items()):
            mean, std = mean_and_std(list(scores))
            stage = stages[place] if are_blocks else None
            name = f"{_stage_name(stage)} ({block})" if stage else str(block)
            shares.setdefault(name, {})[row] = Cell(cells[0].labels, mean, std, scores.to_dict(), {}, stage)
    return shares


def _percentages(folder: Path) -> pd.Series:
    """Layer block -> percent of a run's choices; empty if it logged none."""
    rounds = []
    for _, arrays in RunFolder(folder).logged_arrays():
        if "flfa.selected" in arrays:
            chosen = arrays["flfa.selected"]
            blocks = arrays.get("flfa.selected:columns", range(len(chosen)))
            rounds.append(pd.Series(chosen, [str(block) for block in blocks]))
    if not rounds:
        return pd.Series(dtype=float)
    counts = pd.concat(rounds).groupby(level=0, sort=False).sum()
    return (100 * counts / counts.sum()).dropna()


def _stage_name(cell: Published) -> str:
    """Table 13's own words: the stage of a bottleneck, else the kind of block."""
    return cell.setting["stage"] if cell.setting["block"] == "Bottleneck" else cell.setting["block"]


def selection(report: ReportContents) -> Iterator[Figure]:
    """Bars of how often each layer block was chosen, a colour for each row; a figure for each table."""
    for table in report.tables:
        shares = selection_shares(table, report.theirs)
        if shares:
            figure, (axes,) = grid(1, width=min(14.0, 2.5 + 0.7 * len(shares)), height=3.2)
            grouped_bars(axes, shares, _rows(table, shares), report.styles, edge=1.0, cap=2, single=np.nan)
            axes.set_xticks(range(len(shares)), [wrap(b.replace(" (", "\n("), 14) for b in shares], fontsize=7)
            axes.set(ylabel="chosen (%)", title=table.title, ylim=(0, None))
            legend(figure, [axes])
            yield figure


def _rows(table: Table, shares: Shares) -> list[str]:
    """The rows that logged their choices."""
    return [row for row in table.rows if any(row in cells for cells in shares.values())]


def selections(tables: Sequence[Table], rows: str, theirs: Sequence[Published]) -> list[Extra]:
    """The same as tables: a line for each layer block, a column for each row of the accuracies."""
    extras = []
    for table in tables:
        shares = selection_shares(table, theirs)
        header = _rows(table, shares)
        lines: list[Line] = []
        for block, cells in shares.items():
            found = [cells.get(row) for row in header]
            lines.append((block, tuple(Entry(accuracy(cell.mean, cell.std) if cell else "-") for cell in found)))
            if any(cell and cell.published for cell in found):
                lines.append((PUBLISHED, tuple(Entry(_printed(cell)) for cell in found)))
        if lines:
            caption = f"Percent of FLFA's choices in each layer block, runs weighing equally; a column for each {rows}."
            extras.append(Extra(f"Layers chosen: {table.title}", caption, ["layer block", *header], lines))
    return extras


def _printed(cell: Cell | None) -> str:
    if cell is None or cell.published is None or cell.published.value is None:
        return ""
    return f"{cell.published.value:.2f} ({signed(cell.difference or 0.0)})"
