"""Two axes of a sweep that set one key: the later one wins, and what that costs is refused or told."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from raysim.base.errors import ConfigError, Fault
from raysim.base.settings import Raw
from raysim.config import sweep
from raysim.config.faults import validated
from raysim.config.labels import Unknown, alike, effective, labels_of, labels_text, lost_keys, values_of
from raysim.config.schema import Config


class _Choice(NamedTuple):
    """What a trial may choose on an axis: a label or a value, and the settings that it stands for."""

    value: object
    settings: Raw


def clashes(raw: Raw, source: str) -> tuple[list[Fault], list[str]]:
    """What two axes of a sweep do to each other where both set one key.

    Returns:
      (faults: an axis that loses its own values, or labels that are one run with a label of a later axis; what else loses, in
      lines).
    """
    faults: list[Fault] = []
    lines = []
    axes = list(sweep.axes(raw, source))
    for place, later in enumerate(axes):
        for earlier in axes[:place]:
            lost: dict[str, dict[str, None]] = {}
            pair_faults: list[Fault] = []
            for winner, rivals in _meetings(raw, earlier, later):
                keys = [lost_keys(rival.settings, winner.settings) for rival in rivals]
                if any(keys):
                    pair_faults += _faults(raw, earlier, later, winner, rivals, keys, source)
                for rival, each in zip(rivals, keys, strict=True):
                    for key in each:
                        lost.setdefault(key, {})[str(rival.value)] = None
            faults += pair_faults[:1]
            if lost and not pair_faults:
                texts = "; ".join(f"{key} of {labels_text(list(labels))}" for key, labels in lost.items())
                lines.append(f"the axis {later} overrides what the axis {earlier} sets: {texts}")
    return faults, lines


def _choices(raw: Raw, axis: str) -> list[_Choice]:
    """All choices of an axis; one that stands for all where they are drawn."""
    named, values = labels_of(raw, axis), values_of(raw, axis)
    if named:
        return [_Choice(label, named[label] or {}) for label in values]
    return [_Choice(value, {axis: value}) for value in values] or [_Choice(None, {axis: Unknown})]


def _meetings(raw: Raw, earlier: str, later: str) -> Iterator[tuple[_Choice, list[_Choice]]]:
    """Each choice of the later axis, with those of the earlier one that some trial has beside it."""
    both = {axis: _choices(raw, axis) for axis in (earlier, later)}

    def groups(axis: str) -> set[str]:
        return {sweep.head(key).removesuffix("+") for each in both[axis] for key in each.settings}

    if groups(earlier).isdisjoint(groups(later)):
        return
    only = raw["tune"].get("only") or {}
    axes = dict.fromkeys([earlier, later, *(only.get(earlier) or {}), *(only.get(later) or {})])
    points = sweep.combinations(raw, {axis: [each.value for each in _choices(raw, axis)] for axis in axes})
    met = {(repr(point[earlier]), repr(point[later])) for point in points if earlier in point and later in point}
    for winner in both[later]:
        yield winner, [rival for rival in both[earlier] if (repr(rival.value), repr(winner.value)) in met]


def _faults(
    raw: Raw,
    earlier: str,
    later: str,
    winner: _Choice,
    rivals: Sequence[_Choice],
    keys: Sequence[Sequence[str]],
    source: str,
) -> Iterator[Fault]:
    name = later if winner.value is None else f"{winner.value} of the axis {later}"
    remedy = "choose other labels, or tie one axis to labels of the other with tune.only"
    if not labels_of(raw, earlier) and any(earlier in each for each in keys):
        yield Fault(sweep.key_of(raw, earlier), f"its values lose to {name}, which sets {earlier}; {remedy}")
        return
    before = {place: effective(raw, [rival.settings], source) for place, rival in enumerate(rivals)}
    after = {place: effective(raw, [rival.settings, winner.settings], source) for place, rival in enumerate(rivals)}
    for one, other in alike(before, after):
        sets = ", ".join(dict.fromkeys([*keys[one], *keys[other]]))
        text = f"{rivals[one].value} and {rivals[other].value} are the same run with {name}, which sets {sets}"
        yield Fault(sweep.key_of(raw, earlier), f"{text}; {remedy}")


def library_faults(raw: Raw) -> Iterator[Fault]:
    """What is wrong with labels of `tune.settings` that no trial takes: keys that are none, values of another kind."""
    base = {key: value for key, value in raw.items() if key not in sweep.GROUPS}
    of_the_base = {fault.key for fault in validated(Config, base)[1]}
    for axis, labels in ((raw.get("tune") or {}).get("settings") or {}).items():
        taken = values_of(raw, str(axis))
        for label, settings in labels.items():
            if label in taken:
                continue
            place = f"tune.settings.{axis}.{label}"
            if of_sweep := [key for key in settings if sweep.head(key) in sweep.OF_THE_SWEEP]:
                yield Fault(place, f"sets {of_sweep[0]}, which is the sweep's own; drop it")
                continue
            probe = copy.deepcopy(base)
            try:
                sweep.set_all(probe, settings, place, "")
            except ConfigError:  # it may need the methods of another label
                continue
            _, wrong = validated(Config, probe)
            yield from (Fault(f"{place}.{each.key}", each.message) for each in wrong if each.key not in of_the_base)
