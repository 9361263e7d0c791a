"""`raysim status`: runs and sweeps of a storage, from their files."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import yaml
from rich.markup import escape
from rich.table import Table

from raysim.base.direction import main_of
from raysim.base.errors import DataError, RaysimError, explained
from raysim.base.uri import is_uri
from raysim.cli.terminal import duration, print_table
from raysim.config import located_path
from raysim.folders.filesystems import FAILURES, Stamp, reached_folder, stamps
from raysim.folders.run_folder import MARKS, RunFolder

#: Small files that show a run's progress, or that a folder belongs to a sweep.
TELLING = {"config.yaml", "progress.csv", "sweep.yaml", "records.sha256", *MARKS}


class RunProgress(NamedTuple):
    """Progress of a run.

    rounds: number of all rounds; score: last main metric, as text; changed_s: time of the last change, since 1970.
    """

    name: str
    state: str
    num_done: int
    rounds: int
    score: str
    changed_s: int


def show_places(places: Sequence[str]) -> None:
    """Print a table for each place.

    Args:
      places: folders and URIs.
    Raises:
      DataError: a place has no runs, or cannot be read.
    """
    for place in places:
        with _telling_files(place) as (folder, changed):
            print_table(_runs_table(place, folder, changed))


@contextmanager
def _telling_files(place: str) -> Iterator[tuple[Path, Mapping[str, Stamp]]]:
    """Yield (folder with the files in `TELLING`, stamps of all files at the place)."""
    if not is_uri(place):
        folder = located_path(Path(place))
        if not folder.is_dir():
            raise DataError("no such folder", str(folder), "give a storage, a run directory or a sweep")
        yield folder, stamps(folder)
        return
    source = reached_folder(place)
    mend = "check the server, the credentials and the network"
    with tempfile.TemporaryDirectory() as copy:
        with explained("cannot read", place, mend, *FAILURES):
            changed = source.files()
            source.fetch(Path(copy), [name for name in changed if name.rpartition("/")[2] in TELLING])
        yield Path(copy), changed


def _runs_table(place: str, folder: Path, changed: Mapping[str, Stamp]) -> Table:
    """Return a table with a row per run, and a single row per sweep unless the place is the sweep itself."""
    newest_s: Counter[str] = Counter()  # time of the last change in each folder
    for name, (_, at_ns) in changed.items():
        for parent in PurePosixPath(name).parents:
            newest_s[str(parent)] = max(newest_s[str(parent)], at_ns // 10**9)
    runs = [_progress(place, files, folder, newest_s) for files in RunFolder.below(folder)]
    if not runs:
        raise DataError("no run", place, "give a place where `raysim run` or `raysim tune` wrote runs")
    sweeps = {path.parent.relative_to(folder).as_posix() for path in folder.rglob("sweep.yaml")} - {"."}
    rows: dict[str, list[RunProgress]] = {}
    for run in runs:
        sweep = next((name for name in sweeps if run.name.startswith(f"{name}/")), run.name)
        rows.setdefault(sweep, []).append(run)
    table = Table("run or sweep", "state", "rounds", "last score", "last write", title=escape(place))
    for name, some in rows.items():
        state, score = some[0].state, some[0].score
        if name in sweeps:
            states = Counter(each.state for each in some)
            state, score = ", ".join(f"{count} {each}" for each, count in sorted(states.items())), ""
        rounds = f"{sum(each.num_done for each in some)} of {sum(each.rounds for each in some)}"
        age_s = max(0.0, time.time() - max(each.changed_s for each in some))
        table.add_row(*map(escape, (name, state, rounds, score, f"{duration(age_s)} ago")))
    return table


def _progress(place: str, files: RunFolder, folder: Path, newest_s: Mapping[str, int]) -> RunProgress:
    name = files.path.relative_to(folder).as_posix()
    name, at_s = name if name != "." else place.rstrip("/").rpartition("/")[2], newest_s[name]
    try:
        rows, rounds = files.progress_rows(), int(files.read_config()["rounds"]) if files.config.is_file() else 0
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError, RaysimError):
        return RunProgress(name, "damaged", 0, 0, "", at_s)
    column = f"server/{main_of(rows[0] if rows else ())}"
    scores = [f"{column.removeprefix('server/')} {float(row[column]):.4f}" for row in rows if row.get(column)]
    rounds = max(rounds, len(rows))  # a method may add a round after the last one
    return RunProgress(name, files.status.name, len(rows), rounds, scores[-1] if scores else "", at_s)
