"""report.md: what was run, what came out, how sure it is, and what is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from raysim.reporting import statement
from raysim.reporting.contents import ReportContents
from raysim.reporting.render import effects, header_of, lines_of, markdown, p_values
from raysim.reporting.runs import default_settings, differing, flatten, misnamed
from raysim.reporting.significance import LEVEL, Comparison
from raysim.reporting.tables import describe, text

#: Settings that say what an experiment was, whether or not they are the defaults.
ESSENTIAL = {
    *("rounds", "data.name", "model.name", "cohort.size", "cohort.fraction"),
    *("partition.scheme", "partition.alpha", "partition.num_clients"),
    *("local.lr", "local.epochs", "local.batch_size"),
}
#: Signs that a status may hold and Markdown takes for markup.
SIGNS = str.maketrans({sign: f"\\{sign}" for sign in "|<*"})
GROUPS = ("data", "partition", "model", "local", "cohort", "evaluation", "rounds", "stop", "methods", "on_nonfinite")


def document(report: ReportContents, figures: Mapping[str, str], notes: Sequence[str]) -> str:
    """The whole report as Markdown; figures: file name -> caption."""
    parts = [f"# {_title(report)}: {report.metric}\n", "\n".join(f"- {line}" for line in conclusions(report)) + "\n"]
    parts += [_settings(report), _tables(report), *_extras(report), _significance(report)]
    if figures:
        parts.append("## Figures\n")
        parts += [f"![{name}](figures/{name}.png)\n\n{caption}\n" for name, caption in figures.items()]
    parts += [_missing(report), _environments(report)]
    if notes:
        parts.append("## Notes\n\n" + "\n".join(f"- {note}" for note in notes) + "\n")
    return "\n".join(part for part in parts if part)


def _title(report: ReportContents) -> str:
    """The folder that all runs stand in, or what else names the report best."""
    folders = {run.folder.parent for run in report.runs}
    if len(report.runs) == 1:
        return report.runs[0].folder.name
    if len(folders) == 1:
        return folders.pop().name
    return f"{len(report.runs)} runs" if report.runs else ", ".join(report.group.published)


def conclusions(report: ReportContents) -> list[str]:
    """Plain sentences, all of them computed."""
    lines = statement.not_labelled(misnamed(report.finished), report.changed)
    lines.append(statement.winners(report.tables, report.subject))
    if len(report.tables) > 1:
        lines.append(statement.on_average(report.tables))
    if report.subject and report.baseline and report.subject != report.baseline:
        lines.append(statement.gain(report.tables, report.subject, report.baseline))
    if report.by_table:
        pairs = "pairs of means (one for each table)"
        lines.append(statement.significance(report.by_table, report.tables[0].names, pairs))
    if len(report.tables) == 1:
        (table,) = report.tables
        tests = report.by_seed.get(table.title, ())
        lines.append(statement.significance(tests, table.names, "pairs of runs with the same seed"))
    if report.theirs and report.runs and report.measure.is_accuracy:
        lines.append(statement.against_published(report.cells))
    return [line for line in lines if line]


def _settings(report: ReportContents) -> str:
    """What all finished runs have in common, and the number of seeds."""
    if not report.finished:
        sources = dict.fromkeys(cell.source for cell in report.theirs)
        return f"## Source\n\nNumbers as published: {'; '.join(sources)}. Nothing here was run.\n"
    first, *_ = report.finished
    defaults = default_settings()
    varying = {key for key in differing([run.settings for run in report.finished]) if key.split(".")[0] in GROUPS}
    common = {
        key: value
        for key, value in first.settings.items()
        if key.split(".")[0] in GROUPS and key not in varying and value is not None and key != "data.root"
        if key in ESSENTIAL or value != defaults.get(key)
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
        "labels of all runs": describe(labels) if labels else "",
        "settings of all runs": ", ".join(f"`{key}={_value(value)}`" for key, value in common.items()),
        "settings that differ": ", ".join(f"`{key}`" for key in sorted(varying)),
    }
    return "## Settings\n\n" + "".join(f"- {name}: {value}\n" for name, value in lines.items() if value)


def _value(value: object) -> str:
    return text(value) if isinstance(value, str | int | float) else str(value).replace("'", "")


def _tables(report: ReportContents) -> str:
    deviation = "mean ± standard deviation over seeds (n − 1 in the denominator)" if report.runs else "as published"
    first = report.measure.first.capitalize()
    better = f" ({report.measure.better})" if report.measure.better else ""
    parts = [f"## {report.heading}: {deviation}\n"]
    parts.append(f"{first} mean{better} **bold**, the next <u>underlined</u>, in each column; equal ones alike.\n")
    for table in report.tables:
        parts += [f"### {table.title}\n", markdown(header_of(table, report.group.rows), lines_of(table))]
    return "\n".join(parts)


def _extras(report: ReportContents) -> list[str]:
    return [f"## {e.title}\n\n{e.caption}\n\n{markdown(e.header, e.lines)}" for e in (*report.others, *report.extras)]


def _significance(report: ReportContents) -> str:
    if not report.by_table and not report.by_seed:
        reason = "name a method with `--against METHOD` (or `report.against`)"
        if report.subject or report.baseline:
            reason = "no two rows share a column" + (" and a seed" if len(report.tables) == 1 else "")
        return f"## Significance\n\nNothing was tested: {reason}.\n"
    parts = [
        "## Significance\n",
        f"Exact one-sided Wilcoxon signed-rank tests, level {LEVEL:g} (bold): each by itself, and below it adjusted by Holm's "
        "method for all tests of its table. Upper bounds are not tested. Equal pairs are dropped; `=` marks tied "
        "differences, which share their mean rank. With n pairs no p below 1/2^n can come out: 1/32 = 0.031 with five, so "
        "that fewer than five pairs cannot reach the level.\n",
        "Below the tests stand the mean paired differences with their 95 % intervals by Student's t, which takes the differences "
        "for normal (bold: without 0; not adjusted), and d, the mean over the standard deviation of the differences.\n",
    ]
    if report.by_table:
        pairs = "; ".join(table.title for table in report.tables)
        parts.append(f"### Over tables\n\nPaired are the means in the same column of: {pairs}.\n")
        parts.append(_p_table(report.by_table, report))
    for title, tests in report.by_seed.items():
        parts.append(f"### Over seeds: {title}\n\nPaired are the numbers of runs with the same seed.\n")
        parts.append(_p_table(tests, report))
    return "\n".join(parts)


def _p_table(comparisons: Sequence[Comparison], report: ReportContents) -> str:
    names = report.tables[0].names
    used = {item.result.num_used for item in comparisons}
    dropped = sum(item.result.num_pairs - item.result.num_used for item in comparisons)
    smallest = min(item.result.smallest_p for item in comparisons)
    n = f"n = {min(used)}" if len(used) == 1 else f"n = {min(used)} to {max(used)}"
    equal = f"; {dropped} equal pair{'s' if dropped > 1 else ''} dropped" if dropped else ""
    tests = (
        f"{markdown(*p_values(comparisons, names, report.measure))}\n"
        f"{n}{equal}; the smallest p that can come out is {smallest:.4f}.\n"
    )
    return f"{tests}\n{markdown(*effects(comparisons, names, report.measure))}"


def _missing(report: ReportContents) -> str:
    missing = [run for run in report.runs if not run.is_finished]
    if not missing:
        return ""
    lines = [
        f"- `{run.folder.name}` ({describe(run.labels)}, seed {run.seed}): {run.status.translate(SIGNS)}\n"
        for run in missing
    ]
    return f"## Not in the tables: {len(missing)} of {len(report.runs)} runs\n\n{''.join(lines)}"


def _environments(report: ReportContents) -> str:
    """Versions, commits and machines of the finished runs, each with its number of runs where they differ."""
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
