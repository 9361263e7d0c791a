"""The one name of what comes out of a YAML or JSON file, where anything may stand."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

#: The same, to be read only.
Raw = Mapping[str, Any]

#: Keys and values as a file holds them, before they are checked or after they are written back.
Settings = dict[str, Any]


def name_and_options(spec: object) -> tuple[str, Settings]:
    """(name, options) of what a configuration writes as `name` or as `{name: {option: value}}`.

    Raises:
      ValueError: it is neither.
    """
    name, options = next(iter(spec.items())) if isinstance(spec, Mapping) and len(spec) == 1 else (spec, None)
    if not isinstance(name, str) or not isinstance(options, Mapping | None):
        raise ValueError(f"must be a name or {{name: {{option: value}}}}, got {spec!r}")
    return name, dict(options or {})


def assign(raw: Settings, key: str, value: object) -> None:
    """raw[a][b] = value for the key "a.b"; groups on the way are made.

    After `tune.param_space.` and `tune.space.` comes an axis, whose own name may hold dots.
    Raises:
      KeyError: something on the way is a value, not a group; holds its path.
    """
    is_axis = key.startswith(("tune.param_space.", "tune.space."))
    *parents, last = key.split(".", 2) if is_axis else key.split(".")
    group = raw
    for depth, parent in enumerate(parents):
        group = group.setdefault(parent, {})
        if not isinstance(group, dict):
            raise KeyError(".".join(parents[: depth + 1]))
    group[last] = copy.deepcopy(value)
