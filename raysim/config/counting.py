"""The one checker of what options declare about when they count, see `raysim.core.counting`."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import reduce

from pydantic import BaseModel

from raysim.core.counting import Counts
from raysim.core.errors import Fault
from raysim.core.settings import Settings


def idle_options(model: BaseModel, prefix: str = "") -> dict[str, tuple[Counts, str]]:
    """Key -> (the condition that is not met, a sentence) of the options that are not at their defaults and have no effect.

    Args:
      model: a whole configuration, or the options of one function; conditions name its keys.
      prefix: of the keys that are returned.
    """
    return dict(_idle(model, model, prefix))


def _idle(model: BaseModel, whole: BaseModel, prefix: str) -> Iterator[tuple[str, tuple[Counts, str]]]:
    for name, field in type(model).model_fields.items():
        value, key = getattr(model, name), f"{prefix}{name}"
        if value == field.get_default(call_default_factory=True):
            continue
        unmet = next(
            (part for part in field.metadata if isinstance(part, Counts) and not _is_met(part, whole, value)), None
        )
        if unmet is not None:
            yield key, (unmet, unmet.sentence(value_of(whole, unmet.key)))
        elif isinstance(value, BaseModel):
            yield from _idle(value, whole, f"{key}.")


def _is_met(counts: Counts, whole: BaseModel, value: object) -> bool:
    return counts.is_met(value_of(whole, counts.key), value)


def value_of(model: object, key: str) -> object:
    """The value at a dotted key; None where a group on the way is null."""
    return reduce(lambda group, name: getattr(group, name, None), key.split("."), model)


def idle_faults(model: BaseModel, prefix: str = "") -> list[Fault]:
    """The same as faults."""
    return [Fault(key, sentence) for key, (_, sentence) in idle_options(model, prefix).items()]


# --- settings laid over others ----------------------------------------------------------------------------------------


def has(raw: object, key: str) -> bool:
    """Whether a raw configuration has something at a dotted key."""
    for name in key.split("."):
        if not isinstance(raw, Mapping) or name not in raw:
            return False
        raw = raw[name]
    return True


def at(raw: object, key: str) -> object:
    """What a raw configuration has at a dotted key, None if nothing."""
    return reduce(lambda group, name: group.get(name) if isinstance(group, Mapping) else None, key.split("."), raw)


def without_key(raw: Settings, key: str) -> Settings:
    """A copy of a raw configuration without a dotted key."""
    pruned = copy.deepcopy(raw)
    *parents, last = key.split(".")
    group: object = pruned
    for parent in parents:
        group = group.get(parent) if isinstance(group, dict) else None
    if isinstance(group, dict):
        group.pop(last, None)
    return pruned
