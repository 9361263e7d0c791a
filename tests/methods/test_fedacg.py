"""FedACG's property checks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from methods.fedacg import fedacg
from raysim.core.method import Message
from tests.support.federations import plan_of, run, server_on


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["none", "batch"])
def test_without_momentum_and_pull_it_is_fedavg_with_uniform_weights(norm, root):
    groups = {"model": {"norm": norm}}
    digest = run(plan_of(root, ["uniform"], **groups), root).params_sha256()
    assert run(plan_of(root, [{"fedacg": {"lam": 0, "beta": 0}}], **groups), root).params_sha256() == digest
    for options in ({"beta": 0}, {"lam": 0, "beta": 0.5}):
        assert run(plan_of(root, [{"fedacg": options}], **groups), root).params_sha256() != digest


def test_the_global_model_moves_by_the_momentum(root):
    server = server_on(plan_of(root, ["fedacg"]), root)
    for index in range(3):
        before = server.params.clone()
        server.run_round(index)
        momentum = server.method_state["fedacg"]["momentum"]
        assert torch.allclose(server.params, before + momentum, atol=1e-6)
        assert float(momentum.norm()) > 1e-3


def test_clients_that_stay_at_the_lookahead_let_the_momentum_fade(root):
    server = server_on(plan_of(root, ["fedacg", "tests.support.toys:stands_still"]), root)
    momentum = torch.randn_like(server.params)
    server.method_state["fedacg"]["momentum"] = momentum
    before = server.params.clone()
    server.run_round(0)
    assert torch.equal(server.method_state["fedacg"]["momentum"], 0.85 * momentum)
    assert torch.equal(server.params, before + 0.85 * momentum)


#: A round at the server without any report.
ROUND = SimpleNamespace(report={}, total=None)


def client_at(start):
    return SimpleNamespace(start=start, message={}, overheard={}, memory={}, scratch={})


def test_one_local_step_on_a_quadratic_is_nesterovs_gradient():
    """x <- x + v with v <- lam v - lr grad(x + lam v)."""
    a = torch.diag(torch.tensor([2.0, 0.5, 1.0]))
    b, lr, lam = torch.tensor([1.0, -1.0, 0.5]), 0.1, 0.6
    method = fedacg(lam=lam, beta=0.0)
    state, w = method.init(torch.zeros(3), None), torch.zeros(3)
    x, v = torch.zeros(3), torch.zeros(3)
    for _ in range(20):
        start = method.broadcast(Message(w, {}), state).params
        gradient = method.grads(lambda y, batch: a @ (y - b), client_at(start))
        update, state = method.server_update(-lr * gradient(start, None), state, ROUND)
        w = start + update
        v = lam * v - lr * (a @ (x + lam * v - b))
        x = x + v
        assert torch.allclose(w, x, atol=1e-6)


def test_the_pull_is_towards_the_broadcast_point():
    start = torch.tensor([1.0, 2.0])
    gradient = fedacg(beta=0.5).grads(lambda y, batch: torch.zeros(2), client_at(start))
    assert gradient(torch.tensor([3.0, 1.0]), None).tolist() == [1.0, -0.5]
