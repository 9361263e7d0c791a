"""Significance of differences: paired effects with intervals, and a test of which side is better.

The test is the Wilcoxon signed-rank test of FedVG, section 5.1: exact, one-sided, over pairs of mean accuracies. The
one-sided test is significant exactly where the paper states significance; the two-sided test is not (Elastic at
alpha 1: 0.094 two-sided, 0.047 one-sided).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from raysim.config import nearest
from raysim.reporting.measure import ReportMetric
from raysim.reporting.published import Label, Published, canonical, is_same, match
from raysim.reporting.tables import (
    Cell,
    Column,
    Place,
    Table,
    all_columns,
    all_rows,
    averages_of,
    cell_of,
    difference,
    heading,
    paired,
    upper_bounds,
)

LEVEL = 0.05

#: Confidence level of the intervals of effects.
CONFIDENCE = 0.95


def holm(p: Sequence[float]) -> list[float]:
    """Return p adjusted by Holm (1979): the k-th smallest of m values times m - k + 1, made non-decreasing, at most 1.

    Rejecting where adjusted p is below a level keeps the probability of any false rejection below the level, for any
    dependence between the tests.
    """
    order = np.argsort(p, kind="stable")
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(np.arange(len(p), 0, -1) * np.asarray(p)[order]))
    return adjusted.tolist()


@dataclass(frozen=True)
class Wilcoxon:
    """Outcome of a test. `num_used` pairs differ; equal pairs are dropped, as by Wilcoxon."""

    p: float
    statistic: float
    num_pairs: int
    num_used: int
    has_ties: bool

    @property
    def is_significant(self) -> bool:
        return self.p < LEVEL


def wilcoxon_greater(left: Sequence[float], right: Sequence[float]) -> Wilcoxon:
    """Exact one-sided Wilcoxon signed-rank test of "left is greater than right".

    Equal pairs are dropped; tied differences share their mean rank, and the distribution is that of these ranks over
    all signs, so p is exact with ties as well (scipy's exact form assumes no ties; without ties both agree).
    Differences that are equal to nine decimals count as tied, for example 80.74 - 80.37 and 80.75 - 80.38.

    Args:
      left, right: values in the same order of pairs.
    Returns:
      p = 1 if no pair differs.
    """
    gaps = np.round(np.asarray(left, float) - np.asarray(right, float), 9)
    gaps = gaps[gaps != 0]
    sizes, inverse, counts = np.unique(np.abs(gaps), return_inverse=True, return_counts=True)
    doubled = (2 * np.cumsum(counts) - counts + 1)[inverse]  # twice the mean rank: an integer
    observed = int(doubled[gaps > 0].sum())
    ways = np.zeros(int(doubled.sum()) + 1)  # ways[s]: sign patterns with rank sum s / 2, as a share of all
    ways[0] = 1.0
    for rank in doubled:
        shifted = np.zeros_like(ways)
        shifted[rank:] = ways[:-rank]
        ways = (ways + shifted) / 2
    p = min(1.0, float(ways[observed:].sum()))
    return Wilcoxon(p, observed / 2, len(left), len(gaps), len(sizes) < len(gaps))


#: Smallest number of pairs for which a standardised effect is printed.
LEAST_PAIRS = 3


@dataclass(frozen=True)
class Effect:
    """Size of a paired difference, left minus right.

    Attributes:
      mean: of the differences, in the values' own unit.
      low, high: 95 % interval of the mean by Student's t, which assumes normal differences; None for one pair.
      d: mean over standard deviation of the differences (Cohen's d of paired values); None for fewer than LEAST_PAIRS
        pairs, whose deviation is unreliable, and for equal differences.
      num_pairs: number of pairs, including equal pairs.
    """

    mean: float
    low: float | None
    high: float | None
    d: float | None
    num_pairs: int

    @property
    def is_certain(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def effect_of(left: Sequence[float], right: Sequence[float]) -> Effect:
    """Return the effect of two samples in the same order of pairs, with at least one pair."""
    from scipy.special import stdtrit  # Student's quantile

    gaps = np.asarray(left, float) - np.asarray(right, float)
    mean, count = float(gaps.mean()), len(gaps)
    if count < 2:
        return Effect(mean, None, None, None, count)
    deviation = float(gaps.std(ddof=1))
    half = float(stdtrit(count - 1, 0.5 + CONFIDENCE / 2)) * deviation / count**0.5
    is_spread = deviation > 1e-12 * max(1.0, abs(mean)) and count >= LEAST_PAIRS
    return Effect(mean, mean - half, mean + half, mean / deviation if is_spread else None, count)


@dataclass(frozen=True)
class Comparison:
    """Test in a report: is `method` better than `other` in `column`, and by how much?

    `reverse`: the test of whether `other` is better.
    """

    method: str
    other: str
    column: Column
    result: Wilcoxon
    reverse: Wilcoxon
    effect: Effect


def pairs_of(tables: Sequence[Table], subject: str | None, baseline: str | None) -> list[tuple[str, str]]:
    """Return (row, other row) of each test: the subject against all, else all against the baseline; no bounds."""
    bounds = upper_bounds(tables)
    competing = [row for row in all_rows(tables) if row not in bounds]
    if subject is not None:
        return [(subject, row) for row in competing if row != subject and subject in competing]
    return [(row, baseline) for row in competing if row != baseline and baseline in competing]


def over_tables(tables: Sequence[Table], pairs: Sequence[tuple[str, str]]) -> list[Comparison]:
    """Test over tables (data set and model), for each column: a pair of means per table."""
    return _compare(tables[0].metric, pairs, all_columns(tables), averages_of(tables))


def over_seeds(table: Table, pairs: Sequence[tuple[str, str]]) -> list[Comparison]:
    """Test over common seeds, for each column of a table."""
    return _compare(table.metric, pairs, table.columns, table.cells)


def leads(table: Table, row: str, column: Column) -> bool:
    """Return whether a row is significantly better than every other row of a column, over common seeds.

    Since all tests have to reject, p needs no adjustment for the number of tests.
    """
    pairs = [(row, other) for other in table.competing(column) if other != row]
    tests = [test for test in over_seeds(table, pairs) if test.column == column]
    return bool(pairs) and len(tests) == len(pairs) and all(test.result.is_significant for test in tests)


def _compare(
    metric: ReportMetric, pairs: Sequence[tuple[str, str]], columns: Sequence[Column], cells: Mapping[Place, Cell]
) -> list[Comparison]:
    """Return a test of each pair of rows in each column, over the seeds (or tables) that both rows have."""
    comparisons = []
    for (method, other), column in itertools.product(pairs, columns):
        both = [cells[row, column] for row in (method, other) if (row, column) in cells]
        ours, theirs = paired(*both) if len(both) == 2 else ([], [])
        if ours:
            tests = wilcoxon_greater(ours, theirs), wilcoxon_greater(theirs, ours)
            better, worse = tests if metric.mode == "max" else reversed(tests)
            comparisons.append(Comparison(method, other, column, better, worse, effect_of(ours, theirs)))
    return comparisons


#: Method and metrics of average gains in published tables.
AVERAGE = "average over methods"
GAINS = ("avg_gain_points", "avg_gain_vs_1_layer_points")


def with_gains(tables: Sequence[Table], gain: str | None, theirs: Sequence[Published]) -> list[Table]:
    """Return the tables, with the mean gain of each column that has pairs.

    Args:
      gain: "FLFA" pairs the rows "X + FLFA" with the rows "X"; "fa_layers=1" pairs each column with the column where
        the label has the value, row by row; None returns the tables unchanged.
    Raises:
      LookupError: no table has a pair; the message names the nearest label or row.
    """
    if gain is None:
        return list(tables)
    label, is_label, value = gain.partition("=")
    name = f"over {heading((label,), (value,))}" if is_label else f"of + {gain}"
    with_them = [replace(table, gains=_gains(table, gain, theirs), gain_name=f"Avg. gain {name}") for table in tables]
    if not any(table.gains for table in with_them):
        wanted = f"column label {label} with the value {value}" if is_label else f"pair of rows X and X + {gain}"
        names = [name for table in tables for name in (table.names if is_label else table.rows)]
        raise LookupError(f"no table has a {wanted}. {nearest(label, list(dict.fromkeys(names)))}")
    return with_them


def _gains(table: Table, gain: str, theirs: Sequence[Published]) -> dict[Column, Cell]:
    """Return the mean gain of each column over the reference cells of `_bases`."""
    bases = {place: table.cells[base] for place, base in _bases(table, gain).items() if base in table.cells}
    gains = {}
    for column in table.columns:
        cells = {row: cell for row, cell in table.column_cells(column).items() if (row, column) in bases}
        if cells:
            labels = {**next(iter(cells.values())).labels, "method": AVERAGE}
            scores: dict[Label, float] = {row: difference(cell, bases[row, column]) for row, cell in cells.items()}
            gains[column] = cell_of(labels, scores, match(theirs, labels, metrics=GAINS))
    return gains


def _bases(table: Table, gain: str) -> dict[Place, Place]:
    """Return place of a cell -> place of the reference cell of its gain."""
    label, is_label, value = gain.partition("=")
    places = list(itertools.product(table.rows, table.columns))
    if not is_label:
        plain = {canonical(f"{row}+{gain}"): row for row in table.rows}
        return {(row, column): (plain[canonical(row)], column) for row, column in places if canonical(row) in plain}
    if label not in table.names:
        return {}
    axis = table.names.index(label)
    others = {column: column[:axis] + column[axis + 1 :] for column in table.columns}
    bases = {others[column]: column for column in table.columns if is_same(column[axis], value)}
    return {(row, c): (row, bases[others[c]]) for row, c in places if bases.get(others[c], c) != c}


def base_row(row: str, rows: Sequence[str], baseline: str | None) -> str | None:
    """Return the row to compare with: X for "X + something", else the baseline; never the row itself."""
    bases = [other for other in rows if canonical(row).startswith(f"{canonical(other)}+")]
    base = max(bases, key=len) if bases else baseline
    return None if base == row else base
