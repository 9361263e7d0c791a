"""FedSOL's property checks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from methods.fedsol import distillation, fedsol, perturbation
from raysim.core.layout import layout_of
from raysim.core.method import Batch, Outputs
from raysim.training.model import BoundModel
from raysim.training.tasks import cross_entropy
from tests.support.federations import plan_of, run, steps_plan


def bound(norm=True):
    torch.manual_seed(0)
    middle = [nn.BatchNorm2d(3)] if norm else []
    module = nn.Sequential(nn.Conv2d(1, 3, 3), *middle, nn.ReLU(), nn.Flatten(), nn.Linear(48, 3))
    head = str(len(module) - 1)
    return BoundModel(module, layout_of(module, head=head, channels_last=True), head=head)


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return Batch(torch.randn(8, 1, 6, 6, generator=generator), torch.randint(3, (8,), generator=generator))


def client_of(model, start):
    size = model.layout.num_params
    return SimpleNamespace(model=model, layout=model.layout, start=start[:size], start_state=start)


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["none", "batch"])
def test_without_perturbation_it_is_fedavg(norm, root):
    groups = {"model": {"norm": norm}}
    digest = run(plan_of(root, **groups), root).params_sha256()
    assert run(plan_of(root, [{"fedsol": {"rho": 0}}], **groups), root).params_sha256() == digest


@pytest.mark.parametrize("form", ["fixed", "adaptive"])
def test_the_first_local_step_is_fedavgs(form, root):
    plain = run(steps_plan(root, steps=1), root, rounds=1).params_sha256()
    method = [{"fedsol": {"form": form}}]
    assert run(steps_plan(root, method, steps=1), root, rounds=1).params_sha256() == plain
    two = [run(steps_plan(root, m, steps=2), root, rounds=1).params_sha256() for m in ([], method)]
    assert two[0] != two[1]


def perturbed(model, uphill, moved, **options):
    return perturbation(model.layout, uphill, moved, **{"rho": 0.7, "form": "fixed"} | options)


def test_the_perturbation_has_length_rho_and_noise_is_left_alone():
    model = bound()
    uphill, moved = torch.randn_like(model.params), torch.randn_like(model.params)
    step = perturbed(model, uphill, moved)
    assert float(step.norm()) == pytest.approx(0.7, rel=1e-5)
    assert float(F.cosine_similarity(step, uphill, dim=0)) == pytest.approx(1, rel=1e-5)
    noise = 1e-9 * torch.randn_like(uphill) / len(uphill) ** 0.5
    assert not perturbed(model, noise, moved).any()
    assert not perturbed(model, uphill, torch.zeros_like(moved), form="adaptive").any()


def test_the_adaptive_form_matches_the_formula_per_tensor():
    model = bound()
    uphill, moved = torch.randn_like(model.params), torch.randn_like(model.params)
    step = perturbed(model, uphill, moved, form="adaptive")
    size = float(uphill.norm())
    for leaf in model.layout.params:
        u, far = model.layout.view(uphill, leaf), model.layout.view(moved, leaf).abs()
        want = u * far / far.pow(2).sum(0, keepdim=True).sqrt() * (0.7 / size)
        assert torch.allclose(model.layout.view(step, leaf), want, atol=1e-6), leaf.name


def test_distillation_is_the_kl_divergence():
    out, reference = torch.randn(4, 3), torch.randn(4, 3)
    p, q = ((v / 3).softmax(1) for v in (reference, out))
    want = (p * (p.log() - q.log())).sum() / 4
    assert torch.allclose(distillation(reference, 3.0)(Outputs(out, None), None), want)
    assert float(distillation(out, 3.0)(Outputs(out, None), None)) == pytest.approx(0, abs=1e-7)


def test_the_gradient_is_taken_elsewhere_without_moving_the_parameters():
    model = bound()
    start = model.state.clone()
    model.params.add_(0.05 * torch.randn_like(model.params))
    here, other = model.state.clone(), bound()
    other.load(here)
    own = batch()
    gradient = fedsol(rho=0.5).grads(model.gradient_function(cross_entropy), client_of(model, start))
    model.module.train()
    found = gradient(model.params, own).clone()
    size = model.layout.num_params
    assert torch.equal(model.state[:size], here[:size])
    # By hand: u at y, then the gradient at y + ε.
    other.module.train()
    reference = other.apply(start, own.inputs).logits
    uphill = other.gradient(distillation(reference, 3.0), here[:size], own)
    want = other.gradient(cross_entropy, here[:size] + 0.5 * uphill / uphill.norm(), own)
    assert torch.allclose(found, want, atol=1e-6)
    # Statistics moved once, by the pass at y.
    other.load(here)
    other.module.train()
    other.forward(own.inputs)
    assert torch.allclose(model.buffers, other.buffers)
    assert [int(v) for v in model.counters.values()] == [int(v) for v in other.counters.values()] == [1]
