"""Layers of a configuration: file, labels, `scale`, command line; later layers override earlier ones."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from raysim.base.errors import ConfigError, Fault, refuse
from raysim.base.settings import Raw, Settings
from raysim.config.effects import value_at
from raysim.config.faults import nearest
from raysim.config.reading import set_keys, without_unused
from raysim.config.sweep import (
    OF_THE_SWEEP,
    SCALED,
    as_mapping,
    axes_as_written,
    head,
    key_of,
    may_need_labels,
    named_settings,
    without_keys,
)


def layered(
    raw: Raw,
    values: Mapping[str, object],
    source: str,
    *,
    axes: Mapping[str, Sequence[object]] | None = None,
    is_scaled: bool = False,
    where: str = "the command line",
) -> Settings:
    """Merge a file's configuration, `scale` and the settings of a call, in this order; later layers override earlier
    ones.

    In a sweep the settings override labels as well, trial by trial: `tune.fixed` keeps them. A key that is an axis
    chooses among its labels, or leaves one value.

    Args:
      values: settings by dotted keys; where: their origin, for messages.
      axes: axis -> its values, or labels of it.
    Raises:
      ConfigError: a value that cannot be set, an unknown label, or no `scale` group.
    """
    if odd := [key for key in values if not isinstance(key, str)]:
        raise ConfigError([Fault(str(key), "must be text; write keys such as local.lr") for key in odd], where)
    if not isinstance(is_scaled, bool):
        raise ConfigError([Fault("scale", f"must be True or False, got {type(is_scaled).__name__}")], "the call")
    first = {key: value for key, value in values.items() if head(key) == "scale" or (key == "tune" and value is None)}
    call: Settings = {key: value for key, value in values.items() if key not in first}
    result = copy.deepcopy(dict(raw))
    set_keys(result, first, source, where=where)
    result = _without_null_sweep(result)
    file = copy.deepcopy(result)
    scale = _scale(result, source) if is_scaled else {}
    library = _labels(result)
    scale = _lay(result, scale, library, f"`scale` of {source}", source)
    call = _lay(result, call, library, where, source)
    for axis, choices in (axes or {}).items():
        _choose(result, library, axis, choices, where)
    refuse(_unknown_conditions(result, library), source)
    _drop_stale_labels(result, file, {*call, *(axes or {})})
    result = without_unused(result, [call, *([scale] if is_scaled else []), file])
    if (later := axes_as_written(result)) and (scale or call or axes):
        added = {key: [*scale[key], *call[key]] for key in scale.keys() & call.keys() if key.endswith("+")}
        before = without_keys(as_mapping(value_at(result, "tune.fixed")), later)  # of an earlier call
        result["tune"]["fixed"] = {**before, **without_keys(scale, call), **call, **added}
    return result


def _lay(raw: Settings, settings: Raw, library: dict[str, Raw], where: str, source: str) -> Settings:
    """Apply the sweep-level settings of a layer in place; return the settings to be applied again in each trial."""
    set_keys(raw, {key: value for key, value in settings.items() if head(key) in OF_THE_SWEEP}, source, where=where)
    for axis, labels in _labels(raw).items():
        library[axis] = {**library.get(axis, {}), **labels}
    of_trials = {key: value for key, value in settings.items() if head(key) not in OF_THE_SWEEP}
    for axis in [key for key in of_trials if key in axes_as_written(raw) or key in library]:
        value = of_trials.pop(axis)
        _choose(raw, library, axis, value if axis in library and isinstance(value, list) else [value], where)
    is_sweep = bool(axes_as_written(raw))
    # Settings that may need a label are applied in the trials.
    now = {key: value for key, value in of_trials.items() if not is_sweep or not may_need_labels(raw, key)}
    set_keys(raw, now, source, where=where)
    return of_trials


def _drop_stale_labels(raw: Settings, file: Raw, keys: Collection[str]) -> None:
    """Remove, in place, labels that name the file's values of overridden keys."""
    labels = raw.get("labels")
    if not isinstance(labels, dict) or any(head(key) == "labels" for key in keys):
        return
    for key in keys:
        name = key.rpartition(".")[2]
        if name in labels and labels[name] == value_at(file, key):
            del labels[name]


def _scale(raw: Settings, source: str) -> Settings:
    """The settings of `scale`; the name of the run gets the ending `_scaled`, in place. Raises ConfigError: there are none."""
    settings = raw.get("scale")
    if not isinstance(settings, Mapping) or not settings:
        raise ConfigError([Fault("scale", "is missing; add a group of settings for a smaller run")], source)
    name = raw.get("name") or (Path(source).stem if axes_as_written(raw) else None)
    if isinstance(name, str) and not name.endswith(SCALED):
        raw["name"] = f"{name}{SCALED}"
    return {str(key): value for key, value in settings.items()}


def _without_null_sweep(raw: Settings) -> Settings:
    """Return the configuration of a single run if `tune` is null: without the group, and without `scale` settings
    for it.
    """
    if "tune" not in raw or raw["tune"] is not None:
        return raw
    kept = {key: value for key, value in as_mapping(raw.get("scale")).items() if head(str(key)) != "tune"}
    return without_keys(raw, ("tune",)) | ({"scale": kept} if kept else {})


def _labels(raw: Raw) -> dict[str, Raw]:
    """Axis -> label -> settings, of the axes that have labels."""
    domains = {axis: domain for axis, domain in axes_as_written(raw).items() if len(as_mapping(domain)) == 1}
    named = {axis: as_mapping(named_settings(raw, axis, domain)) for axis, domain in domains.items()}
    return {axis: labels for axis, labels in named.items() if labels}


def choices_of(raw: Raw, source: str, *, is_scaled: bool) -> dict[str, list[object]]:
    """Return axis -> labels that a call may choose, including labels of `scale`; empty for axes with values."""
    both = [raw, layered(raw, {}, source, is_scaled=True)] if is_scaled else [raw]
    choices: dict[str, list[object]] = {axis: [] for each in both for axis in axes_as_written(each)}
    for each in both:
        for axis, labels in _labels(each).items():
            choices[axis] += [label for label in labels if label not in choices[axis]]
    return choices


def _choose(raw: Settings, library: Raw, axis: str, choices: Sequence[object], where: str) -> None:
    """Keep only the chosen labels or values of an axis, in place; a missing axis is created."""
    kind = "choice" if value_at(raw, "tune.search") == "optuna" else "grid_search"
    values: object = list(choices)
    if axis in library:
        labels = {str(label): label for label in library[axis]}
        unknown = [str(choice) for choice in choices if str(choice) not in labels]
        refuse((Fault(axis, f"has no label {each!r}. {nearest(each, list(labels))}") for each in unknown), where)
        values = {labels[str(choice)]: library[axis][labels[str(choice)]] for choice in choices}
        if len(values) < len(choices):
            raise ConfigError(
                [Fault(axis, f"names a label twice, got {', '.join(map(str, choices))}; keep one")], where
            )
    set_keys(raw, {key_of(axis): {kind: values}}, where, where=where)


def _unknown_conditions(raw: Raw, library: Raw) -> Iterator[Fault]:
    """Labels in `tune.only` that their axis never has."""
    for axis, conditions in as_mapping(value_at(raw, "tune.only")).items():
        for other, labels in as_mapping(conditions).items():
            # On an axis without labels, values that the call did not choose are no longer known.
            names = list(map(str, library.get(other, ())))
            for label in labels if names and isinstance(labels, list) else ():
                if str(label) not in names:
                    yield Fault(
                        f"tune.only.{axis}", f"{other} has no label {str(label)!r}. {nearest(str(label), names)}"
                    )
