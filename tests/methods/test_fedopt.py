"""FedAdam, FedYogi and FedAdagrad: property checks."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from methods.fedopt import fedadagrad, fedadam, fedyogi
from tests.support.federations import plan_of, run

SERVER = SimpleNamespace(is_active=torch.tensor([True]))
UPDATES = list(torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64))


def play(method, updates):
    """(steps, states) over the rounds."""
    state, steps, states = method.init(torch.zeros_like(updates[0]), None), [], []
    for update in updates:
        step, state = method.server_update(update, state, SERVER)
        steps.append(step)
        states.append(state)
    return steps, states


def test_without_memory_adam_divides_by_the_size():
    steps, _ = play(fedadam(beta1=0.0, beta2=0.0, server_lr=0.3, tau=0.1), UPDATES)
    for step, update in zip(steps, UPDATES, strict=True):
        assert torch.allclose(step, 0.3 * update / (update.abs() + 0.1), rtol=1e-12)


def test_yogi_and_adam_agree_in_round_1_alone():
    (adam, _), (yogi, _) = play(fedadam(), UPDATES), play(fedyogi(), UPDATES)
    assert torch.allclose(adam[0], yogi[0], rtol=1e-12)
    assert not torch.allclose(adam[1], yogi[1], rtol=1e-3)


@pytest.mark.parametrize("make", [fedadam, fedyogi, fedadagrad])
def test_with_a_large_tau_the_step_is_fedavgs(make):
    steps, _ = play(make(beta1=0.0, server_lr=1e9, tau=1e9), UPDATES)
    for step, update in zip(steps, UPDATES, strict=True):
        assert torch.allclose(step, update, rtol=1e-7)


def test_adagrads_v_never_falls_and_sums_a_constant_update():
    _, states = play(fedadagrad(), UPDATES)
    for before, after in pairwise(states):
        assert bool((after["v"] >= before["v"]).all())
    _, states = play(fedadagrad(), [UPDATES[0]] * 5)
    for t, state in enumerate(states, start=1):
        assert torch.allclose(state["v"], t * UPDATES[0] ** 2)


def test_by_hand():
    update = torch.tensor([0.5, -2.0, 0.0], dtype=torch.float64)
    ((first, second), _) = play(fedadam(server_lr=1.0, beta1=0.5, beta2=0.75, tau=0.5), [update, update])
    # round 1: m = (.25, -1, 0), v = (.0625, 1, 0); round 2: m = (.375, -1.5, 0), v = (.109375, 1.75, 0)
    assert first.tolist() == [0.25 / 0.75, -1 / 1.5, 0.0]
    assert torch.allclose(second, torch.tensor([0.375 / (0.109375**0.5 + 0.5), -1.5 / (1.75**0.5 + 0.5), 0.0]).double())
    ((step,), _) = play(fedyogi(server_lr=1.0, beta1=0.0, beta2=0.75, tau=0.5, init_v=1.0), [update])
    # v = 1 - .25 Δ^2 sign(1 - Δ^2) = (.9375, 2, 1)
    assert torch.allclose(step, update / (torch.tensor([0.9375, 2.0, 1.0]).double().sqrt() + 0.5))


@pytest.mark.slow
def test_running_variances_are_averaged_and_never_negative(root):
    plain = run(plan_of(root, [], model={"norm": "batch"}), root, rounds=1)
    for name in ("fedadam", "fedyogi", "fedadagrad"):
        plan = plan_of(root, [{name: {"server_lr": 1.0}}], model={"norm": "batch"})
        count = plan.layout.num_params
        assert torch.equal(run(plan, root, rounds=1).state[count:], plain.state[count:])
        values = (server := run(plan, root)).layout.views(server.state)
        assert all(bool((values[n] >= 0).all()) for n in values if n.endswith("running_var"))
