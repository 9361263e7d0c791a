"""Settings by dotted keys over other such settings, as those of labels: what of them stays, and what is lost."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from raysim.base.errors import ConfigError
from raysim.base.settings import Raw, Settings, assign
from raysim.config import sweep
from raysim.config.counting import value_at

#: Labels that a line names; more are counted.
MOST_LABELS = 3


class Unknown:
    """Itself stands for a value that is not known yet, as one that is drawn, or for none; a copy of it is the same."""


def below(key: str, group: str) -> bool:
    """Whether a dotted key lies inside a group."""
    return key.startswith(f"{group}.")


def laid(settings: Raw, values: Mapping[str, object]) -> tuple[Settings, set[str]]:
    """(settings that, laid over a configuration which has the values, leave them as they are; which values these now hold).

    Settings that a value replaces are dropped. A value inside a group that the settings set whole is set again behind it.
    """
    result = {str(key): value for key, value in settings.items()}
    taken = set()
    for key, value in values.items():
        name, adds = key.removesuffix("+"), key.endswith("+")
        for other in list(result):
            plain = other.removesuffix("+")
            if not adds and (plain == name or below(plain, name)):
                del result[other]
        groups = [other for other in result if below(name, other.removesuffix("+")) or (adds and other == name)]
        if not groups:
            continue
        probe: Settings = {}
        with suppress(KeyError):  # a list that has no such name: the option of a method that is not there
            for group in groups:
                assign(probe, group, result[group])
            assign(probe, key, value)
            earlier = result.pop(key, None)
            result[key] = [*(earlier or []), *value] if adds and isinstance(value, list) else value
            taken.add(key)
    return result, taken


def lost_keys(settings: Raw, values: Mapping[str, object]) -> list[str]:
    """Keys of settings that are otherwise where the values are laid over them; without those of labels."""
    keys: dict[str, None] = {}
    for written, value in settings.items():
        plain = str(written).removesuffix("+")
        if plain.partition(".")[0] == "labels":
            continue
        for key, new in values.items():
            if key.endswith("+"):
                continue
            if plain == key or below(plain, key):
                if (new if plain == key else value_at(new, plain.removeprefix(f"{key}."), Unknown)) != value:
                    keys[plain] = None
            elif below(key, plain) and value_at(value, key.removeprefix(f"{plain}."), Unknown) not in (Unknown, new):
                keys[key] = None
    return list(keys)


def effective(raw: Raw, layers: Sequence[object], source: str) -> object:
    """What a trial runs that has these settings, one over the other: its configuration without labels."""
    probe = {key: copy.deepcopy(value) for key, value in raw.items() if key not in (*sweep.GROUPS, "labels")}
    try:
        for settings in layers:
            sweep.set_all(probe, settings or {}, "", source)
    except ConfigError:  # what plans the trial says what is wrong
        groups = (each for each in layers if isinstance(each, Mapping))
        return [{key: value for key, value in each.items() if sweep.head(key) != "labels"} for each in groups]
    probe.pop("labels", None)
    return probe


def alike(before: Mapping[Any, object], after: Mapping[Any, object]) -> list[tuple[Any, Any]]:
    """The pairs of labels that make the same run after, and did not before. Both: label -> what it runs."""
    labels = list(after)
    return [
        (one, other)
        for index, other in enumerate(labels)
        for one in labels[:index]
        if after[one] == after[other] and before[one] != before[other]
    ]


# --- labels of an axis ------------------------------------------------------------------------------------------------


def labels_of(raw: Raw, axis: str) -> Mapping[Any, Any]:
    """Label -> settings of an axis that has labels, all that the file knows; empty for other axes."""
    named = sweep.named_settings(raw, axis, _domain(raw, axis))
    return named if isinstance(named, Mapping) else {}


def values_of(raw: Raw, axis: str) -> list[Any]:
    """The labels or values that an axis chooses from; empty if they are drawn, or there is no such axis."""
    domain = _domain(raw, axis)
    return sweep.options(domain) if sweep.is_listed(domain) else []


def _domain(raw: Raw, axis: str) -> Raw:
    """The domain of an axis; empty where there is none, or what is no domain."""
    domain = sweep.axes_as_written(raw).get(axis)
    return domain if isinstance(domain, Mapping) and len(domain) == 1 else {}


def labels_text(labels: Sequence[object]) -> str:
    """ "FedAvg, FedProx, MOON and 2 more"."""
    shown = ", ".join(map(str, labels[:MOST_LABELS]))
    return f"{shown} and {len(labels) - MOST_LABELS} more" if len(labels) > MOST_LABELS else shown
