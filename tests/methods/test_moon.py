"""MOON's property checks."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from methods.moon import contrastive
from raysim.core.method import Method
from raysim.engine.messages import unpack
from tests.support.federations import plan_of, run, server_on, steps_plan


def rows(seed, n=6, width=5):
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed))


def test_equal_references_give_ln_2_and_no_gradient():
    z, same = rows(0).requires_grad_(), rows(1)
    value = contrastive(z, same, same, temperature=0.5)
    value.backward()
    assert value.item() == pytest.approx(math.log(2), rel=1e-6)
    assert float(z.grad.abs().max()) < 1e-7


def test_contrast_does_not_depend_on_lengths():
    z, near, far = rows(0), rows(1), rows(2)
    want = float(contrastive(z, near, far, temperature=0.5))
    assert float(contrastive(3 * z, 0.2 * near, 7 * far, temperature=0.5)) == pytest.approx(want, rel=1e-5)
    assert float(contrastive(z, far, near, temperature=0.5)) != pytest.approx(want, rel=1e-2)


def test_contrast_is_the_papers_formula_and_safe_at_low_temperatures():
    z, near, far = rows(0), rows(1), rows(2)
    a, b = (torch.exp(F.cosine_similarity(z, other) / 0.5) for other in (near, far))
    assert torch.allclose(contrastive(z, near, far, temperature=0.5), (-torch.log(a / (a + b))).mean())
    assert math.isfinite(contrastive(z, near, far, temperature=1e-3))
    assert float(contrastive(near, near, far, temperature=1e-3)) == pytest.approx(0, abs=1e-6)


def test_zero_features_pass_no_gradient():
    z = torch.zeros(3, 5, requires_grad=True)
    contrastive(z, rows(1, 3), rows(2, 3), temperature=0.5).backward()
    assert not z.grad.any()


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_without_strength_and_in_a_clients_first_round_it_is_fedavg(norm, root):
    groups = {"model": {"norm": norm}, "cohort": {"size": 12}}

    def after(rounds, methods):
        return run(steps_plan(root, methods, steps=3, **groups), root, rounds=rounds).params_sha256()

    assert after(1, ["moon"]) == after(1, [])
    plain = after(2, [])
    assert after(2, [{"moon": {"mu": 0}}]) == plain
    assert after(2, ["moon"]) != plain


def test_clients_remember_their_last_model_with_its_buffers(root):
    plan = plan_of(root, ["moon"], model={"norm": "batch"}, cohort={"size": 1})
    server = server_on(plan, root)
    client = int(server.run_round(0).clients["client"][0])
    previous = unpack(server.client_memory(client))["moon"]["previous"]
    assert torch.allclose(previous, server.state, atol=1e-6)  # one participant: its model is the global one
    assert previous.shape == (server.layout.num_state,)


def test_what_is_remembered_is_what_was_learned_not_what_was_sent(root):
    groups = {"model": {"norm": "batch"}, "cohort": {"size": 1}}
    memories = []
    for methods in (["moon"], ["moon", "sign"]):
        server = server_on(plan_of(root, methods, **groups), root)
        client = int(server.run_round(0).clients["client"][0])
        memories.append(unpack(server.client_memory(client))["moon"]["previous"])
    assert torch.equal(*memories)


def first_losses(root, first):
    """What a client adds to its loss in round 0 and, trained for the first time, in round 1; and the digests."""
    groups = {"partition": {"alpha": 10.0, "num_clients": 4}, "cohort": {"size": 2}, "seed": 2}
    plan, plain = (plan_of(root, methods, **groups) for methods in ([{"moon": {"mu": 2.0, "first": first}}], []))
    server, other = server_on(plan, root), server_on(plain, root)
    found = []
    for index in range(2):
        record, base = server.run_round(index), other.run_round(index)
        assert record.clients["client"].tolist() == base.clients["client"].tolist()
        losses = record.clients["train_loss"] - base.clients["train_loss"]
        found.append(dict(zip(record.clients["client"].tolist(), losses.tolist(), strict=True)))
        other.state = server.state.clone()  # the same start of the next round
    return found


def test_first_says_what_a_clients_first_round_contrasts_with(root):
    """Clients of round 1 that were not in round 0: no term; their own random network."""
    none, random = (first_losses(root, first) for first in ("none", "random"))
    new = set(none[1]) - set(none[0])
    assert new
    for losses in (none, random):
        assert list(losses[0].values()) == pytest.approx([0.0] * 2, abs=1e-3)  # round 0
    for client in new:
        assert none[1][client] == pytest.approx(0, abs=1e-6)
        assert abs(random[1][client]) > 0.05
        assert abs(random[1][client] - 2 * math.log(2)) > 0.05


def test_a_random_first_model_is_the_clients_own_and_always_the_same(root):
    plan = plan_of(root, ["tests.methods.test_moon:sees_initial_state"], cohort={"size": 3})
    states = {}
    server = server_on(plan, root)
    for index in range(2):
        server.run_round(index)
        for client in list(server._memories):
            state = unpack(server.client_memory(client))["sees_initial_state"]["state"]
            assert torch.equal(states.setdefault(client, state), state)
    distinct = list(states.values())
    assert len(distinct) > 3 or len(states) >= 3
    for state in distinct[1:]:
        assert state.shape == (server.layout.num_state,)
        assert not torch.equal(state, distinct[0])
    # of the model's own initialiser: the standard deviation of fc1 is that of the global model
    mine, theirs = (
        server_on(plan, root).layout.view(v, "fc1.weight").std() for v in (distinct[0], server_on(plan, root).state)
    )
    assert float(mine) == pytest.approx(float(theirs), rel=0.05)


def sees_initial_state():
    def report(client):
        client.memory["state"] = client.initial_state()
        return {}

    return Method("sees_initial_state", report=report, needs=frozenset({"client-memory"}))
