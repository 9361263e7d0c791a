"""Checkpoints and resuming: to the same bits, and only with the same configuration and data."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from filelock import FileLock
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from raysim.check import check
from raysim.core.errors import ClientError, ConfigError, RaysimError, RunExists
from raysim.engine.checkpoint import CheckpointStore
from raysim.engine.messages import Snapshot
from tests.support.federations import raw_config
from tests.support.runs import a_plan, quietly, rows_of, timeless

PROJECT = Path(__file__).parent.parent.parent


def write_config(path, root, tmp_path, backend, **groups):
    raw = raw_config(
        root,
        ["scaffold", "fedavgm", "fedvg"],
        name="killed",
        storage=str(tmp_path / "runs"),
        rounds=12,
        checkpoint={"every_s": 0},
        resources={"backend": backend},
        **groups,
    )
    if backend == "ray":
        raw["resources"] |= {"trainers": 2}
    path.write_text(yaml.safe_dump(raw))
    return raw


def start(path, *overrides):
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    environment.pop("RAY_ADDRESS", None)
    return subprocess.Popen(
        [sys.executable, "-m", "raysim", "run", str(path), *overrides],
        cwd=PROJECT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "number"), [("ray", signal.SIGKILL), ("serial", signal.SIGTERM)])
def test_killed_driver_resumes_to_the_same_bits(backend, number, root, tmp_path):
    raw = write_config(tmp_path / "run.yaml", root, tmp_path, backend)
    folder = tmp_path / "runs" / "killed"
    process = start(tmp_path / "run.yaml")
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not list(folder.glob("checkpoints/round-00000[3-9]")):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 128 + signal.SIGTERM), output
    assert not (folder / "COMPLETED").exists()

    again = start(tmp_path / "run.yaml")
    output, _ = again.communicate(timeout=180)
    assert again.returncode == 0, output
    assert "resuming at round" in output
    expected = quietly(check({**raw, "name": "whole", "resources": {"backend": "serial"}}, "a test"))
    summary = json.loads((folder / "summary.json").read_text())
    for key in ("params_sha256", "accuracy", "best_accuracy", "best_round", "mean_last_10pct_accuracy"):
        assert summary[key] == expected[key], key
    assert timeless(rows_of(folder)) == timeless(rows_of(folder.parent / "whole"))
    tables = [
        pq.read_table(f / "clients.parquet").to_pandas().drop(columns="seconds")
        for f in (folder, folder.parent / "whole")
    ]
    assert tables[0].equals(tables[1])
    board = EventAccumulator(str(folder)).Reload()
    assert [event.step for event in board.Scalars("server/accuracy")] == list(range(12))


def test_resume_refuses_another_configuration(root, tmp_path):
    plan = a_plan(
        root,
        tmp_path,
        [{"tests.support.toys:raises": {"client": 4, "round_index": 1}}],
        cohort={"size": 12},
        checkpoint={"every_s": 0},
    )
    with pytest.raises(ClientError):
        quietly(plan)
    changed = a_plan(root, tmp_path, [], cohort={"size": 12}, local={"lr": 0.2})
    with pytest.raises(ConfigError) as caught:
        quietly(changed)
    assert {fault.key for fault in caught.value.faults} == {"methods", "local.lr"}
    with pytest.raises(RunExists, match="et resume=auto"):
        quietly(a_plan(root, tmp_path, resume="never"))


def test_resume_refuses_other_data_a_running_run_and_a_damaged_configuration(root, tmp_path):
    raises = [{"tests.support.toys:raises": {"client": 4, "round_index": 1}}]
    plan = a_plan(root, tmp_path, raises, cohort={"size": 12}, checkpoint={"every_s": 0})
    with pytest.raises(ClientError):
        quietly(plan)
    folder = tmp_path / "a"
    with FileLock(folder / ".lock"), pytest.raises(RunExists, match="is running"):
        quietly(plan)
    manifest = replace(plan.manifest, clients=plan.manifest.clients[::-1])
    with pytest.raises(ConfigError, match="the set changed"):
        quietly(replace(plan, manifest=manifest))
    (folder / "config.yaml").write_text("")
    with pytest.raises(RunExists, match="damaged"):
        quietly(plan)


def test_checkpoint_is_whole_or_not_at_all(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    for number in range(1, 5):
        methods = {"m": {"n": number, "list": [np.eye(2), "x", None]}}
        snapshot = Snapshot(np.full(3, number, np.float32), {}, methods)
        store.save(number, snapshot, [(number % 2, {"m": {"v": np.full(2, number)}})])
    assert sorted(p.name for p in tmp_path.glob("round-*")) == ["round-000003", "round-000004"]
    assert not list(tmp_path.rglob("*.part"))
    (tmp_path / ".round-000009.1.part").mkdir()  # what a killed process leaves
    fresh = CheckpointStore(tmp_path)
    checkpoint = fresh.latest()
    assert checkpoint.next_round == 4
    assert checkpoint.snapshot.methods["m"]["n"] == 4
    assert (checkpoint.snapshot.methods["m"]["list"][0] == np.eye(2)).all()
    assert {c: fresh.read_memory(p)["m"]["v"].tolist() for c, p in checkpoint.memories.items()} == {
        1: [3, 3],
        0: [4, 4],
    }
    (tmp_path / "round-000004" / "server.safetensors").write_bytes(b"x")
    with pytest.raises(RaysimError, match="elete this folder"):
        CheckpointStore(tmp_path).latest()
