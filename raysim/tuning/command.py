"""What `raysim tune` shows of a sweep on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.markup import escape
from rich.table import Table

from raysim.base.commands import command, shown
from raysim.terminal import err, out, print_table
from raysim.tuning.outcome import Outcome, best_trial, ranked
from raysim.tuning.plan import Sweep
from raysim.tuning.planner import SweepTrial

#: Lines of the table, and of each list of trials without a result: results.csv has them all.
MOST_ROWS = 10


def show_sweep(sweep: Sweep, outcomes: Mapping[str, Outcome]) -> int:
    """Print what became of a sweep, and return the exit status: 0, or 1 where some trial has no result."""
    if trials := ranked(sweep, outcomes):
        print_table(best_trials(sweep, trials, outcomes))
    for status in ("failed", "unfinished"):
        names = [name for name, outcome in outcomes.items() if outcome.status == status]
        for name in names[:MOST_ROWS]:
            err.print(f"{status}: {name}: {outcomes[name].message}".rstrip(": "), markup=False)
        if len(names) > MOST_ROWS:
            err.print(f"{status}: {len(names) - MOST_ROWS} more, see results.csv")
    unranked = [name for name, outcome in outcomes.items() if outcome.is_finished and outcome.score is None]
    if unranked:
        more = f" and {len(unranked) - MOST_ROWS} more" if len(unranked) > MOST_ROWS else ""
        listed = ", ".join(unranked[:MOST_ROWS]) + more
        err.print(f"not ranked, since they recorded no {sweep.base.tune.metric}: {listed}", markup=False)
    out.print(f"sweep directory: {sweep.place}  (with results.csv)", markup=False)
    if (first := best_trial(sweep, outcomes)) is not None:
        out.print(f"best trial:      {shown(sweep.folder / first.name)}", markup=False)
        out.print(f"its settings:    {shown(sweep.folder / 'best.yaml')}, for `raysim run`", markup=False)
    out.print(f"TensorBoard:     {command('tensorboard', '--logdir', sweep.folder)}", markup=False)
    if not all(outcome.is_finished for outcome in outcomes.values()):
        err.print("the same command runs what is not finished")
        return 1
    if len(unranked) == len(outcomes):
        err.print("the same command with another tune.metric ranks them; nothing is trained again", markup=False)
        return 1
    return 0


#: Metrics that a column of the table has already, under its own name.
SHOWN = {"server/accuracy": "last accuracy", "accuracy": "last accuracy", "best_accuracy": "best accuracy"}


def best_trials(sweep: Sweep, trials: Sequence[SweepTrial], outcomes: Mapping[str, Outcome]) -> Table:
    """The first of these trials, best first, with the labels that tell them apart, and with both accuracies.

    Rounds are counted from 1.
    """
    metric = sweep.base.tune.metric
    ranking = SHOWN.get(metric, metric)
    order = ", lowest first" if sweep.base.tune.direction == "min" else ""
    count = f"best {MOST_ROWS} of {len(trials)}" if len(trials) > MOST_ROWS else str(len(trials))
    table = Table(title=f"{sweep.folder.name}: {count} trial{'s' * (len(trials) != 1)}, by {ranking}{order}")
    labels = [outcome.labels for outcome in outcomes.values()]
    known = list(dict.fromkeys(name for each in labels for name in each))
    names = [name for name in known if len({repr(each.get(name)) for each in labels}) > 1] or known
    is_finished = all(outcomes[trial.name].status == "completed" for trial in trials[:MOST_ROWS])
    columns: dict[str, Callable[[Outcome], str]] = {
        **({} if metric in SHOWN else {metric: lambda end: _number(end.score), "its best round": _best_round}),
        "last accuracy": lambda end: _number(end.last),
        "best accuracy": lambda end: _number(end.best),
        **({"best round": _best_round} if metric in SHOWN else {}),
        "seconds of rounds": lambda end: f"{end.seconds:.1f}",
        **({} if is_finished else {"status": lambda end: end.status}),
    }
    for column in (*names, *columns):
        table.add_column(escape(column), justify="left" if column in names else "right")
    for trial in trials[:MOST_ROWS]:
        end = outcomes[trial.name]
        cells = [_short(end.labels.get(name, "")) for name in names] + [told(end) for told in columns.values()]
        table.add_row(*map(escape, cells))
    if len(trials) > MOST_ROWS:
        table.caption = f"{len(trials) - MOST_ROWS} more in results.csv"
    return table


def _short(label: object) -> str:
    return f"{label:.6g}" if isinstance(label, float) else str(label)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _best_round(end: Outcome) -> str:
    return "" if end.best_round is None else str(end.best_round + 1)
