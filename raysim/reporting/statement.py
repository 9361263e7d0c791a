"""Plain sentences about the tables, computed from their numbers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from raysim.reporting.gains import best_on_average
from raysim.reporting.render import signed
from raysim.reporting.significance import LEVEL, Comparison, holm, leads
from raysim.reporting.tables import Cell, Column, Table, all_rows, heading, text

#: A column of a table in which several rows compete.
Contest = tuple[Table, Column]


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
    """Which rows have the best average over the tables, column by column; rows that print the same number are told together."""
    ranked, metric = best_on_average(tables), tables[0].metric
    best = []
    for column, rows in ranked.items():
        where = f" at {heading(tables[0].names, column)}" if tables[0].names else ""
        printed = {row: f"{average.mean:.{metric.digits}f}" for row, average in rows}
        first = next(iter(printed.values()))
        tied = [row for row, number in printed.items() if number == first]
        behind = next((f"; next {row}, {number}" for row, number in printed.items() if number != first), "")
        best.append(f"{' and '.join(tied)}{where} ({first}{' each' if len(tied) > 1 else ''}{behind})")
    most = max((rows[0][1].n for rows in ranked.values()), default=0)
    return f"{metric.first.capitalize()} on average over {most} tables: {'; '.join(best)}." if best else ""


def winners(tables: Sequence[Table], subject: str | None) -> str:
    """In how many columns a row (or, without one, the row that leads most) has the best mean, and who else has.

    Rows that print the same mean tie. A row is called best only where tests over seeds tell it from every other one.
    Columns with one row do not count. Upper bounds do not compete; a last sentence names them.
    """
    bounds = [row for row in all_rows(tables) if any(row in table.bounds for table in tables)]
    named = f" Upper bound, trained on all examples together and not ranked: {', '.join(bounds)}." if bounds else ""
    return _ranking(tables, subject) + named


def _ranking(tables: Sequence[Table], subject: str | None) -> str:
    contests = [(table, column) for table in tables for column in table.columns if len(table.competing(column)) > 1]
    if not contests:
        return "No column holds two rows that could be compared."
    rows = [row for row in all_rows(tables) if any(row in table.rows and row not in table.bounds for table in tables)]
    first: dict[str, list[Contest]] = {row: [] for row in rows}  # alone
    tied, second = ({row: 0 for row in rows} for _ in range(2))
    for table, column in contests:
        marks = {row: table.marks.get((row, column)) for row in table.competing(column)}
        leaders = [row for row, mark in marks.items() if mark == "best"]
        for row, mark in marks.items():
            tied[row] += mark == "best" and len(leaders) > 1
            second[row] += mark == "second"
            first[row] += [(table, column)] if leaders == [row] else []
    lead, *others = sorted(rows, key=lambda row: (row != subject, -len(first[row]), -tied[row], -second[row]))
    metric, count = tables[0].metric, sum(lead in table.competing(column) for table, column in contests)
    inside = "; ".join(heading(table.names, column) for table, column in first[lead])
    has_places = len(tables) == 1 and tables[0].names and 0 < len(first[lead]) < count
    words = (
        f"{lead} has the {metric.first} mean in {len(first[lead])} of {count} column{'s' if count > 1 else ''}"
        f"{f' ({inside})' if has_places else ''}{f', ties for it in {tied[lead]}' if tied[lead] else ''} and the second "
        f"{metric.first} in {second[lead]}"
    )
    ahead = ", ".join(f"{row} in {len(first[row])}" for row in others if first[row])
    ties = ", ".join(f"{row} in {tied[row]}" for row in others if tied[row])
    words += f"; also {metric.first}: {ahead}" if ahead else ""
    words += f"; tied: {ties}" if ties else ""
    return f"{words}. {_told_apart(first)}".strip()


def _told_apart(first: Mapping[str, Sequence[Contest]]) -> str:
    """Which rows tests over seeds tell from every other row of a column where their mean comes first; "" without seeds."""
    if not any(table.cells[row, column].n for row, contests in first.items() for table, column in contests):
        return ""
    best = {row: sum(leads(table, row, column) for table, column in contests) for row, contests in first.items()}
    named = ", ".join(f"{row} in {count}" for row, count in best.items() if count)
    if not named:
        return f"Tests over seeds tell none of these leads from chance (p < {LEVEL:g}), so no row is called best."
    return f"Best, by tests over seeds against every other row (p < {LEVEL:g}): {named}."


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
    if sentences and len({item.method for item in comparisons}) == 1:
        sentences.append(_other_way(comparisons, names))
    if sentences and not any(0.5**item.result.num_pairs < LEVEL for item in comparisons):
        sentences.append("With fewer than five pairs this test cannot reach that level.")
    return " ".join(sentences)


def _other_way(comparisons: Sequence[Comparison], names: Sequence[str]) -> str:
    """Which rows are significantly better than the one that was tested against them."""
    method = comparisons[0].method
    by_row: dict[str, list[Comparison]] = {}
    for item in comparisons:
        if item.reverse.is_significant:
            by_row.setdefault(item.other, []).append(item)
    if not by_row:
        return f"The other way round, no row is significantly better than {method}."
    named = "; ".join(f"{row}{_at(items, names)}" for row, items in by_row.items())
    return f"The other way round, significantly better than {method}: {named}."


def _at(items: Sequence[Comparison], names: Sequence[str]) -> str:
    if len(names) == 1:
        return f" at {names[0]} = {', '.join(text(item.column[0]) for item in items)}"
    return " at " + "; ".join(heading(names, item.column) for item in items) if names else ""
