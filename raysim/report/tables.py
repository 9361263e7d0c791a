"""Cells of runs that differ in their seed alone, and tables of cells."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from raysim.config import nearest
from raysim.core.errors import ConfigError, DataError, Fault
from raysim.report.metrics import Metric, score
from raysim.report.published import ACCURACIES, Label, Published, is_same, match, number
from raysim.report.runs import Run

#: Values of the column labels; None where a cell lacks the label.
Column = tuple[Label | None, ...]


@dataclass(frozen=True)
class Cell:
    """One setting. Accuracies and other shares in percent; `std` is over seeds with ddof 1, None for one seed.

    A cell of a published table has no scores, and n = 0. `is_joint`: all its runs trained on all examples together.
    """

    labels: Mapping[str, Label]
    mean: float
    std: float | None
    scores: Mapping[Label, float]
    folders: Mapping[Label, Path]
    published: Published | None = None
    is_joint: bool = False

    @property
    def n(self) -> int:
        return len(self.scores)

    @property
    def difference(self) -> float | None:
        """Ours minus the published mean."""
        if self.published is None or self.published.value is None or not self.scores:
            return None
        return self.mean - self.published.value


@dataclass(frozen=True)
class Gain:
    """Mean difference of so many pairs of cells of one column, in points, and the published one."""

    mean: float
    n: int
    published: float | None


@dataclass(frozen=True)
class Table:
    """Cells by row and column. `labels` sets the table apart from the others; `names` are the column labels.

    `gains` is a line below the rows, called `gain_name`; empty if none was asked for. `metric`: what the cells hold.
    """

    labels: Mapping[str, Label]
    names: tuple[str, ...]
    rows: tuple[str, ...]
    columns: tuple[Column, ...]
    cells: Mapping[tuple[str, Column], Cell]
    gains: Mapping[Column, Gain] = field(default_factory=dict)
    gain_name: str = ""
    metric: Metric = field(default_factory=lambda: Metric("accuracy"))

    def row_cells(self, row: str) -> dict[Column, Cell]:
        """The cells that a row has, by column."""
        return {column: self.cells[row, column] for column in self.columns if (row, column) in self.cells}

    def column_cells(self, column: Column) -> dict[str, Cell]:
        """The cells that a column has, by row."""
        return {row: self.cells[row, column] for row in self.rows if (row, column) in self.cells}

    @property
    def title(self) -> str:
        return describe(self.labels)

    @cached_property
    def bounds(self) -> frozenset[str]:
        """Rows of joint training alone: upper bounds for the others, if there are others."""
        competing = {row for (row, _), cell in self.cells.items() if not cell.is_joint}
        return frozenset(row for row in self.rows if row not in competing) if competing else frozenset()

    @cached_property
    def marks(self) -> dict[tuple[str, Column], str]:
        """ "best" or "second" for the cells of a column that print the best mean and the next one.

        Cells that print the same number get the same mark. A column of one cell has none, and bounds have none.
        """
        rows = [row for row in self.rows if row not in self.bounds]
        marks: dict[tuple[str, Column], str] = {}
        for column in self.columns:
            means = {row: self.cells[row, column].mean for row in rows if (row, column) in self.cells}
            printed = {row: round(mean, self.metric.digits) for row, mean in means.items()}
            ranks = sorted(set(printed.values()), reverse=self.metric.mode == "max")
            if len(printed) > 1:
                marks |= {(row, column): "best" for row in printed if printed[row] == ranks[0]}
                marks |= {(row, column): "second" for row in printed if printed[row] in ranks[1:2]}
        return marks


def describe(labels: Mapping[str, Label]) -> str:
    """`CIFAR-10 / ResNet-18, rho = 0.5`: data set and model first, without their names."""
    named = [text(labels[name]) for name in ("dataset", "model") if name in labels]
    rest = [f"{key} = {text(value)}" for key, value in labels.items() if key not in ("dataset", "model")]
    return ", ".join([" / ".join(named)] * bool(named) + rest) or "all runs"


def heading(names: Sequence[str], column: Column) -> str:
    """`alpha = 0.1, rho = 1`, or `alpha = 0.1, no rho`."""
    told = [f"no {n}" if value is None else f"{n} = {text(value)}" for n, value in zip(names, column, strict=True)]
    return ", ".join(told) or "accuracy"


def text(value: Label | None) -> str:
    if value is None:
        return "-"
    return f"{value:g}" if isinstance(value, float) else str(value)


def cells_of(
    runs: Sequence[Run], metrics: Sequence[tuple[Mapping[str, Label], Metric]], tables: Sequence[Published]
) -> list[Cell]:
    """Average the finished runs over their seeds, and find the published number of each cell.

    A run that was made twice (equal parameters at the end) counts once: sweeps that share runs can be reported together.

    Args:
      metrics: (labels that the metric adds, metric): a cell of each run for each of them.
    Raises:
      DataError: two different runs of one setting and seed, or a run without that metric.
    """
    groups: dict[tuple[tuple[str, Label], ...], dict[Label, Run]] = {}
    for run in runs:
        same = groups.setdefault(tuple(sorted(run.labels.items())), {})
        if run.seed not in same:
            same[run.seed] = run
        elif not _is_again(run, same[run.seed], [metric for _, metric in metrics]):
            what = f"two different runs of {describe(run.labels)} with seed {run.seed}"
            where = f"{same[run.seed].folder} and {run.folder}"
            raise DataError(what, where, "report one of them, or tell them apart by `labels` in their configurations")
    return [_cell(same, more, metric, tables) for same in groups.values() for more, metric in metrics]


def _is_again(run: Run, other: Run, metrics: Sequence[Metric]) -> bool:
    """Whether two runs came to the same parameters and the same numbers."""
    params = run.summary.get("params_sha256")
    is_equal = params is not None and params == other.summary.get("params_sha256")
    return is_equal and all(metric.score(run) == metric.score(other) for metric in metrics)


def _cell(same: Mapping[Label, Run], more: Mapping[str, Label], metric: Metric, tables: Sequence[Published]) -> Cell:
    scores = {seed: score(same[seed], metric) for seed in sorted(same, key=_order)}
    labels = {**next(iter(same.values())).labels, **more}
    mean, std = mean_and_std(list(scores.values()))
    folders = {seed: same[seed].folder for seed in scores}
    is_joint = all(run.is_joint for run in same.values())
    return Cell(labels, mean, std, scores, folders, match(tables, labels), is_joint)


def mean_and_std(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and standard deviation with ddof 1; no deviation of one value."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None


def published_cells(tables: Sequence[Published]) -> list[Cell]:
    """The accuracies of published tables as cells without runs; "-" is left out, and so is a cell told before."""
    cells: dict[tuple[tuple[str, Label], ...], Cell] = {}
    for row in tables:
        if row.metric in ACCURACIES and row.value is not None:
            names = {"dataset": row.dataset, "model": row.model, "method": row.method}
            values = {key: _number_or_text(value) for key, value in row.setting.items()}
            labels: dict[str, Label] = {**names, **values}
            cells.setdefault(tuple(sorted(labels.items())), Cell(labels, row.value, row.std, {}, {}, row))
    return list(cells.values())


def _number_or_text(value: str) -> Label:
    known = number(value)
    return value if known is None else known


def make_tables(
    cells: Sequence[Cell],
    *,
    rows: str,
    columns: Sequence[str],
    first: Sequence[str] = (),
    last: Sequence[str] = (),
    order: Sequence[Published] = (),
    ignore: Sequence[str] = (),
    metric: Metric | None = None,
) -> list[Table]:
    """Arrange cells: one table for each combination of the labels that are neither row nor column and vary.

    Args:
      columns: column labels; if empty, every label that varies besides data set, model and rows.
      first, last: rows that stand at the ends.
      order: published cells, whose order rows, columns and tables follow where they know them; else numbers and names
        ascend.
      ignore: labels that make neither columns nor tables, whatever they hold.
      metric: what the cells hold; accuracies if not given.
    Raises:
      ConfigError: no cell has such a label. DataError: two cells fall on one place.
    """
    known = [key for key in dict.fromkeys(key for cell in cells for key in cell.labels) if key not in ignore]
    faults = [
        Fault(f"report.{key}", f"no run has a label {name!r}. {nearest(name, known)}")
        for key, names in (("rows", [rows]), ("columns", columns))
        for name in names
        if name not in known
    ]
    if faults:
        raise ConfigError(faults, "the report")
    varying = [key for key in known if len({cell.labels.get(key) for cell in cells}) > 1]
    names = tuple(columns or [key for key in varying if key not in ("dataset", "model", rows)])
    apart = [key for key in known if key not in (rows, *names) and (key in ("dataset", "model") or key in varying)]
    groups: dict[tuple[tuple[str, Label], ...], dict[tuple[str, Column], Cell]] = {}
    for cell in cells:
        group = groups.setdefault(tuple((key, cell.labels[key]) for key in apart if key in cell.labels), {})
        place = (text(cell.labels.get(rows)), tuple(cell.labels.get(name) for name in names))
        if place in group:
            raise DataError(
                f"two settings in one cell ({place[0]}, {heading(names, place[1])})", mend="name more labels"
            )
        group[place] = cell
    rank = _ranking(order)
    tables = []
    for labels, found in groups.items():
        in_order = sorted({row for row, _ in found}, key=lambda row: (_end(row, first, last), rank(rows, row)))
        across = sorted(
            {column for _, column in found}, key=lambda c: [rank(n, v) for n, v in zip(names, c, strict=True)]
        )
        held = metric or Metric("accuracy")
        tables.append(Table(dict(labels), names, tuple(in_order), tuple(across), found, metric=held))
    return sorted(tables, key=lambda table: [rank(name, value) for name, value in table.labels.items()])


def _end(row: str, first: Sequence[str], last: Sequence[str]) -> int:
    """-1 for rows that come first, 1 for rows that come last."""
    return any(is_same(row, name) for name in last) - any(is_same(row, name) for name in first)


def _ranking(order: Sequence[Published]) -> Callable[[str, Label | None], tuple[int, int, float, str]]:
    """A sort key for label values: as published, then numbers, then names."""

    def rank(name: str, value: Label | None) -> tuple[int, int, float, str]:
        seen = published_values.setdefault(name, _values(order, name))
        place = next((index for index, other in enumerate(seen) if is_same(other, value)), len(seen))
        as_number = number(value)
        return (place, as_number is None, as_number or 0.0, text(value).casefold())

    published_values: dict[str, list[str]] = {}
    return rank


def _values(order: Sequence[Published], name: str) -> list[str]:
    named = ("dataset", "model", "method")
    return list(dict.fromkeys(getattr(row, name) if name in named else row.setting.get(name, "") for row in order))


def _order(value: Label) -> tuple[bool, float, str]:
    return (isinstance(value, str), 0.0 if isinstance(value, str) else value, str(value))


def resolve_row(name: str, tables: Sequence[Table]) -> str | None:
    """The row that a user means by a name, however it is written; None if there is none."""
    rows = list(dict.fromkeys(row for table in tables for row in table.rows))
    return name if name in rows else next((row for row in rows if is_same(row, name)), None)


def bounds_of(tables: Sequence[Table]) -> set[str]:
    """Rows that are upper bounds in every table that has them."""
    return {row for row in all_rows(tables) if all(row in table.bounds for table in tables if row in table.rows)}


def all_rows(tables: Sequence[Table]) -> list[str]:
    """The rows of all tables, in the order of the first table that has them."""
    return list(dict.fromkeys(row for table in tables for row in table.rows))
