"""Which values of a metric are better: larger or smaller ones."""

from __future__ import annotations

import re
from typing import Literal

Direction = Literal["max", "min"]

#: Metrics of which smaller values are better: losses, errors, perplexities, seconds, megabytes.
SMALLER = re.compile(r"loss|calibration_error|rmse|\bmae|perplexity|_(s|mb)$")

#: The same for users.
BETTER = "which values of the metric are better; if null, small ones of losses, calibration errors, times and sizes"


def direction_of(metric: str, given: Direction | None = None) -> Direction:
    """The given direction, or that of the metric by its name.

    >>> direction_of("server/accuracy"), direction_of("best:server/loss"), direction_of("server/loss", "max")
    ('max', 'min', 'max')
    """
    return given or ("min" if SMALLER.search(metric) else "max")
