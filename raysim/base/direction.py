"""Names of metrics: which values are better, and the main metric of a run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Literal

from raysim.base.errors import ConfigError, Fault

Direction = Literal["max", "min"]

#: Metric -> which values are better: raysim's metrics, and metrics of own code (None: own code declares nothing).
DIRECTIONS: dict[str, Direction | None] = {
    **dict.fromkeys(
        ("accuracy", "balanced_accuracy", "label_accuracy", "macro_f1", "auroc", "exact_match", "r2"), "max"
    ),
    **dict.fromkeys(("loss", "calibration_error", "rmse", "mae", "perplexity", "success", "epsilon"), "min"),
    **dict.fromkeys(("train_s", "aggregate_s", "evaluate_s", "round_s", "seconds_total", "seconds_per_round"), "min"),
    **dict.fromkeys(("up_mb", "down_mb", "sum_mb", "dropped", "redone_blocks"), "min"),
}

#: Metrics of raysim alone.
OF_RAYSIM = frozenset(DIRECTIONS)

#: Prefixes of a metric's name: a statistic over the rounds, and the scored rows.
_BEFORE = re.compile(r"(best_|mean_last_10pct_)?((validation|unseen|expected|personal)_)*")

#: For users.
BETTER = "which values of the metric are better; null: as the metric declares, see docs/metrics.md"


def declare(name: str, direction: object) -> None:
    """Set which values of a metric of own code are better; None: no direction, also if the name begins like a metric of
    raysim.

    Raises:
      ConfigError: neither "max" nor "min" nor None.
    """
    if direction not in ("max", "min", None):
        raise ConfigError([Fault(name, f"the direction must be 'max' or 'min', got {direction!r}")], "own code")
    if direction is not None or name not in OF_RAYSIM:
        DIRECTIONS[name] = direction


def direction_of(metric: str, given: Direction | None = None, *, key: str = "mode") -> Direction:
    """Return the given direction, or the direction that the metric declares.

    Args:
      key: the setting that gives a direction, for the message.
    Raises:
      ConfigError: the metric declares none.

    >>> direction_of("server/accuracy_domain_s"), direction_of("best:server/loss"), direction_of("server/loss", "max")
    ('max', 'min', 'max')
    """
    if given is not None:
        return given
    name = metric.rpartition(":")[2].rpartition("/")[2]
    bare = name[_BEFORE.match(name).end() :]  # type: ignore[union-attr]  # it matches an empty text
    declared = [each for each in DIRECTIONS if f"{bare}_".startswith(f"{each}_")]
    direction = DIRECTIONS[max(declared, key=len)] if declared else None
    if direction is None:
        mend = f"set {key} to max or min" if key.endswith("mode") else "use another metric"
        text = f"{bare!r} does not declare a better direction; {mend}, or set {bare}.direction in its code"
        raise ConfigError([Fault(key, text)], "the configuration")
    return direction


def best_round(scores: Mapping[int, float], metric: str) -> int | None:
    """The round with the best score, the first of several; NaN is never best. None without a number.

    >>> best_round({0: math.nan, 1: 0.5, 2: 0.5}, "accuracy")
    1
    """
    sign = 1 if direction_of(metric) == "max" else -1
    numbers = [number for number, score in scores.items() if not math.isnan(score)]
    return max(numbers, key=lambda number: (sign * scores[number], -number), default=None)


#: Numbers of a whole run, from its main metric: of the last round, of the best one, over the last rounds, and of the round with
#: the best validation score.
SUMMARY = ("{}", "best_{}", "mean_last_10pct_{}", "{}_at_best_validation")

_SUMMARY = re.compile(r"(best_|mean_last_10pct_)?(\w+?)(_at_best_validation)?")


def is_due(number: int, every: int, num_rounds: int) -> bool:
    """Return whether a run of `num_rounds` rounds evaluates in the round with this number, from 1.

    A run that was extended was also evaluated in its former last round. This evaluation is ignored, so that the run
    equals a run that had its final length from the start.

    Args:
      every: rounds between evaluations, 0 for the last one alone.

    >>> [number for number in (4, 7, 8, 10) if is_due(number, 4, 10)]
    [4, 8, 10]
    """
    return number == num_rounds or (every > 0 and number % every == 0)


def main_of(names: Iterable[str]) -> str:
    """Return the main metric of a run: the first metric of the test set.

    >>> main_of(["round", "server/validation_rmse", "server/unseen_rmse", "server/rmse", "server/loss"])
    'rmse'
    """
    others = ("server/validation_", "server/unseen_")
    tested = (name for name in names if name.startswith("server/") and not name.startswith(others))
    return next(tested, "server/accuracy").removeprefix("server/")


def column_of(metric: str) -> str:
    """Return the column of progress.csv that selects the round of a number in `SUMMARY`; other metrics are their own
    column.

    >>> column_of("best_rmse"), column_of("accuracy_at_best_validation"), column_of("train/loss")
    ('server/rmse', 'server/validation_accuracy', 'train/loss')
    """
    match = _SUMMARY.fullmatch(metric)
    return metric if match is None else f"server/{'validation_' * bool(match[3])}{match[2]}"
