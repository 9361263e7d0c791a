"""What a search chooses from, and what it knows of what it chose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

#: Draws one value of a domain: (generator) -> value.
Draw = Callable[[np.random.Generator], object]


@dataclass(frozen=True)
class Range:
    """What a search may choose from on one axis.

    Attributes:
      at: the value below which that share, in [0, 1), of all draws lies.
      ends: the least and the greatest value, or every choice.
      domain: Ray Tune's own.
    """

    draw: Draw
    at: Callable[[float], object]
    ends: tuple[object, ...]
    domain: Any


#: (Tune's name of a domain, its arguments) -> that range; raises ValueError.
Draws = Callable[[str, object], Range]


@dataclass(frozen=True)
class Tried:
    """What a search knows of a trial. score: None while it runs, NaN where it failed."""

    values: Mapping[str, object]
    score: float | None
