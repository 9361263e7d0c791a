"""What the terminal shows: lines, progress and tables."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from raysim.core.settings import Settings
    from raysim.engine.metrics import RoundRecord

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def say(line: str) -> None:
    out.print(line, markup=False)
    out.file.flush()


def note_home() -> None:
    """Say where relative paths begin in a job of a cluster that does not say so itself."""
    from raysim.config import JOB_VARIABLE, home_folder

    if JOB_VARIABLE in os.environ and not os.environ.get("RAYSIM_HOME"):
        err.print(f"note: RAYSIM_HOME is not set on this cluster; relative paths begin at {home_folder()} of this node")


def run_table(folder: Path | None, summary: Settings, seconds: float) -> Table:
    """The accuracies of a finished run."""
    from raysim.config import methods_label

    table = Table(title=f"{folder.name if folder else ''}: {methods_label(summary['methods'])}")
    for column in ("round", "accuracy", ""):
        table.add_column(column, justify="right")
    if summary["accuracy"] is not None:
        table.add_row("last", f"{summary['accuracy']:.4f}", f"round {summary['rounds'] - 1}")
        table.add_row("best", f"{summary['best_accuracy']:.4f}", f"round {summary['best_round']}")
        if summary["mean_last_10pct_accuracy"] is not None:  # none: the run ended long after an evaluation
            table.add_row("mean of the last 10 %", f"{summary['mean_last_10pct_accuracy']:.4f}", "")
    table.add_row("seconds", f"{seconds:.1f}", f"{summary['seconds_per_round']:.2f} a round")
    if summary["stopped_by"]:
        table.caption = f"ended early: {summary['stopped_by']}"
    return table


class Progress:
    """A live line on a terminal and in a notebook; elsewhere a plain line a round, at most a hundred in all."""

    def __init__(self, began: float | None = None, *, is_quiet: bool = False):
        self._began = self._rounds_began = time.monotonic() if began is None else began
        self._is_quiet, self._notebook_line = is_quiet, None
        self.folder: Path | None = None
        self._first, self._total = 0, 0
        self._accuracy = ""

    def start(self, folder: Path, first_round: int, num_rounds: int) -> None:
        self.folder, self._first, self._total = folder, first_round, num_rounds
        self._rounds_began = time.monotonic()
        if self._is_quiet:
            return
        where = f"resuming at round {first_round} of" if first_round else "running"
        spent = f"{self._rounds_began - self._began:.1f} s to start"
        out.print(f"{where} {num_rounds} rounds in {folder} ({spent}; {_trainers(folder)})")

    def round(self, record: RoundRecord) -> None:
        if self._is_quiet:
            return
        number = record.round_index + 1
        if "server/accuracy" in record.metrics:
            self._accuracy = f"accuracy {record.metrics['server/accuracy']:.4f}  "
        spent = time.monotonic() - self._rounds_began
        left = spent / (number - self._first) * (self._total - number)
        loss = f"loss {record.metrics['train/loss']:.4f}"
        count = f"{number:>{len(str(self._total))}}/{self._total}"
        line = f"round {count}  {self._accuracy}{loss}  {_clock(left)} left"
        is_last = number == self._total
        if out.is_jupyter:
            self._notebook_line = _shown(line, self._notebook_line)
        elif out.is_terminal:
            out.print(line, end="\n" if is_last else "\r")
        elif is_last or number % max(1, self._total // 100) == 0:
            out.print(line)
            out.file.flush()


def _trainers(folder: Path) -> str:
    """Who computes, as env.json has it; the number of threads is part of what the bits of a run depend on."""
    from raysim.run_folder import RunFolder

    run = RunFolder(folder)
    taken = run.read_json(run.environment)["resources"]
    count, threads = taken["trainers"], taken["threads_per_trainer"]
    each = "1 thread" if threads == 1 else f"{threads} threads"
    if taken["backend"] == "serial":
        return f"serial, {each}"
    return f"{count} trainer{'s' * (count != 1)} with {each}"


def _shown(line: str, place: Any) -> Any:
    """Show a line of a notebook in the place of the one before; returns the place."""
    from IPython.display import Pretty, display

    text = Pretty(line)
    if place is None:
        return display(text, display_id=True)
    place.update(text)
    return place


def command_began() -> float:
    """When this process started, on the clock of time.monotonic: the user waits for Python and PyTorch as well."""
    import psutil

    return time.monotonic() - (time.time() - psutil.Process().create_time())


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
