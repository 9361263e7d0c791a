"""Sweeps as data: a configuration file with a `tune` group becomes one plain configuration per trial.

Pure dictionaries, no Ray: `raysim tune` runs them on Ray Tune, tests and recipes expand them here.

    tune:
      search: random                                  # how ranges are drawn: random, sobol (evenly), optuna (it learns)
      num_samples: 20
      space:                                          # ranges: a key of the configuration and Tune's name of a domain
        local.lr: {log_uniform: [1e-3, 1e-1]}         # uniform, randint, lograndint, quniform ..., with _ or without
        local.momentum: {choice: [0, 0.9]}
      param_space:                                    # lists: every combination, anew for each draw of the ranges
        seed: {grid_search: [0, 1, 2]}
        method:                                       # a name of your own: each label stands for settings
          grid_search:
            FedAvg: {methods: []}
            FedVG: {methods: [fedvg]}
        case: {grid_search: [small, large]}           # labels, too, where tune.settings.case says what they stand for
      settings:
        case: {small: {model.name: mlp}, large: {model: {name: cnn, width: 64}}}
      only:
        local.lr: {method: [FedAvg]}                  # an axis that counts with some labels of another one only
    scale: {rounds: 2, data.name: digits}             # laid over every trial (or run) with --scaled

A key of a mapping of settings (`a.b: value`) sets the value at that path whole, exactly as `a.b=value` on the command
line does. What a trial chose is written to its `labels`, which is what `raysim report` makes rows and columns of;
settings may write `labels.x` themselves, then the axis adds none of its own. Both mappings take every domain; the search
`optuna` chooses among values itself and takes no grid_search.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raysim.config.counting import left_idle, remove
from raysim.config.schema import Config
from raysim.core.errors import ConfigError, Fault
from raysim.core.settings import Raw, Settings, assign

#: Domains whose values can be listed; the others (uniform, loguniform, randint ...) are drawn by Ray Tune.
LISTED = ("grid_search", "choice")

#: Where a file has its axes.
SPACES = ("param_space", "space")

#: Keys of the sweep itself: no trial has its own.
OF_THE_SWEEP = ("name", "storage", "resume", "base", "tune", "scale", "report", "calibrate")

#: Groups of the sweep itself, which a trial's configuration does not have.
GROUPS = ("tune", "scale", "report")

#: What the name of a scaled run or sweep ends with.
SCALED = "_scaled"


@dataclass(frozen=True)
class Trial:
    """One configuration of a sweep.

    Attributes:
      values: axis -> chosen label or value.
      idle: key -> reason, of settings that have no effect in this trial and are left out of it.
    """

    name: str
    values: dict[str, object]
    raw: Settings
    idle: Mapping[str, str] = field(default_factory=dict)


def scaled(raw: Raw, source: str) -> Settings:
    """The configuration with its `scale` settings laid over it; its `tune` group may be shrunk by them, too.

    A name gets the ending `_scaled`, unless `scale` sets one: the full run is another one.

    Raises:
      ConfigError: there is no `scale` group, or one of its keys cannot be set.
    """
    settings = raw.get("scale")
    if not isinstance(settings, Mapping) or not settings:
        raise ConfigError([Fault("scale", "is missing; add a group of settings that shrink this run")], source)
    name = raw.get("name")
    if isinstance(name, str) and not name.endswith(SCALED):
        settings = {"name": f"{name}{SCALED}", **settings}
    result = copy.deepcopy(dict(raw))
    _set_all(result, settings, "scale", source)
    return result


def without_null_sweep(raw: Settings) -> Settings:
    """The configuration of one run where `tune` is null: without that group, and without what `scale` sets in it."""
    if "tune" not in raw or raw["tune"] is not None:
        return raw
    kept = {key: value for key, value in (raw.get("scale") or {}).items() if str(key).partition(".")[0] != "tune"}
    return _without(raw, ("tune",)) | ({"scale": kept} if kept else {})


def with_own_name(raw: Raw) -> Raw:
    """The same, its name kept when it is scaled: it was given for this very run or sweep."""
    return {**raw, "scale": {**raw["scale"], "name": raw["name"]}} if raw.get("scale") else raw


def trial(raw: Raw, values: Raw, source: str, *, is_scaled: bool = False) -> Trial:
    """The configuration of one trial.

    Args:
      raw: with a `tune` group.
      values: axis -> its label (named settings) or its value.
      is_scaled: `scale` has the last word.
    """
    space = axes(raw, source)
    result = copy.deepcopy(_without(raw, GROUPS))
    labels: dict[str, object] = {}
    layers: list[Raw] = [raw]  # the uppermost first
    for axis, value in values.items():
        named = named_settings(raw, axis, space[axis])
        settings = {axis: value} if named is None else named[value]
        if settings is None:
            settings = {}
        _set_all(result, settings, key_of(raw, axis), source)
        layers.insert(0, settings)
        if not any(str(key).partition(".")[0] == "labels" for key in settings):
            is_plain = isinstance(value, str | int | float) and not isinstance(value, bool)
            labels[_short(axis, space)] = value if is_plain else str(value)
    if is_scaled:
        result = _without(scaled({**raw, **result}, source), GROUPS)
        layers.insert(0, raw["scale"])
    result["labels"] = {**labels, **(result.get("labels") or {})}
    idle = left_idle(result, Config, layers)
    remove(result, idle)
    return Trial(trial_name(values, space), dict(values), result, idle)


def grid(raw: Raw, source: str, *, is_scaled: bool = False) -> list[Trial]:
    """All trials of a sweep whose axes are all lists, in the order of the file, the last axis fastest.

    Raises:
      ConfigError: an axis is drawn at random, or something is malformed.
    """
    shrunk = scaled(raw, source) if is_scaled else raw
    space = axes(shrunk, source)
    drawn = [axis for axis, domain in space.items() if next(iter(domain)) not in LISTED]
    if drawn:
        faults = [Fault(key_of(raw, axis), "is drawn at random; a grid needs grid_search") for axis in drawn]
        raise ConfigError(faults, source)
    choices = {axis: options(domain) for axis, domain in space.items()}
    return [trial(shrunk, values, source, is_scaled=is_scaled) for values in combinations(shrunk, choices)]


def combinations(raw: Raw, choices: Mapping[str, Sequence[object]]) -> list[dict[str, object]]:
    """Axis -> value for each point of the grid; without the axes that `tune.only` leaves out there, and each point once."""
    only = raw["tune"].get("only") or {}
    points: dict[str, dict[str, object]] = {}
    for chosen in itertools.product(*choices.values()):
        values = dict(zip(choices, chosen, strict=True))
        point = {
            axis: value
            for axis, value in values.items()
            if all(values.get(other) in labels for other, labels in (only.get(axis) or {}).items())
        }
        points.setdefault(repr(point), point)
    return list(points.values())


def axes(raw: Raw, source: str) -> dict[str, Raw]:
    """Axis -> {Tune's name of a domain: its arguments}, checked for shape.

    Raises:
      ConfigError: no axis, or one that is not one domain.
    """
    space = axes_as_written(raw)
    if not space:
        text = "is missing or empty; write axes such as `local.lr: {grid_search: [0.1, 0.01]}`"
        raise ConfigError([Fault("tune.param_space", text)], source)
    texts = {axis: _domain_fault(raw, axis, domain) for axis, domain in space.items()}
    faults = [Fault(key_of(raw, axis), text) for axis, text in texts.items() if text]
    for axis, conditions in (raw["tune"].get("only") or {}).items():
        unknown = [other for other in (axis, *conditions) if other not in space]
        if unknown:
            faults.append(Fault(f"tune.only.{axis}", f"{unknown[0]} is no axis; the axes are {', '.join(space)}"))
    if faults:
        raise ConfigError(faults, source)
    return {
        axis: {_tunes_name(kind): arguments for kind, arguments in domain.items()} for axis, domain in space.items()
    }


def axes_as_written(raw: Raw) -> Settings:
    """Axis -> domain, of `tune.param_space` and then `tune.space`; empty where there is neither."""
    return {str(axis): domain for space in _spaces(raw).values() for axis, domain in space.items()}


def key_of(raw: Raw, axis: str) -> str:
    """Where the file has an axis: "tune.space.local.lr"."""
    return next((f"tune.{name}.{axis}" for name, space in _spaces(raw).items() if axis in space), f"tune.space.{axis}")


def _spaces(raw: Raw) -> dict[str, Raw]:
    group = raw.get("tune")
    found = {name: group.get(name) for name in SPACES} if isinstance(group, Mapping) else {}
    return {name: space for name, space in found.items() if isinstance(space, Mapping)}


def _tunes_name(kind: object) -> str:
    """Tune writes the names of its domains in one word, but for grid_search."""
    return "grid_search" if kind == "grid_search" else str(kind).replace("_", "")


def _domain_fault(raw: Raw, axis: str, domain: object) -> str:
    """What is wrong with an axis; "" if nothing is."""
    if all(axis in space for space in (_spaces(raw).get(name, {}) for name in SPACES)):
        return "is in tune.space as well; keep one of them"
    if (key := axis.partition(".")[0]) in OF_THE_SWEEP:
        return f"{key} is the sweep's own, and no trial has another one; drop the axis"
    if not isinstance(domain, Mapping) or len(domain) != 1:
        return f"must be one domain, such as {{grid_search: [1, 2]}}, got {domain!r}"
    if next(iter(domain)) not in LISTED:
        return ""
    if not options(domain):
        return "has nothing to choose from; list at least one value"
    named = named_settings(raw, axis, domain)
    if named is None:
        return ""
    for label, settings in named.items():
        keys = settings if isinstance(settings, Mapping) else ()
        own = [key for key in keys if str(key).partition(".")[0] in OF_THE_SWEEP]
        if own:
            return f"{label} sets {own[0]}, which is the sweep's own; drop it"
    unknown = ", ".join(str(label) for label in options(domain) if label not in named)
    known = ", ".join(map(str, named))
    return f"tune.settings.{axis} does not say what {unknown} stands for; known: {known}" if unknown else ""


def options(domain: Raw) -> list[Any]:
    """What a listed domain chooses from: labels of named settings, or values."""
    (values,) = domain.values()
    return list(values) if isinstance(values, Mapping | list | tuple) else []


def trial_name(values: Mapping[str, object], space: Iterable[str]) -> str:
    """A folder name: "alpha=0.1,method=FedVG" with what no folder name should hold replaced by -."""
    parts = [f"{_short(axis, space)}={value}" for axis, value in values.items()]
    return re.sub(r"[^\w.+=-]+", "-", "_".join(parts)).strip("-.") or "trial"


def named_settings(raw: Raw, axis: str, domain: Raw) -> Mapping[Any, Any] | None:
    """label -> settings where the choices are named, in the axis itself or in `tune.settings`; None where they are values."""
    ((kind, values),) = domain.items()
    if kind not in LISTED:
        return None
    return values if isinstance(values, Mapping) else ((raw.get("tune") or {}).get("settings") or {}).get(axis)


def _short(axis: str, names: Iterable[str]) -> str:
    """The last part of a dotted key where no other axis ends in it."""
    last = axis.rpartition(".")[2]
    return last if sum(name.rpartition(".")[2] == last for name in names) == 1 else axis


def _without(raw: Raw, keys: Collection[str]) -> Settings:
    return {key: value for key, value in raw.items() if key not in keys}


def _set_all(raw: Settings, settings: object, where: str, source: str) -> None:
    """Lay settings over a configuration, in place."""
    if not isinstance(settings, Mapping):
        raise ConfigError([Fault(where, f"must hold settings such as `local.lr: 0.1`, got {settings!r}")], source)
    for key, value in settings.items():
        try:
            assign(raw, str(key), value)
        except KeyError as error:
            fault = Fault(f"{where}.{key}", f"cannot be set: {error.args[0]}")
            raise ConfigError([fault], source) from error
