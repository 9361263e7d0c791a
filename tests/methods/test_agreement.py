"""FedVG's rival, the agreement of updates with the validation set's descent direction: properties, twin, refusals."""

from __future__ import annotations

import copy
import math
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from methods.agreement import agreeing_weights, cosines_of, tensor_cosines, update_agreement, weights_from_agreements
from raysim.base.errors import ConfigError
from raysim.core.layout import layout_of
from tests.support.federations import plan_of, run, server_on
from tests.twins.federation import SHARE, Naive, assert_close, assert_same_state

SPY = "tests.support.toys:spy"
LAYOUT = layout_of(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)), head="2")
SPANS = [(leaf.offset, leaf.end) for leaf in LAYOUT.params]


def agreements(updates, direction):
    return torch.stack([update_agreement(update, (SPANS, direction)) for update in updates])


def random_case(seed, count=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, LAYOUT.num_params, generator=generator), torch.randn(
        LAYOUT.num_params, generator=generator
    )


def weights(updates, direction, granularity, usable=None):
    usable = torch.ones(len(updates), dtype=torch.bool) if usable is None else usable
    return weights_from_agreements(LAYOUT, agreements(updates, direction), usable, granularity=granularity)


def test_cosines_by_hand():
    updates = torch.zeros(4, LAYOUT.num_params)
    direction = torch.zeros(LAYOUT.num_params)
    direction[:2] = torch.tensor([3.0, 4.0])
    updates[0, :2], updates[1, 0], updates[2, 1] = torch.tensor([6.0, 8.0]), 1.0, -2.0  # cosines 1, 0.6, -0.8, none
    found = cosines_of(agreements(updates, direction))
    assert torch.allclose(found, torch.tensor([1.0, 0.6, -0.8, 0.0], dtype=torch.float64), atol=1e-12)
    usable = torch.tensor([True] * 4)
    assert agreeing_weights(found, usable).tolist() == pytest.approx([1 / 1.6, 0.6 / 1.6, 0.0, 0.0])
    assert agreeing_weights(found, torch.tensor([False, True, True, True])).tolist() == [0.0, 1.0, 0.0, 0.0]
    assert agreeing_weights(-found.abs(), usable).tolist() == [0.0] * 4


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 99),
    scales=st.lists(st.floats(1e-6, 1e6), min_size=5, max_size=5),
    scale=st.floats(1e-6, 1e6),
    granularity=st.sampled_from(["model", "layer", "block"]),
)
def test_lengths_do_not_count(seed, scales, scale, granularity):
    """Neither the lengths of the updates nor that of the gradient; the order of the clients does not either."""
    updates, direction = random_case(seed)
    first = weights(updates, direction, granularity)
    # In each leaf by itself a client's length would count in the cosine of several together: one factor a client.
    second = weights(updates * torch.tensor(scales)[:, None], direction * scale, granularity)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(seed))
    third = weights(updates[order], direction, granularity)
    for name in first:
        assert torch.allclose(first[name], second[name], atol=1e-5), name
        assert torch.allclose(first[name][order], third[name], atol=1e-12), name
        assert float(first[name].min()) >= 0
        assert float(first[name].sum()) in (0.0, pytest.approx(1.0))


def test_granularities_are_cosines_over_their_own_leaves():
    updates, direction = random_case(3)
    views, own = LAYOUT.views(direction), [LAYOUT.views(update) for update in updates]
    groups = {
        "model": lambda name: True,
        "layer": lambda name: name == "2.weight",
        "block": lambda name: name.startswith("2."),
    }
    for granularity, is_in in groups.items():
        found = []
        for update in own:
            left = torch.cat([value.flatten() for name, value in update.items() if is_in(name)]).double()
            right = torch.cat([value.flatten() for name, value in views.items() if is_in(name)]).double()
            found.append(max(0.0, float(left @ right / left.norm() / right.norm())))
        want = torch.tensor(found, dtype=torch.float64)
        got = weights(updates, direction, granularity)["2.weight"]
        assert torch.allclose(got, want / want.sum() if want.any() else want, atol=1e-12), granularity
    alone = tensor_cosines(agreements(updates, direction))
    assert alone.shape == (5, len(LAYOUT.params))
    assert float(alone[0, 0]) == pytest.approx(
        float(F.cosine_similarity(own[0]["0.weight"].flatten(), views["0.weight"].flatten(), dim=0)), abs=1e-6
    )


def test_a_gradient_that_is_not_finite_moves_nothing_and_is_no_weight():
    updates, direction = random_case(0)
    direction[0] = math.nan
    assert not any(value.any() for value in weights(updates, direction, "model").values())


def cosine_weights(granularity, mode):
    """The same with plain loops over modules, in a naive federation."""

    def table(naive: Naive, models, shares):
        rows = naive.plan.manifest.validation
        scratch = copy.deepcopy(naive.model).train(mode == "train")
        batch = naive.config.local.batch_size if mode == "train" else len(rows)
        loss = 0.0
        for start in range(0, len(rows), batch):
            x, y = naive.batch(rows[start : start + batch])
            loss = loss + F.cross_entropy(scratch(x), y, reduction="sum") / len(rows)
        names = [name for name, _ in scratch.named_parameters()]
        down = {
            n: -g.double() for n, g in zip(names, torch.autograd.grad(loss, list(scratch.parameters())), strict=True)
        }
        old = {n: p.detach().double() for n, p in naive.model.named_parameters()}
        moved = [{n: p.detach().double() - old[n] for n, p in model.named_parameters()} for model in models]
        group = {"model": lambda n: "", "layer": lambda n: n, "block": lambda n: n.rpartition(".")[0]}[granularity]
        found = {}
        for name in names:
            members = [n for n in names if group(n) == group(name)]
            scores = []
            for one in moved:
                product = sum(float((one[n] * down[n]).sum()) for n in members)
                sizes = [math.sqrt(sum(float((v[n] ** 2).sum()) for n in members)) for v in (one, down)]
                scores.append(max(0.0, product / (sizes[0] * sizes[1])))
            found[name] = [s / sum(scores) for s in scores] if sum(scores) > 0 else shares
        return found

    return table


@pytest.mark.slow
@pytest.mark.parametrize("granularity", ["model", "layer", "block"])
@pytest.mark.parametrize(("norm", "mode"), [("none", "eval"), ("batch", "train")])
def test_weights_match_plain_loops(granularity, norm, mode, root):
    method = {"fedvg_cosine": {"granularity": granularity, "val_mode": mode}}
    # 144 validation rows: no batch of one example, which the engine would put to the one before it.
    plan = plan_of(root, [method, SPY], model={"norm": norm}, cohort={"size": 5}, data={"validation": 0.0803})
    assert len(plan.manifest.validation) % 16 != 1
    naive, server = Naive(plan, weights=cosine_weights(granularity, mode)), server_on(plan, root)
    record = server.run_round(0)
    naive.round(0)
    got = server.method_state["spy"]["weights"]
    idle = ("conv1.bias", "conv2.bias") if norm == "batch" else ()  # BatchNorm takes them away again
    for name, want in naive.seen_weights[0].items():
        if granularity == "layer" and name in idle:
            continue
        assert_close(got[name], torch.tensor(want, dtype=torch.float64), 10 * SHARE, name)
    if not idle or granularity != "layer":
        assert_same_state(server, naive, 10 * SHARE)
    assert 0 <= record.metrics["fedvg_cosine/agreeing"] <= 5
    assert record.arrays["fedvg_cosine.cosines"].shape == (5, len(server.layout.params))


def test_the_gradient_is_that_of_the_broadcast_point_and_taken_once(root, monkeypatch):
    """FedACG broadcasts another point than the global model."""
    plan = plan_of(root, ["fedacg", {"fedvg_cosine": {"granularity": "auto"}}], model={"norm": "batch"})
    server, asked = server_on(plan, root), []
    scorer = server.scorer

    def gradient(call, state, counters, take=scorer.on_validation):
        asked.append(state)
        return take(call, state, counters)

    monkeypatch.setattr(scorer, "on_validation", gradient)
    for index in range(2):
        before = server.state.clone()
        server.run_round(index)
    assert len(asked) == 2
    size = server.layout.num_params
    assert not torch.equal(asked[1][:size], before[:size])  # a step ahead of the global model
    assert torch.equal(asked[1][size:], before[size:])


@pytest.mark.slow
def test_any_number_of_trainers_gives_the_same_bits(root, ray_pools):
    plan = plan_of(root, [{"fedvg_cosine": {"granularity": "layer"}}], model={"norm": "batch"})
    expected = run(plan, root, rounds=2).params_sha256()
    assert [run(plan, root, pool, rounds=2).params_sha256() for pool in ray_pools(plan)] == [expected] * 3


def test_where_nobody_agrees_the_weights_stay(root, monkeypatch):
    """A gradient that leads up for everybody: the round is FedAvg's, whatever the mix."""
    plain = run(plan_of(root), root, rounds=1).params_sha256()
    module = sys.modules["methods.fedvg_cosine"]  # its name in the package is the function's
    monkeypatch.setattr(module, "agreements_of", lambda server, leaves, d: -torch.ones(7, len(leaves), 3).double())
    for mix in ("replace", "average"):
        plan = plan_of(root, [{"fedvg_cosine": {"mix": mix}}])
        assert run(plan, root, rounds=1).params_sha256() == plain


def test_what_does_not_go_together_is_refused(root):
    method = "fedvg_cosine"
    with pytest.raises(ConfigError, match="validation-set"):
        plan_of(root, [method], data={"root": str(root), "validation": 0})
    with pytest.raises(ConfigError, match=r"taken at the global model, which has no fc2\.weight"):
        plan_of(root, [{"personal": {"layers": "head"}}, {"fedvg_cosine": {"leaves": "body"}}])
