"""Loggers of users, called at the start of a run, after every round, and at the end. docs/loggers.md has examples.

Loggers run in the process that drives the run, not in trainers. Every round is reported when it ends. A resumed run
reports the rounds since the last checkpoint again, with the same round indices and values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, cast

from raysim.base.errors import ConfigError, Fault, RaysimError
from raysim.base.settings import Settings, Spec
from raysim.base.texts import round_name
from raysim.base.user_places import place_in, place_of, words_of
from raysim.folders.run_folder import RunFolder
from raysim.plan.find import find_logger


class Logger(Protocol):
    """Interface of the object that a logger's function returns."""

    def start(self, folder: Path, config: Settings) -> object:
        """Called when the run starts or resumes, with the run directory and the complete configuration."""

    def round(self, record: dict[str, float]) -> object:
        """Called after a round with the row of progress.csv: "round", counted from 0, and the round's metrics."""

    def end(self, summary: Settings) -> object:
        """Called at the end with the contents of summary.json; empty if a signal or a failure ended the run."""


class Loggers:
    """Loggers of a run. A fault before the first round ends the run; after a later fault, the logger is removed."""

    def __init__(self, specs: Sequence[Spec], folder: RunFolder, say: Callable[[str], None]):
        self._specs, self._folder, self._say = specs, folder, say
        self._open: dict[str, tuple[Callable[..., object], Logger]] = {}

    def start(self, config: Settings) -> None:
        """Make and start every logger.

        Raises:
          ConfigError: a logger cannot be made or started.
        """
        for index, spec in enumerate(self._specs):
            key = f"loggers[{index}]"
            made = find_logger(spec, key)
            if isinstance(made, list):
                raise ConfigError(made)
            make, options = made
            try:
                logger = cast("Logger", make(**options))  # checked in the next lines
                if missing := [name for name in ("start", "round", "end") if not callable(getattr(logger, name, None))]:
                    text = f"{place_of(make)} returned {type(logger).__name__}, which has no {' and no '.join(missing)}"
                    raise ConfigError([Fault(key, text)])
                logger.start(self._folder.path, config)
            except ConfigError:
                raise
            except (Exception, SystemExit) as error:  # whatever the user's own code raises
                raise ConfigError([Fault(key, f"{_place(error, make)}; correct or remove the logger")]) from error
            self._refuse_missing_folder(make, "its start")
            self._open[json.dumps(spec.written)] = make, logger

    def round(self, row: Mapping[str, str]) -> None:
        """Report a round to every logger. row: the row of progress.csv."""
        number = int(row["round"])
        metrics = {metric: float(text) for metric, text in row.items() if text}
        self._tell(round_name(number), lambda logger: logger.round({**metrics, "round": number}))

    def end(self, summary: Settings) -> None:
        """Call `end` of every remaining logger, once."""
        self._tell("the end", lambda logger: logger.end(dict(summary)))
        self._open.clear()

    def close(self) -> None:
        """End the loggers of a run that was interrupted or failed, with an empty summary."""
        self.end({})

    def _tell(self, when: str, tell: Callable[[Logger], object]) -> None:
        for name, (make, logger) in list(self._open.items()):
            try:
                tell(logger)
            except (Exception, SystemExit) as error:  # whatever the user's own code raises
                what = f"logger {name} failed: {_place(error, make)}, at {when}"
                self._say(f"{what}; the run continues without the logger")
                del self._open[name]
            self._refuse_missing_folder(make, when)

    def _refuse_missing_folder(self, make: Callable[..., object], when: str) -> None:
        """Raise RaysimError if the run directory or its config.yaml is missing after a call to a logger."""
        if not self._folder.config.is_file():
            self._open.clear()  # no call at the end, which would report the same fault again
            what = f"the run directory or its config.yaml is missing after {place_of(make)}, at {when}"
            raise RaysimError(what, str(self._folder.path), "keep loggers from writing to it; the contents are lost")


def _place(error: BaseException, make: Callable[..., object]) -> str:
    """Return file, line and function of the user's code that raised an exception, and the message."""
    return f"{place_in(error) or place_of(make)}: {words_of(error)}"
