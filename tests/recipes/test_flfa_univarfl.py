"""FLFA's and UniVarFL's recipes: the printed settings, a run for every printed number, models that take the sets' images."""

from __future__ import annotations

import pytest
import torch

from raysim.config import parse_config
from raysim.config.sweep import grid
from raysim.models import ModelSpec, build_skeleton
from raysim.reporting.published import ACCURACIES, match, published
from tests.recipes.test_recipes import PAPERS, rows_of
from tests.support.recipe_files import read_recipe

FLFA_TABLES = ("01", "02", "03", "04", "05", "06", "07", "08", "09", "10", "12")

FLFA_READ = {  # the words of flfa_inline.csv -> what the configuration says
    "rounds": lambda c: c.rounds,
    "clients": lambda c: c.partition.num_clients,
    "join_ratio": lambda c: c.cohort.fraction,
    "local_epochs": lambda c: c.local.epochs,
    "batch_size": lambda c: c.local.batch_size,
    "learning_rate": lambda c: c.local.lr,
    "momentum": lambda c: c.local.momentum,
    "weight_decay": lambda c: c.local.weight_decay,
    "lr_decay_per_round": lambda c: c.local.lr_decay,
}
#: What a table changes on purpose, by the keys of its published settings.
CHANGED = {"clients": "clients", "local_epochs": "local_epochs", "participation": "join_ratio"}


def recipe(paper, name):
    """(labels, configuration) of every trial."""
    path = PAPERS / paper / f"{name}.yaml"
    for trial in grid(read_recipe(path), name):
        yield trial.raw["labels"], parse_config(trial.raw)[0]


@pytest.mark.parametrize("name", [f"table_{int(number)}" for number in FLFA_TABLES] + ["table_13", "figure_2"])
def test_flfa_settings_are_the_printed_ones(name):
    rows = rows_of("flfa_inline")
    shared = {r["metric"]: float(r["value"]) for r in rows if r["dataset"] == "all" and r["metric"] != "seeds"}
    rounds = {r["dataset"]: float(r["value"]) for r in rows if r["metric"] == "rounds"}
    rounds["CIFAR-10.1"] = rounds["CIFAR-10"]
    assert set(shared) | {"rounds"} == set(FLFA_READ)
    for labels, config in recipe("flfa", name):
        want = shared | {"rounds": rounds[labels["dataset"]]}
        want |= {what: labels[key] for key, what in CHANGED.items() if key in labels}
        assert {what: read(config) for what, read in FLFA_READ.items()} == want
        assert config.local.optimizer == "sgd"
        assert (config.partition.alpha, config.partition.min_samples) == (0.1 if name == "table_5" else 0.3, 10)
        assert (config.data.split, config.data.validation, config.evaluation.every) == ("official", 0, 1)
        assert config.model.name == labels["model"].lower().replace("-", "")


def cells_of_recipe(paper, name):
    """The different labels of a recipe's trials, without the seed; several where a run gives several numbers."""
    metrics = read_recipe(PAPERS / paper / f"{name}.yaml")["report"].get("metrics") or {}
    added = [{label: value} for label, values in metrics.items() for value in values] or [{}]
    return {
        tuple(sorted((k, v) for k, v in {**labels, **more}.items() if k != "seed"))
        for labels, _ in recipe(paper, name)
        for more in added
    }


@pytest.mark.parametrize(
    ("paper", "name", "tables"),
    [
        *(("flfa", f"table_{int(n)}", [f"flfa_table_{n}"]) for n in FLFA_TABLES if n != "10"),
        ("flfa", "table_10", ["flfa_table_10", "flfa_table_11"]),
        ("univarfl", "table_1", ["univarfl_table_1"]),
        ("univarfl", "table_2", ["univarfl_table_2"]),
    ],
)
def test_every_printed_accuracy_has_its_runs(paper, name, tables):
    theirs = [cell for table in tables for cell in published(table)]
    found = [match(theirs, dict(labels)) for labels in cells_of_recipe(paper, name)]
    assert None not in found
    printed = [cell for cell in theirs if cell.metric in ACCURACIES]
    assert sorted(map(repr, found)) == sorted(map(repr, printed))


def test_univarfl_settings_are_the_printed_ones():
    rounds = {"STL-10": 100, "CIFAR-100": 60, "PACS": 60, "HAM10000": 60}
    clients = {"STL-10": 10, "CIFAR-100": 10, "PACS": 4, "HAM10000": 4}
    for name in ("table_1", "table_2", "ablation", "open_choices", "speed"):
        for labels, config in recipe("univarfl", name):
            local = config.local
            assert (local.lr, local.momentum, local.weight_decay, local.lr_decay) == (0.01, 0.9, 1e-5, 1)
            assert (local.epochs, local.batch_size, local.optimizer) == (10, 128, "sgd")
            assert config.rounds == rounds[labels["dataset"]]
            assert config.partition.num_clients == clients[labels["dataset"]]
            assert config.cohort.fraction == labels.get("participation", 1.0)
            assert config.partition.scheme == ("dirichlet" if "alpha" in labels else "domain")
            assert config.partition.alpha == labels.get("alpha", config.partition.alpha)
            is_small = labels["model"] == "small CNN"
            assert config.model.name == ("univarfl_cnn" if is_small else "resnet18")
            assert config.model.model_extra["projector_width"] == (256 if is_small else 512)


#: What the sets of both papers hold as prepared: height and width, channels, classes.
SHAPES = {
    "bloodmnist": (28, 3, 8),
    "organcmnist": (28, 1, 11),
    "organsmnist": (28, 1, 11),
    "pathmnist": (28, 3, 9),
    "fashion_mnist": (28, 1, 10),
    "cifar10": (32, 3, 10),
    "cifar100": (32, 3, 100),
    "imagenet100": (64, 3, 100),
    "stl10": (96, 3, 10),
    "pacs": (227, 3, 7),
    "ham10000": (450, 3, 7),
}


@pytest.mark.slow
@pytest.mark.parametrize("paper", ["flfa", "univarfl"])
def test_every_model_takes_its_sets_images(paper):
    printed = {r["dataset"]: int(r["value"]) for r in rows_of("flfa_inline") if r["metric"] == "num_classes"}
    specs = {}
    for name in ("table_1", "table_3") if paper == "flfa" else ("table_1",):
        for labels, config in recipe(paper, name):
            side, channels, classes = SHAPES[config.data.name]
            side = config.data.resize or side
            assert classes == printed.get(labels["dataset"], classes)
            options = config.model.model_extra
            specs[config.data.name] = ModelSpec(config.model.name, classes, (side, side, channels), options)
    assert len(specs) == (8 if paper == "flfa" else 4)
    for spec in specs.values():
        skeleton = build_skeleton(spec).eval()
        height, width, channels = spec.input_shape
        assert skeleton(torch.empty(2, channels, height, width, device="meta")).shape == (2, spec.num_classes)
