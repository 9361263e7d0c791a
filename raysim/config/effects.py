"""Which settings have an effect: the checker of the conditions declared by options, see `raysim.base.conditions`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, reduce

from pydantic import BaseModel, ValidationError

from raysim.base.conditions import Condition
from raysim.base.errors import Fault
from raysim.base.settings import Raw, Settings, as_written


def unused_options(model: BaseModel, prefix: str = "") -> dict[str, tuple[Condition, str]]:
    """Return key -> (unmet condition, reason) of non-default options without effect.

    Args:
      model: a whole configuration, or the options of one function; conditions name its keys.
      prefix: of the keys that are returned.
    """
    return dict(_unused(model, model, prefix))


def _unused(model: BaseModel, whole: BaseModel, prefix: str) -> Iterator[tuple[str, tuple[Condition, str]]]:
    for name, default, conditions in _fields(type(model)):
        value, key = getattr(model, name), f"{prefix}{name}"
        if value == default:
            continue
        unmet = next((part for part in conditions if not _is_met(part, whole, value)), None)
        if unmet is not None:
            yield key, (unmet, unmet.reason(value_of(whole, unmet.key)))
        elif isinstance(value, BaseModel):
            yield from _unused(value, whole, f"{key}.")


@lru_cache(maxsize=256)  # as `options_model`, whose types these are
def _fields(model: type[BaseModel]) -> list[tuple[str, object, list[Condition]]]:
    """(name, default, conditions) of each option."""
    named = model.model_fields.items()
    conditions = {name: [part for part in field.metadata if isinstance(part, Condition)] for name, field in named}
    return [(name, field.get_default(call_default_factory=True), conditions[name]) for name, field in named]


def _is_met(condition: Condition, whole: BaseModel, value: object) -> bool:
    return any(each.is_met(value_of(whole, each.key), value) for each in (condition, *condition.others))


def value_of(model: object, key: str) -> object:
    """The value at a dotted key, as a file has it; None where a group on the way is null."""
    return as_written(reduce(lambda group, name: getattr(group, name, None), key.split("."), model))


def has_effect(key: str, settings: Raw, model: BaseModel) -> bool:
    """Return whether the option at a dotted key of a whole configuration applies with the given settings (dotted keys).

    If the settings lack the deciding key, the option applies.
    """
    group, _, name = key.rpartition(".")
    owner = value_of(model, group) if group else model
    field = type(owner).model_fields.get(name) if isinstance(owner, BaseModel) else None
    return all(
        any(each.key not in settings or each.is_met(settings[each.key], settings[key]) for each in (part, *part.others))
        for part in (field.metadata if field else ())
        if isinstance(part, Condition)
    )


def unused_faults(model: BaseModel, prefix: str = "", tune: object = None) -> list[Fault]:
    """Return a fault for each of `unused_options`, except options decided by an axis of `tune`: trials check these."""
    axes = list(mappings(tune))
    return [
        Fault(key, f"{reason}; remove the key, or change {condition.key}")
        for key, (condition, reason) in unused_options(model, prefix).items()
        if not any(sets(axis, each.key) for axis in axes for each in (condition, *condition.others))
    ]


def left_unused(raw: Raw, model: type[BaseModel], layers: Sequence[Raw]) -> dict[str, str]:
    """Return key -> reason of settings that lose their effect through another layer.

    If one layer sets both the option and the deciding key, the layer contradicts itself: this is a fault, and is not
    returned here. Options decided by an axis of `tune` are checked trial by trial.

    Args:
      raw: the merged layers; model: the schema of `raw`.
      layers: settings by dotted keys, the uppermost first; the lowest, which may hold groups, is the last.
    """
    try:
        config = model.model_validate(raw)
    except ValidationError:  # reported by the check of the whole configuration
        return {}
    unused = unused_options(config)
    axes = list(mappings(raw.get("tune")))
    return {
        key: reason
        for key, (condition, reason) in unused.items()
        if _layer(layers, key) != _layer(layers, condition.key) and not any(sets(axis, condition.key) for axis in axes)
    }


def mappings(value: object) -> Iterator[Raw]:
    """Yield a value and all mappings inside it."""
    if isinstance(value, Mapping):
        yield value
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    for part in inside:
        yield from mappings(part)


def _layer(layers: Sequence[Raw], key: str) -> int:
    """Return the uppermost layer that sets a dotted key, else the lowest, which stands for the defaults."""
    return next((place for place, settings in enumerate(layers) if sets(settings, key)), len(layers) - 1)


def sets(settings: Raw, key: str) -> bool:
    """Whether settings, dotted or in groups, contain a key or a part of it."""
    for name, value in settings.items():
        path = str(name)
        if path == key or path.startswith(f"{key}."):
            return True
        if key.startswith(f"{path}.") and isinstance(value, Mapping) and sets(value, key.removeprefix(f"{path}.")):
            return True
    return False


def value_at(raw: object, key: str, default: object = None) -> object:
    """Return the value of a raw configuration at a dotted key ("name.option" in a list of names); else the default."""
    for name in key.split("."):
        if isinstance(raw, list):
            named = [each for each in raw if each == name or (isinstance(each, Mapping) and list(each) == [name])]
            raw = {name: None if isinstance(named[0], str) else named[0][name]} if named else {}
        if not isinstance(raw, Mapping) or name not in raw:
            return default
        raw = raw[name]
    return raw


def remove(raw: Settings, keys: Iterable[str]) -> None:
    """Take dotted keys out of a raw configuration, in place."""
    for key in keys:
        parents, _, last = key.rpartition(".")
        group = value_at(raw, parents) if parents else raw
        if isinstance(group, dict):
            group.pop(last, None)
