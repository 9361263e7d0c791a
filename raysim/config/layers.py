"""What overrides what: the command line, `scale`, labels of axes, the file, its base, the defaults.

A layer is laid over the file and over what every label of an axis stands for, so that no label takes it back. What comes out is a
configuration like any other; no trial has to know where its values come from. What loses is told in a line.
"""

from __future__ import annotations

import copy
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from raysim.base.errors import ConfigError, Fault, refuse
from raysim.base.progress import Tell, silent
from raysim.base.settings import Raw, Settings, assign
from raysim.config import sweep
from raysim.config.counting import value_at
from raysim.config.faults import nearest
from raysim.config.labels import alike, below, effective, labels_of, labels_text, laid, lost_keys, values_of
from raysim.config.reading import lay_over, settled
from raysim.config.sweep import head


def layered(
    raw: Raw,
    values: Mapping[str, object],
    source: str,
    *,
    axes: Mapping[str, Sequence[object]] | None = None,
    is_scaled: bool = False,
    where: str = "the command line",
    tell: Tell = silent,
) -> Settings:
    """A file's configuration with `scale`, where asked for, and then with the settings of one call laid over it.

    Args:
      values: by dotted keys. A key that is an axis leaves one value of it, or one label.
      axes: axis -> its values, or labels of it.
      where: what the values come from, for messages.
      tell: hears what keys of labels and of `scale` lose.
    Raises:
      ConfigError: a value that cannot be set; one that makes two labels of an axis the same run; an axis without a say.
    """
    if odd := [key for key in values if not isinstance(key, str)]:
        raise ConfigError([Fault(str(key), "must be text; write keys such as local.lr") for key in odd], where)
    first = [key for key, value in values.items() if head(key) == "scale" or (key == "tune" and value is None)]
    before_scale = {key: values[key] for key in first}
    file = copy.deepcopy(dict(raw))
    lay_over(file, before_scale, source, where=where)
    file = sweep.without_null_sweep(file)
    shrunk = scaled(file, source, tell) if is_scaled else copy.deepcopy(file)
    others = {key: value for key, value in values.items() if key not in before_scale}
    of_sweep = {key: value for key, value in others.items() if head(key) in sweep.OF_THE_SWEEP}
    lay_over(shrunk, of_sweep, source, where=where)
    library = _all_labels(file, source, is_scaled=is_scaled)
    axes_there = {**sweep.axes_as_written(library), **sweep.axes_as_written(shrunk)}
    of_trials = {key: value for key, value in others.items() if key not in of_sweep}
    chosen: dict[str, Sequence[object]] = {}
    for axis in [key for key in of_trials if key in axes_there]:
        chosen[axis] = _as_list(library, shrunk, axis, of_trials.pop(axis))
    chosen |= axes or {}
    for axis, choices in chosen.items():
        _choose(shrunk, library, axis, choices, where)
    _check_only(shrunk, library, chosen, source, tell)
    given = {*chosen, *(key.split(".", 2)[2] for key in of_sweep if key.startswith(sweep.AXES))}
    if stale := _drop_labels_of(shrunk, file, [*chosen, *of_trials]):
        tell(f"{where} sets {', '.join(stale)}: the file's label of the same name is left out")
    losses = lay_through(shrunk, of_trials, source, where=where, given=given)
    if is_scaled and (keys := [key for key in lost_keys(file["scale"], of_trials) if head(key) != "tune"]):
        tell(f"{where} overrides {', '.join(keys)} of `scale`")
    if losses:
        lost = "; ".join(f"{key} of {labels_text(labels)}" for key, labels in losses.items())
        tell(f"{where} overrides what labels set: {lost}")
    return settled(shrunk, [of_trials, *([file["scale"]] if is_scaled else []), file])


def _drop_labels_of(raw: Settings, file: Raw, keys: Sequence[str]) -> list[str]:
    """Leave out labels that name the values which the file had for these keys; returns the keys that had one."""
    labels = raw.get("labels")
    if not isinstance(labels, dict):
        return []
    names = {key: key.rpartition(".")[2] for key in keys if head(key) != "labels"}
    names = {key: name for key, name in names.items() if not {"labels", f"labels.{name}"} & {*keys}}
    stale = [key for key, name in names.items() if name in labels and labels[name] == value_at(file, key)]
    for key in stale:
        labels.pop(names[key], None)
    return stale


def scaled(raw: Raw, source: str, tell: Tell = silent) -> Settings:
    """The configuration with its `scale` settings laid over it; its `tune` group may be shrunk by them, too.

    A name gets the ending `_scaled`, unless `scale` sets one: the full run is another one.

    Raises:
      ConfigError: there is no `scale` group, or one of its keys cannot be set.
    """
    settings = raw.get("scale")
    if not isinstance(settings, Mapping) or not settings:
        raise ConfigError([Fault("scale", "is missing; add a group of settings that shrink this run")], source)
    result = copy.deepcopy(dict(raw))
    name = raw.get("name") or (Path(source).stem if sweep.axes_as_written(raw) else None)
    if isinstance(name, str) and not name.endswith(sweep.SCALED):
        result["name"] = f"{name}{sweep.SCALED}"
    of_sweep = {key: value for key, value in settings.items() if head(key) in sweep.OF_THE_SWEEP}
    sweep.set_all(result, of_sweep, "scale", source)
    of_trials = {str(key): value for key, value in settings.items() if key not in of_sweep}
    for axis in [key for key in of_trials if key in sweep.axes_as_written(result)]:
        _choose(result, result, axis, _as_list(result, result, axis, of_trials.pop(axis)), f"`scale` of {source}")
    if losses := lay_through(result, of_trials, source, where=f"`scale` of {source}", prefix="scale."):
        tell(f"`scale` overrides what labels set: {', '.join(losses)}")
    return result


def lay_through(
    raw: Settings,
    values: Mapping[str, object],
    source: str,
    *,
    where: str,
    prefix: str = "",
    given: Collection[str] = (),
) -> dict[str, list[str]]:
    """Set values by dotted keys in a configuration and in what all labels stand for, in place.

    Args:
      prefix: "scale." for the settings of `scale`.
      given: axes that come from where the values come from; their values stay.
    Returns:
      key -> labels of the sweep's axes that set it otherwise.
    Raises:
      ConfigError: a key leads through a value, or lists no such name anywhere; two labels become the same run, which `scale` may
      do; or a group is set whole of which an axis sets a key.
    """
    if not values:
        return {}
    before = copy.deepcopy(raw)
    faults: list[Fault] = []
    losses: dict[str, list[str]] = {}
    takers: set[str] = set()
    for axis, label, holder, key in _label_places(raw):
        settings = holder[key]
        if not isinstance(settings, Mapping):
            continue  # a fault, told later
        holder[key], taken = laid(settings, values)
        takers |= taken
        if axis is not None:
            for lost in lost_keys(settings, values):
                losses.setdefault(lost, []).append(label)
    for axis, domain in sweep.axes_as_written(raw).items():
        if (key := next((group for group in values if below(axis, group)), "")) and axis not in given:
            text = f"is set whole, but {axis} inside it is an axis; set its other keys one by one, or {axis} as well"
            faults.append(Fault(f"{prefix}{key}", text))
        elif inner := {key: value for key, value in values.items() if below(key, axis)}:
            takers |= _lay_into_values(raw, axis, domain, inner, faults, prefix)
    _lay_over_file(raw, values, takers, source, where=where, prefix=prefix)
    if not prefix:  # a scaled sweep may run one thing under two labels: it shows that both work
        faults += [Fault(keys, text) for keys, text in _same_runs(before, raw, values, source)]
    refuse(faults, where)
    return losses


def _lay_over_file(
    raw: Settings, values: Mapping[str, object], takers: set[str], source: str, *, where: str, prefix: str
) -> None:
    """An option of a method counts where the method is listed: in the file, or in labels alone."""
    for key, value in values.items():
        if key.startswith("methods.") and raw.get("methods") is None:
            raw["methods"] = []
        try:
            assign(raw, key, value)
        except KeyError as error:
            if key not in takers:
                text = f"cannot be set: {error.args[0]}" if prefix else f"{error.args[0]} in {source}"
                raise ConfigError([Fault(f"{prefix}{key}", text)], where) from error


def _label_places(raw: Settings) -> Iterator[tuple[str | None, str, dict[Any, Any], Any]]:
    """(axis, or None where the sweep does not take the label; its label; the mapping that holds its settings, and their key)."""
    seen: set[int] = set()
    named = value_at(raw, "tune.settings")
    places = [(axis, labels_of(raw, axis)) for axis in sweep.axes_as_written(raw)]
    for axis, labels in [*places, *(named.items() if isinstance(named, dict) else ())]:
        if isinstance(labels, dict) and id(labels) not in seen:
            seen.add(id(labels))
            taken = values_of(raw, axis)
            for label in list(labels):
                yield axis if label in taken else None, str(label), labels, label


def _lay_into_values(
    raw: Settings, axis: str, domain: object, inner: Mapping[str, object], faults: list[Fault], prefix: str
) -> set[str]:
    """Set keys below an axis in each of its values, in place; returns those that were set somewhere."""
    if not isinstance(domain, dict) or sweep.named_settings(raw, axis, domain) is not None:
        return set()
    if not sweep.is_listed(domain):
        text = f"lies below the axis {axis}, whose values are drawn; drop it"
        faults += [Fault(f"{prefix}{key}", text) for key in inner]
        return set()
    takers: set[str] = set()
    values, before = [], sweep.options(domain)
    for value in before:
        settings, taken = laid({axis: value}, inner)
        takers |= taken
        probe: Settings = {}
        sweep.set_all(probe, {"value": settings.pop(axis)}, axis, "")
        sweep.set_all(probe, {f"value{key.removeprefix(axis)}": each for key, each in settings.items()}, axis, "")
        values.append(probe["value"])
    pairs = enumerate(zip(before, values, strict=True))
    repeated = [new for index, (old, new) in pairs if new in values[:index] and old not in before[:index]]
    if repeated:
        text = f"makes two values of the axis {axis} the same run, {repeated[0]}; choose one of them, as {axis}=VALUE"
        faults.append(Fault(f"{prefix}{', '.join(inner)}", text))
    domain[next(iter(domain))] = values
    return takers


def _same_runs(before: Raw, after: Raw, values: Mapping[str, object], source: str) -> Iterator[tuple[str, str]]:
    """(keys, sentence) for each two labels of an axis that were two runs before and are one after."""
    for axis in sweep.axes_as_written(after):
        new, old = labels_of(after, axis), labels_of(before, axis)
        taken = [label for label in values_of(after, axis) if label in new and label in old] if new and old else []
        if all(new[label] == old[label] for label in taken):
            continue
        runs_after = {label: effective(after, [new[label]], source) for label in taken}
        runs_before = {label: effective(before, [old[label]], source) for label in taken}
        for one, other in alike(runs_before, runs_after):
            keys = dict.fromkeys(key for label in (one, other) for key in lost_keys(old[label] or {}, values))
            remedy = f"choose one of them, as {shlex.quote(f'{axis}={one}')}"
            text = f"leaves the labels {one} and {other} of the axis {axis} the same run; {remedy}"
            yield ", ".join(keys), text


# --- labels and values of axes, chosen by the call --------------------------------------------------------------------


def labels_of_axes(raw: Raw, source: str, *, is_scaled: bool) -> dict[str, list[Any]]:
    """Axis -> the labels that it may be given, those of the file and those of `scale`; none where it has plain values."""
    both = [raw, scaled(raw, source)] if is_scaled else [raw]
    all_axes = dict.fromkeys(axis for each in both for axis in sweep.axes_as_written(each))
    return {axis: list(dict.fromkeys(label for each in both for label in labels_of(each, axis))) for axis in all_axes}


def _all_labels(raw: Raw, source: str, *, is_scaled: bool) -> Raw:
    """The file before `scale` has narrowed its axes, with the other settings of `scale`."""
    if not is_scaled:
        return raw
    kept = {key: value for key, value in raw["scale"].items() if head(key) not in sweep.OF_THE_SWEEP}
    return scaled({**raw, "scale": kept}, source) if kept else raw


def _as_list(library: Raw, shrunk: Raw, axis: str, value: object) -> list[object]:
    """What is chosen by `axis=value`: one value; of labels, several in a list."""
    has_labels = labels_of(library, axis) or labels_of(shrunk, axis)
    return list(value) if has_labels and isinstance(value, list) else [value]


def _choose(raw: Settings, library: Raw, axis: str, choices: Sequence[object], where: str) -> None:
    """Leave these labels or values of an axis, in place; one that the file does not have is made."""
    kind = "choice" if value_at(raw, "tune.search") == "optuna" else "grid_search"
    named = {**labels_of(library, axis), **labels_of(raw, axis)}
    values: object = list(choices)
    if named:
        labels = {str(label): label for label in named}
        unknown = [str(choice) for choice in choices if str(choice) not in labels]
        if unknown:
            faults = [Fault(axis, f"has no label {each!r}. {nearest(str(each), list(labels))}") for each in unknown]
            raise ConfigError(faults, where)
        values = {labels[str(choice)]: named[labels[str(choice)]] for choice in choices}
    place = sweep.key_of(raw, axis) if axis in sweep.axes_as_written(raw) else f"tune.param_space.{axis}"
    lay_over(raw, {place: {kind: values}}, where, where=where)


def _check_only(raw: Raw, library: Raw, chosen: Mapping[str, object], source: str, tell: Tell) -> None:
    """Refuse conditions of `tune.only` that no label fulfils; tell which axes are left out as their labels were not chosen."""
    only = value_at(raw, "tune.only")
    if not isinstance(only, Mapping):
        return
    faults = []
    for axis, conditions in only.items():
        for other, labels in conditions.items() if isinstance(conditions, Mapping) else ():
            taken, possible = values_of(raw, other), [*values_of(library, other), *labels_of(library, other)]
            if not isinstance(labels, list) or not taken:
                continue
            unknown = [label for label in labels if label not in possible and label not in taken]
            names = list(dict.fromkeys(map(str, [*possible, *taken])))
            texts = (f"{other} has no label {each!r}. {nearest(str(each), names)}" for each in unknown)
            faults += [Fault(f"tune.only.{axis}", text) for text in texts]
            if not unknown and not any(label in taken for label in labels) and axis in sweep.axes_as_written(raw):
                text = f"counts with {labels_text(labels)} of {other} alone, which this sweep does not have"
                if axis in chosen:
                    faults.append(Fault(str(axis), f"{text}; drop it, or choose that label as well"))
                else:
                    tell(f"the axis {axis} is left out: it {text}")
    refuse(faults, source)
