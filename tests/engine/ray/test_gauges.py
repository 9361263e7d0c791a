"""A run in the metrics of Ray, as its dashboard and Prometheus get them."""

from __future__ import annotations

import time
import urllib.request
from types import SimpleNamespace

import pytest

from raysim.engine.ray import gauges
from tests.support.runs import a_plan, quietly


def test_gauges_say_how_far_a_run_is(monkeypatch):
    """A round that was not evaluated leaves the score as it was."""
    told = []

    class Gauge:
        def __init__(self, name, meaning, tag_keys):
            self.name, self.tag_keys = name, tag_keys

        def set(self, value, tags):
            assert set(tags) == set(self.tag_keys)
            told.append((self.name, value, tags["run"], tags["metric"]))

    monkeypatch.setattr(gauges, "Gauge", Gauge)
    show = gauges.round_gauges("s/lr=0.1", "accuracy")
    clients = {"client": [4, 7, 9]}
    metrics = {"server/accuracy": 0.5, "system/round_s": 1.5, "system/redone_blocks": 2.0}
    show(SimpleNamespace(round_index=0, metrics=metrics, clients=clients))
    assert told == [
        ("raysim_round", 1, "s/lr=0.1", "accuracy"),
        ("raysim_score", 0.5, "s/lr=0.1", "accuracy"),
        ("raysim_clients_per_s", 2.0, "s/lr=0.1", "accuracy"),
        ("raysim_redone_blocks", 2.0, "s/lr=0.1", "accuracy"),
    ]
    told.clear()
    del metrics["server/accuracy"]
    show(SimpleNamespace(round_index=1, metrics=metrics, clients=clients))
    assert [name for name, *_ in told] == ["raysim_round", "raysim_clients_per_s", "raysim_redone_blocks"]


@pytest.mark.slow
@pytest.mark.cluster
def test_a_run_on_ray_is_found_where_prometheus_looks(root, tmp_path, ray_cluster):
    resources = {"backend": "ray", "trainers": 1, "cpus_per_trainer": 0.5}
    quietly(a_plan(root, tmp_path, rounds=2, resources=resources))
    (node,) = ray_cluster.nodes()
    address, deadline, values = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics", 60, {}
    began = time.monotonic()
    while len(values) < len(gauges.GAUGES) and time.monotonic() - began < deadline:
        time.sleep(0.5)
        lines = urllib.request.urlopen(address, timeout=10).read().decode().splitlines()
        values = {line.partition("{")[0]: line for line in lines if 'run="a"' in line}
    assert set(values) == {f"ray_{name}" for name in gauges.GAUGES}
    assert values["ray_raysim_round"].endswith(" 2.0")
    assert 'metric="accuracy"' in values["ray_raysim_score"]
