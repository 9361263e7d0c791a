"""The last of base, file, labels, `scale` and command line wins; labels that end as one run are refused by name."""

from __future__ import annotations

import copy

import pytest
import yaml
from typer.testing import CliRunner

from raysim.base.errors import ConfigError
from raysim.cli.main import app
from raysim.config import parse_config, read_config
from raysim.config.overlays import layered
from raysim.config.sweep import grid
from raysim.launch import settings_of
from raysim.tuning.plan import plan_sweep, read_sweep
from tests.support.federations import raw_config

SPACE = {
    "case": {
        "grid_search": {"plain": {}, "large": {"local": {"lr": 0.5, "momentum": 0.9}, "partition.num_clients": 7}}
    },
    "method": {"grid_search": {"FedAvg": {"methods": []}, "FedVG": {"methods": [{"fedvg": {"norm": "l1"}}]}}},
    "seed": {"grid_search": [0, 1]},
}
OWN = {
    "rounds": 9,
    "local": {"lr": 0.1},
    "tune": {"param_space": SPACE},
    "scale": {"rounds": 2, "partition.num_clients": 3},
}


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(OWN, sort_keys=False))
    return path


def trials(path, *overrides, **more):
    return grid(read_sweep(path, overrides, **more), str(path))


def values_of(path, *overrides, key, **more):
    """Label of the axis case -> what its trials have at a key, and of which there is one."""
    found = {}
    for trial in trials(path, *overrides, **more):
        config, faults = parse_config({key: value for key, value in trial.raw.items() if key != "tune"})
        assert not faults, (trial.name, faults)
        value = config.model_dump()
        for part in key.split("."):
            value = value[part]
        assert found.setdefault(trial.values["case"], value) == value
    return found


# --- the command line -------------------------------------------------------------------------------------------------


def test_the_last_of_file_labels_scale_and_command_line_wins(own):
    words = ["local.lr=0.01", "seed=5"]
    assert values_of(own, *words, key="local.lr") == {"plain": 0.01, "large": 0.01}
    assert values_of(own, *words, key="local.momentum") == {"plain": 0.0, "large": 0.9}  # what was not given stays
    assert values_of(own, key="partition.num_clients") == {"plain": 20, "large": 7}
    assert values_of(own, key="partition.num_clients", is_scaled=True) == {"plain": 3, "large": 3}
    assert values_of(own, "partition.num_clients=5", key="partition.num_clients", is_scaled=True) == {
        "plain": 5,
        "large": 5,
    }
    assert values_of(own, "rounds=4", key="rounds", is_scaled=True) == {"plain": 4, "large": 4}
    assert {trial.raw["seed"] for trial in trials(own, "seed=5", is_scaled=True)} == {5}
    assert values_of(own, "scale.rounds=3", key="rounds", is_scaled=True) == {"plain": 3, "large": 3}
    assert values_of(own, "scale.local.lr=3", key="local.lr", is_scaled=True) == {"plain": 3, "large": 3}
    assert set(values_of("paper:univarfl/table_1", "data.resize=32", key="data.resize").values()) == {32}


def test_labels_that_end_as_one_run_are_refused_by_name(root):
    axes = {
        "rate": {"low": {"local.lr": 0.1}, "high": {"local.lr": 0.2}},
        "method": {"A": {"methods": []}, "B": {"methods": ["fedprox"]}},
    }
    raw = {**raw_config(root), "name": "s", **a_sweep(**axes)}
    assert len(plan_sweep(layered(raw, {}, "a test"), "a test").trials) == 4
    with pytest.raises(ConfigError, match=r"rate=low and rate=high are the same run when local.lr=0.3; keep one"):
        plan_sweep(layered(raw, {"local.lr": 0.3}, "a test"), "a test")
    with pytest.raises(ConfigError, match=r"method=A and method=B are the same run when methods=\['fedavgm'\]"):
        plan_sweep(layered(raw, {"methods": ["fedavgm"]}, "a test"), "a test")
    raw |= a_sweep(rate=axes["rate"], method={"slow": {"local": {"lr": 0.5}}})
    with pytest.raises(ConfigError, match="rate=low and rate=high are the same run when method=slow"):
        plan_sweep(raw, "a test")


def test_a_value_of_an_axis_that_another_layer_overrides_is_refused(root):
    raw = {**raw_config(root), "name": "s"}
    axes = a_sweep(**{"local.lr": [0.1, 0.2], "method": {"slow": {"local.lr": 0.5}, "as it is": {}}})
    with pytest.raises(ConfigError, match=r"local.lr: 0.1 is overridden by method=slow"):
        plan_sweep({**raw, **axes}, "a test")
    axes["tune"]["only"] = {"local.lr": {"method": ["as it is"]}}
    assert len(plan_sweep({**raw, **axes}, "a test").trials) == 3
    space = {"local.lr": {"uniform": [0.1, 1]}, "method": {"choice": {"slow": {"local": {"lr": 1}}}}}
    with pytest.raises(ConfigError, match="is overridden by method=slow"):
        plan_sweep({**raw, "tune": {"param_space": space}}, "a test")
    whole = layered({**raw, **a_sweep(**{"partition.alpha": [0.1, 1]})}, {"partition": {"scheme": "iid"}}, "a test")
    with pytest.raises(ConfigError, match=r"partition.alpha: 0.1 is overridden by partition="):
        plan_sweep(whole, "a test")
    schemes = a_sweep(**{"partition.scheme": [{"mine:draw": {"seed": 0}}, {"mine:draw": {"seed": 1}}]})
    with pytest.raises(
        ConfigError, match=r"partition.scheme: \{'mine:draw': \{'seed': 0\}\} is overridden by partition="
    ):
        grid(layered({**raw, **schemes}, {"partition": {"scheme": "iid"}}, "a test"), "a test")  # `raysim partition`
    options = layered({**raw, **a_sweep(methods=[["moon"], ["fedprox"]])}, {"methods.moon.mu": 2}, "a test")
    assert [trial.raw["methods"] for trial in grid(options, "a test")] == [[{"moon": {"mu": 2}}], ["fedprox"]]


def test_a_setting_of_the_command_line_without_effect_in_every_trial_is_refused(root):
    raw = {**raw_config(root), "name": "s", **a_sweep(optimizer={"Adam": {"local.optimizer": "adamw"}, "SGD": {}})}
    assert len(plan_sweep(layered(raw, {"local.momentum": 0.9}, "a test"), "a test").trials) == 2
    del raw["tune"]["param_space"]["optimizer"]["grid_search"]["SGD"]
    with pytest.raises(ConfigError, match=r"local.momentum: has no effect .*, in every trial; remove it"):
        plan_sweep(layered(raw, {"local.momentum": 0.9}, "a test"), "a test")
    with pytest.raises(ConfigError, match=r"methods.moon.mu: is an option of moon, which `methods` does not list"):
        plan_sweep(layered(raw, {"methods.moon.mu": 1}, "a test"), "a test")


def test_only_takes_labels_as_the_command_line_does(tmp_path):
    path = tmp_path / "o.yaml"
    raw = a_sweep(method={"FedAvg": {}, 1: {"methods": ["fedvg"]}}, rounds=[1, 2])
    raw["tune"]["only"] = {"rounds": {"method": ["FedVC"]}}
    path.write_text(yaml.safe_dump(raw, sort_keys=False))
    with pytest.raises(ConfigError, match=r"tune.only.rounds: method has no label 'FedVC'. Known"):
        read_sweep(path)
    for label in (1, "1"):
        raw["tune"]["only"] = {"rounds": {"method": [label]}}
        path.write_text(yaml.safe_dump(raw, sort_keys=False))
        assert len(trials(path)) == 3
        assert len(trials(path, "method=FedAvg")) == 1


def test_a_value_that_a_list_has_twice_is_refused(own):
    with pytest.raises(ConfigError, match=r"local.lr: lists 0.1 twice; keep one"):
        trials(own, "local.lr=0.1,0.1")
    with pytest.raises(ConfigError, match=r"method: names a label twice, got FedVG, FedVG; keep one"):
        trials(own, "method=FedVG,FedVG")


@pytest.mark.parametrize(
    ("overrides", "labels"),
    [
        (["partition.alpha=0.1,1"], ["0.1", "1"]),
        (["partition.alpha=1"], ["None"]),
        (["partition.alpha=0.1,1", "labels.alpha=mine"], ["mine", "mine"]),
        (["labels.alpha=mine"], ["mine"]),
        ([], ["0.05"]),
    ],
)
def test_a_label_of_the_file_does_not_name_what_the_command_line_changed(tmp_path, overrides, labels):
    own = tmp_path / "own.yaml"
    axes = "tune: {param_space: {seed: {grid_search: [0]}}}"
    own.write_text(f"partition: {{alpha: 0.05}}\nlabels: {{method: FedVG, alpha: 0.05}}\n{axes}\n")
    found = grid(read_sweep(own, overrides), "a test")
    assert [str(trial.raw["labels"].get("alpha")) for trial in found] == labels
    assert all(trial.raw["labels"]["method"] == "FedVG" for trial in found)


@pytest.mark.parametrize(("words", "tune"), [("rounds=5", [5]), ("rounds=5,6", [5, 6])])
def test_one_value_wins_as_two_do(words, tune):
    assert {trial.raw["rounds"] for trial in trials("paper:univarfl/table_1", words)} == set(tune)


@pytest.mark.slow
def test_a_network_of_the_command_line_downloads_nothing():
    path = "paper:fedvg/table_A3"
    networks = {str(trial.raw["model"]) for trial in trials(path, "model={name: cnn}", "model.pretrained=null")}
    assert networks == {str({"name": "cnn", "pretrained": None})}
    kept = {trial.raw["model"]["name"] for trial in trials(path, "model.pretrained=null")}
    assert kept == {"resnet18", "resnet50"}
    assert all(trial.raw["model"]["pretrained"] is None for trial in trials(path, "model.pretrained=null"))


def test_an_option_of_a_method_counts_with_the_labels_that_list_it(own):
    methods = [trial.raw["methods"] for trial in trials(own, "case=plain", "seed=0", "methods.fedvg.norm=l2")]
    assert methods == [[], [{"fedvg": {"norm": "l2"}}]]
    assert [trial.raw["methods"] for trial in trials(own, "case=plain", "seed=0", "methods+=[diagnostics]")] == [
        ["diagnostics"],
        [{"fedvg": {"norm": "l1"}}, "diagnostics"],
    ]


def test_a_call_from_python_wins_as_the_command_line_does(own):
    raw, _ = settings_of(own, {"partition.num_clients": 5}, {"local": {"lr": 0.01}, "method": "FedVG", "seed": 3})
    found = grid(raw, "a test")
    assert {(t.raw["local"]["lr"], t.raw["partition"]["num_clients"], t.raw["seed"]) for t in found} == {(0.01, 5, 3)}
    assert [t.raw["labels"] for t in found] == [
        {"case": case, "method": "FedVG", "seed": 3} for case in ("plain", "large")
    ]
    raw, _ = settings_of(OWN, {}, {"method": ["FedVG", "FedAvg"], "scale": {"data.name": "digits"}})
    assert list(raw["tune"]["param_space"]["method"]["grid_search"]) == ["FedVG", "FedAvg"]
    assert raw["scale"] == {**OWN["scale"], "data.name": "digits"}


def test_the_file_of_a_sweep_starts_the_same_trials_again(own, root, tmp_path):
    words = [f"data.root={root}", "local.lr=0.01", f"storage={tmp_path}", "method=FedVG", "seed=0", "name=s"]
    first = plan_sweep(read_sweep(own, words, is_scaled=True), str(own))
    again = tmp_path / "sweep.yaml"
    again.write_text(yaml.safe_dump(dict(first.raw), sort_keys=False))
    second = plan_sweep(read_sweep(again), str(again))
    assert [(t.name, t.config) for t in second.trials] == [(t.name, t.config) for t in first.trials]
    assert {(t.config.rounds, t.config.local.lr, t.config.num_clients) for t in first.trials} == {(2, 0.01, 3)}
    assert first.folder.name == "s"
    assert {t.raw["local"]["lr"] for t in trials(again, "local.lr=0.2,0.3")} == {0.2, 0.3}


# --- scale ------------------------------------------------------------------------------------------------------------


def test_labels_that_scale_left_out_can_be_chosen():
    path = "study:combinations"
    (trial,) = trials(path, "server=FedNova", "local=SGD", is_scaled=True)
    assert (trial.values, trial.raw["rounds"]) == ({"server": "FedNova", "local": "SGD", "seed": 0}, 2)
    (trial,) = trials("paper:univarfl/table_1", "case=CIFAR-100 alpha 1.0", is_scaled=True)
    assert (trial.raw["labels"]["dataset"], trial.raw["data"]["name"]) == ("CIFAR-100", "shapes")


def test_scale_takes_the_value_of_an_axis_with_its_label():
    raw = {"tune": {"param_space": {"rounds": {"grid_search": [9]}}}, "scale": {"rounds": 2}}
    (trial,) = grid(layered(raw, {}, "s", is_scaled=True), "s")
    assert (trial.raw["rounds"], trial.raw["labels"]) == (2, {"rounds": 2})


@pytest.mark.parametrize("verb", ["run", "calibrate"])
def test_runs_and_calibrations_have_the_same_order(verb, tmp_path, monkeypatch):
    taken = {}
    monkeypatch.setattr("raysim.launch.finished_run", lambda raw, *_, **__: taken.update(raw) or exit(0))
    monkeypatch.setattr("raysim.cli.main.calibrate_and_print", lambda raw, *_: taken.update(raw))
    path = tmp_path / "c.yaml"
    path.write_text("name: full\nlocal: {lr: 0.5}\nscale: {local.lr: 0.1, rounds: 1}\nresources: {backend: serial}\n")
    CliRunner().invoke(app, [verb, str(path), "--scaled", "local.lr=0.2"])
    assert (taken["local"], taken["rounds"], taken["name"]) == ({"lr": 0.2}, 1, "full_scaled")
    CliRunner().invoke(app, [verb, str(path), "--scaled", "name=mine"])
    assert taken["name"] == "mine"


# --- two axes on one key ----------------------------------------------------------------------------------------------


def a_sweep(only=None, **axes):
    return {
        "tune": {"param_space": {axis: {"grid_search": labels} for axis, labels in axes.items()}, "only": only or {}}
    }


# --- only, and settings that no trial takes ---------------------------------------------------------------------------


# --- labels with commas -----------------------------------------------------------------------------------------------


LIBRARY = read_config("paper:univarfl/table_1")["tune"]["settings"]
COMMAS = [(axis, label) for axis, labels in LIBRARY.items() for label in labels if "," in label]


@pytest.mark.parametrize(("axis", "label"), COMMAS)
def test_a_label_with_a_comma_is_chosen_as_it_is_or_in_quotes(axis, label):
    path, other = "paper:univarfl/table_1", {"case": "HAM10000", "method": "FedUV's terms"}[axis]
    words = (label, f'"{label}"', f"'{label}', {other}", f'{other},"{label}"', f'["{label}", "{other}"]')
    chosen = [list(read_sweep(path, [f"{axis}={text}"])["tune"]["param_space"][axis]["grid_search"]) for text in words]
    assert chosen == [[label], [label], [label, other], [other, label], [label, other]]


def test_there_are_labels_with_commas():
    assert len(COMMAS) >= 12


def test_values_are_cut_as_yaml_cuts_a_list(own):
    def axis(word):
        return read_sweep(own, [word])["tune"]["param_space"].get(word.partition("=")[0], {}).get("grid_search")

    assert axis("local.lr=0.1, 1e-2") == [0.1, 0.01]
    assert axis("model={name: cnn, width: 4},{name: mlp}") == [{"name": "cnn", "width": 4}, {"name": "mlp"}]
    assert axis("""data.files="a,b",'it''s'""") == ["a,b", "it's"]
    assert axis("model={name: cnn, width: 4}") is None
    assert layered({}, {"a": 1}, "") == {"a": 1}


# --- a list of methods as an axis -------------------------------------------------------------------------------------


def test_lists_of_methods_on_the_command_line_are_the_rows_of_a_report(own):
    words = ["case=plain", "seed=0", "methods=[],[fedprox],[{fedprox: {mu: 0.1}}, fedvg]"]
    raw = read_sweep(own, words)
    del raw["tune"]["param_space"]["method"]
    labels = ["fedavg", "fedprox", "fedprox (mu=0.1) + fedvg"]
    assert [trial.raw["labels"]["method"] for trial in grid(raw, "a test")] == labels
    assert all("methods" not in trial.raw["labels"] for trial in grid(raw, "a test"))
    assert [trial.name for trial in grid(raw, "a test")][1] == "case=plain_seed=0_method=fedprox"


def test_nothing_is_written_to_the_files_own_dictionary():
    before = copy.deepcopy(OWN)
    settings_of(OWN, {"partition.num_clients": 5, "methods.fedvg.norm": "l2"}, {}, scale=True)
    assert before == OWN
