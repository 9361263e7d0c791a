"""What `raysim report` prints and writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from raysim.config import home_folder, located_path
from raysim.core.uri import is_uri
from raysim.reporting.build import make_report, write
from raysim.reporting.document import conclusions
from raysim.reporting.render import terminal
from raysim.reporting.runs import Settings
from raysim.storage import local_copy

#: How many runs that are not in the tables are listed.
MOST_MISSING = 10


def show_report(places: Sequence[str], settings: Settings, folder: Path | None, out: Console) -> None:
    """Print tables and conclusions, and write the report.

    Args:
      places: folders, or URIs.
      settings: of the `report` group, from the command line; empty ones are not given.
      folder: by default `report` below the first place, for a URI `reports/NAME`; nothing is written if there is none.
    """
    paths = [local_copy(place) if is_uri(place) else located_path(Path(place)) for place in places]
    if folder is None and places and is_uri(places[0]):
        folder = Path("reports") / places[0].partition("?")[0].rstrip("/").rpartition("/")[2]
    folder = home_folder() / folder if folder else None
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
