"""What a trial reserves, and whether the nodes have room for it."""

from __future__ import annotations

import time

import pytest

from raysim.base.errors import ConfigError
from raysim.tuning import for_tune as of
from raysim.tuning.for_tune import bundles_of, check_room
from tests.support.sweeps import a_sweep, run


def test_bundles_come_from_each_trials_own_configuration(root, tmp_path):
    def bundles(gpus, **resources):
        sweep = a_sweep(root, tmp_path, {"seed": {"grid_search": [0]}}, resources=resources)
        return bundles_of(sweep.trials[0].config, gpus)

    assert bundles(0, backend="serial") == [{"CPU": 1}]
    assert bundles(4, backend="serial", cpus_per_trainer=0.5) == [{"CPU": 0.5, "GPU": 0.25}]
    assert bundles(4, backend="auto") == bundles(4, trainers={"min": 1, "max": 9}) == [{"CPU": 1, "GPU": 0.25}]
    assert bundles(0, backend="auto", trainers=2) == [{}, *[{"CPU": 1}] * 2]
    assert bundles(0, backend="ray") == [{}, {"CPU": 1}]
    assert bundles(2, backend="ray") == [{}, {"CPU": 1, "GPU": 0.25}]
    assert bundles(2, backend="ray", trainers=2, gpus_per_trainer=0.5) == [{}, *[{"CPU": 1, "GPU": 0.5}] * 2]
    assert bundles(0, backend="ray", trainers=2, gpus_per_trainer=0.5) == [{}, *[{"CPU": 1}] * 2]
    assert bundles(0, backend="ray", trainers={"min": 2, "max": 9}) == [{}, *[{"CPU": 1}] * 2]
    custom = {"custom": {"mig": 2, "accelerator_type:T4": 0.001}}
    assert bundles(0, backend="ray", **custom) == [{}, {"CPU": 1, "mig": 2, "accelerator_type:T4": 0.001}]


def test_room_is_judged_node_by_node(root, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:6379")  # this machine may be smaller

    def is_refused(nodes, **resources):
        sweep = a_sweep(root, tmp_path, {"seed": {"grid_search": [0]}}, resources={"backend": "ray", **resources})
        try:
            check_room(sweep, nodes)
        except ConfigError:
            return True
        return False

    two = [{"CPU": 2.0, "GPU": 1.0}, {"CPU": 4.0}]
    assert not is_refused(two, trainers=2, gpus_per_trainer=0.5)
    assert is_refused(two, trainers=2, gpus_per_trainer=0.6)
    assert not is_refused(two, trainers=1, cpus_per_trainer=4, gpus_per_trainer=0)
    assert is_refused(two, trainers=1, cpus_per_trainer=5, gpus_per_trainer=0)
    assert is_refused(two, trainers=2, cpus_per_trainer=3, gpus_per_trainer=0)
    assert is_refused([{"CPU": 8.0, "GPU": 2.0}], trainers=3, gpus_per_trainer=0.6)  # no share lies on two GPUs


def test_trials_on_a_cluster_that_grows_wait_for_no_gpu_where_there_is_none(root, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(of, "autoscales", lambda: True)
    monkeypatch.setattr(of, "ray_nodes", lambda: [{"CPU": 1.0}])
    monkeypatch.setattr(of, "find_room", lambda share, count, **_: asked.append((share, count)))
    resources = {"backend": "ray", "trainers": 2}
    of.nodes_with_room(a_sweep(root, tmp_path, {"seed": {"grid_search": [0]}}, resources=resources), print)
    assert asked == [({"CPU": 1}, 2)]


def test_impossible_request_names_the_bundle_within_30_s(root, tmp_path, ray_cluster):
    began = time.monotonic()
    space = {"resources.cpus_per_trainer": {"grid_search": [0.5, 64]}}
    with pytest.raises(ConfigError, match=r"trial cpus_per_trainer=64: bundle \{CPU: 64, GPU: 0.25\} does not fit"):
        run(a_sweep(root, tmp_path, space))
    resources = {"backend": "ray", "trainers": 2, "gpus_per_trainer": 1, "cpus_per_trainer": 0.5}
    sweep = a_sweep(root, tmp_path, {"seed": {"grid_search": [0]}}, resources=resources)
    with pytest.raises(ConfigError, match=r"bundle \{CPU: 0.5, GPU: 1\}, one of 2 of a trial, does not fit"):
        run(sweep)
    assert time.monotonic() - began < 30
    assert not list(sweep.folder.glob("*/config.yaml"))
