"""From YAML files and `a.b=c` overrides to a configuration, all faults at once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from raysim.config.faults import fault_of, unique_errors
from raysim.config.schema import FORMS, Config, LocalGroup, ReportGroup
from raysim.core.errors import ConfigError, Fault


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-3 is a number, as everybody expects."""


_Loader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_config(path: Path | None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The raw configuration: the file with `a.b=c` overrides laid over it. Precedence: override, file, base, default.

    A file may name another as its `base` (relative to itself): its own groups are merged into that file's key by key.

    Raises:
      ConfigError: unreadable file, no mapping, bases in a circle, or a malformed override.
    """
    source = str(path) if path else "the command line"
    raw = _read_file(path, ()) if path else {}
    for override in overrides:
        _override(raw, override, source)
    return raw


def _read_file(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    source = str(path)
    if path.resolve() in above:
        raise ConfigError([Fault("base", "leads back to this file; remove one of the two")], source)
    try:
        raw = yaml.load(path.read_text(), Loader=_Loader) or {}
    except OSError as error:
        raise ConfigError([Fault("file", f"cannot be read: {error.strerror or error}")], source) from error
    except yaml.YAMLError as error:
        raise ConfigError([Fault("file", f"is no valid YAML: {error}")], source) from error
    if not isinstance(raw, dict):
        raise ConfigError([Fault("file", f"must hold keys and values, got {type(raw).__name__}")], source)
    base = raw.pop("base", None)
    if base is None:
        return raw
    if not isinstance(base, str):
        raise ConfigError([Fault("base", f"must be the path of another file, got {base!r}")], source)
    result = _read_file(path.parent / base, (*above, path.resolve()))
    for group, value in raw.items():
        both = isinstance(value, dict) and isinstance(result.get(group), dict)
        result[group] = {**result[group], **value} if both else value
    return result


def _override(raw: dict[str, Any], override: str, source: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(
            [Fault(override, "is no override; write key=value, for example local.lr=0.1")], "the command line"
        )
    *parents, last = key.strip().split(".")
    group = raw
    for parent in parents:
        group = group.setdefault(parent, {})
        if not isinstance(group, dict):
            raise ConfigError([Fault(key, f"{parent} is no group of keys in {source}")], "the command line")
    try:
        group[last] = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError([Fault(key, f"value {text!r} is no valid YAML ({error})")], "the command line") from error


def parse_config(raw: Mapping[str, Any]) -> tuple[Config | None, list[Fault]]:
    """(the configuration, or None if it has faults; all faults)."""
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        return None, [fault_of(Config, item) for item in unique_errors(error.errors())]
    faults = []
    if config.cohort.size is not None and config.cohort.fraction is not None:
        faults.append(Fault("cohort", "size and fraction are both set; keep one"))
    if config.cohort_size > config.num_clients:
        faults.append(
            Fault(
                "cohort.size",
                f"{config.cohort_size} clients a round of a population of {config.num_clients}; "
                "lower it or raise partition.num_clients",
            )
        )
    if config.local.nesterov and not config.local.momentum:
        faults.append(Fault("local.nesterov", "needs local.momentum above 0; set it, or drop nesterov"))
    if config.local.schedule != "exponential" and config.local.lr_decay != 1:
        faults.append(
            Fault(
                "local.lr_decay",
                f"{config.local.lr_decay:g} has no effect with schedule {config.local.schedule}; "
                "set local.schedule to exponential, or drop lr_decay",
            )
        )
    if config.local.steps is not None and config.local.epochs != LocalGroup().epochs:  # 1: as if it were not set
        faults.append(Fault("local", "steps and epochs are both set; keep one"))
    if config.name is not None and any(part in (".", "..") for part in config.name.split("/")):
        faults.append(Fault("name", f"must stay inside storage, got {config.name!r}; drop the dots"))
    faults += _data_faults(config)
    return (None if faults else config), faults


def _data_faults(config: Config) -> list[Fault]:
    """What is wrong with the data and partition groups beyond single keys."""
    data, part, chosen = config.data, config.partition, config.data.validation_set
    forms = FORMS.get(part.scheme, ())
    faults = []
    if part.form is not None and part.form not in forms and not config.is_joint:
        known = f"choose {' or '.join(forms)}" if forms else "drop it"
        faults.append(Fault("partition.form", f"scheme {part.scheme} has no form {part.form!r}; {known}"))
    if data.test + data.validation >= 1 and data.split == "fraction":
        faults.append(
            Fault(
                "data", f"test {data.test:g} and validation {data.validation:g} leave nothing to train on; lower them"
            )
        )
    if data.split_within_clients and data.split == "official":
        faults.append(
            Fault("data.split_within_clients", "cuts its own test rows; set data.split to fraction, or drop it")
        )
    if (chosen.external.name is None) != (chosen.external.mapping is None):
        faults.append(Fault("data.validation_set.external", "needs both name and mapping; set both or none"))
    is_changed = chosen.subset < 1 or chosen.imbalance is not None or chosen.label_noise > 0
    if is_changed and not data.validation and chosen.external.name is None:
        faults.append(Fault("data.validation_set", "there is no validation set; raise data.validation"))
    if chosen.order == "client" and not data.split_within_clients and chosen.external.name is None:
        faults.append(
            Fault(
                "data.validation_set.order",
                "client needs validation rows that are the clients' own; set data.split_within_clients, or order stratified",
            )
        )
    return faults


def parse_report(raw: Any, source: str) -> ReportGroup:
    """The `report` group of a configuration.

    Raises:
      ConfigError: all its faults.
    """
    try:
        return ReportGroup.model_validate({} if raw is None else raw)
    except ValidationError as error:
        raise ConfigError(
            [fault_of(ReportGroup, item, "report") for item in unique_errors(error.errors())], source
        ) from error
