"""LIVAR against a naive reference written from the formulas."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from methods.livar import livar
from methods.livar.merging import adapters_of
from tests.support.federations import lora_plan, plan_of, server_on
from tests.twins.federation import assert_close
from tests.twins.livar import FEW, LAYERS, NaiveLivar

VARIANTS = {
    "default": {},
    "paper": {"table": "paper"},
    "factors": {"evaluate": "factors"},
    "code": {"evaluate": "code"},
    "lora": {"components": "lora"},
    "head": {"components": "head"},
    "counts": {"layers": "examples", "variance": "counts"},
    "examples": {"layers": "examples"},
    "released": {"variance": "released", "evaluate": "code"},
    "released-off": {"variance": "released", "evaluate": "code", "layers": "examples"},
}


#: Of what a run with AdamW moved: it divides by the gradient's own size, so that entries with hardly any gradient take
#: steps of noise.
ADAMW_SHARE = 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_livar_matches_the_formulas_over_2_rounds(name, root):
    options = VARIANTS[name]
    data = {**FEW, "normalise": "half"} if name.startswith("released") else FEW
    plan = lora_plan(root, [{"livar": options}], cohort={"size": 6}, data=data, local={"batch_size": 8})
    server, naive = server_on(plan, root), NaiveLivar(plan, **options)
    counts = options.get("components") != "head" and "layers" not in options
    for index in range(2):
        record = server.run_round(index)
        naive.round(index)
        assert ("livar.importance_a" in record.arrays) == counts
        if counts:
            for factor, key in enumerate(("importance_a", "importance_b")):
                assert_close(record.arrays[f"livar.{key}"], naive.importance[..., factor], ADAMW_SHARE)
        if options.get("components") != "head":
            want = np.array([naive.coefficients[layer] for layer in naive.layers]).T
            assert_close(record.arrays["livar.coefficients"], want)
            assert record.arrays["livar.coefficients:columns"].tolist() == naive.layers
        if options.get("components") != "lora":
            want = np.array([w or [0.0] * 6 for w in naive.heads]).T
            assert_close(record.arrays["livar.head_weights"], want)
        assert_same(server, naive)
        if options.get("components") != "head":  # which scores what it ships
            assert record.metrics["server/loss"] == pytest.approx(naive.loss(), rel=1e-5)
        naive.follow(server)


def assert_same(server, naive):
    """Head, broadcast product and frozen matrix of every layer agree."""
    views, begun = server.layout.views(server.state), naive.begun
    for part in ("weight", "bias"):
        name = f"head.{part}"
        assert_close(views[name] - begun[name], naive.model.state_dict()[name] - begun[name], ADAMW_SHARE, name)
    for layer in naive.layers:
        product = views[f"{layer}.lora_B.default.weight"] @ views[f"{layer}.lora_A.default.weight"]
        want = naive.factor(naive.model, layer, "B") @ naive.factor(naive.model, layer, "A")
        assert_close(product, want, ADAMW_SHARE, layer)


def fake_client(layout, start, memory=None):
    params, memory = start.clone(), {} if memory is None else memory
    return SimpleNamespace(layout=layout, start=start, params=params, trained=params, scratch={}, memory=memory)


@pytest.mark.parametrize("lr", [0.0, 0.1])
def test_importance_of_plain_sgd_is_lr_times_squared_gradients(lr, root):
    layout = lora_plan(root).layout
    start = torch.randn(layout.num_params)
    method, client = livar(components="lora"), fake_client(layout, start)
    gradient = method.grads(lambda params, batch: 2 * params, client)
    want = torch.zeros(len(LAYERS), 2, dtype=torch.float64)
    for _ in range(3):
        grad = gradient(client.params, None)
        for index, pair in enumerate(adapters_of(layout)):
            for factor, leaf in enumerate((pair.a, pair.b)):
                want[index, factor] += lr * grad[leaf.offset : leaf.end].double().square().sum()
        client.params.sub_(lr * grad)
        grad.fill_(99.0)  # what others do to it afterwards does not count
    got = method.report(client)["importance"]
    assert torch.allclose(got, want, rtol=1e-5)
    # Cumulative: what the memory holds is added to, once.
    assert torch.equal(client.memory["importance"], got)
    again = fake_client(layout, start, client.memory)
    method.grads(lambda params, batch: params, again)
    assert torch.equal(method.report(again)["importance"], got)


def test_unseen_class_keeps_row_and_bias_and_one_holder_gives_its_own(root):
    groups = {"partition": {"scheme": "shards", "shards_per_client": 1, "num_clients": 12}, "cohort": {"size": 2}}
    plan = lora_plan(root, ["livar"], **groups)
    server = server_on(plan, root)
    before = {name: value.clone() for name, value in server.layout.views(server.state).items()}
    record = server.run_round(0)
    held = server.federation.class_counts[record.clients["client"]].sum(0) > 0
    assert not held.all()
    weights = record.arrays["livar.head_weights"]
    assert np.allclose(weights.sum(0), held)
    after = server.layout.views(server.state)
    for part in ("head.weight", "head.bias"):
        moved = (after[part] != before[part]).reshape(10, -1).any(1).numpy()
        assert (moved == held).all()


def test_one_participant_ships_and_scores_that_client(root):
    server = server_on(lora_plan(root, ["livar"], cohort={"size": 1}, data=FEW), root)
    scored = server.run_round(0).metrics["server/loss"]
    assert scored == pytest.approx(server.evaluate()["server/loss"], abs=1e-5)


def test_head_component_runs_without_adapters_and_with_batch_norm(root):
    groups = {"model": {"norm": "batch"}, "data": FEW}
    server = server_on(plan_of(root, [{"livar": {"components": "head"}}], **groups), root)
    plain = server_on(plan_of(root, **groups), root)
    for one in (server, plain):
        one.run_round(0)
    mine, theirs = (one.layout.views(one.state) for one in (server, plain))
    assert {name for name in mine if not torch.equal(mine[name], theirs[name])} == {"fc2.weight", "fc2.bias"}
