"""FedNova: property checks, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from methods.fednova import effective_steps, fednova
from raysim.base.errors import ConfigError, MethodError
from raysim.core.method import Method
from raysim.core.weights import RightMap
from tests.support.federations import plan_of, run, server_on
from tests.twins.by_hand import LAYOUT, LEAF, Quadratics, unlike_clients


def test_equal_steps_make_it_fedavg(root):
    groups = {"partition": {"scheme": "iid", "num_clients": 7}, "cohort": {"size": 7}, "local": {"momentum": 0.5}}
    nova, plain = (run(plan_of(root, methods, **groups), root) for methods in (["fednova"], []))
    assert torch.allclose(nova.params, plain.params, atol=1e-6)
    unequal = {"cohort": {"size": 7}}
    nova, plain = (run(plan_of(root, methods, **unequal), root) for methods in (["fednova"], []))
    assert not torch.allclose(nova.params, plain.params, atol=1e-3)


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("steps", [0, 1, 6, 50])
def test_effective_steps_are_the_closed_form_and_the_sum(steps, rho):
    closed = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
    summed = sum((1 - rho**j) / (1 - rho) for j in range(1, steps + 1))
    assert effective_steps(steps, momentum=rho) == pytest.approx(closed)
    assert effective_steps(steps, momentum=rho) == pytest.approx(summed)


def test_effective_steps_with_a_pull_are_the_papers_recursion_and_what_sgd_does():
    a = 0.0
    for _ in range(7):
        a = a * (1 - 0.1 * 0.5) + 1
    assert effective_steps(7, shrink=0.1 * 0.5) == pytest.approx(a)
    for rho in (0.0, 0.8):  # a gradient of one plus mu (y - s), through torch.optim.SGD
        y = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.SGD([y], lr=0.1, momentum=rho)
        for _ in range(7):
            optimizer.zero_grad()
            (y + 0.25 * y**2).sum().backward()
            optimizer.step()
        assert effective_steps(7, momentum=rho, shrink=0.1 * 0.5) == pytest.approx(-float(y.detach()) / 0.1)


@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_identical_clients_keep_fedavgs_direction_at_the_mean_number_of_steps(momentum):
    """One gradient that never changes: w moves by -lr tau_eff g."""
    flat = {
        "curvatures": [1e-12 * torch.eye(3, dtype=torch.float64)] * 3,
        "centres": [1e12 * torch.ones(3).double()] * 3,
    }
    steps, sizes = [1, 4, 10], [5, 3, 2]
    nova, plain = (
        Quadratics(method, **flat, steps=steps, sizes=sizes, lr=0.1, momentum=momentum)
        for method in (fednova(), Method("fedavg"))
    )
    nova.round()
    plain.round()
    tau_eff = sum(n / 10 * effective_steps(k, momentum=momentum) for n, k in zip(sizes, steps, strict=True))
    assert torch.allclose(nova.w, torch.full((3,), 0.1 * tau_eff, dtype=torch.float64), rtol=1e-9)
    assert torch.allclose(nova.w, plain.w, rtol=1e-9)  # identical clients: the length is FedAvg's as well


def fixed_point(federation):
    """Where a round leads back to: rounds of quadratic clients are affine, w+ = M w + c."""

    def after(w):
        federation.w = w
        federation.round()
        return federation.w

    c = after(torch.zeros(3, dtype=torch.float64))
    unit = torch.eye(3, dtype=torch.float64)
    m = torch.stack([after(column) - c for column in unit], dim=1)
    return torch.linalg.solve(unit - m, c)


def test_fixed_point_is_the_weighted_optimum_which_fedavg_misses():
    clients, sizes = unlike_clients(3), [5, 3, 2]
    distances = []
    for method in (fednova(), Method("fedavg")):
        federation = Quadratics(method, **clients, steps=[1, 5, 20], sizes=sizes, lr=1e-4)
        distances.append(float((fixed_point(federation) - federation.optimum([0.5, 0.3, 0.2])).norm()))
    assert distances[0] < 2e-3
    assert distances[1] > 0.2


def weighed(weights, steps, *, mu=0.0, effective=None):
    effective = [effective_steps(k) for k in steps] if effective is None else effective
    server = SimpleNamespace(
        layout=LAYOUT,
        num_steps=torch.tensor(steps),
        report={"effective_steps": torch.tensor(effective, dtype=torch.float64)},
        log=lambda *_: None,
    )
    return fednova(mu=mu).weigh(weights, server)


def test_weights_by_hand():
    share = torch.tensor([0.5, 0.25, 0.25, 0.0], dtype=torch.float64)
    got = weighed({LEAF.name: share, "running_mean": share}, [2, 4, 8, 0])
    # tau_eff = 1 + 1 + 2 = 4
    assert got[LEAF.name].tolist() == [1.0, 0.25, 0.125, 0.0]
    assert got["running_mean"] is share
    # with a pull tau_eff counts steps
    got = weighed({LEAF.name: share}, [2, 4, 8, 0], mu=0.1, effective=[1, 2, 4, 0])
    assert got[LEAF.name].tolist() == [2.0, 0.5, 0.25, 0.0]
    # one weight a row: each row has its own tau_eff, 3 and 2.5
    rows = torch.tensor([[0.5, 0.75], [0.5, 0.25]], dtype=torch.float64)
    assert weighed({LEAF.name: rows}, [2, 4])[LEAF.name].tolist() == [[0.75, 0.9375], [0.375, 0.15625]]


def test_linear_maps_are_refused(root):
    with pytest.raises(MethodError, match="weight is a linear map"):
        weighed({LEAF.name: RightMap(torch.eye(3).double().repeat(2, 1, 1))}, [1, 2])
    with pytest.raises(MethodError, match=r"fednova cannot normalise fc2\.weight"):
        run(plan_of(root, ["tests.support.toys:regmean", "fednova"]), root, rounds=1)


def test_order_with_fedvg_and_the_client_optimiser_are_checked(root):
    plan_of(root, ["fedvg", "fednova"])
    plan_of(root, ["fednova"], local={"momentum": 0.9})
    for methods, local, words in (
        (["fednova", "fedvg"], {}, "put fedvg before fednova"),
        (["fednova"], {"optimizer": "adamw"}, "fednova needs sgd: set local.optimizer to sgd"),
    ):
        with pytest.raises(ConfigError, match=words):
            plan_of(root, methods, local=local)


def test_buffers_keep_their_weights(root):
    plan = plan_of(root, ["fednova", "tests.support.toys:spy"], model={"norm": "batch"})
    server = server_on(plan, root)
    server.run_round(0)
    weights = server.method_state["spy"]["weights"]
    assert float(weights["norm1.running_mean"].sum()) == pytest.approx(1)
    assert float(weights["norm1.weight"].sum()) != pytest.approx(1, abs=1e-3)
