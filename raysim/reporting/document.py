"""report.md: settings, results, tests, missing runs and environments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from raysim.base.settings import differing, flatten
from raysim.config.effects import has_effect
from raysim.config.schema import Config
from raysim.reporting.contents import ReportContents, best_on_average
from raysim.reporting.published import ACCURACIES
from raysim.reporting.render import effects, header_of, lines_of, markdown, p_values, with_sign
from raysim.reporting.runs import ABOUT, default_settings, misnamed
from raysim.reporting.significance import LEVEL, Comparison, holm, leads
from raysim.reporting.tables import Cell, Column, Table, all_rows, difference, heading, label_text, text, upper_bounds

#: Settings that are listed whenever they have an effect, even if they equal the defaults.
ESSENTIAL = {
    *("rounds", "data.name", "model.name", "cohort.size", "cohort.fraction"),
    *("partition.scheme", "partition.alpha", "partition.num_clients"),
    *("local.lr", "local.epochs", "local.batch_size"),
}

#: Characters of a status that Markdown would read as markup -> escaped characters.
SIGNS = str.maketrans({sign: f"\\{sign}" for sign in "|<*"})

#: Groups and keys that are not listed as settings of an experiment.
OTHERS = ABOUT | {"task", "loggers"}


def document(report: ReportContents, figures: Mapping[str, str], notes: Sequence[str]) -> str:
    """Return the whole report as Markdown; figures: file name -> caption."""
    parts = [f"# {_title(report)}: {report.metric}\n", "\n".join(f"- {line}" for line in conclusions(report)) + "\n"]
    extras = (f"## {e.title}\n\n{e.caption}\n\n{markdown(e.header, e.lines)}" for e in (*report.others, *report.extras))
    parts += [_settings(report), _tables(report), *extras, _significance(report)]
    if figures:
        parts.append("## Figures\n")
        parts += [f"![{name}](figures/{name}.png)\n\n{caption}\n" for name, caption in figures.items()]
    parts += [_missing(report), _environments(report)]
    if notes:
        parts.append("## Notes\n\n" + "\n".join(f"- {note}" for note in notes) + "\n")
    return "\n".join(part for part in parts if part)


def _title(report: ReportContents) -> str:
    """Return the title: the folder of all runs, or the best substitute."""
    folders = {run.folder.parent for run in report.runs}
    if len(report.runs) == 1:
        return report.runs[0].folder.name
    if len(folders) == 1:
        return folders.pop().name
    return f"{len(report.runs)} runs" if report.runs else ", ".join(report.group.published)


def conclusions(report: ReportContents) -> list[str]:
    """Return the conclusions as plain sentences, all computed from the numbers."""
    lines = not_labelled(misnamed(report.finished), report.changed)
    lines.append(winners(report.tables, report.subject))
    if len(report.tables) > 1:
        lines.append(on_average(report.tables))
    if report.subject and report.baseline and report.subject != report.baseline:
        lines.append(gain(report.tables, report.subject, report.baseline))
    if report.by_table:
        lines.append(significance(report.by_table, report.tables[0].names, "pairs of means (one for each table)"))
    if len(report.tables) == 1:
        (table,) = report.tables
        tests = report.by_seed.get(table.title, ())
        lines.append(significance(tests, table.names, "pairs of runs with the same seed"))
    if report.runs and any(cell.metric in ACCURACIES for cell in report.theirs):
        lines.append(against_published(report.cells))
    return [line for line in lines if line]


def _settings(report: ReportContents) -> str:
    """Return the section with the common settings of finished runs, settings that differ, and seeds."""
    if not report.finished:
        sources = dict.fromkeys(cell.source for cell in report.theirs)
        return f"## Source\n\nNumbers as published: {'; '.join(sources)}. Nothing here was run.\n"
    first, *_ = report.finished
    defaults, today = default_settings(), Config()
    varying = {key for key in differing([run.settings for run in report.finished]) if key.split(".")[0] not in OTHERS}
    common = {
        key: value
        for key, value in first.settings.items()
        if key.split(".")[0] not in OTHERS and key not in varying and value is not None and key != "data.root"
        if value != defaults.get(key) or (key in ESSENTIAL and has_effect(key, first.settings, today))
    }
    differing_labels = differing([run.labels for run in report.finished])
    labels = {key: value for key, value in first.labels.items() if key not in differing_labels}
    counts = Counter(cell.n for cell in report.cells)
    several = ", ".join(f"{n} in {cells} cells" for n, cells in sorted(counts.items()))
    per_cell = f"{next(iter(counts))} in every cell" if len(counts) == 1 else several
    seeds = sorted({str(run.seed) for run in report.finished}, key=lambda seed: (len(seed), seed))
    lines = {
        "runs": f"{len(report.finished)} finished of {len(report.runs)}",
        "seeds": f"{per_cell} ({', '.join(seeds)})",
        "labels of all runs": label_text(labels) if labels else "",
        "settings of all runs": ", ".join(f"`{key}={_value(value)}`" for key, value in common.items()),
        "settings that differ": ", ".join(f"`{key}`" for key in sorted(varying)),
    }
    return "## Settings\n\n" + "".join(f"- {name}: {value}\n" for name, value in lines.items() if value)


def _value(value: object) -> str:
    """Return a setting as text; of an absolute path, only the last folder and the file name."""
    if isinstance(value, str) and Path(value).is_absolute():
        value = str(Path("...", *Path(value).parts[-2:]))
    return text(value) if isinstance(value, str | int | float) else str(value).replace("'", "")


def _tables(report: ReportContents) -> str:
    deviation = "mean ± standard deviation over seeds (n − 1 in the denominator)" if report.runs else "as published"
    first = report.measure.first.capitalize()
    better = f" ({report.measure.better})" if report.measure.better else ""
    parts = [f"## {report.heading}: {deviation}\n"]
    parts.append(
        f"{first} mean{better} **bold**, the second <u>underlined</u>, in each column; equal means are marked alike.\n"
    )
    for table in report.tables:
        parts += [f"### {table.title}\n", markdown(header_of(table, report.group.rows), lines_of(table))]
    return "\n".join(parts)


def _significance(report: ReportContents) -> str:
    if not report.by_table and not report.by_seed:
        reason = "name a method with `--against METHOD` (or `report.against`)"
        if report.subject or report.baseline:
            reason = "no two rows share a column" + (" and a seed" if len(report.tables) == 1 else "")
            if bounds := {report.subject, report.baseline} & upper_bounds(report.tables):
                reason = f"{' and '.join(map(str, bounds))} was trained on all examples together; upper bounds are not tested"
        return f"## Significance\n\nNothing was tested: {reason}.\n"
    parts = [
        "## Significance\n",
        f"Exact one-sided Wilcoxon signed-rank tests, level {LEVEL:g} (bold): each test alone, and below it adjusted by Holm's "
        "method for all tests of the table. Upper bounds are not tested. Equal pairs are dropped; `=` marks tied "
        "differences, which share their mean rank. With n pairs, p cannot be below 1/2^n: 1/32 = 0.031 with five, so "
        "fewer than five pairs cannot reach the level.\n",
        "Below the tests are the mean paired differences with 95 % intervals by Student's t, which assumes normal differences "
        "(bold: the interval excludes 0; not adjusted), and d, the mean divided by the standard deviation of the differences.\n",
    ]
    if report.by_table:
        pairs = "; ".join(table.title for table in report.tables)
        parts.append(f"### Over tables\n\nPairs are means in the same column of: {pairs}.\n")
        parts.append(_p_table(report.by_table, report))
    for title, tests in report.by_seed.items():
        parts.append(f"### Over seeds: {title}\n\nPairs are runs with the same seed.\n")
        parts.append(_p_table(tests, report))
    return "\n".join(parts)


def _p_table(comparisons: Sequence[Comparison], report: ReportContents) -> str:
    names = report.tables[0].names
    used = {item.result.num_used for item in comparisons}
    dropped = sum(item.result.num_pairs - item.result.num_used for item in comparisons)
    smallest = 0.5 ** max(used)  # if every pair has the same sign
    n = f"n = {min(used)}" if len(used) == 1 else f"n = {min(used)} to {max(used)}"
    equal = f"; {dropped} equal pair{'s' if dropped > 1 else ''} dropped" if dropped else ""
    tests, sizes = (markdown(*form(comparisons, names, report.measure)) for form in (p_values, effects))
    return f"{tests}\n{n}{equal}; the smallest possible p is {smallest:.4f}.\n\n{sizes}"


def _missing(report: ReportContents) -> str:
    missing = [run for run in report.runs if not run.is_finished]
    if not missing:
        return ""
    named = ((f"`{run.folder.name}` ({label_text(run.labels)}, seed {run.seed})", run.status) for run in missing)
    lines = [f"- {name}: {status.translate(SIGNS)}\n" for name, status in named]
    return f"## Not in the tables: {len(missing)} of {len(report.runs)} runs\n\n{''.join(lines)}"


def _environments(report: ReportContents) -> str:
    """Return the section with versions, commits and machines of finished runs; counts of runs where values differ."""
    facts: dict[str, Counter[str]] = {}
    for run in report.finished:
        for key, value in flatten(run.environment).items():
            if not key.startswith("resources."):
                name = key.removeprefix("packages.").removeprefix("machine.").replace("_", " ")
                facts.setdefault(name, Counter())[_value(value)] += 1
    lines = []
    for name, counts in facts.items():
        values = [f"{value} ({count} runs)" if len(counts) > 1 else value for value, count in counts.items()]
        lines.append(f"- {name}: {', '.join(values)}\n")
    return "## Versions and machines\n\n" + "".join(lines) if lines else ""


#: A column of a table in which several rows compete.
Contest = tuple[Table, Column]


def not_labelled(misnamed: Sequence[str], changed: Sequence[str]) -> list[str]:
    """Return warnings about runs that differ from their labels.

    Args:
      misnamed: labels that name another data set or model than the runs used.
      changed: settings that differ from the recipe of the published numbers.
    """
    reasons = {
        "The tables show the actual settings. Scaled-down runs only show that the recipe works.": misnamed,
        "The published numbers belong to the settings of the recipe, which differ.": changed,
    }
    return [f"NOT the labelled experiment: {'; '.join(what)}. {why}" for why, what in reasons.items() if what]


def on_average(tables: Sequence[Table]) -> str:
    """Return a sentence on the rows with the best average over tables, by column; equal printed numbers tie."""
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
    """Return sentences on the columns led by the subject (by default the most frequent leader) and by other rows.

    Rows that print the same mean tie. A row is called best only if it is significantly better than every other row in
    tests over seeds. Columns with one row are skipped. Upper bounds are not ranked; a last sentence names them.
    """
    bounds = [row for row in all_rows(tables) if any(row in table.bounds for table in tables)]
    named = f" Upper bound, trained on all examples together and not ranked: {', '.join(bounds)}." if bounds else ""
    return _ranking(tables, subject) + named


def _ranking(tables: Sequence[Table], subject: str | None) -> str:
    contests = [(table, column) for table in tables for column in table.columns if len(table.competing(column)) > 1]
    if not contests:
        return "No column has two comparable rows."
    rows = [row for row in all_rows(tables) if any(row in table.rows and row not in table.bounds for table in tables)]
    first: dict[str, list[Contest]] = {row: [] for row in rows}  # columns that only this row leads
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
    words += f"; {'also ' * bool(first[lead])}{metric.first}: {ahead}" if ahead else ""
    words += f"; tied: {ties}" if ties else ""
    return f"{words}. {_told_apart(first)}".strip()


def _told_apart(first: Mapping[str, Sequence[Contest]]) -> str:
    """Return a sentence on rows whose lead is significant in tests over seeds against all rows; "" without seeds."""
    if not any(table.cells[row, column].n for row, contests in first.items() for table, column in contests):
        return ""
    best = {row: sum(leads(table, row, column) for table, column in contests) for row, contests in first.items()}
    named = ", ".join(f"{row} in {count}" for row, count in best.items() if count)
    if not named:
        return f"No lead is significant in tests over seeds (p < {LEVEL:g}), so no row is called best."
    return f"Best, by tests over seeds against every other row (p < {LEVEL:g}): {named}."


def gain(tables: Sequence[Table], subject: str, baseline: str) -> str:
    """Return a sentence on the mean difference between a row and a baseline row."""
    columns = [table.column_cells(column) for table in tables for column in table.columns]
    gains = [difference(cells[subject], cells[baseline]) for cells in columns if {subject, baseline} <= cells.keys()]
    if not gains:
        return f"No column has both {subject} and {baseline}."
    metric = tables[0].metric
    mean, low, high = (with_sign(value, metric.digits) for value in (float(np.mean(gains)), min(gains), max(gains)))
    unit, more = " points" if metric.is_share else "", f" (from {low} to {high})" if len(gains) > 1 else ""
    where = f"over {len(gains)} columns" if len(gains) > 1 else "in the only column with both"
    return f"{subject} differs from {baseline} by {mean}{unit} on average{more} {where}."


def against_published(cells: Sequence[Cell]) -> str:
    """Return a sentence on the differences from the published numbers."""
    compared = [cell for cell in cells if cell.difference is not None]
    if not compared:
        return (
            "No cell has a published number beside it: the labels of a run must name the data set, the model, the method "
            "and exactly the settings of the published cell."
        )
    gaps = np.array([cell.difference for cell in compared], float)
    stds = np.array([np.nan if c.published is None or c.published.std is None else c.published.std for c in compared])
    near = int((np.abs(gaps) <= stds).sum())
    within = f"; {near} within one published standard deviation" if np.isfinite(stds).any() else ""
    return (
        f"{len(compared)} of {len(cells)} cells have a published number: ours differ by {with_sign(float(gaps.mean()))} points "
        f"on average, {np.abs(gaps).mean():.2f} in size{within}."
    )


def significance(comparisons: Sequence[Comparison], names: Sequence[str], pairs_of: str) -> str:
    """Return sentences on the rows that a tested row is significantly better than, and on the remaining rows."""
    said: dict[str, list[str]] = {}  # verdict -> tested rows
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
        text = f"p stays below the level in {sum(p < LEVEL for p in adjusted) or 'none'} of these cases."
        sentences.append(f"Adjusted for all {len(adjusted)} tests (Holm), {text}")
    if sentences and len({item.method for item in comparisons}) == 1:
        sentences.append(_other_way(comparisons, names))
    if sentences and not any(0.5**item.result.num_pairs < LEVEL for item in comparisons):
        sentences.append("With fewer than five pairs, no test can reach the level.")
    return " ".join(sentences)


def _other_way(comparisons: Sequence[Comparison], names: Sequence[str]) -> str:
    """Return a sentence on the rows that are significantly better than the tested row."""
    method = comparisons[0].method
    by_row: dict[str, list[Comparison]] = {}
    for item in comparisons:
        if item.reverse.is_significant:
            by_row.setdefault(item.other, []).append(item)
    if not by_row:
        return f"In the opposite direction, no row is significantly better than {method}."
    named = "; ".join(f"{row}{_at(items, names)}" for row, items in by_row.items())
    return f"In the opposite direction, significantly better than {method}: {named}."


def _at(items: Sequence[Comparison], names: Sequence[str]) -> str:
    if len(names) == 1:
        return f" at {names[0]} = {', '.join(text(item.column[0]) for item in items)}"
    return " at " + "; ".join(heading(names, item.column) for item in items) if names else ""
