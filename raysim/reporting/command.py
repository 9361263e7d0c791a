"""What `raysim report` prints and writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from raysim.reporting.build import make_report, write
from raysim.reporting.document import conclusions
from raysim.reporting.render import terminal
from raysim.reporting.runs import Settings

#: How many runs that are not in the tables are listed.
MOST_MISSING = 10


def show_report(paths: Sequence[Path], settings: Settings, folder: Path | None, out: Console) -> None:
    """Print tables and conclusions, and write the report.

    Args:
      settings: of the `report` group, from the command line; empty ones are not given.
      folder: by default `report` below the first path; nothing is written if there is no path either.
    """
    report = make_report(paths, {key: value for key, value in settings.items() if value})
    # A pipe or a file has no width that a table should be squeezed into.
    page = out if out.is_terminal else Console(highlight=False, width=400)
    for table in report.tables:
        page.print(terminal(table, report.group.rows))
    for line in conclusions(report):
        out.print(f"- {line}", markup=False)
    missing = [run for run in report.runs if not run.is_finished]
    for run in missing[:MOST_MISSING]:
        out.print(f"not in the tables: {run.folder}: {run.status}", markup=False)
    if len(missing) > MOST_MISSING:
        out.print(f"not in the tables: {len(missing) - MOST_MISSING} more, listed in the report")
    folder = folder or (paths[0] / "report" if paths else None)
    if folder is not None:
        out.print(f"report: {write(report, folder)}")
