"""Options of methods that have no effect beside others."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping


def warn_of_ignored(
    make: Callable[..., object], given: Mapping[str, object], names: Iterable[str], because: str
) -> None:
    """Warn of options that are not at their defaults and have no effect.

    Args:
      make: a method's function; given: its options by name; names: those without effect; because: beside what.
    """
    defaults = inspect.signature(make).parameters
    idle = [name for name in names if given[name] != defaults[name].default]
    if idle:
        verb = "has" if len(idle) == 1 else "have"
        warnings.warn(f"{make.__name__}: {', '.join(idle)} {verb} no effect with {because}; drop it", stacklevel=3)
