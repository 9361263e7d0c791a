"""What goes before what: the command line, `scale`, labels of axes, the file; and that what loses is told."""

from __future__ import annotations

import copy

import pytest
import yaml
from typer.testing import CliRunner

from raysim.base.errors import ConfigError
from raysim.base.progress import Listener
from raysim.cli.main import app
from raysim.config import parse_config, read_config
from raysim.config.clashes import clashes, library_faults
from raysim.config.layers import layered, scaled
from raysim.config.sweep import grid
from raysim.launch import settings_of
from raysim.tuning.driver import run_sweep
from raysim.tuning.plan import plan_sweep, read_sweep
from tests.support.federations import raw_config
from tests.support.sweeps import a_sweep as a_checked_sweep

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


def test_the_command_line_goes_before_labels(own):
    lines = []
    words = ["local.lr=0.01", "partition.num_clients=5"]
    assert values_of(own, *words, key="local.lr", tell=lines.append) == {"plain": 0.01, "large": 0.01}
    assert values_of(own, *words, key="partition.num_clients") == {"plain": 5, "large": 5}
    assert values_of(own, *words, key="local.momentum") == {"plain": 0.0, "large": 0.9}  # what was not given stays
    assert lines == ["the command line overrides what labels set: local.lr of large; partition.num_clients of large"]


@pytest.mark.parametrize(
    ("overrides", "labels", "is_told"),
    [
        (["partition.alpha=0.1,1"], ["0.1", "1"], True),
        (["partition.alpha=1"], ["None"], True),
        (["partition.alpha=0.1,1", "labels.alpha=mine"], ["mine", "mine"], False),
        (["labels.alpha=mine"], ["mine"], False),
        ([], ["0.05"], False),
    ],
)
def test_a_label_of_the_file_does_not_name_what_the_command_line_changed(tmp_path, overrides, labels, is_told):
    own, lines = tmp_path / "own.yaml", []
    axes = "tune: {param_space: {seed: {grid_search: [0]}}}"
    own.write_text(f"partition: {{alpha: 0.05}}\nlabels: {{method: FedVG, alpha: 0.05}}\n{axes}\n")
    found = grid(read_sweep(own, overrides, tell=lines.append), "a test")
    assert [str(trial.raw["labels"].get("alpha")) for trial in found] == labels
    assert all(trial.raw["labels"]["method"] == "FedVG" for trial in found)
    assert bool(lines) == is_told


@pytest.mark.parametrize("verb", ["tune", "partition"])
def test_the_first_line_says_which_keys_of_labels_lose(verb, own, monkeypatch):
    monkeypatch.setattr("raysim.launch.finished_sweep", lambda *_: exit(0))
    monkeypatch.setattr("raysim.cli.partitions.partitions", lambda *_: exit(0))
    result = CliRunner().invoke(app, [verb, str(own), "partition.num_clients=5"])
    first = "the command line overrides what labels set: partition.num_clients of large"
    assert result.output.splitlines()[0].removeprefix("note: ") == first


def test_a_sweep_says_what_axes_take_from_each_other_before_it_starts(root, tmp_path):
    space = {"case": {"grid_search": {"long": {"rounds": 3}}}, "rounds": {"grid_search": [1, 2]}}
    sweep, lines = a_checked_sweep(root, tmp_path, space), []
    with pytest.raises(ZeroDivisionError):
        run_sweep(sweep, Listener(lambda line: (lines.append(line), 1 / 0)))
    assert lines == ["the axis rounds overrides what the axis case sets: rounds of long"]


@pytest.mark.parametrize(("words", "tune"), [("rounds=5", [5]), ("rounds=5,6", [5, 6])])
def test_one_value_wins_as_two_do(words, tune):
    assert {trial.raw["rounds"] for trial in trials("paper:univarfl/table_1", words)} == set(tune)


def test_pacs_is_resized_as_the_command_line_says():
    path, lines = "paper:univarfl/table_1", []
    assert values_of(path, key="data.resize")["PACS"] == 64
    assert set(values_of(path, "data.resize=32", key="data.resize", tell=lines.append).values()) == {32}
    assert lines == ["the command line overrides what labels set: data.resize of PACS, HAM10000"]


@pytest.mark.slow
def test_a_network_of_the_command_line_downloads_nothing():
    path = "paper:fedvg/table_A3"
    networks = {str(trial.raw["model"]) for trial in trials(path, "model={name: cnn}", "model.pretrained=null")}
    assert networks == {str({"name": "cnn", "pretrained": None})}
    kept = {trial.raw["model"]["name"] for trial in trials(path, "model.pretrained=null")}
    assert kept == {"resnet18", "resnet50"}
    assert all(trial.raw["model"]["pretrained"] is None for trial in trials(path, "model.pretrained=null"))


def test_labels_that_the_command_line_makes_one_run_are_refused_by_name(own):
    with pytest.raises(ConfigError) as caught:
        read_sweep("paper:univarfl/table_1", ["partition.alpha=0.5"])
    (_, fault) = caught.value.faults
    assert str(fault) == (
        "partition.alpha: leaves the labels CIFAR-100 alpha 0.01 and CIFAR-100 alpha 1.0 of the axis case the same run; "
        "choose one of them, as 'case=CIFAR-100 alpha 0.01'"
    )
    chosen = trials("paper:univarfl/table_1", "case=CIFAR-100 alpha 1.0,PACS", "partition.alpha=0.5")
    assert {trial.raw["partition"].get("alpha") for trial in chosen} == {0.5, None}  # PACS has no alpha
    with pytest.raises(ConfigError, match="the labels FedAvg and FedVG of the axis method the same run"):
        read_sweep(own, ["methods=[fedprox]"])


def test_an_option_of_a_method_counts_with_the_labels_that_list_it(own):
    methods = [trial.raw["methods"] for trial in trials(own, "case=plain", "seed=0", "methods.fedvg.norm=l2")]
    assert methods == [[], [{"fedvg": {"norm": "l2"}}]]
    assert [trial.raw["methods"] for trial in trials(own, "case=plain", "seed=0", "methods+=[diagnostics]")] == [
        ["diagnostics"],
        [{"fedvg": {"norm": "l1"}}, "diagnostics"],
    ]
    with pytest.raises(ConfigError, match="methods lists no 'moon'"):
        read_sweep(own, ["methods.moon.mu=1"])


def test_a_group_set_whole_does_not_hide_an_axis_in_it(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump({"tune": {"param_space": {"partition.alpha": {"grid_search": [0.1, 1]}}}}))
    with pytest.raises(ConfigError, match=r"partition: is set whole, but partition.alpha inside it is an axis"):
        read_sweep(path, ["partition={scheme: iid}"])
    both = trials(path, "partition={num_clients: 3}", "partition.alpha=5,6")
    assert [trial.raw["partition"] for trial in both] == [
        {"num_clients": 3, "alpha": 5},
        {"num_clients": 3, "alpha": 6},
    ]
    drawn = read_sweep(path, ["partition={num_clients: 3}", "tune.param_space.partition.alpha={uniform: [1, 2]}"])
    assert drawn["partition"] == {"num_clients": 3}
    path.write_text(yaml.safe_dump({"tune": {"param_space": {"methods": {"grid_search": [[], ["fedprox"]]}}}}))
    assert [trial.raw["methods"] for trial in trials(path, "methods.fedprox.mu=0.5")] == [
        [],
        [{"fedprox": {"mu": 0.5}}],
    ]
    path.write_text(yaml.safe_dump({"tune": {"space": {"model": {"uniform": [0, 1]}}}}))
    with pytest.raises(ConfigError, match=r"model.name: lies below the axis model, whose values are drawn"):
        read_sweep(path, ["model.name=cnn"])


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


# --- scale ------------------------------------------------------------------------------------------------------------


def test_the_command_line_goes_before_scale_and_scale_before_labels(own):
    lines = []
    words = ["rounds=4", "seed=5"]
    assert values_of(own, *words, key="rounds", is_scaled=True, tell=lines.append) == {"plain": 4, "large": 4}
    assert lines == [
        "`scale` overrides what labels set: partition.num_clients",
        "the command line overrides rounds of `scale`",
    ]
    assert values_of(own, key="partition.num_clients", is_scaled=True) == {"plain": 3, "large": 3}
    assert {trial.raw["seed"] for trial in trials(own, "seed=5", is_scaled=True)} == {5}
    assert values_of(own, "scale.rounds=3", key="rounds", is_scaled=True) == {"plain": 3, "large": 3}
    assert values_of(own, "scale.local.lr=3", key="local.lr", is_scaled=True) == {"plain": 3, "large": 3}


def test_labels_that_scale_left_out_can_be_chosen():
    path = "study:combinations"
    (trial,) = trials(path, "server=FedNova", "local=SGD", is_scaled=True)
    assert (trial.values, trial.raw["rounds"]) == ({"server": "FedNova", "local": "SGD", "seed": 0}, 2)
    (trial,) = trials("paper:univarfl/table_1", "case=CIFAR-100 alpha 1.0", is_scaled=True)
    assert (trial.raw["labels"]["dataset"], trial.raw["data"]["name"]) == ("CIFAR-100", "shapes")


def test_scale_takes_the_value_of_an_axis_with_its_label():
    (trial,) = grid(
        scaled({"tune": {"param_space": {"rounds": {"grid_search": [9]}}}, "scale": {"rounds": 2}}, "s"), "s"
    )
    assert (trial.raw["rounds"], trial.raw["labels"]) == (2, {"rounds": 2})


@pytest.mark.parametrize("verb", ["run", "calibrate"])
def test_runs_and_calibrations_have_the_same_order(verb, tmp_path, monkeypatch):
    taken = {}
    monkeypatch.setattr("raysim.launch.finished_run", lambda raw, *_, **__: taken.update(raw) or exit(0))
    monkeypatch.setattr("raysim.cli.main.calibrate_and_print", lambda raw, *_: taken.update(raw))
    path = tmp_path / "c.yaml"
    path.write_text("name: full\nlocal: {lr: 0.5}\nscale: {local.lr: 0.1, rounds: 1}\nresources: {backend: serial}\n")
    result = CliRunner().invoke(app, [verb, str(path), "--scaled", "local.lr=0.2"])
    assert (taken["local"], taken["rounds"], taken["name"]) == ({"lr": 0.2}, 1, "full_scaled")
    assert "note: the command line overrides local.lr of `scale`" in result.output
    CliRunner().invoke(app, [verb, str(path), "--scaled", "name=mine"])
    assert taken["name"] == "mine"


# --- two axes on one key ----------------------------------------------------------------------------------------------


def a_sweep(only=None, **axes):
    return {
        "tune": {"param_space": {axis: {"grid_search": labels} for axis, labels in axes.items()}, "only": only or {}}
    }


def test_an_axis_that_loses_its_own_values_is_refused():
    raw = a_sweep(**{"local.lr": [0.1, 0.2], "method": {"slow": {"local.lr": 0.5}, "as it is": {}}})
    ((fault,), _) = clashes(raw, "a test")
    assert str(fault).startswith(
        "tune.param_space.local.lr: its values lose to slow of the axis method, which sets local.lr; choose other labels, or"
    )
    raw["tune"]["only"] = {"local.lr": {"method": ["as it is"]}}
    assert clashes(raw, "a test") == ([], [])
    space = {"local.lr": {"uniform": [0.1, 1]}, "method": {"choice": {"slow": {"local": {"lr": 1}}}}}
    with pytest.raises(ConfigError, match=r"tune.space.local.lr: its values lose to slow"):
        plan_sweep({"name": "s", "tune": {"space": space}}, "a test")


def test_labels_that_a_later_axis_makes_one_run_are_refused_by_name(own, root):
    raw = a_sweep(rate={"low": {"local.lr": 0.1}, "high": {"local.lr": 0.2}}, method={"slow": {"local": {"lr": 0.5}}})
    ((fault,), _) = clashes(raw, "a test")
    assert "rate: low and high are the same run with slow of the axis method, which sets local.lr" in str(fault)
    with pytest.raises(ConfigError, match="low and high are the same run"):
        plan_sweep({**raw_config(root), **raw, "name": "s"}, "a test")
    with pytest.raises(
        ConfigError, match=r"case: STL-10 alpha 0.01 and STL-10 alpha 1.0 are the same run with 0.1 of the axis"
    ):
        plan_sweep(read_sweep("paper:univarfl/table_1", ["partition.alpha=0.1,0.5"]), "a test")


def test_what_else_loses_to_a_later_axis_is_told(own):
    raw = read_sweep(own, ["local.lr=0.2,0.3"])
    assert clashes(raw, "a test") == ([], ["the axis local.lr overrides what the axis case sets: local.lr of large"])
    assert {(t.raw["local"]["lr"], t.raw["labels"]["lr"]) for t in grid(raw, "a test")} == {(0.2, 0.2), (0.3, 0.3)}
    raw = read_sweep("paper:univarfl/table_1", ["method=FedAvg,Joint", "case=PACS,HAM10000"])
    assert clashes(raw, "a test")[1] == [
        "the axis method overrides what the axis case sets: partition.scheme of PACS, HAM10000"
    ]
    assert clashes(read_config("study:combinations"), "a test") == ([], [])  # two axes that add to one list


# --- only, and settings that no trial takes ---------------------------------------------------------------------------


def test_only_of_a_label_that_is_not_there_is_refused_and_of_one_that_was_not_chosen_told(tmp_path):
    path, lines = tmp_path / "o.yaml", []
    raw = a_sweep(method={"FedAvg": {}, "FedVG": {"methods": ["fedvg"]}}, rounds=[1, 2])
    raw["tune"]["only"] = {"rounds": {"method": ["FedVC"]}}
    path.write_text(yaml.safe_dump(raw, sort_keys=False))
    with pytest.raises(ConfigError, match=r"tune.only.rounds: method has no label 'FedVC'. Did you mean 'FedVG'"):
        read_sweep(path)
    path.write_text(yaml.safe_dump({**raw, "tune": {**raw["tune"], "only": {"rounds": {"method": ["FedVG"]}}}}))
    assert len(trials(path)) == 3
    assert len(trials(path, "method=FedAvg", tell=lines.append)) == 1
    assert lines == [
        "the axis rounds is left out: it counts with FedVG of method alone, which this sweep does not have"
    ]
    with pytest.raises(
        ConfigError, match="rounds: counts with FedVG of method alone, which this sweep does not have; drop it"
    ):
        read_sweep(path, ["method=FedAvg", "rounds=5"])


def test_settings_that_no_trial_takes_are_looked_at(root):
    raw = raw_config(root, name="s")
    labels = {"a": {"rounds": 1}, "b": {"local.lrr": 0.1}, "c": {"rounds": "many"}}
    unused = {"d": {"name": "x"}, "e": {"modle": {}}}
    raw["tune"] = {"param_space": {"case": {"grid_search": ["a"]}}, "settings": {"case": labels, "unused": unused}}
    with pytest.raises(ConfigError) as caught:
        plan_sweep(raw, "a test")
    faults = {fault.key: fault.message for fault in caught.value.faults}
    assert "Did you mean 'lr'" in faults["tune.settings.case.b.local.lrr"]
    assert "must be an integer" in faults["tune.settings.case.c.rounds"]
    assert "is the sweep's own" in faults["tune.settings.unused.d"]
    assert "Did you mean 'model'" in faults["tune.settings.unused.e.modle"]
    for path in ("paper:fedvg/table_A3", "paper:flfa/table_1", "paper:livar/table_1", "paper:univarfl/table_1"):
        assert list(library_faults(read_config(path))) == []


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
