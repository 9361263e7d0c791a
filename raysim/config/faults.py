"""Sentences for pydantic's errors: cause with the value, place, and remedy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from raysim.base.errors import Fault, did_you_mean
from raysim.base.settings import Settings
from raysim.config.effects import unused_faults

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

Model = TypeVar("Model", bound=BaseModel)

#: Place of an error: keys and positions, from the outside in.
Place = tuple[int | str, ...]


class Checked(BaseModel):
    """Keys with their types."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


def validated(model: type[Model], raw: object, key: str = "") -> tuple[Model | None, list[Fault]]:
    """(the raw value as a model, or None if it has faults; the faults).

    Args:
      key: key of the raw value in the whole configuration.
    """
    try:
        return model.model_validate(raw), []
    except ValidationError as error:
        return None, [fault_of(model, item, key) for item in unique_errors(error.errors())]


def parse_options(
    function: Callable[..., object], options: Mapping[str, object], key: str
) -> tuple[Settings, list[Fault]]:
    """Check options against a function's keyword parameters (a method's or a model's).

    Returns:
      (converted options, faults).
    """
    try:
        model = options_model(function)
    except (ValueError, TypeError, NameError) as error:  # of a built-in such as dict, or annotations that name nothing
        return {}, [Fault(key, f"takes no options that could be read ({error}); name a function of your own")]
    parsed, faults = validated(model, dict(options), key)
    if parsed is not None:
        faults = unused_faults(parsed, f"{key}.")
    return ({} if parsed is None else {name: getattr(parsed, name) for name in options}), faults


@lru_cache(maxsize=256)
def options_model(function: Callable[..., object]) -> type[BaseModel]:
    """The keyword parameters of a function as a pydantic model."""
    fields: dict[str, Any] = {}  # Any: create_model takes types and defaults of every kind
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY or (parameter.default is not parameter.empty):
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[name] = (Any if parameter.annotation is parameter.empty else parameter.annotation, default)
    return create_model("Options", __base__=Checked, **fields)


def nearest(name: str, candidates: Sequence[str]) -> str:
    """Return a hint for an unknown name: near names, and all known names."""
    return f"{did_you_mean(name, candidates)}Known: {', '.join(sorted(candidates))}"


def unknown(name: str, candidates: Iterable[str], kind: str) -> str:
    """Return the message for an unknown name, where `module:function` is allowed as well."""
    return f"unknown {kind} {name!r}. {nearest(name, list(candidates))}; or module:function for your own"


def unique_errors(errors: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """Merge the errors of each place: the demands of a union's alternatives, joined by "or", or one custom message."""
    by_place: dict[Place, ErrorDetails] = {}
    for error in errors:
        place = tuple(part for part in error["loc"] if not _is_tag(part))
        before = by_place.get(place)
        if before is None or error["type"] == "value_error":
            by_place[place] = {**error, "loc": place}
        elif before["type"] != "value_error":
            more = error["msg"].replace("Input should be ", "")
            if error["type"] == "string_pattern_mismatch":  # beside words, text names a function of the user's own
                more = "module:function"
            before["msg"] += f" or {more[:1].lower()}{more[1:]}"
    return list(by_place.values())


def _is_tag(part: int | str) -> bool:
    """Whether a part of a place is pydantic's name of an alternative, and no key."""
    is_kind = part in {"int", "float", "str", "bool", "[key]"}
    starts = ("literal[", "list[", "dict[", "constrained", "function")
    return isinstance(part, str) and (is_kind or part.startswith(starts))


#: pydantic's type of an error -> a sentence that says more than pydantic's.
SENTENCES = {"model_type": "must be a mapping of keys", "string_pattern_mismatch": "has the wrong form"}


#: Names of keys in other libraries -> names in raysim.
SYNONYMS = {
    "learning_rate": "local.lr",
    "num_epochs": "local.epochs",
    "local_epochs": "local.epochs",
    "num_rounds": "rounds",
    "clients": "partition.num_clients",
    "dataset": "data.name",
}


def _unknown(model: type[BaseModel], owner: type[BaseModel], name: str) -> str:
    """Return a hint for an unknown key: groups with a key of this name, or the nearest names in the same group."""
    groups = {group: _owner(model, (group, name)) for group in model.model_fields}
    homes = [f"{group}.{name}" for group, inner in groups.items() if inner is not model and name in inner.model_fields]
    homes = [SYNONYMS[name]] if "local" in groups and name in SYNONYMS else homes
    return f"Did you mean {' or '.join(homes)}?" if homes else nearest(name, list(owner.model_fields))


def fault_of(model: type[BaseModel], error: ErrorDetails, prefix: str = "") -> Fault:
    """One of pydantic's errors as a fault.

    Args:
      model: the validated model.
      prefix: prefix of the key.
    """
    place, kind = error["loc"], error["type"]
    owner = _owner(model, place)
    last = str(place[-1]) if place else ""
    message = error["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    sentence = SENTENCES.get(kind, message[:1].lower() + message[1:])
    text = f"{sentence}, got {error.get('input')!r}{_hint(owner.model_fields.get(last))}"
    if kind == "missing":
        text = "is missing"
    if kind == "extra_forbidden":
        text = f"unknown key. {_unknown(model, owner, last)}"
    return Fault(_key((prefix, *place) if prefix else place), text)


def _key(place: Place) -> str:
    """Return a place as written in messages: `data.test_sets[0]`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")


def _owner(model: type[BaseModel], place: Place) -> type[BaseModel]:
    """The group that holds the last part of a place."""
    for part in place[:-1]:
        field = model.model_fields.get(str(part))
        inner = field.annotation if field else None
        for choice in (inner, *get_args(inner)):  # a group, or a group or None
            if isinstance(choice, type) and issubclass(choice, BaseModel):
                model = choice
    return model


def _hint(field: FieldInfo | None) -> str:
    """Return the meaning and default of a key, in brackets."""
    if field is None:
        return ""
    has_default = field.default is not PydanticUndefined and field.default is not None
    hint = f"{field.description or ''}{f'; default {field.default}' if has_default else ''}".removeprefix("; ")
    return f" ({hint})" if hint else ""
