"""Progress of long work: the library calls a `Listener` with lines of text and prints nothing itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

#: Called with a line of text.
Tell = Callable[[str], None]


def silent(line: str) -> None:
    """Ignore a line."""


@dataclass(frozen=True)
class Listener:
    """Callbacks of long work, each called with a line of text; silent by default.

    Attributes:
      say: receives permanent lines of output. note: receives permanent remarks, apart from the output.
      step: receives the name of a part of the work when the part begins.
      show: receives the progress, in a line that replaces the previous line; None if lines cannot be replaced.
    """

    say: Tell = silent
    note: Tell = silent
    step: Tell = silent
    show: Tell | None = None


class Lines:
    """Lines about long work: none in the first 3 s, then at growing intervals."""

    def __init__(self, work: str, say: Tell):
        self._work, self._say = work, say
        self._began = time.monotonic()
        self._next_s = 3.0

    def progress(self, done: int, total: int | None) -> None:
        """Report how many items of a total, which may not be known, are done."""
        spent = time.monotonic() - self._began
        if spent >= self._next_s and 0 < done != total:
            self._next_s = 1.5 * spent
            share = f"{done:,} so far"
            if total is not None:
                share = f"{100 * done // total} %, {clock(spent / done * (total - done))} left"
            self._say(f"{self._work}: {share}")


def clock(seconds: float) -> str:
    """Return a duration as minutes:seconds, or hours:minutes:seconds."""
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
