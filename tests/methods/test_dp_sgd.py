"""Differentially private local steps: the gradient, the epsilon, and what may run beside it."""

from __future__ import annotations

import math
from types import SimpleNamespace

import dp_accounting
import numpy as np
import pytest
import torch
from torch import nn

from methods.dp_sgd import dp_sgd
from raysim.base.errors import ConfigError
from raysim.core.layout import layout_of
from raysim.core.method import Batch
from raysim.core.seeding import torch_generator
from raysim.training.model import BoundModel
from tests.support.federations import plan_of, run, server_on


def noised(module, batch, **options):
    """[num_params]: the gradient of a batch as the method makes it."""
    layout = layout_of(module, head="2")
    model = BoundModel(module, layout, head="2")
    gradient = model.gradient_function(lambda outputs, part: nn.functional.cross_entropy(outputs.logits, part.targets))
    client = SimpleNamespace(generator=torch_generator(3))
    model.load(torch.cat([p.detach().reshape(-1) for p in module.parameters()]))
    return dp_sgd(**options).grads(gradient, client)(model.params, batch)


def drawn_batch():
    generator = torch_generator(0)
    return Batch(torch.randn(6, 4, generator=generator) * 2, torch.randint(3, (6,), generator=generator))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


@pytest.mark.parametrize("clip", [2.0, 1e6])
def test_gradient_is_the_mean_of_clipped_gradients_of_one_example(clip):
    """Abadi et al. 2016, algorithm 1, with loops."""
    module, batch = network(), drawn_batch()
    total, norms = 0.0, []
    for x, y in zip(batch.inputs, batch.targets, strict=True):
        loss = -torch.log_softmax(module(x), dim=0)[y]
        flat = np.concatenate(
            [g.double().numpy().ravel() for g in torch.autograd.grad(loss, list(module.parameters()))]
        )
        norms.append(np.sqrt((flat**2).sum()))
        total = total + flat / max(1.0, norms[-1] / clip)
    assert min(norms) < 2 < max(norms)
    np.testing.assert_allclose(noised(network(), batch, clip=clip, noise=0.0), total / 6, rtol=1e-5, atol=1e-7)


def test_noise_has_the_size_that_the_options_say():
    wide = nn.Sequential(nn.Linear(4, 20_000), nn.Tanh(), nn.Linear(20_000, 3))
    loud, silent = (noised(wide, drawn_batch(), clip=0.5, noise=noise) for noise in (3.0, 0.0))
    draws = (loud - silent) * 6
    assert float(draws.std()) == pytest.approx(1.5, rel=0.02)
    assert abs(float(draws.mean())) < 0.02


def test_without_noise_and_clipping_the_run_is_fedavg(root):
    """But for the order in which gradients are added up."""
    plain, private = (
        run(plan_of(root, methods), root, rounds=2) for methods in ([], [{"dp_sgd": {"clip": 1e9, "noise": 0}}])
    )
    torch.testing.assert_close(private.params, plain.params, rtol=1e-4, atol=1e-6)
    assert math.isinf(private.run_round(2).metrics["dp_sgd/epsilon"])


def test_epsilon_is_that_of_the_client_with_the_most_of_poisson_steps(root):
    server = server_on(plan_of(root, [{"dp_sgd": {"noise": 1.5}}], cohort={"size": 5}), root)
    for index in range(2):
        record = server.run_round(index)
    batch, epsilons = server.phase_of(0)[1].settings.batch_size, []
    for client in record.clients["client"]:
        accountant = dp_accounting.rdp.RdpAccountant()
        share = min(1.0, batch / server.federation.sizes[client])
        steps = server.client_memory(int(client))["dp_sgd"]["num_steps"]
        accountant.compose(dp_accounting.PoissonSampledDpEvent(share, dp_accounting.GaussianDpEvent(1.5)), int(steps))
        epsilons.append(accountant.get_epsilon(1e-5))
    assert max(epsilons) <= record.metrics["dp_sgd/epsilon"] <= 1.05 * max(epsilons)


@pytest.mark.parametrize("other", ["moon", "univarfl", "fedsol", "fisher", "fedproto"])
def test_methods_that_read_examples_without_noise_are_refused(root, other):
    with pytest.raises(ConfigError, match=f"{other} cannot be combined with dp_sgd because of its"):
        plan_of(root, ["dp_sgd", other])


@pytest.mark.parametrize("other", ["fedprox", "scaffold", "fedrs", "fedvg", "krum", "sign_guard", "top_k", "fedadam"])
def test_post_processing_and_losses_of_one_example_may_run_beside_it(root, other):
    assert plan_of(root, ["dp_sgd", other]).methods


def test_shared_buffers_are_refused(root):
    with pytest.raises(ConfigError, match=r"dp_sgd: .* would be averaged without noise"):
        plan_of(root, ["dp_sgd"], model={"norm": "batch"})
