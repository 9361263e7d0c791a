"""Run directories: listed, read, and labelled."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path

import yaml

from raysim.config import Config
from raysim.core.errors import DataError, RaysimError
from raysim.core.reading import read_json, regular_file
from raysim.core.settings import Raw as Settings
from raysim.core.texts import all_visible
from raysim.folders.run_folder import FREE_KEYS, RunFolder, written_yaml
from raysim.reporting.names import is_network, is_set
from raysim.reporting.published import Label, is_same

#: Groups and keys that say where and how a run is made, and not what it is.
ABOUT = {*FREE_KEYS, "seed"} - {"stop", "loggers"}
#: Groups and keys that tell nothing about what a run is, or have a label of their own.
SILENT = ABOUT | {"methods", "data.root", "data.name", "model.name"}


@dataclass(frozen=True)
class ReportedRun:
    """A run directory. `status` is "finished", or says what it is instead.

    Attributes:
      claimed: labels of data set and model that the configuration does not bear out; `labels` then names what ran.
      is_named_by_methods: whether its row is named by its methods and their options.
    """

    folder: Path
    status: str
    config: Settings
    summary: Settings
    environment: Settings
    labels: Mapping[str, Label]
    seed: Label
    claimed: Mapping[str, Label] = field(default_factory=dict)
    is_named_by_methods: bool = False

    @property
    def is_finished(self) -> bool:
        return self.status == "finished"

    @cached_property
    def settings(self) -> Settings:
        """The configuration by dotted keys, with today's defaults for keys that an older run did not write."""
        return {**default_settings(), **flatten(self.config)}

    @property
    def is_joint(self) -> bool:
        """Whether one client had all examples: nothing was federated."""
        return bool(self.settings["partition.scheme"] == "joint")


def find_runs(paths: Sequence[Path]) -> list[ReportedRun]:
    """Every run directory at or below the paths, in the order of their names, labelled.

    Raises:
      DataError: a path that is not there, or without a run below it.
    """
    folders: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            raise DataError(f"no folder {path}", mend="give run directories, or folders that hold some")
        below = [files.path for files in RunFolder.below(path)]
        if not below:
            raise DataError("no run directory", str(path), "give a folder below which `raysim run` wrote runs")
        folders |= dict.fromkeys(folder.resolve() for folder in below)
    return label([_read(folder) for folder in folders])


def _read(folder: Path) -> ReportedRun:
    files = RunFolder(folder)
    config, summary, environment = (_mapping(files, path) for path in (files.config, files.summary, files.environment))
    labels = dict(config.get("labels") or {})
    seed = labels.pop("seed", config.get("seed", 0))
    status = _status(files, config, summary)
    return ReportedRun(folder, status, config, summary, environment, labels, seed, is_named_by_methods=not labels)


def _status(files: RunFolder, config: Settings, summary: Settings) -> str:
    if not config:
        return "damaged: no readable config.yaml"
    status = files.status
    if status.name == "completed":
        return "finished" if summary else "damaged: no readable summary.json"
    if status.name == "failed":
        return f"failed: {status.message}" if status.message else "failed"
    try:
        return f"unfinished: {len(files.progress_rows())} of {config.get('rounds', '?')} rounds"
    except RaysimError as error:
        return f"damaged: {error.what}"


def _mapping(files: RunFolder, path: Path) -> Settings:
    """What a file holds; nothing if it cannot be read, or is not as the run wrote it."""
    try:
        files.check_unchanged(path)
        content = read_json(path) if path.suffix == ".json" else written_yaml(regular_file(path).read_text())
    except (OSError, ValueError, yaml.YAMLError, RaysimError):
        return {}
    return all_visible(content) if isinstance(content, dict) else {}


def label(runs: Sequence[ReportedRun]) -> list[ReportedRun]:
    """Give every run a dataset, a model and a method label; runs without labels also the settings in which they differ.

    Settings are named by their dotted keys (`partition.alpha`), or as the labels of other runs name them (`alpha`). Runs that
    would fall on one place of a table get those in which they differ. Options of a method that differ between runs of the same
    methods are written with its name, `fedprox (mu=0.1)`, so that rows need no empty columns.

    Labels of data set and model that the configuration does not bear out give way to what ran: a recipe scaled down to
    digits is not called CIFAR-10, and no published number stands beside it. Where several were claimed, the label
    `in place of` keeps them apart.
    """
    runs = [_without_methods(run) for run in runs]
    bare = [run for run in runs if not run.labels and run.config]
    unnamed = [run for run in runs if run.is_named_by_methods and run.config]
    names = _settings_of_labels(runs) if bare else {}
    varying = [key for key in differing([run.settings for run in bare]) if is_setting(key)]
    options: dict[str, list[Settings]] = {}
    for run in unnamed:
        options.setdefault(method_names(run.config), []).append(_options(run.config))
    varying_options = {methods: differing(alike) for methods, alike in options.items()}
    labelled = []
    for run in runs:
        claimed = unfounded(run)
        labels = labels_of(run.config, {key: value for key, value in run.labels.items() if key not in claimed})
        if not run.labels:
            of_settings = {
                names.get(key, key): run.settings.get(key)
                for key in dict.fromkeys([*names, *varying] * bool(run.config))
            }
            labels |= {key: as_label(value) for key, value in of_settings.items() if value is not None}
        if run.is_named_by_methods:
            own, names_of_options = _options(run.config), varying_options.get(str(labels["method"]), [])
            differences = ", ".join(f"{key}={own[key]}" for key in names_of_options if key in own)
            labels["method"] = f"{labels['method']} ({differences})" if differences else labels["method"]
        labelled.append(replace(run, labels=labels, claimed=claimed))
    labelled = _told_apart(labelled)
    claims = [" / ".join(map(str, run.claimed.values())) for run in labelled]
    if len({claim for claim in claims if claim}) > 1:
        pairs = zip(labelled, claims, strict=True)
        return [replace(run, labels={**run.labels, "in place of": claim}) if claim else run for run, claim in pairs]
    return labelled


def _without_methods(run: ReportedRun) -> ReportedRun:
    """A run without the label `methods` of a sweep over that key: its rows are the methods already."""
    if "method" in run.labels or "methods" not in run.labels:
        return run
    try:
        is_list = yaml.safe_load(str(run.labels["methods"])) == (run.config.get("methods") or [])
    except yaml.YAMLError:
        return run
    labels = {key: value for key, value in run.labels.items() if key != "methods" or not is_list}
    return replace(run, labels=labels, is_named_by_methods=is_list)


def is_setting(key: str) -> bool:
    """Whether a dotted key says what a run is, and has no label of its own."""
    return SILENT.isdisjoint((key, key.split(".")[0]))


def _settings_of_labels(runs: Sequence[ReportedRun]) -> dict[str, str]:
    """Dotted key of a setting -> the label that holds its value in every run that has the label."""
    names: dict[str, str] = {}
    for name in dict.fromkeys(name for run in runs for name in run.labels):
        having = [run for run in runs if name in run.labels]
        keys = [key for key in having[0].settings if is_setting(key) and (key == name or key.endswith(f".{name}"))]
        keys = [key for key in keys if all(is_same(run.labels[name], run.settings.get(key)) for run in having)]
        names |= {keys[0]: name} if len(keys) == 1 and keys[0] not in names else {}
    return names


def _told_apart(runs: Sequence[ReportedRun]) -> list[ReportedRun]:
    """Runs of equal labels and seed, but other parameters, get the settings in which they differ as labels, and all runs too."""
    places: dict[object, dict[object, ReportedRun]] = {}
    for run in runs:
        if run.is_finished:
            params = run.summary.get("params_sha256", run.folder)
            places.setdefault((frozenset(run.labels.items()), run.seed), {}).setdefault(params, run)
    keys = dict.fromkeys(
        key
        for twins in places.values()
        for key in differing([run.settings for run in twins.values()])
        if is_setting(key)
    )
    values = [{key: run.settings.get(key) for key in keys} for run in runs]
    added = [{key: as_label(value) for key, value in each.items() if value is not None} for each in values]
    return [replace(run, labels={**run.labels, **more}) for run, more in zip(runs, added, strict=True)]


def labels_of(config: Settings, given: Mapping[str, Label]) -> dict[str, Label]:
    """The given labels, below them data set, model and methods as the configuration names them."""
    return {"dataset": _name(config, "data"), "model": _name(config, "model"), "method": method_names(config), **given}


def _name(config: Settings, group: str) -> str:
    return str((config.get(group) or {}).get("name", "?"))


def unfounded(run: ReportedRun) -> dict[str, Label]:
    """Labels of data set and model that the configuration does not bear out, see `raysim.reporting.names`."""
    labels = {**run.labels, **run.claimed}
    is_true = {
        "dataset": is_set(labels.get("dataset"), _name(run.config, "data")),
        "model": is_network(labels.get("model"), run.config.get("model") or {}),
    }
    return {key: labels[key] for key in is_true if key in labels and not is_true[key]}


def misnamed(runs: Sequence[ReportedRun]) -> list[str]:
    """Labels of data set or model that the configuration does not bear out: `CIFAR-10 (ran on digits)`.

    So it is with recipes that were scaled down; their results say nothing about published numbers.
    """
    ran = {"dataset": ("ran on", "data"), "model": ("was", "model")}
    claims = [(claim, *ran[key], run) for run in runs for key, claim in unfounded(run).items()]
    return list(dict.fromkeys(f"{claim} ({word} {_name(run.config, group)})" for claim, word, group, run in claims))


def method_names(config: Settings) -> str:
    """The methods in order, `fedprox + fedvg`; fedavg for none."""
    specs = config.get("methods") or []
    return " + ".join(str(next(iter(spec))) if isinstance(spec, dict) else str(spec) for spec in specs) or "fedavg"


def _options(config: Settings) -> Settings:
    """Options of the methods, as `mu` if only one method is listed, else as `fedprox.mu`."""
    specs = config.get("methods") or []
    named = [item for spec in specs if isinstance(spec, dict) for item in spec.items()]
    prefixed = [(f"{name}." if len(specs) > 1 else "", options or {}) for name, options in named]
    return {f"{prefix}{key}": value for prefix, options in prefixed for key, value in options.items()}


@cache
def default_settings() -> Settings:
    """Today's default of every setting, by dotted keys."""
    return flatten(Config().model_dump(mode="json"))


def flatten(config: Settings, prefix: str = "") -> Settings:
    """A nested mapping by dotted keys."""
    flat: dict[str, object] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat


def differing(mappings: Sequence[Settings]) -> list[str]:
    """Keys that not all mappings have with one value, in order of first appearance."""
    keys = dict.fromkeys(key for mapping in mappings for key in mapping)
    return [key for key in keys if len({repr(mapping.get(key)) for mapping in mappings}) > 1]


def as_label(value: object) -> Label:
    return value if isinstance(value, str | int | float) and not isinstance(value, bool) else json.dumps(value)
