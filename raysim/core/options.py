"""Options of methods that may be given as a file."""

from __future__ import annotations

from collections.abc import Callable
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
