"""`raysim doctor`: each finding, well and not, and a real cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from raysim.cli import doctor
from raysim.engine.ray.nodes import NodeFacts
from tests.cluster.conftest import HAS_TOKENS, PROJECT, free_ports

VERSIONS = {"python": "3.11.7", "ray": "2.60.0", "torch": "2.14.1", "raysim": "0.1.0 (sources 01234567)"}
GIB = 2**30
GOOD = NodeFacts(
    name="head a (10.0.0.1, 0123ab)",
    cpus=8,
    gpus=1,
    gpu_names=("a GPU",),
    versions=VERSIONS,
    temp_dir="/tmp/ray",
    temp_free_bytes=50 * GIB,
    temp_total_bytes=100 * GIB,
    sees_storage=True,
)


def faults(node):
    return [line for is_ok, line in doctor.node_findings([node], VERSIONS, Path("/shared/runs")) if not is_ok]


def test_a_sound_node_has_no_fault():
    assert faults(GOOD) == []
    lines = [line for _, line in doctor.node_findings([GOOD, GOOD], VERSIONS, Path("/shared/runs"))]
    assert "head a (10.0.0.1, 0123ab): 8 CPUs, 1 GPUs (a GPU)" in lines
    assert len(lines) == 8
    other_builds = {**VERSIONS, "python": "3.11.9", "torch": "2.14.1+cu130"}
    assert faults(replace(GOOD, versions=other_builds)) == []
    is_ok, line = doctor._gpus(replace(GOOD, gpus=0))
    assert is_ok
    assert "Ray does not use the GPU" in line


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"error": "no answer (GetTimeoutError)"}, "ran no task: no answer (GetTimeoutError); look at `ray status`"),
        ({"versions": {**VERSIONS, "torch": "2.11.0"}}, "the driver has torch 2.14.1: install the same on every node"),
        ({"versions": {**VERSIONS, "python": "3.12.1"}}, "the driver has python 3.11.7"),
        ({"versions": {**VERSIONS, "raysim": ""}}, "no raysim; the driver has raysim 0.1.0 (sources 01234567)"),
        ({"gpu_names": ()}, "1 GPUs, but PyTorch sees no GPU: check nvidia-smi on the node"),
        ({"temp_free_bytes": GIB}, "1.0 GiB free in /tmp/ray: Ray needs 2 GiB and a disk below 95 %"),
        ({"temp_free_bytes": 4 * GIB}, "start Ray with another --temp-dir"),
        ({"sees_storage": False}, "does not see the driver's files in /shared/runs: mount shared storage"),
    ],
)
def test_each_fault_of_a_node_is_one_line_with_a_remedy(change, words):
    (line,) = faults(replace(GOOD, **change))
    assert words in line


def test_disks_and_storage(tmp_path, monkeypatch):
    runs = tmp_path / "not" / "yet"
    assert all(is_ok for is_ok, _ in doctor.disks(runs))
    assert not runs.exists()
    (tmp_path / "file").write_text("")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
    *_, (is_ok, line) = doctor.disks(Path("/proc/nowhere"))
    assert not is_ok
    assert "storage /proc/nowhere cannot be written" in line
    monkeypatch.setattr(doctor, "MIN_DISK", 2**60)
    assert all("need 2 GiB or more" in line for is_ok, line in doctor.disks(runs) if not is_ok)


def test_a_dashboard_is_no_cluster_to_look_at():
    assert [is_ok for is_ok, _ in doctor.cluster("http://127.0.0.1:8265", Path("/shared"))] == [True]
    ((_, line),) = doctor.cluster(None, Path("/shared"))
    assert "no cluster looked at: give --address" in line


@pytest.mark.slow
def test_cluster_that_does_not_answer_is_one_line(tmp_path):
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "raysim", "doctor", "--address", f"127.0.0.1:{port}"]
    environment = {**os.environ, "RAYSIM_HOME": str(tmp_path)}
    result = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("FAIL") and "Ray" in line]
    assert f"cannot connect to Ray at 127.0.0.1:{port} (nothing answers" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.cluster
def test_doctor_as_a_job_sees_both_nodes(cluster, clone):
    result = cluster.job("submit", "--working-dir", ".", "--", "python", "-m", "raysim", "doctor", cwd=clone)
    # A failed job's status repeats the end of its log.
    lines = list(dict.fromkeys(line for line in result.stdout.splitlines() if line.startswith(("ok", "FAIL"))))
    bad = [line for line in lines if line.startswith("FAIL")]
    assert result.returncode == 1, result.stdout
    # The GPU of the test's cluster is one by name only.
    assert len(bad) == 1, result.stdout
    assert "PyTorch sees no GPU" in bad[0]
    for words in ("connected to Ray at ", "0 CPUs, 0 GPUs", f"sees {cluster.home}/runs"):
        assert any(line.startswith("ok") and words in line for line in lines), (words, result.stdout)
    heads = [line for line in lines if line.startswith("ok   head") and "python 3" in line]
    workers = [line for line in lines if line.startswith("ok   worker") and "python 3" in line]
    assert len(heads) == len(workers) == 1
    assert heads[0].partition(": ")[2] == workers[0].partition(": ")[2]
    assert "(sources " in heads[0]


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.skipif(not HAS_TOKENS, reason="this Ray knows no tokens")
def test_doctor_from_outside_needs_the_token(cluster, clone):
    environment = {key: value for key, value in cluster.environment.items() if key != "RAY_API_SERVER_ADDRESS"}
    outside = replace(cluster, environment=environment)
    outside.environment["RAY_AUTH_TOKEN"] = "0" * 64
    result = outside.command("python", "-m", "raysim", "doctor", "--address", cluster.address, cwd=clone)
    assert result.returncode == 1, result.stdout
    assert "FAIL cannot connect to Ray" in result.stdout, result.stdout
    assert os.environ.get("RAY_AUTH_TOKEN") != "0" * 64
