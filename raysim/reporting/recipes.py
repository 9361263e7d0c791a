"""Whether a run with published numbers beside it is the run of the recipe that has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from raysim.config import Config, read_config
from raysim.config.sweep import grid
from raysim.core.errors import ConfigError, Fault
from raysim.reporting.published import FOLDER, Label, Published, canonical, match, number, published
from raysim.reporting.runs import ABOUT, ReportedRun, Settings, flatten, labels_of

#: Groups and keys that move no result, or only its last bits.
ASIDE = ABOUT | {"data.root", "data.test_sets", "model.channels_last", "evaluation.batch_size", "evaluation.metrics"}
#: Methods that only look on.
ONLOOKERS = ("diagnostics", "keep_factors")

#: Changes that are listed; more only say that it is another experiment altogether.
MOST_KEYS = 6

Key = frozenset[tuple[str, str | float | None]]


@dataclass(frozen=True)
class RecipeTrial:
    """What a recipe runs for one cell of a published table. `key`: its labels, `_key`; `cell`: its published accuracy."""

    key: Key
    cell: Published | None
    settings: Settings


def changed(runs: Sequence[ReportedRun], theirs: Sequence[Published], tables: Sequence[str]) -> list[str]:
    """Settings of runs that are not those of the published numbers' recipe: `rounds = 2 (recipe: 200)`.

    Args:
      theirs: the cells of the tables, by which runs without the recipe's labels are recognised.
      tables: names of the published tables that stand beside the runs.
    """
    trials = [trial for name in dict.fromkeys(tables) for trial in _trials(name)]
    changes: dict[str, None] = {}
    for run in runs:
        cell, key = match(theirs, run.labels), _key(run.labels)
        meant = [trial for trial in trials if trial.key == key or (cell is not None and trial.cell == cell)]
        if meant:
            fewest: list[str] = min((_deviations(run, trial) for trial in meant), key=len)
            changes |= dict.fromkeys(fewest)
    more = [f"and {len(changes) - MOST_KEYS} more"] if len(changes) > MOST_KEYS else []
    return list(changes)[:MOST_KEYS] + more


def _deviations(run: ReportedRun, trial: RecipeTrial) -> list[str]:
    ours, recipe = compared(run.settings), trial.settings
    keys = [key for key in {**recipe, **ours} if ours.get(key) != recipe.get(key)]
    return [f"{key} = {ours.get(key)} (recipe: {recipe.get(key)})" for key in keys]


def compared(flat: Settings) -> Settings:
    """Of all settings by dotted keys those that make the experiment."""
    kept = {key: value for key, value in flat.items() if ASIDE.isdisjoint((key, key.partition(".")[0]))}
    methods = [spec if isinstance(spec, dict) else {spec: {}} for spec in kept.get("methods") or []]
    kept["methods"] = [
        {name: options or {} for name, options in spec.items()} for spec in methods if next(iter(spec)) not in ONLOOKERS
    ]
    if kept.get("model.pretrained") is not None:  # a file of the same weights has another name on every machine
        kept["model.pretrained"] = "given"
    if kept.get("local.steps") is not None:
        kept["local.epochs"] = None  # it does not count then; older runs wrote the default
    if kept["cohort.size"] is None:  # a number of clients, however it was given
        kept["cohort.size"] = max(1, int((kept["cohort.fraction"] or 1.0) * kept["partition.num_clients"] + 1e-9))
    return {key: value for key, value in kept.items() if value is not None and key != "cohort.fraction"}


def _key(labels: Mapping[str, Label]) -> Key:
    """Labels such that those that mean the same are equal, as `is_same` has it."""
    return frozenset(
        (key, canonical(value) if number(value) is None else number(value)) for key, value in labels.items()
    )


def tables_of(recipe: str) -> list[str]:
    """The published tables that belong to a recipe, `paper:fedvg/table_A3`.

    Raises:
      ConfigError: no recipe has this name, or it has no published table.
    """
    tables = (read_config(Path(recipe)).get("report") or {}).get("published")
    if not tables:
        text = f"{recipe} has no published table; `raysim recipes published` lists the tables"
        raise ConfigError([Fault("report.published", text)])
    return list(tables)


@cache
def _trials(table: str) -> list[RecipeTrial]:
    """One trial of every setting of the recipes whose report has a published table of that name."""
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


def _trial(cells: Sequence[Published], raw: Settings) -> RecipeTrial:
    checked = Config.model_validate(raw)
    config = checked.model_dump(mode="json")
    if checked.data.split == "auto" and checked.data.asks_for_fractions:
        config["data"]["split"] = "fraction"  # as its runs have it
    labels = labels_of(config, {key: value for key, value in raw["labels"].items() if key != "seed"})
    return RecipeTrial(_key(labels), match(cells, labels), compared(flatten(config)))
