"""How sure a difference is: paired effects with their intervals, and a test of which side is better.

The Wilcoxon signed-rank test is the one that FedVG's section 5.1 used: exact, one-sided, over pairs of mean accuracies.
This form reproduces every significance statement of that paper and none that it does not make; the two-sided test does
not (Elastic at alpha 1: 0.094 two-sided, 0.047 one-sided).
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

#: Of the intervals of effects.
CONFIDENCE = 0.95


def holm(p: Sequence[float]) -> list[float]:
    """p adjusted for the number of tests (Holm 1979): the k-th smallest of m times m - k + 1, and never below a smaller one's.

    Rejecting those below a level keeps the chance of any false rejection below that level, however the tests depend.
    """
    order = np.argsort(p, kind="stable")
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(np.arange(len(p), 0, -1) * np.asarray(p)[order]))
    return adjusted.tolist()


@dataclass(frozen=True)
class Wilcoxon:
    """Outcome of one test. `num_used` pairs differ; the others were dropped, as Wilcoxon does."""

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
    all signs, so p is exact with ties as well (scipy's exact form assumes that there are none; without ties both agree).
    Differences that are equal to nine decimals count as tied: 80.74 - 80.37 and 80.75 - 80.38 are.

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


#: Pairs from which on a standardised effect is printed.
LEAST_PAIRS = 3


@dataclass(frozen=True)
class Effect:
    """The size of a paired difference, left less right.

    Attributes:
      mean: of the differences, in the values' own unit.
      low, high: 95 % interval of that mean by Student's t, which takes the differences for normal; None for one pair.
      d: mean over standard deviation of the differences (Cohen's d of paired values); None for fewer than LEAST_PAIRS, whose
        deviation says little, and for equal differences.
      num_pairs: equal pairs count.
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
    """The effect of two samples in the same order of pairs, one at least."""
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
    """One test in a report: is `method` better than `other` in `column`, and by how much?

    `reverse`: the test that `other` is better.
    """

    method: str
    other: str
    column: Column
    result: Wilcoxon
    reverse: Wilcoxon
    effect: Effect


def pairs_of(tables: Sequence[Table], subject: str | None, baseline: str | None) -> list[tuple[str, str]]:
    """Which rows are tested against which: the subject against all, else all against the baseline; no bounds."""
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
    """Whether a row is significantly better than every other row of a column, over common seeds.

    All of these tests have to reject, so that their number needs no adjustment.
    """
    pairs = [(row, other) for other in table.competing(column) if other != row]
    tests = [test for test in over_seeds(table, pairs) if test.column == column]
    return bool(pairs) and len(tests) == len(pairs) and all(test.result.is_significant for test in tests)


def _compare(
    metric: ReportMetric, pairs: Sequence[tuple[str, str]], columns: Sequence[Column], cells: Mapping[Place, Cell]
) -> list[Comparison]:
    """A test of each pair of rows in each column, over what both have scores for."""
    comparisons = []
    for (method, other), column in itertools.product(pairs, columns):
        both = [cells[row, column] for row in (method, other) if (row, column) in cells]
        ours, theirs = paired(*both) if len(both) == 2 else ([], [])
        if ours:
            tests = wilcoxon_greater(ours, theirs), wilcoxon_greater(theirs, ours)
            better, worse = tests if metric.mode == "max" else reversed(tests)
            comparisons.append(Comparison(method, other, column, better, worse, effect_of(ours, theirs)))
    return comparisons


#: How the published tables call the row of gains, and their units.
AVERAGE = "average over methods"
GAINS = ("avg_gain_points", "avg_gain_vs_1_layer_points")


def with_gains(tables: Sequence[Table], gain: str | None, theirs: Sequence[Published]) -> list[Table]:
    """The tables with a mean difference for each column that has pairs.

    Args:
      gain: "FLFA": of the rows "X + FLFA" against "X"; "fa_layers=1": of the columns against the one where that label
        has that value, row by row. None: of nothing.
    Raises:
      LookupError: there is not one pair; its text names the nearest.
    """
    if gain is None:
        return list(tables)
    label, is_label, value = gain.partition("=")
    name = f"over {heading((label,), (value,))}" if is_label else f"of + {gain}"
    with_them = [replace(table, gains=_gains(table, gain, theirs), gain_name=f"Avg. gain {name}") for table in tables]
    if not any(table.gains for table in with_them):
        wanted = f"column label {label} with the value {value}" if is_label else f"pair of rows X and X + {gain}"
        known = [name for table in tables for name in (table.names if is_label else table.rows)]
        raise LookupError(f"no table has a {wanted}. {nearest(label, list(dict.fromkeys(known)))}")
    return with_them


def _gains(table: Table, gain: str, theirs: Sequence[Published]) -> dict[Column, Cell]:
    """The gain of each column over the cells it is counted from."""
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
