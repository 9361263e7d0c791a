"""What `raysim report` prints and writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from raysim.core.commands import shown
from raysim.reporting.build import default_folder, make_report, write
from raysim.reporting.document import conclusions
from raysim.reporting.render import header_of, lines_of, terminal
from raysim.reporting.runs import Settings
from raysim.terminal import LiveLine, out, print_table

#: How many runs that are not in the tables are listed.
MOST_MISSING = 10


def show_report(paths: Sequence[Path], settings: Settings, folder: Path | None) -> None:
    """Print tables and conclusions, and write the report.

    Args:
      settings: of the `report` group, from the command line; empty ones are not given.
      folder: see `default_folder`; nothing is written where there are no paths either.
    """
    with LiveLine() as line:
        line.step("reading the runs")
        report = make_report(paths, {key: value for key, value in settings.items() if value})
    for table in report.tables:
        out.print(f"{table.title}: {report.metric}{', in %' * table.metric.is_share}", markup=False)
        print_table(terminal(header_of(table, report.group.rows), lines_of(table)))
    for other in report.others:
        out.print(other.title, markup=False)
        print_table(terminal(other.header, other.lines))
    for sentence in conclusions(report):
        out.print(f"- {sentence}", markup=False)
    for note in report.notes:
        out.print(f"note: {note}", markup=False)
    missing = [run for run in report.runs if not run.is_finished]
    for run in missing[:MOST_MISSING]:
        out.print(f"not in the tables: {run.folder}: {run.status}", markup=False)
    if len(missing) > MOST_MISSING:
        out.print(f"not in the tables: {len(missing) - MOST_MISSING} more, listed in the report")
    if folder is None and paths:
        folder = default_folder(paths)
    if folder is not None:
        with LiveLine() as line:
            line.step("drawing the figures")
            notes: list[str] = []
            path = write(report, folder, notes.append)
        for note in notes:
            out.print(f"note: {note}", markup=False)
        out.print(f"report: {shown(path)}", markup=False)
