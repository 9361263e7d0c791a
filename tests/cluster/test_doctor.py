"""`raysim doctor`: each finding, well and not, and a real cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from ray._private import ray_constants
from ray._private.runtime_env import packaging

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
    store_bytes=4 * GIB,
    shm_bytes=8 * GIB,
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
    assert lines[-1] == "the ports of 2 nodes can be reached"
    other_builds = {**VERSIONS, "python": "3.11.9", "torch": "2.14.1+cu130"}
    assert faults(replace(GOOD, versions=other_builds)) == []
    is_ok, line = doctor._gpus(replace(GOOD, gpus=0))
    assert is_ok
    assert "Ray was not told" in line


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"error": "no answer (GetTimeoutError)"}, "ran no task: no answer (GetTimeoutError); look at `ray status`"),
        ({"versions": {**VERSIONS, "torch": "2.11.0"}}, "the driver has torch 2.14.1: install the same on every node"),
        ({"versions": {**VERSIONS, "python": "3.12.1"}}, "the driver has python 3.11.7"),
        ({"versions": {**VERSIONS, "raysim": ""}}, "no raysim; the driver has raysim 0.1.0 (sources 01234567)"),
        ({"gpu_names": ()}, "1 GPUs, but PyTorch sees none: check nvidia-smi there"),
        ({"store_bytes": GIB // 2}, "object store 512.0 MiB, /dev/shm 8.0 GiB: below 1 GiB"),
        ({"shm_bytes": GIB}, "Ray keeps objects on a disk; enlarge /dev/shm (docker --shm-size)"),
        ({"temp_free_bytes": GIB}, "1.0 GiB free in /tmp/ray: Ray needs 2 GiB and a disk below 95 %"),
        ({"temp_free_bytes": 4 * GIB}, "start it with another --temp-dir"),
        ({"sees_storage": False}, "does not see what the driver writes to /shared/runs: mount shared storage"),
        (
            {"unreachable_ports": (("node manager", 8077),)},
            "cannot reach node manager port 8077 of head a (10.0.0.1, 0123ab): open the ports of cluster/env.sh",
        ),
    ],
)
def test_each_fault_of_a_node_is_one_line_with_a_remedy(change, words):
    (line,) = faults(replace(GOOD, **change))
    assert words in line


def test_upload_counts_what_ray_sends_and_names_the_largest(tmp_path, monkeypatch):
    for name, size in {
        "a.py": 10,
        "sub/b.py": 20,
        "data/x.arrow": 99,
        ".git/pack": 99,
        "sub/c.bin": 5,
        "d.npz": 7,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(size))
    (tmp_path / ".gitignore").write_text("/data/\n")
    (tmp_path / ".rayignore").write_text("*.npz\n")
    names = {path.relative_to(tmp_path).as_posix() for path in doctor.uploaded_files(tmp_path)}
    assert names == {"sub/b.py", "a.py", ".gitignore", ".rayignore", "sub/c.bin"}
    is_ok, line = doctor.upload(tmp_path)
    assert is_ok
    assert "5 files, 48 bytes (at most 100.0 MiB); the largest:\n           20 bytes  sub/b.py" in line
    assert [words.split()[-1] for words in line.splitlines()[1:]] == [
        *("sub/b.py", "a.py", ".gitignore", ".rayignore", "sub/c.bin")
    ]
    monkeypatch.setattr(doctor, "UPLOAD_LIMIT", 48)
    is_ok, line = doctor.upload(tmp_path)
    assert not is_ok
    assert "too much: name what the run does not need in .rayignore" in line
    monkeypatch.setattr(doctor, "MOST_FILES", 3)
    is_ok, line = doctor.upload(tmp_path)
    assert not is_ok
    assert "would upload more than 3 files: start from the clone, or write a .rayignore" in line


has_same_rules = pytest.mark.skipif(
    not hasattr(ray_constants, "get_runtime_env_default_excludes"), reason="Ray before 2.54 leaves out other files"
)


def rays_own_walk(folder):
    """The files that Ray itself would send, by its private code, which the product does not use."""
    found = []
    excludes = [packaging._get_excludes(folder, ray_constants.get_runtime_env_default_excludes())]
    packaging._dir_travel(folder, excludes, found.append, include_gitignore=True)
    return {path for path in found if path.is_file()}


@has_same_rules
def test_upload_is_what_rays_own_walk_sends(tmp_path):
    ignore = {
        ".gitignore": "*.bin\n!keep.bin\n/only_here\nruns/\n",
        ".rayignore": "*.npz\nsub/deep/x.py\n",
        "sub/.gitignore": "!c.bin\n*.log\n/here\n",
        "sub/deep/.rayignore": "*\n!y.py\n",
    }
    names = [
        "a.py",
        "keep.bin",
        "d.npz",
        "only_here/a",
        "sub/only_here/a",
        "runs/x/y",
        "sub/c.bin",
        "sub/e.log",
        "e.log",
    ]
    names += [
        "sub/here",
        "here",
        "sub/deep/x.py",
        "sub/deep/y.py",
        "sub/deep/z.py",
        "sub/.venv/a",
        "lib/venv/a",
        ".git/x",
    ]
    for name in (*names, *ignore):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(ignore.get(name, ""))
    files = set(doctor.uploaded_files(tmp_path))
    assert files == rays_own_walk(tmp_path)
    assert 5 < len(files) < len(names)


@has_same_rules
def test_upload_of_this_project_is_small():
    files = set(doctor.uploaded_files(PROJECT))
    assert sum(path.stat().st_size for path in files) < 5 * 2**20
    assert PROJECT / "raysim/data/sources.py" in files  # /data is ignored, raysim/data is not
    assert files == rays_own_walk(PROJECT)


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


def test_dashboard_findings():
    assert doctor.dashboard("") == (
        False,
        "no dashboard: `ray job submit` needs one; start the head with --include-dashboard=true",
    )
    (port,) = free_ports(1)
    is_ok, line = next(doctor.cluster(f"http://127.0.0.1:{port}", Path("/shared")))
    assert not is_ok
    assert f"the dashboard at http://127.0.0.1:{port} does not answer" in line


@pytest.mark.slow
def test_cluster_that_does_not_answer_is_one_line(tmp_path):
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "raysim", "doctor", "--address", f"127.0.0.1:{port}", "--storage", str(tmp_path)]
    result = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=120)
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
    # What is small about the test's cluster, and its GPU, which is one by name only.
    assert len(bad) == 3, result.stdout
    assert [("object store" in line, "PyTorch sees none" in line) for line in bad].count((True, False)) == 2
    for words in (
        "connected to Ray at ",
        "takes jobs",
        "0 CPUs, 0 GPUs",
        f"sees {cluster.home}/runs",
        "the ports of 2 nodes can be reached",
    ):
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
    for address in (cluster.dashboard, cluster.address):
        outside.environment["RAY_AUTH_TOKEN"] = "0" * 64
        result = outside.command("python", "-m", "raysim", "doctor", "--address", address, cwd=clone)
        assert result.returncode == 1, result.stdout
        assert "FAIL the dashboard" in result.stdout or "FAIL cannot connect to Ray" in result.stdout, result.stdout
    del outside.environment["RAY_AUTH_TOKEN"]
    result = outside.command("python", "-m", "raysim", "doctor", "--address", cluster.dashboard, cwd=clone)
    assert result.returncode == 0, result.stdout
    assert "takes jobs" in result.stdout
    assert os.environ.get("RAY_AUTH_TOKEN") != "0" * 64
