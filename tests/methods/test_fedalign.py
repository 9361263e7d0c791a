"""FedAlign's spectral norms and slim blocks by hand, and what it refuses."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from methods.fedalign import block_of, check_slim, slim, slim_pass, spectral_norms
from raysim.base.errors import ConfigError, MethodError
from tests.support.federations import lora_plan, plan_of, run


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_spectral_norms_are_those_of_x_times_y():
    x, y = draw(5, 4), draw(5, 3, seed=1)
    assert torch.allclose(spectral_norms(x, y), x.norm(dim=1) * y.norm(dim=1))  # one pixel: an outer product
    x, y = draw(5, 4, 6, 6).abs(), draw(5, 3, 3, 3, seed=1).abs()  # as after ReLU: one direction stands out
    pooled = x.reshape(5, 4, 3, 2, 3, 2).mean(dim=(3, 5))
    want = [torch.linalg.matrix_norm(a.flatten(1) @ b.flatten(1).T / 9, 2) for a, b in zip(pooled, y, strict=True)]
    assert torch.allclose(spectral_norms(x, y), torch.stack(want), rtol=1e-6)


def test_positions_of_a_sequence_count_as_pixels():
    x, y = draw(5, 6, 4), draw(5, 6, 3, seed=1)
    as_images = (side.transpose(1, 2)[..., None] for side in (x, y))
    assert torch.equal(spectral_norms(x, y), spectral_norms(*as_images))


def test_spectral_norms_have_finite_gradients_where_features_are_zero():
    x = torch.zeros(2, 4)
    y = torch.zeros(2, 3, requires_grad=True)
    spectral_norms(x, y).sum().backward()
    assert bool(torch.isfinite(y.grad).all())


def test_a_slim_pass_uses_the_first_channels_and_keeps_no_statistics():
    torch.manual_seed(0)
    block = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1, bias=False)
    ).double()
    x = draw(6, 2, 5, 5)
    small = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1, bias=False)
    ).double()
    with torch.no_grad():
        small[0].weight.copy_(block[0].weight[:4, :2])
        small[0].bias.copy_(block[0].bias[:4])
        small[3].weight.copy_(block[3].weight[:2, :4])
    before = copy.deepcopy(block.state_dict())
    assert torch.allclose(slim_pass(block, x, 0.5), small(x))
    assert all(torch.equal(value, before[name]) for name, value in block.state_dict().items())
    assert (slim(8, 0.25), slim(2, 0.1), slim(6, 0.25)) == (2, 1, 2)


def test_only_the_first_channels_of_the_block_learn_from_the_term():
    torch.manual_seed(0)
    block = nn.Linear(8, 8)
    x = torch.rand(5, 8)
    gap = (spectral_norms(x[:, :2], slim_pass(block, x[:, :2], 0.25)) - 1).square().mean()
    gap.backward()
    assert bool(block.weight.grad[:2, :2].any())
    assert not block.weight.grad[2:].any()
    assert not block.weight.grad[:, 2:].any()


def test_without_strength_it_is_fedavg(root):
    assert (
        run(plan_of(root, [{"fedalign": {"mu": 0}}]), root, rounds=1).params_sha256()
        == run(plan_of(root), root, rounds=1).params_sha256()
    )


def test_blocks_are_stages_residual_blocks_or_the_projector(root):
    def chosen(model, wanted=None):
        return block_of(plan_of(root, model=model).layout, wanted)

    resnet = {"name": "resnet18", "stem": "small"}
    assert chosen({"name": "cnn"}) == "fc1"
    assert chosen(resnet) == "layer4.1"
    assert chosen(resnet, "layer4") == "layer4"
    assert chosen({**resnet, "projector_width": 8}) == "avgpool.2"
    with pytest.raises(ValueError, match=r"no block 'layer9' .*layer4\.1"):
        chosen(resnet, "layer9")


def test_faults_name_the_remedy(root):
    with pytest.raises(ConfigError, match="no block 'conv9'"):
        plan_of(root, [{"fedalign": {"block": "conv9"}}])
    with pytest.raises(ConfigError, match="both decide backward"):
        plan_of(root, ["flfa", "fedalign"])
    grouped = nn.Sequential(nn.Conv2d(4, 12, 3), nn.GroupNorm(6, 12))
    with pytest.raises(MethodError, match="3 of 12 channels do not divide into 6 groups"):
        check_slim(grouped, "block", 0.25)
    check_slim(grouped, "block", 0.5)
    with pytest.raises(Exception, match="without first channels"):
        run(lora_plan(root, ["fedalign"]), root, rounds=1)
