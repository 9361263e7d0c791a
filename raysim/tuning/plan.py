"""What a sweep consists of: all its trials, drawn and checked before anything starts."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from raysim import sweep
from raysim.build import Plan
from raysim.check import check
from raysim.config import Config, TuneGroup, folder_of, located, nearest, parse_config, read_config
from raysim.core.errors import ConfigError, Fault
from raysim.core.seeding import derive_seed, numpy_generator
from raysim.find import MAPPINGS
from raysim.run_folder import FREE_KEYS
from raysim.storage import place_of, storage_faults
from raysim.tuning.metrics import metric_fault

#: Draws one value of a domain: (generator) -> value.
Draw = Callable[[np.random.Generator], object]

#: (Tune's name of a domain, its arguments) -> what draws from it; raises ValueError.
Draws = Callable[[str, object], Draw]

#: Longer trial names are cut: file systems allow 255 bytes.
LONGEST_NAME = 160

#: Trials of a sweep: all are drawn and checked before the first one starts.
MOST_TRIALS = 10_000

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
    values: Mapping[str, object]
    raw: sweep.Raw
    config: Config
    num_rounds: int
    partition_sha256: str
    same_as: str = ""


@dataclass(frozen=True)
class Sweep:
    """A checked sweep.

    Attributes:
      folder: `<storage>/<name>`; where the storage is a URI, the local copy of what is there.
      base: the keys that are the sweep's own, its `tune` group above all.
      refused: trial -> its faults, where `tune.skip_refused` leaves such trials out.
      place: `<storage>/<name>`, a path or a URI.
    """

    folder: Path
    base: Config
    trials: tuple[SweepTrial, ...]
    raw: sweep.Raw
    refused: Mapping[str, tuple[Fault, ...]]
    place: str


# --- reading ----------------------------------------------------------------------------------------------------------


def read_sweep(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The raw configuration of a sweep; in overrides `a.b=1,2` is a grid and `a.b=[1,2]` one list.

    An override of an axis of the file replaces what it ranges over: by values, or by some of its labels.

    Raises:
      ConfigError: as read_config; or an unknown label.
    """
    known = sweep.param_space(read_config(path))

    def is_axis(override: str) -> bool:
        key, equals, text = override.partition("=")
        return bool(equals) and (key in known or key.startswith(SPACE) or len(_split(text)) > 1)

    raw = read_config(path, [override for override in overrides if not is_axis(override)])
    for override in filter(is_axis, overrides):
        key, _, text = override.partition("=")
        if key.startswith(SPACE):
            sweep.assign(raw, key, _value(key, text))
        else:
            sweep.assign(raw, SPACE + key, {"grid_search": _options(raw, key, _split(text))})
    return raw


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


def _value(key: str, text: str) -> object:
    """What YAML makes of the text; a fault names the last part of the key."""
    (value,) = read_config(None, [f"{key.rpartition('.')[2]}={text}"]).values()
    return value


def _options(raw: sweep.Raw, key: str, parts: Sequence[str]) -> object:
    """Values of an axis given on the command line, or the settings behind labels of an axis of the file."""
    domain = sweep.param_space(raw).get(key)
    if not isinstance(domain, Mapping) or len(domain) != 1:  # a new axis, or one that is replaced
        domain = {"grid_search": None}
    named = sweep.named_settings(raw, key, domain)
    if not isinstance(named, Mapping):
        return [_value(key, part) for part in parts]
    labels = {str(label): label for label in named}
    if unknown := [part for part in parts if part not in labels]:
        faults = [Fault(key, f"has no label {part!r}. {nearest(part, list(labels))}") for part in unknown]
        raise ConfigError(faults, "the command line")
    return {labels[part]: named[labels[part]] for part in parts}


# --- planning ---------------------------------------------------------------------------------------------------------


def plan_sweep(raw: sweep.Raw, source: str, draws: Draws, *, is_scaled: bool = False) -> Sweep:
    """All trials of a sweep with everything checked: nothing has been started or written.

    The whole list is drawn up front from the sweep's seed, so that one file always means the same trials: that is what
    makes a restart simple.

    Args:
      source: the file; a sweep without a name has that file's.
    Raises:
      ConfigError: every fault of the sweep and of all its trials.
    """
    whole = dict(sweep.scaled(raw, source) if is_scaled else raw)
    base = _base(whole, source)
    name = base.name or Path(source).stem + (sweep.SCALED if is_scaled else "")
    storage = located(base).storage
    if faults := storage_faults(storage):
        raise ConfigError(faults, source)
    place_of_sweep = place_of(storage, name)
    singles = _expand(whole, base, source, draws, is_scaled=is_scaled)
    refused: dict[str, tuple[Fault, ...]] = {}
    first: dict[str, str] = {}
    trials = []
    for single in singles:
        place = {"storage": storage, "name": f"{name}/{single.name}", "resume": "auto"}
        try:
            plan = check({**single.raw, **place}, source)
        except ConfigError as error:
            refused[single.name] = error.faults
            continue
        plan = replace(plan, config=_with_whole_files(plan.config))
        original = first.setdefault(identity(plan), single.name)
        same_as = "" if original == single.name else original
        partition = plan.manifest.checksum
        trials.append(
            SweepTrial(single.name, single.values, single.raw, plan.config, plan.num_rounds, partition, same_as)
        )
    if refused and not (base.tune.skip_refused and trials):
        raise ConfigError(_refusals(refused, len(singles)), source)
    if faults := _tune_faults(base.tune, trials):
        raise ConfigError(faults, source)
    return Sweep(folder_of(place_of_sweep, "copies"), base, tuple(trials), whole, refused, place_of_sweep)


def _base(raw: sweep.Raw, source: str) -> Config:
    """What the sweep itself is configured by; the other groups count trial by trial."""
    own = {key: raw[key] for key in ("name", "storage", "seed", "resume", "tune") if key in raw}
    base, faults = parse_config(own)
    if base is None:
        raise ConfigError(faults, source)
    if base.name is None and parse_config({"name": Path(source).stem})[0] is None:
        raise ConfigError([Fault("name", f"is missing, and {Path(source).stem!r} cannot be one; set it")], source)
    return base


def _expand(raw: sweep.Raw, base: Config, source: str, draws: Draws, *, is_scaled: bool) -> list[sweep.Trial]:
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
    count = base.tune.num_samples * math.prod(map(len, choices.values()))
    if count > MOST_TRIALS:
        text = f"makes {count:,} trials, and a sweep has at most {MOST_TRIALS:,}; cut it, or lower tune.num_samples"
        raise ConfigError([Fault("tune.param_space", text)], source)
    taken: set[str] = set()
    trials = []
    for _ in range(base.tune.num_samples):
        for values in sweep.combinations(raw, choices):
            values |= {axis: draw(generator) for axis, (draw, generator) in drawn.items() if axis in values}
            single = sweep.trial(raw, values, source, is_scaled=is_scaled)
            brief = {
                axis: f"{value:.4g}" for axis, value in values.items() if axis in drawn and isinstance(value, float)
            }
            name = _short_name(sweep.trial_name(values | brief, axes))
            names = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
            name = next(free for free in names if free not in taken)
            taken.add(name)
            trials.append(replace(single, name=name))
    return trials


def _short_name(name: str) -> str:
    if len(name.encode()) <= LONGEST_NAME:
        return name
    return f"{name.encode()[:LONGEST_NAME].decode(errors='ignore')}-{derive_seed(0, name):016x}"


def _with_whole_files(config: Config) -> Config:
    """The configuration with names of files made whole, as `check` makes those of folders: workers stand elsewhere."""
    whole = config.model_dump(mode="json")
    external = whole["data"]["validation_set"]["external"]
    is_shipped = (MAPPINGS / f"{external['mapping']}.yaml").is_file()
    for group, key in ((whole["model"], "pretrained"), *([] if is_shipped else [(external, "mapping")])):
        if group[key] is not None and Path(group[key]).is_file():
            group[key] = str(Path(group[key]).absolute())
    return Config.model_validate(whole)


def _refusals(refused: Mapping[str, Sequence[Fault]], count: int) -> list[Fault]:
    """Each fault once, with the trials that have it unless all do; and which trials could be left out."""
    trials_of: dict[Fault, list[str]] = {}
    for name, refusal in refused.items():
        for fault in refusal:
            trials_of.setdefault(fault, []).append(name)
    faults = []
    for fault, names in trials_of.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        where = "" if len(names) == count else f" (trial {names[0]}{more})"
        faults.append(Fault(fault.key, f"{fault.message}{where}"))
    if len(refused) < count:
        text = f"set it to true to start the other {count - len(refused)} of {count} trials"
        faults.append(Fault("tune.skip_refused", f"{text}; refused: {', '.join(refused)}"))
    return faults


#: Keys of `data` and whole groups that act through the partition's rows alone, which the manifest holds.
IN_MANIFEST = ("name", "root", "split", "split_within_clients", "test", "validation", "validation_set")


def identity(plan: Plan) -> str:
    """A text that two runs share if nothing that counts tells them apart.

    Labels, names and resources do not count; of the partition its rows count and not the keys that they come from, such as
    alpha for joint training.
    """
    config = plan.config.model_dump(mode="json")
    counts = {key: value for key, value in config.items() if key not in (*FREE_KEYS, "partition")}
    counts["stop"] = config["stop"]  # a resumed run may change it; two runs that differ in it are two
    counts["data"] = {key: value for key, value in config["data"].items() if key not in IN_MANIFEST}
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
    if text := metric_fault(settings.metric, [trial.config for trial in trials]):
        faults.append(Fault("tune.metric", text))
    if "validation" in settings.metric:
        bare = [t.name for t in trials if not (t.config.data.validation or t.config.data.validation_set.external.name)]
        if bare:
            text = f"{settings.metric} needs a validation set, and trial {bare[0]} has none; raise data.validation"
            faults.append(Fault("tune.metric", text))
    return faults
