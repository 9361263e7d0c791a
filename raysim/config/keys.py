"""Keys of the schema: default, meaning, bounds, and the condition under which they count."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, GetPydanticSchema, PlainSerializer

from raysim.base.counting import Counts
from raysim.base.settings import Settings, Spec
from raysim.config.faults import Checked


def key(default: object, meaning: str, *, counts: Counts | None = None, **bounds: Any) -> Any:
    """Declare a key of a group: default, meaning, condition under which it applies, and pydantic's bounds."""
    return _counting(Field(default, description=_described(meaning, counts), **bounds), counts)


def group(kind: type[Any], meaning: str, *, counts: Counts | None = None) -> Any:
    """Declare a group of keys, with defaults if not given."""
    return _counting(Field(default_factory=kind, description=_described(meaning, counts)), counts)


def _described(meaning: str, counts: Counts | None) -> str:
    return meaning if counts is None else f"{meaning}; applies with {counts.condition}"


def _counting(field: Any, counts: Counts | None) -> Any:
    if counts is not None:
        field.metadata.append(counts)
    return field


def written_as(form: Any) -> GetPydanticSchema:
    """Return the annotation of a Spec that is read from, and written as, a value of type `form`."""
    parsed = Annotated[form, AfterValidator(Spec.of), PlainSerializer(lambda spec: spec.written)]
    return GetPydanticSchema(lambda _, handler: handler(parsed))


#: A name, or {name: {option: value}}.
Named = Annotated[Spec, written_as(str | Settings)]


class Group(Checked):
    """A group of keys; unknown ones are refused."""

    model_config = ConfigDict(validate_default=True)
