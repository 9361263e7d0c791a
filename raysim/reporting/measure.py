"""Metric of a report: words, unit, and direction."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from raysim.base.direction import Direction, column_of, is_due
from raysim.base.errors import DataError
from raysim.base.settings import Raw as Settings
from raysim.config import nearest
from raysim.folders.run_folder import RunFolder
from raysim.reporting.published import WORDS
from raysim.reporting.runs import ReportedRun

#: Metric of the tables if neither the report nor a sweep names a metric.
DEFAULT = "accuracy"

#: Accuracy -> second accuracy in a report: a sweep may rank by last accuracy and a paper print best, or the reverse.
BESIDE = {"accuracy": "best_accuracy", "best_accuracy": "accuracy"}

#: Prefix of a column of progress.csv, as in `best:server/macro_f1` -> description. Without a prefix, "last" applies.
WAYS = {
    "best": "best value of {}",
    "mean_last_10pct": "mean of {} over the last 10 % of the rounds",
    "mean": "mean of {} over the rounds with a value",
    "last": "last value of {}",
}

#: Pattern for names of shares, which are printed in percent.
SHARE = re.compile(r"accuracy|_f1|^f1|auroc|auc$|calibration_error|(^|_)ece$|precision|recall")


@dataclass(frozen=True)
class ReportMetric:
    """A metric: a key of summary.json, or a column of progress.csv, optionally with a prefix of `WAYS`.

    Attributes:
      mode: whether larger ("max") or smaller ("min") values are better.
    """

    name: str
    mode: Direction = "max"

    @property
    def way(self) -> str:
        """Key of `WAYS`: how the values of all rounds are reduced to a number."""
        way = self.name.partition(":")[0]
        return way if way in WAYS else "last"

    @property
    def bare(self) -> str:
        """Name without the prefix."""
        return self.name.removeprefix(f"{self.way}:")

    @property
    def column(self) -> str:
        """Column of progress.csv with the metric by round; for a key of summary.json, the main metric's column."""
        return self.bare if "/" in self.bare else column_of(self.bare).replace("validation_", "")

    @property
    def words(self) -> str:
        if "/" in self.bare:
            return WAYS[self.way].format(self.bare)
        main = self.column.removeprefix("server/")
        phrase = WORDS.get(self.name if self.name == main else self.name.replace(main, "accuracy"))
        return phrase.replace("accuracy", main) if phrase else self.name

    @property
    def is_accuracy(self) -> bool:
        """Whether the metric is accuracy on a whole test set, and so comparable with published accuracies."""
        return self.name in WORDS or bool(re.fullmatch(r"server/accuracy(_(?!domain_)\w+)?", self.bare))

    @property
    def is_share(self) -> bool:
        """Whether the number is printed in percent."""
        name = self.bare.rpartition("/")[2]
        return "_by_" not in name and bool(SHARE.search(name))  # accuracy_by_gradient is a correlation

    @property
    def better(self) -> str:
        """Which values are better, in words; "" if obvious, as for accuracies."""
        if self.mode == "min":
            return "lower is better"
        return "" if self.is_share else "higher is better"

    @property
    def first(self) -> str:
        """Word for the leading mean, "highest" or "lowest"; only tests may call a mean the best."""
        return "highest" if self.mode == "max" else "lowest"

    @property
    def quantity(self) -> str:
        if self.is_accuracy:
            return "accuracy"
        return self.bare if "/" in self.bare else self.column.removeprefix("server/")

    @property
    def title(self) -> str:
        """The metric in words, with its unit."""
        return f"{self.words}, in %" if self.is_share else self.words

    @property
    def axis(self) -> str:
        """Axis label of figures: the quantity, with its unit."""
        return f"{self.quantity} (%)" if self.is_share else self.quantity

    @property
    def digits(self) -> int:
        return 2 if self.is_share else 4

    @property
    def scale(self) -> float:
        return 100.0 if self.is_share else 1.0

    def score(self, run: ReportedRun) -> float | None:
        """Return the run's number, shares in percent; None if not recorded, non-finite for a diverged run."""
        value = run.summary.get(self.name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return self.scale * value
        rounds = recorded(run.folder, self.column, every_of(run.config)) if "/" in self.bare else {}
        if not rounds:
            return None
        number = list(rounds.values())[-1]
        if self.way == "best":
            finite = [value for value in rounds.values() if math.isfinite(value)]
            number = (max if self.mode == "max" else min)(finite, default=math.nan)
        elif self.way == "mean":
            number = float(np.mean(list(rounds.values())))
        elif self.way == "mean_last_10pct":
            # The same rounds as in summary.json; if none has a value, the last recorded value.
            count = int(run.summary.get("rounds") or run.config.get("rounds") or max(rounds) + 1)
            late = [value for index, value in rounds.items() if index >= count - max(1, math.ceil(count / 10))]
            number = float(np.mean(late or number))
        return self.scale * number


def every_of(config: Settings) -> int:
    """Return the number of rounds between evaluations of a run."""
    return int((config.get("evaluation") or {}).get("every", 1))


def recorded(folder: Path, column: str, every: int = 1) -> dict[int, float]:
    """Return round -> value, for rounds with a value.

    Args:
      every: rounds between evaluations; values of `server/` columns in other rounds are ignored, see `is_due`.
    """
    rows = list(RunFolder(folder).progress_rows())
    values = {int(row["round"]): float(row[column]) for row in rows if row.get(column)}
    if not column.startswith("server/"):
        return values
    return {index: value for index, value in values.items() if is_due(index + 1, every, int(rows[-1]["round"]) + 1)}


def logged(folder: Path, name: str) -> dict[int, np.ndarray]:
    """Return round -> array, for each round that logged the array."""
    return {index: arrays[name] for index, arrays in RunFolder(folder).logged_arrays() if name in arrays}


def score(run: ReportedRun, metric: ReportMetric) -> float:
    """Return the run's number.

    Raises:
      DataError: the run did not record the metric; the message names recorded metrics.
    """
    number = metric.score(run)
    if number is None:
        names = [key for key, value in run.summary.items() if isinstance(value, int | float)]
        names += [key for key in next(iter(RunFolder(run.folder).progress_rows()), {}) if "/" in key]
        raise DataError(f"run has no {metric.name}", str(run.folder), nearest(metric.bare, names))
    return number
