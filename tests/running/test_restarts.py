"""Runs that go on by themselves after the server or the cluster was lost, and those that must not."""

from __future__ import annotations

import os
import signal
import sys
import types
from contextlib import contextmanager

import pytest

from raysim.base.errors import ClientError, ClusterLost, ConfigError, Fault
from raysim.engine.ray import server as ray_server
from raysim.engine.ray.server import RayServer
from raysim.engine.ray.session import patiently
from raysim.engine.ray.slots import NoTrainer
from raysim.engine.simulation import Interrupted
from raysim.plan import start
from raysim.running import runner
from raysim.running.runner import execute
from tests.support.federations import plan_of, run
from tests.support.runs import a_plan, rows_of

EVERY_ROUND = {"checkpoint": {"every_s": 0}}


class LosesRounds:
    """A serial server that is lost in some rounds, once in each, after a signal to this process, if there is one."""

    def __init__(self, server, losses, number):
        self._server, self._losses, self._number = server, losses, number

    def __getattr__(self, name):
        return getattr(self._server, name)

    def run_round(self, round_index):
        if round_index in self._losses:
            self._losses.remove(round_index)
            if self._number is not None:
                os.kill(os.getpid(), self._number)
            raise ClusterLost("the server was lost (a test)")
        return self._server.run_round(round_index)


@pytest.fixture
def losing(monkeypatch):
    """losing(rounds): from here on servers are lost in these rounds; returns the seconds that each start may wait."""

    def install(losses, number=None):
        patience = []

        @contextmanager
        def started(plan, folder, on_step, on_note, patience_s):
            patience.append(patience_s)
            with start.started_server(plan, folder, on_step) as server:
                yield LosesRounds(server, losses, number)

        monkeypatch.setattr(runner, "started_server", started)
        return patience

    return install


def test_a_run_goes_on_after_each_loss_from_its_last_checkpoint(root, tmp_path, losing):
    plan, begins, notes = a_plan(root, tmp_path, ["scaffold"], rounds=4, **EVERY_ROUND), [], []
    patience = losing([0, 2, 3])
    summary = execute(plan, on_start=lambda folder, first, count: begins.append(first), on_note=notes.append)
    assert begins == [0, 0, 2, 3]
    assert patience == [0, 3600, 3600, 3600]  # only a cluster that was there is waited for
    assert summary["params_sha256"] == run(plan_of(root, ["scaffold"], rounds=4), root).params_sha256()
    assert [int(row["round"]) for row in rows_of(tmp_path / "a")] == [0, 1, 2, 3]
    assert notes == [
        "the server was lost (a test); attempt 2 of 4, from the beginning",
        "the server was lost (a test); attempt 3 of 4, from the checkpoint of round 2",
        "the server was lost (a test); attempt 4 of 4, from the checkpoint of round 3",
    ]


def test_loggers_are_told_each_round_once_and_start_anew_after_a_loss(root, tmp_path, losing, monkeypatch):
    told = []

    class Logger:
        def start(self, folder, config):
            told.append("start")

        def round(self, record):
            told.append(record["round"])

        def end(self, summary):
            told.append("end" if summary else "lost")

    module = types.ModuleType("noting")
    module.make = Logger
    monkeypatch.setitem(sys.modules, "noting", module)
    losing([1])
    execute(a_plan(root, tmp_path, loggers=["noting:make"], **EVERY_ROUND))
    assert told == ["start", 0, "lost", "start", 1, 2, "end"]


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_run_fails_when_its_restarts_are_over(restarts, root, tmp_path, losing):
    plan = a_plan(root, tmp_path, resources={"restarts": restarts}, **EVERY_ROUND)
    losses = [1] * (restarts + 1)
    losing(losses)
    begins = []

    def starts(folder, first, count):
        begins.append((first, (folder / "FAILED").exists()))

    with pytest.raises(ClusterLost, match="the server was lost"):
        execute(plan, on_start=starts)
    assert begins == [(0, False), (1, False)][: restarts + 1]
    assert not losses
    assert (tmp_path / "a" / "FAILED").read_text().startswith("the server was lost")
    assert execute(plan)["params_sha256"] == run(plan_of(root), root).params_sha256()  # as a person goes on


def test_a_fault_of_the_users_own_is_not_tried_again(root, tmp_path, losing):
    plan, begins = (
        a_plan(root, tmp_path, [{"tests.support.toys:raises": {"client": 4, "round_index": 0}}], cohort={"size": 12}),
        [],
    )
    losing([])
    with pytest.raises(ClientError, match="divides by zero"):
        execute(plan, on_start=lambda *_: begins.append(1))
    assert begins == [1]


def test_a_signal_that_ended_the_server_as_well_ends_the_run(root, tmp_path, losing):
    losing([1], signal.SIGTERM)
    with pytest.raises(Interrupted) as caught:
        execute(a_plan(root, tmp_path, **EVERY_ROUND))
    assert (caught.value.signal_number, caught.value.next_round) == (signal.SIGTERM, 1)
    assert not (tmp_path / "a" / "FAILED").exists()


def test_a_cluster_that_is_not_whole_is_waited_for_as_long_as_is_said(monkeypatch):
    monkeypatch.setattr("raysim.engine.ray.session.PAUSE_S", 0.01)
    faults, said = [ConfigError([Fault("a", "too few")])] * 3 + [ConnectionError("nobody there")], []

    def call():
        if faults:
            raise faults.pop()
        return 7

    assert patiently(call, 60, said.append) == 7
    assert [line.rpartition(": ")[2] for line in said] == ["nobody there", "too few"]
    faults.append(ConnectionError("nobody there"))
    with pytest.raises(ConnectionError):
        patiently(call, 0, said.append)
    assert len(said) == 2


# --- what is a loss of the cluster ------------------------------------------------------------------------------------


def bare_server(head="127.0.0.1:1"):
    """A `RayServer` without actors, whose head is at an address."""
    server = object.__new__(RayServer)
    server._head = head
    return server


def test_a_head_that_answers_nobody_is_lost_after_a_while(monkeypatch):
    now, looks = [0.0], iter([True, False, True, *[False] * 99])
    monkeypatch.setattr(ray_server.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(ray_server, "can_connect", lambda address: next(looks))

    def wait(refs, timeout, **_):
        now[0] += timeout
        return [], refs

    monkeypatch.setattr(ray_server.ray, "wait", wait)
    with pytest.raises(ClusterLost, match=r"the head of the cluster was lost in 127\.0\.0\.1:1"):
        bare_server().answer("asked")
    assert now[0] == 3 * ray_server.PAUSE_S + ray_server.GONE_S


def test_a_run_that_loses_its_last_trainer_goes_on_and_one_that_never_had_any_does_not(monkeypatch):
    server, fault = bare_server(), NoTrainer("not one of 2 trainers could be started")

    def nobody(*_):
        raise fault

    monkeypatch.setattr(RayServer, "_run_round", nobody)
    with pytest.raises(ClusterLost, match="not one of 2 trainers"):
        server.run_round(3)
    monkeypatch.setattr(RayServer, "_ready", nobody)
    server._deadline = 0.0
    with pytest.raises(NoTrainer):
        server.wait_until_ready()


@pytest.mark.slow
def test_a_server_killed_twice_changes_no_bit(root, tmp_path, ray_cluster):
    ends = {"tests.support.toys:ends_server": {"folder": str(tmp_path), "rounds": [1, 3]}}
    resources = {"backend": "ray", "trainers": 1, "cpus_per_trainer": 0.5}  # each restart starts them anew
    methods = ["scaffold", "fedavgm"]
    plan = a_plan(root, tmp_path, [*methods, ends], rounds=5, resources=resources, **EVERY_ROUND)
    notes = []
    summary = execute(plan, on_note=notes.append)
    assert {path.name for path in tmp_path.glob("server-*")} == {"server-1", "server-3"}
    assert summary["params_sha256"] == run(plan_of(root, methods, rounds=5), root).params_sha256()
    assert [note.partition("; ")[2] for note in notes if "the server was lost" in note] == [
        "attempt 2 of 4, from the checkpoint of round 1",
        "attempt 3 of 4, from the checkpoint of round 3",
    ]
