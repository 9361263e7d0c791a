"""Options of methods and models: meaning, and condition under which an option applies."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from raysim.base.conditions import Condition, plain


class Bounds:
    """Bounds of an option, `Annotated[int, Bounds(ge=1)]`, by pydantic's names; checked with the configuration."""

    def __init__(self, **bounds: float):
        self._bounds = bounds

    def __get_pydantic_core_schema__(
        self, source: object, handler: Callable[[object], dict[str, Any]]
    ) -> dict[str, Any]:
        return handler(source) | self._bounds


@dataclass(frozen=True)
class Option:
    """An option of a method or a model, as shown to users.

    Attributes:
      values: allowed values, in words; default: as in YAML; meaning: from the function's docstring.
    """

    name: str
    values: str
    default: str
    meaning: str


def options_of(make: Callable[..., object]) -> list[Option]:
    """The options of a method's or a model's function, in their order.

    The meaning of an option is given in one place, the section `Args:` of the function's docstring.
    """
    texts = meanings(make)
    return [
        Option(name, values_of(parameter.annotation), _default(parameter), _meaning(parameter, texts.get(name, "")))
        for name, parameter in inspect.signature(make, eval_str=True).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY or parameter.default is not parameter.empty
    ]


def _default(parameter: inspect.Parameter) -> str:
    return "" if parameter.default is parameter.empty else plain(parameter.default)


def _meaning(parameter: inspect.Parameter, meaning: str) -> str:
    """Return the meaning, followed by the options with which the option applies."""
    declared = [part for part in get_args(parameter.annotation) if isinstance(part, Condition)]
    conditions = ", and with ".join(condition.text for condition in declared)
    return f"{meaning.removesuffix('.')}; applies with {conditions}" if conditions else meaning


def meanings(make: Callable[..., object]) -> dict[str, str]:
    """Option -> its meaning, from the section `Args:` of the docstring; an entry may stand for several, `eps, form: ...`."""
    lines_of_options: dict[str, list[str]] = {}
    names: list[str] = []
    for line in _sections(make)[1]:
        entry = re.match(r"  (\w+(?:, \w+)*):(?: (.*))?$", line)
        if entry:
            names, line = entry[1].split(", "), entry[2] or ""
            lines_of_options |= {name: [] for name in names}
        for name in names:
            lines_of_options[name].append(line.strip())
    return {name: " ".join(filter(None, lines)) for name, lines in lines_of_options.items()}


def text_of(make: Callable[..., object]) -> str:
    """The docstring without its section `Args:`."""
    return "\n".join(_sections(make)[0])


def _sections(make: Callable[..., object]) -> tuple[list[str], list[str]]:
    """(lines of the docstring outside of `Args:`, lines of that section)."""
    function = make.func if isinstance(make, partial) else make
    text: list[str] = []
    inside: list[str] = []
    is_inside = False
    for line in (inspect.getdoc(function) or "").splitlines():
        if line == "Args:":
            is_inside = True
        elif is_inside and (line.startswith(" ") or not line):
            inside.append(line)
        else:
            is_inside = False
            text.append(line)
    return text, inside


def values_of(annotation: object) -> str:
    """What a value may be, in words: `model | layer | block`, `a number`, `a list of ...`."""
    if annotation is inspect.Parameter.empty or annotation in (Any, object):
        return "anything"
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return values_of(parts[0])
    if origin is Literal:
        return " | ".join(map(plain, parts))
    if origin in (Union, UnionType):
        return " | ".join(dict.fromkeys(values_of(part) for part in parts))
    if origin in (list, tuple, Sequence):
        inner = dict.fromkeys(values_of(part) for part in parts if part is not Ellipsis)
        return f"list of {' | '.join(inner)}" if inner else "list"
    if origin in (dict, Mapping):
        return "mapping"
    return KINDS.get(annotation) or str(getattr(annotation, "__name__", annotation))


#: Types of options in words.
KINDS: dict[object, str] = {
    bool: "true | false",
    int: "whole number",
    float: "number",
    str: "text",
    NoneType: "null",
    list: "list",
    dict: "mapping",
}
