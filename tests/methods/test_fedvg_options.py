"""FedVG's parts of a model, sparse scoring, loss as score, and the released code's form."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from methods.fedvg import fedvg, layer_norms, weights_from_norms
from methods.fedvg_loss import fedvg_loss
from methods.scored import part_of
from raysim.base.errors import ConfigError
from raysim.core.conflicts import conflicts
from raysim.core.layout import layout_of
from raysim.core.method import Method
from raysim.engine.device import scoring_batch
from raysim.training.model import BoundModel
from tests.support.federations import lora_plan, plan_of, run, server_on

SMALL = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))
LAYOUT = layout_of(SMALL, head="3", channels_last=True)
SPY = "tests.support.toys:spy"


def weights_after(plan, root, rounds=1):
    """(weights of the last round, its record)."""
    server = server_on(plan, root)
    records = [server.run_round(index) for index in range(rounds)]
    return server.method_state["spy"]["weights"], records[-1]


# --- leaves -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", ["model", "layer", "block"])
@pytest.mark.parametrize("leaves", ["head", "body"])
def test_leaves_outside_the_part_keep_their_weights(leaves, granularity, root):
    groups = {"cohort": {"size": 5}, "model": {"norm": "batch"}}
    plain, _ = weights_after(plan_of(root, [SPY], **groups), root)
    method = {"fedvg": {"leaves": leaves, "granularity": granularity}}
    found, record = weights_after(plan_of(root, [method, SPY], **groups), root)
    assert set(found) == set(plain)
    for name in plain:
        is_mine = name.startswith("fc2") == (leaves == "head")
        assert torch.equal(found[name], plain[name]) != is_mine, name
    # eq. 5 over the part's own norms
    columns = record.arrays["fedvg.norms:columns"].tolist()
    assert all(name.startswith("fc2") == (leaves == "head") for name in columns)
    if granularity == "model":
        inverse = [1 / (sum(row) / len(row) + 1e-8) for row in record.arrays["fedvg.norms"].tolist()]
        want = torch.tensor([value / sum(inverse) for value in inverse], dtype=torch.float64)
        assert torch.allclose(found[columns[0]], want, rtol=1e-12)


def test_parts_make_up_the_layout():
    head, body = part_of(LAYOUT, "head"), part_of(LAYOUT, "body")
    assert [leaf.name for leaf in head.leaves] == ["3.weight", "3.bias"]
    assert {leaf.name for leaf in (*head.leaves, *body.leaves)} == {leaf.name for leaf in LAYOUT.leaves}
    assert part_of(LAYOUT, "all") is LAYOUT
    vector = torch.randn(LAYOUT.num_params)
    assert torch.equal(layer_norms(head, vector, "l2"), layer_norms(LAYOUT, vector, "l2")[-2:])


def test_parts_claim_their_weights_alone():
    resources = [f"weights:{name}" for name in ("conv.weight", "a.lora_A.x", "fc.weight", "fc.bias")]
    available = {"validation-set", "lora"}

    def found(*parts):
        methods = [fedvg(leaves=part) for part in parts]
        named = [Method(f"m{i}", claims=m.claims, weigh=m.weigh) for i, m in enumerate(methods)]
        return conflicts(named, resources, available, head="fc")

    assert found("body", "head") == found("head", "adapters") == []
    assert "both decide weights:a.lora_A.x" in found("body", "adapters")[0]
    assert "both decide weights:fc.weight, weights:fc.bias" in found("all", "head")[0]


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(("components", "leaves"), [("head", "adapters"), ("lora", "head")])
def test_fedvg_and_livar_share_one_model(components, leaves, order, root):
    """Each decides what it decides alone; nothing of the other's."""
    livar, score = {"livar": {"components": components}}, {"fedvg": {"leaves": leaves}}
    groups = {"rounds": 1, "cohort": {"size": 4}}
    both, _ = weights_after(lora_plan(root, [*[livar, score][::order], SPY], **groups), root)
    alone = {
        key: weights_after(lora_plan(root, [m, SPY], **groups), root)[0] for key, m in (("l", livar), ("f", score))
    }
    for name, weight in both.items():
        is_fedvgs = (".lora_" in name) == (leaves == "adapters")
        assert torch.equal(weight, alone["f" if is_fedvgs else "l"][name]), name
        assert not torch.equal(weight, alone["l" if is_fedvgs else "f"][name]), name


def test_fedvg_and_livar_over_the_same_leaves_are_refused(root):
    with pytest.raises(ConfigError, match="fedvg and livar both decide"):
        lora_plan(root, ["fedvg", "livar"])
    with pytest.raises(ConfigError, match=r"fedvg needs lora: set model\.lora"):
        plan_of(root, [{"fedvg": {"leaves": "adapters"}}])


# --- every ------------------------------------------------------------------------------------------------------------


def test_norms_are_kept_between_scorings(root):
    """Round 0 scores all; a round in between only those who have no norms yet; the others have their last."""
    plan = plan_of(root, [{"fedvg": {"every": 3}}, SPY], rounds=5, cohort={"size": 6})
    server = server_on(plan, root)
    last: dict[int, np.ndarray] = {}
    is_reused = False
    for index in range(5):
        record = server.run_round(index)
        clients, norms = record.clients["client"].tolist(), record.arrays["fedvg.norms"]
        known = set(last) if index % 3 else set()
        assert record.metrics["fedvg/scored"] == len(set(clients) - known)
        for client, mine in zip(clients, norms, strict=True):
            if client in known:
                assert np.array_equal(mine, last[client])
                is_reused = True
            elif client in last:
                assert not np.array_equal(mine, last[client])
            last[client] = mine
        sizes = torch.from_numpy(norms).mean(dim=1)
        want = (1 / (sizes + 1e-8)) / (1 / (sizes + 1e-8)).sum()
        assert torch.allclose(server.method_state["spy"]["weights"]["fc1.weight"], want, rtol=1e-9)
    assert is_reused


def test_every_1_is_fedvg(root):
    digest = run(plan_of(root, ["fedvg"]), root, rounds=2).params_sha256()
    assert run(plan_of(root, [{"fedvg": {"every": 1}}]), root, rounds=2).params_sha256() == digest
    assert run(plan_of(root, [{"fedvg": {"every": 2}}]), root, rounds=3).params_sha256() != digest


# --- fedvg_loss -------------------------------------------------------------------------------------------------------


def test_loss_scores_are_inverse_to_the_validation_loss(root):
    """Of the client's own model, by one plain pass over all validation rows in eval mode."""
    method = {"fedvg_loss": {"val_mode": "eval"}}
    plan = plan_of(root, [method, "tests.methods.test_fedvg_options:spy_states", SPY], cohort={"size": 4})
    server = server_on(plan, root)
    record = server.run_round(0)
    trainer, states = server.pool._trainer, server.method_state["spy_states"]["states"]
    images, labels = trainer.data.federation.held_out("validation")
    x, y = trainer.transform(torch.from_numpy(images.copy())), torch.from_numpy(labels.copy())
    losses = []
    trainer.model.module.eval()
    for state in states:
        trainer.model.load(state)
        with torch.no_grad():
            losses.append(float(F.cross_entropy(trainer.model.forward(x).logits, y)))
    assert record.arrays["fedvg_loss.loss"][:, 0] == pytest.approx(losses, rel=1e-5)
    want = [(1 / v) / sum(1 / u for u in losses) for v in losses]
    assert server.method_state["spy"]["weights"]["fc1.weight"].tolist() == pytest.approx(want, rel=1e-5)


def spy_states():
    """Keeps every client's parameters where tests can look."""

    def server_update(update, state, server):
        states = torch.stack(server.map_updates(lambda mine, start: mine + start, server.start))
        return update, {"states": states}

    return Method("spy_states", server_update=server_update)


def test_a_client_without_a_finite_loss_gets_nothing():
    server = SimpleNamespace(
        layout=LAYOUT,
        report={"loss": torch.tensor([[1.0], [math.inf], [3.0]], dtype=torch.float64)},
        is_active=torch.ones(3, dtype=torch.bool),
        log=lambda *_: None,
    )
    given = dict.fromkeys((leaf.name for leaf in LAYOUT.leaves), torch.full((3,), 1 / 3, dtype=torch.float64))
    for weights in fedvg_loss(eps=0.0).weigh(given, server).values():
        assert weights.tolist() == pytest.approx([0.75, 0.0, 0.25])


# --- batches of the scoring -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm", "mode", "size"), [("none", "train", 256), ("batch", "train", 16), ("batch", "eval", 256)]
)
def test_scoring_batches_are_the_clients_only_where_they_decide_the_score(norm, mode, size, root):
    """The naive twin: one validation example after the other, and batch after batch where BatchNorm looks at it."""
    method = {"fedvg": {"val_mode": mode}}
    plan = plan_of(root, [method, "tests.methods.test_fedvg_options:spy_states"], model={"norm": norm})
    server = server_on(plan, root)
    record = server.run_round(0)
    trainer = server.pool._trainer
    assert plan.config.local.batch_size == 16
    assert set(trainer.data._ready) == {size}
    if mode == "eval":  # the client's own statistics are gone by now
        return
    model, module = trainer.model, trainer.model.module.train()
    images, labels = trainer.data.federation.held_out("validation")
    step = 16 if norm == "batch" else 1
    for norms, state in zip(record.arrays["fedvg.norms"], server.method_state["spy_states"]["states"], strict=True):
        model.params.copy_(state)
        totals = [torch.zeros_like(p) for p in module.parameters()]
        for start in range(0, len(labels), step):
            x, y = (torch.from_numpy(rows[start : start + step].copy()) for rows in (images, labels))
            loss = F.cross_entropy(module(trainer.transform(x)), y, reduction="sum") / len(labels)
            for total, grad in zip(totals, torch.autograd.grad(loss, list(module.parameters())), strict=True):
                total += grad
        by_name = {name: total for (name, _), total in zip(module.named_parameters(), totals, strict=True)}
        assert norms.tolist() == pytest.approx(
            [float(by_name[leaf.name].abs().sum()) for leaf in server.layout.params], rel=1e-3, abs=1e-5
        )


def test_scoring_batches_are_as_large_as_their_inputs_allow():
    assert [scoring_batch(entries) for entries in (64, 28 * 28, 3 * 32 * 32, 3 * 64 * 64, 3 * 224 * 224, 2**20)] == [
        256,
        256,
        128,
        32,
        2,
        1,
    ]


@pytest.mark.parametrize(
    ("layer", "depends"),
    [
        (nn.BatchNorm2d(2), True),
        (nn.Dropout(0.1), True),
        (nn.MultiheadAttention(2, 1, dropout=0.1), True),
        (timm.layers.DropPath(0.1), True),
        (nn.Dropout(0.0), False),
        (nn.GroupNorm(1, 2), False),
    ],
)
def test_models_whose_score_depends_on_the_batches_are_known(layer, depends):
    module = nn.Sequential(layer, nn.Linear(2, 2))
    assert BoundModel(module, layout_of(module, head="1"), head="1").depends_on_batches == depends


# --- norms of the update, and the released form -----------------------------------------------------------------------


def test_update_norm_is_inside_l2_or_l1():
    vector = torch.randn(LAYOUT.num_params, generator=torch.Generator().manual_seed(0))
    for norm, power in (("update", 2), ("update-l1", 1)):
        want = [float(vector[leaf.offset : leaf.end].double().abs().pow(power).sum()) for leaf in LAYOUT.params]
        assert layer_norms(LAYOUT, vector, norm).tolist() == pytest.approx([w ** (1 / power) for w in want])


def test_update_norm_l1_weighs_clients_by_their_updates(root):
    plan = plan_of(root, [{"fedvg": {"norm": "update-l1"}}, "tests.methods.test_fedvg_options:spy_states", SPY])
    server = server_on(plan, root)
    start = server.params.clone()
    server.run_round(0)
    sizes = []
    for state in server.method_state["spy_states"]["states"]:
        moved = (state - start).double()
        each = [float(moved[leaf.offset : leaf.end].abs().sum()) for leaf in server.layout.params]
        sizes.append(sum(each) / len(each))
    want = [(1 / v) / sum(1 / u for u in sizes) for v in sizes]
    assert server.method_state["spy"]["weights"]["fc1.weight"].tolist() == pytest.approx(want, rel=1e-4)


def random_norms(count=4):
    return torch.rand(count, len(LAYOUT.params), dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.1


def test_released_form_gives_batch_norm_statistics_the_same_from_every_client():
    norms, active = random_norms(), torch.tensor([True, True, True, False])
    table = weights_from_norms(LAYOUT, norms, active, granularity="layer", eps=0.0, buffers="uniform")
    ours = weights_from_norms(LAYOUT, norms, active, granularity="layer", eps=0.0)
    for name in table:
        if "running" in name:
            assert table[name].tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
            assert torch.equal(ours[name], ours["1.weight"])
        else:
            assert torch.equal(table[name], ours[name])
    for granularity in ("model", "block"):
        one, other = (
            weights_from_norms(LAYOUT, norms, active, granularity=granularity, eps=0.0, buffers=kind)
            for kind in ("uniform", "layer")
        )
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_released_form_takes_the_l2_norm_of_tensors_with_one_axis():
    vector = torch.randn(LAYOUT.num_params, generator=torch.Generator().manual_seed(0))
    released, ours = (layer_norms(LAYOUT, vector, "spectral", one_axis=kind) for kind in ("l2", "block"))
    l2 = layer_norms(LAYOUT, vector, "l2")
    for index, leaf in enumerate(LAYOUT.params):
        if len(leaf.shape) == 1:
            assert released[index] == l2[index]
            assert ours[index].isnan()
        else:
            assert released[index] == ours[index]


RELEASED = {"data": {"split_within_clients": True, "validation_set": {"order": "client"}}, "model": {"norm": "batch"}}


def test_as_in_release_takes_l2_norms_of_one_axis_and_gives_buffers_equal_weights(root):
    groups = {"data": {"root": str(root), **RELEASED["data"]}, "model": RELEASED["model"]}

    def digest(options):
        method = {"fedvg": {"granularity": "layer", "norm": "spectral", **options}}
        return run(plan_of(root, [method], **groups), root, rounds=1).params_sha256()

    assert len({digest({"as_in": "release"}), digest({"one_axis": "l2"}), digest({})}) == 3


def test_as_in_release_asks_for_validation_rows_client_after_client(root):
    with pytest.raises(ConfigError, match=r"fedvg needs client-order: set data\.split_within_clients"):
        plan_of(root, [{"fedvg": {"as_in": "release"}}])
    assert plan_of(root, [{"fedvg": {"as_in": "release", "norm": "update", "granularity": "layer"}}]).methods


def test_as_in_release_asks_for_an_external_set_class_after_class(root):
    external = {"external": {"name": "digits", "mapping": "digits_lookalikes"}}
    with pytest.raises(ConfigError, match="fedvg needs client-order"):
        plan_of(root, [{"fedvg": {"as_in": "release"}}], data={"root": str(root), "validation_set": external})
    ordered = {"root": str(root), "validation_set": {**external, "order": "client"}}
    assert plan_of(root, [{"fedvg": {"as_in": "release"}}], data=ordered).methods


def test_options_that_do_not_go_together_are_refused(root):
    with pytest.raises(ConfigError, match=r"fedvg\.one_axis: has no effect with as_in release"):
        plan_of(root, [{"fedvg": {"norm": "spectral", "as_in": "release", "one_axis": "l2"}}])
