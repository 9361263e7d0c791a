"""Contents of a report: tables of the metric, tests, and further tables."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from raysim.base.errors import ConfigError, Fault
from raysim.base.texts import number
from raysim.config import ReportGroup
from raysim.folders.run_folder import RunFolder
from raysim.reporting.measure import BESIDE, ReportMetric, every_of, recorded
from raysim.reporting.panels import Styles, styles_of
from raysim.reporting.published import Published, is_same, match
from raysim.reporting.render import Entry, Line, accuracy, header_of, published_line, published_text, with_sign
from raysim.reporting.runs import ReportedRun
from raysim.reporting.significance import Comparison
from raysim.reporting.tables import (
    Cell,
    Column,
    Table,
    all_columns,
    all_rows,
    averages_of,
    heading,
    mean_and_std,
    row_of,
    upper_bounds,
)


@dataclass(frozen=True)
class Extra:
    """A further table: heading, caption and lines."""

    title: str
    caption: str
    header: Sequence[str]
    lines: Sequence[Line]


@dataclass(frozen=True)
class ReportContents:
    """Contents of a report.

    Attributes:
      theirs: published cells that are shown beside the runs.
      subject, baseline: rows of the group's `against` and `baseline`, if the tables have them.
      others: tables of best accuracy if the metric is last accuracy, and the reverse; empty for other metrics.
      extras: further tables: averages, times, costs, and choices of layers.
      changed: settings that differ from the recipe of the published numbers, see `changed_settings`.
      printed: the accuracy that the papers print, in words.
      by_table: tests over tables; by_seed: title of a table -> tests over its seeds.
    """

    group: ReportGroup
    runs: Sequence[ReportedRun]
    tables: Sequence[Table]
    theirs: Sequence[Published]
    subject: str | None
    baseline: str | None
    by_table: Sequence[Comparison]
    by_seed: Mapping[str, Sequence[Comparison]]
    notes: Sequence[str]
    others: Sequence[Extra] = ()
    extras: Sequence[Extra] = ()
    changed: Sequence[str] = ()
    printed: str = ""

    @property
    def finished(self) -> list[ReportedRun]:
        return [run for run in self.runs if run.is_finished]

    @property
    def measure(self) -> ReportMetric:
        return self.tables[0].metric

    @property
    def metric(self) -> str:
        """The metric in words."""
        if not self.runs:
            return f"as published, {self.printed}"
        named = (item for every in self.group.metrics.values() for item in every.items())
        return "; ".join(f"{value}: {ReportMetric(name).words}" for value, name in named) or self.measure.words

    @property
    def axis(self) -> str:
        """Axis label of figures: the metric, or the common beginning of all `report.metrics`, with the unit."""
        names = [ReportMetric(name).quantity for every in self.group.metrics.values() for name in every.values()]
        parts = zip(*(name.split("_") for name in names), strict=False)
        shared = "_".join(part for part, *others in itertools.takewhile(lambda each: len({*each}) == 1, parts))
        return self.measure.axis.replace(self.measure.quantity, shared or self.measure.quantity)

    @property
    def heading(self) -> str:
        """The metric as a heading, with its unit."""
        if not self.runs:
            return f"{self.metric[0].upper()}{self.metric[1:]}, in %"
        title = self.measure.title
        is_name = self.measure.words == self.measure.name  # a column's name keeps its case
        return title if is_name else title[0].upper() + title[1:]

    @property
    def cells(self) -> list[Cell]:
        return [cell for table in self.tables for cell in table.cells.values()]

    @cached_property
    def styles(self) -> Styles:
        """Style of each row in all figures; the subject's line is thicker."""
        return styles_of(all_rows(self.tables), self.subject)


#: Caption of the tables in `ReportContents.others`.
CHOSEN = "The same runs. The best round is selected on the test set; the last round is not."

#: Metrics of relative times in published tables.
TIMES = ("time_rel_fedavg",)


def other_accuracy(tables: Sequence[Table], rows: str, runs: Sequence[ReportedRun]) -> Iterator[Extra]:
    """Yield tables of last accuracy for tables of best accuracy, and the reverse; nothing for other metrics.

    Args:
      rows: the label of the rows; runs: all runs of the tables.
    """
    name = BESIDE.get(tables[0].metric.name)
    if name is None:
        return
    metric = ReportMetric(name)
    scores = {run.folder: metric.score(run) for run in runs}

    def entry(cell: Cell | None) -> Entry:
        folders = cell.folders.values() if cell else ()
        numbers = [score for folder in folders if (score := scores[folder]) is not None]
        return Entry(accuracy(*mean_and_std(numbers), metric.digits) if numbers else "-")

    for table in tables:
        lines = [(row, tuple(map(entry, table.line(row)))) for row in table.rows]
        yield Extra(f"{table.title}: {metric.title}", CHOSEN, header_of(table, rows), lines)


def relative_times(tables: Sequence[Table], rows: str, baseline: str, theirs: Sequence[Published]) -> Iterator[Extra]:
    """Yield tables of training seconds per round, divided by the baseline row's in the same column, paired by seed.

    Args:
      rows: the label of the rows.
    """
    caption = (
        f"Mean training seconds per round divided by the seconds of {baseline} with the same seed; the first round, "
        "aggregation and evaluation are excluded. Runs on a shared machine disturb each other's times."
    )
    for table in tables:
        lines: list[Line] = []
        for row in table.rows:
            cells = table.line(row)
            ratios = list(map(_ratio, cells, table.line(baseline)))
            if any(ratio is not None for ratio in ratios):
                printed = [match(theirs, cell.labels, metrics=TIMES) if cell else None for cell in cells]
                lines.append((row, tuple(Entry("-" if ratio is None else f"{ratio:.2f}") for ratio in ratios)))
                lines += published_line(map(_beside, ratios, printed))
        if lines:
            yield Extra(f"Relative time: {table.title}", caption, header_of(table, rows, "time"), lines)


def _ratio(cell: Cell | None, base: Cell | None) -> float | None:
    if cell is None or base is None:
        return None
    seeds = [seed for seed in cell.folders if seed in base.folders]
    times = [(mean_train_seconds(cell.folders[seed]), mean_train_seconds(base.folders[seed])) for seed in seeds]
    ratios = [one / other for one, other in times if one and other]
    return float(np.mean(ratios)) if ratios else None


def _beside(ratio: float | None, printed: Published | None) -> str:
    if printed is None or printed.value is None:
        return ""
    return f"{printed.value:.2f}" + ("" if ratio is None else f" ({with_sign(ratio - printed.value)})")


def mean_train_seconds(folder: Path) -> float | None:
    """Return mean training seconds per round, without the first round, which includes start-up and compilation."""
    seconds = list(recorded(folder, "system/train_s").values())[1:]
    return float(np.mean(seconds)) if seconds else None


def best_on_average(tables: Sequence[Table]) -> dict[Column, list[tuple[str, Cell]]]:
    """Return column -> rows present in the most tables, best average first. Bounds are left out.

    A column is left out if none of its rows is in two tables, or if only one row is in the most tables.
    """
    means, bounds = averages_of(tables), upper_bounds(tables)
    sign = -1 if tables[0].metric.mode == "max" else 1
    ranked = {}
    for column in all_columns(tables):
        rows = {row: means[row, column] for row in all_rows(tables) if (row, column) in means and row not in bounds}
        most = max((average.n for average in rows.values()), default=0)
        whole = [(row, average) for row, average in rows.items() if average.n == most]
        if most > 1 and len(whole) > 1:
            ranked[column] = sorted(whole, key=lambda item: sign * item[1].mean)
    return ranked


def averages(tables: Sequence[Table], rows: str) -> Iterator[Extra]:
    """Yield a table of the averages: a line per row, with the number of tables if some tables lack the row."""
    means, best = averages_of(tables), {column: rows[0][1] for column, rows in best_on_average(tables).items()}
    digits, bounds = tables[0].metric.digits, upper_bounds(tables)
    if not best:
        return

    def entry(row: str, column: Column) -> Entry:
        if (row, column) not in means:
            return Entry("-")
        average, most = means[row, column], best[column]
        few = f" ({average.n} of {most.n})" if average.n != most.n else ""
        is_first = not few and row not in bounds and round(average.mean, digits) == round(most.mean, digits)
        return Entry(f"{average.mean:.{digits}f}{few}", "best" if is_first else "")

    caption = (
        f"Mean of the means above over {max(average.n for average in best.values())} tables with equal weight; "
        f"the {tables[0].metric.first} **bold**, among the rows in all tables."
    )
    header = [rows, *(heading(tables[0].names, column, tables[0].metric.quantity) for column in best)]
    lines = [(row, tuple(entry(row, column) for column in best)) for row in all_rows(tables)]
    yield Extra("Average over tables", caption, header, lines)


class Cost(NamedTuple):
    """Cost up to and including the first evaluated round that reached the target."""

    rounds: int
    megabytes: float
    seconds: float
    simulated_h: float = 0.0


#: Unit of each field of `Cost` -> digits of its mean. Simulated hours are shown only if a run has simulated time.
UNITS = {"rounds": 1, "MB": 1, "s": 1, "simulated h": 3}


def cost(folder: Path, column: str, target: float) -> Cost | None:
    """Return a run's cost until a column of progress.csv reached the target; None if never.

    Megabytes count data that clients received and sent; seconds are of whole rounds, evaluation included.

    Args:
      target: in the column's own unit, a fraction for accuracies.
    """
    files = RunFolder(folder)
    every = every_of(files.read_config())
    # The tolerance absorbs the rounding of the conversion from percent, so that a row reaches its own mean.
    reached = next((index for index, value in recorded(folder, column, every).items() if value >= target - 1e-9), None)
    if reached is None:
        return None
    rows = [row for row in files.progress_rows() if int(row["round"]) <= reached]

    def total(name: str) -> float:
        return sum(float(row.get(name) or 0.0) for row in rows)

    hours = float(rows[-1].get("time/simulated_s") or 0.0) / 3600
    return Cost(reached + 1, total("comm/up_mb") + total("comm/down_mb"), total("system/round_s"), hours)


def costs(tables: Sequence[Table], rows: str, target: str | float) -> Iterator[Extra]:
    """Yield a table of costs for each table: mean and deviation over the seeds that reached the target.

    Args:
      rows: the label of the rows.
      target: accuracy in percent, or a row, whose mean accuracy in the same column is the target.
    """
    caption = (
        "Rounds, megabytes between server and clients, seconds of complete rounds, and hours of simulated time until the first "
        "evaluated round with this test accuracy; mean ± standard deviation over the seeds that reached the accuracy, with "
        "their number if some did not."
    )
    for table in tables:
        if isinstance(target, str):
            levels = {column: cell.mean for column, cell in table.row_cells(target).items()}
        else:
            levels = dict.fromkeys(table.columns, target)
        folders = [folder for cell in table.cells.values() for folder in cell.folders.values()]
        units = UNITS if any(RunFolder(each).read_config().get("time") for each in folders) else [*UNITS][:-1]
        header = [rows]
        for column, level in levels.items():
            name = f"{heading(table.names, column)}, " if table.names else ""
            header += [f"{name}{level:.2f} %: {unit}" for unit in units]
        lines: list[Line] = []
        for row in table.rows:
            entries = [_entries(table.cells.get((row, c)), level, units) for c, level in levels.items()]
            lines.append((row, tuple(itertools.chain(*entries))))
        if levels:
            yield Extra(f"To a target accuracy: {table.title}", caption, header, lines)


def target_of(target: str | float | None, tables: Sequence[Table]) -> str | float | None:
    """Return the target as a number, or the row that sets it.

    Raises:
      ConfigError: the target is not above 1 and at most 100. LookupError: no such row, or the metric is not a share of
        which more is better.
    """
    value = number(target)
    if target is not None and tables and not ((metric := tables[0].metric).is_share and metric.mode == "max"):
        raise LookupError(f"is an accuracy, and this report is about {metric.name}")
    if value is None:
        return None if target is None else row_of(str(target), tables)
    if not 1 < value <= 100:
        text = f"must be an accuracy in percent, above 1 and at most 100, or a row, got {target!r}"
        raise ConfigError([Fault("report.target", text)], "the report")
    return value


def _entries(cell: Cell | None, level: float, units: Iterable[str]) -> list[Entry]:
    """Return a cell's costs until its own metric reached `level` percent, an entry per unit."""
    costs = [cost(folder, cell.metric.column, level / 100) for folder in cell.folders.values()] if cell else []
    reached = [cost for cost in costs if cost is not None]
    if not reached:
        return [Entry("never" if costs else "-") for _ in units]
    count = f" ({len(reached)} of {len(costs)})" if len(reached) < len(costs) else ""
    numbers = zip(units, zip(*reached, strict=True), strict=False)
    return [Entry(accuracy(*mean_and_std(values), digits=UNITS[unit]) + count) for unit, values in numbers]


#: Layer block, in module order -> row -> percent of FLFA's choices (mean over seeds).
Shares = dict[str, dict[str, Cell]]


def selection_shares(table: Table, theirs: Sequence[Published]) -> Shares:
    """Return how often each row chose layers of each block.

    A seed's percentage is the mean over its columns, so that a data set with more rounds has no more weight. If a
    published table has as many stages as there are blocks, stages and blocks are matched in order, and the stages name
    the blocks.
    """
    shares: Shares = {}
    for row in table.rows:
        cells = list(table.row_cells(row).values())
        runs = [(seed, _percentages(folder)) for cell in cells for seed, folder in cell.folders.items()]
        runs = [(seed, percentages) for seed, percentages in runs if len(percentages)]
        if not runs:
            continue
        # A block missing from a run was never chosen in that run.
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
    """Return a block's name in FLFA's table 13: the stage of a bottleneck, else the kind of block."""
    return cell.setting["stage"] if cell.setting["block"] == "Bottleneck" else cell.setting["block"]


def choosing(table: Table, shares: Shares) -> list[str]:
    """Return the rows that logged their choices."""
    return [row for row in table.rows if any(row in cells for cells in shares.values())]


def selections(tables: Sequence[Table], rows: str, theirs: Sequence[Published]) -> Iterator[Extra]:
    """Yield `selection_shares` as tables: a line per layer block, a column per row that logged its choices."""
    for table in tables:
        shares = selection_shares(table, theirs)
        header = choosing(table, shares)
        lines: list[Line] = []
        for block, cells in shares.items():
            block_cells = [cells.get(row) for row in header]
            lines.append((block, tuple(Entry(accuracy(cell.mean, cell.std) if cell else "-") for cell in block_cells)))
            lines += published_line(map(published_text, block_cells))
        if lines:
            caption = (
                f"Percent of FLFA's choices in each layer block, with equal weight for all runs; one column per {rows}."
            )
            yield Extra(f"Layers chosen: {table.title}", caption, ["layer block", *header], lines)
