"""FedAvgM as FL-bench runs it: momentum on BatchNorm statistics as well."""

from __future__ import annotations

import torch

from raysim.engine.cohort import Cohort
from tests.support.federations import plan_of, server_on


def path(root, methods, monkeypatch, rounds=3):
    """(states before each round and after the last, aggregated updates of each round), [num_state]."""
    server = server_on(plan_of(root, [*methods, "tests.support.toys:spy"], model={"norm": "batch"}), root)
    states, updates = [server.state.clone()], []
    whole = Cohort.total

    def keeps(cohort, name, weights):
        total = whole(cohort, name, weights)
        if name == "update" and len(weights) == len(server.layout.shared):
            updates.append(total.clone())
        return total

    monkeypatch.setattr(Cohort, "total", keeps)
    for index in range(rounds):
        server.run_round(index)
        states.append(server.state.clone())
    return server.layout, states, updates


def test_fl_benchs_form_moves_buffers_like_parameters(root, monkeypatch):
    """Nesterov over the whole state, number by number; the plain form leaves buffers at the weighted mean."""
    for method, covers_buffers in (
        ({"beta": 0.7, "as_in": "fl-bench"}, True),
        ({"beta": 0.7, "form": "nesterov"}, False),
    ):
        layout, states, updates = path(root, [{"fedavgm": method}], monkeypatch)
        velocity = torch.zeros(layout.num_state, dtype=torch.float64)
        for before, after, update in zip(states, states[1:], updates, strict=False):
            velocity = 0.7 * velocity + update
            want = update + 0.7 * velocity
            if not covers_buffers:
                want[layout.num_params :] = update[layout.num_params :]
            moved = (after - before).double()
            assert float((moved - want).norm()) < 1e-5 * float(want.norm())
        assert float(velocity[layout.num_params :].norm()) > 1e-3
