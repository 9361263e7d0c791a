"""The engine against a naive federation written from the equations (tests/twins/federation.py)."""

from __future__ import annotations

import pytest
import torch

from raysim.plan.check import check
from tests.support.federations import plan_of, raw_config, run, server_on
from tests.support.method_cases import CNN_CASES
from tests.twins.federation import SHARE, Naive, assert_same_state, fedvg_weights

LOCALS = {"lr": 0.05, "epochs": 2, "lr_decay": 0.9, "momentum": 0.5, "weight_decay": 0.01}


#: Case -> options of its twin.
CASES = {
    "fedavg": {},
    "uniform": {"weights": "uniform"},
    "fedprox": {"mu": 0.3},
    "fedavgm": {"momentum": (0.7, "heavy_ball")},
    "fedavgm-nesterov": {"momentum": (0.7, "nesterov")},
    "fedavgm-damped": {"momentum": (0.7, "damped")},
}


@pytest.mark.essential
@pytest.mark.slow
@pytest.mark.parametrize("norm", ["none", "batch"])
@pytest.mark.parametrize("case", CASES)
def test_method_matches_reference_after_3_rounds(case, norm, root):
    # The prox of FedProx enters before weight decay in both, so SGD's details can stay on.
    plan = plan_of(root, CNN_CASES[case], model={"norm": norm}, local=LOCALS, cohort={"size": 5})
    naive = Naive(plan, **CASES[case])
    server = server_on(plan, root)
    for index in range(3):
        server.run_round(index)
        naive.round(index)
    assert_same_state(server, naive)


@pytest.mark.essential
@pytest.mark.slow
@pytest.mark.parametrize("bn", ["none", "batch"])
@pytest.mark.parametrize("granularity", ["model", "layer", "block"])
@pytest.mark.parametrize("norm", ["l1", "l2", "spectral", "update"])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_fedvg_weights_match_the_papers_equations(norm, granularity, mode, bn, root):
    if norm == "update" and mode == "eval":
        return  # no validation pass, so no mode
    mix = "average" if granularity == "layer" else "replace"
    method = {"fedvg": {"granularity": granularity, "norm": norm, "val_mode": mode, "mix": mix}}
    plan = plan_of(root, [method, "tests.support.toys:spy"], model={"norm": bn}, cohort={"size": 5})
    naive = Naive(plan, weights=fedvg_weights(granularity, norm, mode, mix))
    server = run(plan, root, rounds=1)
    naive.round(0)
    got = server.method_state["spy"]["weights"]
    # BatchNorm takes a bias in front of it away again, in training and in train mode.
    idle = ("conv1.bias", "conv2.bias") if bn == "batch" and (mode == "train" or norm == "update") else ()
    for name, want in naive.seen_weights[0].items():
        if granularity == "layer" and name in idle:
            continue  # by itself, and with a gradient of rounding alone
        assert torch.allclose(got[name], torch.tensor(want, dtype=torch.float64), rtol=SHARE, atol=0), name
        assert abs(float(got[name].sum()) - 1) < 1e-12
    assert_same_state(server, naive)


def test_fedprox_with_mu_0_and_fedavgm_with_beta_0_equal_fedavg(root):
    digest = run(plan_of(root), root).params_sha256()
    assert run(plan_of(root, [{"fedprox": {"mu": 0}}]), root).params_sha256() == digest
    assert run(plan_of(root, [{"fedavgm": {"beta": 0}}]), root).params_sha256() == digest


def test_fedprox_with_one_local_step_equals_fedavg(root):
    digests = []
    for methods in ([], [{"fedprox": {"mu": 0.7}}]):
        config = raw_config(root, methods)
        config["local"] = {"lr": 0.1, "batch_size": 16, "steps": 1}
        digests.append(run(check(config, "a test"), root).params_sha256())
    assert digests[0] == digests[1]
