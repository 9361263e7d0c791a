"""bfloat16: forward and backward passes only; everything that is kept or summed stays float32."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from raysim.core.layout import layout_of
from raysim.core.method import Batch
from raysim.training.local import LocalSettings, local_step
from raysim.training.model import BoundModel
from raysim.training.tasks import cross_entropy
from tests.support.federations import lora_plan, plan_of, run
from tests.support.method_cases import ADAPTER_CASES, CNN_CASES

LOCAL = {"precision": "bfloat16"}


def small():
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(3, 8, 3, padding=1)
    return torch.nn.Sequential(
        conv, torch.nn.Tanh(), torch.nn.AvgPool2d(2), torch.nn.Flatten(), torch.nn.Linear(128, 4)
    )


def test_steps_are_those_of_autocast_on_the_plain_module():
    module = small()
    plain, batch = copy.deepcopy(module), Batch(torch.rand(16, 3, 8, 8), torch.arange(16) % 4)
    model = BoundModel(module, layout_of(module, head="4"), head="4", precision="bfloat16")
    step = local_step(model, cross_entropy, None, LocalSettings(lr=0.1), 0.1)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        step(batch)
        with torch.autocast("cpu", torch.bfloat16):
            logits = plain(batch.inputs)
        assert logits.dtype == torch.bfloat16
        optimizer.zero_grad()
        F.cross_entropy(logits.float(), batch.targets).backward()
        optimizer.step()
    for name, value in plain.named_parameters():
        assert torch.equal(value, model.layout.view(model.params, name)), name
    outputs = model.forward(batch.inputs)
    assert model.params.dtype == model.grad.dtype == model.loss.dtype == outputs.logits.dtype == torch.float32


#: Each has another way to its gradients or its reports. UniVarFL and RegMean magnify rounding: close pairs, singular Grams.
NAMES = ["fedavg", "scaffold", "fedvg-block", "flfa", "dfa", "moon", "fedsol", "fisher", "ccvr"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_method_runs_in_bfloat16_near_its_float32_run(name, root):
    start, single = (run(plan_of(root, CNN_CASES[name]), root, rounds=count).params for count in (0, 2))
    half = run(plan_of(root, CNN_CASES[name], local=LOCAL), root, rounds=2).params
    assert half.dtype == torch.float32
    # bfloat16 keeps 8 bits: each gradient is off by about 0.4 %; weights that come from gradients move further.
    assert 0 < float((half - single).norm() / (single - start).norm()) < 0.25


@pytest.mark.slow
def test_livar_with_adapters_runs_in_bfloat16_near_its_float32_run(root):
    start, single = (run(lora_plan(root, ADAPTER_CASES["livar"]), root, rounds=count).params for count in (0, 2))
    half = run(lora_plan(root, ADAPTER_CASES["livar"], local=LOCAL), root, rounds=2).params
    assert 0 < float((half - single).norm() / (single - start).norm()) < 0.25


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scaffold", "flfa", "regmean"])
def test_any_number_of_trainers_gives_the_same_bits_in_bfloat16(name, root, ray_pools):
    plan = plan_of(root, CNN_CASES[name], local=LOCAL)
    assert {run(plan, root, pool).params_sha256() for pool in ray_pools(plan)} == {run(plan, root).params_sha256()}
