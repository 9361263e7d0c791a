"""What may come of a fault: a result that is right, or one sentence; nothing else."""

from __future__ import annotations

import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from raysim.base.errors import RaysimError
from raysim.engine.simulation import Interrupted

#: A case that takes longer hangs. What it waits for a CPU that others use does not count.
LIMIT_S = 40

#: The three that the aim is none of.
BAD = ("silent wrong result", "traceback", "hang")


class Hangs(BaseException):
    """A case took longer than LIMIT_S. No Exception: nobody is to catch it."""


@dataclass
class Table:
    """Counts by kind of case and verdict, and every bad case with its seed."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    bad: list[str] = field(default_factory=list)

    def add(self, kind: str, verdict: str, case: object) -> None:
        self.counts.setdefault(kind, Counter())[verdict] += 1
        if verdict.startswith(BAD):
            self.bad.append(f"{kind}, {verdict}: {case}")

    def __str__(self) -> str:
        names = sorted({name.partition(":")[0] for counter in self.counts.values() for name in counter})
        lines = ["| |" + "|".join(names) + "|sum|", "|---|" + "---|" * (len(names) + 1)]
        for kind, counter in self.counts.items():
            cells = [sum(n for name, n in counter.items() if name.partition(":")[0] == column) for column in names]
            lines.append(f"|{kind}|" + "|".join(map(str, [*cells, sum(cells)])) + "|")
        return "\n".join([*lines, *self.bad])


def queued_s() -> float:
    """Seconds for which this process's main thread was ready and had no CPU, since it began; 0 where Linux does not tell."""
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


@contextmanager
def limited(seconds: float = LIMIT_S) -> Iterator[None]:
    """Raise Hangs when the block takes longer, see `LIMIT_S`."""
    end = time.monotonic() - queued_s() + seconds

    def ring(*_: object) -> None:
        left = end - (time.monotonic() - queued_s())
        if left <= 0:
            raise Hangs
        signal.setitimer(signal.ITIMER_REAL, max(left, 0.01))

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def verdict_of(run: Callable[[], object], *, right: Callable[[object], bool] = lambda _: True) -> str:
    """What came of calling `run`: "right", "sentence", or one of BAD with details.

    Args:
      right: whether what it returned is right.
    """
    try:
        with limited():
            return "right" if right(run()) else "silent wrong result"
    except Hangs:
        return "hang"
    except KeyboardInterrupt as error:  # which Python's users are told of a signal by
        return "sentence" if isinstance(error.__cause__, Interrupted) else "traceback: KeyboardInterrupt"
    except (RaysimError, Interrupted) as error:
        text = str(error)
        return "traceback: inside a sentence" if "Traceback" in text or not text.strip() else "sentence"
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        place = next(
            (f"{f.filename.rpartition('/')[2]}:{f.lineno}" for f in reversed(frames) if "raysim" in f.filename), ""
        )
        return f"traceback: {type(error).__name__}: {str(error)[:200]} at {place}"
