"""From YAML files and `a.b=c` overrides to a configuration, all faults at once."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from raysim.base.errors import ConfigError, DataError, Fault, SettingIgnored
from raysim.base.settings import Settings, assign
from raysim.base.texts import name_fault
from raysim.base.uri import is_uri, masked, uri_fault
from raysim.config.effects import left_unused, remove, sets, unused_faults
from raysim.config.faults import validated
from raysim.config.places import path_to_write
from raysim.config.schema import Config, ReportGroup
from raysim.config.schema_data import FORMS, ValidationSetGroup
from raysim.config.shipped import config_file, hint, recipes
from raysim.config.yaml_text import load_yaml, read_yaml, unfit_values


def read_config(path: Path | None, overrides: Sequence[str] = ()) -> Settings:
    """The raw configuration: the file with `a.b=c` overrides. Precedence: override, file, base, default.

    A file may name another as its `base` (relative to itself): its own groups are merged into that file's key by key.
    Both may be names of recipes that come with raysim, `paper:fedvg/table_A3`.

    Raises:
      ConfigError: unreadable file, unknown recipe, no mapping, bases in a circle, or a malformed override.
    """
    source = str(path) if path else "the command line"
    raw = _read_file(config_file(path), ()) if path else {}
    below, values = copy.deepcopy(raw), parse_overrides(overrides)
    set_keys(raw, values, source)
    return without_unused(raw, (values, below))


def _read_file(path: Path, above: tuple[Path, ...]) -> Settings:
    source = str(path)
    try:
        raw = read_yaml(path)
    except ValueError as error:
        is_missing = "No such file" in str(error)
        beside = (file.name for file in path.parent.glob("*.y*ml"))
        mend = f". {hint(path.name if path.suffix else str(path), [*recipes(), *beside])}" if is_missing else ""
        raise ConfigError([Fault("file", f"{error}{mend}")], source) from error
    if raw is None:
        text = "is empty; write at least one setting of the run, for example `rounds: 10`"
        raise ConfigError([Fault("file", text)], source)
    if path.resolve() in above:
        raise ConfigError([Fault("base", "leads back to the same file; remove one of the two")], source)
    if not isinstance(raw, dict):
        raise ConfigError([Fault("file", f"must hold keys and values, got {type(raw).__name__}")], source)
    base = raw.pop("base", None)
    if base is None:
        return raw
    if not isinstance(base, str):
        raise ConfigError([Fault("base", f"must be the path of another file, got {base!r}")], source)
    below = _read_file(config_file(base, path.parent), (*above, path.resolve()))
    result = dict(below)
    for group, value in raw.items():
        both = isinstance(value, dict) and isinstance(result.get(group), dict)
        result[group] = {**result[group], **value} if both else value
    return without_unused(result, (raw, below))


def without_unused(raw: Settings, layers: Sequence[Mapping[str, object]]) -> Settings:
    """Drop settings without effect because another layer overrides their condition; a warning names them.

    Settings of the uppermost layer are kept; they are refused later.

    Args:
      raw: the merged layers.
      layers: settings by dotted keys or in groups, the uppermost first.
    """
    unused = {key: reason for key, reason in left_unused(raw, Config, layers).items() if not sets(layers[0], key)}
    if unused:
        raw = copy.deepcopy(raw)
        remove(raw, unused)
        texts = (f"{key} {reason}" for key, reason in unused.items())
        warnings.warn(f"left out: {'; '.join(texts)}", SettingIgnored, stacklevel=2)
    return raw


def parse_overrides(overrides: Sequence[str]) -> Settings:
    """Dotted key -> value of `a.b=c` overrides.

    Raises:
      ConfigError: a malformed one.
    """
    values: Settings = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key.strip():
            fault = Fault(override, "is not an override; write key=value, for example local.lr=0.1")
            raise ConfigError([fault], "the command line")
        key = key.strip()
        try:
            values[key] = load_yaml(text)
        except ValueError as error:
            mend = f"; in a shell, put the whole override in quotes: '{key}=...'" if text.startswith(("[", "{")) else ""
            raise ConfigError([Fault(key, f"value {text[:60]!r} {error}{mend}")], "the command line") from error
    return values


def set_keys(raw: Settings, values: Mapping[str, object], source: str, *, where: str = "the command line") -> None:
    """Set values by dotted keys in a raw configuration; a value replaces a whole group.

    Args:
      source, where: origin of the configuration and origin of the values, for messages.
    Raises:
      ConfigError: a key leads through a value.
    """
    for key, value in values.items():
        try:
            assign(raw, key, value)
        except KeyError as error:
            raise ConfigError([Fault(key, f"{error.args[0]} in {source}")], where) from error


def parse_config(raw: Mapping[str, object]) -> tuple[Config | None, list[Fault]]:
    """(the configuration, or None if it has faults; all faults)."""
    faults = unfit_values(raw)
    if any(fault.key == "file" for fault in faults):
        return None, faults
    sound = without(raw, faults)
    config, more = validated(Config, sound)
    faults += more
    if config is None:  # contradictions between sound groups are reported as well
        config, _ = validated(Config, without(sound, more))
    if config is not None:
        contradictions = [*_contradictions(config), *_data_contradictions(config), *_unusable_paths(config)]
        contradictions += unused_faults(config, tune=raw.get("tune"))
        unsound = {fault.key.split(".")[0] for fault in faults}
        # A default in place of a faulty value may contradict others; contradictions of a population need both groups.
        groups = {fault: {fault.key.split(".")[0], "partition"} for fault in contradictions}
        faults += [fault for fault, both in groups.items() if not unsound & both]
    return (None if faults else config), faults


def sound_config(raw: Mapping[str, object], source: str) -> Config:
    """The configuration. Raises ConfigError with all its faults."""
    config, faults = parse_config(raw)
    if config is None:
        raise ConfigError(faults, source)
    return config


def without(raw: Mapping[str, object], faults: Sequence[Fault]) -> Settings:
    """Return the configuration without the keys that have faults."""
    pruned = copy.deepcopy(dict(raw)) if faults else dict(raw)
    remove(pruned, (re.sub(r"\[\d+\].*", "", fault.key) for fault in faults))
    return pruned


def _contradictions(config: Config) -> Iterator[Fault]:
    """Yield faults of mutually exclusive settings."""
    cohort, local = config.cohort, config.local
    if None not in (cohort.size, cohort.fraction):
        yield Fault("cohort", "size and fraction are both set; keep one")
    if config.num_clients < 1:
        yield Fault("data.unseen_clients", "leaves no client that trains; raise partition.num_clients, or drop it")
    elif config.cohort_size > config.num_clients:
        size = f"{config.cohort_size} clients a round of a population of {config.num_clients}"
        yield Fault("cohort.size", f"{size}; lower cohort.size or raise partition.num_clients")
    if None not in (local.steps, local.epochs):
        text = "steps and epochs are both set; keep one, and set the second to null if a base file has both"
        yield Fault("local", text)


def _data_contradictions(config: Config) -> Iterator[Fault]:
    """Yield contradictions in the groups `data` and `partition`."""
    data, part = config.data, config.partition
    scheme = part.scheme.name
    forms = FORMS.get(scheme, ())
    if forms and part.form not in (None, *forms):
        yield Fault("partition.form", f"scheme {scheme} has no form {part.form!r}; choose {' or '.join(forms)}")
    if scheme == "file" and part.file is None:
        yield Fault("partition.file", "is missing; scheme file needs the path of a CSV, Parquet or JSON file")
    if data.test + data.validation >= 1 and data.split != "official":
        held_out = f"test {data.test:g} and validation {data.validation:g}"
        yield Fault("data", f"{held_out} leave nothing to train on; lower the fractions")
    if data.split_within_clients and data.split == "official":
        text = "cuts test rows from the set; set data.split to fraction, or remove the key"
        yield Fault("data.split_within_clients", text)
    if data.reader is not None and "://" in data.root:
        yield Fault("data.reader", f"writes to data.root, and {data.root} is not a folder; set data.root to one")
    names = [data.name, *data.test_sets]
    if repeated := next((name for index, name in enumerate(names) if name in names[:index]), ""):
        yield Fault("data.test_sets", f"{repeated!r} is tested on already; name the set once")
    yield from _validation_contradictions(config)


def _validation_contradictions(config: Config) -> Iterator[Fault]:
    """Yield contradictions in `data.validation_set`."""
    data, chosen = config.data, config.data.validation_set
    external, from_clients, place = chosen.external, chosen.from_clients, "data.validation_set.from_clients"
    is_changed = chosen != ValidationSetGroup(external=external)
    if (external.name is None) != (external.mapping is None):
        yield Fault("data.validation_set.external", "needs both name and mapping; set both or none")
    if is_changed and not data.validation and external.name is None:
        yield Fault("data.validation_set", "no validation set; raise data.validation")
    if from_clients.share > 0 and (last := max(from_clients.clients)) >= config.num_clients:
        text = f"client {last} of {config.num_clients}; clients are counted from 0, name others"
        yield Fault(place, text)
    if from_clients.share > 0 and chosen.imbalance is not None:
        yield Fault(place, "sets the classes, and so does imbalance; keep one")
    if from_clients.share > 0 and external.name is not None:
        yield Fault(place, "is drawn from the set's own held-out rows, not from an external set; keep one")
    is_by_client = data.split_within_clients or config.partition.scheme.name == "file"
    if chosen.order == "client" and not is_by_client and external.name is None:
        text = "client needs validation rows that are the clients' own"
        mend = "set data.split_within_clients, or order stratified"
        yield Fault("data.validation_set.order", f"{text}; {mend}")


def _unusable_paths(config: Config) -> Iterator[Fault]:
    """Yield faults of invalid file names, or of paths that leave their folder."""
    data = config.data
    external = data.validation_set.external.name
    names = [("name", config.name), ("data.name", data.name), ("data.validation_set.external.name", external)]
    names += [("data.test_sets", name) for name in data.test_sets]
    for key, name in names:
        if name is not None and (text := name_fault(name, has_folders=key == "name")):
            yield Fault(key, f"{text}, got {name!r}")
    paths = [("storage", config.storage), ("partition.file", config.partition.file), ("data.root", data.root)]
    paths += [("data.files", data.files), ("model.pretrained", config.model.pretrained)]
    yield from (Fault(key, text) for key, path in paths if path and (text := _path_fault(key, path)))


def _path_fault(key: str, path: str) -> str:
    if is_uri(path):
        fault = f"must be a file or folder here, got {masked(path)}; copy it"
        return uri_fault(path) if key in ("storage", "data.root") else fault
    try:
        path_to_write(path)
    except DataError as error:
        return str(error)
    return ""


def parse_report(raw: object, source: str) -> ReportGroup:
    """The `report` group of a configuration.

    Raises:
      ConfigError: all its faults.
    """
    return sound_config({"report": {} if raw is None else raw}, source).report


def as_file(config: Config) -> Settings:
    """Return all settings, as a file for the same run."""
    complete = config.model_dump(mode="json")
    for key in {"test", "validation"} - config.data.model_fields_set:  # if given, they would decide `data.split: auto`
        del complete["data"][key]
    return complete
