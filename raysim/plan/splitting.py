"""Rule by which a set is split: decided if the configuration leaves it open, and reported in a line."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from raysim.base.errors import DataError, Fault, SettingIgnored
from raysim.base.settings import Raw, Settings
from raysim.config import Config
from raysim.config.effects import mappings, unused_options
from raysim.config.schema_data import DataGroup
from raysim.data.arrow import PreparedSet
from raysim.data.division import read_division
from raysim.data.manifest import Manifest
from raysim.data.splits import TEST, TRAIN, VALIDATION
from raysim.plan.find import build_methods


def with_split(config: Config, images: PreparedSet, *, uses_validation: bool) -> tuple[Config, list[Fault]]:
    """Return (the configuration with `data.split` decided, faults for settings that then have no effect).

    Rows are held out for validation only if a method, metric or key uses them, unless the configuration sets their
    number. A partition file with splits overrides the settings of `data`, which may come from the run that wrote the
    file: a warning names the ignored settings.
    """
    data, splits = config.data, images.splits
    if _file_has_splits(config, images):
        return _split_by_file(config), []
    has_tests = splits is not None and {TRAIN, TEST} <= {*np.unique(splits).tolist()}
    rule = data.split
    if rule == "auto":
        rule = "official" if has_tests and not data.asks_for_fractions else "fraction"
    changes: dict[str, object] = {"split": rule}
    if not uses_validation and "validation" not in data.model_fields_set:
        changes["validation"] = 0.0
    num_own = 0 if splits is None else int((splits == VALIDATION).sum())
    faults = []
    if rule == "official" and num_own and data.validation not in (0, DataGroup().validation):
        text = f"{data.validation:g} has no effect: {data.name} has {num_own:,} validation rows of its own"
        faults.append(Fault("data.validation", f"{text}; remove the key, or set 0"))
    return config.model_copy(update={"data": data.model_copy(update=changes)}), faults


def _file_has_splits(config: Config, images: PreparedSet) -> bool:
    """Whether the partition file assigns splits; errors in the file are reported when the partition is drawn."""
    part = config.partition
    if part.scheme.name == "file" and part.file is not None:
        with suppress(DataError):
            file = read_division(Path(part.file), num_examples=len(images), num_clients=part.num_clients)
            return file.splits is not None
    return False


def _split_by_file(config: Config) -> Config:
    given = {"data.split"} if config.data.split not in ("auto", "file") else set()
    config = config.model_copy(update={"data": config.data.model_copy(update={"split": "file"})})
    given |= {key for key in unused_options(config) if key.startswith("data.")}
    if given:
        text = f"left out: {', '.join(sorted(given))}; {config.partition.file} says which rows are held out"
        warnings.warn(text, SettingIgnored, stacklevel=2)
    keys = (key.rpartition(".")[2] for key in given - {"data.split"})
    defaults = {key: getattr(DataGroup(), key) for key in keys}
    return config.model_copy(update={"data": config.data.model_copy(update=defaults)})


#: data.validation_set with its defaults, as in a complete configuration.
NO_CHANGE = DataGroup().validation_set.model_dump(mode="json")


def uses_validation(raw: Raw) -> bool:
    """Whether something in a configuration, or in any trial of its sweep, uses validation rows."""
    for group in mappings(raw):
        lists = [part for key in ("methods", "methods+") for part in _method_lists(group.get(key))]
        if any("validation-set" in method.needs for specs in lists for method in build_methods(specs)[0]):
            return True
        several = group.get("metrics")
        named = [group.get("metric", ""), *(several.values() if isinstance(several, Mapping) else ())]
        if "validation" in str(named):
            return True
        if any("validation_set" in str(key) and value != NO_CHANGE for key, value in group.items()):
            return True
    return False


def _method_lists(value: object) -> list[list[str | Settings]]:
    """Return the lists of methods of a run, or of all labels of a sweep's axis."""
    if isinstance(value, list):
        return [value]
    domains = value.values() if isinstance(value, Mapping) else ()
    return [specs for choices in domains if isinstance(choices, list) for specs in choices if isinstance(specs, list)]


#: data.split -> rule by which rows are held out.
RULES = {
    "official": "the set's own split",
    "file": "the split of partition.file",
    "fraction": "random fractions, data.test and data.validation",
}


def rows_line(config: Config, manifest: Manifest) -> str:
    """Return a line with the numbers of rows that train, validate and test, and the rule."""
    rule = RULES.get(config.data.split, config.data.split)
    rule += " of each client" if config.data.split_within_clients else ""
    train, validate, test = int(manifest.sizes.sum()), len(manifest.validation), len(manifest.test)
    unseen = f", {len(manifest.unseen):,} are of {config.num_unseen} unseen clients" if config.num_unseen else ""
    return f"{train:,} rows train, {validate:,} validate, {test:,} test{unseen}: {rule}"
