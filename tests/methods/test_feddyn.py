"""FedDyn: property checks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from methods.feddyn import feddyn
from tests.support.federations import plan_of, run, server_on
from tests.twins.by_hand import Quadratics, unlike_clients


def h_of(server):
    """Client id -> its h_k."""
    return {c: torch.from_numpy(server.client_memory(c)["feddyn"]["h"].copy()) for c in server._memories}


def test_first_local_step_is_a_plain_sgd_step():
    generator = torch.Generator().manual_seed(0)
    start, raw = torch.randn(3, generator=generator), torch.randn(3, generator=generator)
    client = SimpleNamespace(start=start, memory={})
    gradient = feddyn(alpha=0.3).grads(lambda y, batch: raw.clone(), client)
    assert torch.equal(gradient(start.clone(), None), raw)
    assert not torch.equal(gradient(start + 1, None), raw)


@pytest.mark.parametrize("alpha", [0.0, 0.1, 1.0])
def test_round_1_with_everyone_doubles_the_mean_update(alpha, root):
    plan = plan_of(root, [{"feddyn": {"alpha": alpha}}], cohort={"size": 12})
    server = server_on(plan, root)
    before = server.params.clone()
    server.run_round(0)
    mean = sum(h_of(server).values()) / 12  # after one round h_k is the update
    assert torch.allclose(server.params, before + 2 * mean, atol=1e-6)
    assert float(mean.norm()) > 1e-2


@pytest.mark.parametrize("size", [5, 12])
def test_server_h_is_the_mean_of_all_clients_h(size, root):
    server = server_on(plan_of(root, ["feddyn"], cohort={"size": size}), root)
    for index in range(3):
        server.run_round(index)
        mean = sum(h_of(server).values()) / 12
        assert torch.allclose(server.method_state["feddyn"]["h"], mean, atol=1e-6)
        assert float(mean.norm()) > 1e-2


def test_paper_form_gives_the_same_rounds():
    """Acar et al., Algorithm 1: ∇L_k and h in gradient units, w+ = mean_S y_k - h / alpha."""
    clients, alpha, lr, steps = unlike_clients(5), 0.4, 0.05, 6
    federation = Quadratics(feddyn(alpha=alpha), **clients, steps=steps, lr=lr)
    w, h = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    linear = torch.zeros(5, 3, dtype=torch.float64)
    for cohort in ([0, 1, 2, 3, 4], [1, 3], [0, 4], [1, 2]):
        federation.round(cohort)
        finals = []
        for k in cohort:
            y = w.clone()
            for _ in range(steps):
                y = y - lr * (federation.gradient(k, y) - linear[k] + alpha * (y - w))
            linear[k] = linear[k] - alpha * (y - w)
            finals.append(y)
        h = h - alpha / 5 * sum(y - w for y in finals)
        w = sum(finals) / len(cohort) - h / alpha
        assert torch.allclose(federation.w, w, atol=1e-6)


@pytest.mark.parametrize("limit", [None, 1e6])
def test_gradient_form_is_a_linear_term_and_weight_decay(limit):
    """The authors' code: <h_k - s, y> in the loss and alpha as weight decay of torch.optim.SGD."""
    alpha, generator = 0.4, torch.Generator().manual_seed(0)
    start, h, b = torch.randn(3, 3, generator=generator, dtype=torch.float64)
    client = SimpleNamespace(start=start, memory={"h": h})
    gradient = feddyn(alpha=alpha, max_grad_norm=limit).grads(lambda y, batch: y - b, client)
    y, twin = start.clone(), start.clone().requires_grad_()
    optimizer = torch.optim.SGD([twin], lr=0.1, weight_decay=alpha)
    for _ in range(20):
        y = y - 0.1 * gradient(y, None)
        optimizer.zero_grad()
        (0.5 * (twin - b).pow(2).sum() + alpha * ((h - start) * twin).sum()).backward()
        optimizer.step()
    assert torch.allclose(y, twin.detach(), atol=1e-9)


def test_clipping_takes_the_loss_and_the_linear_part_but_not_alpha_y():
    start, h = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 3.0, 0.0])
    gradient = feddyn(alpha=1.0, max_grad_norm=1.0).grads(
        lambda y, batch: torch.tensor([1.0, 1.0, 0.0]), SimpleNamespace(start=start, memory={"h": h})
    )
    # g + (h - s) = (0, 4, 0) -> (0, 1, 0), then + y
    assert torch.allclose(gradient(torch.tensor([0.0, 0.0, 5.0]), None), torch.tensor([0.0, 1.0, 5.0]), atol=1e-5)


def test_exact_local_solution_has_h_opposite_to_its_gradient():
    """Stationarity: ∇f_k(y_k) + alpha (y_k - s + h_k) = 0 and h_k+ = h_k + y_k - s."""
    alpha = 0.4
    federation = Quadratics(feddyn(alpha=alpha), **unlike_clients(4), steps=400, lr=0.1)
    for cohort in ([0, 1, 2, 3], [0, 2], [1, 2]):
        start = federation.w.clone()
        federation.round(cohort)
        for k, update in zip(cohort, federation.updates, strict=True):
            wanted = -federation.gradient(k, start + update)
            assert torch.allclose(alpha * federation.memory[k]["h"], wanted, atol=1e-6)
            assert float(wanted.norm()) > 1e-2


def test_alpha_0_trains_like_sgd():
    federation = Quadratics(feddyn(alpha=0.0), **unlike_clients(4), steps=7)
    for _ in range(3):
        start = federation.w.clone()
        federation.round()
        for k, update in enumerate(federation.updates):
            y = start.clone()
            for _ in range(7):
                y = y - 0.1 * federation.gradient(k, y)
            assert torch.equal(start + update, start + (y - start))


def test_without_the_quadratic_term_clients_run_away():
    """A toy: FL-bench's rule lets ||y|| grow where the right one holds it."""
    flat = {"curvatures": [0.01 * torch.eye(3, dtype=torch.float64)], "centres": [torch.ones(3, dtype=torch.float64)]}
    norms = []
    for as_in in (None, "fl-bench"):
        federation = Quadratics(feddyn(alpha=0.1, as_in=as_in), **flat, steps=200, lr=0.1)
        federation.w = torch.full((3,), 2.0, dtype=torch.float64)
        federation.round()
        norms.append(float((2 + federation.updates[0]).norm()))
    assert norms[0] < 2 * 3**0.5 < norms[1] / 2


def test_personal_leaves_have_no_h(root):
    server = run(plan_of(root, ["tests.support.toys:personal_head", "feddyn"]), root)
    for h in h_of(server).values():
        values = server.layout.views(h)
        assert float(values["fc2.weight"].norm()) == 0 < float(values["fc1.weight"].norm())
