"""Sweeps on Ray Tune: trials that equal runs, placement, restarts, schedulers, faults before anything starts."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from raysim.check import check
from raysim.config import read_config
from raysim.core.errors import ConfigError, RunExists
from raysim.run import execute
from raysim.tuning import trial as trial_module
from raysim.tuning.driver import MOST_LINES, _Watch, run_sweep
from raysim.tuning.outcome import outcome, ranked, write_results
from raysim.tuning.plan import plan_sweep, read_sweep
from raysim.tuning.resources import bundles_of, draws, without_room
from tests.support.federations import raw_config

PROJECT = Path(__file__).parent.parent.parent
METHODS = {"grid_search": {"FedAvg": {"methods": []}, "FedVG": {"methods": ["fedvg"]}}}


def a_sweep(root, tmp_path, space, tune=None, **groups):
    raw = raw_config(root, [], name="s", storage=str(tmp_path / "runs"), **groups)
    raw["tune"] = {"param_space": space, **(tune or {})}
    return plan_sweep(raw, "a test", draws)


def run(sweep, watch=lambda: None):
    """(outcomes, lines); watch() is called with each line, for a finished trial while its process is still there."""
    lines = []

    def say(line):
        lines.append(line)
        watch()

    outcomes = run_sweep(sweep, say)
    write_results(sweep, outcomes)
    return outcomes, lines


def digest(folder):
    return json.loads((folder / "summary.json").read_text())["params_sha256"]


def digest_of_run(raw, tmp_path, name="twin"):
    raw = {**raw, "storage": str(tmp_path / "twins"), "name": name}
    return execute(check(raw, "a test"), on_start=lambda *_: None, on_round=lambda _: None)["params_sha256"]


def is_all_free(ray):
    """Whether the cluster has all its resources back, apart from what the fixtures of other tests hold."""
    free, total = ray.available_resources(), ray.cluster_resources()
    return all(free.get(name, 0) >= total[name] - (1.5 if name == "CPU" else 0) for name in ("CPU", "GPU"))


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


# --- the list of trials -----------------------------------------------------------------------------------------------


def test_command_line_makes_grids_and_narrows_axes(tmp_path):
    path = tmp_path / "c.yaml"
    space = {"method": METHODS, "seed": {"grid_search": [0, 1, 2]}, "case": {"grid_search": ["a", "b"]}}
    settings = {"case": {"a": {"rounds": 1}, "b": {"rounds": 2}}}
    path.write_text(yaml.safe_dump({"tune": {"param_space": space, "settings": settings}}))
    raw = read_sweep(
        path, ["local.lr=0.1,1e-2", "seed=4", "method=FedVG", "case=b,a", "rounds=7", "methods=[fedprox, fedavgm]"]
    )
    assert raw["tune"]["param_space"] == {
        "method": {"grid_search": {"FedVG": {"methods": ["fedvg"]}}},
        "seed": {"grid_search": [4]},
        "case": {"grid_search": {"b": {"rounds": 2}, "a": {"rounds": 1}}},
        "local.lr": {"grid_search": [0.1, 0.01]},
    }
    assert (raw["rounds"], raw["methods"]) == (7, ["fedprox", "fedavgm"])
    raw = read_sweep(path, ["tune.param_space.local.lr={uniform: [0, 1]}", "methods=[fedprox, fedavgm],[]", "a='1,2'"])
    assert raw["tune"]["param_space"]["local.lr"] == {"uniform": [0, 1]}
    assert raw["tune"]["param_space"]["methods"] == {"grid_search": [["fedprox", "fedavgm"], []]}
    assert raw["a"] == "1,2"
    with pytest.raises(ConfigError, match="Did you mean 'FedVG'"):
        read_sweep(path, ["method=FedVC"])


def test_drawn_trials_are_fixed_by_the_seed_and_grow_at_the_end(root, tmp_path):
    space = {
        "local.lr": {"loguniform": [1e-3, 1e-1]},
        "local.batch_size": {"randint": {"lower": 4, "upper": 9}},
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


def test_trials_are_compared_by_the_accuracy_at_the_best_validation(root, tmp_path, monkeypatch):
    """By that of the run so far while it runs, by that of the whole run at its end."""
    tune = {"metric": "accuracy_at_best_validation"}
    sweep = a_sweep(root, tmp_path, {"seed": {"grid_search": [0, 1]}}, tune, rounds=4)
    validation, test = [0.5, 0.7, 0.7, 0.6], [0.1, 0.2, 0.3, 0.4]
    metrics = [
        {"server/validation_accuracy": v, "server/accuracy": t, "system/round_s": 1.0}
        for v, t in zip(validation, test, strict=True)
    ]
    folder = sweep.folder / sweep.trials[0].name
    folder.mkdir(parents=True)
    with open(folder / "progress.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["round", *metrics[0]])
        writer.writeheader()
        writer.writerows({"round": index, **row} for index, row in enumerate(metrics))
    found = outcome(sweep, sweep.trials[0])
    assert (found.score, found.best_round) == (0.2, 1)
    told = []
    monkeypatch.setattr(trial_module.tune, "report", lambda result: told.append(result["accuracy_at_best_validation"]))
    reporter = trial_module._Reporter(sweep.base.tune)
    reporter.num_rounds = 4
    for index, row in enumerate(metrics):
        reporter._report(index, row)
    reporter.finish()
    assert told == [0.1, 0.2, 0.2, 0.2]
    with pytest.raises(ConfigError, match=r"tune.metric: .* needs a validation set, and trial seed=0 has none"):
        a_sweep(root, tmp_path, {"seed": {"grid_search": [0, 1]}}, tune, data={"root": str(root), "validation": 0})


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
        ({"param_space": {"local.lr": {"uniform": [0]}}}, "uniform cannot take"),
        ({"param_space": {"seed": {"grid_search": [0]}}, "num_samples": 2}, "repeats identical trials"),
        ({"param_space": {"seed": {"grid_search": [0]}}, "scheduler": "asho"}, "must be asha or median"),
        ({"param_space": {"seed": {"grid_search": [0]}}, "scheduler": "asha", "grace_rounds": 9}, "more than a trial"),
    ],
)
def test_faults_of_the_sweep_itself(tune, words, root, tmp_path):
    with pytest.raises(ConfigError) as caught:
        a_sweep(root, tmp_path, tune.pop("param_space", {}), tune)
    assert words in str(caught.value)


def test_paths_are_whole_before_tune_changes_folders(root, tmp_path, monkeypatch):
    (tmp_path / "data").symlink_to(root)
    (tmp_path / "map.yaml").write_text("'0': ['0']\n")
    monkeypatch.chdir(tmp_path)
    raw = raw_config(root, [], storage="runs", name="s")
    raw["data"] = {"validation_set": {"external": {"name": "digits", "mapping": "map.yaml"}}}
    raw["tune"] = {"param_space": {"seed": {"grid_search": [0]}}}
    (trial,) = plan_sweep(raw, "a test", draws).trials
    assert trial.config.storage == str(tmp_path / "runs")
    assert trial.config.data.root == str(tmp_path / "data")
    assert trial.config.data.validation_set.external.mapping == str(tmp_path / "map.yaml")
    assert trial.raw["data"] == raw["data"]


# --- places -----------------------------------------------------------------------------------------------------------


def test_bundles_come_from_each_trials_own_configuration(root, tmp_path):
    def bundles(gpus, **resources):
        sweep = a_sweep(root, tmp_path, {"seed": {"grid_search": [0]}}, resources=resources)
        return bundles_of(sweep.trials[0].config, gpus)

    assert bundles(0, backend="serial") == [{"CPU": 1}]
    assert bundles(4, backend="serial", cpus_per_trainer=0.5) == [{"CPU": 0.5}]
    assert bundles(0, backend="ray") == [{}, {"CPU": 1}]
    assert bundles(2, backend="ray") == [{}, {"CPU": 1, "GPU": 0.25}]
    assert bundles(2, backend="ray", trainers=2, gpus_per_trainer=0.5) == [{}, *[{"CPU": 1, "GPU": 0.5}] * 2]
    assert bundles(0, backend="ray", trainers=2, gpus_per_trainer=0.5) == [{}, *[{"CPU": 1}] * 2]


def test_room_is_judged_node_by_node():
    two = [{"CPU": 2.0, "GPU": 1.0}, {"CPU": 4.0}]
    assert without_room([{"CPU": 4.0}, {"CPU": 1.0, "GPU": 0.5}, {"CPU": 1.0, "GPU": 0.5}], two) is None
    assert without_room([{"CPU": 1.0, "GPU": 0.6}] * 2, two) == {"CPU": 1.0, "GPU": 0.6}
    assert without_room([{"CPU": 5.0}], two) == {"CPU": 5.0}


def test_impossible_request_names_the_bundle_within_30_s(root, tmp_path, ray_cluster):
    began = time.monotonic()
    space = {"resources.cpus_per_trainer": {"grid_search": [0.5, 64]}}
    with pytest.raises(ConfigError, match=r"trial cpus_per_trainer=64: bundle \{CPU: 64\} has no place"):
        run(a_sweep(root, tmp_path, space))
    resources = {"backend": "ray", "trainers": 2, "gpus_per_trainer": 1, "cpus_per_trainer": 0.5}
    sweep = a_sweep(root, tmp_path, {"seed": {"grid_search": [0]}}, resources=resources)
    with pytest.raises(ConfigError, match=r"bundle \{CPU: 0.5, GPU: 1\}, one of 2 of a trial, has no place"):
        run(sweep)
    assert time.monotonic() - began < 30
    assert not list(sweep.folder.glob("*/config.yaml"))


# --- whole sweeps -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sweep_of_8_trials_equals_8_runs(root, tmp_path, ray_cluster):
    space = {"method": METHODS, "local.lr": {"grid_search": [0.1, 0.01]}, "seed": {"grid_search": [0, 1]}}
    sweep = a_sweep(root, tmp_path, space, rounds=2)
    outcomes, lines = run(sweep)
    assert {found.status for found in outcomes.values()} == {"completed"}
    assert len(outcomes) == 8
    assert len(lines) <= 1 + 8 + MOST_LINES
    for trial in sweep.trials:
        folder = sweep.folder / trial.name
        saved = yaml.safe_load((folder / "config.yaml").read_text())
        assert saved["labels"] == {
            "method": trial.values["method"],
            "lr": trial.values["local.lr"],
            "seed": saved["seed"],
        }
        assert (folder / "partition.json").is_file()
    for trial in (sweep.trials[0], sweep.trials[-1]):
        assert digest(sweep.folder / trial.name) == digest_of_run(trial.raw, tmp_path, trial.name)
    assert not (sweep.folder / ".tune").exists()
    assert yaml.safe_load((sweep.folder / "sweep.yaml").read_text())["tune"]["param_space"] == space
    with open(sweep.folder / "results.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["trial"] for row in rows] == [trial.name for trial in sweep.trials]

    best = ranked(sweep, outcomes)[0]
    assert outcomes[best.name].score == max(found.score for found in outcomes.values())
    raw = read_config(sweep.folder / "best.yaml")
    assert "labels" not in raw
    assert digest_of_run(raw, tmp_path, "best") == digest(sweep.folder / best.name)

    wait_for(lambda: is_all_free(ray_cluster))
    before = {path: path.stat().st_mtime_ns for path in sweep.folder.glob("*/*")}
    again, lines = run(sweep)
    assert (again, lines) == (outcomes, [])
    assert before == {path: path.stat().st_mtime_ns for path in sweep.folder.glob("*/*")}
    with pytest.raises(
        ConfigError, match=r"rounds: is 3, but finished trial method=FedAvg_lr=0\.1_seed=0 \(and 7 more\) has 2"
    ):
        run(a_sweep(root, tmp_path, space, rounds=3))
    (sweep.folder / "config.yaml").touch()
    with pytest.raises(RunExists, match="is a run, not a sweep"):
        run(sweep)


@pytest.mark.slow
@pytest.mark.cluster
def test_trial_on_ray_lives_in_its_own_placement_group(root, tmp_path, ray_cluster):
    """Half of the cluster's CPUs are taken: a trial that sized or placed its pool by the cluster would never start."""
    resources = {"backend": "ray", "trainers": "auto", "gpus_per_trainer": 0.5, "cpus_per_trainer": 0.5}
    # Two seeds: trials that differ in their trainers alone would run once.
    cases = {"auto": {"resources.trainers": "auto"}, "two": {"resources.trainers": 2, "seed": 4}}
    sweep = a_sweep(root, tmp_path, {"case": {"grid_search": cases}}, {"max_concurrent": 1}, resources=resources)
    outcomes, _ = run(sweep)
    assert {found.status for found in outcomes.values()} == {"completed"}, outcomes
    for trial, trainers in zip(sweep.trials, (1, 2), strict=True):
        environment = json.loads((sweep.folder / trial.name / "env.json").read_text())
        assert environment["resources"]["trainers"] == trainers
        assert environment["resources"]["gpus_per_trainer"] == 0.5
        expected = digest_of_run({**trial.raw, "resources": {"backend": "serial"}}, tmp_path / trial.name)
        assert digest(sweep.folder / trial.name) == expected
    wait_for(lambda: is_all_free(ray_cluster))


@pytest.mark.slow
@pytest.mark.cluster
def test_failed_trial_is_told_and_alone_run_again(root, tmp_path, ray_cluster):
    raises = {"tests.support.toys:raises": {"client": 4, "round_index": 1}}
    space = {"method": {"grid_search": {"good": {"methods": []}, "bad": {"methods": [raises]}}}}
    sweep = a_sweep(root, tmp_path, space, cohort={"size": 12})
    outcomes, lines = run(sweep)
    assert [found.status for found in outcomes.values()] == ["completed", "failed"]
    assert "client 4 failed in round 1" in outcomes["method=bad"].message
    assert any("method=bad  failed: client 4" in line for line in lines)
    assert ranked(sweep, outcomes)[0].name == "method=good"
    began = (sweep.folder / "method=good" / "summary.json").stat().st_mtime_ns
    outcomes, lines = run(sweep)
    assert lines[0].startswith("1 of 2 trials to run")
    assert (sweep.folder / "method=good" / "summary.json").stat().st_mtime_ns == began


@pytest.mark.slow
def test_asha_stops_trials_and_no_actor_outlives_its_trial(root, tmp_path, ray_cluster):
    tune = {"scheduler": "asha", "reduction_factor": 2, "grace_rounds": 2, "max_concurrent": 1}
    tune |= {"metric": "train/loss", "mode": "min"}
    resources = {"backend": "ray", "trainers": 1, "cpus_per_trainer": 0.5}
    space = {"local.lr": {"grid_search": [0.3, 1e-6]}}
    sweep = a_sweep(root, tmp_path, space, tune, rounds=4, partition={"alpha": 10.0}, resources=resources)
    seen = []
    outcomes, lines = run(sweep, lambda: seen.append(trial_processes(ray_cluster)))
    assert any("ImplicitFunc" in title for title in seen[-1])
    assert any("TrainerActor" in title for title in seen[-1])
    good, bad = (outcomes[trial.name] for trial in sweep.trials)
    assert (good.status, bad.status) == ("completed", "stopped")
    assert bad.message.startswith("stopped by asha after round 2 of 4: train/loss 2.")
    assert lines[-1].endswith(bad.message)
    folder = sweep.folder / sweep.trials[1].name
    assert not {"COMPLETED", "FAILED"} & {path.name for path in folder.iterdir()}
    assert len((folder / "progress.csv").read_text().splitlines()) == 1 + 2
    assert ranked(sweep, outcomes)[0].name == "lr=0.3"
    wait_for(lambda: is_all_free(ray_cluster))
    wait_for(lambda: not trial_processes(ray_cluster))
    again, lines = run(sweep)
    assert again == outcomes
    assert lines == []


@pytest.mark.slow
@pytest.mark.cluster
def test_median_rule_stops_the_trial_that_is_worse_than_the_others_were(root, tmp_path, ray_cluster):
    tune = {"scheduler": "median", "grace_rounds": 1, "max_concurrent": 1, "metric": "train/loss", "mode": "min"}
    space = {"local.lr": {"grid_search": [0.3, 0.2, 0.1, 1e-6]}}
    serial = {"backend": "serial", "cpus_per_trainer": 0.5}
    sweep = a_sweep(root, tmp_path, space, tune, rounds=4, partition={"alpha": 10.0}, resources=serial)
    outcomes, _ = run(sweep)
    assert [outcomes[trial.name].status for trial in sweep.trials] == ["completed"] * 3 + ["stopped"]
    assert "stopped by median after round" in outcomes["lr=1e-06"].message


def trial_processes(ray):
    """Processes of this Ray that belong to a trial."""
    import psutil

    session = ray._private.worker.global_worker.node.get_session_dir_path()
    found = []
    for process in psutil.process_iter():
        try:
            title = " ".join(process.cmdline())
            parents = " ".join(" ".join(parent.cmdline()) for parent in process.parents())
        except psutil.Error:
            continue
        names = ("TrainerActor", "ServerActor", "ShardHost", "ImplicitFunc")
        if title.startswith("ray::") and any(name in title for name in names) and session in parents:
            found.append(title)
    return found


# --- commands ---------------------------------------------------------------------------------------------------------


def start(path, ray, *overrides):
    """`raysim tune` in a process of its own, on the tests' Ray."""
    address = ray.get_runtime_context().gcs_address
    return subprocess.Popen(
        [sys.executable, "-m", "raysim", "tune", str(path), *overrides],
        cwd=PROJECT,
        env={**os.environ, "PYTHONPATH": str(PROJECT), "RAY_ADDRESS": address},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def write_sweep(path, root, tmp_path, name, space, **groups):
    raw = raw_config(root, [], name=name, storage=str(tmp_path / "runs"), **groups)
    raw["tune"] = {"param_space": space, "max_concurrent": 1}
    path.write_text(yaml.safe_dump(raw))
    return plan_sweep(read_sweep(path), str(path), draws)


@pytest.mark.slow
def test_sweep_killed_half_way_runs_only_what_is_unfinished(root, tmp_path, ray_cluster):
    path = tmp_path / "killed.yaml"
    space = {"seed": {"grid_search": [0, 1]}}
    groups = {"rounds": 25, "checkpoint": {"every_s": 0}, "resources": {"backend": "serial", "cpus_per_trainer": 0.5}}
    sweep = write_sweep(path, root, tmp_path, "killed", space, **groups)
    folders = [sweep.folder / trial.name for trial in sweep.trials]
    process = start(path, ray_cluster)
    deadline = time.monotonic() + 300
    while not list(folders[1].glob("checkpoints/round-00000[3-9]")):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert [outcome(sweep, trial).status for trial in sweep.trials] == ["completed", "unfinished"]
    before = {file: file.stat().st_mtime_ns for file in folders[0].iterdir()}

    began = time.time()
    again = start(path, ray_cluster)
    output, _ = again.communicate(timeout=300)
    assert again.returncode == 0, output
    assert "1 of 2 trials to run" in output
    assert "\r" not in output
    assert before == {file: file.stat().st_mtime_ns for file in folders[0].iterdir()}
    with open(folders[1] / "progress.csv") as file:
        assert [int(row["round"]) for row in csv.DictReader(file)] == list(range(25))
    old = [event for event in folders[1].glob("events*") if int(event.name.split(".")[3]) < began]
    assert len(old) == 1  # it went on where it was, beside what it had written before
    assert digest(folders[1]) == digest_of_run(sweep.trials[1].raw, tmp_path)


@pytest.mark.slow
@pytest.mark.cluster
def test_two_sweeps_at_once_and_100_rounds_in_150_lines(root, tmp_path, ray_cluster):
    serial = {"resources": {"backend": "serial", "cpus_per_trainer": 0.5}}
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    one = write_sweep(first, root, tmp_path, "first", {"seed": {"grid_search": [0]}}, rounds=100, **serial)
    two = write_sweep(second, root, tmp_path, "second", {"seed": {"grid_search": [0, 1]}}, **serial)
    processes = [start(first, ray_cluster), start(second, ray_cluster)]
    wait_for(lambda: (one.folder / "seed=0").exists(), 300)
    with pytest.raises(RunExists, match="is running"):
        run(one)
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    for output in outputs:
        assert "\r" not in output
        assert len(output.splitlines()) <= 150
    for sweep in (one, two):
        for trial in sweep.trials:
            assert outcome(sweep, trial).status == "completed"
    assert digest(two.folder / "seed=1") == digest_of_run(two.trials[1].raw, tmp_path)


def test_progress_lines_are_few_however_long_a_sweep_takes(root, tmp_path, monkeypatch):
    sweep = a_sweep(root, tmp_path, {"seed": {"grid_search": [0]}})
    lines, now = [], [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    watch = _Watch(sweep, sweep.trials, lines.append)
    for _ in range(200_000):
        now[0] += 1.0
        watch.on_step_end(0, [])
    assert 10 < len(lines) <= MOST_LINES


def test_refused_trials_are_all_named_and_the_others_start_if_asked(root, tmp_path):
    space = {"partition.num_clients": {"grid_search": [12, 5000, 6000]}, "seed": {"grid_search": [0, 1]}}
    with pytest.raises(ConfigError) as caught:
        a_sweep(root, tmp_path, space)
    (fault,) = [fault for fault in caught.value.faults if fault.key == "tune.skip_refused"]
    assert "start the other 2 of 6 trials" in fault.message
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


def test_trials_that_differ_in_nothing_that_counts_run_once(root, tmp_path, ray_cluster):
    space = {
        "method": {"grid_search": {"FedAvg": {}, "Joint": {"partition.scheme": "joint"}}},
        "partition.alpha": {"grid_search": [0.3, 1.0]},
    }
    sweep = a_sweep(root, tmp_path, space, rounds=1)
    same = {trial.name: trial.same_as for trial in sweep.trials if trial.same_as}
    assert same == {"method=Joint_alpha=1.0": "method=Joint_alpha=0.3"}
    outcomes, lines = run(sweep)
    assert "1 only repeat another one" in lines[0]
    assert {found.status for found in outcomes.values()} == {"completed"}
    for twin, original in same.items():
        assert digest(sweep.folder / twin) == digest(sweep.folder / original)
        assert not list((sweep.folder / twin).glob("events*"))  # it never ran
        missing = {p.name for p in (sweep.folder / original).iterdir()} - {
            p.name for p in (sweep.folder / twin).iterdir()
        }
        assert {name for name in missing if not name.startswith("events")} == {".lock", "checkpoints"}
        config = yaml.safe_load((sweep.folder / twin / "config.yaml").read_text())
        assert (config["labels"]["alpha"], config["partition"]["alpha"]) == (1.0, 1.0)
    assert run(sweep)[0] == outcomes  # and nothing is left to do
