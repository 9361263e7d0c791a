"""Trainers in a run on Ray: killed, short of memory, without room, and ended with the run."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import ray
import torch
from ray.exceptions import RayTaskError
from ray.util import placement_group, remove_placement_group

from raysim.base.errors import ConfigError, OutOfMemory, RaysimError
from raysim.engine.messages import EvaluationPoint, RoundMessage
from raysim.engine.ray import room, server, slots
from raysim.engine.ray.pool import RayPool, _brought
from raysim.engine.ray.slots import TrainerSlot, TrainerSlots
from raysim.engine.ray.watch import Process, Watch, Watched
from raysim.engine.schedule import ClientBlock
from raysim.engine.trainer import Trainer
from raysim.running.runner import execute
from tests.support.busy import no_cpu_left
from tests.support.federations import plan_of, run
from tests.support.nodes import wait_for
from tests.support.runs import a_plan, quietly, rows_of

pytestmark = pytest.mark.ray


@pytest.mark.slow
def test_one_of_two_trainers_on_one_logical_gpu_is_killed_without_a_trace(root, tmp_path, ray_cluster):
    """Without a real GPU the same configuration runs on the CPU, to the same bits; no trainer outlives the run."""

    def free():
        return ray_cluster.available_resources().get("CPU", 0)

    before = free()
    resources = {"backend": "ray", "trainers": 2, "gpus_per_trainer": 0.5, "cpus_per_trainer": 0.5}
    methods = ["scaffold", "fedavgm", {"fedvg": {"granularity": "block"}}]
    marker, model = tmp_path / "killed", {"norm": "batch"}
    killer = {"tests.support.toys:kills_worker": {"marker": str(marker), "round_index": 1}}
    summary = quietly(a_plan(root, tmp_path, [*methods, killer], model=model, resources=resources))
    assert int(marker.read_text()) != os.getpid()
    assert summary["params_sha256"] == run(plan_of(root, methods, model=model), root).params_sha256()
    environment = json.loads((tmp_path / "a" / "env.json").read_text())
    assert environment["resources"]["gpus_per_trainer"] == 0.5
    deadline = time.monotonic() + 60
    while free() < before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert free() >= before  # an earlier run may still have been giving back its own

    halves = {**resources, "trainers": 4}
    with pytest.raises(ConfigError, match=r"4 trainers with .*GPU: 0\.5.* room for 2"):
        quietly(plan_of(root, methods, name="b", storage=str(tmp_path), resources=halves))


@pytest.mark.slow
def test_a_trainer_that_does_not_answer_is_replaced_or_named(root, tmp_path, ray_cluster):
    resources = {"backend": "ray", "trainers": 2, "cpus_per_trainer": 0.5, "client_timeout_s": 4}
    stopper = {"marker": str(tmp_path / "stopped"), "round_index": 1, "number": int(signal.SIGSTOP)}
    plan = a_plan(root, tmp_path, ["scaffold", {"tests.support.toys:kills_worker": stopper}], resources=resources)
    notes = []
    assert (
        execute(plan, on_note=notes.append)["params_sha256"] == run(plan_of(root, ["scaffold"]), root).params_sha256()
    )
    assert not psutil.pid_exists(int((tmp_path / "stopped").read_text()))
    assert "a trainer gave no answer for" in "".join(notes)

    client = int(run(plan_of(root), root, rounds=1).pool._trainer._vectors._rows["update"].popitem()[0])
    alone = {**resources, "trainers": 1, "client_timeout_s": 2}
    hanging = plan_of(root, [{"tests.support.toys:hangs": {"client": client}}], storage=str(tmp_path), resources=alone)
    with pytest.raises(RaysimError, match=rf"clients .*{client}.* in .*toys.py, line \d+, in report.*client_timeout_s"):
        quietly(hanging)


@pytest.mark.slow
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


def test_a_short_limit_is_looked_at_four_times(monkeypatch):
    pauses_s, asked = [], {"answer": Watched("trainer", Process("a", 1, -1), "training")}

    def wait(refs, timeout, **_):
        pauses_s.append(timeout)
        return refs[:1], refs[1:]

    monkeypatch.setattr("raysim.engine.ray.watch.ray.wait", wait)
    for limit_s in (4.0, 600.0, None):
        Watch(timeout_s=limit_s).first(asked)
    assert pauses_s == [1.0, 5.0, 5.0]


def test_memory_of_an_ended_trainer_goes_to_its_neighbours(monkeypatch):
    """Four trainers on one node, one on another; each may use a quarter of its GPU."""

    class Actor:
        def __init__(self):
            self.shares = []
            self.call = SimpleNamespace(remote=lambda function, share: self.shares.append(share))

    ended = []
    monkeypatch.setattr("raysim.engine.ray.slots.ray.kill", ended.append)
    slots = TrainerSlots(None, 0, 0.25)
    actors = [Actor() for _ in range(5)]
    slots._slots = [
        TrainerSlot(i, actor, None, Process("b" if i == 4 else "a", i, -1)) for i, actor in enumerate(actors)
    ]
    assert [slots.retire(slots._slots[index]) for index in (0, 1, 2, 4)] == [True] * 4
    assert ended == [actors[0], actors[1], actors[2], actors[4]]
    assert actors[3].shares == pytest.approx([1 / 3, 1 / 2, 1])
    assert actors[4].shares == []
    assert not slots.retire(slots._slots[3])
    assert slots.ready() == [slots._slots[3]]


def test_a_trainer_that_cannot_be_built_is_left_out_unless_it_is_the_last(monkeypatch):
    """As on a node that joined with a broken installation."""

    class Actor:
        def __init__(self, index):
            self.start = SimpleNamespace(remote=lambda: index)

    def get(ref):
        if ref:
            raise RayTaskError("start", "ImportError: no module", ImportError("no module"))
        return Process("a", 1, -1)

    ended = []
    monkeypatch.setattr("raysim.engine.ray.slots.ray.kill", ended.append)
    monkeypatch.setattr("raysim.engine.ray.slots.ray.wait", lambda refs, timeout: (refs[:1], refs[1:]))
    monkeypatch.setattr("raysim.engine.ray.slots.ray.get", get)
    slots = TrainerSlots(Actor, 3)
    slots.poll()
    assert [slot.index for slot in slots.ready()] == [0]
    assert slots.starting() == []
    assert [slot.is_retired for slot in slots._slots] == [False, True, True]
    assert slots.watch.notes == ["a trainer could not be started and is left out: no module"] * 2
    slots = TrainerSlots(lambda index: Actor(index + 1), 2)
    with pytest.raises(RayTaskError, match="no module"):
        slots.poll()
    assert len(ended) == 3


def test_a_trainer_lost_before_it_has_started_is_replaced_while_others_train(ray_cluster, tmp_path):
    """As when it is placed on a node that is gone, which Ray takes for alive for some 15 s: it then ends with that node."""
    late, again = tmp_path / "late", tmp_path / "again"

    class Stub:
        def __init__(self, index, life):
            self.index, self.life = index, life

        def start(self):
            if self.life == 2:
                wait_for(late.exists, 60)
                os._exit(1)
            if self.life == 3:
                again.touch()
            return Process.own()

        def train(self, message, state, blocks, is_last):
            if self.index == 1:
                os._exit(1)
            if message.round_index == 2:
                late.touch()
                wait_for(again.exists, 20)
            return blocks

    lives = [0, 0]

    def start(index):
        lives[index] += 1
        return ray.remote(Stub).options(num_cpus=0.1).remote(index, lives[index])

    pool = RayPool(TrainerSlots(start, 2), keeps_memory=False)
    blocks = [ClientBlock(index, (index,), 1) for index in range(2)]
    assert pool.begin_round() == 2
    messages = [RoundMessage(index, 0, np.zeros(1, np.float32), {}, {}, False) for index in range(3)]
    assert len(list(pool.train(messages[1], [[[block]] for block in blocks], {}))) == 2
    assert pool.begin_round() == 1
    (done,) = pool.train(messages[2], [[blocks]], {})
    assert done.reports == blocks
    assert lives == [1, 3]
    for index in range(2):
        ray.kill(pool.slots._slots[index].actor)


def test_a_state_that_is_scored_and_then_sent_travels_once(ray_cluster):
    pool = SimpleNamespace(_state=None)
    state = np.array([0.0, 1.0], np.float32)
    rest, scored = RayPool._sent(pool, EvaluationPoint(state, {"n": 1}, {}))
    assert (ray.get(rest).counters, ray.get(rest).state.size) == ({"n": 1}, 0)
    rest, sent = RayPool._sent(pool, RoundMessage(1, 0, state.copy(), {}, {}, False))
    assert sent == scored
    assert ray.get(rest).round_index == 1
    _, negative = RayPool._sent(pool, RoundMessage(2, 0, np.array([-0.0, 1.0], np.float32), {}, {}, False))
    assert negative != sent  # equal as numbers, but another state: the bits of a result depend on it
    assert np.signbit(ray.get(negative)).tolist() == [True, False]


@pytest.mark.essential
@pytest.mark.parametrize(("size", "together"), [(2, [1, 4]), (2**22, [1, 2, 2])])
def test_sums_of_other_nodes_are_fetched_a_few_at_a_time(size, together, monkeypatch):
    groups = []

    def get(refs):
        groups.append(len(refs))
        return [np.full(size, float(ref)) for ref in refs]

    monkeypatch.setattr("raysim.engine.ray.pool.ray.get", get)
    total, size_bytes = _brought([1, 2, 4, 8, 16])
    assert groups == together
    assert (total.tolist()[:2], size_bytes) == ([31.0, 31.0], 5 * 8 * size)


@pytest.mark.essential
def test_a_wait_for_trainers_ends_when_it_was_said_to(monkeypatch):
    def wait(refs, timeout):
        assert timeout < 1
        return [], refs

    monkeypatch.setattr(slots, "START_S", 0.05)
    monkeypatch.setattr(slots.ray, "wait", wait)
    actor = SimpleNamespace(start=SimpleNamespace(remote=lambda: "its start"))
    waiting = TrainerSlots(lambda index: actor, 0, patience_s=0.05)
    waiting.grow(1)
    with pytest.raises(slots.NoTrainer, match=r"not one of 1 trainers could be started within 0\.05 s"):
        waiting.wait_for(1)


@pytest.mark.essential
@pytest.mark.parametrize(
    ("most", "group", "grows"), [(4.0, None, True), (4.0, "a trial's", False), (None, None, False)]
)
def test_a_pool_grows_unless_its_number_is_fixed_or_it_lives_in_a_group(monkeypatch, most, group, grows):
    given = []
    monkeypatch.setattr(server, "RayPool", lambda *values: given.extend(values))
    monkeypatch.setattr(server, "TrainerSlots", lambda *values: None)
    monkeypatch.setattr(server.torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(server, "keep_freed_memory", lambda: None)
    starter = server.TrainerStarter(None, {"CPU": 1}, 1, group=group, most=most)
    server.ServerActor(print, starter, False)
    assert (given[2]() > 0) == grows


def test_memory_limit_is_a_share_of_the_gpu(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", asked.append)
    for device in ("cpu", "cuda"):
        Trainer.limit_memory(SimpleNamespace(device=device), 4 / 3)
    assert asked == [1.0]


@pytest.mark.usefixtures("ray_cluster")
def test_missing_room_is_an_error_in_bounded_time():
    began = time.monotonic()
    with pytest.raises(RaysimError, match=r"no room within 2 s for 9 trainers with .*'CPU': 1"):
        room.find_room({"CPU": 1}, 9, least=9, wait_s=2, say=print)
    assert time.monotonic() - began < 30


def test_a_run_on_a_busy_cluster_builds_its_shards_and_ends_after_the_wait_of_its_file(root, tmp_path, ray_cluster):
    wanted = {"backend": "ray", "trainers": 2, "cpus_per_trainer": 1, "wait_s": 2}
    cold = {"name": "digits", "root": str(root), "stored_size": 11}
    with no_cpu_left(), pytest.raises(RaysimError, match="no room within 2 s for 2 trainers"):
        quietly(a_plan(root, tmp_path, resources=wanted, data=cold))


def test_a_run_waits_for_room_and_says_what_for(ray_cluster, monkeypatch):
    monkeypatch.setattr(room, "FIRST_WORD_S", 0.2)
    free = int(ray_cluster.available_resources()["CPU"])
    other_job = placement_group([{"CPU": 1}] * free)
    assert other_job.wait(60)
    lines = []

    def say(line):
        lines.append(line)
        remove_placement_group(other_job)  # the other job ends

    assert len(room.find_room({"CPU": 1.0}, free, least=free, wait_s=60, say=say)) == free
    assert re.search(
        rf"waiting for room \(. s of at most 60\): {free} trainers with .*'CPU': 1.* each; free now:", lines[0]
    )
