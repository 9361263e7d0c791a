"""The one name of what comes out of a YAML or JSON file, where anything may stand."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

#: The same, to be read only.
Raw = Mapping[str, Any]

#: Keys and values as a file holds them, before they are checked or after they are written back.
Settings = dict[str, Any]


def assign(raw: Settings, key: str, value: object) -> None:
    """raw[a][b] = value for the key "a.b"; groups on the way are made.

    After `tune.param_space.` comes an axis, whose own name may hold dots.
    Raises:
      KeyError: something on the way is a value, not a group; holds its path.
    """
    head, space, axis = key.partition("tune.param_space.")
    *parents, last = ["tune", "param_space", axis] if space and not head else key.split(".")
    group = raw
    for depth, parent in enumerate(parents):
        group = group.setdefault(parent, {})
        if not isinstance(group, dict):
            raise KeyError(".".join(parents[: depth + 1]))
    group[last] = copy.deepcopy(value)
