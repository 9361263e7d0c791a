"""Sets without images: what a partition and a model need to know of each set of the papers, from `stub_sets.yaml`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from raysim.config import read_config
from raysim.data.arrow import SetInfo
from raysim.data.dirichlet import whole_counts
from raysim.data.rows import SPLITS
from raysim.data.sources import set_path

NUMBERS = read_config(Path(__file__).with_suffix(".yaml"))


class StubSet:
    """What `PreparedSet` offers, but for the pixels."""

    def __init__(self, path: Path):
        self.path, self.info = path, stub_info(path.stem)
        self.labels, self.splits, self.domains = stub_columns(path.stem)
        self.targets = self.labels.astype(np.float32)  # of a regression, whose numbers decide no plan

    def __len__(self) -> int:
        return len(self.labels)

    def verify(self) -> None:
        """There are no pixels to read."""


def make_root(folder: Path) -> Path:
    """A data root where every stub set has an (empty) file, as `check` looks for one."""
    for name in NUMBERS:
        path = set_path(folder, name)
        path.parent.mkdir(parents=True)
        path.touch()
    return folder


def counts_of(numbers: dict[str, Any], given: Any) -> np.ndarray:
    """(classes,) examples: a list, one number for all, or a total shared out like the training examples."""
    classes = numbers["classes"]
    num_classes = classes if isinstance(classes, int) else len(classes)
    if numbers.get("task", "classes") != "classes":
        num_classes = 1
    if isinstance(given, dict):
        train = numbers.get("train")
        like = np.array(numbers.get("like") or (train if isinstance(train, list) else [1] * num_classes), float)
        return whole_counts(like[None] / like.sum(), np.array([given["total"]]))[0]
    return np.broadcast_to(np.array(given, np.int64), num_classes)


@cache
def stub_columns(name: str) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """(labels, splits or None, domains or None) of a stub set."""
    numbers = NUMBERS[name]
    if isinstance(numbers.get("domains"), int):
        rows = np.arange(numbers["whole"])
        return np.zeros(len(rows), np.int64), None, rows % numbers["domains"]
    parts = numbers.get("domains") or {part: numbers[part] for part in (*SPLITS, "whole") if part in numbers}
    counts = [counts_of(numbers, given) for given in parts.values()]
    labels = np.concatenate([np.repeat(np.arange(len(row)), row) for row in counts])
    sizes = [int(row.sum()) for row in counts]
    if "domains" in numbers:
        is_tested = np.arange(len(labels)) % numbers["tested"] == 0 if "tested" in numbers else None
        splits = None if is_tested is None else np.where(is_tested, 2, 0).astype(np.int8)
        return labels, splits, np.repeat(np.arange(len(parts)), sizes)
    if "whole" in numbers:
        return labels, None, None
    return labels, np.repeat([SPLITS.index(part) for part in parts], sizes).astype(np.int8), None


@cache
def stub_info(name: str) -> SetInfo:
    numbers = NUMBERS[name]
    classes = numbers["classes"]
    if isinstance(classes, int):
        known = numbers.get("names", [])
        classes = [*known, *(f"class {i}" for i in range(len(known), classes))]
    labels = stub_columns(name)[0]
    domains, shape = numbers.get("domains", ()), tuple(numbers["shape"])
    domains = tuple(map(str, range(domains) if isinstance(domains, int) else domains))
    kinds = {key: numbers[key] for key in ("input_type", "target_type", "task", "vocabulary") if key in numbers}
    if numbers.get("input_type") == "float32":
        kinds |= {"mean": (0.0,) * shape[-1], "deviation": (1.0,) * shape[-1]}
    kinds["target_shape"] = tuple(numbers.get("target_shape", ()))
    return SetInfo(name, tuple(classes), shape, len(labels), f"stub {name}", "numbers", domains, **kinds)
