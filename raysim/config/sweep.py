"""Sweeps as data: a configuration file with a `tune` group becomes one plain configuration per trial.

Pure dictionaries, no Ray: `raysim tune` runs them on Ray Tune, tests and recipes expand them here.

    tune:
      search: random                                  # how ranges are drawn: random, sobol (evenly), optuna (it learns)
      num_samples: 20
      param_space:                                    # axes: a key of the configuration, or a name, and a domain
        local.lr: {log_uniform: [1e-3, 1e-1]}         # a range, drawn: uniform, randint, lograndint, with _ or without
        local.momentum: {choice: [0, 0.9]}
        seed: {grid_search: [0, 1, 2]}                # a list: every combination, num_samples times
        method:                                       # a name of your own: each label stands for settings
          grid_search:
            FedAvg: {methods: []}
            FedVG: {methods: [fedvg]}
        case: {grid_search: [small, large]}           # labels, too, where tune.settings.case says what they stand for
      settings:
        case: {small: {model.name: mlp}, large: {model: {name: cnn, width: 64}}}
      only:
        local.lr: {method: [FedAvg]}                  # an axis that applies with the listed labels only
    scale: {rounds: 2, data.name: digits}             # overrides for every trial (or run) with --scaled

A key of a mapping of settings (`a.b: value`) replaces the whole value at this path, as `a.b=value` on the command line
does. The choices of a trial are written to its `labels`, from which `raysim report` makes rows and columns. If settings
write `labels.x` themselves, the axis adds no label. The search `optuna` chooses among values itself and takes no
grid_search.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raysim.base.errors import ConfigError, Fault, refuse
from raysim.base.settings import Raw, Settings
from raysim.config.effects import left_unused, remove, sets, value_at
from raysim.config.method_lists import methods_text
from raysim.config.reading import set_keys
from raysim.config.schema import Config

#: Domains whose values can be listed; the others (uniform, loguniform, randint ...) are drawn by Ray Tune.
LISTED = ("grid_search", "choice")

#: Where a file has its axes.
SPACE = "tune.param_space"

#: Keys of the sweep itself: no trial has its own.
OF_THE_SWEEP = ("name", "storage", "base", "tune", "scale", "report", "calibrate")

#: Groups of the sweep itself, which a trial's configuration does not have.
GROUPS = ("tune", "scale", "report")

#: Ending of the name of a scaled run or sweep.
SCALED = "_scaled"


@dataclass(frozen=True)
class Trial:
    """One configuration of a sweep.

    Attributes:
      values: axis -> chosen label or value.
      unused: key -> reason, of settings that have no effect in this trial and are left out.
      text: all settings but labels, those without effect among them; two trials with equal text differ in labels alone.
    """

    name: str
    values: dict[str, object]
    raw: Settings
    unused: Mapping[str, str] = field(default_factory=dict)
    text: str = ""


def trial(raw: Raw, values: Raw, source: str) -> Trial:
    """The configuration of one trial.

    Args:
      raw: with a `tune` group.
      values: axis -> its label (named settings) or its value.
    Raises:
      ConfigError: a setting that cannot be set, or the value of an axis that another layer overrides.
    """
    space = axes(raw, source)
    result = copy.deepcopy(without_keys(raw, GROUPS))
    labels: dict[str, object] = {}
    layers: list[tuple[str, Raw]] = [("the file", raw)]  # the uppermost first
    for axis, value in values.items():
        settings = _settings_of(raw, axis, value, space)
        set_all(result, settings, key_of(axis), source)
        layers.insert(0, (f"{axis}={value}", settings))
        if not any(head(key) == "labels" for key in settings):
            name, label = _as_label(axis, value, space)
            labels[name] = label
    unused = {}
    for key, value in as_mapping(raw["tune"].get("fixed")).items():
        if key.startswith("methods.") and may_need_labels(result, key):
            unused[key] = f"is an option of {key.split('.')[1]}, which `methods` does not list"
            continue
        set_all(result, {key: value}, "tune.fixed", source)
        layers.insert(0, (f"{key}={value}", {key: value}))
    refuse(_overridden(values, result, layers), source)
    result["labels"] = {**labels, **(result.get("labels") or {})}
    settings_text = json.dumps(without_keys(result, ("labels",)), sort_keys=True, default=str)
    unused |= left_unused(result, Config, [settings for _, settings in layers])
    remove(result, unused)
    return Trial(trial_name(values, space), dict(values), result, unused, settings_text)


def _settings_of(raw: Raw, axis: str, value: object, space: Mapping[str, Raw]) -> Settings:
    """Return the settings of an axis for a label or value."""
    named = named_settings(raw, axis, space[axis])
    return {axis: value} if named is None else named[value] or {}


def _overridden(values: Raw, result: Raw, layers: Sequence[tuple[str, Raw]]) -> Iterator[Fault]:
    """Yield a fault for each value of an axis that another layer overrides in the trial."""
    for axis, value in values.items():
        own_layer, settings = next(layer for layer in reversed(layers) if layer[0] == f"{axis}={value}")
        if list(settings) == [axis] and value_at(result, axis) != value:
            winner = next(name for name, each in layers if any(f"{axis}.".startswith(f"{key}.") for key in each))
            if winner != own_layer:  # else a layer changes an entry of the value, such as an option of a method
                mend = "choose other labels, or tie the axis with tune.only"
                yield Fault(axis, f"{value} is overridden by {winner}; {mend}")


def may_need_labels(raw: Raw, key: str) -> bool:
    """Whether a key adds to a list, or is an option of a method that the file itself does not list."""
    return key.endswith("+") or (key.startswith("methods.") and value_at(raw, ".".join(key.split(".")[:2]), raw) is raw)


def same_settings(raw: Raw, one: Trial, other: Trial, source: str) -> Fault:
    """The fault of two trials with different labels and equal settings, by the names of both and of the overriding layers."""
    axis = next(axis for axis in {**one.values, **other.values} if one.values.get(axis) != other.values.get(axis))
    names = [f"{axis}={each.values[axis]}" if axis in each.values else f"no {axis}" for each in (one, other)]
    space, both = axes(raw, source), [each.values[axis] for each in (one, other) if axis in each.values]
    keys = [key.removesuffix("+") for value in both for key in _settings_of(raw, axis, value, space)]
    others = {f"{key}={value}": {key: value} for key, value in as_mapping(raw["tune"].get("fixed")).items()}
    others |= {
        f"{key}={value}": _settings_of(raw, key, value, space) for key, value in one.values.items() if key != axis
    }
    winners = [name for name, settings in others.items() if any(sets(settings, key) for key in keys)]
    text = f"{names[0]} and {names[1]} are the same run{' when ' if winners else ''}{', '.join(winners)}"
    return Fault(key_of(axis), f"{text}; keep one of the two")


def grid(raw: Raw, source: str) -> list[Trial]:
    """All trials of a sweep whose axes are all lists, in the order of the file, the last axis fastest.

    Raises:
      ConfigError: an axis is drawn at random, or something is malformed.
    """
    space = axes(raw, source)
    drawn = (axis for axis, domain in space.items() if not is_listed(domain))
    refuse((Fault(key_of(axis), "is a range; a grid needs grid_search") for axis in drawn), source)
    choices = {axis: options(domain) for axis, domain in space.items()}
    return [trial(raw, values, source) for values in combinations(raw, choices)]


def combinations(raw: Raw, choices: Mapping[str, Sequence[object]]) -> list[dict[str, object]]:
    """Axis -> value for each point of the grid; without the axes that `tune.only` leaves out there, and each point once."""
    only = raw["tune"].get("only") or {}
    points: dict[str, dict[str, object]] = {}
    for chosen in itertools.product(*choices.values()):
        values = dict(zip(choices, chosen, strict=True))
        point = {
            axis: value
            for axis, value in values.items()
            if all(_is_among(values.get(other), labels) for other, labels in (only.get(axis) or {}).items())
        }
        points.setdefault(repr(point), point)
    return list(points.values())


def _is_among(value: object, labels: Sequence[object]) -> bool:
    """Whether a label is listed; "1" stands for 1, as on the command line."""
    return value in labels or str(value) in map(str, labels)


def axes(raw: Raw, source: str) -> dict[str, Raw]:
    """Axis -> {Tune's name of a domain: its arguments}, checked for shape.

    Raises:
      ConfigError: no axis, or one that is not one domain.
    """
    space = axes_as_written(raw)
    if not space:
        text = "is missing or empty; write axes such as `local.lr: {grid_search: [0.1, 0.01]}`"
        raise ConfigError([Fault(SPACE, text)], source)
    texts = {axis: _domain_fault(raw, axis, domain) for axis, domain in space.items()}
    faults = [Fault(key_of(axis), text) for axis, text in texts.items() if text]
    for axis, conditions in (raw["tune"].get("only") or {}).items():
        unknown = [other for other in (axis, *conditions) if other not in space]
        if unknown:
            faults.append(Fault(f"tune.only.{axis}", f"{unknown[0]} is not an axis; the axes are {', '.join(space)}"))
    refuse(faults, source)
    pairs = {axis: next(iter(domain.items())) for axis, domain in space.items()}
    return {axis: {_tunes_name(kind): arguments} for axis, (kind, arguments) in pairs.items()}


def axes_as_written(raw: Raw) -> Settings:
    """Axis -> domain, of `tune.param_space`; empty where there is none."""
    return {str(axis): domain for axis, domain in as_mapping(value_at(raw, SPACE)).items()}


def key_of(axis: str) -> str:
    """Return the key of an axis in the file: "tune.param_space.local.lr"."""
    return f"{SPACE}.{axis}"


def as_mapping(value: object) -> Raw:
    """Return a mapping unchanged; empty for other values, which the check of the configuration reports."""
    return value if isinstance(value, Mapping) else {}


def _tunes_name(kind: object) -> str:
    """Return Ray Tune's name of a domain: one word, except for grid_search."""
    return "grid_search" if kind == "grid_search" else str(kind).replace("_", "")


def _domain_fault(raw: Raw, axis: str, domain: object) -> str:
    """Return the fault of an axis; "" if there is none."""
    if (key := axis.partition(".")[0]) in OF_THE_SWEEP:
        return f"{key} belongs to the sweep, and all trials share the value; remove the axis"
    if key == "labels":
        return "labels holds the choices of all axes; give the axis another name"
    if not isinstance(domain, Mapping) or len(domain) != 1:
        return f"must be a single domain, for example {{grid_search: [1, 2]}}, got {domain!r}"
    if not is_listed(domain):
        return ""
    if not options(domain):
        return "lists no value; give at least one value"
    texts = list(map(repr, options(domain)))
    if "grid_search" in domain and (repeated := [text for place, text in enumerate(texts) if text in texts[:place]]):
        return f"lists {repeated[0]} twice; keep one"
    named = named_settings(raw, axis, domain)
    if named is None:
        return ""
    for label, settings in named.items():
        keys = settings if isinstance(settings, Mapping) else ()
        sweep_keys = [key for key in keys if head(key) in OF_THE_SWEEP]
        if sweep_keys:
            return f"{label} sets {sweep_keys[0]}, which belongs to the sweep; remove the setting"
    unknown = ", ".join(str(label) for label in options(domain) if label not in named)
    labels = ", ".join(map(str, named))
    return f"tune.settings.{axis} has no settings for {unknown}; known: {labels}" if unknown else ""


def is_listed(domain: Raw) -> bool:
    """Whether the values of a domain can be listed; others are drawn."""
    return next(iter(domain), None) in LISTED


def head(key: object) -> str:
    """The group of a dotted key."""
    return str(key).partition(".")[0]


def options(domain: Raw) -> list[Any]:
    """Return the choices of a listed domain: labels of named settings, or values."""
    (values,) = domain.values()
    return list(values) if isinstance(values, Mapping | list | tuple) else []


def trial_name(values: Mapping[str, object], space: Iterable[str]) -> str:
    """A folder name: "alpha=0.1,method=FedVG" with what no folder name should hold replaced by -."""
    parts = ["{}={}".format(*_as_label(axis, value, space)) for axis, value in values.items()]
    return re.sub(r"[^\w.+=-]+", "-", "_".join(parts)).strip("-.") or "trial"


def named_settings(raw: Raw, axis: str, domain: Raw) -> Mapping[Any, Any] | None:
    """label -> settings where the choices are named, in the axis itself or in `tune.settings`; None where they are values."""
    if not is_listed(domain):
        return None
    (values,) = domain.values()
    return values if isinstance(values, Mapping) else as_mapping(value_at(raw, "tune.settings")).get(axis)


def _as_label(axis: str, value: object, space: Iterable[str]) -> tuple[str, str | int | float]:
    """Return (label name, label) of a trial's choice on an axis. A list of methods gets the label used in reports."""
    if axis == "methods" and isinstance(value, list):
        return "method", methods_text(value)
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return _short(axis, space), value
    return _short(axis, space), str(value)


def _short(axis: str, names: Iterable[str]) -> str:
    """Return the last part of a dotted key, if unique among the axes."""
    last = axis.rpartition(".")[2]
    return last if sum(name.rpartition(".")[2] == last for name in names) == 1 else axis


def without_keys(raw: Raw, keys: Collection[str]) -> Settings:
    return {key: value for key, value in raw.items() if key not in keys}


def set_all(raw: Settings, settings: object, where: str, source: str) -> None:
    """Lay settings over a configuration, in place."""
    if not isinstance(settings, Mapping):
        raise ConfigError([Fault(where, f"must hold settings such as `local.lr: 0.1`, got {settings!r}")], source)
    set_keys(raw, {str(key): value for key, value in settings.items()}, source, where=f"{where} of {source}")
