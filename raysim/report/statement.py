"""Plain sentences about the tables, computed from their numbers alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raysim.report.gains import best_on_average
from raysim.report.published import Label
from raysim.report.render import signed
from raysim.report.significance import LEVEL, Comparison, holm
from raysim.report.tables import Cell, Table, all_rows, heading, text


def not_the_experiment(wrong: Sequence[str]) -> str:
    """The warning about runs whose labels name another data set or model than they used."""
    return (
        f"NOT the labelled experiment: {'; '.join(wrong)}. The tables name what ran. Such scaled-down runs only show that the "
        "recipe works; no published number belongs beside them."
    )


def not_the_recipe(changed: Sequence[str]) -> str:
    """The warning about runs with other settings than those of the recipe that has the published numbers."""
    return (
        f"NOT the labelled experiment: {'; '.join(changed)}. The recipe is that of the published numbers; differences to them "
        "are those of another experiment."
    )


def on_average(tables: Sequence[Table]) -> str:
    """Which row has the best average over the tables, column by column."""
    ranked = best_on_average(tables)
    told = []
    for column, rows in ranked.items():
        (first, best), (second, next_) = rows[:2]
        digits = tables[0].metric.digits
        where = f" at {heading(tables[0].names, column)}" if tables[0].names else ""
        told.append(f"{first}{where} ({best.mean:.{digits}f}; next {second}, {next_.mean:.{digits}f})")
    most = max((rows[0][1].n for rows in ranked.values()), default=0)
    return f"Best on average over {most} tables: {'; '.join(told)}." if told else ""


def winners(tables: Sequence[Table], subject: str | None) -> str:
    """In how many columns a row (or, without one, the row that wins most) is best, and who else is.

    Columns with one row do not count. Upper bounds do not compete; a second sentence names them.
    """
    bounds = [row for row in all_rows(tables) if any(row in table.bounds for table in tables)]
    told = f" Upper bound, trained on all examples together and not ranked: {', '.join(bounds)}." if bounds else ""
    return _ranking(tables, subject) + told


def _ranking(tables: Sequence[Table], subject: str | None) -> str:
    contests = [(table, column) for table in tables for column in table.columns if _is_contest(table, column)]
    if not contests:
        return "No column holds two rows that could be compared."
    rows = [row for row in all_rows(tables) if any(row in table.rows and row not in table.bounds for table in tables)]
    of = {
        mark: {row: [c for c in contests if c[0].marks.get((row, c[1])) == mark] for row in rows}
        for mark in ("best", "second")
    }
    best, second = of["best"], of["second"]
    order = sorted(best, key=lambda row: (row != subject, -len(best[row]), -len(second[row])))
    lead = order[0]
    where = (
        [heading(table.names, column) for table, column in best[lead]] if len(tables) == 1 and tables[0].names else []
    )
    inside = f" ({'; '.join(where)})" if 0 < len(where) < len(contests) else ""
    counted = f"{len(contests)} column{'s' if len(contests) > 1 else ''}"
    told = f"{lead} is best in {len(best[lead])} of {counted}{inside} and second best in {len(second[lead])}"
    others = ", ".join(f"{row} in {len(best[row])}" for row in order[1:] if best[row])
    return told + (f"; also best: {others}." if others else ".")


def _is_contest(table: Table, column: tuple[Label | None, ...]) -> bool:
    return sum((row, column) in table.cells for row in table.rows if row not in table.bounds) > 1


def gain(tables: Sequence[Table], subject: str, baseline: str) -> str:
    """The mean gain of one row over another."""
    gains = [
        table.cells[subject, column].mean - table.cells[baseline, column].mean
        for table in tables
        for column in table.columns
        if (subject, column) in table.cells and (baseline, column) in table.cells
    ]
    if not gains:
        return f"No column holds both {subject} and {baseline}."
    more = f" (from {signed(min(gains))} to {signed(max(gains))})" if len(gains) > 1 else ""
    cells = f"over {len(gains)} columns" if len(gains) > 1 else "in the one column that holds both"
    return f"{subject} differs from {baseline} by {signed(float(np.mean(gains)))} points on average{more} {cells}."


def against_published(cells: Sequence[Cell]) -> str:
    """How far the numbers are from the published ones."""
    known = [cell for cell in cells if cell.difference is not None]
    if not known:
        return (
            "No cell has a published number beside it: the labels of a run must name the data set, the model, the method "
            "and exactly the settings of the published cell."
        )
    gaps = np.array([cell.difference for cell in known], float)
    stds = np.array([np.nan if c.published is None or c.published.std is None else c.published.std for c in known])
    near = int((np.abs(gaps) <= stds).sum())
    within = f"; {near} within one published standard deviation" if np.isfinite(stds).any() else ""
    return (
        f"{len(known)} of {len(cells)} cells have a published number: ours differ by {signed(float(gaps.mean()))} points "
        f"on average, {np.abs(gaps).mean():.2f} in size{within}."
    )


def significance(comparisons: Sequence[Comparison], names: Sequence[str], pairs_of: str) -> str:
    """Against whom a row is significantly better, and where; and against whom it is nowhere."""
    sentences = []
    for method in dict.fromkeys(item.method for item in comparisons):
        mine = [item for item in comparisons if item.method == method]
        where: dict[str, list[Comparison]] = {item.other: [] for item in mine}
        for item in mine:
            if item.result.is_significant:
                where[item.other].append(item)
        counts = sorted({item.result.num_pairs for item in mine})
        n = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        start = f"One-sided exact Wilcoxon over {n} {pairs_of}, p < {LEVEL:g}: {method} is "
        told = [f"significantly better than {other}{_at(items, names)}" for other, items in where.items() if items]
        nowhere = [other for other, items in where.items() if not items]
        if nowhere:
            told.append(f"{'nowhere ' if names else 'not '}significantly better than {', '.join(nowhere)}")
        sentences.append(start + "; ".join(told) + ".")
    if any(item.result.is_significant for item in comparisons):
        adjusted = holm([item.result.p for item in comparisons])
        count = sum(p < LEVEL for p in adjusted) or "none"
        sentences.append(
            f"Adjusted for all {len(adjusted)} tests (Holm), p stays below that level in {count} of these cases."
        )
    if sentences and not any(0.5**item.result.num_pairs < LEVEL for item in comparisons):
        sentences.append("With fewer than five pairs this test cannot reach that level.")
    return " ".join(sentences)


def _at(items: Sequence[Comparison], names: Sequence[str]) -> str:
    if len(names) == 1:
        return f" at {names[0]} = {', '.join(text(item.column[0]) for item in items)}"
    return " at " + "; ".join(heading(names, item.column) for item in items) if names else ""
