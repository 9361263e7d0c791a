"""Loggers of the user's own: told of the start of a run, of every round, of the end. docs/loggers.md has examples.

They live in the process that drives the run, and none of them on trainers. A round is told when a checkpoint holds it, in
order, and the run directory keeps how far each logger has got (`loggers.json`). So a run that was killed and goes on tells
no round twice and leaves none out. One exception cannot be ruled out: a process that dies after a logger's `round` has
returned and before that is written down tells this one round again, with the same number and the same values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypedDict, cast

from raysim.base.errors import ConfigError, Fault, RaysimError, explained
from raysim.base.own import place_in, place_of, words_of
from raysim.base.settings import Settings
from raysim.base.texts import round_name
from raysim.folders.run_folder import RunFolder
from raysim.plan.find import find_logger


class Logger(Protocol):
    """What a logger's function returns."""

    def start(self, folder: Path, config: Settings) -> object:
        """Start or resume: the run directory and the complete configuration."""

    def round(self, record: dict[str, float]) -> object:
        """A row of progress.csv: "round", counted from 0, and the round's metrics."""

    def end(self, summary: Settings) -> object:
        """What summary.json holds; empty where the run ended unfinished: by a signal, or a failure."""


class _Progress(TypedDict):
    """Progress of a logger: the next round to report, and the fault that ended the logger, if any."""

    next_round: int
    fault: str


class Loggers:
    """Loggers of a run. A fault before the first round ends the run; a later fault ends the logger."""

    def __init__(self, specs: Sequence[object], folder: RunFolder, say: Callable[[str], None]):
        self._specs, self._folder, self._say = specs, folder, say
        self._open: dict[str, tuple[Callable[..., object], Logger]] = {}
        file = folder.path / "loggers.json"
        mend = "delete it; then every logger is told of all rounds again"
        with explained(f"{file.name} is damaged", folder.path, mend, OSError, ValueError, TypeError):
            self._progress: dict[str, _Progress] = folder.read_json(file) if file.exists() else {}

    def start(self, config: Settings) -> None:
        """Make and start every logger.

        Raises:
          ConfigError: one cannot be made or started.
        """
        for index, spec in enumerate(self._specs):
            key = f"loggers[{index}]"
            made = find_logger(spec, key)
            if isinstance(made, list):
                raise ConfigError(made)
            make, options = made
            try:
                logger = cast("Logger", make(**options))  # which is looked at now
                if missing := [name for name in ("start", "round", "end") if not callable(getattr(logger, name, None))]:
                    text = f"{place_of(make)} returned {type(logger).__name__}, which has no {' and no '.join(missing)}"
                    raise ConfigError([Fault(key, text)])
                logger.start(self._folder.path, config)
            except ConfigError:
                raise
            except (Exception, SystemExit) as error:  # whatever the user's own code raises
                raise ConfigError([Fault(key, f"{_place(error, make)}; mend it, or drop the logger")]) from error
            self._refuse_missing_folder(make, "its start")
            name = json.dumps(spec)
            self._open[name] = make, logger
            self._progress.setdefault(name, {"next_round": 0, "fault": ""})

    def rounds(self, rows: Sequence[Mapping[str, str]], before: int) -> None:
        """Tell every round below `before`, from rows of progress.csv, that a logger has not been told of."""
        for name in list(self._open):
            progress = self._progress[name]
            progress["fault"] = ""
            for row in rows:
                number = int(row["round"])
                if not progress["next_round"] <= number < before:
                    continue
                metrics = {metric: float(text) for metric, text in row.items() if text and metric != "round"}
                record = {"round": number, **metrics}
                if not self._try(name, round_name(number), lambda each, told: each.round(told), record):
                    break
                progress["next_round"] = number + 1
                self._keep()

    def end(self, summary: Settings) -> None:
        """Tell every logger that is left, once."""
        for name in list(self._open):
            self._try(name, "the end", lambda each, told: each.end(told), dict(summary))
        self._open.clear()

    def _try(self, name: str, when: str, tell: Callable[[Logger, Settings], object], told: Settings) -> bool:
        make, logger = self._open[name]
        try:
            tell(logger, told)
        except (Exception, SystemExit) as error:  # whatever the user's own code raises
            self._refuse_missing_folder(make, when)
            text = f"{_place(error, make)}, at {when}"
            self._say(f"logger {name} failed: {text}; the run goes on without it; a resumed run tells it the rest")
            self._progress[name]["fault"] = text
            del self._open[name]
            self._keep()
            return False
        self._refuse_missing_folder(make, when)
        return True

    def _refuse_missing_folder(self, make: Callable[..., object], when: str) -> None:
        """Raises RaysimError."""
        if not self._folder.config.is_file():
            self._open.clear()  # the end is told to nobody: it would only say the same
            what = f"the run directory, or its config.yaml, is gone after {place_of(make)}, at {when}"
            raise RaysimError(what, str(self._folder.path), "keep loggers from it; its contents are lost")

    def _keep(self) -> None:
        self._folder.write_json(self._folder.path / "loggers.json", dict(self._progress))


@contextmanager
def ended(loggers: Loggers) -> Iterator[None]:
    """Loggers are told an end in any case; an empty summary where the run did not come to its own."""
    try:
        yield
    finally:
        loggers.end({})


def _place(error: BaseException, make: Callable[..., object]) -> str:
    """Return file, line and function of the user's code that raised an exception, and the message."""
    return f"{place_in(error) or place_of(make)}: {words_of(error)}"
