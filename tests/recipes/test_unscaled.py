"""Every recipe as it stands, at full size, up to its first round: planned, checked, partitioned, its models built."""

from __future__ import annotations

import itertools
import json
import re
from functools import cache
from pathlib import Path

import medmnist
import numpy as np
import pytest
from safetensors.torch import save_file

import raysim.config.sweep
import raysim.plan.check_data
from raysim.cli.partitions import partitions
from raysim.config import parse_config
from raysim.models import build_model
from raysim.plan.build import model_spec
from raysim.plan.check import check, check_partition
from raysim.reporting.published import ACCURACIES, match, published
from raysim.reporting.runs import row_methods
from raysim.tuning.calibrate import plan_calibration
from raysim.tuning.plan import plan_sweep
from tests.recipes.test_recipes import CALIBRATIONS, PAPERS, RECIPES, STUDIES, rows_of, trials_of
from tests.support.recipe_files import read_recipe
from tests.support.stub_sets import NUMBERS, StubSet, make_root, stub_columns, stub_info

#: Trials that repeat another trial: joint training, which no beta or alpha changes; see `of_a_kind`.
REPEATS = {"livar/table_1": 4, "livar/table_2": 4, "studies/livar_digits": 5}

#: Pairs of the map of combinations that cannot run together.
REFUSED: dict[str, set[tuple[str, str]]] = {
    "studies/combinations": {("CCVR", "Freeze")},
    "studies/corner": {("DP", "SCAFFOLD"), ("DP", "FLFA"), ("DP", "ALIE"), ("DP", "ALIE-z-1.5")},
}


@pytest.fixture(scope="module")
def stubs(tmp_path_factory):
    """A data root of stub sets, and `check` that reads them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(raysim.plan.check_data, "PreparedSet", StubSet)
        yield make_root(tmp_path_factory.mktemp("stubs"))


@pytest.fixture(scope="module")
def pretrained(stubs, tmp_path_factory):
    """pretrained(what stands for `model.pretrained`): the weights that such a run of configs/studies would leave."""
    folder = tmp_path_factory.mktemp("pretrained")

    @cache
    def weights(path):
        name = path.removeprefix("runs/").partition("_pretrain")[0] + "_pretrain"
        config, _ = parse_config(read_recipe(STUDIES / f"{name}.yaml"))
        info = stub_info(config.data.name)
        file = folder / f"{Path(path).parent.name}.safetensors"
        save_file(build_model(model_spec(config, info), seed=0).state_dict(), file)
        return str(file)

    def replaced(value):
        if isinstance(value, dict):
            return {key: replaced(inner) for key, inner in value.items()}
        return weights(value) if isinstance(value, str) and value.startswith("runs/") else value

    return replaced


def of_a_kind(path):
    """The points of a grid: all of its first seed, and of the others one for each partition, all that a seed changes before
    the first round."""
    chosen, partitions = [], set()
    for trial in trials_of(path):
        seed, groups = trial.raw.get("seed", 0), [trial.raw.get("data"), trial.raw.get("partition")]
        partition = json.dumps([seed, *groups], sort_keys=True)
        if seed == 0 or partition not in partitions:
            chosen.append(trial.values)
        partitions.add(partition)
    return chosen


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_unscaled_trial_can_start(path, stubs, pretrained, monkeypatch):
    raw = pretrained(read_recipe(path))
    raw["data"] = {**raw.get("data", {}), "root": str(stubs)}
    if path in CALIBRATIONS:
        assert plan_calibration(raw, str(path))
    elif raw.get("tune", {}).get("param_space"):
        if all("grid_search" in domain for domain in raw["tune"]["param_space"].values()):
            points = of_a_kind(path)
            monkeypatch.setattr(raysim.config.sweep, "combinations", lambda *_: points)
        sweep = plan_sweep(raw, str(path))
        assert sum(bool(trial.same_as) for trial in sweep.trials) == REPEATS.get(f"{path.parent.name}/{path.stem}", 0)
        refused = REFUSED.get(f"{path.parent.name}/{path.stem}", set())
        assert {tuple(re.findall("=([^_]+)_", name)) for name in sweep.refused} == refused
    else:
        assert check(raw, str(path)).num_rounds


@pytest.mark.slow
def test_the_two_halves_of_the_speakers_have_no_row_in_common(stubs):
    """What shakespeare_pretrain trains and tests on, no client of shakespeare_lora has, whatever its seed."""
    manifests = []
    for name in ("shakespeare_pretrain", "shakespeare_lora"):
        for trial in trials_of(STUDIES / f"{name}.yaml")[:2]:
            _, manifest = check_partition({**trial.raw, "data": {**trial.raw["data"], "root": str(stubs)}}, name)
            manifests.append(manifest)
    first, *others = manifests
    assert len(others) == 2
    assert others[0].checksum != others[1].checksum
    rows = {*np.concatenate([*first.clients, first.validation, first.test])}
    for manifest in others:
        assert rows == {*manifest.unseen}
        assert rows.isdisjoint(np.concatenate([*manifest.clients, manifest.validation, manifest.test]))
        assert len(manifest.clients) == len(manifest.unseen_sizes) == 128


def test_stub_sets_have_the_published_sizes():
    for name in NUMBERS:
        known = medmnist.INFO.get(name.removesuffix("_224"))
        if known is not None:
            labels, splits, _ = stub_columns(name)
            sizes = {part: int((splits == code).sum()) for code, part in enumerate(("train", "val", "test"))}
            assert sizes == known["n_samples"], name
            assert len(set(labels)) == len(known["label"])
    sizes = {
        name: stub_info(name).num_examples for name in ("covid19", "pacs", "ham10000", "eurosat", "cub200", "digits")
    }
    assert sizes == {
        "covid19": 9523,
        "pacs": 9991,
        "ham10000": 10015,
        "eurosat": 27000,
        "cub200": 11788,
        "digits": 1797,
    }


# --- printed cells ----------------------------------------------------------------------------------------------------

#: What runs measure of the published metrics; the others are settings, sizes of sets, gains, claims and LIVAR's table.
MEASURED = (*ACCURACIES, "time_rel_fedavg")
PRINTED = {
    path.stem: cells
    for path in sorted((PAPERS / "published").glob("*.csv"))
    if (cells := [cell for cell in published(path.stem) if cell.metric in MEASURED])
}
REPORTS = {path: read_recipe(path).get("report", {}).get("published", []) for path in RECIPES}
CLAIMS = [(path, name) for path, names in REPORTS.items() for name in names if name in PRINTED]


@cache
def cells_met(path, name):
    """The cells of a published table that a recipe's trials have the labels of."""
    metrics = read_recipe(path)["report"].get("metrics") or {}  # one run in several cells: label -> value -> metric
    scored_as = [dict(zip(metrics, values, strict=True)) for values in itertools.product(*metrics.values())]
    all_labels = ({"method": row_methods(trial.raw), **trial.raw["labels"]} for trial in trials_of(path))
    unseeded = {tuple((key, value) for key, value in labels.items() if key != "seed") for labels in all_labels}
    met = {}
    for labels, metric, more in itertools.product(unseeded, MEASURED, scored_as):
        cell = match(PRINTED[name], dict(labels) | more, metrics=(metric,))
        met |= {} if cell is None else {id(cell): cell}
    return met


@pytest.mark.slow
@pytest.mark.parametrize("name", PRINTED)
def test_every_printed_cell_has_its_run(name):
    recipes = [path for path, claimed in CLAIMS if claimed == name]
    assert recipes, "no recipe reports beside this table"
    met = {key for path in recipes for key in cells_met(path, name)}
    assert not [cell for cell in PRINTED[name] if id(cell) not in met], [path.stem for path in recipes]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "name"), CLAIMS, ids=lambda p: f"{p.parent.name}/{p.stem}" if isinstance(p, Path) else p
)
def test_every_recipe_meets_the_tables_that_it_reports_beside(path, name):
    assert cells_met(path, name)


def test_figure_6_scores_on_as_many_rows_as_are_printed(stubs):
    """Tables A.5 and A.6, and the totals of section 5.3: the release counts 50 images of each mapped class twice."""
    path = PAPERS / "fedvg" / "figure_6.yaml"
    printed = {
        row["dataset"]: int(row["value"])
        for row in rows_of("fedvg_inline")
        if row["metric"] == "external_validation_size"
    }
    by_class = {}
    for table in ("fedvg_table_A5", "fedvg_table_A6"):
        for cell in published(table):
            counts = by_class.setdefault(cell.dataset, dict.fromkeys(stub_info("cifar10").classes, 0))
            counts[cell.setting["cifar10_class"]] += int(cell.value)
    seen = set()
    for trial in trials_of(path):
        name = trial.raw["labels"].get("validation_set")
        if name in printed and trial.raw["labels"]["alpha"] == 0.1 and trial.raw["labels"]["seed"] == 0:
            info, manifest = check_partition({**trial.raw, "data": {**trial.raw["data"], "root": str(stubs)}}, "")
            assert len(manifest.validation) == printed[name]
            assert dict(zip(info.classes, manifest.validation_counts.tolist(), strict=True)) == by_class[name]
            seen.add(name)
    assert seen == set(printed)


@pytest.mark.slow
def test_figure_7_has_half_the_rows_only_where_classes_have_enough(stubs):
    """The sizes that its first lines name: appendix A.7.1 has half of D_val at every rho."""
    path = PAPERS / "fedvg" / "figure_7.yaml"
    sizes = {}
    for trial in trials_of(path):
        if trial.raw["labels"]["seed"] == 0:
            _, manifest = check_partition({**trial.raw, "data": {**trial.raw["data"], "root": str(stubs)}}, "")
            sizes[trial.values.get("data.validation_set.imbalance")] = len(manifest.validation)
    half = sizes.pop(None) / 2  # FedAvg's, whole
    assert {rho for rho, size in sizes.items() if size > 0.99 * half} == {1.0, 0.9}
    text = path.read_text().split("base:")[0]
    printed = [int(number.replace(",", "")) for number in re.findall(r"([\d,]+) rows", text)]
    assert printed == [pytest.approx(half, rel=0.01), 600, pytest.approx(min(sizes.values()), rel=0.01)]


@pytest.mark.slow
def test_seeds_may_share_one_partition(stubs):
    """`partition.seed`: the released code of FedVG partitions once and only trains anew."""
    raw = read_recipe(PAPERS / "fedvg" / "figure_A1.yaml")
    raw["data"] = {**raw["data"], "root": str(stubs)}
    raw["tune"]["param_space"]["seed"]["grid_search"] = [0, 1]
    assert len(partitions(raw, "a test")) == 2
    raw["partition"] = {**raw["partition"], "seed": 42}
    assert len(partitions(raw, "a test")) == 1


#: Published numbers that are not a run's: settings, sizes, LIVAR's table; gains are differences of printed cells.
NOT_RUN = (
    "hyperparameter",
    "selected_count",
    "avg_gain_points",
    "avg_gain_vs_1_layer_points",
    "raw_coefficient_paper",
    "raw_coefficient_released_code",
    "quantile",
    "selection_pct",  # shares of the layers that runs chose: see below
)


def test_no_kind_of_published_number_is_overlooked():
    tables = [path.stem for path in (PAPERS / "published").glob("*.csv") if not path.stem.endswith("inline")]
    kinds = {cell.metric for name in tables for cell in published(name)}
    assert kinds == {*MEASURED, *NOT_RUN}
    printed = {(cell.method, cell.model, cell.setting["strategy"]) for cell in published("flfa_table_13")}
    trials = [trial.raw["labels"] for trial in trials_of(PAPERS / "flfa" / "table_13.yaml")]
    assert printed == {(labels["method"], labels["model"], labels["strategy"]) for labels in trials}
