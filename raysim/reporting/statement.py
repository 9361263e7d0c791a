"""Plain sentences about the tables, computed from their numbers alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raysim.reporting.gains import best_on_average
from raysim.reporting.render import signed
from raysim.reporting.significance import LEVEL, Comparison, holm
from raysim.reporting.tables import Cell, Table, all_rows, heading, text


def not_labelled(misnamed: Sequence[str], changed: Sequence[str]) -> list[str]:
    """The warnings about runs that are not what their labels say.

    Args:
      misnamed: labels that name another data set or model than the runs used.
      changed: settings that are not those of the recipe that has the published numbers.
    """
    reasons = {
        "The tables name what ran. Such scaled-down runs only show that the recipe works; no published number belongs "
        "beside them.": misnamed,
        "The recipe is that of the published numbers; differences to them are those of another experiment.": changed,
    }
    return [f"NOT the labelled experiment: {'; '.join(what)}. {why}" for why, what in reasons.items() if what]


def on_average(tables: Sequence[Table]) -> str:
    """Which row has the best average over the tables, column by column."""
    ranked, digits = best_on_average(tables), tables[0].metric.digits
    best = []
    for column, ((first, average), (second, next_average), *_) in ranked.items():
        where = f" at {heading(tables[0].names, column)}" if tables[0].names else ""
        best.append(f"{first}{where} ({average.mean:.{digits}f}; next {second}, {next_average.mean:.{digits}f})")
    most = max((rows[0][1].n for rows in ranked.values()), default=0)
    return f"Best on average over {most} tables: {'; '.join(best)}." if best else ""


def winners(tables: Sequence[Table], subject: str | None) -> str:
    """In how many columns a row (or, without one, the row that wins most) is best, and who else is.

    Columns with one row do not count. Upper bounds do not compete; a second sentence names them.
    """
    bounds = [row for row in all_rows(tables) if any(row in table.bounds for table in tables)]
    named = f" Upper bound, trained on all examples together and not ranked: {', '.join(bounds)}." if bounds else ""
    return _ranking(tables, subject) + named


def _ranking(tables: Sequence[Table], subject: str | None) -> str:
    contests = [(table, column) for table in tables for column in table.columns if len(table.competing(column)) > 1]
    if not contests:
        return "No column holds two rows that could be compared."
    rows = [row for row in all_rows(tables) if any(row in table.rows and row not in table.bounds for table in tables)]

    def marked(mark: str) -> dict[str, list[str]]:
        """Row -> headings of the columns where it has the mark."""
        return {
            row: [heading(t.names, column) for t, column in contests if t.marks.get((row, column)) == mark]
            for row in rows
        }

    best, second = marked("best"), marked("second")
    lead, *others = sorted(rows, key=lambda row: (row != subject, -len(best[row]), -len(second[row])))
    contests = [(table, column) for table, column in contests if lead in table.competing(column)]
    best, second = marked("best"), marked("second")
    has_places = len(tables) == 1 and tables[0].names and 0 < len(best[lead]) < len(contests)
    inside = f" ({'; '.join(best[lead])})" if has_places else ""
    count = f"{len(contests)} column{'s' if len(contests) > 1 else ''}"
    also = ", ".join(f"{row} in {len(best[row])}" for row in others if best[row])
    other = f"; {'also best' if best[lead] else 'best'}: {also}" if also else ""
    return f"{lead} is best in {len(best[lead])} of {count}{inside} and second best in {len(second[lead])}{other}."


def gain(tables: Sequence[Table], subject: str, baseline: str) -> str:
    """The mean gain of one row over another."""
    columns = [table.column_cells(column) for table in tables for column in table.columns]
    gains = [cells[subject].mean - cells[baseline].mean for cells in columns if {subject, baseline} <= cells.keys()]
    if not gains:
        return f"No column holds both {subject} and {baseline}."
    metric = tables[0].metric
    mean, low, high = (signed(value, metric.digits) for value in (float(np.mean(gains)), min(gains), max(gains)))
    unit, more = " points" if metric.is_share else "", f" (from {low} to {high})" if len(gains) > 1 else ""
    where = f"over {len(gains)} columns" if len(gains) > 1 else "in the one column that holds both"
    return f"{subject} differs from {baseline} by {mean}{unit} on average{more} {where}."


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
    said: dict[str, list[str]] = {}  # verdict -> of whom
    counts: dict[str, set[int]] = {}
    for method in dict.fromkeys(item.method for item in comparisons):
        tests = [item for item in comparisons if item.method == method]
        others = {
            other: [item for item in tests if item.other == other and item.result.is_significant]
            for other in dict.fromkeys(item.other for item in tests)
        }
        verdicts = [f"significantly better than {other}{_at(items, names)}" for other, items in others.items() if items]
        nowhere = ", ".join(other for other, items in others.items() if not items)
        if nowhere:
            verdicts.append(f"{'nowhere ' if names else 'not '}significantly better than {nowhere}")
        verdict = "; ".join(verdicts)
        said.setdefault(verdict, []).append(method)
        counts.setdefault(verdict, set()).update(item.result.num_pairs for item in tests)
    sentences = []
    for verdict, methods in said.items():
        few, most = min(counts[verdict]), max(counts[verdict])
        start = f"One-sided exact Wilcoxon over {few if few == most else f'{few} to {most}'} {pairs_of}, p < {LEVEL:g}"
        sentences.append(f"{start}: {', '.join(methods)} {'are' if len(methods) > 1 else 'is'} {verdict}.")
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
