"""Tables as Markdown, LaTeX, CSV and on the terminal."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.markup import escape
from rich.table import Table as Terminal

from raysim.base.texts import cells as harmless
from raysim.reporting.measure import ReportMetric
from raysim.reporting.significance import LEVEL, Comparison, Effect, holm
from raysim.reporting.tables import Cell, Table, heading

T = TypeVar("T")

#: Name of the lines with published numbers; the difference is the run's number minus the published number.
PUBLISHED = "published (difference)"

#: Name of the lines with p adjusted for the number of tests.
HOLM = "Holm-adjusted"

#: Lines that belong to the line above them.
BELOW = (PUBLISHED, HOLM)

MARKDOWN = {"best": "**{}**", "second": "<u>{}</u>", "": "{}"}
LATEX = {"best": r"\textbf{{{}}}", "second": r"\underline{{{}}}", "": "{}"}
RICH = {"best": "[bold]{}[/bold]", "second": "[underline]{}[/underline]", "": "{}"}
LATEX_NAMES = {"\\": "backslash", "~": "asciitilde", "^": "asciicircum", "<": "less", ">": "greater", "|": "bar"}
LATEX_SIGNS = str.maketrans(
    {
        **{sign: f"\\text{name}{{}}" for sign, name in LATEX_NAMES.items()},
        **{sign: f"\\{sign}" for sign in "&%$#_{}"},
        "±": r"$\pm$",
        "−": "$-$",
    }
)
MARKDOWN_SIGNS = str.maketrans({sign: f"\\{sign}" for sign in "\\`*_|<>["})


@dataclass(frozen=True)
class Entry:
    text: str
    mark: str = ""


Line = tuple[str, tuple[Entry, ...]]


def lines_of(table: Table) -> list[Line]:
    """Return a table's lines: a line per row and, below, published numbers if available.

    Average gains, if any, are the last lines.
    """
    has_counts = len({cell.n for cell in table.cells.values()}) > 1
    lines: list[Line] = []
    for row in table.rows:
        cells = table.line(row)
        marks = [table.marks.get((row, column), "") for column in table.columns]
        texts = [_ours(cell, has_counts, table.metric.digits) for cell in cells]
        lines.append((row, tuple(map(Entry, texts, marks))))
        lines += published_line(map(published_text, cells))
    return lines + _gain_lines(table)


def published_line(texts: Iterable[str]) -> list[Line]:
    """Return a list with the line of published numbers; an empty list if there are no numbers."""
    entries = tuple(map(Entry, texts))
    return [(PUBLISHED, entries)] if any(entry.text for entry in entries) else []


def _gain_lines(table: Table) -> list[Line]:
    if not table.gains:
        return []
    gains = [table.gains.get(column) for column in table.columns]
    pairs = {gain.n for gain in table.gains.values()}
    name = f"{table.gain_name} ({pairs.pop()} pairs)" if len(pairs) == 1 else table.gain_name
    texts = [with_sign(gain.mean, table.metric.digits) if gain else "-" for gain in gains]
    return [(name, tuple(map(Entry, texts))), *published_line(published_text(gain, with_sign) for gain in gains)]


def _ours(cell: Cell | None, has_count: bool, digits: int) -> str:
    if cell is None:
        return "-"
    return accuracy(cell.mean, cell.std, digits) + (f" (n={cell.n})" if has_count and cell.n else "")


def published_text(cell: Cell | None, form: Callable[[float], str] | None = None) -> str:
    """Return the published number, by default with its standard deviation, and the difference in parentheses."""
    if cell is None or not cell.n or cell.published is None:
        return ""
    value, std = cell.published.value, cell.published.std
    if value is None or cell.difference is None:
        return cell.published.text
    return f"{form(value) if form else accuracy(value, std)} ({with_sign(cell.difference)})"


def accuracy(mean: float, std: float | None, digits: int = 2) -> str:
    """Return `58.10 ± 1.20`, or `58.10` without a deviation."""
    return f"{mean:.{digits}f}" if std is None else f"{mean:.{digits}f} ± {std:.{digits}f}"


def with_sign(points: float, digits: int = 2) -> str:
    return f"{points:+z.{digits}f}".replace("-", "−")


def markdown(header: Sequence[str], lines: Sequence[Line]) -> str:
    """Return a Markdown table; the first column is left-aligned."""
    rows = [[markdown_text(cell) for cell in header], ["---", *["---:"] * (len(header) - 1)]]
    for name, entries in lines:
        rows.append([f"&nbsp;&nbsp;*{name}*" if name in BELOW else markdown_text(name), *_marked(entries, MARKDOWN)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def _marked(entries: Sequence[Entry], forms: Mapping[str, str], escape: Callable[[str], str] = str) -> list[str]:
    """Return the texts of a line, each in the form of its mark (best, second or none)."""
    return [forms[entry.mark].format(escape(entry.text)) for entry in entries]


def markdown_text(words: str) -> str:
    """Return text with Markdown's special characters escaped."""
    return words.translate(MARKDOWN_SIGNS)


def header_of(table: Table, rows: str, quantity: str | None = None) -> list[str]:
    """Return the header; a single column without a label is named by the metric's quantity."""
    return [rows, *(heading(table.names, column, quantity or table.metric.quantity) for column in table.columns)]


def latex(tables: Sequence[Table], rows: str, metric: str) -> str:
    """Return a LaTeX `table` environment for each table, which needs the package booktabs."""
    parts = ["% needs \\usepackage{booktabs}; the first mean bold, the second underlined in each column\n"]
    for table in tables:
        columns, unit = "r" * len(table.columns), " (%)" * table.metric.is_share
        parts += [
            "\\begin{table}[t]\n\\centering\n",
            f"\\caption{{{latex_text(f'{table.title}: {metric}, mean ± standard deviation over seeds{unit}')}}}\n",
            f"\\begin{{tabular}}{{l{columns}}}\n\\toprule\n",
            _latex_line([latex_text(cell) for cell in header_of(table, rows)]),
            "\\midrule\n",
        ]
        for name, entries in lines_of(table):
            cells = _marked(entries, LATEX, latex_text)
            if name == PUBLISHED:
                cells = [f"{{\\footnotesize {cell}}}" if cell else "" for cell in cells]
                parts.append(_latex_line([f"\\quad{{\\footnotesize {name}}}", *cells]))
            else:
                parts.append(_latex_line([latex_text(name), *cells]))
        parts.append("\\bottomrule\n\\end{tabular}\n\\end{table}\n\n")
    return "".join(parts)


def latex_text(words: str) -> str:
    """Return text with LaTeX's special characters escaped."""
    return words.translate(LATEX_SIGNS)


def _latex_line(cells: Sequence[str]) -> str:
    return " & ".join(cells) + " \\\\\n"


def terminal(header: Sequence[str], lines: Sequence[Line]) -> Terminal:
    """Return a table for the terminal, without the title, which may be wider."""
    shown = Terminal()
    for index, cell in enumerate(header):
        shown.add_column(escape(cell), justify="right" if index else "left", no_wrap=not index)
    for name, entries in lines:
        style = "dim" if name == PUBLISHED else None
        shown.add_row(f"  {name}" if style else escape(name), *_marked(entries, RICH, escape), style=style)
    return shown


def p_values(
    comparisons: Sequence[Comparison], names: Sequence[str], metric: ReportMetric
) -> tuple[list[str], list[Line]]:
    """Return (header, lines) of a table of p: two lines per pair of rows, a column per column; below 0.05 is bold.

    The number of pairs that a test used is shown if it varies between tests; `=` marks tied differences. The second
    line of a pair of rows holds p adjusted for the number of tests in the whole table.
    """
    has_counts = len({item.result.num_used for item in comparisons}) > 1
    entries = []
    for item, adjusted in zip(comparisons, holm([item.result.p for item in comparisons]), strict=True):
        ties, count = "=" * item.result.has_ties, f" (n={item.result.num_used})" * has_counts
        p = Entry(f"{item.result.p:.4f}{ties}{count}", "best" if item.result.is_significant else "")
        entries.append((p, Entry(f"{adjusted:.4f}", "best" if adjusted < LEVEL else "")))
    header, pairs = _by_pair(comparisons, entries, (Entry("-"), Entry("")), names, metric)
    lines: list[Line] = []
    for (method, other), row in pairs.items():
        upper, lower = zip(*row, strict=True)
        lines += [(f"{method} > {other}", upper), (HOLM, lower)]
    return ["better than", *header], lines


def effects(
    comparisons: Sequence[Comparison], names: Sequence[str], metric: ReportMetric
) -> tuple[list[str], list[Line]]:
    """Return (header, lines) of a table of paired differences: a line per pair of rows, a column per column.

    An entry is the mean difference, its interval and d: `+0.84 [−0.31, +1.99], d +0.9`; bold if the interval leaves
    out 0.
    """
    marks = ("best" if item.effect.is_certain else "" for item in comparisons)
    entries = [Entry(_effect(item.effect, metric.digits), mark) for item, mark in zip(comparisons, marks, strict=True)]
    header, pairs = _by_pair(comparisons, entries, Entry("-"), names, metric)
    return ["difference", *header], [(f"{method} - {other}", tuple(row)) for (method, other), row in pairs.items()]


def _by_pair(
    comparisons: Sequence[Comparison], entries: Sequence[T], otherwise: T, names: Sequence[str], metric: ReportMetric
) -> tuple[list[str], dict[tuple[str, str], list[T]]]:
    """Return (column headings, pair of rows -> entry in each column), arranged from comparisons."""
    columns = list(dict.fromkeys(item.column for item in comparisons))
    pairs = dict.fromkeys((item.method, item.other) for item in comparisons)
    places = {(item.method, item.other, item.column): entry for item, entry in zip(comparisons, entries, strict=True)}
    rows = {pair: [places.get((*pair, column), otherwise) for column in columns] for pair in pairs}
    return [heading(names, column, metric.quantity) for column in columns], rows


def _effect(effect: Effect, digits: int) -> str:
    words = with_sign(effect.mean, digits)
    if effect.low is not None and effect.high is not None:
        words += f" [{with_sign(effect.low, digits)}, {with_sign(effect.high, digits)}]"
    return words if effect.d is None else f"{words}, d {with_sign(effect.d, 1)}"


def write_csv(path: Path, tables: Sequence[Table]) -> None:
    """Write cells in long form: a line per cell, shares in percent in full precision, missing numbers empty."""
    cells = [cell for table in tables for row in table.rows for cell in table.row_cells(row).values()]
    labels = list(dict.fromkeys(key for cell in cells for key in cell.labels))
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(harmless([*labels, *_numbers(cells[0])]))
        rows = ([*map(cell.labels.get, labels), *_numbers(cell).values()] for cell in cells)
        writer.writerows(map(harmless, rows))


def _numbers(cell: Cell) -> dict[str, object]:
    """Return a cell's numbers under the names of table.csv."""
    theirs, metric = cell.published, f"{cell.metric.name}{'_pct' * cell.metric.is_share}"
    return {
        "metric": metric if cell.n else theirs and theirs.metric,
        "mean": cell.mean if cell.n else None,
        "std": cell.std if cell.n else None,
        "n": cell.n,
        "published_mean": theirs and theirs.value,
        "published_std": theirs and theirs.std,
        "published_source": theirs and theirs.source,
        "difference": cell.difference,
    }
