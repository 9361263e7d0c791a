"""Trials that equal a finished run elsewhere in the storage; what `--plan` says of a run and of a sweep."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import shutil

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from raysim.cli.costs import _trainers
from raysim.cli.main import app
from raysim.config import parse_config
from raysim.data.arrow import write_set
from raysim.data.sources import set_path
from raysim.folders.run_folder import RunFolder
from raysim.plan.check import check
from raysim.running.runner import execute
from raysim.tuning.reuse import finished_elsewhere, take_over
from tests.support.federations import raw_config
from tests.support.sweeps import a_sweep, digest, run

SPACE = {"local.lr": {"grid_search": [0.1]}}


def a_run(root, tmp_path, name="single", **groups):
    """A finished run in the storage of `a_sweep`, which has its configuration; its folder."""
    raw = raw_config(root, [], storage=str(tmp_path / "runs"), name=name, **groups)
    execute(check(raw, "a test"))
    return tmp_path / "runs" / name


def reused(sweep):
    return {name: folder.path for name, folder in finished_elsewhere(sweep, sweep.trials).items()}


def test_a_trial_that_is_a_finished_run_takes_it_over_whole(root, tmp_path):
    single = a_run(root, tmp_path)
    sweep = a_sweep(root, tmp_path, SPACE)
    outcomes, lines = run(sweep)  # nothing is left to train, so Ray is not needed
    (trial,) = sweep.trials
    folder = RunFolder(sweep.folder / trial.name)
    assert digest(folder.path) == digest(single)
    assert outcomes[trial.name].message == "taken over from single"
    assert outcomes[trial.name].seconds == sum(
        float(row["system/round_s"]) for row in RunFolder(single).progress_rows()
    )
    assert lines[0] == "1 of 1 trials are finished runs: taken over from single runs; tune.reuse=false trains them"
    assert folder.status.name == "completed"
    assert {path.name for path in RunFolder(single).results()} == {path.name for path in folder.results()}
    assert folder.read_config()["labels"] == {"lr": 0.1}
    folder.check_unchanged(folder.progress, folder.model)
    with open(sweep.folder / "results.csv") as file:
        (row,) = csv.DictReader(file)
    assert row["message"] == "taken over from single"
    assert run(sweep)[0] == outcomes  # and the same command again shows it


def test_a_longer_run_of_the_first_leaves_what_was_taken_over_as_it_was(root, tmp_path):
    a_run(root, tmp_path)
    sweep = a_sweep(root, tmp_path, SPACE)
    run(sweep)
    folder = RunFolder(sweep.folder / sweep.trials[0].name)
    before = folder.progress.read_bytes()
    a_run(root, tmp_path, rounds=5)
    assert len(RunFolder(tmp_path / "runs" / "single").progress_rows()) == 5
    assert folder.progress.read_bytes() == before
    folder.check_unchanged(folder.progress, folder.model, *folder.client_parts())


def test_only_sound_runs_of_the_same_code_are_taken_over(root, tmp_path):
    single = RunFolder(a_run(root, tmp_path))
    sweep = a_sweep(root, tmp_path, SPACE)
    (name,) = [trial.name for trial in sweep.trials]
    assert reused(sweep) == {name: single.path}
    assert reused(a_sweep(root, tmp_path, SPACE, {"reuse": False})) == {}
    assert reused(a_sweep(root, tmp_path, SPACE, rounds=4)) == {}
    environment, progress = single.environment.read_text(), single.progress.read_bytes()
    mark = (single.path / "COMPLETED").read_text()
    facts = json.loads(environment)
    older = {**facts, "packages": {**facts["packages"], "torch": "0.0"}}
    elsewhere = {**facts, "machine": {**facts["machine"], "gpus": ["NVIDIA H100"]}}
    unsaid = {key: facts[key] for key in facts if key != "sources"}
    for other in (older, elsewhere, unsaid, {**facts, "sources": "0" * 64}):
        single.environment.write_text(json.dumps(other))
        assert reused(sweep) == {}
    single.environment.write_text(environment)
    single.progress.write_bytes(progress + b"\n")
    assert reused(sweep) == {}
    single.progress.write_bytes(progress)
    (single.path / "COMPLETED").write_text(f"on_round returned stop{mark}")
    assert reused(sweep) == {}
    (single.path / "COMPLETED").rename(single.path / "STOPPED")
    assert reused(sweep) == {}
    (single.path / "STOPPED").unlink()
    (single.path / "COMPLETED").write_text(mark)
    assert reused(sweep) == {name: single.path}


@pytest.mark.parametrize("change", ["goes on", "is deleted", "is running", "was begun anew"])
def test_a_run_that_changes_before_it_is_copied_is_not_taken_over(root, tmp_path, change):
    single = RunFolder(a_run(root, tmp_path))
    sweep = a_sweep(root, tmp_path, SPACE)
    found = finished_elsewhere(sweep, sweep.trials)
    assert len(found) == 1
    with contextlib.ExitStack() as stack:
        if change == "goes on":
            a_run(root, tmp_path, rounds=5)
        elif change == "is deleted":
            shutil.rmtree(single.path)
        elif change == "is running":
            stack.enter_context(single.locked())
        else:
            single.clear("COMPLETED")
        assert take_over(sweep, found) == {}
    assert not (sweep.folder / sweep.trials[0].name).exists()


def test_equal_rows_of_sets_with_other_numbers_of_classes_are_not_the_same_run(tmp_path):
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 255, (60, 8, 8, 1), np.uint8), np.arange(60) % 5
    for name, classes in (("five", "abcde"), ("again", "vwxyz"), ("seven", "abcdefg")):
        write_set(set_path(tmp_path, name), name, classes, [(images, labels)])
    part, space = {"scheme": "iid", "num_clients": 3}, {"data.name": {"grid_search": ["five", "again", "seven"]}}
    data, groups = {"root": str(tmp_path), "test": 0.25}, {"partition": part, "cohort": {"size": 2}}
    sweep = a_sweep(tmp_path, tmp_path, space, data=data, **groups)
    assert [trial.same_as for trial in sweep.trials] == ["", "name=five", ""]
    a_run(tmp_path, tmp_path, data={**data, "name": "five"}, **groups)
    assert list(reused(sweep)) == ["name=five", "name=again"]


def test_a_trial_saw_one_of_many_gpus_of_a_kind(root, tmp_path, monkeypatch):
    single = RunFolder(a_run(root, tmp_path))
    sweep, facts = a_sweep(root, tmp_path, SPACE), json.loads(single.environment.read_text())
    facts["machine"]["gpus"] = ["NVIDIA H100"]
    single.environment.write_text(json.dumps(facts))
    for there, count in ((["NVIDIA H100"] * 4, 1), (["NVIDIA A100"] * 4, 0), ([], 0)):
        monkeypatch.setattr("raysim.tuning.reuse.gpu_names", lambda there=there: there)
        assert len(reused(sweep)) == count


def test_a_damaged_run_in_the_storage_is_passed_over(root, tmp_path):
    single = RunFolder(a_run(root, tmp_path))
    sweep = a_sweep(root, tmp_path, SPACE)
    single.config.write_text("rounds: [")
    assert reused(sweep) == {}
    single.partition.write_bytes(b"\xff\xfe")
    assert reused(sweep) == {}


@pytest.mark.parametrize(("ran", "wanted"), [("auto", "serial"), ("serial", "auto"), ("auto", "auto")])
def test_what_a_run_was_on_counts_and_not_whether_it_was_asked_for(root, tmp_path, monkeypatch, ran, wanted):
    """Trials record the backend that they had, and those of the next sweep are planned with `auto`, the default."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    single = a_run(root, tmp_path, resources={"backend": ran, "trainers": 1})
    sweep = a_sweep(root, tmp_path, SPACE, resources={"backend": wanted, "trainers": 1})
    assert reused(sweep) == {sweep.trials[0].name: single}
    on_ray = a_sweep(root, tmp_path, SPACE, resources={"backend": "ray", "trainers": 1})
    assert reused(on_ray) == {}


@pytest.mark.ray
def test_without_reuse_the_trial_is_trained(root, tmp_path, ray_cluster):
    single = a_run(root, tmp_path, rounds=1)
    sweep = a_sweep(root, tmp_path, SPACE, {"reuse": False}, rounds=1)
    outcomes, lines = run(sweep)
    assert not [line for line in lines if "taken over" in line]
    (trial,) = sweep.trials
    assert outcomes[trial.name].message == ""
    assert outcomes[trial.name].seconds != sum(
        float(row["system/round_s"]) for row in RunFolder(single).progress_rows()
    )
    assert digest(sweep.folder / trial.name) == digest(single)
    assert f"{trial.cost.total.images:,} images through local steps" in lines[0]


# --- what --plan prints -------------------------------------------------------------------------------------------------


def planned(tmp_path, monkeypatch, verb, raw):
    """What `--plan` prints, and its exit status; nothing but the cache of shards may be new."""
    monkeypatch.setenv("RAYSIM_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "file.yaml"
    path.write_text(yaml.safe_dump(raw))
    before = {each for each in tmp_path.rglob("*") if "cache" not in each.parts}
    result = CliRunner().invoke(app, [verb, str(path), "--plan"])
    assert {each for each in tmp_path.rglob("*") if "cache" not in each.parts} == before
    return result


@pytest.mark.slow
def test_plan_of_a_run_trains_nothing_and_leaves_no_folder(root, tmp_path, monkeypatch):
    raw = raw_config(root, ["fedvg"], storage=str(tmp_path / "runs"), name="one")
    result = planned(tmp_path, monkeypatch, "run", raw)
    assert result.exit_code == 0, result.output
    assert "on this machine" in result.output
    assert "fedvg" in result.output


@pytest.mark.slow
@pytest.mark.parametrize("resources", [{"custom": {"mig": 1}}, {"accelerator_type": "H100"}, {"trainers": 4000}])
def test_plan_of_a_run_for_a_cluster_is_of_this_machine(root, tmp_path, monkeypatch, resources):
    monkeypatch.setenv("RAY_ADDRESS", "ray://elsewhere:10001")  # which has room; it is not asked
    raw = raw_config(root, [], storage=str(tmp_path / "runs"), name="a", resources={"backend": "ray", **resources})
    result = planned(tmp_path, monkeypatch, "run", raw)
    assert result.exit_code == 0, result.output
    assert "on this machine" in result.output
    assert 1 <= _trainers(parse_config(raw)[0]) <= (os.cpu_count() or 1)


def test_plan_of_a_sweep_counts_what_is_left_and_says_what_is_refused(root, tmp_path, monkeypatch):
    a_run(root, tmp_path)
    raw = raw_config(root, [], storage=str(tmp_path / "runs"), name="s")
    space = {"local.lr": {"grid_search": [0.1, 0.01]}, "cohort.size": {"grid_search": [7, 99]}}
    raw["tune"] = {"param_space": space, "skip_refused": True}
    result = planned(tmp_path, monkeypatch, "tune", raw)
    assert result.exit_code == 0, result.output
    assert "4 trials: 1 to run, 1 taken over, 2 refused" in result.output
    assert "taken over from single runs" in result.output
    refused = [line for line in result.output.splitlines() if line.startswith("refused: ")]
    assert len(refused) == 2, result.output
    assert all(line.startswith("refused: size=99_lr=") and "cohort.size: 99 clients" in line for line in refused)


def test_plan_of_a_sweep_that_is_refused_ends_as_the_sweep_would(root, tmp_path, monkeypatch):
    raw = raw_config(root, [], storage=str(tmp_path / "runs"), name="s")
    raw["tune"] = {"param_space": {"cohort.size": {"grid_search": [7, 99]}}}
    result = planned(tmp_path, monkeypatch, "tune", raw)
    assert result.exit_code != 0
    assert "cohort.size" in str(result.exception)
