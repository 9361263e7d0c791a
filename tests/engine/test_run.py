"""Whole runs: run directory, errors, kills, resume."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from filelock import FileLock
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from raysim.build import make_server, make_trainer
from raysim.check import check
from raysim.core.errors import ClientError, ConfigError, OutOfMemory, RaysimError, RunExists
from raysim.data.reader_api import Options
from raysim.data.sources import prepare
from raysim.engine.checkpoint import CheckpointStore
from raysim.engine.messages import Snapshot
from raysim.engine.plan import assign, choose_cohort, cut_blocks
from raysim.engine.ray.server import RayServer
from raysim.engine.ray.slots import TrainerSlot, TrainerSlots
from raysim.engine.trainer import Trainer
from raysim.runner import execute
from tests.support.federations import plan_of, raw_config, recipe_of, run

PROJECT = Path(__file__).parent.parent.parent


def quietly(plan):
    return execute(plan, on_start=lambda *_: None, on_round=lambda _: None)


def a_plan(root, tmp_path, methods=(), **groups):
    return plan_of(root, methods, name="a", storage=str(tmp_path), **groups)


def rows_of(folder):
    with open(folder / "progress.csv") as file:
        return list(csv.DictReader(file))


def timeless(rows):
    return [{k: v for k, v in row.items() if not k.startswith("system/")} for row in rows]


# --- what a run leaves behind -----------------------------------------------------------------------------------------


def test_run_directory_is_complete_and_its_parts_agree(root, tmp_path):
    summary = quietly(a_plan(root, tmp_path, ["fedprox", {"fedvg": {"granularity": "block"}}]))
    folder = tmp_path / "a"
    names = {path.name for path in folder.iterdir()}
    assert {
        "config.yaml",
        "env.json",
        "partition.csv",
        "partition.json",
        "progress.csv",
        "clients.parquet",
        "confusion.csv",
        "confusion.png",
        "summary.json",
        "COMPLETED",
    } <= names
    assert "FAILED" not in names
    assert summary == json.loads((folder / "summary.json").read_text())
    rows = rows_of(folder)
    assert [row["round"] for row in rows] == ["0", "1", "2"]
    assert summary["accuracy"] == float(rows[-1]["server/accuracy"])
    assert summary["best_accuracy"] == max(float(row["server/accuracy"]) for row in rows)
    clients = pq.read_table(folder / "clients.parquet").to_pandas()
    assert len(clients) == 3 * 7
    assert np.allclose(clients.groupby("round")["weight"].sum(), 1)
    assert set(clients.columns) >= {"round", "client", "num_examples", "num_steps", "seconds", "train_loss", "weight"}
    board = EventAccumulator(str(folder), size_guidance={"images": 0}).Reload()
    for tag in ("server/accuracy", "train/loss", "comm/up_mb", "system/round_s", "clients/expected_accuracy_worst"):
        points = [(event.step, event.value) for event in board.Scalars(tag)]
        assert [step for step, _ in points] == [0, 1, 2]
        assert np.allclose([value for _, value in points], [float(row[tag]) for row in rows], rtol=1e-6)
    assert "weights/all" in board.Tags()["histograms"]
    assert {"weights/client_by_block", "partition/classes", "server/confusion"} <= set(board.Tags()["images"])
    assert yaml.safe_load((folder / "config.yaml").read_text())["partition"]["num_clients"] == 12
    partition = json.loads((folder / "partition.json").read_text())
    with open(folder / "partition.csv") as file:
        *rows, validation = csv.DictReader(file)
    assert [int(row["examples"]) for row in rows] == partition["sizes"]
    assert (validation["client"], int(validation["examples"])) == ("validation", len(partition["validation"]))
    everything = [row for rows in partition["clients"] for row in rows] + partition["validation"] + partition["test"]
    assert sorted(everything) == list(range(1797))


def test_pictures_of_the_partition_are_there_before_the_first_round(root, tmp_path):
    seen = []

    def start(folder, first_round, num_rounds):
        seen.extend(sorted(path.name for path in folder.glob("*.png")))

    execute(a_plan(root, tmp_path, rounds=1), on_start=start, on_round=lambda _: None)
    assert seen == ["partition.png", "validation.png"]


def test_bytes_are_those_of_the_tensors_sent(root):
    plan = plan_of(root, ["scaffold"])
    server = run(plan, root, rounds=0)
    record = server.run_round(0)
    size = 4 * plan.layout.num_params
    assert record.metrics["comm/down_mb"] * 1e6 == pytest.approx(7 * 2 * size)
    assert record.metrics["comm/up_mb"] * 1e6 == pytest.approx(7 * 2 * size)


def test_finished_run_is_never_overwritten(root, tmp_path):
    plan = a_plan(root, tmp_path)
    quietly(plan)
    before = (tmp_path / "a" / "summary.json").read_bytes()
    with pytest.raises(RunExists, match="Choose another name"):
        quietly(plan)
    assert (tmp_path / "a" / "summary.json").read_bytes() == before


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["serial", "ray"])
def test_client_that_raises_ends_the_run_with_its_facts(backend, root, tmp_path, ray_cluster):
    plan = a_plan(
        root,
        tmp_path,
        [{"tests.support.toys:raises": {"client": 4, "round_index": 1}}],
        cohort={"size": 12},
        resources={"backend": backend, "trainers": 2},
    )
    began = time.monotonic()
    with pytest.raises(ClientError) as caught:
        quietly(plan)
    assert (caught.value.client, caught.value.round_index) == (4, 1)
    assert "ZeroDivisionError: the toy divides by zero" in str(caught.value)
    assert "client 4 failed in round 1" in str(caught.value)
    assert time.monotonic() - began < 60
    assert "ZeroDivisionError" in (tmp_path / "a" / "FAILED").read_text()
    assert ray_cluster.is_initialized()  # a Ray that the run did not start is left alone


def test_nonfinite_update_stops_or_is_skipped(root, tmp_path):
    poison = [{"tests.support.toys:poison": {"client": 5}}]
    groups = {"cohort": {"size": 12}}
    with pytest.raises(RaysimError, match=r"non-finite update of client 5 in round 0.*on_nonfinite"):
        quietly(a_plan(root, tmp_path, poison, **groups))
    for methods in (poison, [*poison, "fedvg"]):
        plan = plan_of(
            root, methods, on_nonfinite="skip", name="b" + str(len(methods)), storage=str(tmp_path), **groups
        )
        quietly(plan)
        clients = pq.read_table(tmp_path / plan.config.name / "clients.parquet").to_pandas()
        assert clients[clients.is_dropped].client.tolist() == [5, 5, 5]
        assert (clients[clients.client == 5].weight == 0).all()
        rest = clients[clients.client != 5]
        assert np.allclose(rest.groupby("round").weight.sum(), 1)


def test_dropped_client_keeps_the_memory_it_had(root):
    plan = plan_of(
        root,
        [{"tests.support.toys:stumbles": {"client": 5, "round_index": 1}}],
        on_nonfinite="skip",
        cohort={"size": 12},
    )
    server = run(plan, root, rounds=0)
    dropped = [server.run_round(index).metrics["clients/dropped"] for index in range(3)]
    assert dropped == [0, 1, 0]
    assert server.client_memory(5)["stumbles"]["count"].tolist() == [2]
    assert server.client_memory(6)["stumbles"]["count"].tolist() == [3]


def test_a_second_gradient_does_not_disturb_the_first(root):
    expected = run(plan_of(root), root)
    server = run(plan_of(root, ["tests.support.toys:asks_twice"]), root)
    assert server.params_sha256() == expected.params_sha256()


def test_writing_to_the_shared_start_is_an_error(root, tmp_path):
    with pytest.raises(ClientError, match=r"wrote to client\.start"):
        quietly(a_plan(root, tmp_path, ["tests.support.toys:writes_to_start"]))


def test_serial_trains_with_the_threads_it_was_given(root, tmp_path):
    before = torch.get_num_threads()
    try:
        quietly(a_plan(root, tmp_path, resources={"backend": "serial", "cpus_per_trainer": 2}))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_hyperparameter_view_begins_with_what_a_sweep_varies(root, tmp_path):
    for name, labels, first in (("a", {"method": "A", "alpha": 1}, {"labels.method", "labels.alpha"}), ("b", {}, None)):
        quietly(plan_of(root, rounds=1, name=name, storage=str(tmp_path), labels=labels))
        board = EventAccumulator(str(tmp_path / name)).Reload()
        content = board.SummaryMetadata("_hparams_/experiment").plugin_data.content
        infos = HParamsPluginData.FromString(content).experiment.hparam_infos
        assert {info.name for info in infos if info.differs} == (first or {"methods", "seed"})
        assert "local.lr" in {info.name for info in infos}


# --- kills and resume -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["batch"])
def test_killed_trainer_does_not_change_the_result(norm, root, tmp_path, ray_cluster):
    methods = ["scaffold", "fedavgm", {"fedvg": {"granularity": "block"}}]
    expected = run(plan_of(root, methods, model={"norm": norm}), root).params_sha256()
    marker = tmp_path / "killed"
    killer = {"tests.support.toys:kills_worker": {"marker": str(marker), "round_index": 1}}
    plan = a_plan(
        root,
        tmp_path,
        [*methods, killer],
        model={"norm": norm},
        resources={"backend": "ray", "trainers": 2, "cpus_per_trainer": 0.5},
    )
    summary = quietly(plan)
    assert marker.exists()
    assert int(marker.read_text()) != os.getpid()
    assert summary["params_sha256"] == expected


def test_four_trainers_share_one_logical_gpu(root, tmp_path, ray_cluster):
    """Without a real GPU the same configuration runs on the CPU, to the same bits."""
    resources = {"backend": "ray", "trainers": 4, "gpus_per_trainer": 0.25, "cpus_per_trainer": 0.5}
    methods = ["fedprox", "fedavgm", "fedvg"]
    summary = quietly(a_plan(root, tmp_path, methods, resources=resources))
    assert summary["params_sha256"] == run(plan_of(root, methods), root).params_sha256()
    environment = json.loads((tmp_path / "a" / "env.json").read_text())
    assert environment["resources"]["gpus_per_trainer"] == 0.25
    with pytest.raises(ConfigError, match=r"2 GPUs|0\.5 GPUs"):
        quietly(
            plan_of(root, methods, name="b", storage=str(tmp_path), resources={**resources, "gpus_per_trainer": 0.5})
        )


def test_trainer_without_memory_makes_room_for_the_others(root, tmp_path, ray_cluster):
    methods = ["scaffold", {"fedvg": {"granularity": "block"}}]
    full = {"tests.support.toys:out_of_memory": {"client": 1, "folder": str(tmp_path), "times": 2}}
    groups = {"resources": {"backend": "ray", "trainers": 3, "gpus_per_trainer": 0.25, "cpus_per_trainer": 0.5}}
    groups["cohort"] = {"size": 12}
    summary = quietly(a_plan(root, tmp_path, [*methods, full], rounds=3, **groups))
    assert summary["params_sha256"] == run(plan_of(root, methods, rounds=3, cohort={"size": 12}), root).params_sha256()
    assert len(list(tmp_path.glob("oom-*"))) == 2
    rows = rows_of(tmp_path / "a")
    assert [float(row["system/trainers"]) for row in rows] == [3, 1, 1]
    assert float(rows[0]["system/redone_blocks"]) >= 2

    full["tests.support.toys:out_of_memory"]["times"] = 99
    with pytest.raises(OutOfMemory, match=r"no memory left on the device for client 1 .*Lower local.batch_size"):
        run(plan_of(root, [full], cohort={"size": 12}), root)


def test_memory_of_an_ended_trainer_goes_to_its_neighbours(monkeypatch):
    """Four trainers on one node, one on another; each may use a quarter of its GPU."""

    class Actor:
        def __init__(self):
            self.shares = []
            self.limit_memory = SimpleNamespace(remote=self.shares.append)

    ended = []
    monkeypatch.setattr("raysim.engine.ray.slots.ray.kill", ended.append)
    slots = TrainerSlots(None, 0, 0.25)
    actors = [Actor() for _ in range(5)]
    slots._slots = [TrainerSlot(i, actor, None, "b" if i == 4 else "a") for i, actor in enumerate(actors)]
    assert [slots.retire(slots[index]) for index in (0, 1, 2, 4)] == [True] * 4
    assert ended == [actors[0], actors[1], actors[2], actors[4]]
    assert actors[3].shares == pytest.approx([1 / 3, 1 / 2, 1])
    assert actors[4].shares == []
    assert not slots.retire(slots[3])
    assert slots.ready() == [slots[3]]


def test_memory_limit_is_a_share_of_the_gpu(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", asked.append)
    for device in ("cpu", "cuda"):
        Trainer.limit_memory(SimpleNamespace(device=torch.device(device)), 4 / 3)
    assert asked == [1.0]


def test_a_run_leaves_no_trainer_behind(root, tmp_path, ray_cluster):
    def free():
        return ray_cluster.available_resources().get("CPU", 0)

    before = free()
    quietly(a_plan(root, tmp_path, resources={"backend": "ray", "trainers": 2, "cpus_per_trainer": 0.5}))
    deadline = time.monotonic() + 60
    while free() < before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert free() >= before  # an earlier run may still have been giving back its own


def test_missing_room_is_an_error_in_bounded_time(root, tmp_path, ray_cluster):
    plan = a_plan(root, tmp_path)
    recipe = recipe_of(plan, root)
    began = time.monotonic()
    with pytest.raises(RaysimError, match=r"no room within 2 s for 9 trainers with .*'CPU': 1"):
        RayServer(
            partial(make_server, recipe),
            partial(make_trainer, recipe),
            num_trainers=9,
            cpus_per_trainer=1,
            gpus_per_trainer=0,
            keeps_memory=False,
            wait_s=2,
        )
    assert time.monotonic() - began < 30


def test_three_hundred_clients_on_shapes(tmp_path):
    prepare("shapes", tmp_path, options=Options(count=6000, size=16, domains=2))
    plan = plan_of(
        tmp_path,
        ["fedprox"],
        name="many",
        storage=str(tmp_path),
        data={"name": "shapes"},
        partition={"num_clients": 300, "alpha": 1.0, "min_samples": 1},
        cohort={"size": 30},
    )
    summary = quietly(plan)
    assert summary["num_clients"] == 300
    assert len(pq.read_table(tmp_path / "many" / "clients.parquet")) == 3 * 30


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


# --- plans ------------------------------------------------------------------------------------------------------------


def test_blocks_depend_on_sizes_alone_and_cover_the_cohort():
    rng = np.random.default_rng(0)
    clients = choose_cohort(1000, 100, seed=1, round_index=2)
    assert len(set(clients.tolist())) == 100
    work = rng.integers(1, 500, 100).tolist()
    blocks = cut_blocks(clients.tolist(), work)
    assert sorted(c for block in blocks for c in block.clients) == clients.tolist()
    assert 16 <= len(blocks) <= 33
    shuffled = rng.permutation(100)
    assert cut_blocks(clients[shuffled].tolist(), [work[i] for i in shuffled]) == blocks
    for count in (1, 2, 7):
        queues = assign(blocks, count)
        assert sorted(b.index for tasks in queues for task in tasks for b in task) == list(range(len(blocks)))
        loads = [sum(b.work for task in tasks for b in task) for tasks in queues]
        assert max(loads) - min(loads) <= max(b.work for b in blocks)
        assert all(len(tasks) <= 3 for tasks in queues)
