"""The pictures of a run: drawn between rounds, in their order, for no more than a share of the run's time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Share of a run's time that pictures may take, those at its end apart.
SHARE = 0.03

#: Seconds that the first one is thought to take: it imports matplotlib.
FIRST_S = 1.0


@dataclass(frozen=True)
class Picture:
    """A picture to be drawn.

    Attributes:
      tag: its name in TensorBoard; file: where it lies beside the events as well, if anywhere: it is then never left out.
    """

    tag: str
    round_index: int
    draw: Callable[[], Figure]
    file: Path | None = None


class Album:
    """Keeps an account of the seconds spent on pictures; those that are due wait until the run has earned them.

    They are drawn oldest first: TensorBoard drops what it has of a tag when an earlier round of it arrives. In the run's own
    thread: what little they cost is not worth drawing while the next round or the user's own code runs.

    Args:
      show: show(picture, what was drawn) puts it where users see it.
      clock: seconds.
    """

    def __init__(self, show: Callable[[Picture, Figure], None], *, clock: Callable[[], float] = time.perf_counter):
        self._show, self._clock = show, clock
        self._began, self._spent = clock(), 0.0
        self._cost: dict[str, float] = {}  # tag -> seconds, the last time
        self._due: deque[Picture] = deque()

    def add(self, pictures: Iterable[Picture]) -> None:
        """Pictures that are due from now on."""
        self._due.extend(pictures)

    def draw_affordable(self) -> None:
        """Draw those that are due as far as the account allows."""
        while self._due and self._spent + self._expected(self._due[0]) <= SHARE * (self._clock() - self._began):
            self._draw(self._due.popleft())

    def draw_all(self, first_round: int) -> None:
        """Draw those of the rounds from `first_round` on, and those with a file, whatever they cost; forget the others."""
        while self._due:
            picture = self._due.popleft()
            if picture.round_index >= first_round or picture.file is not None:
                self._draw(picture)

    def _expected(self, picture: Picture) -> float:
        return self._cost.get(picture.tag, max(self._cost.values(), default=FIRST_S))

    def _draw(self, picture: Picture) -> None:
        began = self._clock()
        self._show(picture, picture.draw())
        seconds = self._clock() - began
        self._cost[picture.tag] = seconds
        self._spent += seconds
