"""`ray job submit` from a clone to a running cluster with a token: success, failure, kill, stop, submitting again."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
import time

import pytest

from raysim.config import read_config
from raysim.plan.check import check
from raysim.running.runner import execute
from tests.cluster.conftest import PROJECT, wait_for
from tests.support.own_folder import write_files

pytestmark = pytest.mark.slow

CONFIG = "configs/quickstart.yaml"
ON_GPU = ("resources.trainers=2", "resources.gpus_per_trainer=0.5", "resources.cpus_per_trainer=1")
TINY = ("model.hidden=16", "local.epochs=1", "cohort.size=4", *ON_GPU)


def serial_hash(clone, tmp_path, *overrides):
    """params_sha256 of an undisturbed run in this process."""
    values = (
        *overrides,
        "resources.backend=serial",
        f"storage={tmp_path}",
        f"data.root={tmp_path}/data",
        "name=serial",
    )
    plan = check(read_config(clone / CONFIG, values), CONFIG)
    return execute(plan, on_start=lambda *_: None, on_round=lambda _: None)["params_sha256"]


def summary_of(cluster, name):
    return json.loads((cluster.home / "runs" / name / "summary.json").read_text())


def status_of(cluster, name, cwd):
    return cluster.job("status", name, cwd=cwd).stdout


def checkpoints(cluster, name):
    return sorted(path.name for path in (cluster.home / "runs" / name / "checkpoints").glob("round-*"))


def driver_of(cluster, name):
    """The Python process of a job, not the shell around it."""
    for process in cluster.processes():
        words = process.cmdline()
        if f"name={name}" in words and "-m" in words and "python" in words[0]:
            return process
    return None


@pytest.mark.essential
@pytest.mark.ray
def test_a_short_job_from_a_clone_ends_in_the_same_bits(cluster, clone, tmp_path):
    settings = (*TINY, "rounds=2")
    result = cluster.submit(CONFIG, "name=short", *settings, cwd=clone, options=("--submission-id", "short"))
    assert result.returncode == 0, result.stdout
    assert "2/2" in result.stdout
    assert summary_of(cluster, "short")["params_sha256"] == serial_hash(clone, tmp_path, *settings)


@pytest.mark.cluster
def test_job_of_100_rounds_succeeds_from_a_clone_and_prints_little(cluster, clone, tmp_path):
    settings = (*TINY, "rounds=100")
    result = cluster.submit(CONFIG, "name=hundred", *settings, cwd=clone, options=("--submission-id", "hundred"))
    assert result.returncode == 0, result.stdout
    assert "succeeded" in result.stdout
    assert f"in {cluster.home}/runs/hundred" in result.stdout
    log = cluster.job("logs", "hundred", cwd=clone).stdout
    assert "100/100" in log
    assert "\r" not in log + result.stdout
    assert len(log.splitlines()) <= 150, log
    assert (cluster.home / "runs" / "hundred" / "COMPLETED").exists()
    assert summary_of(cluster, "hundred")["params_sha256"] == serial_hash(clone, tmp_path, *settings)

    run = cluster.home / "runs" / "hundred"
    shown = cluster.command(sys.executable, "-m", "raysim", "status", run, cwd=clone, RAY_ADDRESS="127.0.0.1:1")
    assert shown.returncode == 0, shown.stdout
    assert re.search(r"completed +│ 100 of 100 +│ accuracy 0\.\d+ +│ \d+ (s|min) ago", shown.stdout), shown.stdout

    used = json.loads((cluster.home / "runs" / "hundred" / "env.json").read_text())["resources"]
    assert (used["trainers"], used["gpus_per_trainer"]) == (2, 0.5)  # driven from a head without CPUs
    (unpacked,) = (cluster.folder / "head").glob("session_2*/runtime_resources/working_dir_files/_ray_pkg_*/")
    uploaded = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    assert "raysim/__main__.py" in uploaded
    assert not [name for name in uploaded if name.split("/")[0] in (".git", ".venv", "data", "runs", "mine")]
    assert sum((unpacked / name).stat().st_size for name in uploaded) < 10 * 2**20


@pytest.mark.cluster
def test_exit_status_of_the_job_follows_the_run(cluster, clone):
    result = cluster.submit(CONFIG, "data.name=cifar10", cwd=clone)
    assert result.returncode == 1
    assert "failed with exit code 2" in result.stdout
    assert "1 fault in configs/quickstart.yaml" in result.stdout
    assert f"no prepared set 'cifar10' in {cluster.home}/data/cifar10/cifar10.arrow" in result.stdout
    assert "a folder there, or to a URI such as s3://bucket/data" in result.stdout
    raises = "methods=[{tests.support.toys:raises: {client: 3, round_index: 1}}]"
    everyone = [word.replace("cohort.size=4", "cohort.size=20") for word in TINY]
    result = cluster.submit(CONFIG, *everyone, raises, "name=raises", cwd=clone)
    assert result.returncode == 1
    assert "failed with exit code 1" in result.stdout
    assert "client 3 failed in round 2" in result.stdout


#: A method of the user's own, uploaded with the job: a round waits while the file gate-ROUND is there.
GATE = """
import time
from pathlib import Path

from raysim.core.method import Method


def gate(*, folder: str):
    def report(client):
        while (Path(folder) / f"gate-{client.round_index}").exists():
            time.sleep(0.05)
        return {}

    return Method("gate", report=report)
"""


@pytest.mark.cluster
def test_killed_and_stopped_job_goes_on_when_submitted_again(cluster, clone, tmp_path, monkeypatch):
    (clone / "my_gate.py").write_text(GATE)
    monkeypatch.syspath_prepend(clone)  # for the serial twin
    gates = tmp_path / "gates"
    gates.mkdir()
    (gates / "gate-4").touch()
    (gates / "gate-12").touch()
    methods = f"methods=[{{fedvg: {{granularity: block}}}}, {{my_gate:gate: {{folder: {gates}}}}}]"
    settings = (*TINY, methods, "rounds=20")

    def submit(*overrides, options=()):
        options = ("--submission-id", "again", *options)
        result = cluster.submit(CONFIG, "name=again", *settings, *overrides, cwd=clone, options=options)
        assert result.returncode == 0, result.stdout
        return result.stdout

    def free_the_id():
        assert cluster.job("delete", "again", cwd=clone).returncode == 0

    def log():
        return next((cluster.folder / "head").glob("session_2*/logs/job-driver-again.log")).read_text()

    submit("checkpoint.every_s=0", options=["--no-wait"])
    wait_for(lambda: "round-000004" in checkpoints(cluster, "again"), "the fourth round")
    driver_of(cluster, "again").send_signal(signal.SIGKILL)
    wait_for(lambda: "failed" in status_of(cluster, "again", clone), "the end of the killed job")

    (gates / "gate-4").unlink()
    free_the_id()
    submit("checkpoint.every_s=1000", options=["--no-wait"])
    wait_for(lambda: "round 12/20" in log(), "the twelfth round")
    assert "resuming at round 5 of 20" in log()
    assert checkpoints(cluster, "again")[-1] == "round-000004"
    assert cluster.job("stop", "--no-wait", "again", cwd=clone).returncode == 0
    time.sleep(2)  # the signal is on its way, the round is still held
    (gates / "gate-12").unlink()
    wait_for(lambda: "was stopped" in status_of(cluster, "again", clone), "the end of the stopped job")
    stopped = re.search(r"stopped by a signal after a checkpoint; the same command resumes at round (\d+)", log())
    assert stopped, log()
    assert checkpoints(cluster, "again")[-1] == f"round-{int(stopped[1]) - 1:06}"  # its rounds are done
    assert not (cluster.home / "runs" / "again" / "FAILED").exists()

    free_the_id()
    assert f"resuming at round {stopped[1]} of 20" in submit()  # whoever submits sees the job's log
    assert summary_of(cluster, "again")["params_sha256"] == serial_hash(clone, tmp_path, *settings)


@pytest.mark.cluster
def test_job_brings_own_code_to_trainers_on_another_node(cluster, tmp_path, monkeypatch):
    folder = tmp_path / "mine"
    for name in ("raysim", "methods", "cluster"):
        shutil.copytree(PROJECT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    write_files(folder)
    result = cluster.submit("own.yaml", "name=own", "resources.backend=ray", "resources.trainers=2", cwd=folder)
    assert result.returncode == 0, result.stdout
    (tmp_path / "serial").mkdir()
    monkeypatch.chdir(write_files(tmp_path / "serial"))
    monkeypatch.syspath_prepend(str(tmp_path / "serial"))
    serial = execute(check(read_config(tmp_path / "serial" / "own.yaml"), "own.yaml"))
    assert summary_of(cluster, "own")["params_sha256"] == serial["params_sha256"]


@pytest.mark.cluster
def test_a_sweep_its_report_and_a_calibration_are_jobs_of_two_nodes(cluster, clone):
    """The driver is on the head, which has no CPUs, the trials are on the other node; docs/sweep_on_a_cluster.md."""

    def said(verb, *words):
        result = cluster.submit(*words, cwd=clone, verb=verb)
        assert result.returncode == 0, result.stdout
        return result.stdout

    small = ("model.hidden=16", "rounds=2", "cohort.size=2", "resources.backend=serial")
    search = ("tune.search=optuna", "tune.num_samples=3", "tune.param_space.local.lr={log_uniform: [0.01, 1]}")
    assert "3 trials, by" in said("tune", CONFIG, "name=swept", *search, *small)
    folder = cluster.home / "runs" / "swept"
    assert len(list(folder.glob("lr=*/COMPLETED"))) == 3
    said("tune", CONFIG, "name=swept", *search, *small)  # and nothing is run again
    said("report", "runs/swept")
    assert (folder / "report" / "report.md").is_file(), sorted((folder / "report").iterdir())

    tiny = ("calibrate.partitions=1", "calibrate.seeds=1", "calibrate.trees=5", "name=calibrated", "rounds=1")
    model = ("model={name: vit, dim: 16, depth: 1, heads: 2, patch: 4, lora: {rank: 4}}", "data.name=digits")
    local = ("partition.num_clients=4", "cohort.size=4", "partition.alpha=0.5", "data.test=0.6", "methods=[livar]")
    said("calibrate", CONFIG, *tiny, *model, *local)
    assert (cluster.home / "runs" / "calibrated" / "calibration.json").is_file()
