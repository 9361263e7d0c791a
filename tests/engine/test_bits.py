"""The result does not depend on the machine room: serial, one, two and three trainers give the same bits."""

from __future__ import annotations

import functools

import pytest

from tests.support.federations import lora_plan, plan_of, run, server_on

BATCH_NORM = {"norm": "batch"}

METHODS = {
    "fedavg": [],
    "uniform": ["uniform"],
    "fedprox": [{"fedprox": {"mu": 0.1}}],
    "fedavgm": [{"fedavgm": {"beta": 0.5}}],
    "fedavgm-fl-bench": [{"fedavgm": {"as_in": "fl-bench"}}],
    "fedavgm-nesterov": [{"fedavgm": {"form": "nesterov"}}],
    "fedvg-model": ["fedvg"],
    "fedvg-layer": [{"fedvg": {"granularity": "layer", "norm": "l2", "val_mode": "eval"}}],
    "fedvg-block": [{"fedvg": {"granularity": "block", "mix": "average"}}],
    "fedvg-spectral": [{"fedvg": {"norm": "spectral", "granularity": "layer"}}],
    "fedvg-update": [{"fedvg": {"norm": "update"}}],
    "fedvg-every": [{"fedvg": {"every": 2, "granularity": "layer"}}],
    "fedvg-loss": ["fedvg_loss"],
    "fedprox-fedavgm-fedvg": ["fedprox", "fedavgm", {"fedvg": {"granularity": "block"}}],
    "fa": ["fa"],
    "dfa": ["dfa"],
    "flfa": [{"flfa": {"candidates": ["conv2", "fc1"]}}],
    "flfa-direct": [{"flfa": {"candidates": ["conv2", "fc1"], "feedback": "direct"}}],
    "flfa-pairwise": [{"flfa": {"num_layers": 2, "scale": "row", "agreement": "pairwise", "feedback": "resampled"}}],
    "univarfl": [{"univarfl": {"mu": 0.1}}],
    "moon": ["moon"],
    "moon-random": [{"moon": {"first": "random"}}],
    "fedsol": [{"fedsol": {"rho": 0.3}}],
    "fedalign": ["fedalign"],
    "fedrs": ["fedrs"],
    "fedlc": ["fedlc"],
    "fedacg": ["fedacg"],
    "freeze": ["freeze"],
    "fedrs-moon-fedsol-flfa": ["fedrs", "moon", "fedsol", {"flfa": {"candidates": ["conv2", "fc1"]}}],
    "scaffold": ["scaffold"],
    "scaffold-i": [{"scaffold": {"option": "i"}}],
    "scaffold-fl-bench": [{"scaffold": {"as_in": "fl-bench"}}],
    "scaffold-fedvg": ["scaffold", "fedvg"],
    "feddyn": ["feddyn"],
    "feddyn-clipped-fedvg": ["fedvg", {"feddyn": {"max_grad_norm": 0.5}}],
    "feddyn-fl-bench": [{"feddyn": {"as_in": "fl-bench"}}],
    "elastic": ["elastic"],
    "elastic-tensor-fedvg": [{"elastic": {"granularity": "tensor"}}, {"fedvg": {"granularity": "layer"}}],
    "elastic-fl-bench": [{"elastic": {"as_in": "fl-bench"}}],
    "fedadam": [{"fedadam": {"bias_correction": True}}],
    "fedyogi": ["fedyogi"],
    "fedadagrad": ["fedadagrad"],
    "fednova": ["fednova"],
    "fedvg-fednova-scaffold": ["fedvg", "fednova", "scaffold"],
    "toy-personal": ["tests.support.toys:personal_head"],
    "personal-body": [{"personal": {"layers": ["conv1", "fc1"]}}],
    "personal-norm": [{"personal": {"layers": "norm"}}],
    "personal-norm-fedavgm-fl-bench": [{"personal": {"layers": "norm"}}, {"fedavgm": {"as_in": "fl-bench"}}],
    "personal-scaffold": [{"personal": {"layers": ["fc1"]}}, "scaffold"],
    "fedproto": [{"fedproto": {"strength": 0.5}}],
    "ccvr": ["ccvr"],
    "ccvr-mammoth": [{"ccvr": {"as_in": "fed-mammoth", "epochs": 1}}],
    "fisher": [{"fisher": {"num_examples": 8}}],
    "fisher-mammoth": [{"fisher": {"as_in": "fed-mammoth"}}],
    "regmean": ["regmean"],
    "livar-head": [{"livar": {"components": "head"}}],
}

#: With adapters.
LORA_METHODS = {
    "fedavg": [],
    "livar": ["livar"],
    "livar-svd": [{"livar": {"next": "svd", "accumulate": "round"}}],
    "livar-svd-ccvr": [{"livar": {"next": "svd"}}, {"ccvr": {"epochs": 1}}],
    "livar-ccvr": ["livar", {"ccvr": {"as_in": "fed-mammoth", "epochs": 1}}],
    "livar-fedvg": [{"livar": {"components": "lora"}}, {"fedvg": {"leaves": "head"}}],
    "fedproto": ["fedproto"],
    "fisher": [{"fisher": {"kind": "empirical", "num_examples": 8}}],
    "regmean": ["regmean"],
    "ffa_lora": ["ffa_lora"],
    "flora": ["flora"],
    "personal-ffa_lora": ["personal", "ffa_lora"],
    "flora-fedprox-keep_factors": ["fedprox", "flora", "keep_factors"],
}


#: With BatchNorm there are buffers and counters as well; without it a few stand for all.
CASES = [(name, "batch") for name in METHODS] + [(name, "none") for name in ("fedavg", "fedvg-block", "fedprox")]


@functools.cache
def serial_digest(name, norm, root):
    return run(plan_of(root, METHODS[name], model={"norm": norm}), root).params_sha256()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "norm"), CASES)
def test_any_number_of_trainers_gives_the_same_bits(name, norm, root, ray_pools):
    plan = plan_of(root, METHODS[name], model={"norm": norm})
    pools = ray_pools(plan)[0 if norm == "none" else 1 :]  # one trainer on Ray is nearly the serial run
    assert {run(plan, root, pool).params_sha256() for pool in pools} == {serial_digest(name, norm, root)}
    assert serial_digest(name, norm, root) != run(plan, root, rounds=0).params_sha256()  # something was learned at all


@pytest.mark.slow
@pytest.mark.parametrize("name", LORA_METHODS)
def test_adapters_give_the_same_bits_and_scores_on_any_number_of_trainers(name, root, ray_pools):
    plan = lora_plan(root, LORA_METHODS[name], data={"test": 0.7}, rounds=2, cohort={"size": 5})

    def outcome(pool=None):
        server = server_on(plan, root, pool)
        records = [server.run_round(index) for index in range(plan.num_rounds)]
        return server.params_sha256(), [record.metrics["server/loss"] for record in records]

    expected = outcome()
    assert [outcome(pool) for pool in ray_pools(plan)[1:]] == [expected] * 2


def test_vision_transformer_gives_the_same_bits_too(root, ray_pools):
    part, local = {"alpha": 10.0, "num_clients": 24}, {"batch_size": 8, "epochs": 0.5}
    model = {"name": "vit", "dim": 16, "depth": 2}
    plan = plan_of(root, model=model, rounds=2, cohort={"size": 3}, partition=part, local=local)
    expected = run(plan, root).params_sha256()
    assert [run(plan, root, pool).params_sha256() for pool in ray_pools(plan)] == [expected] * 3


def test_stacked_clients_give_the_same_bits_too(root, ray_pools):
    part = {"alpha": 5.0, "num_clients": 80, "min_samples": 2}  # blocks of several clients, which are stacked
    local = {"batch_size": 4, "epochs": 1.5}
    plan = plan_of(root, model={"name": "mlp", "hidden": 8}, rounds=1, cohort={"size": 80}, partition=part, local=local)
    expected = run(plan, root).params_sha256()
    assert [run(plan, root, pool).params_sha256() for pool in ray_pools(plan)] == [expected] * 3


def test_different_methods_give_different_results(root):
    digests = {name: serial_digest(name, "batch", root) for name in METHODS}
    assert len(set(digests.values())) == len(digests), digests


def test_run_depends_on_the_seed(root):
    assert run(plan_of(root), root).params_sha256() != run(plan_of(root, seed=4), root).params_sha256()


def test_client_memory_and_method_state_are_the_same_on_ray(root, ray_pools):
    plan = plan_of(root, [*METHODS["scaffold-fedvg"], "feddyn"])
    expected = run(plan, root)
    for pool in ray_pools(plan):
        server = run(plan, root, pool)
        assert (server.method_state["scaffold"]["control"] == expected.method_state["scaffold"]["control"]).all()
        clients = expected.changed_clients()
        expected._changed = set(clients)
        assert server.changed_clients() == clients
        for client in clients:
            mine, theirs = server.client_memory(client), expected.client_memory(client)
            assert (mine["scaffold"]["control"] == theirs["scaffold"]["control"]).all()
            assert (mine["feddyn"]["h"] == theirs["feddyn"]["h"]).all()
