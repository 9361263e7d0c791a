"""Names of metrics: which values are better, and what a run is judged by."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

Direction = Literal["max", "min"]

#: Metrics of which smaller values are better: losses, errors, perplexities, seconds, megabytes.
SMALLER = re.compile(r"loss|calibration_error|(?<![a-z])ece$|rmse|(?<![a-z])mae|perplexity|(?<![a-z])seconds|_(s|mb)$")

#: The same for users.
BETTER = "which values of the metric are better; if null, small ones of losses, calibration errors, times and sizes"


def direction_of(metric: str, given: Direction | None = None) -> Direction:
    """The given direction, or that of the metric by its name.

    >>> direction_of("server/accuracy"), direction_of("best:server/loss"), direction_of("server/loss", "max")
    ('max', 'min', 'max')
    """
    return given or ("min" if SMALLER.search(metric) else "max")


#: Numbers of a whole run, from its main metric: of the last round, of the best one, over the last rounds, and of the round with
#: the best validation score.
SUMMARY = ("{}", "best_{}", "mean_last_10pct_{}", "{}_at_best_validation")

_SUMMARY = re.compile(r"(best_|mean_last_10pct_)?(\w+?)(_at_best_validation)?")


def is_due(number: int, every: int, num_rounds: int) -> bool:
    """Whether an evaluation in the round with this number, from 1, counts.

    A run that was made longer was also evaluated in what was its last round: that counts for nothing, or the run would not
    be one of that length.

    Args:
      every: rounds between evaluations, 0 for the last one alone.

    >>> [number for number in (4, 7, 8, 10) if is_due(number, 4, 10)]
    [4, 8, 10]
    """
    return number == num_rounds or (every > 0 and number % every == 0)


def main_of(names: Iterable[str]) -> str:
    """The main metric of a run: the first one that its test set is scored by.

    >>> main_of(["round", "server/validation_rmse", "server/unseen_rmse", "server/rmse", "server/loss"])
    'rmse'
    """
    others = ("server/validation_", "server/unseen_")
    tested = (name for name in names if name.startswith("server/") and not name.startswith(others))
    return next(tested, "server/accuracy").removeprefix("server/")


def column_of(metric: str) -> str:
    """The column of progress.csv that chooses the round of a number in `SUMMARY`; other metrics are their own column.

    >>> column_of("best_rmse"), column_of("accuracy_at_best_validation"), column_of("train/loss")
    ('server/rmse', 'server/validation_accuracy', 'train/loss')
    """
    match = _SUMMARY.fullmatch(metric)
    return metric if match is None else f"server/{'validation_' * bool(match[3])}{match[2]}"
