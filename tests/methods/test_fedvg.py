"""FedVG's property checks and degenerate cases."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from methods.fedvg import fedvg, layer_norms, weights_from_norms
from methods.scored import inverse_weights
from raysim.core.layout import layout_of
from raysim.core.method import Batch, Method
from raysim.training.model import BoundModel
from tests.support.federations import plan_of, raw_config, run, server_on

SMALL = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))
LAYOUT = layout_of(SMALL, head="3", channels_last=True)
sizes = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=8)


def usable(values):
    return torch.ones(len(values), dtype=torch.bool)


@settings(deadline=None)
@given(values=sizes, eps=st.sampled_from([0.0, 1e-8, 1e-2]))
def test_weights_sum_to_one_are_positive_and_monotone(values, eps):
    norms = torch.tensor(values, dtype=torch.float64)
    weights = inverse_weights(norms, usable(values), eps)
    assert abs(float(weights.sum()) - 1) < 1e-12
    assert bool((weights > 0).all())
    assert bool((weights <= 1).all())
    for i in range(len(values)):
        for j in range(len(values)):
            if values[i] < values[j] * (1 - 1e-12):
                assert weights[i] >= weights[j]
            if eps == 0:
                assert float(weights[i] / weights[j]) == pytest.approx(values[j] / values[i], rel=1e-12)


@settings(deadline=None)
@given(values=sizes, scale=st.floats(1e-3, 1e3), eps=st.sampled_from([0.0, 1e-8, 1e-2]))
def test_scaling_the_loss_scales_out(values, scale, eps):
    norms = torch.tensor(values, dtype=torch.float64)
    scaled = inverse_weights(norms * scale, usable(values), eps * scale)
    assert torch.allclose(scaled, inverse_weights(norms, usable(values), eps), rtol=1e-9)


@settings(deadline=None)
@given(values=sizes, data=st.data())
def test_permuting_participants_permutes_weights(values, data):
    order = torch.tensor(data.draw(st.permutations(range(len(values)))))
    norms = torch.tensor(values, dtype=torch.float64)
    first = inverse_weights(norms, usable(values), 1e-8)
    assert torch.allclose(inverse_weights(norms[order], usable(values), 1e-8), first[order], rtol=1e-12)


def test_one_participant_gets_everything_and_identical_clients_share():
    assert inverse_weights(torch.tensor([3.0], dtype=torch.float64), usable([1]), 1e-8).tolist() == [1.0]
    same = inverse_weights(torch.full((4,), 0.3, dtype=torch.float64), usable([1] * 4), 1e-8)
    assert same.tolist() == [0.25] * 4


def test_vanishing_gradients_share_and_dominate():
    norms = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    assert inverse_weights(norms, usable([1] * 3), 0.0).tolist() == [0.5, 0.0, 0.5]
    weights = inverse_weights(torch.tensor([0.0, 2.0, 3.0], dtype=torch.float64), usable([1] * 3), 1e-8)
    assert float(weights[0]) >= 1 - 2 * 1e-8 / 2.0
    tiny = inverse_weights(torch.tensor([1e-320, 1.0], dtype=torch.float64), usable([1] * 2), 0.0)
    assert tiny.tolist() == [1.0, pytest.approx(0, abs=1e-300)]


def test_diverged_and_idle_clients_get_nothing():
    norms = torch.rand(3, len(LAYOUT.params), dtype=torch.float64) + 1
    norms[1, 0] = math.inf
    for granularity in ("model", "layer", "block"):
        table = weights_from_norms(LAYOUT, norms, torch.tensor([True, True, False]), granularity=granularity, eps=1e-8)
        for weights in table.values():
            assert weights.tolist() == [1.0, 0.0, 0.0]
        table = weights_from_norms(LAYOUT, norms, torch.tensor([False, True, False]), granularity=granularity, eps=1e-8)
        assert all(weights.tolist() == [0.0] * 3 for weights in table.values())


def random_norms(count=5):
    return torch.rand(count, len(LAYOUT.params), dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.1


def weights(layout, norms, granularity, **options):
    return weights_from_norms(
        layout, norms, torch.ones(len(norms), dtype=torch.bool), granularity=granularity, eps=0.0, **options
    )


def test_granularities_agree_in_their_limits():
    one = layout_of(nn.Sequential(nn.Linear(4, 3, bias=False)), head="0")
    norms = torch.rand(4, 1, dtype=torch.float64) + 0.1
    tables = [weights(one, norms, g) for g in ("model", "layer", "block")]
    assert all(torch.equal(table["0.weight"], tables[0]["0.weight"]) for table in tables)
    # one block: block == model; one tensor per block: block == layer
    block = layout_of(nn.Sequential(nn.Linear(4, 3)), head="0")
    norms = torch.rand(4, 2, dtype=torch.float64) + 0.1
    assert torch.equal(weights(block, norms, "block")["0.bias"], weights(block, norms, "model")["0.bias"])
    single = layout_of(nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False)), head="1")
    for name in ("0.weight", "1.weight"):
        assert torch.equal(weights(single, norms, "block")[name], weights(single, norms, "layer")[name])


def test_a_layers_weight_is_inverse_to_its_own_norm():
    norms = torch.arange(1.0, 1 + 2 * len(LAYOUT.params), dtype=torch.float64).view(2, -1)
    by_tensor = weights(LAYOUT, norms, "layer")
    for index, leaf in enumerate(LAYOUT.params):
        inverse = 1 / norms[:, index]
        assert torch.allclose(by_tensor[leaf.name], inverse / inverse.sum(), rtol=1e-6)


def test_buffers_go_with_their_layer():
    table = weights(LAYOUT, random_norms(), "layer")
    assert torch.equal(table["1.running_mean"], table["1.weight"])
    assert not torch.equal(table["1.weight"], table["1.bias"])


def test_norms_are_ordered_and_a_spectral_norm_is_of_the_flattened_tensor():
    vector = torch.randn(LAYOUT.num_params)
    l1, l2, top = (layer_norms(LAYOUT, vector, norm) for norm in ("l1", "l2", "spectral"))
    for index, leaf in enumerate(LAYOUT.params):
        value = LAYOUT.view(vector, leaf)
        assert l2[index] <= l1[index] <= math.sqrt(leaf.size) * l2[index] * (1 + 1e-12)
        if value.dim() >= 2:
            assert top[index] <= l2[index] * (1 + 1e-12)
            assert float(top[index]) == pytest.approx(float(torch.linalg.svdvals(value.double().flatten(1))[0]))
        else:
            assert math.isnan(top[index])
    rank_one = torch.zeros(LAYOUT.num_params)
    LAYOUT.view(rank_one, "3.weight").copy_(torch.outer(torch.randn(3), torch.randn(8)))
    assert float(layer_norms(LAYOUT, rank_one, "spectral")[4]) == pytest.approx(
        float(layer_norms(LAYOUT, rank_one, "l2")[4])
    )


def test_a_nonfinite_gradient_marks_the_client():
    vector = torch.zeros(LAYOUT.num_params)
    vector[0] = math.nan
    assert math.isinf(layer_norms(LAYOUT, vector, "l1")[0])
    assert math.isinf(layer_norms(LAYOUT, vector, "spectral")[0])


def test_spectral_needs_a_matrix():
    layout = layout_of(nn.Sequential(nn.LayerNorm(3)), head="0")
    with pytest.raises(ValueError, match="spectral"):
        fedvg(norm="spectral").init(torch.zeros(6), layout)


def bound(norm="batch"):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Dropout(0.3), nn.Linear(16, 3))
    return BoundModel(module, layout_of(module, head="4"), head="4")


def batches_of(images, labels, cuts):
    return [Batch(x, y) for x, y in zip(images.split(cuts), labels.split(cuts), strict=True)]


def test_accumulated_gradient_equals_the_full_batch_in_eval_mode():
    model = bound()
    images, labels = torch.randn(20, 1, 4, 4), torch.randint(3, (20,))
    whole = model.mean_gradient(batches_of(images, labels, [20]), num_examples=20, train=False, seed=1)
    parts = model.mean_gradient(batches_of(images, labels, [7, 2, 11]), num_examples=20, train=False, seed=1)
    assert torch.allclose(whole, parts, atol=1e-6)
    train = model.mean_gradient(batches_of(images, labels, [20]), num_examples=20, train=True, seed=1)
    assert not torch.allclose(whole, train, atol=1e-3)


def test_scoring_leaves_no_trace():
    model = bound()
    images, labels = torch.randn(20, 1, 4, 4), torch.randint(3, (20,))
    state, counters = model.state.clone(), {k: v.clone() for k, v in model.counters.items()}
    model.module.train()
    random_state = torch.get_rng_state()
    first = model.mean_gradient(batches_of(images, labels, [10, 10]), num_examples=20, train=True, seed=1)
    assert torch.equal(model.state, state)
    assert all(torch.equal(model.counters[k], v) for k, v in counters.items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert model.module.training
    torch.manual_seed(99)
    assert torch.equal(
        first, model.mean_gradient(batches_of(images, labels, [10, 10]), num_examples=20, train=True, seed=1)
    )


def test_one_participant_moves_like_fedavg(root):
    groups = {"cohort": {"size": 1}}
    digest = run(plan_of(root, **groups), root).params_sha256()
    for granularity in ("model", "layer", "block"):
        assert run(plan_of(root, [{"fedvg": {"granularity": granularity}}], **groups), root).params_sha256() == digest


def test_average_is_the_mean_of_both_weights(root):
    groups = {"cohort": {"size": 5}}
    tables = []
    for methods in ([], ["fedvg"], [{"fedvg": {"mix": "average"}}]):
        server = server_on(plan_of(root, [*methods, "tests.support.toys:spy"], **groups), root)
        server.run_round(0)
        tables.append(server.method_state["spy"]["weights"]["fc1.weight"])
    assert torch.allclose(tables[2], (tables[0] + tables[1]) / 2, atol=1e-15)


@pytest.mark.parametrize(("norms", "expected"), [([1.0, math.inf, 1.0], [0.5, 0.0, 0.5]), ([math.inf] * 3, [0.0] * 3)])
def test_diverged_client_gets_nothing_when_weights_are_averaged_either(norms, expected):
    table = torch.tensor(norms, dtype=torch.float64)[:, None].expand(3, len(LAYOUT.params))
    server = SimpleNamespace(
        layout=LAYOUT, report={"norms": table}, is_active=torch.ones(3, dtype=torch.bool), log=lambda *_: None
    )
    given = dict.fromkeys((leaf.name for leaf in LAYOUT.leaves), torch.full((3,), 1 / 3, dtype=torch.float64))
    for name, weights in fedvg(mix="average").weigh(given, server).items():
        assert torch.allclose(weights, torch.tensor(expected, dtype=torch.float64)), name


def test_zero_step_client_has_no_weight(root):
    """With BatchNorm a client of one example takes no step; the update norm would otherwise give it everything."""
    for norm in ("l1", "update"):
        raw = raw_config(root, [{"fedvg": {"norm": norm}}, "tests.support.toys:spy"], model={"norm": "batch"})
        raw["partition"] = {"alpha": 0.05, "num_clients": 25, "min_samples": 1}
        raw["cohort"] = {"size": 25}
        plan = plan_of(root, **{k: v for k, v in raw.items() if k != "methods"}, methods=raw["methods"])
        assert 1 in plan.manifest.sizes.tolist()
        server = server_on(plan, root)
        server.run_round(0)
        weights = server.method_state["spy"]["weights"]["fc1.weight"]
        lonely = torch.tensor(plan.manifest.sizes == 1)
        assert bool((weights[lonely] == 0).all())
        assert abs(float(weights.sum()) - 1) < 1e-12


def test_auto_takes_the_granularity_with_the_lowest_validation_loss(root):
    losses = {}
    for granularity in ("model", "layer", "block"):
        server = run(plan_of(root, [{"fedvg": {"granularity": granularity}}]), root, rounds=1)
        losses[granularity] = server.evaluate()["server/validation_loss"]
    auto = server_on(plan_of(root, [{"fedvg": {"granularity": "auto"}}]), root)
    record = auto.run_round(0)
    best = min(losses, key=losses.__getitem__)
    assert len(set(losses.values())) == 3
    assert ("model", "layer", "block")[int(record.metrics["fedvg/granularity"])] == best
    assert (
        auto.params_sha256() == run(plan_of(root, [{"fedvg": {"granularity": best}}]), root, rounds=1).params_sha256()
    )


@pytest.mark.parametrize(("methods", "passes"), [([], 3), (["fedavgm"], 3), ([{"fedavgm": {"server_lr": 0.5}}], 4)])
def test_auto_scores_the_model_that_it_chose_once(methods, passes, root, monkeypatch):
    """Three candidates; a fourth pass over the validation set only where a method moved the model further."""
    plan = plan_of(root, [{"fedvg": {"granularity": "auto"}}, *methods], model={"norm": "batch"})
    server, scored = server_on(plan, root), []
    trainer = server.pool._trainer
    monkeypatch.setattr(
        trainer, "_score", lambda part, score=trainer._score, **k: scored.append(part) or score(part, **k)
    )
    metrics = server.run_round(0).metrics
    assert len([part for part in scored if part == ("validation", 0, scored[0].end)]) == passes
    again = server.evaluate()
    assert {name: metrics[name] for name in again} == again


def other_loss():
    """Trains on something else than cross-entropy."""
    return Method("other_loss", loss=lambda inner, client: lambda outputs, batch: outputs.logits.square().sum())


@pytest.mark.parametrize("method", ["univarfl", "tests.methods.test_fedvg:other_loss"])
def test_scores_are_of_plain_cross_entropy_whatever_the_method_trains_on(method, root):
    """At so small a learning rate nobody moves: all score the same model, and what training adds to a loss must not show."""
    plain, other = (
        server_on(plan_of(root, [*methods, "fedvg"], local={"lr": 1e-30}), root).run_round(0)
        for methods in ([], [method])
    )
    assert other.metrics["train/loss"] != plain.metrics["train/loss"]
    assert np.array_equal(other.arrays["fedvg.norms"], plain.arrays["fedvg.norms"])
    assert (plain.arrays["fedvg.norms"] > 0).all()


def test_norms_are_logged_by_client_and_tensor(root):
    server = server_on(plan_of(root, ["fedvg"]), root)
    record = server.run_round(0)
    assert record.arrays["fedvg.norms"].shape == (7, len(server.layout.params))
    assert record.arrays["fedvg.norms:columns"].tolist() == [leaf.name for leaf in server.layout.params]
