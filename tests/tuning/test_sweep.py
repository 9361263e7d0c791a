"""Sweeps as data: trials, labels, names, and the scale group."""

from __future__ import annotations

import copy

import pytest

from raysim.base.errors import ConfigError
from raysim.base.settings import assign
from raysim.config.overlays import layered
from raysim.config.sweep import grid, trial

RAW = {
    "name": "s",
    "model": {"name": "resnet18", "stem": "small"},
    "tune": {
        "param_space": {
            "case": {
                "grid_search": {
                    "big": {"data.name": "cifar10", "labels.dataset": "CIFAR-10", "labels.model": "ResNet-18"},
                    "small": {"data": {"name": "digits"}, "labels.dataset": "digits", "labels.model": "CNN"},
                }
            },
            "method": {"grid_search": {"FedAvg": {"methods": []}, "FedAvg + FedVG": {"methods": ["fedvg"]}}},
            "partition.alpha": {"grid_search": [0.1, 1]},
            "seed": {"grid_search": [0, 1]},
        }
    },
    "scale": {"rounds": 2, "model": {"name": "cnn"}, "tune.param_space.seed": {"grid_search": [0]}},
}


def test_grid_is_the_product_with_labels_and_unique_names():
    before = copy.deepcopy(RAW)
    trials = grid(RAW, "a test")
    assert before == RAW  # nothing is written to the file's own dictionary
    assert len(trials) == 2 * 2 * 2 * 2
    assert len({t.name for t in trials}) == 16
    assert trials[1].values == {"case": "big", "method": "FedAvg", "partition.alpha": 0.1, "seed": 1}
    last = trials[-1].raw
    assert last["labels"] == {"dataset": "digits", "model": "CNN", "method": "FedAvg + FedVG", "alpha": 1, "seed": 1}
    assert last["methods"] == ["fedvg"]
    assert last["partition"] == {"alpha": 1}
    assert last["data"] == {"name": "digits"}
    assert "tune" not in last
    assert "scale" not in last
    assert trials[-1].name == "case=small_method=FedAvg-+-FedVG_alpha=1_seed=1"


def test_scale_goes_before_labels_and_may_shrink_the_grid():
    trials = grid(layered(RAW, {}, "a test", is_scaled=True), "a test")
    assert len(trials) == 8
    assert {t.raw["rounds"] for t in trials} == {2}
    assert trials[0].raw["model"] == {"name": "cnn"}  # a group is replaced whole: no option of another model stays
    assert trials[0].raw["labels"]["model"] == "ResNet-18"


def test_scale_overrides_what_a_trial_set():
    raw = {**RAW, "scale": {"data.name": "digits", "tune.param_space.seed": {"grid_search": [0]}}}
    assert {t.raw["data"]["name"] for t in grid(layered(raw, {}, "a test", is_scaled=True), "a test")} == {"digits"}


def test_axes_with_the_same_last_part_keep_their_full_names():
    raw = {"tune": {"param_space": {"local.lr": {"grid_search": [1]}, "server.lr": {"grid_search": [2]}}}}
    (only,) = grid(raw, "a test")
    assert only.raw["labels"] == {"local.lr": 1, "server.lr": 2}


def test_settings_may_stand_apart_from_the_choice():
    settings = {"case": {"a": {"rounds": 1}, "b": {"rounds": 2}, "c": {}}}
    raw = {"tune": {"settings": settings, "param_space": {"case": {"grid_search": ["a", "b"]}}}}
    assert [t.raw for t in grid(raw, "a test")] == [
        {"rounds": 1, "labels": {"case": "a"}},
        {"rounds": 2, "labels": {"case": "b"}},
    ]
    raw["tune"]["param_space"]["case"]["grid_search"].append("d")
    with pytest.raises(ConfigError, match="has no settings for d"):
        grid(raw, "a test")


def test_drawn_values_become_settings():
    raw = {"tune": {"param_space": {"local.lr": {"loguniform": [1e-3, 1e-1]}}}}
    assert trial(raw, {"local.lr": 0.02}, "a test").raw == {"local": {"lr": 0.02}, "labels": {"lr": 0.02}}
    with pytest.raises(ConfigError, match="is a range"):
        grid(raw, "a test")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({}, "tune.param_space: is missing"),
        ({"tune": {"param_space": {"seed": [1, 2]}}}, "must be a single domain"),
        ({"tune": {"param_space": {"seed": {"grid_search": []}}}}, "lists no value"),
        ({"rounds": 3, "tune": {"param_space": {"rounds.x": {"grid_search": [1]}}}}, "rounds is not a group of keys"),
        ({"tune": {"param_space": {"m": {"grid_search": {"a": 3}}}}}, "must hold settings"),
    ],
)
def test_malformed_sweeps_are_refused(raw, words):
    with pytest.raises(ConfigError, match=words):
        grid(raw, "a test")


def test_a_scaled_run_has_another_name_than_the_full_one():
    assert layered(RAW, {}, "a test", is_scaled=True)["name"] == "s_scaled"
    assert layered(layered(RAW, {}, "a test", is_scaled=True), {}, "a test", is_scaled=True)["name"] == "s_scaled"
    assert layered({**RAW, "scale": {"rounds": 2, "name": "mine"}}, {}, "a test", is_scaled=True)["name"] == "mine"
    assert "name" not in layered({"scale": {"rounds": 2}}, {}, "a test", is_scaled=True)


def test_an_axis_may_count_with_some_labels_of_another_one_only():
    space = {"method": ["A", "B"], "rounds": [1, 2, 3], "seed": [0, 1]}
    methods = {"A": {"methods": []}, "B": {"methods": ["fedvg"]}}
    raw = {"rounds": 9, "tune": {"settings": {"method": methods}, "only": {"rounds": {"method": ["B"]}}}}
    raw["tune"]["param_space"] = {axis: {"grid_search": values} for axis, values in space.items()}
    trials = grid(raw, "a test")
    assert [t.raw["labels"] for t in trials[:2]] == [{"method": "A", "seed": 0}, {"method": "A", "seed": 1}]
    assert [t.raw["rounds"] for t in trials] == [9, 9, 1, 1, 2, 2, 3, 3]
    assert [t.name for t in trials[1:3]] == ["method=A_seed=1", "method=B_rounds=1_seed=0"]
    raw["tune"]["only"] = {"rounds": {"metod": ["B"]}}
    with pytest.raises(ConfigError, match=r"tune.only.rounds: metod is not an axis; the axes are method, rounds, seed"):
        grid(raw, "a test")


def test_scaled_needs_a_scale_group():
    with pytest.raises(ConfigError, match="scale: is missing"):
        layered({"rounds": 3}, {}, "a test", is_scaled=True)


def test_an_axis_with_dots_can_be_replaced():
    raw = {"tune": {"param_space": {"partition.alpha": {"grid_search": [1, 2]}}}}
    assign(raw, "tune.param_space.partition.alpha", {"grid_search": [3]})
    assert raw == {"tune": {"param_space": {"partition.alpha": {"grid_search": [3]}}}}


def test_assign_makes_groups_and_names_what_is_in_the_way():
    raw = {"a": 1}
    assign(raw, "b.c.d", 2)
    assert raw == {"a": 1, "b": {"c": {"d": 2}}}
    with pytest.raises(KeyError, match="a"):
        assign(raw, "a.b", 3)


def test_assign_goes_into_a_list_of_names_and_adds_to_one():
    raw = {"methods": ["fedprox", {"fedvg": {"norm": "l2"}}, {"livar": None}], "other": [1, 2]}
    assign(raw, "methods.fedprox.mu", 0.3)
    assign(raw, "methods.fedvg.granularity", "block")
    assign(raw, "methods.livar.table", "online")
    assign(raw, "methods+", ["fedavgm"])
    assign(raw, "new.list+", ["a"])
    assert raw["methods"] == [
        {"fedprox": {"mu": 0.3}}, {"fedvg": {"norm": "l2", "granularity": "block"}}, {"livar": {"table": "online"}}, "fedavgm",
    ]  # fmt: skip
    assert raw["new"] == {"list": ["a"]}
    for key, value, words in (
        ("methods.moon.mu", 1, "methods lists no 'moon'"),
        ("other.x.y", 1, "other lists no 'x'"),
        ("methods.fedprox.mu.x", 1, "methods.fedprox.mu is not a group of keys"),
        ("methods+", "fedvg", "adds a list to a list"),
        ("methods.fedvg.norm+", ["l1"], "adds a list to a list"),
    ):
        with pytest.raises(KeyError, match=words):
            assign(raw, key, value)


@pytest.mark.slow
def test_two_axes_make_one_list_of_methods_and_an_axis_may_be_a_methods_option():
    space = {
        "server": {"FedAvg": {}, "FedVG": {"methods+": ["fedvg"]}},
        "local": {"SGD": {}, "FedProx": {"methods+": ["fedprox"]}},
    }
    raw = {"tune": {"param_space": {axis: {"grid_search": labels} for axis, labels in space.items()}}}
    assert [t.raw.get("methods", []) for t in grid(raw, "a test")] == [[], ["fedprox"], ["fedvg"], ["fedvg", "fedprox"]]
    raw = {"methods": ["univarfl"], "tune": {"param_space": {"methods.univarfl.mu": {"grid_search": [0.1, 1]}}}}
    trials = grid(raw, "a test")
    assert [t.raw["methods"] for t in trials] == [[{"univarfl": {"mu": 0.1}}], [{"univarfl": {"mu": 1}}]]
    assert [(t.name, t.raw["labels"]) for t in trials] == [("mu=0.1", {"mu": 0.1}), ("mu=1", {"mu": 1})]
