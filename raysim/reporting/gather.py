"""`raysim report`, first half: from run directories to the contents of a report."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from raysim.base.direction import Direction, direction_of
from raysim.base.errors import ConfigError, DataError, Fault, refuse
from raysim.config import Config, ReportGroup, TuneGroup, is_recipe_name, parse_report, read_config
from raysim.config.effects import left_unused
from raysim.reporting.contents import (
    ReportContents,
    averages,
    costs,
    other_accuracy,
    relative_times,
    selections,
    target_of,
)
from raysim.reporting.drawing import figure_faults, kinds
from raysim.reporting.measure import DEFAULT, ReportMetric
from raysim.reporting.published import ACCURACIES, Label, Published, published, statistics
from raysim.reporting.runs import ReportedRun, Settings, changed_settings, find_runs, other_rows, tables_of
from raysim.reporting.significance import GAINS, over_seeds, over_tables, pairs_of, with_gains
from raysim.reporting.tables import ACCURACY, Cell, cells_of, make_tables, other_methods, published_cells, row_of, text

T = TypeVar("T")

#: List-valued settings of the group; lists of several sweeps are joined.
LISTS = ("columns", "ignore", "published", "figures")


def make_report(paths: Sequence[Path], given: Settings, *, source: str = "the command line") -> ReportContents:
    """Return the contents of a report from run directories and published tables: averages, ranks and tests.

    Upper bounds (joint training) are neither ranked nor tested. A row or column that the runs lack is a fault if the
    command line (`source`) names it. If a recipe names it, a note is added: the row's runs may be unfinished, and the
    rest of the report can be made.

    Args:
      paths: run directories or folders of runs; without paths, the report has only the numbers of published tables.
      given: settings of the `report` group that override the recipe's; source: origin of the settings, for messages.
    Raises:
      ConfigError: a setting names an unknown row, label or table. DataError: no finished run, or two runs of one cell
        and seed.
    """
    runs = find_runs(paths)
    group, notes = _without_code(settings(runs, given, source), given)
    theirs = [cell for name in group.published for cell in published(name)]
    metrics = _metrics(group, runs) if runs else [({}, ACCURACY)]
    beside = _beside(theirs, group, metrics[0][1])
    finished = _recorded(_finished(runs), group, metrics, notes)
    notes += [*other_rows(finished, group.rows), *other_methods(finished)]
    cells = cells_of(finished, metrics, beside) if runs else _cells_of_papers(theirs, group, source)
    arranged = _with_known_columns(group, cells, given, notes)
    tables = make_tables(cells, arranged, order=theirs, metric=metrics[0][1])

    def attempt(key: str, make: Callable[[], T], otherwise: T) -> T:
        try:
            return make()
        except LookupError as error:
            if key in given:
                raise ConfigError([Fault(f"report.{key}", str(error))], source) from error
            notes.append(f"`report.{key}`: {error}")
            return otherwise

    tables = attempt("gain", lambda: with_gains(tables, group.gain, beside), tables)
    subject = attempt("against", lambda: row_of(group.against, tables), None)
    baseline = attempt("baseline", lambda: row_of(group.baseline, tables), None)
    timed = attempt("time", lambda: row_of(group.time, tables), None)
    target = attempt("target", lambda: target_of(group.target, tables), None)
    extras = [*averages(tables, group.rows)] if len(tables) > 1 else []
    if runs and timed is not None:
        times = [*relative_times(tables, group.rows, timed, beside)]
        if not times:
            notes.append(f"`report.time`: no run other than {timed} has the seconds of two rounds or more.")
        extras += times
    if runs and target is not None:
        extras += costs(tables, group.rows, target)
    if any(run.claimed for run in finished):
        beside = []  # published shares of layers are matched without the data set, which differs for a claimed one
    if "selection" in kinds(group.figures):
        extras += selections(tables, group.rows, beside)
    pairs = pairs_of(tables, subject, baseline)
    return ReportContents(
        group=group,
        runs=runs,
        tables=tables,
        theirs=beside,
        subject=subject,
        baseline=baseline,
        by_table=over_tables(tables, pairs) if len(tables) > 1 else [],
        by_seed={table.title: tests for table in tables if (tests := over_seeds(table, pairs))},
        notes=notes,
        others=[*other_accuracy(tables, group.rows, finished)] if runs and not group.metrics else [],
        extras=extras,
        changed=changed_settings(finished, theirs, group.published) if runs else [],
        printed=statistics(theirs),
    )


def _without_code(group: ReportGroup, given: Settings) -> tuple[ReportGroup, list[str]]:
    """Return the group without figures of user code named only in files of runs, and a note about each figure."""
    code = [name for name in group.figures or () if ":" in name] if "figures" not in given else []
    notes = [f"Figure `{name}` is code that the runs name: give the name to the report to draw it." for name in code]
    figures = group.figures and [name for name in group.figures if name not in code]
    return group.model_copy(update={"figures": figures}), notes


def _beside(theirs: Sequence[Published], group: ReportGroup, measure: ReportMetric) -> list[Published]:
    """Return the published cells to show beside the runs; published accuracies only if the metric is an accuracy.

    Accuracy on a further test set is compared with published accuracies only if `report.metrics` gives it a label.
    """
    is_theirs = measure.is_accuracy and (bool(group.metrics) or measure.column == "server/accuracy")
    return [cell for cell in theirs if is_theirs or cell.metric not in (*ACCURACIES, *GAINS)]


def _cells_of_papers(theirs: Sequence[Published], group: ReportGroup, source: str) -> list[Cell]:
    """Return the accuracies of published tables. Raises ConfigError: no table is named. DataError: no accuracy."""
    if not theirs:
        raise ConfigError([Fault("report", "give run directories, or --published NAME")], source)
    cells = published_cells(theirs)
    if not cells:
        raise DataError("no accuracy", ", ".join(group.published), "name a published table with accuracies")
    return cells


def _with_known_columns(group: ReportGroup, cells: Sequence[Cell], given: Settings, notes: list[str]) -> ReportGroup:
    """Return the group without a recipe's column labels that no cell has; add a note about the dropped labels."""
    labels = {key for cell in cells for key in cell.labels}
    lacking = [] if "columns" in given else [name for name in group.columns if name not in labels]
    if lacking:
        notes.append(f"`report.columns`: no run has a label {', '.join(lacking)}.")
    return group.model_copy(update={"columns": [name for name in group.columns if name not in lacking]})


def _finished(runs: Sequence[ReportedRun]) -> list[ReportedRun]:
    """Return the finished runs. Raises DataError: no run is finished."""
    finished = [run for run in runs if run.is_finished]
    if runs and not finished:
        listed = "; ".join(f"{run.folder.name} {run.status}" for run in runs[:5])
        mend = "finish the runs: the same command resumes; delete damaged runs"
        raise DataError(f"none of {len(runs)} runs is finished ({listed})", mend=mend)
    return finished


def _recorded(
    runs: list[ReportedRun], group: ReportGroup, metrics: Sequence[tuple[object, ReportMetric]], notes: list[str]
) -> list[ReportedRun]:
    """Return the runs that recorded a metric and only finite values; add notes about the other runs.

    If no run recorded a metric, all runs are kept: `score` reports the metric later.

    Raises:
      DataError: no run is left.
    """
    scores = {run.folder: [metric.score(run) for _, metric in metrics] for run in runs}
    recorded = {run.folder: [each for each in scores[run.folder] if each is not None] for run in runs}
    lacking = [run for run in runs if not recorded[run.folder]]
    diverged = [run for run in runs if not all(map(math.isfinite, recorded[run.folder]))]
    lacking = lacking if len(lacking) < len(runs) else []  # `score` raises later, and names similar metrics
    for place, (_, metric) in enumerate(metrics if len(metrics) > 1 else ()):
        without = sum(scores[run.folder][place] is None for run in runs if run not in lacking)
        if without:
            notes.append(f"`report.metrics`: {without} of {len(runs)} runs did not record {metric.name}.")
    for some, why in ((lacking, "did not record it"), (diverged, "ended with a non-finite number")):
        rows = dict.fromkeys(text(run.labels.get(group.rows)) for run in some)
        if rows:
            notes.append(f"`report.metric`: {len(some)} of {len(runs)} runs {why} and are left out: {', '.join(rows)}.")
    left = [run for run in runs if run not in lacking and run not in diverged]
    if runs and not left:
        names = ", ".join(metric.name for _, metric in metrics)
        raise DataError(f"no run has a finite {names}", str(runs[0].folder.parent), "report another metric")
    return left


def _metrics(group: ReportGroup, runs: Sequence[ReportedRun]) -> list[tuple[dict[str, Label], ReportMetric]]:
    """Return (additional labels, metric) for each cell that a run makes."""
    named: list[tuple[dict[str, Label], str]] = [({}, group.metric or DEFAULT)]
    for label, metrics in group.metrics.items():  # at most one label
        named = [({label: value}, name) for value, name in metrics.items()]
    cells = [(more, ReportMetric(name, _direction(name, group.mode, runs))) for more, name in named]
    if len({(metric.mode, metric.is_share) for _, metric in cells}) > 1:
        listed = ", ".join(f"{each.name} ({each.better or 'higher is better, in %'})" for _, each in cells)
        text = f"mixes numbers with opposite directions: {listed}; make separate reports, or set report.mode"
        raise ConfigError([Fault("report.metrics", text)], "the report")
    return cells


def _direction(name: str, mode: Direction | None, runs: Sequence[ReportedRun]) -> Direction:
    """Return which values of a metric are better; "max" for a metric that no run has, which is reported later."""
    try:
        return direction_of(name, mode, key="report.mode")
    except ConfigError:
        if any(ReportMetric(name, "max").score(run) is not None for run in runs):
            raise
        return "max"


def settings(runs: Sequence[ReportedRun], given: Settings, source: str) -> ReportGroup:
    """Return the `report` group: given settings override the settings of sweeps and of runs outside sweeps.

    Without runs, the settings of the recipes in `published` apply, so that rows are compared as in the recipe.

    Raises:
      ConfigError: a fault in a group, or sweeps that contradict each other.
    """
    merged: dict[str, Any] = {}
    faults = []
    for place, group in _sources(runs, given).items():
        for key, value in group.items():
            if key in LISTS:
                merged[key] = list(dict.fromkeys([*merged.get(key, []), *value]))
            elif merged.setdefault(key, value) != value and key not in given:
                message = f"is {value!r} in {place}, {merged[key]!r} in another; set it in {source}"
                faults.append(Fault(f"report.{key}", message))
    refuse(faults, "the recipes of the runs")
    if "baseline" in given and "against" not in given:
        merged.pop("against", None)  # tests every row against the baseline, not the recipe's row against all rows
    if "metric" in given and "metrics" not in given:
        merged.pop("metrics", None)
    if "metric" in given and given["metric"] != merged.get("metric"):
        merged.pop("mode", None)  # the mode belongs to the recipe's metric
    for key in left_unused({"report": {**merged, **given}}, Config, ({"report": given}, {"report": merged})):
        merged.pop(key.removeprefix("report."), None)
    chosen = _parsed({**merged, **given}, source, is_given="figures" in given)
    mains = dict.fromkeys(str(run.summary["main_metric"]) for run in runs if "main_metric" in run.summary)
    if chosen.metric is None and not chosen.metrics and len(mains) == 1 and DEFAULT not in mains:
        return chosen.model_copy(update={"metric": next(iter(mains))})
    return chosen


def _sources(runs: Sequence[ReportedRun], given: Settings) -> dict[str, Settings]:
    """Return source -> settings of the report. Raises ConfigError."""
    sources: dict[str, Settings] = {}
    for run in runs:
        files = [folder / "sweep.yaml" for folder in list(run.folder.parents)[:2]]
        sweep = next((file for file in files if file.is_file()), None)
        if sweep is None:  # a run's config.yaml has every key, including defaults
            place = str(run.folder / "config.yaml")
            sources[place] = _group_of(run.config, place, given, has_defaults=True)
        elif str(sweep) not in sources:
            sources[str(sweep)] = _group_of(read_config(sweep), str(sweep), given)
    for name in given.get("published") or () if not runs else ():
        if is_recipe_name(name):
            sources[name] = _group_of(read_config(Path(name)), name, given)
    return sources


def _group_of(raw: Settings, place: str, given: Settings, *, has_defaults: bool = False) -> Settings:
    """Return the `report` group of a configuration; without a metric in the group, `tune.metric` applies.

    `has_defaults`: whether the configuration holds every key, so that a default counts as unset."""
    parsed = _parsed(raw.get("report"), place)
    group = parsed.model_dump(exclude_none=True, exclude_unset=not has_defaults, exclude_defaults=has_defaults)
    tune, default = raw.get("tune") or {}, TuneGroup().metric
    if {"metric", "metrics"}.isdisjoint({*group, *given}) and tune.get("metric", default) != default:
        group = {**group, "metric": tune["metric"]}
    return {key: value for key, value in group.items() if value is not None}


def _parsed(raw: object, source: str, *, is_given: bool = False) -> ReportGroup:
    """Return the `report` group with figure names checked; a recipe in `published` is replaced by its tables.

    Args:
      is_given: whether the caller gave the figures; user code named only in files of runs is not imported.
    """
    group = parse_report(raw, source)
    names = [table for name in group.published for table in (tables_of(name) if is_recipe_name(name) else [name])]
    group = group.model_copy(update={"published": list(dict.fromkeys(names))})
    refuse(figure_faults(group.figures or (), imports=is_given), source)
    return group
