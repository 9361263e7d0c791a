"""model.safetensors of a run: what the server ended with, under the module's names, for `model.pretrained` of another."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from raysim.base.errors import ConfigError
from raysim.models import build_model
from raysim.plan.build import model_spec
from raysim.running.runner import execute
from tests.support.federations import LORA_VIT, lora_plan, plan_of, server_on

PLAIN_VIT = {key: value for key, value in LORA_VIT.items() if key != "lora"}
FEW = {"rounds": 1, "cohort": {"size": 2}}


def finished(plan):
    """The model file of a plan that is run to its end."""
    execute(plan, on_start=lambda *_: None, on_round=lambda _: None)
    return f"{plan.config.storage}/{plan.config.name}/model.safetensors"


def built(plan, classes=10, seed=None):
    spec = replace(model_spec(plan.config, plan.info), num_classes=classes)
    return build_model(spec, seed=plan.config.seed if seed is None else seed)


def scored(module, images):
    with torch.no_grad():
        return module.eval()(images)


@pytest.mark.slow
@pytest.mark.parametrize("model", [{"name": "cnn", "width": 4, "hidden": 16, "norm": "batch"}, PLAIN_VIT])
def test_file_holds_the_global_model_and_starts_another_run(model, root, tmp_path):
    plan = plan_of(root, model=model, storage=str(tmp_path), name="first", **FEW)
    server = server_on(plan, root)
    server.run_round(0)
    path = finished(plan)
    values = load_file(path)
    module = built(plan)
    assert set(values) == set(module.state_dict())
    for name, value in server.layout.views(server.state).items():
        assert torch.equal(values[name], value), name
    counts = [name for name in values if name.endswith("num_batches_tracked")]
    assert {name: int(values[name]) for name in counts} == server.counters
    second = plan_of(root, model={**model, "pretrained": path}, storage=str(tmp_path), name="second", **FEW)
    again = server_on(second, root)
    assert torch.equal(again.state, server.state)


def test_file_of_a_run_without_adapters_is_the_backbone_of_one_with_adapters(root, tmp_path):
    path = finished(plan_of(root, model=PLAIN_VIT, storage=str(tmp_path), name="first", **FEW))
    values = load_file(path)
    plan = lora_plan(root, model={"pretrained": path})
    module = built(plan)
    state = module.state_dict()
    bases = {name.replace(".base_layer", ""): value for name, value in state.items() if ".lora_" not in name}
    assert set(bases) == set(values)
    assert all(torch.equal(bases[name], value) for name, value in values.items())
    assert not module.get_parameter("blocks.0.attn.qkv.base_layer.weight").requires_grad
    fewer = built(plan, classes=3).state_dict()  # another task: its head stays as drawn
    fresh = built(lora_plan(root), classes=3).state_dict()
    assert torch.equal(fewer["head.weight"], fresh["head.weight"])
    assert torch.equal(fewer["blocks.1.mlp.fc2.base_layer.weight"], values["blocks.1.mlp.fc2.weight"])


@pytest.mark.slow
def test_file_of_a_run_with_adapters_holds_base_and_adapters_and_goes_on(root, tmp_path):
    methods = [{"livar": {"evaluate": "factors"}}]
    plan = lora_plan(root, methods, storage=str(tmp_path), name="first", **FEW)
    server = server_on(plan, root)
    server.run_round(0)
    path = finished(plan)
    values = load_file(path)
    for name, value in server.layout.views(server.state).items():
        assert torch.equal(values[name], value), name
    for name, value in built(plan).state_dict().items():
        if name not in server.layout.by_name:
            assert torch.equal(values[name], value), name
    again = built(lora_plan(root, model={"pretrained": path}), seed=99)
    module = built(plan)
    module.load_state_dict(values)
    images = torch.rand(3, 1, 8, 8)
    assert torch.equal(scored(again, images), scored(module, images))
    with pytest.raises(ConfigError, match=r"qkv.weight is missing.*model\.lora"):
        plan_of(root, model={**PLAIN_VIT, "pretrained": path})
