"""Arguments shared by several verbs, and options generated from a dataclass or from a configuration group."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

from typer import Argument, Option

from raysim.base.options import meanings
from raysim.config.schema import ReportGroup
from raysim.data.readers.reader_options import ReaderOptions, option

Verb = TypeVar("Verb", bound=Callable[..., None])

Overrides = Annotated[
    list[str] | None, Argument(help="settings as key=value, for example local.lr=0.1", metavar="[a.b=c ...]")
]
GridOverrides = Annotated[
    list[str] | None, Argument(help="settings as key=value; key=1,2,3 makes an axis of a grid", metavar="[a.b=c,d ...]")
]
Planned = Annotated[bool, Option("--plan", help="print the expected cost and stop; trains a few steps")]
Scaled = Annotated[bool, Option("--scaled", help="apply the file's `scale` settings")]

#: List-valued keys of the `report` group -> option, which is repeated for each value.
REPEATED = {"columns": "--columns", "ignore": "--ignore", "published": "--published", "figures": "--figure"}


def with_options(options: Sequence[inspect.Parameter]) -> Callable[[Verb], Verb]:
    """Return a decorator that replaces `**name` in a verb's signature, which typer reads, by options.

    Args:
      options: keyword-only parameters whose defaults are typer's options.
    """

    def declared(verb: Verb) -> Verb:
        signature = inspect.signature(verb, eval_str=True)
        parameters = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        verb.__dict__["__signature__"] = signature.replace(parameters=[*parameters, *options])
        return verb

    return declared


def reader_options() -> list[inspect.Parameter]:
    """Return an option for each field of `ReaderOptions`; an option of several types has the first type."""
    types, texts = get_type_hints(ReaderOptions), meanings(ReaderOptions)
    return [
        _option(option(each.name), each.name, _first(types[each.name]), each.default, texts[each.name], **each.metadata)
        for each in fields(ReaderOptions)
    ]


def report_options() -> list[inspect.Parameter]:
    """Return an option for each key of the `report` group except the nested `metrics`."""
    keys = {name: key.description for name, key in ReportGroup.model_fields.items() if name != "metrics"}
    return [
        _option(REPEATED.get(name, f"--{name}"), name, list[str] if name in REPEATED else str, None, text)
        for name, text in keys.items()
    ]


def _first(kind: Any) -> Any:
    """Return the first type of a union with None (`str` for `str | int | None`); return other types unchanged."""
    return next(iter(get_args(kind)), kind) if type(None) in get_args(kind) else kind


def _option(flag: str, name: str, kind: Any, default: object, text: str | None, **bounds: Any) -> inspect.Parameter:
    declared = Option(default, flag, help=text, **bounds)
    wanted = kind if default is False else kind | None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=declared, annotation=wanted)
