"""Settings read from YAML or JSON files: types and access."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Keys and values that are only read.
Raw = Mapping[str, Any]

#: Keys and values as a file holds them, before they are checked or after they are written back.
Settings = dict[str, Any]


#: Largest depth of nested groups.
MOST_DEPTH = 50


def leaves(value: object, key: str = "", depth: int = 0) -> Iterator[tuple[str, object]]:
    """(dotted key, value) of every value that is neither a group nor a list, and of every key of a group.

    Raises:
      RecursionError: more than MOST_DEPTH groups and lists lie inside each other.
    """
    if depth > MOST_DEPTH:
        raise RecursionError
    if isinstance(value, Mapping):
        for name, each in value.items():
            inner = f"{key}.{name}" if key else str(name)
            yield inner, name
            yield from leaves(each, inner, depth + 1)
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from leaves(each, f"{key}[{index}]", depth + 1)
    else:
        yield key, value


@dataclass(frozen=True, eq=False)
class Spec:
    """A name with options, which a configuration writes as `name` or as `{name: {option: value}}`.

    A Spec equals a Spec of the same written form, and this form itself: defaults of the schema are written forms.
    """

    name: str
    options: Settings
    written: object

    @classmethod
    def of(cls, written: object) -> Spec:
        """Parse a written form. Raises ValueError: a value of neither form."""
        ((name, options),) = written.items() if isinstance(written, dict) and len(written) == 1 else [(written, None)]
        if not isinstance(name, str) or not isinstance(options, Mapping | None):
            raise ValueError("must be a name or {name: {option: value}}")
        return cls(name, dict(options or {}), written)

    def __eq__(self, other: object) -> bool:
        return self.written == as_written(other)


def as_written(value: object) -> object:
    """Return a value of a configuration as a file has it: written forms in place of Specs, also in a list."""
    return [as_written(each) for each in value] if isinstance(value, list) else getattr(value, "written", value)


def flatten(config: Raw, prefix: str = "") -> Settings:
    """A nested mapping by dotted keys."""
    flat: Settings = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat


def differing(mappings: Sequence[Raw]) -> list[str]:
    """Return keys whose values differ between mappings, in order of first appearance."""
    keys = dict.fromkeys(key for mapping in mappings for key in mapping)
    return [key for key in keys if len({repr(mapping.get(key)) for mapping in mappings}) > 1]


def assign(raw: Settings, key: str, value: object) -> None:
    """raw[a][b] = value for the key "a.b"; groups on the way are made, also in place of null.

    In a list of `name` and `{name: {option: value}}`, such as `methods`, a name stands for its options: "methods.fedvg.norm".
    A + behind the key adds to a list, "methods+", so that two axes of a sweep can add to the same list.
    After `tune.param_space.` comes an axis, after `scale.` a key, whose own name may hold dots.
    Raises:
      KeyError: a part of the path is a value instead of a group, or is not in its list; or + is used without two lists. The
        argument of the error is a sentence.
    """
    is_axis = key.startswith(("tune.param_space.", "scale."))
    *parents, last = key.split(".", 1 if key.startswith("scale.") else 2) if is_axis else key.split(".")
    group: object = raw
    holder = raw
    for depth, name in enumerate([*parents, last]):
        place = ".".join(parents[:depth])
        next_holder = _holder(group, name)
        if next_holder is None:
            raise KeyError(
                f"{place} lists no {name!r}" if isinstance(group, list) else f"{place} is not a group of keys"
            )
        holder = next_holder
        if depth < len(parents):
            if holder.get(name) is None:
                holder[name] = {}
            group = holder[name]
    value = copy.deepcopy(value)
    if last.endswith("+") and not is_axis:
        last = last.removesuffix("+")
        before = holder.get(last) or []
        if not isinstance(before, list) or not isinstance(value, list):
            raise KeyError(f"adds a list to a list, got {before!r} + {value!r}")
        value = [*before, *value]
    holder[last] = value


def _holder(group: object, name: str) -> Settings | None:
    """Return the mapping with a name: the group, or the named entry of a list with options; None if missing."""
    if isinstance(group, dict):
        return group
    if isinstance(group, list):
        for place, entry in enumerate(group):
            if entry == name or (isinstance(entry, dict) and list(entry) == [name]):
                options = entry[name] if isinstance(entry, dict) else None
                named: Settings = {name: dict(options or {})}  # a copy: YAML's aliases share what they stand for
                group[place] = named
                return named
    return None
