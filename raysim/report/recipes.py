"""Whether a run with published numbers beside it is the run of the recipe that has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from raysim.config import Config, read_config
from raysim.report.published import FOLDER, Label, Published, canonical, match, number, published
from raysim.report.runs import ABOUT, Run, flatten, labels_of, settings
from raysim.sweep import grid

#: Groups and keys that move no result, or only its last bits.
ASIDE = (
    *ABOUT,
    "data.root",
    "model.channels_last",
    "evaluation.batch_size",
    "evaluation.metrics",
    "data.test_sets",
)
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
    settings: Mapping[str, Any]


def changed(runs: Sequence[Run], theirs: Sequence[Published], tables: Sequence[str]) -> list[str]:
    """Settings of runs that are not those of the published numbers' recipe: `rounds = 2 (recipe: 200)`.

    Args:
      theirs: the cells of the tables, by which runs without the recipe's labels are recognised.
      tables: names of the published tables that stand beside the runs.
    """
    trials = [trial for name in dict.fromkeys(tables) for trial in _trials(name)]
    found: dict[str, None] = {}
    for run in runs:
        cell, key = match(theirs, run.labels), _key(run.labels)
        meant = [trial for trial in trials if trial.key == key or (cell is not None and trial.cell == cell)]
        if meant:
            fewest: list[str] = min((_deviations(run, trial) for trial in meant), key=len)
            found |= dict.fromkeys(fewest)
    more = [f"and {len(found) - MOST_KEYS} more"] if len(found) > MOST_KEYS else []
    return list(found)[:MOST_KEYS] + more


def _deviations(run: Run, trial: RecipeTrial) -> list[str]:
    mine = compared(settings(run.config))
    keys = [key for key in {**trial.settings, **mine} if mine.get(key) != trial.settings.get(key)]
    return [f"{key} = {mine.get(key)} (recipe: {trial.settings.get(key)})" for key in keys]


def compared(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Of all settings by dotted keys those that make the experiment."""
    kept = {key: value for key, value in flat.items() if key not in ASIDE and key.partition(".")[0] not in ASIDE}
    methods = [spec if isinstance(spec, dict) else {spec: {}} for spec in kept.get("methods") or []]
    kept["methods"] = [
        {name: options or {} for name, options in spec.items()} for spec in methods if next(iter(spec)) not in ONLOOKERS
    ]
    if kept.get("model.pretrained") is not None:  # a file of the same weights has another name on every machine
        kept["model.pretrained"] = "given"
    if kept["cohort.size"] is None:  # a number of clients, however it was given
        kept["cohort.size"] = max(1, int((kept["cohort.fraction"] or 1.0) * kept["partition.num_clients"] + 1e-9))
    return {key: value for key, value in kept.items() if value is not None and key != "cohort.fraction"}


def _key(labels: Mapping[str, Label]) -> Key:
    """Labels such that those that mean the same are equal, as `is_same` has it."""
    return frozenset(
        (key, canonical(value) if number(value) is None else number(value)) for key, value in labels.items()
    )


@cache
def _trials(table: str) -> list[RecipeTrial]:
    """One trial of every setting of the recipes whose report has a published table of that name."""
    if not (FOLDER / f"{table}.csv").is_file():
        return []
    cells = published(table)
    found = []
    for path in sorted(FOLDER.parent.glob("*/*.yaml")):
        raw = read_config(path) if table in path.read_text() else {}
        if table in ((raw.get("report") or {}).get("published") or ()) and (raw.get("tune") or {}).get("param_space"):
            found += [_trial(cells, trial.raw) for trial in grid(_of_one_seed(raw), str(path))]
    return found


def _of_one_seed(raw: dict[str, Any]) -> dict[str, Any]:
    space: dict[str, Any] = raw["tune"]["param_space"]
    if "seed" not in space:
        return raw
    ((domain, seeds),) = space["seed"].items()
    return {**raw, "tune": {**raw["tune"], "param_space": {**space, "seed": {domain: seeds[:1]}}}}


def _trial(cells: Sequence[Published], raw: Mapping[str, Any]) -> RecipeTrial:
    config = Config.model_validate(raw).model_dump(mode="json")
    labels = labels_of(config, {key: value for key, value in raw["labels"].items() if key != "seed"})
    return RecipeTrial(_key(labels), match(cells, labels), compared(flatten(config)))
