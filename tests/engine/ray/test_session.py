"""What a process may count on; nothing here starts Ray."""

from __future__ import annotations

from types import SimpleNamespace

from raysim.engine.ray import session


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
