"""Nodes that had notice, without Ray: who gets nothing new, who is replaced, and who stays since there is nobody else."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from raysim.engine.messages import RoundMessage
from raysim.engine.ray import session, slots
from raysim.engine.ray.slots import NodeIsGoing, TrainerActor, TrainerSlot, TrainerSlots
from raysim.engine.ray.watch import Process, _on_node


def pool_on(monkeypatch, nodes, going):
    """Slots with a started trainer on each of these nodes, and a list that gets the names of trainers that are ended."""
    ended = []
    monkeypatch.setattr(slots, "going_nodes", lambda: frozenset(going))
    monkeypatch.setattr(slots.ray, "kill", lambda actor: ended.append(actor.name))
    later = SimpleNamespace(name="new", start=SimpleNamespace(remote=lambda: "its start"))
    pool = TrainerSlots(lambda index: later, 0)
    actors = [SimpleNamespace(name=f"{node}{index}") for index, node in enumerate(nodes)]
    pool._slots = [TrainerSlot(i, actors[i], None, Process(node, i, -1)) for i, node in enumerate(nodes)]
    return pool, ended


def test_trainers_on_a_node_that_goes_start_elsewhere(monkeypatch):
    pool, ended = pool_on(monkeypatch, "aabb", going="b")
    pool.leave()
    assert ended == ["b2", "b3"]
    assert [slot.index for slot in pool.ready()] == [0, 1]
    assert [slot.index for slot in pool.starting()] == [2, 3]
    assert pool.watch.notes == ["node b is draining; its trainers restart elsewhere: 2"]


def test_the_last_trainer_stays_on_a_node_that_goes_until_there_is_another(monkeypatch):
    pool, ended = pool_on(monkeypatch, "bb", going="b")
    pool.leave()
    assert ended == ["b1"]
    pool.leave()
    assert ended == ["b1"]
    assert [slot.index for slot in pool.staying()] == [0]
    pool._slots[1].process = Process("a", 1, -1)  # the one elsewhere has started
    assert [slot.index for slot in pool.staying()] == [1]
    pool.leave()
    assert ended == ["b1", "b0"]


def test_nothing_changes_where_no_node_goes(monkeypatch):
    pool, ended = pool_on(monkeypatch, "ab", going="")
    pool.leave()
    assert ended == pool.watch.notes == []
    assert pool.staying() == pool.ready()


def test_a_trainer_begins_nothing_on_a_node_that_goes_unless_nobody_else_could(monkeypatch):
    going = set()
    monkeypatch.setattr(slots, "going_nodes", lambda: going)
    actor = TrainerActor(None)
    actor._process = Process("a", 1, -1)
    actor._trainer = SimpleNamespace(train=lambda message, blocks, memories: (["a report"], []))
    state = np.zeros(1, np.float32)
    message = RoundMessage(0, 0, state, {}, {}, False)
    assert actor.train(message, state, [], False) == ["a report"]
    going.add("a")
    with pytest.raises(NodeIsGoing):
        actor.train(message, state, [], False)
    assert actor.train(message, state, [], True) == ["a report"]


def test_nodes_are_asked_for_once_a_second_and_nothing_is_started_there(monkeypatch):
    calls = []
    monkeypatch.setattr(session.state, "get_draining_nodes", lambda: calls.append(1) or {"a": 5})
    monkeypatch.setattr(session.time, "monotonic", lambda: 1e9 + 0.1 * len(calls))
    session._going_nodes.cache_clear()
    assert [session.going_nodes() for _ in range(3)] == [{"a"}] * 3
    assert len(calls) == 1
    assert _on_node("a", print) is None
    session._going_nodes.cache_clear()
