"""Run directories: listed, read, labelled, and compared with the recipe of the published numbers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path

import yaml

from raysim.base.direction import declare
from raysim.base.errors import ConfigError, DataError, Fault, RaysimError
from raysim.base.settings import Raw as Settings
from raysim.base.settings import differing, flatten
from raysim.base.texts import all_visible, number
from raysim.base.untrusted import read_json, regular_file
from raysim.config import Config, read_config
from raysim.config.effects import has_effect, value_at
from raysim.config.sweep import grid
from raysim.folders.run_folder import FREE_KEYS, RunFolder, written_yaml
from raysim.reporting.published import FOLDER, Label, Published, canonical, is_network, is_set, match, published

#: Groups and keys for where and how a run is executed, which do not define the experiment.
ABOUT = {*FREE_KEYS, "seed"} - {"stop", "loggers"}

#: Groups and keys that do not become labels: they do not define the experiment, or have a label of their own.
SILENT = ABOUT | {"methods", "data.root", "data.name", "model.name"}

#: Value of a held-out setting that a recipe leaves to the data set and to the needs of its methods.
UNDECIDED = "auto"

#: Settings that decide which examples train.
HELD_OUT = ("data.split", "data.split_within_clients", "data.test", "data.validation")


@dataclass(frozen=True)
class ReportedRun:
    """A run directory. `status` is "finished", or a description of another state.

    Attributes:
      claimed: labels of data set and model that disagree with the configuration; `labels` then has the actual names.
      is_named_by_methods: whether the run's row is named after its methods and their options.
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
        return _dotted(self.config)

    def labels_by(self, keys: Iterable[str]) -> dict[str, Label]:
        """Return the configuration's values at dotted keys, without nulls."""
        return {
            key: value if isinstance(value, str | int | float) and not isinstance(value, bool) else json.dumps(value)
            for key in keys
            if (value := self.settings.get(key)) is not None
        }

    @property
    def meant(self) -> dict[str, Label]:
        """Labels with the claimed data set and model."""
        return {key: value for key, value in {**self.labels, **self.claimed}.items() if key != "in place of"}

    @property
    def is_joint(self) -> bool:
        """Whether a single client had all examples, so that training was not federated."""
        return bool(self.settings.get("partition.scheme") == "joint")


def find_runs(paths: Sequence[Path]) -> list[ReportedRun]:
    """Return the labelled runs at or below the paths, in the order of their names.

    Raises:
      DataError: a path does not exist, or has no run at or below it.
    """
    folders: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            raise DataError(f"no folder {path}", mend="give run directories, or folders of run directories")
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
    for name, direction in dict(summary.get("directions") or {}).items():
        declare(name, direction)
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
    """Return a file's mapping; empty for an unreadable or changed file."""
    try:
        files.check_unchanged(path)
        content = read_json(path) if path.suffix == ".json" else written_yaml(regular_file(path).read_text())
    except (OSError, ValueError, yaml.YAMLError, RaysimError):
        return {}
    return all_visible(content) if isinstance(content, dict) else {}


def label(runs: Sequence[ReportedRun]) -> list[ReportedRun]:
    """Return the runs, each with labels for data set, model and method; further labels tell the runs apart:

    - Runs without labels get the settings in which they differ, named by dotted keys (`partition.alpha`).
    - Runs that would share a place of a table get the settings in which they differ.
    - Options that differ between runs of the same methods are added to the method's name, `fedprox (mu=0.1)`, so that
      rows need no empty columns.
    - Labels of data set and model that disagree with the configuration are replaced by the actual names: a recipe
      scaled down to digits is not called CIFAR-10. If several names were claimed, the label `in place of` holds them.
    """
    runs = [_without_methods(run) for run in runs]
    bare = [run for run in runs if not run.labels and run.config]
    unnamed = [run for run in runs if run.is_named_by_methods and run.config]
    varying = [key for key in differing([run.settings for run in bare]) if is_setting(key)]
    options: dict[str, list[Settings]] = {}
    for run in unnamed:
        options.setdefault(row_methods(run.config), []).append(_options(run.config))
    varying_options = {methods: differing(alike) for methods, alike in options.items()}
    labelled = []
    for run in runs:
        claimed = unfounded(run)
        labels = run_labels(run.config, {key: value for key, value in run.labels.items() if key not in claimed})
        if not run.labels:
            labels |= run.labels_by(varying if run.config else ())
        if run.is_named_by_methods:
            run_options, names_of_options = _options(run.config), varying_options.get(str(labels["method"]), [])
            differences = ", ".join(f"{key}={run_options[key]}" for key in names_of_options if key in run_options)
            labels["method"] = f"{labels['method']} ({differences})" if differences else labels["method"]
        labelled.append(replace(run, labels=labels, claimed=claimed))
    labelled = _told_apart(labelled)
    claims = [" / ".join(map(str, run.claimed.values())) for run in labelled]
    if len({claim for claim in claims if claim}) > 1:
        pairs = zip(labelled, claims, strict=True)
        return [replace(run, labels={**run.labels, "in place of": claim}) if claim else run for run, claim in pairs]
    return labelled


def _without_methods(run: ReportedRun) -> ReportedRun:
    """Drop the label `methods` of a sweep over the key, since rows are named by methods."""
    if "method" in run.labels or "methods" not in run.labels:
        return run
    try:
        is_list = yaml.safe_load(str(run.labels["methods"])) == (run.config.get("methods") or [])
    except yaml.YAMLError:
        return run
    labels = {key: value for key, value in run.labels.items() if key != "methods" or not is_list}
    return replace(run, labels=labels, is_named_by_methods=is_list)


def is_setting(key: str) -> bool:
    """Whether a dotted key describes a run and has no label of its own."""
    return SILENT.isdisjoint((key, key.split(".")[0]))


def _told_apart(runs: Sequence[ReportedRun]) -> list[ReportedRun]:
    """Label all runs by the settings that differ between runs with equal labels and different final parameters.

    `partition.seed` becomes a label only if it differs between runs of the same seed; otherwise such runs share a cell.
    """
    keys: dict[str, None] = {}
    for of_one_seed in (True, False):
        places: dict[object, dict[object, ReportedRun]] = {}
        for run in runs:
            if run.is_finished:
                place = frozenset(run.labels.items()), run.seed if of_one_seed else None
                places.setdefault(place, {}).setdefault(run.summary.get("params_sha256", run.folder), run)
        for twins in places.values():
            varying = filter(is_setting, differing([run.settings for run in twins.values()]))
            keys |= dict.fromkeys(key for key in varying if of_one_seed or key != "partition.seed")
    return [replace(run, labels={**run.labels, **run.labels_by(keys)}) for run in runs]


def run_labels(config: Settings, given: Mapping[str, Label]) -> dict[str, Label]:
    """Return the given labels, completed by data set, model and methods from the configuration."""
    return {"dataset": _name(config, "data"), "model": _name(config, "model"), "method": row_methods(config), **given}


def _name(config: Settings, group: str) -> str:
    return str((config.get(group) or {}).get("name", "?"))


def unfounded(run: ReportedRun) -> dict[str, Label]:
    """Return labels of data set and model that disagree with the configuration, by `is_set` and `is_network`."""
    is_true = {
        "dataset": is_set(run.labels.get("dataset"), _name(run.config, "data")),
        "model": is_network(run.labels.get("model"), run.config.get("model") or {}),
    }
    return {key: run.labels[key] for key in is_true if key in run.labels and not is_true[key]}


def misnamed(runs: Sequence[ReportedRun]) -> list[str]:
    """Return labels of data set or model that disagree with the configuration: `CIFAR-10 (ran on digits)`.

    Scaled-down recipes have such labels; their results say nothing about published numbers.
    """
    ran = {"dataset": ("ran on", "data"), "model": ("was", "model")}
    claims = [(claim, *ran[key], run) for run in runs for key, claim in run.claimed.items()]
    return list(dict.fromkeys(f"{claim} ({word} {_name(run.config, group)})" for claim, word, group, run in claims))


def other_rows(runs: Sequence[ReportedRun], rows: str) -> list[str]:
    """Return a sentence for each setting of the held-out rows that differs between rows of the tables.

    Args:
      rows: the label whose values are the rows.
    """
    notes = []
    for data in dict.fromkeys(_name(run.config, "data") for run in runs):
        of_set = [run for run in runs if _name(run.config, "data") == data]
        for key in HELD_OUT:
            values: dict[Label | None, set[str]] = {}
            for run in of_set:
                values.setdefault(run.labels.get(rows), set()).add(str(run.labels_by([key]).get(key, "null")))
            if len(set(map(frozenset, values.values()))) > 1:
                said = "; ".join(f"{row}: {', '.join(sorted(each))}" for row, each in values.items())
                text = f"Rows of the tables trained on different examples of {data}: `{key}` is not the same"
                notes.append(f"{text} ({said}). Set it in all runs.")
    return notes


def row_methods(config: Settings) -> str:
    """Return the methods in order, `fedprox + fedvg`; fedavg for none."""
    return " + ".join(name for name, _ in _specs(config.get("methods"))) or "fedavg"


def _specs(methods: Iterable[object] | None) -> list[tuple[str, Settings]]:
    """Return (name, options) of each method in a configuration's list."""
    pairs = (next(iter(spec.items())) if isinstance(spec, dict) else (spec, {}) for spec in methods or ())
    return [(str(name), options or {}) for name, options in pairs]


def _options(config: Settings) -> Settings:
    """Return the options of the methods: `mu` for a single method, else `fedprox.mu`."""
    specs = _specs(config.get("methods"))
    prefixed = [(f"{name}." if len(specs) > 1 else "", options) for name, options in specs]
    return {f"{prefix}{key}": value for prefix, options in prefixed for key, value in options.items()}


@cache
def default_settings() -> Settings:
    """Return today's default of every setting, by dotted keys."""
    return flatten(Config().model_dump(mode="json"))


def _dotted(config: Settings) -> Settings:
    """Return a configuration by dotted keys, completed by today's defaults.

    A name with options also sets the key itself: `data.shift: noise` beside `data.shift.noise.std: 0.1`.
    """
    flat, defaults = flatten(config), default_settings()
    above = {key[:end] for key in flat for end, letter in enumerate(key) if letter == "."}
    choices = {key: value_at(config, key) for key in above if isinstance(defaults.get(key), str)}
    names = {key: next(iter(choice)) for key, choice in choices.items() if isinstance(choice, Mapping)}
    return {key: value for key, value in defaults.items() if key not in above} | names | flat


#: Groups and keys that do not change results, or change only the last bits.
ASIDE = ABOUT | {"data.root", "data.test_sets", "evaluation.batch_size", "evaluation.metrics"}

#: Methods that only record and do not change training.
ONLOOKERS = ("diagnostics", "keep_factors")

Key = frozenset[tuple[str, str | float | None]]


def changed_settings(runs: Sequence[ReportedRun], theirs: Sequence[Published], tables: Sequence[str]) -> list[str]:
    """Return differences to the recipe of the published numbers: `rounds = 2 (recipe: 200)`.

    Args:
      theirs: the cells of the tables, by which runs without the recipe's labels are recognised.
      tables: names of the published tables that stand beside the runs.
    """
    trials = [trial for name in dict.fromkeys(tables) for trial in _trials(name)]
    changes: dict[str, None] = {}
    today = Config()
    for run in runs:
        cell, key = match(theirs, run.meant), _key(run.meant)
        meant = [recipe for its_key, its_cell, recipe in trials if its_key == key or (cell and its_cell == cell)]
        if meant:
            fewest: list[str] = min((_deviations(run, recipe, today) for recipe in meant), key=len)
            changes |= dict.fromkeys(fewest)
    return list(changes)


def _deviations(run: ReportedRun, recipe: Settings, today: Config) -> list[str]:
    ours = compared(run.settings)
    keys = [key for key in {**recipe, **ours} if ours.get(key) != recipe.get(key)]
    keys = [key for key in keys if key not in run.settings or has_effect(key, run.settings, today)]
    keys = [key for key in keys if not (key in HELD_OUT and recipe.get(key) == UNDECIDED)]
    return [f"{key} = {ours.get(key)} (recipe: {recipe.get(key)})" for key in keys]


def compared(flat: Settings) -> Settings:
    """Return the settings, by dotted keys, that define the experiment."""
    kept = {key: value for key, value in flat.items() if ASIDE.isdisjoint((key, key.partition(".")[0]))}
    kept["methods"] = [{name: options} for name, options in _specs(kept.get("methods")) if name not in ONLOOKERS]
    if kept.get("model.pretrained") is not None:  # a file of the same weights has another name on every machine
        kept["model.pretrained"] = "given"
    if kept["cohort.size"] is None:  # a fraction is converted to a number of clients
        kept["cohort.size"] = max(1, int((kept["cohort.fraction"] or 1.0) * kept["partition.num_clients"] + 1e-9))
    return {key: value for key, value in kept.items() if value is not None and key != "cohort.fraction"}


def _key(labels: Mapping[str, Label]) -> Key:
    """Return labels in canonical form: labels with the same meaning are equal, as in `is_same`."""
    numbers = {key: number(value) for key, value in labels.items()}
    return frozenset((key, canonical(labels[key]) if value is None else value) for key, value in numbers.items())


def tables_of(recipe: str) -> list[str]:
    """Return the published tables that belong to a recipe such as `paper:fedvg/table_A3`.

    Raises:
      ConfigError: no recipe has this name, or it has no published table.
    """
    tables = (read_config(Path(recipe)).get("report") or {}).get("published")
    if not tables:
        text = f"{recipe} has no published table; `raysim recipes published` lists the tables"
        raise ConfigError([Fault("report.published", text)])
    return list(tables)


@cache
def _trials(table: str) -> list[tuple[Key, Published | None, Settings]]:
    """Return (canonical labels, published cell, settings) of the trials of all recipes that report a published table.

    Trials that differ only in their seed are returned once.
    """
    if not (FOLDER / f"{table}.csv").is_file():
        return []
    cells, trials = published(table), []
    for path in sorted(FOLDER.parent.glob("*/*.yaml")):
        raw = read_config(path) if table in path.read_text() else {}
        if table in ((raw.get("report") or {}).get("published") or ()) and (raw.get("tune") or {}).get("param_space"):
            if "seed" in raw["tune"]["param_space"]:
                raw["tune"]["param_space"]["seed"] = {"grid_search": [0]}
            trials += [_trial(cells, trial.raw) for trial in grid(raw, str(path))]
    return trials


def _trial(cells: Sequence[Published], raw: Settings) -> tuple[Key, Published | None, Settings]:
    checked = Config.model_validate(raw)
    config = checked.model_dump(mode="json")
    if checked.data.split == "auto" and checked.data.asks_for_fractions:
        config["data"]["split"] = "fraction"  # the value that runs record for "auto"
    if "validation" not in checked.data.model_fields_set:
        config["data"]["validation"] = UNDECIDED
    labels = run_labels(config, {key: value for key, value in raw["labels"].items() if key != "seed"})
    return _key(labels), match(cells, labels), compared(_dotted(config))
