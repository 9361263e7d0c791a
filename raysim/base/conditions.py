"""When an option applies: declared beside the option, and read by one checker, `raysim.config.effects`.

A key of the configuration declares it in the schema, `key(0.1, "...", applies=applies_with("partition.scheme", "dirichlet"))`;
an option of a method or a model in its annotation, `groups: Annotated[int, applies_with("norm", "group")] = 2`. An
option that is given but does not apply is refused; an option with its default value is treated as not given.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from raysim.base.texts import listed


@dataclass(frozen=True)
class Condition:
    """A condition under which an option applies.

    Attributes:
      key: the deciding setting: a dotted key of the configuration, or another option of the same function.
      words: values of the deciding setting with which the option applies, in words.
      is_met: is_met(value of the deciding setting, value of this option).
      others: alternative conditions; one met condition is enough.
    """

    key: str
    words: str
    is_met: Callable[[object, object], bool]
    others: tuple[Condition, ...] = ()

    def __or__(self, other: Condition) -> Condition:
        return replace(self, others=(*self.others, other))

    @property
    def text(self) -> str:
        """The condition in words: "norm group"."""
        return ", or with ".join(f"{each.key} {each.words}" for each in (self, *self.others))

    def reason(self, value: object) -> str:
        """Why an option has no effect where the deciding setting has this value."""
        return f"has no effect with {self.key} {_shown(value)} (applies with {self.text})"


def applies_with(key: str, *values: object) -> Condition:
    """The option applies if another setting has a listed value."""
    return Condition(key, _either(values), lambda value, _: _name(value) in values)


def applies_without(key: str, *values: object) -> Condition:
    """The option applies if another setting has no listed value."""
    return Condition(key, f"other than {_either(values)}", lambda value, _: _name(value) not in values)


def applies_above(key: str, bound: float) -> Condition:
    """The option applies if a number is above a bound."""
    return Condition(key, f"more than {bound:g}", lambda value, _: isinstance(value, int | float) and value > bound)


def applies_given(key: str) -> Condition:
    """The option applies if another setting is given."""
    return Condition(key, "set", lambda value, _: value is not None)


def applies_empty(key: str) -> Condition:
    """The option applies if a list or mapping is empty."""
    return Condition(key, "empty", lambda value, _: not value)


def _either(values: tuple[object, ...]) -> str:
    return listed(list(map(_shown, values)), "or")


def _name(value: object) -> object:
    """The name that a setting chooses, without the options of `{name: options}`."""
    return next(iter(value), None) if isinstance(value, Mapping) else value


def _shown(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value)) or "empty"
    return plain(next(iter(value), "") if isinstance(value, Mapping) else value)


def plain(value: object) -> str:
    """Return a value as a line of YAML."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(plain, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)
