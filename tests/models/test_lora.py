"""Adapters: what is trained, what travels, and that the frozen rest is the same everywhere and stays so."""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from raysim.base.errors import ConfigError
from raysim.core.layout import layout_of
from raysim.core.seeding import derive_seed, torch_generator
from raysim.models import LoraSpec, ModelSpec, build_model, build_skeleton
from raysim.models.lora import add_lora
from raysim.plan.build import model_spec
from raysim.training.model import BoundModel
from tests.support.federations import LORA_VIT, lora_plan, run, server_on
from tests.twins.federation import Naive, assert_close

SPEC = ModelSpec("vit", 10, (8, 8, 1), {"dim": 16, "depth": 2, "heads": 2, "patch": 4}, lora=LoraSpec(rank=4))


def trained(module):
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def test_vit_b16_with_rank_16_has_the_papers_lora_parameters():
    options = {"dim": 768, "depth": 12, "heads": 12, "patch": 16}
    module = build_skeleton(ModelSpec("vit", 100, (224, 224, 3), options, lora=LoraSpec(rank=16)))
    values = trained(module)
    adapters = [name for name in values if ".lora_" in name]
    assert sum(values[name].numel() for name in adapters) == 2_359_296
    assert len(adapters) == 2 * 48
    assert set(values) - set(adapters) == {"head.weight", "head.bias"}


def test_adapters_start_without_effect_and_the_base_is_untouched():
    module, plain = build_model(SPEC, seed=5), build_model(replace(SPEC, lora=None), seed=5)
    images = torch.rand(3, 1, 8, 8)
    assert torch.equal(module.eval()(images), plain.eval()(images))
    again = build_model(SPEC, seed=5)
    for (name, value), other in zip(module.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(value, other), name
    a = module.blocks[0].attn.qkv.lora_A["default"].weight
    assert a.abs().max() <= 1 / 4 + 1e-6  # Kaiming-uniform, a = sqrt(5): bound 1 / sqrt(d_in)
    assert a.std() > 0.1


def test_alpha_scales_the_product():
    module = build_model(replace(SPEC, lora=LoraSpec(rank=4, alpha=2)), seed=5)
    layer = module.blocks[0].mlp.fc1
    layer.lora_B["default"].weight.data.normal_()
    x = torch.randn(3, 16)
    product = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    want = layer.base_layer(x) + 0.5 * x @ product.T
    assert torch.allclose(layer(x), want, atol=1e-6)


def test_layout_holds_adapters_and_head_only(root):
    layout = lora_plan(root).layout
    assert {leaf.layer.rpartition(".lora_")[2] for leaf in layout.params[:-2]} == {"A.default", "B.default"}
    assert [leaf.name for leaf in layout.params if leaf.is_head] == ["head.weight", "head.bias"]
    assert layout.by_name["blocks.1.mlp.fc2.lora_A.default.weight"].block == "blocks.1"
    assert layout.blocks == ("blocks.0", "blocks.1", "head")
    assert layout.num_params == 2 * 4 * (64 + 32 + 80 + 80) + 10 * 17


def test_only_adapters_and_head_travel_and_are_kept(root):
    plan = lora_plan(root, cohort={"size": 5})
    server = server_on(plan, root)
    metrics = server.run_round(0).metrics
    want = 5 * 4 * plan.layout.num_params / 1e6
    assert metrics["comm/up_mb"] == pytest.approx(want)
    assert metrics["comm/down_mb"] == pytest.approx(want)
    snapshot = server.snapshot()
    assert snapshot.state.size == plan.layout.num_params
    assert not snapshot.methods


def test_frozen_weights_stay_as_built(root):
    plan = lora_plan(root)
    server = run(plan, root, rounds=2)
    module = server.pool._trainer.model.module
    built = build_model(SPEC, seed=plan.config.seed)
    frozen = {name: value for name, value in built.named_parameters() if not value.requires_grad}
    assert len(frozen) == len(list(built.parameters())) - len(plan.layout.params)
    for name, value in frozen.items():
        assert torch.equal(module.get_parameter(name), value), name
        assert module.get_parameter(name).grad is None


def test_a_round_is_torchs_adamw_with_clipping_on_adapters_and_head(root):
    plan = lora_plan(root, cohort={"size": 1}, local={"epochs": 2, "max_grad_norm": 0.5})
    server, naive = server_on(plan, root), Naive(plan, channels_last=False)
    record = server.run_round(0)
    client, steps = int(record.clients["client"][0]), int(record.clients["num_steps"][0])
    model = copy.deepcopy(naive.model)
    model.train()
    values = list(trained(model).values())
    optimizer = torch.optim.AdamW(values, lr=0.005, weight_decay=0.1)
    rows = plan.manifest.clients[client]
    generator = torch_generator(derive_seed(plan.config.seed, "batches", 0, client))
    done = 0
    for _ in range(2):
        order = torch.randperm(len(rows), generator=generator).numpy()
        for start in range(0, len(rows), 16):
            x, y = naive.batch(rows[order[start : start + 16]])
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            torch.nn.utils.clip_grad_norm_(values, 0.5)
            optimizer.step()
            done += 1
    assert done == steps
    views = server.layout.views(server.state)
    for name, value in trained(model).items():
        begun = naive.begun[name]  # AdamW divides by the gradient's own size: entries with hardly any take noisy steps
        assert_close(views[name] - begun, value.detach() - begun, 1e-2, name)


def test_leaves_can_be_stood_in_for_while_a_block_runs():
    module = build_model(SPEC, seed=5)
    layout = layout_of(module, head="head", trained=trained(module))
    model = BoundModel(module, layout, head="head")
    x, name = torch.rand(2, 1, 8, 8), "blocks.0.mlp.fc1.base_layer.weight"
    weight, plain = module.get_parameter(name), model.apply(model.params, x).logits
    with torch.no_grad():
        weight += 0.5  # what the adapters below add
        moved = model.apply(model.params, x).logits
        weight -= 0.5
    assert not torch.equal(moved, plain)
    layer = name.removesuffix(".base_layer.weight")
    dense = {
        f"{layer}.lora_A.default.weight": torch.eye(16),
        f"{layer}.lora_B.default.weight": torch.full((64, 16), 0.5),
    }
    with model.replaced(dense):
        assert torch.allclose(model.apply(model.params, x).logits, moved, atol=1e-6)
    assert torch.allclose(model.apply(model.params, x).logits, plain, atol=1e-6)
    model.grad.fill_(3.0)
    assert bool((module.get_parameter(f"{layer}.lora_A.default.weight").grad == 3).all())


def test_dropout_of_the_adapters_is_drawn_from_the_runs_seed(root):
    model = {"lora": {"rank": 4, "dropout": 0.5}}
    first, again = (run(lora_plan(root, model=model), root, rounds=1).params_sha256() for _ in range(2))
    assert first == again != run(lora_plan(root), root, rounds=1).params_sha256()


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"targets": ["attn.nothing"]}, ["model.lora.targets: no layer is called attn.nothing", "blocks.0.attn.qkv"]),
        (
            {"targets": ["head", "attn.qkv"]},
            ["model.lora.targets: head is the head, which is trained whole; remove the name"],
        ),
        ({"rank": 0}, ["model.lora.rank", "must be greater than or equal to 1"]),
        ({"ranks": 4}, ["model.lora.ranks", "unknown key", "Did you mean 'rank'"]),
    ],
)
def test_faults_are_named(lora, words, root):
    with pytest.raises(ConfigError) as caught:
        lora_plan(root, model={"lora": lora})
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_the_output_of_torchs_attention_which_is_never_called_is_no_layer_for_adapters():
    def net():
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        return nn.Sequential(OrderedDict(block=layer, head=nn.Linear(8, 3)))

    with pytest.raises(ConfigError, match=r"never calls the layer; name block\.self_attn instead"):
        add_lora(net(), LoraSpec(rank=2, targets=("out_proj", "linear1")), head="head")
    with pytest.raises(ConfigError) as caught:
        add_lora(net(), LoraSpec(rank=2, targets=("nothing",)), head="head")
    assert "block.self_attn" in str(caught.value)
    assert "out_proj" not in str(caught.value)
    module = add_lora(net(), LoraSpec(rank=2, targets=("self_attn", "linear1")), head="head")
    module(torch.randn(2, 5, 8)).sum().backward()
    adapters = {name: leaf.grad for name, leaf in module.named_parameters() if ".lora_" in name}
    assert adapters
    assert all(grad is not None for grad in adapters.values())


def test_model_spec_takes_the_defaults(root):
    plan = lora_plan(root, model={"lora": {}})
    spec = model_spec(plan.config, plan.info)
    assert spec.lora == LoraSpec()
    assert spec.options == {key: LORA_VIT[key] for key in ("dim", "depth", "heads", "patch")}
