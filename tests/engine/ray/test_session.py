"""What a process may count on; nothing here starts Ray."""

from __future__ import annotations

import socket
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from raysim.base.errors import ClusterLost, RaysimError
from raysim.engine.ray import session

STARTED = SimpleNamespace(address_info={"gcs_address": "a test"})


@pytest.fixture(autouse=True)
def no_fork_server(monkeypatch):
    monkeypatch.setattr(session, "ForkServer", lambda _: SimpleNamespace(address="nobody", close=lambda: None))
    monkeypatch.setattr(session, "_FORK_SERVERS", [])


def test_what_a_task_holds_is_taken_off_its_own_node_alone(monkeypatch):
    nodes = [{"NodeID": name, "Resources": {"CPU": 4.0, "GPU": 2.0}} for name in ("here", "there")]
    held = SimpleNamespace(get_assigned_resources=lambda: {"CPU": 1.0}, get_node_id=lambda: "here")
    monkeypatch.setattr(session, "live_nodes", lambda: nodes)
    monkeypatch.setattr(session.ray, "get_runtime_context", lambda: held)
    assert session.offered() == [{"CPU": 3.0, "GPU": 2.0}, {"CPU": 4.0, "GPU": 2.0}]

    def driver():
        raise AssertionError("a driver")

    held.get_assigned_resources = driver
    assert session.offered() == [{"CPU": 4.0, "GPU": 2.0}] * 2


@pytest.mark.parametrize(("slow", "starts"), [(0, 1), (2, 3), (3, None)])
def test_a_ray_that_is_slow_to_start_is_started_again(monkeypatch, slow, starts):
    calls = []

    def init(*args, **options):
        calls.append(args)
        if len(calls) <= slow:
            raise Exception("The current node timed out during startup. This could happen because")
        return STARTED

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(session.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(session.ray, "init", init)
    monkeypatch.setattr(session.ray, "shutdown", lambda: None)
    expected = (
        pytest.raises(RaysimError, match="start again when the load is lower") if starts is None else nullcontext()
    )
    with expected, session.ray_session():
        pass
    assert calls == [("local",)] * (starts or session.STARTS)


def test_another_error_of_the_start_is_not_tried_again(monkeypatch):
    calls = []

    def init(*args, **options):
        calls.append(args)
        raise Exception("no space left")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(session.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(session.ray, "init", init)
    monkeypatch.setattr(session.ray, "shutdown", lambda: None)  # else of the Ray that other tests have
    with pytest.raises(Exception, match="no space left"), session.ray_session():
        pass
    assert len(calls) == 1


@pytest.mark.parametrize("is_ahead", [False, True])
def test_after_a_loss_the_next_session_is_another_ray_and_the_process_ends_without_rays_help(monkeypatch, is_ahead):
    done, ended = [], []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(session, "_LEFT", [])
    monkeypatch.setattr(session.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(session.ray, "init", lambda *args, **options: done.append("init") or STARTED)
    monkeypatch.setattr(session.ray, "shutdown", lambda: done.append("shutdown"))
    monkeypatch.setattr(session.signal, "signal", lambda *values: None)
    monkeypatch.setattr(session.os, "_exit", ended.append)
    with session.ray_ahead() if is_ahead else nullcontext():
        with session.ray_session():
            pass
        session.end_process(0)
        assert not ended  # nothing was lost
        done.clear()
        with pytest.raises(ClusterLost), session.ray_session():
            raise ClusterLost("the server was lost")
        with session.ray_session():
            done.append("again")
    session.wait_for_end(lambda _: None)
    one = ["shutdown"] if is_ahead else ["init", "shutdown"]  # which began before the block
    assert done == [*one, "init", "again", "shutdown", *["shutdown"] * is_ahead]
    session.end_process(3)
    assert ended == [3]


def test_only_addresses_with_a_port_can_be_tried():
    assert session.can_connect("auto")
    assert session.can_connect("ray://a-host")
    assert session.can_connect("local:")
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
        assert not session.can_connect(f"127.0.0.1:{port}")
        place.listen()
        assert session.can_connect(f"127.0.0.1:{port}")
        assert session.can_connect(f"ray://127.0.0.1:{port}")
