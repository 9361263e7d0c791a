"""The head of the cluster, and with it the node of a run's server, is lost in the middle of the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import psutil
import pytest
import yaml

from tests.support.federations import plan_of, raw_config, run
from tests.support.nodes import PROJECT, Cluster, Driver

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


METHODS, ROUNDS = ["scaffold", "fedavgm"], 5


def write_config(root, tmp_path, toys, **resources):
    groups = {"resources": {"backend": "ray", **resources}, "checkpoint": {"every_s": 0}}
    raw = raw_config(root, [*METHODS, *toys], name="a", rounds=ROUNDS, storage=str(tmp_path / "runs"), **groups)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(raw))
    return tmp_path / "run.yaml"


def check_end(root, tmp_path, output, rounds):
    """Whether the run has the bits of an undisturbed one, after attempts from the checkpoints of these rounds."""
    summary = json.loads((tmp_path / "runs" / "a" / "summary.json").read_text())
    assert summary["params_sha256"] == run(plan_of(root, METHODS, rounds=ROUNDS), root).params_sha256()
    attempts = [line.partition("; ")[2] for line in output.splitlines() if "; attempt" in line]
    assert attempts == [
        f"attempt {2 + number} of 4, from the checkpoint of round {saved}" for number, saved in enumerate(rounds)
    ], output
    for saved in rounds:
        assert f"resuming at round {saved + 1} of {ROUNDS}" in output


def test_a_run_whose_head_is_lost_twice_goes_on_by_itself_to_the_same_bits(root, tmp_path):
    """With the head go the server, and what the cluster knew; a worker joins the new one some time after it."""
    waits = {"tests.support.toys:waits": {"folder": str(tmp_path), "training": [], "weighing": [1, 3]}}
    config = write_config(root, tmp_path, [waits])
    with Cluster() as cluster:
        cluster.add("worker-0")
        driver = cluster.run(config)
        for number, lost in enumerate((1, 3)):
            driver.wait_for((tmp_path / f"here-{lost}").exists)
            cluster.kill("head")
            cluster.kill(f"worker-{number}")
            (tmp_path / f"go-{lost}").touch()
            cluster.start_head()
            driver.wait_for(lambda: "have room for" in driver.output.rpartition("attempt")[2])  # nobody can train yet
            cluster.add(f"worker-{number + 1}")
        driver.finish()
        output = driver.output
    check_end(root, tmp_path, output, (1, 3))


def test_a_local_ray_that_is_killed_under_the_command_is_started_anew(root, tmp_path):
    """First its head and its node without the processes of the run, which Ray itself would end the command for."""
    waits = {"tests.support.toys:waits": {"folder": str(tmp_path), "training": [], "weighing": [1]}}
    ends = {"tests.support.toys:ends_server": {"folder": str(tmp_path), "rounds": [3]}}
    config = write_config(root, tmp_path, [waits, ends], trainers=1)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTEST_"))}
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "raysim", "run", str(config)],
            env={**environment, "PYTHONPATH": str(PROJECT)},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        driver = Driver(process, tmp_path / "log")
        driver.wait_for((tmp_path / "here-1").exists)
        for member in psutil.Process(process.pid).children(recursive=True):
            if member.name() in ("gcs_server", "raylet"):
                member.kill()
        driver.wait_for(lambda: "attempt 2" in driver.output)
        (tmp_path / "go-1").touch()
        driver.finish()
    finally:
        process.kill()
        process.wait()
    assert "the head of the cluster was lost; attempt 2" in driver.output
    check_end(root, tmp_path, driver.output, (1, 3))
