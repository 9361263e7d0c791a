"""Cells of runs that differ in their seed alone, and tables of cells."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import product
from pathlib import Path

import numpy as np

from raysim.base.errors import DataError, Fault, refuse
from raysim.base.texts import number
from raysim.config import ReportGroup, nearest
from raysim.reporting.measure import ReportMetric, score
from raysim.reporting.published import ACCURACIES, Label, Published, is_same, match
from raysim.reporting.runs import ReportedRun

#: Values of the column labels; None where a cell lacks the label.
Column = tuple[Label | None, ...]

#: The row and the column of a cell.
Place = tuple[str, Column]

#: Metric of the cells of published tables.
ACCURACY = ReportMetric("accuracy")

#: A sort key of a label's value.
Rank = tuple[int, bool, float, str]


@dataclass(frozen=True)
class Cell:
    """A cell: a setting over its seeds. Shares in percent; `std` with ddof 1, None for one seed.

    scores: by seed in cells of runs, by table in averages, by row in gains; empty in published cells, so that n = 0.
    metric: metric of the scores.
    is_joint: whether all runs of the cell trained on all examples together.
    """

    labels: Mapping[str, Label]
    mean: float
    std: float | None
    scores: Mapping[Label, float]
    folders: Mapping[Label, Path]
    published: Published | None = None
    is_joint: bool = False
    metric: ReportMetric = ACCURACY

    @property
    def n(self) -> int:
        return len(self.scores)

    @property
    def difference(self) -> float | None:
        """The runs' mean minus the published mean; None without runs or published mean."""
        if self.published is None or self.published.value is None or not self.scores:
            return None
        return self.mean - self.published.value


@dataclass(frozen=True)
class Table:
    """Cells by row and column. `labels` distinguish the table from other tables; `names` are the column labels.

    `gains` is a line below the rows, named `gain_name`; empty without `report.gain`. A score of a gain is the
    difference between two cells, in points. `metric`: metric of the cells.
    """

    labels: Mapping[str, Label]
    names: tuple[str, ...]
    rows: tuple[str, ...]
    columns: tuple[Column, ...]
    cells: Mapping[Place, Cell]
    gains: Mapping[Column, Cell] = field(default_factory=dict)
    gain_name: str = ""
    metric: ReportMetric = ACCURACY

    def row_cells(self, row: str) -> dict[Column, Cell]:
        """Return the cells of a row, by column."""
        return {column: self.cells[row, column] for column in self.columns if (row, column) in self.cells}

    def column_cells(self, column: Column) -> dict[str, Cell]:
        """Return the cells of a column, by row."""
        return {row: self.cells[row, column] for row in self.rows if (row, column) in self.cells}

    def line(self, row: str) -> list[Cell | None]:
        """Return the row's cell in each column, None for a missing cell."""
        return [self.cells.get((row, column)) for column in self.columns]

    def competing(self, column: Column) -> dict[str, Cell]:
        """Return the cells of a column that are ranked: all except upper bounds."""
        return {row: cell for row, cell in self.column_cells(column).items() if row not in self.bounds}

    @property
    def title(self) -> str:
        return label_text(self.labels)

    @cached_property
    def bounds(self) -> frozenset[str]:
        """Rows with joint training only, which are upper bounds for the other rows; empty if all rows are joint."""
        competing = {row for (row, _), cell in self.cells.items() if not cell.is_joint}
        return frozenset(row for row in self.rows if row not in competing) if competing else frozenset()

    @cached_property
    def marks(self) -> dict[Place, str]:
        """Place -> "best" or "second", for the cells with the best and the second-best printed mean of a column.

        Cells that print the same number get the same mark. A column of one cell has no marks, and bounds have none.
        """
        marks: dict[Place, str] = {}
        for column in self.columns:
            printed = {row: round(cell.mean, self.metric.digits) for row, cell in self.competing(column).items()}
            ranks = sorted(set(printed.values()), reverse=self.metric.mode == "max")
            names = dict(zip(ranks, ("best", "second"), strict=False)) if len(printed) > 1 else {}
            marks |= {(row, column): names[mean] for row, mean in printed.items() if mean in names}
        return marks


def label_text(labels: Mapping[str, Label]) -> str:
    """Return labels as text, data set and model first and without keys: `CIFAR-10 / ResNet-18, rho = 0.5`."""
    named = [text(labels[name]) for name in ("dataset", "model") if name in labels]
    rest = [f"{key} = {text(value)}" for key, value in labels.items() if key not in ("dataset", "model")]
    return ", ".join([" / ".join(named)] * bool(named) + rest) or "all runs"


def heading(names: Sequence[str], column: Column, quantity: str = "accuracy") -> str:
    """Return a column's labels as text, `alpha = 0.1, rho = 1`; without column labels, the quantity."""
    parts = [f"{name} = {text(value)}" for name, value in zip(names, column, strict=True) if value is not None]
    return ", ".join(parts) or (f"no {', '.join(names)}" if names else quantity)


def text(value: Label | None) -> str:
    if value is None:
        return "-"
    return f"{value:g}" if isinstance(value, float) else str(value)


def other_methods(runs: Sequence[ReportedRun]) -> list[str]:
    """Return a sentence for each cell whose seeds ran different methods or options under the same name."""
    cells: dict[frozenset[tuple[str, Label]], dict[str, list[str]]] = {}
    for run in runs:
        specs = json.dumps(run.config.get("methods") or [], sort_keys=True)
        cells.setdefault(frozenset(run.labels.items()), {}).setdefault(specs, []).append(str(run.seed))
    notes = []
    for labels, by_specs in cells.items():
        if len(by_specs) > 1:
            methods = "; ".join(f"{specs} in seed {', '.join(seeds)}" for specs, seeds in by_specs.items())
            what = f"One cell of {dict(labels).get('method')} averages over several methods: {methods}."
            notes.append(f"{what} Tell them apart by `labels`.")
    return notes


def cells_of(
    runs: Sequence[ReportedRun],
    metrics: Sequence[tuple[Mapping[str, Label], ReportMetric]],
    tables: Sequence[Published],
) -> list[Cell]:
    """Average the finished runs over their seeds, and find the published number of each cell.

    A run that was made twice (equal final parameters and scores) counts once, so that sweeps that share runs can be
    reported together.

    Args:
      metrics: (labels that the metric adds, metric); each makes a cell of a setting. Of several metrics, those that a
        run did not record are skipped.
    Raises:
      DataError: two different runs of one setting and seed, or a run that did not record the only metric.
    """
    settings: dict[frozenset[tuple[str, Label]], dict[Label, ReportedRun]] = {}
    for run in runs:
        seeds = settings.setdefault(frozenset(run.labels.items()), {})
        twin = seeds.setdefault(run.seed, run)
        if twin is not run and not _is_again(run, twin, [metric for _, metric in metrics]):
            what = f"two different runs of {label_text(run.labels)} with seed {run.seed}"
            mend = "report one, or set `labels` in the configurations to tell the runs apart"
            raise DataError(what, f"{twin.folder} and {run.folder}", mend)
    cells = []
    for seeds, (more, metric) in product(settings.values(), metrics):
        # A run without one of several metrics is skipped; for a single metric, `score` raises and names recorded ones.
        by_seed = {seed: run for seed, run in seeds.items() if len(metrics) == 1 or metric.score(run) is not None}
        if by_seed:
            cells.append(_cell(by_seed, more, metric, tables))
    return cells


def _is_again(run: ReportedRun, other: ReportedRun, metrics: Sequence[ReportMetric]) -> bool:
    """Return whether two runs have the same final parameters and the same scores."""
    params = run.summary.get("params_sha256")
    is_equal = params is not None and params == other.summary.get("params_sha256")
    return is_equal and all(metric.score(run) == metric.score(other) for metric in metrics)


def _cell(
    seeds: Mapping[Label, ReportedRun], more: Mapping[str, Label], metric: ReportMetric, tables: Sequence[Published]
) -> Cell:
    runs = {seed: seeds[seed] for seed in sorted(seeds, key=_ascending)}
    first = next(iter(seeds.values()))
    labels = {**first.labels, **more}
    return replace(
        cell_of(labels, {seed: score(run, metric) for seed, run in runs.items()}, match(tables, labels)),
        folders={seed: run.folder for seed, run in runs.items()},
        is_joint=all(run.is_joint for run in seeds.values()),
        metric=metric,
    )


def cell_of(labels: Mapping[str, Label], scores: Mapping[Label, float], published: Published | None = None) -> Cell:
    """Return the cell of the given scores."""
    return Cell(labels, *mean_and_std(list(scores.values())), scores, {}, published)


def difference(one: Cell, other: Cell) -> float:
    """Return the difference of two means, over common seeds if there are any, as in the tests."""
    ours, theirs = paired(one, other)
    return float(np.mean(np.subtract(ours, theirs))) if ours else one.mean - other.mean


def paired(one: Cell, other: Cell) -> tuple[list[float], list[float]]:
    """Return the scores of the seeds that both cells have, in the same order."""
    common = [seed for seed in one.scores if seed in other.scores]
    return [one.scores[seed] for seed in common], [other.scores[seed] for seed in common]


def pooled(one: Cell, other: Cell, names: Sequence[str]) -> Cell:
    """Merge two cells over all their runs; score keys then include the labels of the given names."""
    scores: dict[Label, float] = {}
    folders: dict[Label, Path] = {}
    for cell in (one, other):
        shown = {key: value for key, value in cell.labels.items() if key in names}
        prefix = f"{label_text(shown)}, seed " if shown else ""
        scores |= {f"{prefix}{seed}": score for seed, score in cell.scores.items()}
        folders |= {f"{prefix}{seed}": folder for seed, folder in cell.folders.items()}
    labels = {key: value for key, value in one.labels.items() if key not in names}
    is_joint = one.is_joint and other.is_joint
    return replace(cell_of(labels, scores), folders=folders, is_joint=is_joint, metric=one.metric)


def averages_of(tables: Sequence[Table]) -> dict[Place, Cell]:
    """Return (row, column) -> mean over tables, each table with equal weight."""
    means: dict[Place, dict[Label, float]] = {}
    for index, table in enumerate(tables):
        for place, cell in table.cells.items():
            means.setdefault(place, {})[index] = cell.mean
    return {place: cell_of({}, scores) for place, scores in means.items()}


def mean_and_std(values: Sequence[float]) -> tuple[float, float | None]:
    """Return mean and standard deviation with ddof 1; the deviation is None for one value."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None


def published_cells(tables: Sequence[Published]) -> list[Cell]:
    """Return the accuracies of published tables as cells without runs; "-" and repeated cells are left out."""
    cells: dict[frozenset[tuple[str, Label]], Cell] = {}
    for row in tables:
        if row.metric in ACCURACIES and row.value is not None:
            numbers = {key: value for key, label in row.labels.items() if (value := number(label)) is not None}
            labels: dict[str, Label] = {**row.labels, **numbers}
            cells.setdefault(frozenset(labels.items()), Cell(labels, row.value, row.std, {}, {}, row))
    return list(cells.values())


def make_tables(
    cells: Sequence[Cell], group: ReportGroup, *, order: Sequence[Published] = (), metric: ReportMetric = ACCURACY
) -> list[Table]:
    """Arrange cells: a table for each combination of the varying labels beside rows and columns.

    Without `group.columns`, every varying label except data set, model and rows is a column label. Labels in
    `group.ignore` make neither columns nor tables; cells that differ only in these labels are pooled.

    Args:
      order: published cells; rows, columns and tables follow their order, and unknown values come last, ascending.
        Without published cells, all values ascend, but the group's baseline is the first row and `against` the last.
      metric: metric of the cells.
    Raises:
      ConfigError: no cell has a label that the group names. DataError: two cells fall on one place.
    """
    keys = list(dict.fromkeys(key for cell in cells for key in cell.labels if key not in group.ignore))
    asked = [("rows", group.rows), *(("columns", name) for name in group.columns)]
    unknown = ((key, name) for key, name in asked if name not in keys)
    faults = (Fault(f"report.{key}", f"no run has a label {name!r}. {nearest(name, keys)}") for key, name in unknown)
    refuse(faults, "the report")
    varying = [key for key in keys if len({cell.labels.get(key) for cell in cells}) > 1]
    names = tuple(group.columns or [key for key in varying if key not in ("dataset", "model", group.rows)])
    apart = [key for key in keys if key not in (group.rows, *names) and (key in ("dataset", "model") or key in varying)]
    tables: dict[tuple[tuple[str, Label], ...], dict[Place, Cell]] = {}
    for cell in cells:
        places = tables.setdefault(tuple((key, cell.labels[key]) for key in apart if key in cell.labels), {})
        row, column = text(cell.labels.get(group.rows)), tuple(cell.labels.get(name) for name in names)
        twin = places.setdefault((row, column), cell)
        if twin is not cell and not any(cell.labels.get(name) != twin.labels.get(name) for name in group.ignore):
            what = f"two different settings fall into one cell ({row}, {heading(names, column)})"
            raise DataError(what, mend="name more columns")
        if twin is not cell:
            places[row, column] = pooled(twin, cell, group.ignore)
    rank, ends = _ranking(order), () if order else ((group.baseline, -1), (group.against, 1))

    def row_rank(row: str) -> tuple[int, Rank]:
        return sum(end for name, end in ends if name and is_same(row, name)), rank(group.rows, row)

    def column_rank(column: Column) -> list[Rank]:
        return [rank(name, value) for name, value in zip(names, column, strict=True)]

    arranged = [
        Table(
            labels=dict(labels),
            names=names,
            rows=tuple(sorted({row for row, _ in places}, key=row_rank)),
            columns=tuple(sorted({column for _, column in places}, key=column_rank)),
            cells=places,
            metric=metric,
        )
        for labels, places in tables.items()
    ]
    return sorted(arranged, key=lambda table: [rank(name, value) for name, value in table.labels.items()])


def _ranking(order: Sequence[Published]) -> Callable[[str, Label | None], Rank]:
    """Return a sort key for label values: in published order, then numbers, then names."""

    @cache
    def published_values(name: str) -> list[str]:
        return list(dict.fromkeys(cell.labels.get(name, "") for cell in order))

    def rank(name: str, value: Label | None) -> Rank:
        values = published_values(name)
        place = next((index for index, other in enumerate(values) if is_same(other, value)), len(values))
        return place, *_ascending(value)

    return rank


def _ascending(value: Label | None) -> tuple[bool, float, str]:
    """Return a sort key for a label value: numbers, then names."""
    as_number = number(value)
    return as_number is None, as_number or 0.0, text(value).casefold()


def row_of(name: str | None, tables: Sequence[Table]) -> str | None:
    """Return the row meant by a user's spelling; None for None.

    Raises:
      LookupError: there is no such row; the message names the nearest row.
    """
    rows = all_rows(tables)
    if name is None or name in rows:
        return name
    for row in rows:
        if is_same(row, name):
            return row
    raise LookupError(f"no row {name!r}. {nearest(name, rows)}")


def upper_bounds(tables: Sequence[Table]) -> set[str]:
    """Return rows that are upper bounds in every table in which they occur."""
    return {row for row in all_rows(tables) if all(row in table.bounds for table in tables if row in table.rows)}


def all_rows(tables: Sequence[Table]) -> list[str]:
    """Return the rows of all tables, in order of first appearance."""
    return list(dict.fromkeys(row for table in tables for row in table.rows))


def all_columns(tables: Sequence[Table]) -> list[Column]:
    """Return the columns of all tables, in order of first appearance."""
    return list(dict.fromkeys(column for table in tables for column in table.columns))
