"""`raysim report`: from run directories to a folder with report.md, table.csv, table.tex and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raysim.config import ReportGroup, nearest, parse_report, read_config
from raysim.core.errors import ConfigError, DataError, Fault
from raysim.report.contents import Extra, Report
from raysim.report.document import document
from raysim.report.drawing import captions, draw, figure_faults, kinds
from raysim.report.gains import GAINS, averages, mean_train_seconds, relative_times, with_gains
from raysim.report.metrics import Metric
from raysim.report.published import ACCURACIES, Label, Published, number, published
from raysim.report.recipes import changed
from raysim.report.render import latex, write_csv
from raysim.report.runs import Run, find_runs
from raysim.report.selection import selections
from raysim.report.significance import over_seeds, over_tables
from raysim.report.tables import Cell, Table, all_rows, bounds_of, cells_of, make_tables, published_cells, resolve_row
from raysim.report.targets import costs, percent

#: Settings of the group that are lists; several sweeps join theirs.
LISTS = ("columns", "ignore", "published", "figures")


def make_report(paths: Sequence[Path], given: Mapping[str, Any]) -> Report:
    """Read runs and published tables, average, rank and test. Upper bounds (joint training) are neither ranked nor tested.

    Args:
      paths: run directories or folders of runs; none to report published tables alone.
      given: settings of the `report` group from the command line; they go before the recipe's.
    Raises:
      ConfigError: settings that name what is not there. DataError: no finished run, or two runs of one cell and seed.
    """
    runs = find_runs(paths) if paths else []
    group = settings(runs, given)
    theirs = [cell for name in group.published for cell in published(name)]
    if not paths and not theirs:
        raise ConfigError([Fault("report", "give run directories, or --published NAME")], "the command line")
    finished = [run for run in runs if run.is_finished]
    if runs and not finished:
        listed = "; ".join(f"{run.folder.name} {run.status}" for run in runs[:5])
        raise DataError(
            f"none of {len(runs)} runs is finished ({listed})", mend="finish them: the same command resumes"
        )
    metrics = _metrics(group)
    beside = [cell for cell in theirs if metrics[0][1].is_accuracy or cell.metric not in (*ACCURACIES, *GAINS)]
    cells = cells_of(finished, metrics, beside) if runs else published_cells(theirs)
    if not cells:
        raise DataError("no accuracy", ", ".join(group.published), "name a table of accuracies")
    notes: list[str] = []
    columns = _columns(group.columns, cells, given, notes)
    ends = {"first": [group.baseline] if group.baseline else [], "last": [group.against] if group.against else []}
    tables = make_tables(
        cells,
        rows=group.rows,
        columns=columns,
        order=theirs,
        ignore=group.ignore,
        metric=metrics[0][1] if runs else None,
        **({} if theirs else ends),
    )
    if group.gain is not None:
        tables = _with_gains(tables, group.gain, beside, given, notes)
    subject = _row(group.against, "against", tables, given, notes)
    baseline = _row(group.baseline, "baseline", tables, given, notes)
    competing = [row for row in all_rows(tables) if row not in bounds_of(tables)]
    if subject is not None:
        pairs = [(subject, row) for row in competing if row != subject and subject in competing]
    else:
        pairs = [(row, baseline) for row in competing if row != baseline] if baseline in competing else []
    by_table = over_tables(tables, pairs) if len(tables) > 1 else []
    by_seed = {table.title: found for table in tables if (found := over_seeds(table, pairs))}
    extras: list[Extra] = averages(tables, group.rows) if len(tables) > 1 else []
    timed = _row(group.time, "time", tables, given, notes)
    if timed is not None:
        seconds = {run.folder: mean_train_seconds(run.folder) for run in finished}
        extras += relative_times(tables, group.rows, timed, seconds, beside)
    target = _target(group.target, tables, given, notes)
    if target is not None and runs:
        extras += costs(tables, group.rows, target)
    # Shares of layers have no labels of a set that published ones could be matched by.
    beside = [] if any(run.claimed for run in finished) else beside
    if "selection" in kinds(group.figures):
        extras += selections(tables, group.rows, beside)
    differences = changed(finished, theirs, group.published)
    return Report(group, runs, tables, beside, subject, baseline, by_table, by_seed, notes, extras, differences)


def _metrics(group: ReportGroup) -> list[tuple[dict[str, Label], Metric]]:
    """(label that it adds, metric) of each number of a run that makes a cell."""
    if not group.metrics:
        return [({}, Metric(group.metric, group.mode))]
    ((label, named),) = group.metrics.items()
    return [({label: value}, Metric(name, group.mode)) for value, name in named.items()]


def _columns(names: Sequence[str], cells: Sequence[Cell], given: Mapping[str, Any], notes: list[str]) -> list[str]:
    """The column labels. Those that no run has stay, as faults, only if the command line asked for them."""
    missing = [name for name in names if not any(name in cell.labels for cell in cells)]
    if not missing or "columns" in given:
        return list(names)
    notes.append(f"`report.columns`: no run has a label {', '.join(missing)}.")
    return [name for name in names if name not in missing]


def settings(runs: Sequence[Run], given: Mapping[str, Any]) -> ReportGroup:
    """The `report` group: the command line's settings, then those of the sweeps (or of the runs outside of sweeps).

    Raises:
      ConfigError: a fault in a group, or sweeps that contradict each other.
    """
    sources: dict[str, ReportGroup] = {}
    for run in runs:
        sweep = next((path for path in _sweep_files(run.folder) if path.is_file()), None)
        if sweep is None:
            where = run.folder / "config.yaml"
            sources[str(where)] = _parsed(run.config.get("report"), str(where))
        elif str(sweep) not in sources:
            sources[str(sweep)] = _parsed(read_config(sweep).get("report"), str(sweep))
    merged: dict[str, Any] = {}
    faults = []
    for place, group in sources.items():
        for key, value in group.model_dump(exclude_defaults=True).items():
            if key in LISTS:
                merged[key] = list(dict.fromkeys([*merged.get(key, []), *value]))
            elif merged.setdefault(key, value) != value and key not in given:
                told = f"is {value!r} in {place}, {merged[key]!r} in another; set it on the command line"
                faults.append(Fault(f"report.{key}", told))
    if faults:
        raise ConfigError(faults, "the recipes of these runs")
    return _parsed(merged | dict(given), "the command line")


def _parsed(raw: object, source: str) -> ReportGroup:
    """The `report` group, the names of its figures checked too."""
    group = parse_report(raw, source)
    if faults := figure_faults(group.figures or ()):
        raise ConfigError(faults, source)
    return group


def _sweep_files(folder: Path) -> list[Path]:
    return [folder.parent / "sweep.yaml", folder.parent.parent / "sweep.yaml"]


def _row(name: str | None, key: str, tables: Sequence[Table], given: Mapping[str, Any], notes: list[str]) -> str | None:
    """The row of that name. One that is missing is a fault if the command line asked for it, else a note."""
    row = resolve_row(name, tables) if name is not None else None
    if name is not None and row is None:
        message = f"no row {name!r}. {nearest(name, all_rows(tables))}"
        if key in given:
            raise ConfigError([Fault(f"report.{key}", message)], "the command line")
        notes.append(f"`report.{key}`: {message}")
    return row


def _target(
    target: float | str | None, tables: Sequence[Table], given: Mapping[str, Any], notes: list[str]
) -> float | str | None:
    """Accuracy in percent, or a row; like other rows a fault or a note if it is missing."""
    if target is None or number(target) is not None:
        return None if target is None else percent(target)
    return _row(str(target), "target", tables, given, notes)


def _with_gains(
    tables: list[Table], gain: str, theirs: Sequence[Published], given: Mapping[str, Any], notes: list[str]
) -> list[Table]:
    """Tables with average gains. Where there is not one pair: a fault if the command line asked for it, else a note."""
    try:
        return with_gains(tables, gain, theirs)
    except ConfigError as error:
        if "gain" in given:
            raise
        notes += [f"`{fault.key}`: {fault.message}" for fault in error.faults]
        return tables


def write(report: Report, folder: Path) -> Path:
    """Write report.md, table.csv, table.tex and figures/*.png; returns the path of report.md.

    Raises:
      DataError: the folder cannot be written.
    """
    notes = list(report.notes)
    figures = draw(report, on_missing=lambda kind, reason: notes.append(f"Figure `{kind}` is not drawn: {reason}."))
    try:
        (folder / "figures").mkdir(parents=True, exist_ok=True)
        for name, figure in figures.items():
            figure.savefig(folder / "figures" / f"{name}.png", dpi=130)
        write_csv(folder / "table.csv", report.tables, report.group.metric)
        (folder / "table.tex").write_text(latex(report.tables, report.group.rows, report.metric))
        (folder / "report.md").write_text(document(report, captions(figures), notes))
    except OSError as error:
        raise DataError(f"cannot write the report ({error})", str(folder), "give another folder with --out") from error
    return folder / "report.md"
