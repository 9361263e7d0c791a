"""Joint training: one client with everything, on the same held-out rows as every partition of that seed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from raysim.base.errors import ConfigError
from raysim.config.sweep import grid
from raysim.plan.check import check
from tests.support.federations import plan_of, raw_config, run, server_on
from tests.twins.federation import Naive

JOINT = {"partition": {"scheme": "joint"}}


def test_joint_client_holds_the_union_and_held_out_rows_are_the_same(root):
    apart, joint = plan_of(root), plan_of(root, **JOINT)
    assert len(joint.manifest.clients) == joint.config.num_clients == joint.config.cohort_size == 1
    assert np.array_equal(joint.manifest.test, apart.manifest.test)
    assert np.array_equal(joint.manifest.validation, apart.manifest.validation)
    assert np.array_equal(joint.manifest.clients[0], np.sort(np.concatenate(apart.manifest.clients)))


def test_cohort_and_form_do_not_count_and_are_refused(root):
    for groups in ({"partition": {"scheme": "joint", "form": "sample"}}, {**JOINT, "cohort": {"dropout": 0.9}}):
        with pytest.raises(ConfigError, match=r"has no effect with partition\.scheme joint"):
            plan_of(root, rounds=1, **groups)


def test_joint_training_is_plain_sgd_over_the_union(root):
    plan = plan_of(root, rounds=2, local={"momentum": 0.9, "lr": 0.05}, **JOINT)
    server, naive = server_on(plan, root), Naive(plan)
    for index in range(2):
        server.run_round(index)
        naive.model, steps = naive.local(0, index)  # nothing is averaged; momentum starts anew each round
        assert steps == -(-len(plan.manifest.clients[0]) // 16)
    views = server.layout.views(server.state)
    for name, value in naive.model.named_parameters():
        assert torch.allclose(views[name], value, atol=1e-5), name


@pytest.mark.parametrize("methods", [["fedprox", "fedavgm"], ["fedvg"], [{"ccvr": {"epochs": 1}}]])
def test_joint_training_takes_any_methods(methods, root):
    server = run(plan_of(root, methods, rounds=1, **JOINT), root)
    assert server.federation.sizes.shape == (1,)
    assert bool(torch.isfinite(server.state).all())


def test_joint_is_a_row_of_a_sweep(root):
    raw = raw_config(root)
    raw["tune"] = {"param_space": {"method": {"grid_search": {"FedAvg": {}, "Joint": {"partition.scheme": "joint"}}}}}
    plans = {trial.values["method"]: check(trial.raw, "a test") for trial in grid(raw, "a test")}
    assert {name: len(plan.manifest.clients) for name, plan in plans.items()} == {"FedAvg": 12, "Joint": 1}
