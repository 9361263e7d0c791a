"""Tables as Markdown, LaTeX, CSV and on the terminal."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from raysim.report.significance import LEVEL, Comparison, holm
from raysim.report.tables import Cell, Column, Table, heading

if TYPE_CHECKING:
    from rich.table import Table as Terminal

#: Name of the lines with published numbers; the difference is ours minus theirs.
PUBLISHED = "published (difference)"

#: Name of the lines with p adjusted for the number of tests.
HOLM = "Holm-adjusted"

#: Lines that belong to the line above them.
BELOW = (PUBLISHED, HOLM)

MARKDOWN = {"best": "**{}**", "second": "<u>{}</u>", "": "{}"}
LATEX = {"best": r"\textbf{{{}}}", "second": r"\underline{{{}}}", "": "{}"}
RICH = {"best": "[bold]{}[/bold]", "second": "[underline]{}[/underline]", "": "{}"}
LATEX_SIGNS = {
    "\\": r"\textbackslash{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    "−": "$-$",
}


@dataclass(frozen=True)
class Entry:
    text: str
    mark: str = ""


Line = tuple[str, tuple[Entry, ...]]


def lines_of(table: Table) -> list[Line]:
    """What every form of a table shows: a line per row and, below it, one with the published numbers if there are any.

    The average gains, if there are some, come last.
    """
    counts = {cell.n for cell in table.cells.values()}
    lines: list[Line] = []
    for row in table.rows:
        cells = [table.cells.get((row, column)) for column in table.columns]
        marks = [table.marks.get((row, column), "") for column in table.columns]
        shown = [
            Entry(_ours(cell, len(counts) > 1, table.metric.digits), mark)
            for cell, mark in zip(cells, marks, strict=True)
        ]
        lines.append((row, tuple(shown)))
        if any(cell and cell.n and cell.published for cell in cells):
            lines.append((PUBLISHED, tuple(Entry(_theirs(cell)) for cell in cells)))
    return lines + _gain_lines(table)


def _gain_lines(table: Table) -> list[Line]:
    gains = [table.gains.get(column) for column in table.columns]
    found = [gain for gain in gains if gain is not None]
    if not found:
        return []
    pairs, digits = {gain.n for gain in found}, table.metric.digits
    name = f"{table.gain_name} ({next(iter(pairs))} pairs)" if len(pairs) == 1 else table.gain_name
    lines: list[Line] = [(name, tuple(Entry(signed(gain.mean, digits) if gain else "-") for gain in gains))]
    if any(gain.published is not None for gain in found):
        shown = [
            f"{signed(g.published)} ({signed(g.mean - g.published)})" if g and g.published is not None else ""
            for g in gains
        ]
        lines.append((PUBLISHED, tuple(Entry(text) for text in shown)))
    return lines


def _ours(cell: Cell | None, with_count: bool, digits: int) -> str:
    if cell is None:
        return "-"
    return accuracy(cell.mean, cell.std, digits) + (f" (n={cell.n})" if with_count and cell.n else "")


def _theirs(cell: Cell | None) -> str:
    if cell is None or not cell.n or cell.published is None:
        return ""
    if cell.published.value is None:
        return cell.published.text
    return f"{accuracy(cell.published.value, cell.published.std)} ({signed(cell.difference or 0.0)})"


def accuracy(mean: float, std: float | None, digits: int = 2) -> str:
    """`58.10 ± 1.20`, or without a deviation `58.10`."""
    return f"{mean:.{digits}f}" if std is None else f"{mean:.{digits}f} ± {std:.{digits}f}"


def signed(points: float, digits: int = 2) -> str:
    return f"{points:+.{digits}f}".replace("-", "−")


def markdown(header: Sequence[str], lines: Sequence[Line]) -> str:
    """A Markdown table; the first column is left-aligned."""
    rows = [
        list(header),
        ["---", *["---:"] * (len(header) - 1)],
        *(
            [f"&nbsp;&nbsp;*{name}*" if name in BELOW else _markdown_text(name)]
            + [MARKDOWN[entry.mark].format(entry.text) for entry in entries]
            for name, entries in lines
        ),
    ]
    rows[0] = [_markdown_text(cell) for cell in rows[0]]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def _markdown_text(words: str) -> str:
    for sign in "\\`*_|<>[":
        words = words.replace(sign, f"\\{sign}")
    return words


def header_of(table: Table, rows: str) -> list[str]:
    return [rows, *(heading(table.names, c) if table.names else table.metric.quantity for c in table.columns)]


def latex(tables: Sequence[Table], rows: str, metric: str) -> str:
    """One `table` environment for each table; needs the package booktabs."""
    parts = ["% needs \\usepackage{booktabs}; best bold, second best underlined in each column\n"]
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
            cells = [LATEX[entry.mark].format(latex_text(entry.text)) for entry in entries]
            if name == PUBLISHED:
                cells = [f"{{\\footnotesize {cell}}}" if cell else "" for cell in cells]
                parts.append(_latex_line([f"\\quad{{\\footnotesize {name}}}", *cells]))
            else:
                parts.append(_latex_line([latex_text(name), *cells]))
        parts.append("\\bottomrule\n\\end{tabular}\n\\end{table}\n\n")
    return "".join(parts)


def latex_text(words: str) -> str:
    """Text with every sign that LaTeX takes for a command escaped."""
    return "".join(LATEX_SIGNS.get(sign, sign) for sign in words)


def _latex_line(cells: Sequence[str]) -> str:
    return " & ".join(cells) + " \\\\\n"


def terminal(table: Table, rows: str) -> Terminal:
    from rich.markup import escape
    from rich.table import Table as Terminal

    shown = Terminal(title=escape(table.title))
    for index, cell in enumerate(header_of(table, rows)):
        shown.add_column(escape(cell), justify="right" if index else "left", no_wrap=not index)
    for name, entries in lines_of(table):
        style = "dim" if name == PUBLISHED else None
        cells = [RICH[entry.mark].format(escape(entry.text)) for entry in entries]
        shown.add_row(f"  {name}" if style else escape(name), *cells, style=style)
    return shown


def p_values(comparisons: Sequence[Comparison], names: Sequence[str]) -> tuple[list[str], list[Line]]:
    """(header, lines) of a table of p: two lines for each pair, a column for each column; below 0.05 is bold.

    The number of pairs that the test used is written if it is not the same everywhere, `=` marks tied differences. The second
    line holds p adjusted for the number of tests in the whole table.
    """
    columns = list(dict.fromkeys(item.column for item in comparisons))
    counts = {item.result.num_used for item in comparisons}
    pairs: dict[str, dict[Column, Entry]] = {}
    corrected: dict[str, dict[Column, Entry]] = {}
    for item, adjusted in zip(comparisons, holm([item.result.p for item in comparisons]), strict=True):
        result = item.result
        words = f"{result.p:.4f}" + ("=" if result.has_ties else "")
        words += f" (n={result.num_used})" if len(counts) > 1 else ""
        name = f"{item.method} > {item.other}"
        pairs.setdefault(name, {})[item.column] = Entry(words, "best" if result.is_significant else "")
        told = Entry(f"{adjusted:.4f}", "best" if adjusted < LEVEL else "")
        corrected.setdefault(name, {})[item.column] = told
    lines: list[Line] = []
    for name, found in pairs.items():
        lines.append((name, tuple(found.get(column, Entry("-")) for column in columns)))
        lines.append((HOLM, tuple(corrected[name].get(column, Entry("")) for column in columns)))
    return ["better than", *(heading(names, column) for column in columns)], lines


def write_csv(path: Path, tables: Sequence[Table], metric: str) -> None:
    """Long form: a line per cell, shares in percent in full precision, empty where there is no number."""
    cells = [cell for table in tables for row in table.rows for cell in _row(table, row)]
    labels = list(dict.fromkeys(key for cell in cells for key in cell.labels))
    unit = "_pct" if tables[0].metric.is_share else ""
    numbers = ["metric", "mean", "std", "n", "published_mean", "published_std", "published_source", "difference"]
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*labels, *numbers])
        for cell in cells:
            theirs = cell.published
            known = [theirs.value, theirs.std, theirs.source] if theirs else [None] * 3
            ours = (
                [f"{metric}{unit}", cell.mean, cell.std, cell.n]
                if cell.n
                else [theirs and theirs.metric, None, None, 0]
            )
            writer.writerow([*(cell.labels.get(key) for key in labels), *ours, *known, cell.difference])


def _row(table: Table, row: str) -> list[Cell]:
    return [table.cells[row, column] for column in table.columns if (row, column) in table.cells]
