"""By which rule a set is split: decided where the configuration leaves it open, and told in one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from raysim.config import Config
from raysim.config.counting import idle_faults, mappings
from raysim.core.errors import Fault
from raysim.core.settings import Raw
from raysim.data.arrow import ImageSet
from raysim.data.division import read_division
from raysim.data.manifest import Manifest
from raysim.data.splits import TEST, TRAIN, VALIDATION
from raysim.plan.find import build_methods


def with_split(config: Config, images: ImageSet, *, uses_validation: bool) -> tuple[Config, list[Fault]]:
    """(the configuration with `data.split` decided, what then has no effect).

    Rows of an official split are held out for validation only if something uses them, unless the configuration says how many.

    Raises:
      DataError: the partition's file cannot be read.
    """
    data, rule = config.data, config.data.split
    splits = images.splits
    if _file_splits(config, images):
        rule = "file" if rule == "auto" else rule
    elif rule == "auto":
        asks_for_fractions = data.split_within_clients or "test" in data.model_fields_set
        is_official = splits is not None and {TRAIN, TEST} <= {*np.unique(splits).tolist()} and not asks_for_fractions
        rule = "official" if is_official else "fraction"
    changes: dict[str, object] = {"split": rule}
    if rule == "official" and not uses_validation and "validation" not in data.model_fields_set:
        changes["validation"] = 0.0
    config = config.model_copy(update={"data": data.model_copy(update=changes)})
    return config, _faults(config, images)


def _file_splits(config: Config, images: ImageSet) -> bool:
    """Whether the partition's file says what is held out."""
    part = config.partition
    if part.scheme != "file" or part.file is None:
        return False
    file = read_division(Path(part.file), num_examples=len(images), num_clients=config.num_clients)
    return file.splits is not None


def _faults(config: Config, images: ImageSet) -> list[Fault]:
    data, faults = config.data, idle_faults(config)
    if data.split != "file" and _file_splits(config, images):
        text = f"{data.split} has no effect with the column `split` of {config.partition.file}; drop one of the two"
        faults.append(Fault("data.split", text))
    own = 0 if images.splits is None else int((images.splits == VALIDATION).sum())
    if data.split == "official" and own and data.validation not in (0, type(data)().validation):
        text = f"{data.validation:g} has no effect: {data.name} has {own:,} validation rows of its own; drop it, or set it to 0"
        faults.append(Fault("data.validation", text))
    return faults


def uses_validation(raw: Raw) -> bool:
    """Whether something in a configuration, or in any trial of its sweep, uses validation rows."""
    for group in mappings(raw):
        specs = [spec for key in ("methods", "methods+") if isinstance(group.get(key), list) for spec in group[key]]
        if any("validation-set" in method.needs for method in build_methods(specs)[0]):
            return True
        if "validation" in str(group.get("metric", "")) or any("validation_set" in str(key) for key in group):
            return True
    return False


#: data.split -> by which rule rows are held out.
RULES = {
    "official": "the set's own split",
    "file": "the split of partition.file",
    "fraction": "random fractions, data.test and data.validation",
}


def rows_line(config: Config, manifest: Manifest) -> str:
    """How many rows train, validate and test, and by which rule."""
    rule = RULES.get(config.data.split, config.data.split)
    rule += " of each client" if config.data.split_within_clients else ""
    train, validate, test = int(manifest.sizes.sum()), len(manifest.validation), len(manifest.test)
    return f"{train:,} rows train, {validate:,} validate, {test:,} test: {rule}"
