"""FLFA's and LIVAR's recipes of what the papers leave open, and the ways that LIVAR's header names to its sets."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from methods.dp import epsilon_after, spending
from methods.feedback import feedback_layers
from raysim.base.errors import ConfigError
from raysim.config import parse_config, read_config
from raysim.config.sweep import grid
from raysim.core.layout import layout_of
from raysim.data.sources import prepare
from raysim.models import ModelSpec, build_skeleton, head_of
from raysim.plan.check import check
from raysim.reporting.published import ACCURACIES, match, published
from raysim.tuning.plan import read_sweep
from tests.recipes.test_methods import LIVAR_PARTS, PAPERS, trials
from tests.support.image_sets import class_tree
from tests.support.recipe_files import read_recipe

PROJECT = Path(__file__).parents[2]

FEEDBACK = {
    "W^r": {},
    "W^r without scaling": {"scale": "none"},
    "random": {"feedback": "random"},
    "random every round": {"feedback": "resampled"},
}


def test_feedback_errors_are_compared_in_one_layer_of_the_model():
    seen = {}
    for labels, methods, config in trials("flfa", "feedback_error"):
        spec = ModelSpec(config.model.name, 10, (32, 32, 3), dict(config.model.model_extra))
        place, _, kind = labels["feedback"].partition(" ")
        (layer,) = methods[0]["flfa"]["candidates"]
        seen.setdefault(place, set()).add(layer)
        options = {key: value for key, value in methods[0]["flfa"].items() if key != "candidates"}
        assert options == FEEDBACK[kind]
        assert methods[1] == {"diagnostics": {"every": 10, "measures": ["feedback"]}}
    layers = list(feedback_layers(layout_of(build_skeleton(spec), head=head_of(spec))))
    assert seen == {"middle": {layers[len(layers) // 2]}, "classifier": {layers[-1]}}


def test_drift_by_layer_and_alpha_are_scanned_as_their_headers_say():
    for labels, methods, _ in trials("flfa", "layer_drift"):
        strategy = labels["method"].removeprefix("FLFA ")
        assert methods[:-1] == ([] if strategy == "FedAvg" else [{"flfa": {"strategy": strategy}}])
        assert methods[-1] == {"diagnostics": {"every": 10, "measures": ["drift", "layer_drift"]}}
    alphas = {}
    for labels, methods, config in trials("flfa", "alpha"):
        assert float(labels["alpha"]) == config.partition.alpha
        assert methods == (["flfa"] if "FLFA" in labels["method"] else [])
        alphas.setdefault(labels["dataset"], set()).add(config.partition.alpha)
    assert alphas == {name: {0.1, 0.2, 0.3, 0.5, 1.0} for name in ("OrganCMNIST", "FMNIST", "CIFAR-10")}
    header = (PAPERS / "flfa" / "alpha.yaml").read_text()
    cells = [*published("flfa_table_01"), *published("flfa_table_05")]
    pairs = [cell for cell in cells if cell.method in ("FedAvg", "FedAvg + FLFA") and cell.metric in ACCURACIES]
    printed = [f"{cell.value:.2f}" for cell in pairs if cell.dataset in alphas]
    assert (len(printed), [number for number in printed if number not in header]) == (12, [])


def test_the_significance_of_table_4_is_tested_on_its_own_runs():
    raw = read_config(PAPERS / "livar" / "table_4_test.yaml")
    tested = {labels["components"]: methods for labels, methods, _ in trials("livar", "table_4_test")}
    switches = {"neither": ("off", "off"), "layers": ("on", "off"), "head": ("off", "on"), "both": ("on", "on")}
    assert tested == {name: LIVAR_PARTS[parts] for name, parts in switches.items()}
    assert raw["report"]["against"] == "both"
    seeds, tests = len(raw["tune"]["param_space"]["seed"]["grid_search"]), len(tested) - 1
    assert (
        tests / 2**seeds < 0.05 < tests / 2**5
    )  # what Holm's adjustment can reach, and could not with the paper's five
    assert raw["partition"] == read_config(PAPERS / "livar" / "table_4.yaml")["partition"]


def test_bytes_are_compared_with_fine_tuning_the_whole_transformer():
    found = {labels["method"]: config.model.lora for labels, _, config in trials("livar", "bytes")}
    assert {name: lora and lora.rank for name, lora in found.items()} == {
        "FedAvg": None,
        "LoRA FedAvg": 16,
        "LIVAR": 16,
    }
    assert read_config(PAPERS / "livar" / "bytes.yaml")["report"]["target"] == "FedAvg"


def test_livars_header_names_a_way_to_eurosat_without_its_split_file(tmp_path):
    """As a user would: a tree of images without the file, and the commands of the header."""
    base = tmp_path / "files" / "EuroSAT_RGB"
    class_tree(base, ["Forest", "River"], each=50, shape=(8, 8, 3))
    header = (PAPERS / "livar" / "base.yaml").read_text().partition("\nseed:")[0]
    prepare("eurosat", tmp_path / "data", tmp_path / "files")
    small = {"root": str(tmp_path / "data")}

    def planned(words):
        raw = read_sweep(PAPERS / "livar" / "table_2.yaml", words)
        raw["tune"]["param_space"]["method"] = {"grid_search": ["LIVAR"]}
        trial = next(t for t in grid(raw, "table_2") if t.raw["data"]["name"] == "eurosat")
        model = {"name": "vit", "dim": 16, "depth": 1, "heads": 2, "patch": 4, "lora": {"rank": 2}}
        partition = {**trial.raw["partition"], "num_clients": 2, "min_samples": 1}
        return check({**trial.raw, "model": model, "partition": partition, "data": {**trial.raw["data"], **small}}, "")

    with pytest.raises(ConfigError, match="the set has no official split"):
        planned([])
    words = "case=EuroSAT without its split file,CUB-200"
    assert f"raysim tune paper:livar/table_2 '{words}'" in header
    plan = planned([words])
    assert (len(plan.manifest.test), sum(map(len, plan.manifest.clients))) == (30, 70)
    assert published_beside(plan.config.labels) is None
    assert published_beside({**plan.config.labels, "split": None}) is not None

    words = ["data.split=fraction", "data.test=0.3"]
    assert f"raysim calibrate paper:livar/figure_3_eurosat {' '.join(words)} --beside" in header
    config, faults = parse_config(read_config(PAPERS / "livar" / "figure_3_eurosat.yaml", words))
    assert not faults
    assert (config.data.split, config.data.test) == ("fraction", 0.3)


def published_beside(labels):
    """The printed number of a run's labels."""
    labels = {key: value for key, value in labels.items() if key != "seed" and value is not None}
    return match(published("livar_table_2"), labels)


def test_larger_images_of_livar_are_prepared_as_in_its_code():
    header = (PAPERS / "livar" / "base.yaml").read_text().partition("\nseed:")[0]
    for name in ("imagenet_r", "cub200"):
        (line,) = [line for line in header.splitlines() if f"prepare {name}" in line]
        words = line.removeprefix("#   raysim prepare ").split()
        assert words == [name, "--root", "FILES", "--size", "224", "--resize", "squash", "--interpolation", "bicubic"]


def test_the_noise_of_dp_mnist_spends_what_its_columns_say():
    spent, sizes = {}, set()
    for trial in grid(read_recipe(PROJECT / "configs" / "studies" / "dp_mnist.yaml"), "dp_mnist"):
        config, faults = parse_config(trial.raw)
        assert not faults
        options = next(spec.options for spec in config.methods if spec.name == "dp")
        spent[str(trial.raw["labels"]["epsilon"])] = (options["noise"], options["delta"])
        sizes.add((config.cohort_size, config.num_clients, config.cohort.sampling, config.rounds))
    ((size, population, sampling, rounds),) = sizes
    for epsilon, (noise, delta) in spent.items():
        wanted = math.inf if epsilon == "none" else float(epsilon)
        assert epsilon_after(rounds, spending(noise, size, population, sampling), delta) == pytest.approx(
            wanted, rel=2e-3
        )
    assert len(spent) == 5
