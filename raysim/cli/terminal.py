"""The terminal: lines, progress and tables."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook
from rich.control import Control
from rich.errors import LiveError
from rich.markup import escape
from rich.segment import Segment
from rich.status import Status
from rich.table import Table

from raysim.base.direction import SUMMARY, main_of
from raysim.base.progress import Listener, clock
from raysim.base.settings import Settings, Spec
from raysim.base.texts import round_name, visible

if TYPE_CHECKING:
    from raysim.engine.round_metrics import RoundRecord
    from raysim.folders.run_folder import RunFolder


#: Rows of a table, or lines of a list, on the terminal.
MOST_ROWS = 10


class Visible(RenderHook):
    """Render hook that prints control characters, as in labels of another user's run, as visible text."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Shown(each) if not isinstance(each, Control) else each for each in renderables]


@dataclass(frozen=True)
class _Shown:
    inner: ConsoleRenderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self.inner, options):
            yield segment if segment.control else Segment(visible(segment.text, keep="\n"), segment.style)


out = Console(highlight=False, soft_wrap=True, emoji=False)
err = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
for _console in (out, err):
    _console.push_render_hook(Visible())


def print_table(table: Table) -> None:
    """Print a table; in a pipe or a file, columns are not squeezed and lines not padded."""
    if out.is_terminal:
        out.print(table)
        return
    page = Console(file=io.StringIO(), highlight=False, emoji=False, width=400)
    with page.capture() as text:
        page.print(table)
    say("\n".join(line.rstrip() for line in text.get().splitlines()))


def first_of(lines: Sequence[str], where: str = "") -> list[str]:
    """Return the first `MOST_ROWS` lines, and a line with the number of other lines. where: how to see the rest."""
    num_more = len(lines) - MOST_ROWS
    more = [f"{num_more} more{', ' * bool(where)}{where}"] if num_more > 0 else []
    return [*lines[:MOST_ROWS], *more]


def duration(seconds: float) -> str:
    """Return seconds in a readable unit: "40 s", "12 min", "3.5 h", "2.5 d"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172800 else f"{seconds / 86400:.1f} d"


def say(line: str) -> None:
    out.print(line, markup=False)
    out.file.flush()


def run_table(folder: Path | None, summary: Settings, seconds: float | None) -> Table:
    """Return a table of a finished run's scores; rounds are counted from 1.

    Args:
      seconds: seconds that the user waited; None for a run that was finished before this command.
    """
    from raysim.config import methods_label

    table = Table(
        title=escape(f"{folder.name if folder else ''}: {methods_label(list(map(Spec.of, summary['methods'])))}")
    )
    main = summary.get("main_metric", "accuracy")
    last, best, late = (summary[form.format(main)] for form in SUMMARY[:3])
    for column in ("", f"test {main}", ""):
        table.add_column(column, justify="right")
    if last is not None:
        table.add_row("last", f"{last:.4f}", f"round {summary['rounds']}")
        table.add_row("best", f"{best:.4f}", round_name(summary["best_round"]))
        if late is not None:  # None if the last 10 % of the rounds have no evaluation
            table.add_row("mean of the last 10 %", f"{late:.4f}", "")
    for name, value in summary.get("headlines", {}).items():
        table.add_row(escape(name), f"{value:.4g}", "")
    if seconds is None:
        table.add_row("seconds in rounds", f"{summary['seconds_total']:.1f}", "")
    else:
        table.add_row("seconds", f"{seconds:.1f}", f"{summary['seconds_total']:.1f} in rounds")
    if summary["stopped_by"]:
        table.caption = f"ended early: {summary['stopped_by']}"
    return table


class LiveLine:
    """Line with the current activity: replaced on a terminal and in a notebook, printed once elsewhere."""

    def __init__(self) -> None:
        self._status: Status | None = None
        self._notebook_line: Any = None
        self._last = ""

    @property
    def is_replaced(self) -> bool:
        """Whether a new line replaces the previous line."""
        return out.is_jupyter or (out.is_terminal and not out.is_dumb_terminal)

    def listener(self) -> Listener:
        """Return the listener through which long work updates this line."""
        return Listener(self.say, self.note, self.step, self.show if self.is_replaced else None)

    def note(self, text: str) -> None:
        """Print a permanent remark on stderr."""
        err.print(text, markup=False)

    def step(self, text: str) -> None:
        """Show that a part of the work begins."""
        if self.is_replaced:
            self.show(text)
        else:
            self.note(text)

    def say(self, text: str) -> None:
        """Print a permanent line above the live line."""
        if out.is_jupyter:
            self.show(text)
            self._notebook_line = None
        else:
            say(text)

    def show(self, text: str, *, is_last: bool = False) -> None:
        """Show progress; has no effect where lines cannot be replaced.

        Args:
          is_last: whether a notebook shows this text after `close`, unless a later text with `is_last` replaces it.
        """
        if not self.is_replaced:
            return
        self._last = text if is_last else self._last
        if out.is_jupyter:
            self._notebook_line = _shown(text, self._notebook_line)
        elif self._status is not None:
            self._status.update(escape(visible(text)))
        else:
            # A higher refresh rate would slow down a serial run.
            status = Status(escape(visible(text)), console=out, refresh_per_second=4)
            with suppress(LiveError):  # another thread has the terminal's one live line
                status.start()
                self._status = status

    def close(self) -> None:
        """Remove the line; a notebook then shows the last text with `is_last`."""
        if self._notebook_line is not None:
            _shown(self._last, self._notebook_line)
        if self._status is not None:
            self._status.stop()
            self._status = None

    def __enter__(self) -> LiveLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Progress:
    """Progress of a run: a live line on a terminal or in a notebook; elsewhere a line per step and up to 199 rounds.

    Rounds are counted from 1.
    """

    def __init__(self, began: float | None = None):
        self._began = self._rounds_began = time.monotonic() if began is None else began
        self.line = LiveLine()
        self._first, self._total = 0, 0
        self.has_rounds = False  # whether this process runs any round
        self._score, self._evaluated = "", 0

    def start(self, folder: Path, first_round: int, num_rounds: int) -> None:
        """Print that the rounds begin; first_round: index of the first round."""
        self._first, self._total, self.has_rounds = first_round, num_rounds, first_round < num_rounds
        self._rounds_began = time.monotonic()
        from raysim.folders.run_folder import RunFolder

        run = RunFolder(folder)
        where = f"resuming at round {first_round + 1} of" if first_round else "running"
        spent = f"{self._rounds_began - self._began:.1f} s to start"
        if first_round == num_rounds:
            more = "a larger `rounds` continues the run, another `name` starts a new run"
            self.line.say(f"all {num_rounds} rounds are in {folder}; {more}")
            return
        rounds = f"{num_rounds} round{'s' * (num_rounds != 1)}"
        self.line.say(f"{where} {rounds} in {folder} ({spent}; {_trainers(run)})")
        self.line.show(f"round {first_round + 1}/{num_rounds}")

    def round(self, record: RoundRecord) -> None:
        """Show the result of a round that has ended."""
        number = record.round_index + 1
        main = main_of(record.metrics)
        if f"server/{main}" in record.metrics:
            self._score, self._evaluated = f"{main} {record.metrics[f'server/{main}']:.4f}", number
        spent = time.monotonic() - self._rounds_began
        left = spent / (number - self._first) * (self._total - number)
        loss = f"loss {record.metrics['train/loss']:.4f}"
        count = f"{number:>{len(str(self._total))}}/{self._total}"
        when = "" if self._evaluated == number else f" (round {self._evaluated})"
        score = f"{self._score}{when}  " if self._score else ""
        text = f"round {count}  {score}{loss}  {clock(left)} left"
        self.line.show(text, is_last=True)
        is_last, is_due = number == self._total, number % max(1, self._total // 100) == 0
        if not out.is_jupyter and (is_last or (is_due and not self.line.is_replaced)):
            say(text)

    def summary(self, folder: Path, summary: Settings) -> None:
        """Print the table of scores."""
        print_table(run_table(folder, summary, time.monotonic() - self._began if self.has_rounds else None))


def _trainers(run: RunFolder) -> str:
    """Describe the trainers, from env.json; a run's exact result depends on device and number of threads."""
    taken = run.read_json(run.environment)["resources"]
    count, threads = taken["trainers"], taken["threads_per_trainer"]
    each = "1 thread" if threads == 1 else f"{threads} threads"
    if taken["backend"] == "serial":
        return f"serial, {each} on {taken['device']}"
    return f"{count} trainer{'s' * (count != 1)} with {each} on {taken['device']}"


def _shown(line: str, place: Any) -> Any:
    """Show a line in a notebook in place of the previous line; return the handle of the line."""
    from IPython.display import Pretty, display

    if place is None:
        return display(Pretty(line), display_id=True)
    place.update(Pretty(line))
    return place


def command_began() -> float:
    """Return when this process started, by time.monotonic: the user's wait includes the import of PyTorch."""
    import psutil

    return time.monotonic() - (time.time() - psutil.Process().create_time())
