"""Feedback through other tensors: exact where B = W, the matrix form elsewhere; property checks of FA and DFA."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from methods.feedback import (
    dfa,
    direct_ops,
    fa,
    feedback_layers,
    feedback_op,
    idle_layer,
    random_feedback,
    with_direct_error,
    with_kept_error,
)
from raysim.base.errors import MethodError
from raysim.core.layout import layout_of
from raysim.core.method import Batch
from raysim.models import ModelSpec, build_model, head_of
from raysim.training.model import BoundModel
from raysim.training.tasks import cross_entropy
from tests.support.federations import plan_of, run, server_on, steps_plan

KINDS = {
    "linear": (lambda: nn.Linear(6, 5), (7, 6)),
    "linear-3d": (lambda: nn.Linear(6, 5, bias=False), (3, 4, 6)),
    "3x3": (lambda: nn.Conv2d(4, 6, 3, padding=1), (3, 4, 7, 7)),
    "1x1": (lambda: nn.Conv2d(4, 6, 1, bias=False), (3, 4, 7, 7)),
    "7x7/2": (lambda: nn.Conv2d(4, 6, 7, stride=2, padding=3), (3, 4, 8, 8)),
    "strided": (lambda: nn.Conv2d(4, 6, 3, stride=(2, 3), padding=(1, 0)), (3, 4, 8, 9)),
    "grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2), (3, 4, 7, 7)),
    "depth-wise": (lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4), (3, 4, 7, 7)),
    "strided depth-wise": (lambda: nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=4, bias=False), (3, 4, 7, 7)),
    "dilated": (lambda: nn.Conv2d(4, 6, 3, padding=2, dilation=2), (3, 4, 7, 7)),
    "same": (lambda: nn.Conv2d(4, 6, (2, 3), padding="same"), (3, 4, 7, 7)),
    "reflect": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (3, 4, 7, 7)),
}


def layer_and_input(kind, channels_last=False, dtype=torch.float32):
    torch.manual_seed(0)
    make, shape = KINDS[kind]
    layer, x = make().to(dtype), torch.randn(shape, dtype=dtype)
    if channels_last and x.dim() == 4:
        layer, x = layer.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    return layer, x


def through(layer, back, scale="none"):
    """x -> layer(x) with the error sent through `back`."""
    op = feedback_op(SimpleNamespace(model=SimpleNamespace(module=nn.ModuleDict({"a": layer}))), "a", back, scale)
    return lambda x: op(layer, x)


def gradients(run, layer, x, below):
    """Loss and the gradients of the layer and of the layer below it."""
    layer.zero_grad(set_to_none=True)
    below = below.clone().requires_grad_()
    y = run(x * below)
    loss = torch.tanh(y).square().sum()
    loss.backward()
    return [loss.detach(), y.detach(), below.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_feedback_through_the_weight_is_backpropagation_bit_for_bit(kind, channels_last, dtype):
    layer, x = layer_and_input(kind, channels_last, dtype)
    if channels_last and x.dim() != 4:
        return
    below = torch.randn_like(x)
    want = gradients(layer, layer, x, below)
    for scale in ("none", "layer"):
        found = gradients(through(layer, layer.weight.detach().clone(), scale), layer, x, below)
        for a, b in zip(found, want, strict=True):
            assert torch.equal(a, b), scale


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_match_the_matrix_form(kind):
    """A layer is a matrix M(W) on flattened examples: its input gradient is δ M(B), its own gradients do not see B."""
    layer, x = layer_and_input(kind, dtype=torch.float64)
    back = torch.randn_like(layer.weight)
    size, plain = x[0].numel(), copy.deepcopy(layer)
    basis = torch.eye(size, dtype=x.dtype).view(size, *x.shape[1:])
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.weight.copy_(back)
        if other.bias is not None:
            other.bias.zero_()
        matrix = other(basis).flatten(1)
    x = x.requires_grad_()
    y = through(layer, back)(x)
    error = torch.randn_like(y)
    y.backward(error)
    assert torch.allclose(x.grad.flatten(1), error.flatten(1) @ matrix.t(), atol=1e-12)
    plain(x.detach()).backward(error)
    for a, b in zip(layer.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, atol=1e-12)
    x.grad = None
    through(layer, 3 * back)(x).backward(error)
    assert torch.allclose(x.grad.flatten(1), 3 * error.flatten(1) @ matrix.t(), atol=1e-11)


def sent_through(layer, back, scale):
    """B itself: what the unit errors of a linear layer become."""
    x = torch.zeros(layer.out_features, layer.in_features, requires_grad=True)
    through(layer, back, scale)(x).backward(torch.eye(layer.out_features))
    return x.grad


def test_scaling_follows_the_current_weight():
    torch.manual_seed(0)
    layer = nn.Linear(6, 5)
    anchor = layer.weight.detach().clone()
    with torch.no_grad():
        layer.weight.add_(torch.randn_like(layer.weight))
    weight = layer.weight.detach()
    whole, none = (sent_through(layer, anchor, scale) for scale in ("layer", "none"))
    assert float(whole.norm()) == pytest.approx(float(weight.norm()), rel=1e-6)
    assert float(F.cosine_similarity(whole.flatten(), anchor.flatten(), dim=0)) == pytest.approx(1, abs=1e-6)
    assert torch.equal(none, anchor)


@pytest.mark.parametrize("batch", [2, 200])
def test_scaling_is_the_same_whichever_side_it_is_applied_to(batch):
    torch.manual_seed(0)
    layer = nn.Linear(6, 5)
    anchor = torch.randn(5, 6)
    x = torch.randn(batch, 6, requires_grad=True)
    error = torch.randn(batch, 5)
    through(layer, anchor, "layer")(x).backward(error)
    assert torch.allclose(x.grad, error @ (anchor * layer.weight.norm() / anchor.norm()), atol=1e-6)


def test_a_zero_feedback_stays_zero():
    layer = nn.Linear(4, 3)
    assert torch.equal(sent_through(layer, torch.zeros(3, 4), "layer"), torch.zeros(3, 4))


def test_no_gradient_below_means_no_override():
    layer, x = layer_and_input("3x3")
    run = through(layer, torch.zeros_like(layer.weight))
    assert type(run(x).grad_fn) is type(layer(x).grad_fn)
    with torch.no_grad():
        assert torch.equal(run(x), layer(x))


def test_only_plain_layers_can_be_overridden():
    with pytest.raises(MethodError, match="neither"):
        through(nn.BatchNorm1d(3), torch.ones(3))


def test_layers_with_a_matrix_are_found():
    module = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.MultiheadAttention(4, 2), nn.Linear(4, 3))
    assert list(feedback_layers(layout_of(module, head="3"))) == ["0", "3"]


def test_random_feedback_depends_on_its_seed_alone():
    first = random_feedback((4, 3, 2, 2), seed=1)
    assert torch.equal(first, random_feedback((4, 3, 2, 2), seed=1))
    assert not torch.equal(first, random_feedback((4, 3, 2, 2), seed=2))
    assert float(first.abs().max()) <= 12**-0.5


def views_after_one_step(root, methods):
    server = run(steps_plan(root, methods, steps=1), root, rounds=1)
    return {name: value.clone() for name, value in server.layout.views(server.state).items()}


def test_fa_in_one_layer_changes_only_what_lies_below(root):
    plain, other = (views_after_one_step(root, methods) for methods in ([], [{"fa": {"layers": ["fc1"]}}]))
    for name in plain:
        assert torch.equal(plain[name], other[name]) == (not name.startswith("conv")), name


def test_fa_in_the_first_layer_is_backpropagation(root):
    digest = run(plan_of(root), root).params_sha256()
    assert run(plan_of(root, [{"fa": {"layers": ["conv1"]}}]), root).params_sha256() == digest


def test_fa_feedback_is_the_same_on_all_clients_and_never_changes(root):
    method = fa(layers=["fc1"], seed=5)
    layout = plan_of(root).layout
    found = []
    for _ in range(2):
        torch.manual_seed(len(found))
        layer = nn.Linear(layout.by_name["fc1.weight"].shape[1], 16)
        module = nn.ModuleDict({"fc1": layer})
        client = SimpleNamespace(layout=layout, params=torch.zeros(1), model=SimpleNamespace(module=module))
        x = torch.zeros(16, layer.in_features, requires_grad=True)
        method.forward({}, client)["fc1"](layer, x).backward(torch.eye(16))
        found.append(x.grad)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], layer.weight)


def test_dfa_leaves_the_head_alone_and_changes_what_lies_below(root):
    plain, other = (views_after_one_step(root, methods) for methods in ([], ["dfa"]))
    for name in plain:
        assert torch.equal(plain[name], other[name]) == name.startswith("fc2"), name
    partly = views_after_one_step(root, [{"dfa": {"blocks": ["conv2"]}}])
    for name in plain:
        assert torch.equal(plain[name], partly[name]) == (not name.startswith("conv1")), name


def test_dfa_with_one_hidden_layer_through_the_heads_weight_is_backpropagation():
    torch.manual_seed(0)
    hidden, head = nn.Linear(5, 4), nn.Linear(4, 3)
    x, y = torch.randn(6, 5), torch.randint(3, (6,))
    F.cross_entropy(head(torch.relu(hidden(x))), y).backward()
    want = [p.grad.clone() for p in (*hidden.parameters(), *head.parameters())]
    hidden.zero_grad()
    head.zero_grad()
    errors = {}
    logits = with_kept_error(
        head(with_direct_error(torch.relu(hidden(x)), lambda *_: head.weight.detach(), errors)), errors
    )
    F.cross_entropy(logits, y).backward()
    assert torch.allclose(errors["output"], (logits.softmax(1) - F.one_hot(y, 3)) / 6, atol=1e-7)
    for p, grad in zip((*hidden.parameters(), *head.parameters()), want, strict=True):
        assert torch.allclose(p.grad, grad, atol=1e-7)


@pytest.mark.parametrize("batch", [1, 3])
def test_direct_feedback_is_the_output_error_through_the_layers_matrix(batch):
    torch.manual_seed(0)
    hidden, head, matrix, asked = nn.Linear(5, 4), nn.Linear(4, 3), torch.randn(3, 5), []

    def matrix_of(layer, classes, size, device):
        asked.append((layer, classes, size))
        return matrix

    ops = direct_ops(SimpleNamespace(head="head"), ["hidden"], matrix_of)
    x, y = torch.randn(batch, 5, requires_grad=True), torch.arange(batch)
    logits = ops["head"](head, ops["hidden"](hidden, x))
    F.cross_entropy(logits, y).backward()
    assert asked == [("hidden", 3, 5)]
    assert torch.allclose(x.grad, (logits.softmax(1) - F.one_hot(y, 3)) / batch @ matrix, atol=1e-6)


def test_direct_feedback_of_a_sequence_gives_every_position_its_own_error():
    torch.manual_seed(0)
    hidden, head, matrix = nn.Linear(5, 4), nn.Linear(4, 3), torch.randn(3, 5)
    ops = direct_ops(SimpleNamespace(head="head"), ["hidden"], lambda layer, outputs, size, device: matrix)
    x, y = torch.randn(2, 6, 5, requires_grad=True), torch.randint(3, (2, 6))
    logits = ops["head"](head, ops["hidden"](hidden, x))
    F.cross_entropy(logits.flatten(0, 1), y.flatten()).backward()
    assert torch.allclose(x.grad, (logits.softmax(2) - F.one_hot(y, 3)) / 12 @ matrix, atol=1e-6)


def test_direct_feedback_refuses_an_input_without_the_positions_of_the_output():
    errors = {"output": torch.ones(2, 6, 3)}
    x = with_direct_error(torch.ones(2, 5, requires_grad=True), lambda *_: torch.ones(3, 5), errors)
    with pytest.raises(MethodError, match=r"input of shape \(2, 5\) gets no error of shape \(2, 6, 3\)"):
        x.sum().backward()


def test_embeddings_are_no_layers_of_feedback():
    layout = layout_of(nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)), head="2")
    assert list(feedback_layers(layout)) == ["1", "2"]
    assert not idle_layer(layout)
    assert idle_layer(layout_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), head="1")) == "0"


def test_dfa_without_an_error_moves_nothing():
    torch.manual_seed(0)
    hidden, head = nn.Linear(5, 4), nn.Linear(4, 3)
    errors = {}
    matrix = torch.randn(3, 4)
    x = with_direct_error(torch.relu(hidden(torch.randn(6, 5))), lambda *_: matrix, errors)
    (with_kept_error(head(x), errors) * 0).sum().backward()
    assert all(not p.grad.any() for p in (*hidden.parameters(), *head.parameters()))


def test_unknown_layers_and_blocks_are_named(root):
    layout = plan_of(root).layout
    with pytest.raises(
        ValueError, match="no trained linear or convolution layer 'fc9'; there are conv1, conv2, fc1, fc2"
    ):
        fa(layers=["fc9"]).init(torch.zeros(1), layout)
    with pytest.raises(ValueError, match="no layer block 'fc9'"):
        dfa(blocks=["fc9"]).init(torch.zeros(1), layout)


def test_overrides_leave_the_layout_as_it_is(root):
    plain = server_on(plan_of(root), root)
    for methods in (["fa"], ["dfa"], ["flfa"]):
        server = server_on(plan_of(root, methods), root)
        assert server.layout == plain.layout
        assert server.params_sha256() == plain.params_sha256()


@pytest.mark.parametrize(("name", "num_layers"), [("mobilenetv2", 53), ("vit_tiny_patch16_224", 50)])
def test_a_whole_network_through_its_own_weights_is_backpropagation_bit_for_bit(name, num_layers):
    """All layers at once; with random feedback only the head's own gradients are left exact."""
    spec = ModelSpec(name, 3, (32, 32, 3))
    head = head_of(spec)
    for channels_last in (False, True):
        module = build_model(spec, seed=0)
        model = BoundModel(module, layout_of(module, head=head, channels_last=channels_last), head=head)
        module.train()
        layout, start = model.layout, model.state.clone()
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(2, 3, 32, 32, generator=generator)
        if channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        batch = Batch(images, torch.tensor([0, 2]))
        client = SimpleNamespace(
            model=model, layout=layout, params=model.params, head=head, class_counts=torch.ones(3), start=start
        )

        def gradient(model=model, batch=batch):
            torch.manual_seed(0)  # dropout
            return model.gradient(cross_entropy, model.params, batch)

        want = gradient()
        layers = feedback_layers(layout)
        assert len(layers) == num_layers
        with model.overridden({n: feedback_op(client, n, layout.view(start, w), "layer") for n, w in layers.items()}):
            assert torch.equal(gradient(), want)
    for method in (fa(), dfa()):
        with model.overridden(method.forward({}, client)):
            other = gradient()
        for leaf in layout.params:
            found, exact = layout.view(other, leaf), layout.view(want, leaf)
            if leaf.is_head or bool(exact.any()):
                assert torch.equal(found, exact) == leaf.is_head, (method.name, leaf.name)
