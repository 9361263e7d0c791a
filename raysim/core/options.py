"""Options of methods: those that may be given as a file, and those that have no effect beside others."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FromFile:
    """Says of an option, `Annotated[T, FromFile(select, names)]`, that the path of a JSON file may stand for its value.

    The file is read where the configuration is checked, once, and what it says takes the path's place: so the run's
    configuration holds the value itself, and no trainer on another node or in another folder looks for the file.

    Attributes:
      select: content of the file -> the option's value, of plain lists, mappings, numbers; raises ValueError.
      names: strings that are values of the option themselves.
    """

    select: Callable[[Any], Any]
    names: tuple[str, ...] = ()

    def __repr__(self) -> str:  # what `raysim methods` shows
        return "or a JSON file"


def warn_of_ignored(make: Callable[..., Any], given: Mapping[str, Any], names: Iterable[str], because: str) -> None:
    """Warn of options that are not at their defaults and have no effect.

    Args:
      make: a method's function; given: its options by name; names: those without effect; because: beside what.
    """
    defaults = inspect.signature(make).parameters
    idle = [name for name in names if given[name] != defaults[name].default]
    if idle:
        verb = "has" if len(idle) == 1 else "have"
        warnings.warn(f"{make.__name__}: {', '.join(idle)} {verb} no effect with {because}; drop it", stacklevel=3)
