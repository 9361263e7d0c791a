"""`raysim submit` without a cluster: the job that it makes of a file, what it refuses, and its exit status."""

from __future__ import annotations

import subprocess
import sys

import pytest
import yaml
from typer.testing import CliRunner

from raysim.base.errors import ConfigError, RaysimError
from raysim.cli.main import app
from raysim.engine.ray import jobs
from raysim.engine.ray.jobs import JobEnd
from tests.cluster.conftest import PROJECT


class Cluster:
    """Jobs in memory. running: ids of jobs that run; end: how a job that is followed ends."""

    def __init__(self):
        self.running, self.submitted, self.end = set(), [], JobEnd("SUCCEEDED", 0, "")

    def is_running(self, job_id):
        return job_id in self.running

    def submit(self, *words):
        self.submitted.append(words)

    def follow(self, job_id, write):
        write(f"log of {job_id}\n")
        return self.end


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    made = Cluster()
    monkeypatch.setattr(jobs, "Jobs", lambda: made)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    axes = {"param_space": {"local.lr": {"log_uniform": [0.01, 1]}}, "num_samples": 2}
    files = {"plain": {"rounds": 2}, "named": {"name": "a/b"}, "sweep": {"tune": axes}, "pairs": {"rounds": 1}}
    files["pairs"]["calibrate"], files["scaled"] = {"seeds": 1}, {"name": "n", "scale": {"rounds": 1}}
    for name, content in files.items():
        (tmp_path / "configs" / f"{name}.yaml").write_text(yaml.safe_dump(content))
    return made


def submit(*words):
    return CliRunner().invoke(app, ["submit", *words], catch_exceptions=False)


@pytest.mark.parametrize(
    ("words", "job_id", "command"),
    [
        (["configs/plain.yaml"], "plain", "run configs/plain.yaml name=plain"),
        (["configs/plain.yaml", "name=x", "local.lr=0.1"], "x", "run configs/plain.yaml name=x local.lr=0.1"),
        (
            ["configs/named.yaml", "methods=[fedvg, fedprox]"],
            "a-b",
            "run configs/named.yaml 'methods=[fedvg, fedprox]'",
        ),
        (["configs/sweep.yaml"], "sweep", "tune configs/sweep.yaml"),
        (["configs/plain.yaml", "seed=0,1"], "plain", "tune configs/plain.yaml seed=0,1"),
        (["configs/sweep.yaml", "--verb", "run", "--id", "1"], "1", "run configs/sweep.yaml name=sweep"),
        (["configs/pairs.yaml"], "pairs", "calibrate configs/pairs.yaml"),
        (["configs/scaled.yaml", "--scaled"], "n_scaled", "run configs/scaled.yaml --scaled"),
        (["paper:fedvg/table_A3", "--scaled"], "fedvg_table_A3_scaled", "tune paper:fedvg/table_A3 --scaled"),
    ],
)
def test_a_file_says_its_verb_its_name_and_its_job(words, job_id, command, cluster, tmp_path):
    result = submit(*words, "--env", "RAYSIM_HOME=/shared")
    assert result.exit_code == 0
    assert f"log of {job_id}\njob {job_id} succeeded\n" in result.output
    assert [(each[0], each[1], each[3]) for each in cluster.submitted] == [
        (job_id, f"python -m raysim {command}", {"RAYSIM_HOME": "/shared"})
    ]


def test_a_job_that_runs_is_followed_and_not_submitted_twice(cluster):
    cluster.running = {"plain"}
    result = submit("configs/plain.yaml")
    assert "job plain is running; log follows" in result.output
    assert cluster.submitted == []
    cluster.running = set()
    assert "`ray job logs --follow plain` shows the log" in submit("configs/plain.yaml", "--no-wait").output
    assert len(cluster.submitted) == 1


@pytest.mark.parametrize(("end", "status"), [(("FAILED", 2), 2), (("FAILED", None), 1), (("STOPPED", 0), 143)])
def test_exit_status_is_that_of_the_job(end, status, cluster):
    cluster.end = JobEnd(*end, "why")
    result = submit("configs/plain.yaml")
    assert result.exit_code == status
    assert f"job plain {end[0].lower()}: why; submit the file again to resume" in result.stderr


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["../outside.yaml"], "is not below"),
        (["configs/plain.yaml", "local.lr=-1"], "must be greater than 0"),
        (["configs/plain.yaml", "--env", "RAYSIM_HOME"], "must be NAME=VALUE, got 'RAYSIM_HOME'"),
    ],
)
def test_what_shows_without_the_cluster_is_refused_before_the_upload(words, fault, cluster, tmp_path):
    (tmp_path.parent / "outside.yaml").write_text("rounds: 1\n")
    with pytest.raises(ConfigError, match=fault):
        submit(*words)
    assert cluster.submitted == []


def test_without_a_cluster_the_two_variables_are_named(cluster, monkeypatch):
    def nobody():
        raise ConnectionError("no answer")

    monkeypatch.setattr(jobs, "Jobs", nobody)
    with pytest.raises(RaysimError, match=r"no answer.*RAY_API_SERVER_ADDRESS to the dashboard.*RAY_AUTH_MODE=token"):
        submit("configs/plain.yaml")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["methods", "fedprox"], "Adds mu (y - s)"),
        (["nowhere.yaml"], "No such file"),
        (["tune", "nowhere.yaml"], "No such"),
    ],
)
def test_script_for_ray_submit_takes_every_verb_and_run_by_default(words, said, tmp_path):
    command = [sys.executable, str(PROJECT / "cluster" / "run.py"), *words]
    result = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(PROJECT)}, capture_output=True, text=True)
    assert said in result.stdout + result.stderr
