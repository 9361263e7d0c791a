"""How long a trainer may be silent, and how a look at it is asked for; nothing here starts Ray."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from raysim.engine.ray import watch
from raysim.engine.ray.watch import Process, Watch, Watched


def test_the_limit_is_20_times_the_longest_answer_and_at_least_60_s(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(watch.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(watch.ray, "wait", lambda refs, **options: (refs[:1], refs[1:]))
    trainer = Watched("trainer", Process("a", 1, -1), "training")
    own = Watch()
    limits = [own.limit_s]
    for answer_s in (2.0, 10.0, 1.0):
        own.asked("trainer")
        clock.now += answer_s
        assert own.first({"answer": trainer}) == "answer"
        limits.append(own.limit_s)
    assert limits == [float("inf"), 60.0, 200.0, 200.0]
    assert Watch(timeout_s=8.0).limit_s == 8.0


def test_a_look_at_a_silent_trainer_takes_no_cpu(monkeypatch):
    """It must run where trainers have taken all CPUs, on the trainer's own node."""
    asked = []

    def options(**given):
        asked.append(given)
        return SimpleNamespace(remote=lambda *values: sum(values))

    monkeypatch.setattr(watch.ray, "remote", lambda function: SimpleNamespace(options=options))
    monkeypatch.setattr(watch.ray, "get", lambda answer, timeout: answer)
    monkeypatch.setattr(watch, "going_nodes", frozenset)
    assert watch._on_node("ab" * 28, max, 3, 4) == 7
    ((number, place),) = [(given["num_cpus"], given["scheduling_strategy"]) for given in asked]
    assert number == 0
    assert (place.node_id, place.soft) == ("ab" * 28, False)


def test_a_process_that_cannot_tell_its_stack_has_none(monkeypatch):
    monkeypatch.delattr(os, "memfd_create", raising=False)  # as on macOS
    monkeypatch.setattr(watch.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "a"))
    monkeypatch.setattr(watch.faulthandler, "register", lambda *given, **more: pytest.fail("a stack to no file"))
    assert Process.own() == Process("a", os.getpid(), -1)
