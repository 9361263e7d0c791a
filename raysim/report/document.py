"""report.md: what was run, what came out, how sure it is, and what is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from raysim.config import Config
from raysim.report import statement
from raysim.report.contents import Report
from raysim.report.render import header_of, lines_of, markdown, p_values
from raysim.report.runs import differing, flatten, misnamed, settings
from raysim.report.significance import LEVEL, Comparison
from raysim.report.tables import describe, text

#: Settings that say what an experiment was, whether or not they are the defaults.
ESSENTIAL = (
    "rounds",
    "data.name",
    "partition.scheme",
    "partition.alpha",
    "partition.num_clients",
    "model.name",
    "local.lr",
    "local.epochs",
    "local.batch_size",
    "cohort.size",
    "cohort.fraction",
)
GROUPS = ("data", "partition", "model", "local", "cohort", "evaluation", "rounds", "methods", "on_nonfinite")


def document(report: Report, figures: Mapping[str, str], notes: Sequence[str]) -> str:
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


def _title(report: Report) -> str:
    """The folder that all runs stand in, or what else names the report best."""
    folders = {run.folder.parent for run in report.runs}
    if len(report.runs) == 1:
        return report.runs[0].folder.name
    if len(folders) == 1:
        return folders.pop().name
    return f"{len(report.runs)} runs" if report.runs else ", ".join(report.group.published)


def conclusions(report: Report) -> list[str]:
    """Plain sentences, all of them computed."""
    wrong = misnamed([run for run in report.runs if run.is_finished])
    lines = [statement.not_the_experiment(wrong)] if wrong else []
    lines += [statement.not_the_recipe(report.changed)] if report.changed else []
    lines.append(statement.winners(report.tables, report.subject))
    if len(report.tables) > 1:
        lines.append(statement.on_average(report.tables))
    if report.subject and report.baseline and report.subject != report.baseline:
        lines.append(statement.gain(report.tables, report.subject, report.baseline))
    if report.by_table:
        pairs = "pairs of means (one for each table)"
        lines.append(statement.significance(report.by_table, report.tables[0].names, pairs))
    for table in report.tables if len(report.tables) == 1 else ():
        found = report.by_seed.get(table.title, ())
        lines.append(statement.significance(found, table.names, "pairs of runs with the same seed"))
    if report.theirs and report.runs and report.measure.is_accuracy:
        lines.append(statement.against_published(report.cells))
    return [line for line in lines if line]


def _settings(report: Report) -> str:
    """What all finished runs have in common, and the number of seeds."""
    finished = [run for run in report.runs if run.is_finished]
    if not finished:
        sources = dict.fromkeys(cell.source for cell in report.theirs)
        return f"## Source\n\nNumbers as published: {'; '.join(sources)}. Nothing here was run.\n"
    flat = [settings(run.config) for run in finished]
    defaults = flatten(Config().model_dump(mode="json"))
    varying = set(differing(flat))
    common = {
        key: value
        for key, value in flat[0].items()
        if key.split(".")[0] in GROUPS and key not in varying and value is not None and key != "data.root"
        if key in ESSENTIAL or value != defaults.get(key)
    }
    labels = [key for key in finished[0].labels if len({repr(run.labels.get(key)) for run in finished}) == 1]
    counts = Counter(cell.n for cell in report.cells)
    seeds = sorted({str(run.seed) for run in finished}, key=lambda seed: (len(seed), seed))
    told = ", ".join(f"{n} in {cells} cells" for n, cells in sorted(counts.items()))
    per_cell = f"{next(iter(counts))} in every cell" if len(counts) == 1 else told
    lines = [
        f"- runs: {len(finished)} finished of {len(report.runs)}",
        f"- seeds: {per_cell} ({', '.join(seeds)})",
        f"- labels of all runs: {describe({key: finished[0].labels[key] for key in labels})}" if labels else "",
        "- settings of all runs: " + ", ".join(f"`{key}={_value(value)}`" for key, value in common.items()),
        f"- settings that differ: {', '.join(f'`{key}`' for key in sorted(varying) if key.split('.')[0] in GROUPS)}",
    ]
    return "## Settings\n\n" + "\n".join(line for line in lines if line and not line.endswith(": ")) + "\n"


def _value(value: Any) -> str:
    return text(value) if isinstance(value, str | int | float) else str(value).replace("'", "")


def _tables(report: Report) -> str:
    deviation = "mean ± standard deviation over seeds (n − 1 in the denominator)" if report.runs else "as published"
    quantity = report.measure.quantity
    title = f"{quantity[0].upper()}{quantity[1:]} in %" if report.measure.is_share else quantity
    better = "" if report.measure.mode == "max" else " (lower is better)"
    parts = [f"## {title}, {deviation}\n"]
    parts.append(f"Best{better} **bold**, second best <u>underlined</u>, in each column.\n")
    for table in report.tables:
        parts += [f"### {table.title}\n", markdown(header_of(table, report.group.rows), lines_of(table))]
    return "\n".join(parts)


def _extras(report: Report) -> list[str]:
    return [f"## {e.title}\n\n{e.caption}\n\n{markdown(e.header, e.lines)}" for e in report.extras]


def _significance(report: Report) -> str:
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
    ]
    if report.by_table:
        pairs = "; ".join(table.title for table in report.tables)
        parts.append(f"### Over tables\n\nPaired are the mean accuracies in the same column of: {pairs}.\n")
        parts.append(_p_table(report.by_table, report.tables[0].names))
    for title, found in report.by_seed.items():
        parts.append(f"### Over seeds: {title}\n\nPaired are the accuracies of runs with the same seed.\n")
        parts.append(_p_table(found, report.tables[0].names))
    return "\n".join(parts)


def _p_table(comparisons: Sequence[Comparison], names: Sequence[str]) -> str:
    used = sorted({item.result.num_used for item in comparisons})
    dropped = sum(item.result.num_pairs - item.result.num_used for item in comparisons)
    smallest = min(item.result.smallest_p for item in comparisons)
    n = f"n = {used[0]}" if len(used) == 1 else f"n = {used[0]} to {used[-1]}"
    told = f"; {dropped} equal pair{'s' if dropped > 1 else ''} dropped" if dropped else ""
    return (
        f"{markdown(*p_values(comparisons, names))}\n{n}{told}; the smallest p that can come out is {smallest:.4f}.\n"
    )


def _missing(report: Report) -> str:
    missing = [run for run in report.runs if not run.is_finished]
    if not missing:
        return ""
    lines = [
        f"- `{run.folder.name}` ({describe(run.labels)}, seed {run.seed}): {_plain(run.status)}" for run in missing
    ]
    return f"## Not in the tables: {len(missing)} of {len(report.runs)} runs\n\n" + "\n".join(lines) + "\n"


def _plain(words: str) -> str:
    return words.replace("|", "\\|").replace("<", "\\<").replace("*", "\\*")


def _environments(report: Report) -> str:
    """Versions, commits and machines of the finished runs, each with its number of runs where they differ."""
    finished = [run for run in report.runs if run.is_finished]
    facts: dict[str, Counter[str]] = {}
    for run in finished:
        flat = flatten(run.environment)
        shown = {key.removeprefix("packages.").removeprefix("machine."): value for key, value in flat.items()}
        for key, value in shown.items():
            if not key.startswith("resources."):
                facts.setdefault(key, Counter())[_value(value)] += 1
    lines = []
    for key, values in facts.items():
        many = len(values) > 1
        told = ", ".join(f"{value} ({count} runs)" if many else value for value, count in values.items())
        lines.append(f"- {key.replace('_', ' ')}: {told}")
    return "## Versions and machines\n\n" + "\n".join(lines) + "\n" if lines else ""
