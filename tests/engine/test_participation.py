"""Stragglers, dropouts, base weights, logged arrays, and candidates' validation losses."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from raysim.base.errors import RaysimError
from raysim.core.cohorts import choose_cohort, without_dropouts
from raysim.core.method import Vector
from raysim.engine.schedule import Phase
from raysim.training.local import LocalSettings, num_local_steps
from tests.support.federations import plan_of, probe, run, server_on, server_with
from tests.twins.federation import Naive


def test_stragglers_do_between_the_least_share_and_all_of_their_work():
    phase = Phase((), LocalSettings(lr=0.1), rounds=25, cohort_size=40, stragglers=0.3, straggler_work=0.2)
    shares = np.array([phase.share_of(c, seed=1, round_index=r) for c in range(40) for r in range(25)])
    assert shares.min() >= 0.2
    assert 0.65 < (shares == 1).mean() < 0.75
    late = shares[shares < 1]
    assert abs(late.mean() - 0.6) < 0.03
    assert late.min() < 0.25
    assert late.max() > 0.95
    assert all(replace(phase, stragglers=0.0).share_of(c, seed=1, round_index=0) == 1 for c in range(9))


@pytest.mark.parametrize(("options", "share", "steps"), [
    ({"epochs": 2}, 0.5, 4), ({"epochs": 2}, 0.01, 1), ({"steps": 10}, 0.25, 3), ({"steps": 0}, 0.5, 0), ({"epochs": 2}, 1.0, 8),
])  # fmt: skip
def test_share_of_the_steps_is_rounded_up_to_at_least_one(options, share, steps):
    settings = LocalSettings(lr=0.1, batch_size=10, **options)
    assert num_local_steps(40, settings, skip_single=False, share=share) == steps


def test_dropped_out_clients_are_drawn_per_round_and_client():
    clients = np.arange(200)
    first = without_dropouts(clients, 0.3, seed=1, round_index=0)
    assert abs(len(first) - 140) < 25
    assert set(without_dropouts(clients[:50], 0.3, seed=1, round_index=0)) == set(first) & set(range(50))
    assert set(without_dropouts(clients, 0.3, seed=1, round_index=1)) != set(first)
    assert without_dropouts(clients, 0.0, seed=1, round_index=0) is clients
    assert len(without_dropouts(clients[:3], 0.9999, seed=1, round_index=0)) == 1


def test_being_late_and_dropping_out_are_drawn_apart():
    phase = Phase((), LocalSettings(lr=0.1), rounds=1, cohort_size=400, stragglers=0.5, straggler_work=0.2)
    clients = np.arange(400)
    is_late = np.array([phase.share_of(client, seed=1, round_index=0) < 1 for client in clients])
    stays = np.isin(clients, without_dropouts(clients, 0.5, seed=1, round_index=0))
    assert 0.35 < stays[is_late].mean() < 0.65
    assert 0.35 < stays[~is_late].mean() < 0.65


def test_a_limit_that_no_gradient_reaches_changes_no_bit(root):
    digests = {
        run(plan_of(root, local={"momentum": 0.9, "max_grad_norm": limit}), root).params_sha256()
        for limit in (None, 1e6)
    }
    assert len(digests) == 1


def test_cohorts_differ_from_round_to_round():
    cohorts = {tuple(choose_cohort(1000, 10, seed=1, round_index=index)) for index in range(20)}
    assert len(cohorts) == 20


def test_a_reported_vector_that_is_not_finite_counts_as_such_an_update(root):
    def report(client):
        return {"shift": Vector(torch.full_like(client.params, math.nan))}

    with pytest.raises(RaysimError, match="non-finite update"):
        server_with(root, probe(report=report)).run_round(0)


@pytest.mark.slow
@pytest.mark.parametrize("methods", [[], ["fedvg"]])
def test_stragglers_and_dropouts_give_the_same_bits_on_ray(methods, root, ray_pools):
    cohort = {"size": 7, "stragglers": 0.6, "straggler_work": 0.3, "dropout": 0.3}
    plan = plan_of(root, methods, cohort=cohort, local={"epochs": 3})
    expected = run(plan, root)
    assert [run(plan, root, pool).params_sha256() for pool in ray_pools(plan)] == [expected.params_sha256()] * 3
    assert expected.params_sha256() != run(plan_of(root, methods, local={"epochs": 3}), root).params_sha256()


def test_records_show_who_was_late_and_who_dropped_out(root):
    cohort = {"size": 12, "stragglers": 0.5, "straggler_work": 0.2, "dropout": 0.4}
    server = server_on(plan_of(root, cohort=cohort, local={"epochs": 4, "batch_size": 8}), root)
    record = server.run_round(0)
    clients = record.clients["client"]
    assert set(clients) == set(without_dropouts(np.arange(12), 0.4, seed=3, round_index=0))
    for client, steps in zip(clients, record.clients["num_steps"], strict=True):
        share = server.phases[0].share_of(int(client), seed=3, round_index=0)
        per_epoch = math.ceil(int(server.federation.sizes[client]) / 8)
        assert steps == math.ceil(share * 4 * per_epoch - 1e-9)
    assert math.isclose(record.clients["weight"].sum(), 1)


def test_uniform_base_weights_hold_unless_a_method_claims_weights(root):
    seen = []

    def server_update(update, state, view):
        seen.append(view.weights["fc2.bias"].clone())
        return update, state

    method = probe(base_weights="uniform", server_update=server_update)
    server_with(root, method).run_round(0)
    assert torch.allclose(seen[0], torch.full((7,), 1 / 7, dtype=torch.float64))
    server_with(root, method, ["fedvg"]).run_round(0)
    assert not torch.allclose(seen[1], seen[0])


def test_validation_loss_is_that_of_the_model_these_weights_give(root):
    losses = {}

    def weigh(weights, view):
        half = {name: w / 2 for name, w in weights.items()}
        losses["half"], losses["whole"] = view.validation_loss(half), view.validation_loss(weights)
        return weights

    plan = plan_of(root)
    server = server_with(root, probe(weigh=weigh))
    start = server.state.clone()
    server.run_round(0)
    naive = Naive(plan)
    x, y = naive.batch(plan.manifest.validation)
    for factor, name in ((1.0, "whole"), (0.5, "half")):
        state = start + factor * (server.state - start)
        for key, value in server.layout.views(state).items():
            naive.model.state_dict()[key].copy_(value)
        want = torch.nn.functional.cross_entropy(naive.model(x), y).item()
        assert losses[name] == pytest.approx(want, rel=1e-5)
    assert losses["half"] != losses["whole"]


def test_logged_numbers_are_metrics_and_tensors_arrays(root):
    def weigh(weights, view):
        view.log("ratio", 0.25)
        view.log("table", torch.arange(14.0).view(7, 2), ["a", "b"])
        view.log("curve", torch.tensor([1.0, 2.0]))
        return weights

    record = server_with(root, probe(weigh=weigh)).run_round(0)
    assert record.metrics["probe/ratio"] == 0.25
    assert record.arrays["probe.table"].tolist() == torch.arange(14.0).view(7, 2).tolist()
    assert record.arrays["probe.table:columns"].tolist() == ["a", "b"]
    clients = choose_cohort(12, 7, seed=3, round_index=0).tolist()
    assert record.arrays["probe.table:clients"].tolist() == clients
    assert record.arrays["probe.curve"].tolist() == [1.0, 2.0]


def test_clipping_equals_torchs(root):
    """One step with max_grad_norm is that of torch.nn.utils.clip_grad_norm_."""
    groups = {"cohort": {"size": 1}}
    local = {"lr": 0.1, "batch_size": 16}
    plan = plan_of(root, local={**local, "max_grad_norm": 0.05, "epochs": 1}, **groups)
    server, naive = server_on(plan, root), Naive(plan)
    client = int(server.run_round(0).clients["client"][0])
    clip, steps = torch.nn.utils.clip_grad_norm_, []
    before = torch.optim.SGD.step

    def step(self, closure=None):
        steps.append(float(clip([p for group in self.param_groups for p in group["params"]], 0.05)))
        return before(self, closure)

    torch.optim.SGD.step = step
    try:
        model, _ = naive.local(client, 0)
    finally:
        torch.optim.SGD.step = before
    assert max(steps) > 0.05  # something was clipped at all
    for name, want in model.named_parameters():
        assert torch.allclose(server.layout.views(server.state)[name], want, atol=2e-6), name
