"""A written report as an object: folder, text, and numbers as pandas DataFrames."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from raysim.base.errors import explained
from raysim.base.texts import visible
from raysim.reporting.contents import ReportContents
from raysim.reporting.document import conclusions, document
from raysim.reporting.drawing import captions, draw_figures, is_figure
from raysim.reporting.gather import make_report
from raysim.reporting.render import latex, write_csv
from raysim.reporting.significance import Comparison, holm
from raysim.reporting.tables import Table, heading

#: Columns of `Report.p_values`.
P_VALUES = (
    *("table", "column", "method", "better_than", "p", "p_holm", "num_pairs"),
    *("difference", "low", "high", "d"),
)


@dataclass(frozen=True, repr=False)
class Report:
    """Result of `raysim.report`. A notebook shows the text.

    Attributes:
      folder: holds report.md, table.csv, table.tex and figures.
      tables: title -> the means, as report.md has them: accuracies and other shares in percent.
      cells: table.csv: one row per cell, with its labels, mean, standard deviation over seeds, number of seeds and
        published number.
      p_values: one row per test (one-sided exact Wilcoxon) of whether `method` is better than `better_than`; `p_holm`
        is adjusted for all tests of the table. The column `title` names the table, and is empty for tests over all
        tables. Without `against` or `baseline` nothing is tested. `difference` is the mean paired difference, `low`
        and `high` are its 95 % interval, and `d` is the mean divided by the standard deviation of the differences.
      figures: name -> PNG.
      text: content of report.md. conclusions: the first sentences of the text.
    """

    folder: Path
    tables: Mapping[str, pd.DataFrame]
    cells: pd.DataFrame
    p_values: pd.DataFrame
    figures: Mapping[str, Path]
    text: str
    conclusions: Sequence[str]

    @classmethod
    def write(cls, runs: Sequence[Path], folder: Path, settings: Mapping[str, object]) -> Report:
        """Write the report of run directories to a folder.

        Raises:
          ConfigError, DataError: in the same cases as `make_report`.
        """
        contents = make_report(runs, settings, source="the call")
        text = write(contents, folder).read_text()
        pictures = sorted((folder / "figures").glob("*.png"))
        return cls(
            folder=folder,
            tables={table.title: _means(table) for table in contents.tables},
            cells=pd.read_csv(folder / "table.csv"),
            p_values=_p_values(contents),
            figures={picture.stem: picture for picture in pictures if f"(figures/{picture.name})" in text},
            text=text,
            conclusions=conclusions(contents),
        )

    def __repr__(self) -> str:
        return "\n".join([f"Report({str(self.folder)!r})", *self.conclusions])

    def _repr_markdown_(self) -> str:
        """Return the text for a notebook: paths of figures are relative to the current folder, the notebook's."""
        return self.text.replace("](figures/", f"]({Path(os.path.relpath(self.folder)).as_posix()}/figures/")


def _means(table: Table) -> pd.DataFrame:
    cells = {heading(table.names, c, table.metric.quantity): table.column_cells(c) for c in table.columns}
    means = {name: {row: cell.mean for row, cell in column.items()} for name, column in cells.items()}
    return pd.DataFrame(means, index=list(table.rows))


def _p_values(contents: ReportContents) -> pd.DataFrame:
    tests: dict[str, Sequence[Comparison]] = {"": contents.by_table, **contents.by_seed}
    names = contents.tables[0].names
    rows = []
    for title, comparisons in tests.items():
        for test, adjusted in zip(comparisons, holm([test.result.p for test in comparisons]), strict=True):
            result, effect = test.result, test.effect
            pair = title, heading(names, test.column, contents.measure.quantity), test.method, test.other
            rows.append((*pair, result.p, adjusted, result.num_pairs, effect.mean, effect.low, effect.high, effect.d))
    return pd.DataFrame(rows, columns=list(P_VALUES))


def write(report: ReportContents, folder: Path, on_note: Callable[[str], None] = lambda note: None) -> Path:
    """Write report.md, table.csv, table.tex and figures/*.png; return the path of report.md.

    Args:
      on_note: called with a sentence for each figure that failed, and for each requested figure that the runs lack.
    Raises:
      DataError: the folder cannot be written.
    """
    notes = [*report.notes]

    def add_note(kind: str, reason: str) -> None:
        notes.append(f"Figure `{kind}` is not drawn: {reason}.")
        on_note(notes[-1])

    figures = draw_figures(report, on_missing=add_note)
    with explained("cannot write the report", folder, "give another folder with --out", OSError):
        (folder / "figures").mkdir(parents=True, exist_ok=True)
        for picture in (folder / "figures").glob("*.png"):  # figures of an earlier report, perhaps on another metric
            if is_figure(picture.stem):
                picture.unlink()
        for name, figure in figures.items():
            figure.savefig(folder / "figures" / f"{name}.png", dpi=130)
        write_csv(folder / "table.csv", report.tables)
        (folder / "table.tex").write_text(latex(report.tables, report.group.rows, report.metric))
        (folder / "report.md").write_text(visible(document(report, captions(report, figures), notes), keep="\n"))
    return folder / "report.md"


def default_folder(paths: Sequence[Path]) -> Path:
    """Return the default folder of a report: inside a single folder of runs, beside the first of several folders."""
    return (paths[0] if len(paths) == 1 else paths[0].absolute().parent) / "report"
