"""Sweeps on Ray Tune: trials that equal runs, placement, restarts, schedulers, lines about progress."""

from __future__ import annotations

import csv
import json
import pickle
import re
import signal
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import yaml
from ray import cloudpickle
from ray.exceptions import OutOfMemoryError, RayTaskError, WorkerCrashedError

from raysim.base.errors import ConfigError, DataError, Fault, RaysimError, RunExists
from raysim.base.progress import Listener
from raysim.config import read_config
from raysim.folders.run_folder import RunFolder
from raysim.tuning import driver
from raysim.tuning.driver import MOST_LINES, _Watch
from raysim.tuning.outcome import Outcome, outcome, ranked
from tests.support.sweeps import (
    METHODS,
    a_sweep,
    digest,
    digest_of_run,
    is_all_free,
    run,
    start,
    trial_processes,
    wait_for,
    write_sweep,
)

pytestmark = pytest.mark.ray


@pytest.mark.slow
def test_sweep_of_4_trials_equals_4_runs(root, tmp_path, ray_cluster):
    space = {"method": METHODS, "local.lr": {"grid_search": [0.1, 0.01]}, "seed": {"grid_search": [1]}}
    sweep = a_sweep(root, tmp_path, space, {"max_concurrent": 2}, rounds=2, resources={"backend": "auto"})
    outcomes, lines = run(sweep)
    assert {found.status for found in outcomes.values()} == {"completed"}
    assert len(outcomes) == 4
    assert len(lines) <= 1 + 4 + MOST_LINES
    for trial in sweep.trials:
        folder = sweep.folder / trial.name
        saved = yaml.safe_load((folder / "config.yaml").read_text())
        assert saved["labels"] == {
            "method": trial.values["method"],
            "lr": trial.values["local.lr"],
            "seed": saved["seed"],
        }
        assert (folder / "partition.json").is_file()
        assert json.loads((folder / "env.json").read_text())["resources"]["backend"] == "serial"  # one trainer each
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
        ConfigError, match=r"rounds: is 3, but finished trial method=FedAvg_lr=0\.1_seed=1 \(and 3 more\) has 2"
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
    sweep = a_sweep(root, tmp_path, {"case": {"grid_search": cases}}, resources=resources)
    outcomes, _ = run(sweep)
    assert {found.status for found in outcomes.values()} == {"completed"}, outcomes
    for trial, trainers in zip(sweep.trials, (1, 2), strict=True):
        environment = json.loads((sweep.folder / trial.name / "env.json").read_text())
        assert environment["resources"]["trainers"] == trainers
        assert environment["resources"]["gpus_per_trainer"] == 0.5
        expected = digest_of_run(trial.raw, tmp_path / trial.name)
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
    assert "client 4 failed in round 2" in outcomes["method=bad"].message
    assert any("method=bad  failed: client 4" in line for line in lines)
    assert ranked(sweep, outcomes)[0].name == "method=good"
    began = (sweep.folder / "method=good" / "summary.json").stat().st_mtime_ns
    outcomes, lines = run(sweep)
    assert lines[0].startswith("1 of 2 trials to run")
    assert (sweep.folder / "method=good" / "summary.json").stat().st_mtime_ns == began


@pytest.mark.slow
@pytest.mark.cluster
def test_a_trial_whose_server_is_killed_goes_on_by_itself(root, tmp_path, ray_cluster):
    """Its scheduler hears of each round once."""
    ends = {"tests.support.toys:ends_server": {"folder": str(tmp_path), "rounds": [1]}}
    resources = {"backend": "ray", "trainers": 1, "cpus_per_trainer": 0.5}
    space = {"method": {"grid_search": {"it": {"methods": ["scaffold", ends]}}}}
    sweep = a_sweep(root, tmp_path, space, {"scheduler": "asha"}, rounds=3, resources=resources)
    outcomes, _ = run(sweep)
    assert (tmp_path / "server-1").exists()
    assert [end.status for end in outcomes.values()] == ["completed"]
    whole = {**sweep.trials[0].raw, "methods": ["scaffold"], "resources": {"backend": "serial"}}
    assert digest(sweep.folder / "method=it") == digest_of_run(whole, tmp_path)


def ended_by_the_memory_monitor(times, given):
    """As `driver._tune`, but so many times Tune gets trials and then ends as at a process that lacked memory."""
    left, tune = [times], driver._tune

    def attempt(source, *others):
        if not left[0]:
            return tune(source, *others)
        left[0] -= 1
        given.append(source.suggest("t")["trial"])
        error = OutOfMemoryError("2 worker(s) were killed due to the node running low on memory.\nMuch more")
        raise RuntimeError("Caught unexpected exception") from error

    return attempt


@pytest.mark.slow
def test_a_sweep_goes_on_after_the_memory_monitor_of_ray_ended_trials(root, tmp_path, ray_cluster, monkeypatch):
    sweep = a_sweep(root, tmp_path, {"seed": {"grid_search": [0, 1]}}, rounds=1)
    given = []
    monkeypatch.setattr(driver, "_tune", ended_by_the_memory_monitor(2, given))
    outcomes, lines = run(sweep)
    assert given == ["seed=0", "seed=0"]  # which was not finished, and so is next again
    assert {end.status for end in outcomes.values()} == {"completed"}
    assert sum("killed due to the node running low on memory.); the trials resume" in line for line in lines) == 2


def test_a_sweep_that_lacks_memory_again_and_again_is_one_sentence(root, tmp_path, ray_cluster, monkeypatch):
    resources = {"backend": "serial", "restarts": 2}
    sweep, given = a_sweep(root, tmp_path, {"seed": {"grid_search": [0, 1]}}, rounds=1, resources=resources), []
    monkeypatch.setattr(driver, "_tune", ended_by_the_memory_monitor(9, given))
    with pytest.raises(
        RaysimError, match=r"^Ray ended processes of trials 3 times \(2 .* memory\.\) in s\. Lower tune\.max"
    ):
        run(sweep)


def test_a_trial_goes_on_after_as_many_losses_as_are_said_and_never_after_a_fault_of_its_own(root, tmp_path):
    class Ended(str):  # a trial of Tune: its name, and a file with the error
        pickled_error_file = error_file = ""

    sweep = a_sweep(root, tmp_path, {"seed": {"grid_search": [0, 1]}}, resources={"restarts": 1})
    lines, (first, second) = [], [Ended(trial.name) for trial in sweep.trials]
    watch = _Watch(sweep, sweep.trials, Listener(lines.append))
    for ended, error in ((first, OutOfMemoryError("full")), (second, ZeroDivisionError("of the user's own"))):
        ended.pickled_error_file = str(tmp_path / f"{ended}.pkl")
        (tmp_path / f"{ended}.pkl").write_bytes(pickle.dumps(error))
        (sweep.folder / ended).mkdir(parents=True)
        watch.on_trial_error(0, [], ended)
    states = {name: RunFolder(sweep.folder / name) for name in (first, second)}
    assert [folder.status.name for folder in states.values()] == ["unfinished", "failed"]
    watch.on_trial_error(0, [], first)
    assert [folder.status.name for folder in states.values()] == ["failed", "failed"]
    assert "the trial resumes from the last checkpoint" in lines[0]
    assert [("failed" in line) for line in lines] == [False, True, True]


@pytest.mark.slow
def test_a_trial_without_the_metric_ends_no_other_one(root, tmp_path, ray_cluster):
    sweep = a_sweep(root, tmp_path, {"data.test": {"grid_search": [0, 0.2]}}, rounds=2)
    outcomes, _ = run(sweep)
    assert [(end.status, end.score is None) for end in outcomes.values()] == [("completed", True), ("completed", False)]
    assert [trial.name for trial in ranked(sweep, outcomes)] == ["test=0.2"]


def test_records_of_stopped_trials_are_sealed_once_nobody_holds_their_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(driver, "WAIT_S", 0.1)
    stopped, held, unfinished = (RunFolder(tmp_path / name) for name in ("stopped", "held", "unfinished"))
    for files in (stopped, held, unfinished):
        files.path.mkdir()
        files.write_progress([{"round": "0", "system/round_s": "0.25"}], ["round", "system/round_s"])
    stopped.mark("STOPPED")
    held.mark("STOPPED")
    with held.locked():  # its process may still write
        driver.seal_stopped([stopped.path, held.path, unfinished.path])
    assert [line.split("  ")[1] for line in stopped.seal.read_text().splitlines()] == ["progress.csv"]
    assert not held.seal.exists()
    assert not unfinished.seal.exists()


@pytest.mark.slow
def test_asha_stops_trials_and_no_actor_outlives_its_trial(root, tmp_path, ray_cluster):
    tune = {"scheduler": "asha", "grace_rounds": 2}
    tune |= {"metric": "train/loss"}
    resources = {"backend": "ray", "trainers": 1, "cpus_per_trainer": 0.5}
    space = {"local.lr": {"grid_search": [0.3, 1e-6]}}
    groups = {"rounds": 4, "partition": {"alpha": 10.0}, "data": {"test": 0.25}, "resources": resources}
    sweep = a_sweep(root, tmp_path, space, tune, **groups)
    seen = []
    outcomes, lines = run(sweep, lambda: seen.append(trial_processes()))
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
    wait_for(lambda: not trial_processes())
    again, lines = run(sweep)
    assert again == outcomes
    assert lines == []
    assert "progress.csv" in (folder / "records.sha256").read_text()
    with open(folder / "progress.csv", "a") as file:
        file.write("\n")
    with pytest.raises(DataError, match=r"progress\.csv has changed since the run wrote it"):
        run(sweep)


@pytest.mark.slow
@pytest.mark.cluster
def test_median_rule_stops_the_trial_that_is_worse_than_the_others_were(root, tmp_path, ray_cluster):
    tune = {"scheduler": "median", "grace_rounds": 1, "metric": "train/loss"}
    space = {"local.lr": {"grid_search": [0.3, 0.2, 0.1, 1e-6]}}
    serial = {"backend": "serial", "cpus_per_trainer": 0.5}
    groups = {"rounds": 4, "partition": {"alpha": 10.0}, "data": {"test": 0.25}, "resources": serial}
    sweep = a_sweep(root, tmp_path, space, tune, **groups)
    outcomes, _ = run(sweep)
    assert [outcomes[trial.name].status for trial in sweep.trials] == ["completed"] * 3 + ["stopped"]
    assert "stopped by median after round" in outcomes["lr=1e-06"].message


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
    _, lines = run(sweep)
    assert lines[0].startswith("1 of 2 trials to run")
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


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            RayTaskError("train", "a long traceback", ConfigError([Fault("lr", "is 0")], "resuming 'a'")),
            r"^1 fault in resuming 'a' lr: is 0$",
        ),
        (WorkerCrashedError(), "resumes from the last checkpoint when the sweep is started again"),
        (None, "ended without a message"),
    ],
)
def test_the_line_about_a_failed_trial_says_what_ended_it(error, words, tmp_path):
    file = tmp_path / "error.pkl"
    if error is not None:
        file.write_bytes(cloudpickle.dumps(error.as_instanceof_cause() if isinstance(error, RayTaskError) else error))
    assert re.search(words, driver._error_of(SimpleNamespace(pickled_error_file=str(file))))


@pytest.mark.essential
def test_a_search_hands_out_what_it_adds_but_no_duplicate(monkeypatch):
    new, twin = (SimpleNamespace(name=name, same_as=same_as) for name, same_as in (("a", ""), ("b", "a")))
    base = SimpleNamespace(tune=SimpleNamespace(scheduler=None))
    grown = SimpleNamespace(trials=[twin, new], search=SimpleNamespace(num_left=0), base=base)
    sweep = SimpleNamespace(trials=[], search=SimpleNamespace(num_left=2), base=base, grown=lambda scores: grown)
    monkeypatch.setattr(driver, "point_of", lambda trial: trial.name)
    expected = []
    source = driver._Source(sweep, [], SimpleNamespace(expect=expected.extend))
    assert [source.suggest("1"), source.suggest("2")] == ["a", driver.Searcher.FINISHED]
    assert expected == [new]


@pytest.mark.essential
def test_a_sweep_that_goes_on_counts_what_was_finished_before(root, tmp_path, monkeypatch):
    watches, sweep = [], a_sweep(root, tmp_path, {"seed": {"grid_search": [0, 1, 2]}})
    before = {f"seed={seed}": Outcome("unfinished" if seed else "completed", {}) for seed in range(3)}
    monkeypatch.setattr(driver, "start_sweep", lambda _: before)
    monkeypatch.setattr(driver, "ray_session", lambda **_: nullcontext())
    monkeypatch.setattr(driver, "nodes_with_room", lambda *_: [{"CPU": 2.0}])
    monkeypatch.setattr(driver, "make_ready", lambda *_: None)
    monkeypatch.setattr(driver, "_tune_all", lambda source, *_: watches.append(source.watch))
    monkeypatch.setattr(driver, "outcome", lambda *_: None)
    driver.run_sweep(sweep, Listener(lambda line: None))
    assert [watch._num_before for watch in watches] == [1]


@pytest.mark.slow
def test_trials_that_differ_in_nothing_that_counts_run_once(root, tmp_path, ray_cluster):
    space = {
        "method": {"grid_search": {"FedAvg": {}, "Joint": {"partition.scheme": "joint"}}},
        "partition.alpha": {"grid_search": [0.3, 1.0]},
    }
    sweep = a_sweep(root, tmp_path, space, rounds=1)
    same = {trial.name: trial.same_as for trial in sweep.trials if trial.same_as}
    assert same == {"method=Joint_alpha=1.0": "method=Joint_alpha=0.3"}
    outcomes, lines = run(sweep)
    assert "1 repeat another trial" in lines[0]
    assert {found.status for found in outcomes.values()} == {"completed"}
    for twin, original in same.items():
        assert digest(sweep.folder / twin) == digest(sweep.folder / original)
        assert not list((sweep.folder / twin).glob("events*"))  # it never ran
        missing = {p.name for p in (sweep.folder / original).iterdir()} - {
            p.name for p in (sweep.folder / twin).iterdir()
        }
        assert {name for name in missing if not name.startswith("events")} == {".lock", "checkpoints"}
        config = yaml.safe_load((sweep.folder / twin / "config.yaml").read_text())
        assert config["labels"]["alpha"] == 1.0  # which is no setting of joint training
    assert run(sweep)[0] == outcomes  # and nothing is left to do
