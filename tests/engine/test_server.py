"""The parts of a round at the server, one by one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from raysim.core.stack import Stack
from raysim.engine.cohort import Cohort, counters_of
from raysim.engine.server_views import ServerViews
from tests.support.federations import plan_of, probe, run, server_on, server_with


def test_a_hook_that_writes_to_its_message_does_not_move_the_global_model(root):
    seen = []

    def broadcast(message, state):
        message.params.add_(1)
        return message

    def server_update(update, state, view):
        seen.append((view.start - view.params).mean().item())
        return update, state

    server_with(root, probe(broadcast=broadcast, server_update=server_update)).run_round(0)
    assert seen == [pytest.approx(1)]


def test_what_a_hook_does_to_the_updates_it_is_shown_changes_nothing(root):
    def weigh(weights, view):
        assert view.map_updates(lambda update, shared: float(update.zero_().sum())) == [0] * 7
        return weights

    server = server_with(root, probe(weigh=weigh))
    server.run_round(0)
    assert server.params_sha256() == run(plan_of(root), root, rounds=1).params_sha256()


def test_a_client_without_a_step_has_no_weight(root):
    server = server_on(plan_of(root), root)
    view = SimpleNamespace(
        is_active=torch.tensor([True, False, True]), num_examples=torch.tensor([10, 50, 30]), clients=torch.arange(3)
    )
    views = ServerViews(server, SimpleNamespace(), 0, server.params, server.params)
    views.of = lambda name, so_far: view
    for base, expected in ((Stack(), [0.25, 0, 0.75]), (Stack([probe(base_weights="uniform")]), [0.5, 0, 0.5])):
        weights = base.weigh(views.base_weights(base), views.of)
        assert {tuple(weight.tolist()) for weight in weights.values()} == {tuple(expected)}


@pytest.mark.parametrize(("every", "due"), [(1, range(7)), (3, [2, 5, 6]), (0, [6])])
def test_every_so_many_rounds_and_the_last_are_evaluated(every, due, root):
    server = server_on(plan_of(root, rounds=7), root)
    server.evaluate_every = every
    assert [index for index in range(7) if server._is_due(index)] == list(due)


def test_clients_score_their_models_in_the_rounds_that_are_evaluated(root):
    for test, scored in ((0.25, [False, True, True]), (0.0, [False] * 3)):
        server = server_on(plan_of(root, data={"test": test}), root)
        server.evaluate_every = 2
        assert [server._broadcast(index, 0)[0].is_scored for index in range(3)] == scored


def test_rounds_belong_to_the_phases_in_their_order(root):
    server = server_on(plan_of(root), root)
    (phase,) = server.phases
    server.phases = [replace(phase, rounds=2), replace(phase, rounds=1)]
    assert [server.phase_of(index)[0] for index in range(3)] == [0, 0, 1]
    with pytest.raises(IndexError):
        server.phase_of(3)


def test_the_largest_counter_of_the_kept_clients_is_kept(root):
    server = server_on(plan_of(root), root)
    cohort = Cohort.__new__(Cohort)
    cohort.reports = SimpleNamespace(counters={"n": np.array([2, 5, 9])})
    cohort.is_kept = np.array([True, True, False])
    assert counters_of(cohort, server.layout, server.counters) == {"n": 5}
    cohort.is_kept[:] = False
    assert counters_of(cohort, server.layout, {"n": 3}) == {"n": 3}


def test_statistics_of_batch_normalisation_are_averaged_like_parameters(root):
    server = server_on(plan_of(root, model={"norm": "batch"}), root)
    before = server.state.clone()
    record = server.run_round(0)
    held, size = server.pool._trainer._vectors, server.layout.num_params
    rows = torch.stack([held.of("update", [client])[0] for client in record.clients["client"].tolist()])
    expected = before + torch.from_numpy(record.clients["weight"]).float() @ rows
    assert size < len(expected)
    torch.testing.assert_close(server.state, expected, rtol=1e-4, atol=1e-5)


def test_seconds_of_a_rounds_parts(root):
    server = server_on(plan_of(root), root)
    server.clock = iter([0.0, 1.0, 3.0, 7.0]).__next__
    metrics = server.run_round(0).metrics
    parts = {name: metrics[f"system/{name}_s"] for name in ("train", "aggregate", "evaluate", "round")}
    assert parts == {"train": 1, "aggregate": 2, "evaluate": 4, "round": 7}
