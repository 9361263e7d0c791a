"""Fisher merging: the Fishers against loops over examples, and the merge's property checks."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from methods.fisher import fisher, fisher_sum, per_example_gradients
from raysim.base.errors import ConfigError, MethodError
from raysim.core.layout import layout_of
from raysim.core.method import Batch
from raysim.training.model import BoundModel
from tests.support.federations import lora_plan, plan_of, run, server_on
from tests.twins.federation import Naive

FEW = {"test": 0.7}
MODULE = importlib.import_module("methods.fisher")  # as an attribute of `methods` it is the function


def naive_fisher(model, x, y, kind):
    """name -> sum over examples, one forward and backward for each label."""
    model.eval()
    values = {name: p for name, p in model.named_parameters() if p.requires_grad}
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in values.items()}
    for image, label in zip(x, y, strict=True):
        p = model(image[None]).softmax(1)[0].detach()
        for c in range(len(p)) if kind == "exact" else [int(label)]:
            grads = torch.autograd.grad(F.log_softmax(model(image[None]), 1)[0, c], list(values.values()))
            for name, grad in zip(values, grads, strict=True):
                total[name] += float(p[c]) * grad.double() ** 2
    return total


def client_of(module, head, images, labels, batch=4):
    model = BoundModel(module, layout_of(module, head=head), head=head)
    batches = [Batch(images[i : i + batch], labels[i : i + batch]) for i in range(0, len(labels), batch)]
    return SimpleNamespace(layout=model.layout, params=model.params, model=model, batches=lambda: batches)


@pytest.mark.parametrize("kind", ["exact", "weighted"])
def test_fishers_equal_a_loop_over_examples_with_batch_norm_in_eval_mode(kind):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
    module(torch.randn(20, 1, 4, 4))  # running statistics that are not 0 and 1
    images, labels = torch.randn(7, 1, 4, 4), torch.tensor([0, 1, 2, 0, 1, 2, 2])
    want = naive_fisher(module, images, labels, kind)
    module.train()
    client = client_of(module, "4", images, labels)
    before = client.model.state.clone()
    is_exact = kind == "exact"
    total, count = fisher_sum(client, is_exact=is_exact)
    assert count == 7
    for name, value in client.layout.views(total).items():
        assert torch.allclose(value, want[name], rtol=1e-5, atol=1e-10), name
    assert torch.equal(client.model.state, before)
    assert module.training
    some, count = fisher_sum(client, is_exact=is_exact, num_examples=5)
    assert count == 5
    assert torch.allclose(some, fisher_sum(client_of(module, "4", images[:5], labels[:5]), is_exact=is_exact)[0])


def test_a_model_larger_than_the_limit_goes_example_by_example_to_the_same_sum(monkeypatch):
    torch.manual_seed(0)
    client = client_of(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), "1", torch.randn(7, 1, 2, 2), torch.arange(7) % 3)
    sizes, together = [], fisher_sum(client, is_exact=False)[0]
    monkeypatch.setattr(MODULE, "GRADIENT_ENTRIES", 14)  # below the model's 15

    def counted(*given):
        gradients = per_example_gradients(*given)
        return lambda images, labels: sizes.append(len(labels)) or gradients(images, labels)

    monkeypatch.setattr(MODULE, "per_example_gradients", counted)
    assert torch.allclose(fisher_sum(client, is_exact=False)[0], together, rtol=1e-6)
    monkeypatch.setattr(MODULE, "GRADIENT_ENTRIES", 45)
    fisher_sum(client, is_exact=False)
    assert sizes == [1] * 7 + [3, 1, 3]


def test_logistic_regression_has_the_closed_form():
    torch.manual_seed(1)
    module = nn.Sequential(nn.Flatten(), nn.Linear(3, 2, bias=False))
    images, labels = torch.randn(6, 1, 1, 3), torch.zeros(6, dtype=torch.int64)
    p = module(images).softmax(1)[:, 1].detach().double()
    want = (images[:, 0, 0].double().square() * (p * (1 - p))[:, None]).sum(0)
    total, _ = fisher_sum(client_of(module, "1", images, labels), is_exact=True)
    assert torch.allclose(total.view(2, 3), want.expand(2, 3), rtol=1e-5)


LAYOUT = layout_of(nn.Sequential(nn.Linear(2, 2, bias=False)), head="0")


def merged(fishers, updates, weights=None):
    """The server's step for these Fishers; totals are plain sums."""
    count = len(fishers)
    vectors = {"fisher": fishers, "product": fishers * updates}
    weights = torch.full((count,), 1 / count, dtype=torch.float64) if weights is None else weights
    server = SimpleNamespace(
        layout=LAYOUT,
        weights={"0.weight": weights},
        report={"norm": fishers.norm(dim=1)},
        total=lambda name, w: (w["0.weight"][:, None] * vectors[name]).sum(0),
    )
    update, _ = fisher().server_update(torch.full((4,), 9.0), {}, server)
    return update.double()


def some(count=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(count, 4, dtype=torch.float64, generator=generator) + 0.1 for _ in range(2))


def test_equal_fishers_give_the_weighted_mean():
    fishers, updates = some()
    weights = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    assert torch.allclose(merged(fishers[:1].expand(3, -1), updates, weights), weights @ updates, atol=1e-6)


def test_a_factor_of_each_client_changes_nothing():
    fishers, updates = some()
    own = torch.tensor([1.0, 1e-4, 30.0], dtype=torch.float64)[:, None]
    assert torch.allclose(merged(own * fishers, updates), merged(fishers, updates), atol=1e-6)


def test_the_merge_is_stationary_and_its_weights_sum_to_one():
    fishers, updates = some()
    weights = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    result = merged(fishers, updates, weights)
    unit = fishers / fishers.norm(dim=1, keepdim=True)
    gradient = (weights[:, None] * unit * (result - updates)).sum(0)
    assert gradient.abs().max() < 1e-6
    assert torch.allclose(merged(fishers, torch.ones_like(updates), weights), torch.ones(4, dtype=torch.float64))


def test_one_client_is_that_client_and_none_leaves_all():
    fishers, updates = some(1)
    assert torch.allclose(merged(fishers, updates), updates[0], atol=1e-6)
    assert not merged(fishers, updates, torch.zeros(1, dtype=torch.float64)).any()


def test_as_in_fed_mammoth_fishers_of_0_give_the_mean():
    server = SimpleNamespace(
        layout=LAYOUT,
        weights={"0.weight": torch.tensor([0.5, 0.5], dtype=torch.float64)},
        report={"norm": torch.zeros(2)},
        total=lambda name, weights: torch.zeros(4, dtype=torch.float64),
    )
    mean = torch.tensor([1.0, -2.0, 3.0, 0.0])
    update, _ = fisher(as_in="fed-mammoth").server_update(mean, {}, server)
    assert torch.allclose(update, mean)


@pytest.mark.parametrize(
    ("name", "norm", "options"),
    [
        ("exact", "none", {"num_examples": 6}),
        ("exact", "batch", {"num_examples": 9}),
        ("fed-mammoth", "batch", {"as_in": "fed-mammoth"}),
    ],
)
def test_a_round_matches_the_formula_on_naive_clients(name, norm, options, root):
    methods = [{"fisher": options}]
    plan = plan_of(root, methods, cohort={"size": 3}, data=FEW, model={"norm": norm, "width": 2, "hidden": 8})
    server, naive = server_on(plan, root), Naive(plan)
    clients = server.run_round(0).clients["client"].tolist()
    clients.sort()
    above, below, sizes = {}, {}, [len(plan.manifest.clients[c]) for c in clients]
    for client in clients:
        model, _ = naive.local(client, 0)
        rows = naive.pass_rows(client)
        count = min(len(rows), options.get("num_examples", len(rows)))
        found = naive_fisher(model, *naive.batch(rows[:count]), "weighted" if name == "fed-mammoth" else "exact")
        if name == "fed-mammoth":
            found, scale = {n: f + 1e-12 for n, f in found.items()}, 1.0
        else:
            found = {n: (f / count).clamp_min(1e-6) for n, f in found.items()}
            scale = len(rows) / sum(sizes) / float(torch.cat([f.flatten() for f in found.values()]).norm())
        for n, p in model.named_parameters():
            above[n] = above.get(n, 0) + scale * found[n] * p.detach().double()
            below[n] = below.get(n, 0) + scale * found[n]
    views = server.layout.views(server.state)
    for n in above:
        assert torch.allclose(views[n].double(), above[n] / below[n], atol=2e-6), n


@pytest.mark.parametrize("kind", ["exact", "weighted"])
def test_gradients_that_share_memory_are_squared_once(kind):
    """Of timm's ViT the gradient of the class token is a view of that of the position embedding."""
    torch.manual_seed(0)
    module = VisionTransformer(img_size=4, patch_size=2, in_chans=1, num_classes=3, embed_dim=8, depth=1, num_heads=2)
    module.eval()
    images, labels = torch.randn(5, 1, 4, 4), torch.tensor([0, 1, 2, 0, 1])
    want = naive_fisher(module, images, labels, kind)
    client = client_of(module, "head", images, labels)
    for name, value in client.layout.views(fisher_sum(client, is_exact=kind == "exact")[0]).items():
        assert torch.allclose(value, want[name], rtol=1e-3, atol=1e-9), name


@pytest.mark.parametrize("methods", [["fisher", "norm_bounding"], ["norm_bounding", "fisher"], ["fisher", "fednova"]])
def test_factors_of_other_methods_would_cancel(methods, root):
    plan = plan_of(root, methods, cohort={"size": 3, "stragglers": 0.5}, data=FEW)
    with pytest.raises(MethodError, match="do not sum to one, and fisher divides by the weights"):
        run(plan, root, rounds=1)


def test_attention_and_adapters_have_fishers(root):
    plan = lora_plan(root, ["fisher", "tests.support.toys:spy"], cohort={"size": 2}, data=FEW)
    server = server_on(plan, root)
    start = server.params.clone()
    record = server.run_round(0)
    assert record.metrics["comm/up_mb"] * 1e6 == pytest.approx(2 * (12 * plan.layout.num_params + 8))
    assert ((server.params - start).abs() > 0).double().mean() > 0.9


def test_composition(root):
    plan_of(root, ["fedvg", "fisher"])
    plan_of(root, ["fisher", "fedavgm"])
    for methods, words in (
        (["fedavgm", "fisher"], "fisher after fedavgm would discard"),
        (["regmean", "fisher"], "regmean and fisher both decide merge"),
    ):
        with pytest.raises(ConfigError, match=words):
            plan_of(root, methods)
