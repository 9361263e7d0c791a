"""Keys of the schema: default, meaning, bounds, and the condition under which a key applies."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, GetPydanticSchema, PlainSerializer
from pydantic_core import PydanticUndefined

from raysim.base.conditions import Condition
from raysim.base.settings import Settings, Spec
from raysim.config.faults import Checked


def key(default: object, meaning: str, *, applies: Condition | None = None, **bounds: Any) -> Any:
    """Declare a key of a group: default, meaning, condition under which the key applies, and pydantic's bounds."""
    condition = "" if applies is None else f"; applies with {applies.text}"
    field: Any = Field(default, description=f"{meaning}{condition}", **bounds)
    field.metadata += [] if applies is None else [applies]
    return field


def group(kind: type[Any], meaning: str, *, applies: Condition | None = None) -> Any:
    """Declare a group of keys, with defaults if not given."""
    return key(PydanticUndefined, meaning, applies=applies, default_factory=kind)


def written_as(form: Any) -> GetPydanticSchema:
    """Return the annotation of a Spec that is read from, and written as, a value of type `form`."""
    parsed = Annotated[form, AfterValidator(Spec.of), PlainSerializer(lambda spec: spec.written)]
    return GetPydanticSchema(lambda _, handler: handler(parsed))


#: A name, or {name: {option: value}}.
Named = Annotated[Spec, written_as(str | Settings)]


class Group(Checked):
    """A group of keys; unknown ones are refused."""

    model_config = ConfigDict(validate_default=True)
