"""What `raysim tune` shows of a sweep on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.markup import escape
from rich.table import Table

from raysim.core.commands import command, shown
from raysim.terminal import err, out, print_table
from raysim.tuning.outcome import Outcome, ranked
from raysim.tuning.plan import Sweep
from raysim.tuning.planner import SweepTrial

#: Lines of the table, and of each list of trials without a result: results.csv has them all.
MOST_ROWS = 10


def show_sweep(sweep: Sweep, outcomes: Mapping[str, Outcome]) -> int:
    """Print what became of a sweep, and return the exit status: 0, or 1 where some trial has no result."""
    print_table(best_trials(sweep, ranked(sweep, outcomes), outcomes))
    for status in ("failed", "unfinished"):
        names = [name for name, outcome in outcomes.items() if outcome.status == status]
        for name in names[:MOST_ROWS]:
            err.print(f"{status}: {name}: {outcomes[name].message}".rstrip(": "), markup=False)
        if len(names) > MOST_ROWS:
            err.print(f"{status}: {len(names) - MOST_ROWS} more, see results.csv")
    out.print(f"sweep directory: {sweep.place}  (with results.csv)", markup=False)
    if (best := sweep.folder / "best.yaml").is_file():
        (first, *_) = [trial for trial in ranked(sweep, outcomes) if outcomes[trial.name].status == "completed"]
        out.print(f"best trial:      {shown(sweep.folder / first.name)}", markup=False)
        out.print(f"its settings:    {shown(best)}, for `raysim run`", markup=False)
    out.print(f"TensorBoard:     {command('tensorboard', '--logdir', sweep.folder)}", markup=False)
    if all(outcome.is_finished for outcome in outcomes.values()):
        return 0
    err.print("the same command runs what is not finished")
    return 1


#: Metrics that a column of the table has already, under its own name.
SHOWN = {"server/accuracy": "last accuracy", "accuracy": "last accuracy", "best_accuracy": "best accuracy"}


def best_trials(sweep: Sweep, trials: Sequence[SweepTrial], outcomes: Mapping[str, Outcome]) -> Table:
    """The first of these trials, best first, with the labels that tell them apart, and with both accuracies.

    Rounds are counted from 1.
    """
    metric = sweep.base.tune.metric
    ranking = SHOWN.get(metric, metric)
    count = f"best {MOST_ROWS} of {len(trials)}" if len(trials) > MOST_ROWS else str(len(trials))
    table = Table(title=f"{sweep.folder.name}: {count} trial{'s' * (len(trials) != 1)}, by {ranking}")
    labels = [outcome.labels for outcome in outcomes.values()]
    known = list(dict.fromkeys(name for each in labels for name in each))
    names = [name for name in known if len({repr(each.get(name)) for each in labels}) > 1] or known
    others = [] if metric in SHOWN else [metric]
    statuses = {trial.name: outcomes[trial.name].status for trial in trials[:MOST_ROWS]}
    ends = [] if set(statuses.values()) == {"completed"} else ["status"]
    for column in (*names, *others, "last accuracy", "best accuracy", "best round", "seconds of rounds", *ends):
        table.add_column(escape(column), justify="left" if column in names else "right")
    for trial in trials[:MOST_ROWS]:
        outcome = outcomes[trial.name]
        scores = ([outcome.score] if others else []) + [outcome.last, outcome.best]
        rounds = "" if outcome.best_round is None else str(outcome.best_round + 1)
        numbers = [*("" if each is None else f"{each:.4f}" for each in scores), rounds, f"{outcome.seconds:.1f}"]
        status = [outcome.status] if ends else []
        table.add_row(*(escape(_short(outcome.labels.get(name, ""))) for name in names), *numbers, *status)
    if len(trials) > MOST_ROWS:
        table.caption = f"{len(trials) - MOST_ROWS} more in results.csv"
    return table


def _short(label: object) -> str:
    return f"{label:.6g}" if isinstance(label, float) else str(label)
