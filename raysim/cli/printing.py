"""Results of sweeps, calibrations and reports on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from raysim.base.commands import command, shown
from raysim.base.settings import Raw, differing
from raysim.cli.terminal import MOST_ROWS, LiveLine, err, first_of, out, print_table, say

if TYPE_CHECKING:
    from raysim.tuning.outcome import Outcome
    from raysim.tuning.plan import Sweep
    from raysim.tuning.planner import SweepTrial


def show_sweep(sweep: Sweep, outcomes: Mapping[str, Outcome]) -> int:
    """Print the outcomes of a sweep's trials, and return the exit status.

    The status is 1 if a trial is unfinished or no trial recorded the sweep's metric, else 0.
    """
    from raysim.tuning.outcome import best_trial, ranked

    if trials := ranked(sweep, outcomes):
        print_table(best_trials(sweep, trials, outcomes))
    for status in ("failed", "unfinished"):
        lines = [f"{name}: {outcome.message}" for name, outcome in outcomes.items() if outcome.status == status]
        for line in first_of(lines, "see results.csv"):
            err.print(f"{status}: {line}".rstrip(": "), markup=False)
    unranked = [name for name, outcome in outcomes.items() if outcome.is_finished and outcome.score is None]
    if unranked:
        listed = ", ".join(first_of(unranked, "see results.csv"))
        err.print(f"not ranked, since they recorded no {sweep.base.tune.metric}: {listed}", markup=False)
    out.print(f"sweep directory: {sweep.place}  (with results.csv)", markup=False)
    if (first := best_trial(sweep, outcomes)) is not None:
        out.print(f"best trial:      {shown(sweep.folder / first.name)}", markup=False)
        out.print(f"its settings:    {shown(sweep.folder / 'best.yaml')}, for `raysim run`", markup=False)
    out.print(f"TensorBoard:     {command('tensorboard', '--logdir', sweep.folder)}", markup=False)
    if not all(outcome.is_finished for outcome in outcomes.values()):
        err.print("the same command resumes unfinished trials")
        return 1
    if len(unranked) == len(outcomes):
        err.print("the same command with another tune.metric ranks them; nothing is trained again", markup=False)
        return 1
    return 0


def best_trials(sweep: Sweep, trials: Sequence[SweepTrial], outcomes: Mapping[str, Outcome]) -> Table:
    """Return a table of the best trials: varying labels, last and best score, headlines.

    Rounds are counted from 1.
    """
    metric = sweep.base.tune.metric
    mains = {outcomes[trial.name].main for trial in trials}
    main = mains.pop() if len(mains) == 1 else "score"
    last, best = f"last {main}", f"best {main}"
    ranking = {f"server/{main}": last, main: last, f"best_{main}": best}.get(metric, metric)
    order = ", lowest first" if sweep.base.tune.direction == "min" else ""
    count = f"best {MOST_ROWS} of {len(trials)}" if len(trials) > MOST_ROWS else str(len(trials))
    table = Table(title=f"{sweep.folder.name}: {count} trial{'s' * (len(trials) != 1)}, by {ranking}{order}")
    labels = [outcome.labels for outcome in outcomes.values()]
    names = differing(labels) or list(dict.fromkeys(name for each in labels for name in each))
    all_headlines = [outcomes[trial.name].headlines for trial in trials]
    headlines = differing([{name: _number(value, ".4g") for name, value in each.items()} for each in all_headlines])
    is_finished = all(outcomes[trial.name].status == "completed" for trial in trials[:MOST_ROWS])
    columns: dict[str, Callable[[Outcome], str]] = {
        **({metric: lambda end: _number(end.score), "its best round": _best_round} if ranking == metric else {}),
        last: lambda end: _number(end.last),
        best: lambda end: _number(end.best),
        **({"best round": _best_round} if ranking != metric else {}),
        **{name: partial(_headline, name) for name in headlines},
        "seconds of rounds": lambda end: f"{end.seconds:.1f}",
        **({} if is_finished else {"status": lambda end: end.status}),
    }
    for column in (*names, *columns):
        table.add_column(escape(column), justify="left" if column in names else "right")
    for trial in trials[:MOST_ROWS]:
        end = outcomes[trial.name]
        cells = [_short(end.labels.get(name, "")) for name in names] + [cell_of(end) for cell_of in columns.values()]
        table.add_row(*map(escape, cells))
    if len(trials) > MOST_ROWS:
        table.caption = f"{len(trials) - MOST_ROWS} more in results.csv"
    return table


def _headline(name: str, end: Outcome) -> str:
    return _number(end.headlines.get(name), ".4g")


def _short(label: object) -> str:
    return f"{label:.6g}" if isinstance(label, float) else str(label)


def _number(value: float | None, form: str = ".4f") -> str:
    return "" if value is None else f"{value:{form}}"


def _best_round(end: Outcome) -> str:
    return "" if end.best_round is None else str(end.best_round + 1)


def calibrate_and_print(raw: Raw, source: str, beside: Sequence[Path]) -> None:
    """Run `raysim calibrate`: check, run, fit, write, and print the table beside the paper's table.

    Args:
      raw: the configuration as read; source: its file; beside: folders of other calibrations, drawn as well.
    """
    from methods.livar.importance import TABLES
    from raysim.tuning.calibrate import FILE, plan_calibration, result_folder, run_calibration
    from raysim.tuning.calibrate_figures import PUBLISHED

    with LiveLine() as line:
        line.say(f"checking the runs of {source}")
        plan = plan_calibration(raw, source)
        result = run_calibration(plan, line.listener(), beside)
    title = f"raw coefficients ({PUBLISHED}), base {result['base']:.4f}, out-of-bag R2 {result['oob_r2']:.3f}"
    table = Table("", "I_B low", "I_B mid", "I_B high", title=title)
    for column in table.columns:
        column.justify = "right"
    for name, coefficients, published in zip(("low", "mid", "high"), result["table"], TABLES["paper"], strict=True):
        cells = (f"{fitted:.4f} ({paper:.3f})" for fitted, paper in zip(coefficients, published, strict=True))
        table.add_row(f"I_A {name}", *cells)
    out.print(table)
    file = result_folder(plan) / FILE
    say(f"table:       {file}")
    if (base := file.with_suffix(".yaml")).is_file():
        say(f"In a run's file:\nbase: {base}")
    say(f"TensorBoard: {command('tensorboard', '--logdir', file.parent)}")


def show_report(paths: Sequence[Path], settings: Raw, folder: Path | None) -> None:
    """Print tables and conclusions, and write the report.

    Args:
      settings: settings of the `report` group from the command line; empty values are ignored.
      folder: folder of the report, by default `default_folder`; without folder and paths nothing is written.
    """
    from raysim.reporting.document import conclusions
    from raysim.reporting.gather import make_report
    from raysim.reporting.render import effects, header_of, lines_of, terminal
    from raysim.reporting.report import default_folder, write

    with LiveLine() as line:
        line.step("reading the runs")
        given = {key: value for key, value in settings.items() if value}
        report = make_report(paths, given)
    for table in report.tables:
        out.print(f"{table.title}: {report.metric}{', in %' * table.metric.is_share}", markup=False)
        print_table(terminal(header_of(table, report.group.rows), lines_of(table)))
    tested = {"over tables": report.by_table, **report.by_seed}
    for title, tests in ((title, tests) for title, tests in tested.items() if tests):
        out.print(f"paired differences, {title}: mean, 95 % interval, d; bold: the interval excludes 0", markup=False)
        print_table(terminal(*effects(tests, report.tables[0].names, report.measure)))
    for other in report.others:
        out.print(other.title, markup=False)
        print_table(terminal(other.header, other.lines))
    missing = first_of(
        [f"{run.folder}: {run.status}" for run in report.runs if not run.is_finished], "listed in the report"
    )
    said = {"- ": conclusions(report), "note: ": report.notes, "not in the tables: ": missing}
    for sentence in (f"{kind}{text}" for kind, texts in said.items() for text in texts):
        out.print(sentence, markup=False)
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
