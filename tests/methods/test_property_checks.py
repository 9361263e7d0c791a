"""Property checks of FedAvg, FedAvgM and FedProx, one test each."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from methods.fedavgm import fedavgm
from methods.fedprox import fedprox
from raysim.core.weights import normalised
from tests.support.federations import plan_of, run, server_on
from tests.twins.federation import Naive


def test_fedavg_stays_exactly_where_nobody_moved(root):
    plan = plan_of(root, ["tests.support.toys:stands_still"])
    start = server_on(plan, root).params_sha256()
    assert run(plan, root).params_sha256() == start


def test_fedavg_with_one_full_batch_step_is_a_step_on_the_pooled_data(root):
    plan = plan_of(root, local={"lr": 0.1, "epochs": 1, "batch_size": 2000}, cohort={"size": 12})
    server = run(plan, root, rounds=1)
    naive = Naive(plan)
    x, y = naive.batch(np.concatenate(plan.manifest.clients))
    grads = torch.autograd.grad(F.cross_entropy(naive.model(x), y), list(naive.model.parameters()))
    values = server.layout.views(server.state)
    for (name, before), grad in zip(naive.model.named_parameters(), grads, strict=True):
        assert torch.allclose(values[name], before - 0.1 * grad, atol=1e-6), name


def test_fedavg_with_one_participant_is_that_client(root):
    plan = plan_of(root, cohort={"size": 1})
    server, naive = server_on(plan, root), Naive(plan)
    client = int(server.run_round(0).clients["client"][0])
    model, _ = naive.local(client, 0)
    values = server.layout.views(server.state)
    for name, want in model.named_parameters():
        assert torch.allclose(values[name], want, atol=1e-6), name


def test_fedavg_with_equal_sizes_is_uniform_and_shares_do_not_depend_on_the_unit(root):
    groups = {"partition": {"scheme": "iid", "num_clients": 6}, "cohort": {"size": 6}}
    plan = plan_of(root, **groups)
    assert len(set(plan.manifest.sizes.tolist())) == 1
    assert run(plan, root).params_sha256() == run(plan_of(root, ["uniform"], **groups), root).params_sha256()
    sizes = torch.tensor([3.0, 5.0, 11.0], dtype=torch.float64)
    assert torch.equal(normalised(2 * sizes), normalised(sizes))


def steps_of(method, updates):
    """What the server adds in each round, for a sequence of updates."""
    state, steps = method.init(updates[0], None), []
    for update in updates:
        step, state = method.server_update(update, state, None)
        steps.append(step)
    return steps


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
def test_fedavgm_of_a_constant_update_is_a_geometric_sum(beta):
    update = torch.tensor([1.0, -2.0, 0.5])
    for t, step in enumerate(steps_of(fedavgm(beta=beta), [update] * 6), start=1):
        assert torch.allclose(step, (1 - beta**t) / (1 - beta) * update)


def test_fedavgm_first_steps_differ_by_form():
    update = torch.tensor([1.0, -2.0, 0.5])
    for form, factor in (("heavy_ball", 1.0), ("nesterov", 1.9), ("damped", 0.1)):
        assert torch.allclose(steps_of(fedavgm(beta=0.9, form=form), [update])[0], factor * update)


@pytest.mark.parametrize(("form", "nesterov"), [("heavy_ball", False), ("nesterov", True)])
def test_fedavgm_is_torchs_sgd_on_the_pseudo_gradient(form, nesterov):
    updates = list(torch.randn(5, 3, generator=torch.Generator().manual_seed(0)))
    params = torch.zeros(3)
    optimizer = torch.optim.SGD([params], lr=0.7, momentum=0.8, nesterov=nesterov)
    position = torch.zeros(3)
    for update, step in zip(updates, steps_of(fedavgm(beta=0.8, server_lr=0.7, form=form), updates), strict=True):
        params.grad = -update
        optimizer.step()
        position = position + step
        assert torch.allclose(position, params, atol=1e-6)


def test_damped_is_heavy_ball_with_a_smaller_server_lr():
    updates = list(torch.randn(5, 3, generator=torch.Generator().manual_seed(1)))
    damped = steps_of(fedavgm(beta=0.6, form="damped"), updates)
    heavy = steps_of(fedavgm(beta=0.6, server_lr=0.4), updates)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(damped, heavy, strict=True))


def test_fedprox_settles_where_the_regularised_quadratic_does():
    """f = (y - b)' A (y - b) / 2: y* = (A + mu I)^-1 (A b + mu s)."""
    a = torch.tensor([[2.0, 0.3, 0.0], [0.3, 1.0, 0.2], [0.0, 0.2, 3.0]])
    b, start, mu = torch.tensor([1.0, -1.0, 2.0]), torch.tensor([0.5, 0.0, -1.0]), 0.7
    gradient = fedprox(mu=mu).grads(lambda y, batch: a @ (y - b), SimpleNamespace(start=start))
    y = start.clone()
    for _ in range(300):
        y = y - 0.1 * gradient(y, None)
    want = torch.linalg.solve(a + mu * torch.eye(3), a @ b + mu * start)
    assert torch.allclose(y, want, atol=1e-5)
    assert not torch.allclose(y, b, atol=0.1)
