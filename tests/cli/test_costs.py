"""What `--plan` says of a run and of a sweep."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from raysim.cli.costs import _trainers
from raysim.cli.main import app
from raysim.config import parse_config
from raysim.plan.check import check
from raysim.running.runner import execute
from tests.support.federations import SMALL, raw_config


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
def test_a_plan_needs_no_file_of_weights(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    raw = {**SMALL, "data": {"root": str(root)}, "model": {"name": "mlp", "pretrained": "not_there.safetensors"}}
    Path("run.yaml").write_text(yaml.safe_dump(raw))
    sweep = raw | {"tune": {"param_space": {"local.lr": {"grid_search": [0.1, 0.2]}}}}
    Path("sweep.yaml").write_text(yaml.safe_dump(sweep))
    for verb, file in (("run", "run.yaml"), ("tune", "sweep.yaml")):
        result = CliRunner().invoke(app, [verb, file, "--plan"], catch_exceptions=False)
        assert "local steps" in result.output
        refused = CliRunner().invoke(app, [verb, file])
        assert "no such file of weights" in str(refused.exception)


@pytest.mark.slow
@pytest.mark.parametrize(
    "resources", [{"custom": {"mig": 1}}, {"custom": {"accelerator_type:H100": 0.001}}, {"trainers": 4000}]
)
def test_plan_of_a_run_for_a_cluster_is_of_this_machine(root, tmp_path, monkeypatch, resources):
    monkeypatch.setenv("RAY_ADDRESS", "ray://elsewhere:10001")  # which has room; it is not asked
    raw = raw_config(root, [], storage=str(tmp_path / "runs"), name="a", resources={"backend": "ray", **resources})
    result = planned(tmp_path, monkeypatch, "run", raw)
    assert result.exit_code == 0, result.output
    assert "on this machine" in result.output
    assert 1 <= _trainers(parse_config(raw)[0]) <= (os.cpu_count() or 1)


def test_plan_of_a_sweep_counts_what_is_left_and_says_what_is_refused(root, tmp_path, monkeypatch):
    raw = raw_config(root, [], storage=str(tmp_path / "runs"), name="s")
    execute(check({**raw, "name": "s/size=7_lr=0.1", "local": {**raw["local"], "lr": 0.1}}, "a test"))
    space = {"cohort.size": {"grid_search": [7, 99]}, "local.lr": {"grid_search": [0.1, 0.01]}}
    raw["tune"] = {"param_space": space, "skip_refused": True}
    result = planned(tmp_path, monkeypatch, "tune", raw)
    assert result.exit_code == 0, result.output
    assert "4 trials: 1 to run, 1 finished, 2 refused" in result.output
    refused = [line for line in result.output.splitlines() if line.startswith("refused: ")]
    assert len(refused) == 2, result.output
    assert all(line.startswith("refused: size=99_lr=") and "cohort.size: 99 clients" in line for line in refused)


def test_plan_of_a_sweep_that_is_refused_ends_as_the_sweep_would(root, tmp_path, monkeypatch):
    raw = raw_config(root, [], storage=str(tmp_path / "runs"), name="s")
    raw["tune"] = {"param_space": {"cohort.size": {"grid_search": [7, 99]}}}
    result = planned(tmp_path, monkeypatch, "tune", raw)
    assert result.exit_code != 0
    assert "cohort.size" in str(result.exception)
