"""Every recipe is checked whole, runs scaled down, and holds the settings that the papers print."""

from __future__ import annotations

import csv
import json
import re
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import yaml

from raysim.config import parse_config
from raysim.config.overlays import layered
from raysim.config.sweep import Trial, grid
from raysim.data.readers.reader_options import ReaderOptions
from raysim.data.sources import prepare
from raysim.folders.run_folder import RunFolder
from raysim.models import find_architecture
from raysim.plan.check import check
from raysim.plan.find import build_methods
from raysim.reporting.gather import make_report
from raysim.reporting.published import canonical, is_network, match, published
from raysim.reporting.report import write
from raysim.running.runner import execute
from raysim.tuning.calibrate import plan_calibration
from tests.support.recipe_files import read_recipe
from tests.support.stub_sets import NUMBERS

PROJECT = Path(__file__).parent.parent.parent
PAPERS = PROJECT / "configs" / "papers"
STUDIES = PROJECT / "configs" / "studies"
RECIPES = sorted(p for p in [*PAPERS.glob("*/*.yaml"), *STUDIES.glob("*.yaml")] if p.stem != "base")
CALIBRATIONS = [path for path in RECIPES if "calibrate" in read_recipe(path)]
RUNS = [path for path in RECIPES if path not in CALIBRATIONS]


def ends_of(domain):
    """The bounds of a range, or what a choice chooses from."""
    ((kind, arguments),) = domain.items()
    return arguments if kind == "choice" else arguments[:2]


@cache
def trials_of(path, *, is_scaled=False):
    """The trials of a sweep, or the one run of any other file; shared, so not to be changed."""
    raw = read_recipe(path)
    space = raw.get("tune", {}).get("param_space", {})
    # A search: the ends of its ranges stand for what it draws.
    lists = {
        axis: domain if "grid_search" in domain else {"grid_search": ends_of(domain)} for axis, domain in space.items()
    }
    raw["tune"] = {**raw.get("tune", {}), "param_space": lists}
    one = layered(raw, {}, str(path), is_scaled=True) if is_scaled else raw
    if raw["tune"].get("param_space"):
        return grid(one, str(path))
    return [Trial(path.stem, {}, {**one, "labels": {"seed": one.get("seed", 0)}})]


SCALED = {path: trials_of(path, is_scaled=True) for path in RUNS}


def parts_of(path, trial):
    """What only training tries: methods, their options by name, the network, the scheme of the partition; and in each
    recipe whatever is measured, which its report may draw."""
    partition = trial.raw.get("partition", {})
    parts = {
        ("model", json.dumps(trial.raw["model"], sort_keys=True)),
        ("scheme", partition.get("scheme"), partition.get("form")),
    }
    for spec in trial.raw.get("methods", []):
        ((name, options),) = spec.items() if isinstance(spec, dict) else [(spec, {})]
        parts |= {("method", name), *(("option", name, option) for option in options)}
        parts |= {(path, measure) for measure in options.get("measures", ())}
    return parts


def trained():
    """(recipe, trial) of those that are trained: one of each recipe, with the most that none before it has, and what it
    then takes until every part of every trial is in one of them. The others are planned."""
    missing = set().union(*(parts_of(path, trial) for path, trials in SCALED.items() for trial in trials))
    chosen = []

    def choose(candidates):
        path, trial = max(candidates, key=lambda pair: (len(parts_of(*pair) & missing), len(parts_of(*pair))))
        chosen.append((path, trial))
        missing.difference_update(parts_of(path, trial))

    for path, trials in SCALED.items():
        choose([(path, trial) for trial in trials])
    while missing:
        choose([(path, trial) for path, trials in SCALED.items() for trial in trials])
    return chosen


TRAINED = trained()


#: How many seeds the recipes of a folder have, and recipes that have another number.
SEEDS = {"fedvg": 5, "flfa": 3, "univarfl": 3, "livar": 3, "niid_bench": 3, "studies": 5}
OTHER_SEEDS = {
    **dict.fromkeys(("fedvg/figure_A1", "flfa/table_10", "flfa/layers"), 1),
    **dict.fromkeys([f"studies/{name}_pretrain" for name in ("livar", "livar_tiny", "fedvg", "shakespeare")], 1),
    **dict.fromkeys([f"studies/{name}" for name in ("combinations", "corner", "univarfl_pacs", "flfa_claim")], 3),
    **dict.fromkeys([f"studies/{name}" for name in ("univarfl_cifar10", "shakespeare", "shakespeare_lora")], 3),
    "studies/fedvg_scoring": 3,
    **dict.fromkeys([f"studies/{name}" for name in ("leaderboard", "flfa_cifar10", "fedvg_cifar10")], 1),
    "studies/fedvg_claim": 4,
    "studies/fedvg_claim_premise": 4,
    "livar/table_4": 5,
    "livar/table_4_test": 8,
}


def rows_of(name):
    with open(PAPERS / "published" / f"{name}.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_trial_of_a_recipe_is_sound(path):
    trials = trials_of(path)
    assert not parse_config({"tune": read_recipe(path).get("tune", {})})[1]
    assert len({trial.name for trial in trials}) == len(trials)
    assert all("seed" in trial.raw["labels"] for trial in trials)
    beside_seeds = {
        json.dumps({**trial.raw, "seed": 0, "labels": {}}, sort_keys=True, default=str): trial for trial in trials
    }
    for trial in beside_seeds.values():
        config, faults = parse_config(trial.raw)
        _, wrong = build_methods(trial.raw.get("methods", []))
        assert not faults + wrong, (trial.name, faults + wrong)
        assert config is not None
        assert find_architecture(config.model.name)
    if path not in CALIBRATIONS:
        count = OTHER_SEEDS.get(f"{path.parent.name}/{path.stem}", SEEDS[path.parent.name])
        assert {trial.raw.get("seed", 0) for trial in trials} == set(range(count))


def test_scaled_recipes_exercise_what_the_full_ones_name():
    """Schemes, networks and settings that only a few recipes of a paper have."""
    schemes, options, momenta, external = set(), set(), set(), set()
    for path, trial in TRAINED:
        config, _ = parse_config(trial.raw)
        schemes.add((path.parent.name, config.partition.scheme.name))
        options |= {(path.parent.name, config.model.name, key) for key in config.model.model_extra or {}}
        momenta |= {path.parent.name} if config.local.momentum else set()
        external |= {path.stem} if config.data.validation_set.external.name else set()
    assert {("univarfl", "domain"), ("univarfl", "dirichlet"), ("fedvg", "nine_plus_one")} <= schemes
    assert {("univarfl", "univarfl_cnn", "projector_width"), ("univarfl", "resnet18", "first_stride")} <= options
    assert ({"fedvg", "flfa", "univarfl"} <= momenta, external) == (True, {"figure_6"})
    assert any(parse_config(trial.raw)[0].model.lora for _, trial in TRAINED)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A data root with the bundled digits, and few of the drawn shapes, which are made in full where there are none."""
    folder = tmp_path_factory.mktemp("data")
    prepare("digits", folder)
    prepare("shapes", folder, options=ReaderOptions(count=800, size=24))
    return folder


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory):
    """The scaled sweeps that the tests of this file run, a folder for each recipe."""
    return tmp_path_factory.mktemp("sweeps")


def planned(path, trial, root, folder):
    """The plan of a scaled trial inside the folder of its sweep."""
    folder.mkdir(exist_ok=True)
    (folder / "sweep.yaml").write_text(yaml.safe_dump(layered(read_recipe(path), {}, str(path), is_scaled=True)))
    raw = {**trial.raw, "storage": str(folder), "name": trial.name}
    raw["data"] = {**raw["data"], "root": str(root)}
    raw["checkpoint"] = {"every_s": 1000}
    raw["resources"] = {**raw.get("resources", {}), "backend": "serial"}  # where it computes is tested elsewhere
    return check(raw, trial.name)


def run_scaled(path, trial, root, folder):
    """(summary, records of the rounds) of a trial."""
    records = []
    plan = planned(path, trial, root, folder)
    return execute(plan, on_start=lambda *_: None, on_round=records.append), records


def stand_in(path, trial, root, folder, other):
    """The folder of a trial that is planned alone: its own configuration, with the records of another one."""
    copy = RunFolder(shutil.copytree(folder / other.name, folder / trial.name))
    plan = planned(path, trial, root, folder)
    copy.config.write_text(yaml.safe_dump(plan.config.model_dump(mode="json")))
    copy.mark("COMPLETED", "")  # with the checksums of these files


@pytest.mark.slow
@pytest.mark.parametrize(("path", "trial"), TRAINED, ids=[f"{p.stem}-{t.name}" for p, t in TRAINED])
def test_recipe_runs_scaled_down(path, trial, root, sweeps):
    summary, records = run_scaled(path, trial, root, sweeps / f"{path.parent.name}_{path.stem}")
    assert summary["rounds"] == len(records) == 2
    assert np.isfinite(summary[summary["main_metric"]])
    assert all(np.isfinite(record.metrics["train/loss"]) for record in records)
    assert all(record.clients["num_steps"].sum() > 0 for record in records)


def network_of(raw):
    """The printed name of a network that a scaled trial has as well, else what it has instead."""
    printed = raw["labels"].get("model", raw["model"]["name"])
    return printed if is_network(printed, raw["model"]) else raw["model"]["name"]


#: What a report may lack where a sweep was shrunk to a few trials: rows to compare with, and figures along alpha or rows.
SHRUNK = re.compile(
    r"`report.(gain|against|baseline|time|target)`: no |Figure `(lines|integration|drift|imbalance|space|gains)` is not drawn"
)


@pytest.mark.slow
@pytest.mark.parametrize("path", RUNS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_recipe_reports_on_its_scaled_sweep(path, root, sweeps, tmp_path):
    folder = sweeps / f"{path.parent.name}_{path.stem}"
    trials, runs = SCALED[path], [trial for recipe, trial in TRAINED if recipe == path]
    for trial in [*runs, *trials]:
        if (folder / trial.name / "COMPLETED").exists():
            continue
        if trial in runs:  # this test was chosen alone
            run_scaled(path, trial, root, folder)
        else:
            stand_in(path, trial, root, folder, runs[0])
    report = make_report([folder], {})
    text = write(report, tmp_path / "out").read_text()
    assert sum(cell.n for cell in report.cells) == len(trials)
    assert not any(cell.published for cell in report.cells)
    assert "published (difference)" not in text
    ran = {(canonical(t.raw["data"]["name"]), canonical(network_of(t.raw))) for t in trials}
    assert {(canonical(c.labels["dataset"]), canonical(c.labels["model"])) for c in report.cells} == ran
    notes = re.findall("^- (.*)$", text.partition("## Notes")[2], re.MULTILINE)
    assert all(SHRUNK.match(note) for note in notes), notes


# --- FedVG, tables A.1 and A.2 ----------------------------------------------------------------------------------------

READ = {  # the words of table A.1 -> what the configuration says
    "Number of Clients": lambda c: c.partition.num_clients,
    "Join Ratio": lambda c: c.cohort.fraction,
    "Batch Size": lambda c: c.local.batch_size,
    "Optimizer": lambda c: c.local.optimizer.upper(),
    "Learning Rate": lambda c: c.local.lr,
    "Momentum": lambda c: c.local.momentum,
    "Number of Rounds": lambda c: c.rounds,
    "Local Epochs": lambda c: c.local.epochs,
}
#: What sets hold as prepared (height, width, channels), where the recipe does not resize.
STORED = {
    "cifar10": (32, 32, 3),
    "organamnist": (28, 28, 1),
    "tiny_imagenet": (64, 64, 3),
    "dermamnist_224": (224, 224, 3),
    "covid19": (224, 224, 3),
}


@cache
def fedvg_trials():
    """(table, labels, configuration, the same as it is in the file) of every trial."""
    tables = {name: read_recipe(PAPERS / "fedvg" / f"table_{name}.yaml") for name in ("A3", "A4", "A7", "A8")}
    trials = [(name, trial.raw) for name, raw in tables.items() for trial in grid(raw, name)]
    return [(name, raw["labels"], parse_config(raw)[0], raw) for name, raw in trials]


@pytest.mark.slow
def test_fedvg_settings_are_those_of_table_A1():
    seen = set()
    wanted = rows_of("fedvg_table_A1")
    for _, labels, config, _ in fedvg_trials():
        mine = [r for r in wanted if r["dataset"] == labels["dataset"] and labels["model"] in r["model"].split("|")]
        assert len(mine) == 10, labels
        for row in mine:
            what, value = row["setting"].removeprefix("hyperparameter="), row["value"]
            height, width, channels = STORED[config.data.name]
            if config.data.resize:
                height = width = config.data.resize
            if what == "Image Size":  # 244x224 is the paper's misprint of 224x224
                got, value = f"{height}x{width}", value.replace("244x224", "224x224")
            elif what == "Input Channels":
                got = config.data.channels or channels
            else:
                got = READ[what](config)
            assert str(got) == value or float(got) == float(value), (labels, what, got, value)
            seen.add((row["dataset"], what))
    assert len(seen) == len(wanted)


def test_fedvgs_first_lines_name_covid19_as_printed_and_as_it_is():
    """244 x 224 in table A.1, 9,523 images in section 4.1, and the 9,208 that the set's own page counts."""
    text = (PAPERS / "fedvg" / "base.yaml").read_text().split("seed:")[0]
    rows = [row for name in ("fedvg_table_A1", "fedvg_inline") for row in rows_of(name) if row["dataset"] == "COVID19"]
    sides = {row["value"] for row in rows if "Image Size" in row["setting"]}
    sizes = [int(row["value"]) for row in rows if row["metric"] == "dataset_size"]
    counted = sum(NUMBERS["covid19"]["like"])
    assert (sides, sizes, counted) == ({"244x224"}, [9523], 9208)
    assert all(words in text for words in ("244 x 224", f"{sizes[0]:,}", f"{counted:,}"))


@pytest.mark.slow
def test_fedvg_hyperparameters_are_those_of_table_A2():
    wanted = {
        (r["method"], r["setting"].removeprefix("hyperparameter=")): float(r["value"])
        for r in rows_of("fedvg_table_A2")
    }
    keys = {
        ("FedAvgM", "server momentum"): ("fedavgm", "beta"),
        ("FedProx", "mu"): ("fedprox", "mu"),
        ("Scaffold", "global lr"): ("scaffold", "server_lr"),
        ("FedDyn", "alpha"): ("feddyn", "alpha"),
        ("FedDyn", "max_grad_norm"): ("feddyn", "max_grad_norm"),
        ("Elastic", "sample_ratio"): ("elastic", "sample_ratio"),
        ("Elastic", "tau"): ("elastic", "tau"),
        ("Elastic", "mu"): ("elastic", "mu"),
    }
    assert set(keys) == set(wanted)
    seen = set()
    for _, labels, _, raw in fedvg_trials():
        base = labels.get("method", "").removesuffix(" + FedVG")
        for (method, what), (name, option) in keys.items():
            if method == base:
                (options,) = [item[name] for item in raw["methods"] if isinstance(item, dict) and name in item]
                assert options[option] == wanted[method, what]
                seen.add((method, what))
    assert seen == set(wanted)


def test_fedvg_cases_are_those_of_the_published_tables():
    for name in ("A3", "A4", "A7", "A8"):
        ours = {
            (labels["dataset"], labels["model"], float(labels["alpha"]))
            for table, labels, _, _ in fedvg_trials()
            if table == name
        }
        theirs = {
            (r["dataset"], r["model"], float(r["setting"].partition(";")[0].removeprefix("alpha=")))
            for r in rows_of(f"fedvg_table_{name}")
        }
        assert ours == theirs


# --- LIVAR: the released code's settings where the paper is silent ----------------------------------------------------


@pytest.mark.parametrize("name", ["table_1", "table_2", "table_3", "table_4"])
def test_livar_trials_meet_every_published_cell_and_have_the_codes_settings(name):
    cells = published(f"livar_{name}")
    met = []
    for trial in trials_of(PAPERS / "livar" / f"{name}.yaml"):
        labels = {key: value for key, value in trial.raw["labels"].items() if key != "seed"}
        cell = match(cells, labels)
        assert cell is not None or labels["method"] == "Joint", labels
        met += [cell] if cell else []
        config, _ = parse_config(trial.raw)
        local, part = config.local, config.partition
        assert (local.optimizer, local.batch_size) == ("adamw", 16)  # rates by method: test_methods.py
        assert (config.rounds, local.epochs, config.data.crop or config.data.resize) == (5, 5, 224)
        is_joint = labels["method"] == "Joint"
        assert config.num_clients == config.cohort_size == (1 if is_joint else 10)
        partition = (part.form, part.min_samples, part.alpha)
        assert is_joint or partition == ("sample", 6, labels.get("beta", 0.05))
        trains_adapters = "LIVAR" in labels["method"] or name == "table_4"
        assert (config.model.lora.rank if config.model.lora else None) == (16 if trains_adapters else None)
        assert config.model.name == "timm:vit_base_patch16_224.augreg_in21k"
    assert all(cell in met for cell in cells)


def test_calibrations_have_the_stated_settings():
    of_papers = [path for path in CALIBRATIONS if path.parent != STUDIES]
    assert len(of_papers) == 5
    for path in of_papers:
        config, _ = parse_config(read_recipe(path))
        group = config.calibrate
        assert (config.rounds, config.num_clients, config.partition.alpha, config.local.epochs) == (1, 5, 0.5, 5)
        assert (group.partitions, group.seeds, group.trees) == (3, 3, 500)
        assert config.model.lora.rank == 16
        assert path.stem == "calibration" or config.name == f"livar_{path.stem}"


def test_calibration_is_sound_scaled_down(root, tmp_path):
    """It is planned here; tests/tuning/test_calibrate.py runs one, and other recipes of LIVAR train this network."""
    path = PAPERS / "livar" / "calibration.yaml"
    raw = layered(read_recipe(path), {}, str(path), is_scaled=True)
    raw = {**raw, "storage": str(tmp_path), "data": {**raw["data"], "root": str(root)}}
    trials = plan_calibration(raw, str(path)).trials
    assert [trial.config.num_clients for trial in trials] == [5, 1]
    lora = parse_config(raw)[0].model.lora
    assert any(
        parse_config(trial.raw)[0].model.lora == lora for recipe, trial in TRAINED if recipe.parent == path.parent
    )
