"""RegMean: the merge's property checks, and a round against the formula on naive clients."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from methods.regmean import gram_matrices, linear_leaves, regression_maps, shrunk
from raysim.base.errors import ConfigError
from raysim.core.layout import layout_of
from raysim.core.method import Batch
from raysim.core.weights import RightMap
from tests.support.federations import lora_plan, plan_of, run, server_on
from tests.twins.federation import Naive, assert_close

FEW = {"test": 0.6}


def inputs(sizes=(6, 9, 20), d=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, d, dtype=torch.float64, generator=generator) for n in sizes]


def grams(xs):
    return torch.stack([x.T @ x for x in xs])


def merge(weights, maps):
    return sum(w @ m for w, m in zip(weights, maps, strict=True))


def some_weights(count=3, out=2, d=4):
    return list(torch.randn(count, out, d, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))


def test_identical_grams_give_the_mean():
    gram = grams(inputs()[:1]).expand(3, -1, -1)
    weights = some_weights()
    assert torch.allclose(merge(weights, regression_maps(gram)), sum(weights) / 3)


def test_the_merge_is_the_stationary_point_of_the_outputs_error():
    xs, weights = inputs(), some_weights()
    result = merge(weights, regression_maps(grams(xs)))
    gradient = sum((result - w) @ x.T @ x for w, x in zip(weights, xs, strict=True))
    assert gradient.abs().max() < 1e-10
    assert torch.allclose(regression_maps(grams(xs)).sum(0), torch.eye(4, dtype=torch.float64), atol=1e-12)


def test_least_squares_solutions_merge_to_the_pooled_one():
    xs = inputs()
    ys = [torch.randn(len(x), 2, dtype=torch.float64) for x in xs]
    weights = [torch.linalg.lstsq(x, y).solution.T for x, y in zip(xs, ys, strict=True)]
    pooled = torch.linalg.lstsq(torch.cat(xs), torch.cat(ys)).solution.T
    assert torch.allclose(merge(weights, regression_maps(grams(xs))), pooled, atol=1e-12)
    mean = torch.stack([x.T @ x / len(x) for x in xs])  # another weighting of the clients
    assert not torch.allclose(merge(weights, regression_maps(mean)), pooled, atol=1e-3)


def test_full_shrinkage_is_a_weighted_mean_of_each_input_column():
    gram, weights = grams(inputs()), some_weights()
    diagonal = gram.diagonal(dim1=1, dim2=2)
    want = sum(w * g for w, g in zip(weights, diagonal, strict=True)) / diagonal.sum(0)
    assert torch.allclose(merge(weights, regression_maps(shrunk(gram, 0.0))), want)
    assert torch.equal(shrunk(gram, 1.0), gram)
    half = shrunk(gram, 0.5)
    assert torch.equal(half.diagonal(dim1=1, dim2=2), diagonal)
    assert torch.allclose(half[:, 0, 1], gram[:, 0, 1] / 2)


def test_directions_without_inputs_stay():
    xs = inputs()
    for x in xs:
        x[:, 2] = 0.0  # a dead unit
    maps = regression_maps(grams(xs))
    assert torch.isfinite(maps).all()
    want = torch.diag(torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64))
    assert torch.allclose(maps.sum(0), want, atol=1e-12)


@pytest.mark.parametrize("size", [[3.0, 1.0, 2.0, 1.0], [100.0, 1.0, 3.0, 0.01]])
def test_rounding_is_not_inverted_where_inputs_lie_in_a_hyperplane(size):
    """As those of a LayerNorm do; columns of very different sizes are all merged."""
    size = torch.tensor(size, dtype=torch.float64)
    xs = inputs((30, 40, 50))
    for x in xs:
        x -= x.mean(1, keepdim=True)
        x *= size
    exact, rounded = regression_maps(grams(xs)), regression_maps(grams(xs).float().double())
    ratio = size[:, None] / size  # each column in its own unit: shares of clients
    assert (exact / ratio).abs().max() < 2
    assert ((rounded - exact) / ratio).abs().max() < 1e-4
    weights = some_weights()
    for x in xs:
        want, got = (x @ merge(weights, maps).T for maps in (exact, rounded))
        assert (want - got).abs().max() < 1e-4 * want.abs().max()
    best = torch.linalg.lstsq(torch.cat(xs) / size, torch.cat([x @ w.T for x, w in zip(xs, weights, strict=True)]))
    reached = torch.cat(xs) @ merge(weights, exact).T
    assert torch.allclose(reached, torch.cat(xs) / size @ best.solution, rtol=1e-6, atol=1e-6 * reached.abs().max())


@pytest.mark.parametrize(
    ("norm", "options"), [("none", {}), ("batch", {"shrink": 1.0}), ("none", {"as_in": "fed-mammoth"})]
)
def test_a_round_matches_the_formula_on_naive_clients(norm, options, root):
    plan = plan_of(root, [{"regmean": options}], cohort={"size": 4}, data=FEW, model={"norm": norm})
    server, naive = server_on(plan, root), Naive(plan)
    record = server.run_round(0)
    clients = sorted(record.clients["client"].tolist())
    models = [naive.local(client, 0)[0].eval() for client in clients]
    sizes = [len(plan.manifest.clients[c]) for c in clients]
    start = {name: p.detach().double().clone() for name, p in naive.model.named_parameters()}
    factor = 0.5 if "as_in" in options else options.get("shrink", 0.9)
    views = server.layout.views(server.state)
    for layer in ("fc1", "fc2"):
        total, products = 0, 0
        for client, model in zip(clients, models, strict=True):
            x = inputs_of(model, layer, naive.batch(plan.manifest.clients[client])[0])
            gram = x.T @ x / (1 if "as_in" in options else len(x))
            gram = factor * gram + (1 - factor) * torch.diag(gram.diagonal())
            weight = model.get_submodule(layer).weight.detach().double()
            total, products = total + gram, products + (weight - start[f"{layer}.weight"]) @ gram
        want = products @ torch.linalg.pinv(total, hermitian=True)
        # The engine's Grams are float32 per batch, and features that hardly vary make their sum nearly singular.
        assert_close(views[f"{layer}.weight"].double() - start[f"{layer}.weight"], want, 1e-3, layer)
    for name in ("fc1.bias", "fc2.bias", "conv1.weight", "conv2.bias"):
        mean = sum(n * m.get_parameter(name).detach().double() for n, m in zip(sizes, models, strict=True)) / sum(sizes)
        assert torch.allclose(views[name].double(), mean, atol=1e-6), name


@torch.no_grad()
def inputs_of(model, layer, images):
    kept = []
    handle = model.get_submodule(layer).register_forward_pre_hook(lambda m, x: kept.append(x[0].double()))
    model(images)
    handle.remove()
    return kept[0]


def test_grams_are_float32_products_summed_in_float64():
    """One batch leaves numbers that float32 holds; a thousand small batches after a large one are not lost."""
    linear = nn.Linear(4, 2)
    layout = layout_of(nn.Sequential(OrderedDict(head=linear)), head="head")
    first = torch.randn(7, 4, generator=torch.Generator().manual_seed(2))

    def grams_of(xs):
        model = SimpleNamespace(module=nn.Sequential(OrderedDict(head=linear)), apply=lambda _, x: linear(x))
        batches = [Batch(x, torch.zeros(len(x))) for x in xs]
        client = SimpleNamespace(layout=layout, params=torch.zeros(1), model=model, batches=lambda: iter(batches))
        found, counts = gram_matrices(client)
        assert counts == {"head.weight": sum(len(x) for x in xs)}
        return found["head.weight"]

    one = grams_of([first])
    assert one.dtype == torch.float64
    assert torch.equal(one, one.float().double())
    want = first.double().T @ first.double()
    assert (one - want).abs().max() < 1e-5 * want.abs().max()
    ones, tiny = torch.ones(1, 4), 1e-4 * torch.ones(1, 4)  # 1 + 1e-8 is 1 in float32
    assert (grams_of([ones] + 1000 * [tiny]) - 1 - 1e-5).abs().max() < 1e-10


def test_layers_without_a_gram_are_fedavg(root):
    groups = {"model": {"norm": "batch"}, "data": FEW}
    got, want = (
        server.layout.views(server.state)
        for server in (run(plan_of(root, m, **groups), root, rounds=1) for m in (["regmean"], []))
    )
    different = {name for name in got if not torch.equal(got[name], want[name])}
    assert different == {"fc1.weight", "fc2.weight"}


def test_a_layer_that_is_never_called_keeps_the_weights_of_others():
    """torch's MultiheadAttention uses the weight of its output projection without calling it."""
    module = nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2), "head": nn.Linear(4, 3)})
    client = SimpleNamespace(layout=layout_of(module, head="head"), model=SimpleNamespace(module=module))
    assert [leaf.name for leaf in linear_leaves(client)] == ["head.weight"]


def test_linear_layers_of_attention_and_adapters_are_merged(root):
    plan = lora_plan(root, ["regmean", "tests.support.toys:spy"], cohort={"size": 2}, data=FEW)
    server = run(plan, root, rounds=1)
    weights = server.method_state["spy"]["weights"]
    mapped = {name for name, value in weights.items() if isinstance(value, RightMap)}
    assert mapped == {leaf.name for leaf in plan.layout.params if leaf.name != "head.bias"}


def test_refused(root):
    with pytest.raises(ConfigError, match="regmean and fedvg both decide weights"):
        plan_of(root, ["regmean", "fedvg"])
    plan_of(root, ["fedavgm", "regmean"])
