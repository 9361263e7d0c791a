"""The list of trials: command line, draws, faults before anything starts, paths."""

from __future__ import annotations

import csv

import pytest
import yaml

from raysim.base.direction import DIRECTIONS
from raysim.base.errors import ConfigError
from raysim.tuning.outcome import outcome, write_results
from raysim.tuning.plan import plan_sweep, read_sweep
from tests.fuzz.own_code import plain_metric
from tests.support.federations import raw_config
from tests.support.sweeps import METHODS, a_sweep


def test_command_line_makes_grids_and_narrows_axes(tmp_path):
    path = tmp_path / "c.yaml"
    space = {"method": METHODS, "seed": {"grid_search": [0, 1, 2]}, "case": {"grid_search": ["a", "b"]}}
    settings = {"case": {"a": {"rounds": 1}, "b": {"rounds": 2}}}
    path.write_text(yaml.safe_dump({"tune": {"param_space": space, "settings": settings}}))
    raw = read_sweep(
        path, ["local.lr=0.1,1e-2", "seed=4", "method=FedVG", "case=b,a", "cohort.size=7", "loggers=[x, y]"]
    )
    assert raw["tune"]["param_space"] == {
        "method": {"grid_search": {"FedVG": {"methods": ["fedvg"]}}},
        "seed": {"grid_search": [4]},
        "case": {"grid_search": {"b": {"rounds": 2}, "a": {"rounds": 1}}},
        "local.lr": {"grid_search": [0.1, 0.01]},
    }
    assert (raw["cohort"]["size"], raw["loggers"]) == (7, ["x", "y"])
    raw = read_sweep(path, ["tune.param_space.local.lr={uniform: [0, 1]}", "methods=[fedprox, fedavgm],[]", "a='1,2'"])
    assert raw["tune"]["param_space"]["local.lr"] == {"uniform": [0, 1]}
    assert raw["tune"]["param_space"]["methods"] == {"grid_search": [["fedprox", "fedavgm"], []]}
    assert raw["a"] == "1,2"
    with pytest.raises(ConfigError, match="Did you mean 'FedVG'"):
        read_sweep(path, ["method=FedVC"])


def test_drawn_trials_are_fixed_by_the_seed_and_grow_at_the_end(root, tmp_path):
    space = {
        "local.lr": {"loguniform": [1e-3, 1e-1]},
        "local.batch_size": {"randint": [4, 9]},
        "seed": {"grid_search": [0, 1]},
    }
    four = a_sweep(root, tmp_path, space, {"num_samples": 2})
    six = a_sweep(root, tmp_path, space, {"num_samples": 3})
    assert [dict(t.values) for t in four.trials] == [dict(t.values) for t in six.trials][:4]
    assert [t.name for t in four.trials] == [t.name for t in six.trials][:4]
    assert len({t.name for t in six.trials}) == len({t.config.local.lr for t in six.trials}) == 6
    assert all(1e-3 <= t.config.local.lr <= 1e-1 and t.config.local.batch_size in range(4, 9) for t in six.trials)
    assert six.trials[0].config.labels == {
        "lr": six.trials[0].config.local.lr,
        "batch_size": six.trials[0].config.local.batch_size,
        "seed": 0,
    }
    other = a_sweep(root, tmp_path, space, {"num_samples": 2}, seed=4)
    assert other.trials[0].config.local.lr != four.trials[0].config.local.lr


def test_all_faults_of_all_trials_come_before_anything_starts(root, tmp_path):
    space = {
        "local.lr": {"grid_search": [0.1, -1]},
        "method": {"grid_search": {"A": {"methods": ["fedporx"]}, "B": {}}},
    }
    with pytest.raises(ConfigError) as caught:
        a_sweep(root, tmp_path, space, sed=1)
    faults = {fault.key: fault.message for fault in caught.value.faults}
    assert "Did you mean 'fedprox'" in faults["methods[0]"]
    assert "(trial lr=0.1_method=A and 1 more)" in faults["methods[0]"]
    assert "(trial lr=-1_method=A and 1 more)" in faults["local.lr"]
    assert "trial" not in faults["sed"]  # it has nothing to do with any one of them
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("tune", "words"),
    [
        ({"param_space": {"local.lr": {"lognormal": [0, 1]}}}, "unknown domain 'lognormal'. Did you mean 'loguniform'"),
        ({"param_space": {"local.lr": {"loguniform": [0, 1]}}}, "tune.param_space.local.lr"),
        ({"param_space": {"local.lr": {"uniform": [0]}}}, "uniform takes two numbers, [lower, upper], got [0]"),
        *(
            ({"param_space": {"local.lr": {name: [9, 3]}}}, "`low <= high`")
            for name in ("uniform", "log_uniform", "randint", "log_randint")
        ),
        ({"param_space": {"local.lr": {"loguniform": [-1, 1]}}}, "`low > 0`"),
        ({"param_space": {"rounds": {"randint": [0.5, 2]}}}, "randint takes two integers"),
        ({"param_space": {"rounds": {"randint": [3, 3]}}}, "`low <= high`"),
        (
            {"param_space": {"seed": {"grid_search": [0]}}, "metric": "best_rmse"},
            "tune.metric: trial seed=0 predicts classes and records no best_rmse; the main metric is accuracy",
        ),
        ({"param_space": {"seed": {"grid_search": [0]}}, "num_samples": 2}, "repeats identical trials"),
        ({"param_space": {"seed": {"grid_search": [0]}}, "scheduler": "asho"}, "must be 'asha' or 'median'"),
    ],
)
def test_faults_of_the_sweep_itself(tune, words, root, tmp_path):
    with pytest.raises(ConfigError) as caught:
        a_sweep(root, tmp_path, tune.pop("param_space", {}), tune)
    assert words in str(caught.value)


def test_a_sweep_by_an_own_metric_needs_to_know_which_values_are_better(root, tmp_path, monkeypatch):
    own = {"metrics": ["tests.fuzz.own_code:plain_metric"]}
    space = {"seed": {"grid_search": [0, 1]}}
    with pytest.raises(ConfigError, match=r"tune\.metric: 'plain_metric' does not declare a better direction"):
        a_sweep(root, tmp_path, space, {"metric": "server/plain_metric"}, evaluation=own)
    monkeypatch.setattr(plain_metric, "direction", "min", raising=False)
    monkeypatch.delitem(DIRECTIONS, "plain_metric", raising=False)
    sweep = a_sweep(root, tmp_path, space, {"metric": "server/plain_metric"}, evaluation=own)
    assert sweep.base.tune.direction == "min"
    monkeypatch.delitem(DIRECTIONS, "plain_metric")


def test_paths_are_whole_before_tune_changes_folders(root, tmp_path, monkeypatch):
    (tmp_path / "data").symlink_to(root)
    (tmp_path / "map.yaml").write_text("'0': ['0']\n")
    monkeypatch.chdir(tmp_path)
    raw = raw_config(root, [], storage="runs", name="s")
    raw["data"] = {"validation_set": {"external": {"name": "digits", "mapping": "map.yaml"}}}
    raw["tune"] = {"param_space": {"seed": {"grid_search": [0]}}}
    (trial,) = plan_sweep(raw, "a test").trials
    assert trial.config.storage == str(tmp_path / "runs")
    assert trial.config.data.root == str(tmp_path / "data")
    assert trial.config.data.validation_set.external.mapping == str(tmp_path / "map.yaml")
    assert trial.raw["data"] == raw["data"]


def test_refused_trials_are_all_named_and_the_others_start_if_asked(root, tmp_path):
    space = {"partition.num_clients": {"grid_search": [12, 5000, 6000]}, "seed": {"grid_search": [0, 1]}}
    with pytest.raises(ConfigError) as caught:
        a_sweep(root, tmp_path, space)
    (fault,) = [fault for fault in caught.value.faults if fault.key == "tune.skip_refused"]
    assert "start the remaining 2 of 6 trials" in fault.message
    for count in (5000, 6000):
        for seed in (0, 1):
            assert f"num_clients={count}_seed={seed}" in fault.message
    sweep = a_sweep(root, tmp_path, space, {"skip_refused": True})
    assert [trial.name for trial in sweep.trials] == ["num_clients=12_seed=0", "num_clients=12_seed=1"]
    assert len(sweep.refused) == 4
    write_results_of = {trial.name: outcome(sweep, trial) for trial in sweep.trials}
    sweep.folder.mkdir(parents=True)
    write_results(sweep, write_results_of)
    with open(sweep.folder / "results.csv") as file:
        statuses = [row["status"] for row in csv.DictReader(file)]
    assert statuses == ["unfinished"] * 2 + ["refused"] * 4
    space["partition.num_clients"]["grid_search"] = [5000]
    with pytest.raises(ConfigError):  # nothing is left to start
        a_sweep(root, tmp_path, space, {"skip_refused": True})
