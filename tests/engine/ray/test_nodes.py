"""What is asked of the nodes of a cluster, and whose answer is whose; nothing here starts Ray."""

from __future__ import annotations

from types import SimpleNamespace

from raysim.engine.ray import nodes


def test_the_head_comes_first_and_each_answer_stays_with_its_node(monkeypatch):
    alive = [
        {
            "NodeID": digit * 56,
            "NodeManagerHostname": name,
            "NodeManagerAddress": "10.0.0.1",
            "NodeManagerPort": 1,
            "ObjectManagerPort": 2,
            "Resources": resources,
        }
        for digit, name, resources in (
            ("a", "left", {"CPU": 4.0}),
            ("b", "first", {"CPU": 2.0, "node:__internal_head__": 1.0}),
            ("c", "right", {"CPU": 8.0, "GPU": 2.0}),
        )
    ]

    def options(scheduling_strategy):
        return SimpleNamespace(remote=lambda probe: (scheduling_strategy.node_id, probe))

    monkeypatch.setattr(nodes, "live_nodes", lambda: alive)
    monkeypatch.setattr(nodes.ray, "remote", lambda **given: lambda function: SimpleNamespace(options=options))
    monkeypatch.setattr(nodes.ray, "wait", lambda answers, num_returns, timeout: None)
    monkeypatch.setattr(nodes.ray, "get", lambda answer, timeout: {"temp_dir": "/".join(answer)})
    got = nodes.ask_nodes("probe")
    assert [facts.name.split()[:2] for facts in got] == [["head", "first"], ["worker", "left"], ["worker", "right"]]
    assert [facts.temp_dir for facts in got] == [f"{digit * 56}/probe" for digit in "bac"]
    assert [(facts.cpus, facts.gpus) for facts in got] == [(2.0, 0.0), (4.0, 0.0), (8.0, 2.0)]


def test_sources_that_only_a_wheel_has_do_not_tell_versions_apart(tmp_path, monkeypatch):
    package = tmp_path / "raysim"
    (package / "core").mkdir(parents=True)
    for file in ("__init__.py", "core/stack.py"):
        (package / file).write_text("x = 1\n")
    here = {"NodeID": "a", "RayletSocketName": str(tmp_path / "session_1" / "sockets" / "raylet")}
    monkeypatch.setattr(nodes.util, "find_spec", lambda name: SimpleNamespace(origin=str(package / "__init__.py")))
    monkeypatch.setattr(nodes.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "a"))
    monkeypatch.setattr(nodes.ray, "nodes", lambda: [here])

    def version():
        facts = nodes.question()(str(tmp_path / "probe"))
        assert facts["temp_dir"] == str(tmp_path)
        return facts["versions"]["raysim"]

    clone = version()
    (package / "cluster").mkdir()
    (package / "cluster" / "launch.py").write_text("y = 1\n")
    assert version() == clone
    (package / "core" / "stack.py").write_text("x = 2\n")
    assert version() != clone
