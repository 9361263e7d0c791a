"""Run directories: found, read, and labelled."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from raysim.config import Config
from raysim.core.errors import DataError
from raysim.report.names import is_network, is_set
from raysim.report.published import Label
from raysim.run_folder import RunFolder

#: Files of which a run directory has at least one, from its first second on.
MARKS = ("config.yaml", "COMPLETED", "FAILED")

#: Groups and keys that say where and how a run is made, and not what it is.
ABOUT = (
    "name",
    "storage",
    "resume",
    "checkpoint",
    "resources",
    "labels",
    "report",
    "tune",
    "scale",
    "calibrate",
    "seed",
)
#: Keys and groups that tell nothing about what a run is, or have a label of their own.
SILENT = (*ABOUT, "methods")
SILENT_KEYS = ("data.root", "data.name", "model.name")


@dataclass(frozen=True)
class Run:
    """A run directory. `status` is "finished", or says what it is instead.

    Attributes:
      claimed: labels of data set and model that the configuration does not bear out; `labels` then names what ran.
    """

    folder: Path
    status: str
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    environment: Mapping[str, Any]
    labels: Mapping[str, Label]
    seed: Label
    claimed: Mapping[str, Label] = field(default_factory=dict)

    @property
    def is_finished(self) -> bool:
        return self.status == "finished"

    @property
    def is_joint(self) -> bool:
        """Whether one client had all examples: nothing was federated."""
        return bool(_at(self.config, "partition", "scheme") == "joint")


def find_runs(paths: Sequence[Path]) -> list[Run]:
    """Every run directory at or below the paths, in the order of their names, labelled.

    Raises:
      DataError: a path that is not there, or without a run below it.
    """
    folders: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            raise DataError(f"no folder {path}", mend="give run directories, or folders that hold some")
        found = sorted(_below(path))
        if not found:
            raise DataError("no run directory", str(path), "give a folder below which `raysim run` wrote runs")
        folders |= dict.fromkeys(folder.resolve() for folder in found)
    return label([_read(folder) for folder in folders])


def _below(path: Path) -> Iterable[Path]:
    for folder, inner, files in os.walk(path):
        inner[:] = [name for name in inner if name not in ("checkpoints", "arrays")]
        if any(mark in files for mark in MARKS):
            yield Path(folder)


def _read(folder: Path) -> Run:
    config, summary, environment = (_mapping(folder / name) for name in ("config.yaml", "summary.json", "env.json"))
    status = _status(folder, config, summary)
    labels = config.get("labels") if isinstance(config, dict) else None
    labels = dict(labels) if isinstance(labels, dict) else {}
    seed = labels.pop("seed", (config or {}).get("seed", 0))
    return Run(folder, status, config or {}, summary or {}, environment or {}, labels, seed)


def _status(folder: Path, config: dict[str, Any] | None, summary: dict[str, Any] | None) -> str:
    if config is None:
        return "damaged: no readable config.yaml"
    run = RunFolder(folder)
    found = run.status
    if found.name == "completed":
        if summary is None:
            return "damaged: no readable summary.json"
        return "finished" if summary.get("accuracy") is not None else "finished without an accuracy"
    if found.name == "failed":
        return f"failed: {found.message}" if found.message else "failed"
    return f"unfinished: {len(run.progress_rows())} of {config.get('rounds', '?')} rounds"


def _mapping(path: Path) -> dict[str, Any] | None:
    try:
        text = path.read_text()
        read = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return read if isinstance(read, dict) else None


def label(runs: Sequence[Run]) -> list[Run]:
    """Give every run a dataset, a model and a method label; runs without labels also the settings in which they differ.

    Settings are named by their dotted keys (`partition.alpha`). Options of a method that differ between runs of the same
    methods are written with its name, `fedprox (mu=0.1)`, so that rows need no empty columns.

    Labels of data set and model that the configuration does not bear out give way to what ran: a recipe scaled down to
    digits is not called CIFAR-10, and no published number stands beside it. Where several were claimed, the label
    `in place of` keeps them apart.
    """
    bare = [run for run in runs if not run.labels and run.config]
    flat = {run.folder: settings(run.config) for run in bare}
    varying = differing([{key: value for key, value in flat[run.folder].items() if _tells(key)} for run in bare])
    options = {run.folder: _options(run.config) for run in bare}
    result = []
    for run in runs:
        claimed = {k: v for k, v in run.labels.items() if k in ("dataset", "model") and not _bears_out(run, k)}
        labels = labels_of(run.config, {key: value for key, value in run.labels.items() if key not in claimed})
        if not run.labels and run.config:
            values = {key: flat[run.folder].get(key) for key in varying}
            labels |= {key: as_label(value) for key, value in values.items() if value is not None}
            alike = [options[other.folder] for other in bare if method_names(other.config) == labels["method"]]
            told = [f"{key}={options[run.folder][key]}" for key in differing(alike) if key in options[run.folder]]
            labels["method"] = f"{labels['method']} ({', '.join(told)})" if told else labels["method"]
        result.append(replace(run, labels=labels, claimed=claimed))
    claims = {run.folder: " / ".join(str(v) for v in run.claimed.values()) for run in result if run.claimed}
    if len(set(claims.values())) > 1:
        return [replace(r, labels={**r.labels, "in place of": claims[r.folder]}) if r.claimed else r for r in result]
    return result


def labels_of(config: Mapping[str, Any], given: Mapping[str, Label]) -> dict[str, Label]:
    """The given labels, below them data set, model and methods as the configuration names them."""
    ran = {"dataset": str(_at(config, "data", "name")), "model": str(_at(config, "model", "name"))}
    return {**ran, "method": method_names(config), **given}


def _bears_out(run: Run, key: str) -> bool:
    """Whether the configuration is what the label of data set or model says, see `raysim.report.names`."""
    if key == "dataset":
        return is_set(run.labels[key], _at(run.config, "data", "name"))
    model = run.config.get("model")
    return is_network(run.labels[key], model if isinstance(model, Mapping) else {})


def method_names(config: Mapping[str, Any]) -> str:
    """The methods in order, `fedprox + fedvg`; fedavg for none."""
    specs = config.get("methods") or []
    return " + ".join(str(next(iter(spec))) if isinstance(spec, dict) else str(spec) for spec in specs) or "fedavg"


def _options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the methods, as `mu` if only one method is listed, else as `fedprox.mu`."""
    specs = config.get("methods") or []
    found: dict[str, Any] = {}
    for spec in specs:
        if isinstance(spec, dict):
            ((name, options),) = spec.items()
            prefix = f"{name}." if len(specs) > 1 else ""
            found |= {f"{prefix}{key}": value for key, value in (options or {}).items()}
    return found


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """A run's configuration by dotted keys, with today's defaults for keys that an older run did not write."""
    return flatten(Config().model_dump(mode="json")) | flatten(config)


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping by dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat


def misnamed(runs: Sequence[Run]) -> list[str]:
    """Labels of data set or model that the configuration does not bear out: `CIFAR-10 (ran on digits)`.

    So it is with recipes that were scaled down; what they give says nothing about published numbers.
    """
    found: dict[str, None] = {}
    for run in runs:
        labels = {**run.labels, **run.claimed}
        for key, group, word in (("dataset", "data", "ran on"), ("model", "model", "was")):
            if key in run.claimed or (key in labels and not _bears_out(run, key)):
                found[f"{labels[key]} ({word} {_at(run.config, group, 'name')})"] = None
    return list(found)


def differing(mappings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys that not all mappings have with one value, in order of first appearance."""
    keys = dict.fromkeys(key for mapping in mappings for key in mapping)
    return [key for key in keys if len({repr(mapping.get(key)) for mapping in mappings}) > 1]


def _tells(key: str) -> bool:
    return key.split(".")[0] not in SILENT and key not in SILENT_KEYS


def as_label(value: Any) -> Label:
    return value if isinstance(value, str | int | float) and not isinstance(value, bool) else json.dumps(value)


def _at(config: Mapping[str, Any], group: str, key: str) -> Any:
    values = config.get(group)
    return values.get(key, "?") if isinstance(values, dict) else "?"
