"""How often FLFA chose a layer of each layer block (its table 13), as tables and as a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from raysim.report.contents import Extra
from raysim.report.inside import all_arrays
from raysim.report.panels import NothingToDraw, Style, grid, legend, wrap
from raysim.report.published import Label, Published, is_same
from raysim.report.render import PUBLISHED, Entry, Line, accuracy, signed
from raysim.report.tables import Cell, Table, mean_and_std

Shares = dict[str, dict[str, Cell]]


def selection_shares(table: Table, theirs: Sequence[Published]) -> Shares:
    """Row -> layer block -> percent of FLFA's choices (mean over seeds), in module order.

    The percentages of a seed are the means of those of its columns: a data set with more rounds weighs as much as any other.
    Where a published table has as many stages as there are blocks, they are taken to be the same in the same order, and
    the blocks get their names.
    """
    shares: Shares = {}
    for row in table.rows:
        cells = [table.cells[row, column] for column in table.columns if (row, column) in table.cells]
        runs: dict[Label, list[dict[str, float]]] = {}
        for cell in cells:
            for seed, folder in cell.folders.items():
                if chosen := _percentages(folder):
                    runs.setdefault(seed, []).append(chosen)
        if runs:
            shares[row] = _with_published(_over_seeds(cells[0], runs), cells[0], theirs)
    return shares


def _percentages(folder: Path) -> dict[str, float]:
    """Layer block -> percent of a run's choices; nothing if it logged none."""
    counts: dict[str, float] = {}
    for chosen, blocks in all_arrays(folder, "flfa.selected"):
        for block, count in zip(map(str, blocks), chosen, strict=True):
            counts[block] = counts.get(block, 0.0) + float(count)
    total = sum(counts.values())
    return {block: 100 * count / total for block, count in counts.items()} if total else {}


def _over_seeds(cell: Cell, runs: Mapping[Label, Sequence[Mapping[str, float]]]) -> dict[str, Cell]:
    found = {}
    for block in dict.fromkeys(block for sets in runs.values() for shares in sets for block in shares):
        scores = {seed: float(np.mean([s.get(block, 0.0) for s in sets])) for seed, sets in runs.items()}
        mean, std = mean_and_std(list(scores.values()))
        found[block] = Cell(cell.labels, mean, std, scores, {})
    return found


def _with_published(shares: dict[str, Cell], cell: Cell, theirs: Sequence[Published]) -> dict[str, Cell]:
    strategy = cell.labels.get("strategy")
    stages = [p for p in theirs if p.metric == "selection_pct" and is_same(p.setting.get("strategy"), strategy)]
    if len(stages) != len(shares):
        return shares
    paired = zip(shares.items(), stages, strict=True)
    return {f"{_stage_name(p)} ({block})": replace(share, published=p) for (block, share), p in paired}


def _stage_name(cell: Published) -> str:
    """Table 13's own words: the stage of a bottleneck, else the kind of block."""
    return cell.setting["stage"] if cell.setting["block"] == "Bottleneck" else cell.setting["block"]


def selection(table: Table, styles: Mapping[str, Style], theirs: Sequence[Published]) -> Figure:
    """Bars of how often each layer block was chosen, a colour for each row."""
    shares = selection_shares(table, theirs)
    if not shares:
        raise NothingToDraw("no run logged which layers FLFA chose")
    blocks = list(dict.fromkeys(block for found in shares.values() for block in found))
    figure, (axes,) = grid(1, width=min(14.0, 2.5 + 0.7 * len(blocks)), height=3.2)
    step = 0.84 / len(shares)
    for place, (row, found) in enumerate(shares.items()):
        at = [blocks.index(block) + (place - (len(shares) - 1) / 2) * step for block in found]
        means, stds = [c.mean for c in found.values()], [np.nan if c.std is None else c.std for c in found.values()]
        style = styles[row]
        axes.bar(at, means, step * 0.92, label=row, color=style.colour, hatch=style.hatch, edgecolor="white")
        axes.errorbar(at, means, stds, fmt="none", ecolor="#777777", elinewidth=1.0, capsize=2)
        for x, cell in zip(at, found.values(), strict=True):
            if cell.published is not None and cell.published.value is not None:
                value = cell.published.value
                axes.plot(x, value, "D", markersize=4, color="white", markeredgecolor="black", label="published")
    axes.set_xticks(range(len(blocks)), [wrap(block.replace(" (", "\n("), 14) for block in blocks], fontsize=7)
    axes.set(ylabel="chosen (%)", title=table.title, ylim=(0, None))
    legend(figure, [axes])
    return figure


def selections(tables: Sequence[Table], rows: str, theirs: Sequence[Published]) -> list[Extra]:
    """The same as tables: a line for each layer block, a column for each row of the accuracies."""
    extras = []
    for table in tables:
        shares = selection_shares(table, theirs)
        blocks = list(dict.fromkeys(block for found in shares.values() for block in found))
        lines: list[Line] = []
        for block in blocks:
            cells = [found.get(block) for found in shares.values()]
            lines.append((block, tuple(Entry(accuracy(c.mean, c.std) if c else "-") for c in cells)))
            if any(c is not None and c.published is not None for c in cells):
                lines.append((PUBLISHED, tuple(Entry(_printed(c)) for c in cells)))
        if lines:
            caption = f"Percent of FLFA's choices in each layer block, runs weighing equally; a column for each {rows}."
            header = ["layer block", *shares]
            extras.append(Extra(f"Layers chosen: {table.title}", caption, header, lines))
    return extras


def _printed(cell: Cell | None) -> str:
    if cell is None or cell.published is None or cell.published.value is None:
        return ""
    return f"{cell.published.value:.2f} ({signed(cell.difference or 0.0)})"
