"""What a sweep consists of: all its trials, drawn and checked before anything starts."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from raysim import sweep
from raysim.build import Plan
from raysim.check import check
from raysim.config import Config, TuneGroup, located, located_root, nearest, parse_config, read_config
from raysim.core.errors import ConfigError, Fault
from raysim.core.seeding import derive_seed, numpy_generator
from raysim.data.remote import is_remote
from raysim.find import MAPPINGS
from raysim.run_folder import FREE_KEYS

#: Draws one value of a domain: (generator) -> value.
Draw = Callable[[np.random.Generator], Any]

#: Longer trial names are cut: file systems allow 255 bytes.
LONGEST_NAME = 160

SPACE = "tune.param_space."


@dataclass(frozen=True)
class SweepTrial:
    """One run of a sweep.

    Attributes:
      values: axis -> what was chosen or drawn.
      raw: its configuration as the file has it; config: the same, complete, with whole paths and its place in the sweep.
      same_as: the trial that this one would repeat, since they differ in nothing that counts; it is run once. Else empty.
    """

    name: str
    values: Mapping[str, Any]
    raw: Mapping[str, Any]
    config: Config
    num_rounds: int
    same_as: str = ""


@dataclass(frozen=True)
class Sweep:
    """A checked sweep.

    Attributes:
      folder: `<storage>/<name>`.
      base: the keys that are the sweep's own, its `tune` group above all.
      refused: trial -> its faults, where `tune.skip_refused` leaves such trials out.
    """

    folder: Path
    base: Config
    trials: tuple[SweepTrial, ...]
    raw: Mapping[str, Any]
    refused: Mapping[str, tuple[Fault, ...]] = field(default_factory=dict)


# --- reading ----------------------------------------------------------------------------------------------------------


def read_sweep(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The raw configuration of a sweep; in overrides `a.b=1,2` is a grid and `a.b=[1,2]` one list.

    An override of an axis of the file replaces what it ranges over: by values, or by some of its labels.

    Raises:
      ConfigError: as read_config; or an unknown label.
    """
    plain: list[str] = []
    axes: list[tuple[str, str, list[str]]] = []
    raw = read_config(path)
    known = _space(raw)
    for override in overrides:
        key, equals, text = override.partition("=")
        parts = _split(text)
        is_axis = equals and (key in known or len(parts) > 1 or key.startswith(SPACE))
        if is_axis:
            axes.append((key, text, parts))
        else:
            plain.append(override)
    raw = read_config(path, plain)
    for key, text, parts in axes:
        if key.startswith(SPACE):
            sweep.assign(raw, key, _value(key, text))
        else:
            sweep.assign(raw, SPACE + key, {"grid_search": _options(raw, key, parts)})
    return raw


def _space(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    group = raw.get("tune")
    space = group.get("param_space") if isinstance(group, Mapping) else None
    return space if isinstance(space, Mapping) else {}


def _split(text: str) -> list[str]:
    """The text cut at commas outside brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "[{":
            depth += 1
        elif letter in "]}":
            depth -= 1
        elif letter == "," and depth == 0:
            parts.append("")
            continue
        parts[-1] += letter
    return [part.strip() for part in parts]


def _value(key: str, text: str) -> Any:
    return read_config(None, [f"{key.rpartition('.')[2]}={text}"])[key.rpartition(".")[2]]


def _options(raw: Mapping[str, Any], key: str, parts: Sequence[str]) -> Any:
    """Values of an axis given on the command line, or the settings behind labels of an axis of the file."""
    domain = _space(raw).get(key)
    values = next(iter(domain.values()), None) if isinstance(domain, Mapping) else None
    named = values if isinstance(values, Mapping) else (raw.get("tune", {}).get("settings") or {}).get(key)
    if not isinstance(named, Mapping):
        return [_value(key, part) for part in parts]
    labels = {str(label): label for label in named}
    unknown = [part for part in parts if part not in labels]
    if unknown:
        faults = [Fault(key, f"has no label {part!r}. {nearest(part, list(labels))}") for part in unknown]
        raise ConfigError(faults, "the command line")
    chosen = [labels[part] for part in parts]
    return {label: named[label] for label in chosen}


# --- planning ---------------------------------------------------------------------------------------------------------


def plan_sweep(
    raw: Mapping[str, Any], source: str, draws: Callable[[str, Any], Draw], *, is_scaled: bool = False
) -> Sweep:
    """All trials of a sweep with everything checked: nothing has been started or written.

    The whole list is drawn up front from the sweep's seed, so that one file always means the same trials: that is what
    makes a restart simple.

    Args:
      source: the file; a sweep without a name has that file's.
      draws: draws(Tune's name of a domain, its arguments) -> a function that draws; raises ValueError.
    Raises:
      ConfigError: every fault of the sweep and of all its trials.
    """
    whole = dict(sweep.scaled(raw, source) if is_scaled else raw)
    base = _base(whole, source)
    name = base.name or Path(source).stem + (sweep.SCALED if is_scaled else "")
    storage = Path(located(base).storage)
    singles = _expand(whole, base, source, draws, is_scaled=is_scaled)
    refused: dict[str, tuple[Fault, ...]] = {}
    first: dict[str, str] = {}
    trials = []
    for single in singles:
        ready = {**_with_whole_paths(single.raw), "storage": str(storage), "name": f"{name}/{single.name}"}
        try:
            plan = check({**ready, "resume": "auto"}, source)
        except ConfigError as error:
            refused[single.name] = error.faults
            continue
        same = first.setdefault(identity(plan), single.name)
        same = "" if same == single.name else same
        trials.append(SweepTrial(single.name, single.values, single.raw, plan.config, plan.num_rounds, same))
    if refused and not (base.tune.skip_refused and trials):
        raise ConfigError(_refusals(refused, len(singles)), source)
    if wrong := _tune_faults(base.tune, trials):
        raise ConfigError(wrong, source)
    return Sweep(storage / name, base, tuple(trials), whole, refused)


def _base(raw: Mapping[str, Any], source: str) -> Config:
    """What the sweep itself is configured by; the other groups count trial by trial."""
    own = {key: raw[key] for key in ("name", "storage", "seed", "resume", "tune") if key in raw}
    base, faults = parse_config(own)
    if base is None:
        raise ConfigError(faults, source)
    if base.name is None and parse_config({"name": Path(source).stem})[0] is None:
        raise ConfigError([Fault("name", f"is missing, and {Path(source).stem!r} cannot be one; set it")], source)
    return base


def _expand(
    raw: Mapping[str, Any], base: Config, source: str, draws: Callable[[str, Any], Draw], *, is_scaled: bool
) -> list[sweep.Trial]:
    """The trials: the grid, once for each sample; every drawn axis has a generator of its own.

    So more samples, more values on a grid's axis or another drawn axis leave the draws of the other axes as they were.
    """
    axes = sweep.axes(raw, source)
    drawn, faults = {}, []
    for axis, domain in axes.items():
        ((name, arguments),) = domain.items()
        if name != "grid_search":
            try:
                draw = draws(name, sweep.options(domain) if name == "choice" else arguments)
            except (ValueError, TypeError) as error:
                faults.append(Fault(f"{SPACE}{axis}", str(error)))
                continue
            drawn[axis] = (draw, numpy_generator(derive_seed(base.seed, f"tune.{axis}")))
    if not drawn and base.tune.num_samples > 1:
        faults.append(Fault("tune.num_samples", "repeats identical trials; make seed an axis, or leave it at 1"))
    if faults:
        raise ConfigError(faults, source)
    choices = {axis: [None] if axis in drawn else sweep.options(domain) for axis, domain in axes.items()}
    seen: dict[str, int] = {}
    trials = []
    for _ in range(base.tune.num_samples):
        for values in sweep.combinations(raw, choices):
            values |= {axis: draw(generator) for axis, (draw, generator) in drawn.items() if axis in values}
            made = sweep.trial(raw, values, source, is_scaled=is_scaled)
            name = _short_name(sweep.trial_name({a: _brief(v) if a in drawn else v for a, v in values.items()}, axes))
            seen[name] = seen.get(name, 0) + 1
            trials.append(replace(made, name=name if seen[name] == 1 else f"{name}_{seen[name]}"))
    return trials


def _brief(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value


def _short_name(name: str) -> str:
    if len(name.encode()) <= LONGEST_NAME:
        return name
    return f"{name.encode()[:LONGEST_NAME].decode(errors='ignore')}-{derive_seed(0, name):016x}"


def _with_whole_paths(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with relative paths made whole: workers stand in other folders."""
    result = copy.deepcopy(dict(raw))
    data = result.setdefault("data", {})
    if not isinstance(data, dict):
        return result
    root = data.get("root", "data")
    if isinstance(root, str) and not is_remote(root):
        data["root"] = located_root(root, str(data.get("name", "digits")))
    model = result.get("model")
    if isinstance(model, dict) and isinstance(model.get("pretrained"), str) and Path(model["pretrained"]).is_file():
        model["pretrained"] = str(Path(model["pretrained"]).absolute())
    chosen = data.get("validation_set")
    external = chosen.get("external") if isinstance(chosen, dict) else None
    if isinstance(external, dict) and isinstance(external.get("mapping"), str):
        path = Path(external["mapping"])
        if path.is_file() and not (MAPPINGS / f"{path.name}.yaml").is_file():
            external["mapping"] = str(path.absolute())
    return result


def _refusals(refused: Mapping[str, Sequence[Fault]], count: int) -> list[Fault]:
    """Each fault once, with the trials that have it unless all do; and which trials could be left out."""
    trials_of: dict[Fault, list[str]] = {}
    for name, found in refused.items():
        for fault in found:
            trials_of.setdefault(fault, []).append(name)
    faults = []
    for fault, names in trials_of.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        told = "" if len(names) == count else f" (trial {names[0]}{more})"
        faults.append(Fault(fault.key, f"{fault.message}{told}"))
    if len(refused) < count:
        text = (
            f"set it to true to start the other {count - len(refused)} of {count} trials; refused: {', '.join(refused)}"
        )
        faults.append(Fault("tune.skip_refused", text))
    return faults


#: Keys of `data` and whole groups that act through the partition's rows alone, which the manifest holds.
IN_MANIFEST = ("name", "root", "split", "split_within_clients", "test", "validation", "validation_set")


def identity(plan: Plan) -> str:
    """A text that two runs share if nothing that counts tells them apart.

    Labels, names and resources do not count; of the partition its rows count and not the keys that they come from, such as
    alpha for joint training.
    """
    known = plan.config.model_dump(mode="json")
    counts = {key: value for key, value in known.items() if key not in (*FREE_KEYS, "partition")}
    counts["data"] = {key: value for key, value in known["data"].items() if key not in IN_MANIFEST}
    if plan.config.is_joint:
        del counts["cohort"]
    return json.dumps([counts, plan.manifest.checksum], sort_keys=True)


def _tune_faults(settings: TuneGroup, trials: Sequence[SweepTrial]) -> list[Fault]:
    """What is wrong with the scheduler's settings for these trials."""
    faults = []
    shortest = min(trial.num_rounds for trial in trials)
    if settings.scheduler is not None and settings.grace_rounds > shortest:
        text = f"{settings.grace_rounds} rounds are more than a trial has ({shortest}); lower it"
        faults.append(Fault("tune.grace_rounds", text))
    if "validation" in settings.metric:
        bare = [t.name for t in trials if not (t.config.data.validation or t.config.data.validation_set.external.name)]
        if bare:
            text = f"{settings.metric} needs a validation set, and trial {bare[0]} has none; raise data.validation"
            faults.append(Fault("tune.metric", text))
    return faults
