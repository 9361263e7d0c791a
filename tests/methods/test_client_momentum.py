"""Client momentum against a naive federation, and its limit case."""

from __future__ import annotations

import pytest
import torch

from tests.support.federations import plan_of, run, server_on
from tests.twins.federation import Naive, assert_same_state


class Momentum(Naive):
    """FedAvg whose clients send the running mean of their updates, tensor by tensor."""

    def __init__(self, plan, beta):
        super().__init__(plan)
        self.beta, self.past = beta, {}

    def finish(self, client, round_index, model, anchor, steps, lr):
        updates = [p.detach() - a for p, a in zip(model.parameters(), anchor, strict=True)]
        if client in self.past:
            pairs = zip(self.past[client], updates, strict=True)
            updates = [self.beta * past + (1 - self.beta) * update for past, update in pairs]
        self.past[client] = updates
        with torch.no_grad():
            for p, a, m in zip(model.parameters(), anchor, updates, strict=True):
                p.copy_(a + m)


@pytest.mark.parametrize("size", [12, 5])
def test_client_momentum_is_the_twins_after_3_rounds(size, root):
    """With and without rounds in which a client is not chosen."""
    plan = plan_of(root, [{"client_momentum": {"beta": 0.7}}], cohort={"size": size}, local={"lr": 0.05})
    server, naive = server_on(plan, root), Momentum(plan, 0.7)
    for index in range(3):
        server.run_round(index)
        naive.round(index)
    assert_same_state(server, naive)


def test_without_a_past_it_is_fedavg(root):
    """In the first round; with beta 0 in all, up to the rounding of start + (end - start)."""
    first = [run(plan_of(root, methods), root, rounds=1).params for methods in ([], ["client_momentum"])]
    assert torch.allclose(*first, atol=1e-7)
    rounds = [run(plan_of(root, m), root).params for m in ([], [{"client_momentum": {"beta": 0}}])]
    assert torch.allclose(*rounds, atol=1e-6)
