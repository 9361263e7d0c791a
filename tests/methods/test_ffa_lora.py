"""FFA-LoRA: one frozen A makes the average of products the product of averages; a naive twin; what travels."""

from __future__ import annotations

import pytest
import torch

from raysim.base.errors import ConfigError
from raysim.models import build_model
from tests.support.federations import lora_plan, plan_of, run, server_on
from tests.twins.adapters import NaiveAdapters
from tests.twins.federation import assert_close

FEW = {"data": {"test": 0.7}, "cohort": {"size": 5}}
#: Of what a run with AdamW moved, see tests/methods/livar/test_livar.py.
ADAMW_SHARE = 1e-2


def initial_model(plan):
    return build_model(plan.spec, seed=plan.config.seed)


def test_ffa_lora_matches_a_naive_federation_with_frozen_a(root):
    plan = lora_plan(root, ["ffa_lora"], **FEW)
    server, naive = server_on(plan, root), NaiveAdapters(plan, frozen=".lora_A.")
    for index in range(2):
        record = server.run_round(index)
        naive.round(index)
    values = server.layout.views(server.state)
    trained = {name: p.detach() for name, p in naive.model.named_parameters() if p.requires_grad}
    assert set(values) == set(trained)
    for name, want in trained.items():
        assert_close(values[name] - naive.begun[name], want - naive.begun[name], ADAMW_SHARE, name)
    assert record.metrics["server/loss"] == pytest.approx(naive.loss(), abs=2e-5)


@pytest.mark.slow
def test_the_average_of_products_is_the_product_of_averages(root):
    """With FFA-LoRA for every layer; with FedAvg of both factors for none."""
    for methods, frozen in ((["ffa_lora"], ".lora_A."), ([], "nothing")):
        plan = lora_plan(root, methods, local={"lr": 0.02}, **FEW)
        naive = NaiveAdapters(plan, frozen=frozen)
        naive.round(0)
        server = run(plan, root, rounds=1)
        values = {name: p.detach() for name, p in initial_model(plan).named_parameters()}
        values |= server.layout.views(server.state)
        for layer in naive.layers:
            want = naive.mean_product(layer)
            got = values[f"{layer}.lora_B.default.weight"].double() @ values[f"{layer}.lora_A.default.weight"].double()
            apart = float((got - want).norm() / want.norm())
            assert (apart < 1e-4) == (frozen != "nothing"), (layer, apart)


def test_a_keeps_the_initial_value_of_the_seed_everywhere(root):
    plan = lora_plan(root, ["ffa_lora"], **FEW)
    server = run(plan, root)
    module = server.pool._trainer.model.module
    for name, value in initial_model(plan).named_parameters():
        if ".lora_A." in name:
            assert torch.equal(module.get_parameter(name), value), name
            assert name not in server.layout.by_name
    other = initial_model(lora_plan(root, ["ffa_lora"], seed=8, **FEW))
    assert not torch.equal(
        other.blocks[0].attn.qkv.lora_A.default.weight, module.blocks[0].attn.qkv.lora_A.default.weight
    )


def test_a_does_not_travel(root):
    sizes = [
        server_on(lora_plan(root, methods, **FEW), root).run_round(0).metrics["comm/up_mb"]
        for methods in ([], ["ffa_lora"])
    ]
    frozen = 2 * 4 * (16 + 16 + 16 + 64)  # blocks, rank, inputs of the four layers
    assert sizes[0] - sizes[1] == pytest.approx(5 * 4 * frozen / 1e6)


@pytest.mark.parametrize(
    "methods", [["ffa_lora", "fedprox", "fedavgm"], ["ffa_lora", "fisher"], ["freeze", "ffa_lora"]]
)
def test_what_runs_with_ffa_lora(methods, root):
    lora_plan(root, methods)


@pytest.mark.parametrize("other", ["livar", "keep_factors", "flora"])
def test_what_needs_both_factors_is_refused_beside_it(other, root):
    for methods in (["ffa_lora", other], [other, "ffa_lora"]):
        with pytest.raises(ConfigError, match=f"{other} needs lora-factors: drop the method that freezes A or B"):
            lora_plan(root, methods)


def test_model_without_adapters_is_refused(root):
    with pytest.raises(ConfigError, match=r"ffa_lora needs lora: set model\.lora"):
        plan_of(root, ["ffa_lora"])
