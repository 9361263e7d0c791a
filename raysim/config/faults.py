"""From pydantic's errors to sentences: what (with the value), where, how to mend."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic.fields import FieldInfo

from raysim.core.errors import Fault


def parse_options(
    function: Callable[..., Any], options: Mapping[str, Any], key: str
) -> tuple[dict[str, Any], list[Fault]]:
    """Check options against a function's keyword parameters (a method's or a model's).

    Returns:
      (converted options, faults).
    """
    model = _options_model(function)
    try:
        model.model_validate(dict(options))
    except ValidationError as error:
        return {}, [fault_of(model, item, key) for item in unique_errors(error.errors())]
    parsed = model.model_validate(dict(options))
    return {name: getattr(parsed, name) for name in options}, []


@lru_cache(maxsize=256)
def _options_model(function: Callable[..., Any]) -> type[BaseModel]:
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY or (parameter.default is not parameter.empty):
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[name] = (parameter.annotation, default)
    return create_model("Options", __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=True), **fields)


def nearest(name: str, known: Sequence[str]) -> str:
    """A sentence that helps with an unknown name."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return f"{hint}Known: {', '.join(sorted(known))}"


def unique_errors(errors: Sequence[Any]) -> list[Any]:
    """One error per place: unions report every alternative, of which the first says enough."""
    seen: dict[tuple[Any, ...], Any] = {}
    for error in errors:
        place = tuple(part for part in error["loc"] if not _is_tag(part))
        seen.setdefault(place, {**error, "loc": place})
    return list(seen.values())


def _is_tag(part: Any) -> bool:
    return isinstance(part, str) and (
        part in {"int", "float", "str", "bool"}
        or part.startswith(("literal[", "list[", "dict[", "constrained", "function"))
    )


#: What values of a generic type are called; all others that stand beside words are numbers.
KINDS: dict[Any, str] = {list: "a list", dict: "a mapping"}

#: pydantic's type of an error -> the sentence; ctx holds its bounds.
SENTENCES = {
    "greater_than": "must be > {ctx[gt]:g}, got {value!r}{hint}",
    "greater_than_equal": "must be >= {ctx[ge]:g}, got {value!r}{hint}",
    "less_than": "must be < {ctx[lt]:g}, got {value!r}{hint}",
    "less_than_equal": "must be <= {ctx[le]:g}, got {value!r}{hint}",
    "missing": "is missing{hint}",
}


def fault_of(model: type[BaseModel], error: Any, prefix: str = "") -> Fault:
    """One of pydantic's errors as a fault.

    Args:
      model: that was validated.
      prefix: of the key.
    """
    key = ".".join(str(part) for part in ([prefix] if prefix else []) + list(error["loc"]))
    owner = _owner(model, error["loc"])
    field = owner.model_fields.get(str(error["loc"][-1])) if error["loc"] else None
    value, hint, choices = error.get("input"), _hint(field), _choices(field)
    if field is not None and choices and error["type"] not in ("greater_than", "greater_than_equal"):
        members = [part for part in get_args(field.annotation) if part not in (type(None), *choices)]
        origins = [get_origin(part) for part in members if get_origin(part) is not Literal]
        kinds = dict.fromkeys(KINDS.get(origin, "a number") for origin in origins)
        return Fault(key, f"must be {' or '.join([*kinds, *choices])}, got {value!r}{hint}")
    if error["type"] == "extra_forbidden":
        return Fault(key, f"unknown key. {nearest(str(error['loc'][-1]), list(owner.model_fields))}")
    if error["type"] in SENTENCES:
        return Fault(key, SENTENCES[error["type"]].format(ctx=error.get("ctx", {}), value=value, hint=hint))
    return Fault(key, f"{error['msg'][:1].lower()}{error['msg'][1:]}, got {value!r}{hint}")


def _owner(model: type[BaseModel], place: Sequence[Any]) -> type[BaseModel]:
    """The group that holds the last part of a place."""
    for part in place[:-1]:
        field = model.model_fields.get(str(part))
        inner = field.annotation if field else None
        for choice in (inner, *get_args(inner)):  # a group, or a group or None
            if isinstance(choice, type) and issubclass(choice, BaseModel):
                model = choice
    return model


def _hint(field: FieldInfo | None) -> str:
    """What a key means and its default, in brackets."""
    if field is None:
        return ""
    has_default = not field.is_required() and field.get_default(call_default_factory=False) is not None
    hint = f"{field.description or ''}{f'; default {field.default}' if has_default else ''}".removeprefix("; ")
    return f" ({hint})" if hint else ""


def _choices(field: FieldInfo | None) -> list[str]:
    """The words that a key may have as its value."""
    parts = (field.annotation, *get_args(field.annotation)) if field is not None else ()
    return [choice for part in parts for choice in get_args(part) if isinstance(choice, str)]
