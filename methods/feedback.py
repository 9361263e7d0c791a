"""Feedback alignment: errors pass down through other tensors than the forward weights. FA, DFA, parts of FLFA."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from raysim.base.errors import MethodError
from raysim.core.layout import Layout, Leaf
from raysim.core.method import ClientView, LayerOp, Method, State
from raysim.core.seeding import derive_seed, torch_generator

Scale = Literal["layer", "none"]
Names = Literal["all"] | list[str]
Geometry = tuple[list[int], list[int], list[int], int]  # stride, padding, dilation, groups
Context = Any  # torch's context, which passes values from `forward` to `backward`


def fa(*, layers: Names = "all", seed: int = 0) -> Method:
    """Feedback alignment: the error passes a layer through a fixed random tensor B instead of its weight.

    Lillicrap et al. 2016 (Nature Communications 7, 13276): dL/dh_(l-1) = B_l^T δ_l; the gradients of the layer's own
    weight and bias stay exact. B is drawn once from the seed and the layer's name, is the same on every client and in
    every round, and is not part of the model's state. FA has no effect in the first layer, whose input needs no
    gradient.

    Args:
      layers: paths of linear and convolution layers, or all.
      seed: seed of the random tensors, independent of the run's seed.
    Raises:
      ValueError: a layer that the model does not have (when the run starts).
    """

    def check(params: Tensor, layout: Layout) -> State:
        chosen_layers(layout, layers, "fa")
        return {}

    @cache
    def back_of(layer: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
        return random_feedback(shape, seed=derive_seed(seed, f"feedback/{layer}")).to(device)

    def forward(ops: dict[str, LayerOp], client: ClientView) -> dict[str, LayerOp]:
        chosen, device = chosen_layers(client.layout, layers, "fa"), client.params.device
        return ops | {
            name: feedback_op(client, name, back_of(name, leaf.shape, device), "none") for name, leaf in chosen.items()
        }

    return Method("fa", init=check, forward=forward, claims=backward_claims(layers))


def dfa(*, blocks: Names = "all", seed: int = 0) -> Method:
    """Direct feedback alignment: each layer block gets the output error through a random matrix of its own.

    Nøkland 2016 (NeurIPS): with e = dL/dlogits, the gradient of a block's input h is e R, with a fixed random
    R of (outputs, numbers in one example's h), uniform in [-1, 1) / sqrt(numbers in h); in a sequence with an output at
    each position, of one position's h. From there down to the next block, through pooling, activation and BatchNorm, and
    inside a block, backpropagation continues; the head's own gradients are exact. R is drawn from the seed and the block's
    name, the same for all clients and rounds.

    A block (`raysim methods --model`) is a residual or encoder block as a whole, so that no error leaks past R along a
    skip connection, and in models without such blocks a layer. Inputs that need no gradient (images) are left alone.

    Args:
      blocks: paths of the blocks whose input gets the output error directly, or all.
      seed: seed of the random matrices, independent of the run's seed.
    Raises:
      ValueError: a block that the model does not have (when the run starts).
    """

    def check(params: Tensor, layout: Layout) -> State:
        chosen_blocks(layout, blocks)
        return {}

    @cache
    def matrix_of(block: str, outputs: int, size: int, device: torch.device) -> Tensor:
        return direct_matrix(block, outputs, size, seed=seed).to(device)

    def forward(ops: dict[str, LayerOp], client: ClientView) -> dict[str, LayerOp]:
        return {**ops, **direct_ops(client, chosen_blocks(client.layout, blocks), matrix_of)}

    return Method("dfa", init=check, forward=forward, claims=frozenset({"backward:*"}))


def feedback_layers(layout: Layout) -> dict[str, Leaf]:
    """Path -> weight leaf of every trained linear and two-dimensional convolution layer, in module order.

    Not embeddings, whose input has no gradient. Not the output projection inside torch's MultiheadAttention, whose weight is
    used without calling the layer.
    """
    weights = {}
    for leaf in layout.params:
        parent = leaf.layer.rpartition(".")[0]
        is_hidden = f"{parent}.in_proj_weight" in layout.by_name
        is_matrix = leaf.name == f"{leaf.layer}.weight" and len(leaf.shape) in (2, 4) and not leaf.is_lookup
        if is_matrix and not is_hidden:
            weights[leaf.layer] = leaf
    return weights


def idle_layer(layout: Layout) -> str:
    """Return the first of `feedback_layers`, whose input needs no gradient; "" if the layer reads trained
    embeddings.
    """
    return "" if any(leaf.is_lookup for leaf in layout.params) else next(iter(feedback_layers(layout)), "")


def chosen_layers(layout: Layout, layers: Names, who: str) -> dict[str, Leaf]:
    """Return the named layers of `feedback_layers`.

    Raises:
      ValueError: an unknown name, or none at all.
    """
    leaves = feedback_layers(layout)
    names = _chosen(list(leaves), layers, f"{who}: no trained linear or convolution layer")
    if not names:
        raise ValueError(f"{who}: no trained linear or convolution layer to work on; name some, or drop {who}")
    return {name: leaves[name] for name in names}


def chosen_blocks(layout: Layout, blocks: Names) -> list[str]:
    """Return the layer blocks with a matrix; "stem" is not a module and is left out.

    Raises:
      ValueError: an unknown name.
    """
    all_blocks = dict.fromkeys(leaf.block for leaf in layout.params if len(leaf.shape) >= 2 and leaf.block != "stem")
    return _chosen(list(all_blocks), blocks, "dfa: no layer block")


def _chosen(candidates: Sequence[str], names: Names, problem: str) -> list[str]:
    if names != "all" and (unknown := [name for name in names if name not in candidates]):
        raise ValueError(f"{problem} {unknown[0]!r}; there are {', '.join(candidates)}")
    return [name for name in candidates if names == "all" or name in names]


def backward_claims(layers: str | list[str]) -> frozenset[str]:
    """Return the claims of an override of the layers' backward pass."""
    return frozenset({"backward:*"} if isinstance(layers, str) else {f"backward:{name}" for name in layers})


def random_feedback(shape: tuple[int, ...], *, seed: int) -> Tensor:
    """A tensor of a weight's shape: uniform within 1/sqrt(fan_in), PyTorch's default of both layer kinds.

    Args:
      shape: (out, in) or (out, in / groups, height, width).
    """
    bound = 1 / math.sqrt(math.prod(shape[1:]))
    return (2 * torch.rand(shape, generator=torch_generator(seed)) - 1) * bound


def direct_matrix(layer: str, outputs: int, size: int, *, seed: int) -> Tensor:
    """(outputs, size): R of direct feedback, uniform in [-1, 1) / sqrt(size), drawn from the seed and the layer's name."""
    generator = torch_generator(derive_seed(seed, f"direct/{layer}"))
    return (2 * torch.rand(outputs, size, generator=generator) - 1) / math.sqrt(size)


def feedback_op(client: ClientView, layer: str, back: Tensor, scale: Scale) -> LayerOp:
    """A layer's operation whose backward pass sends the error through `back`; the forward pass is the layer's own.

    dL/dx = B^T δ with B = back * |weight| / |back| for scale "layer", or B = back for "none". |weight| is computed in
    every forward pass, so it follows each optimiser step. Weight and bias gradients are exact. Where |back| is 0, B is
    0 and no error flows.

    Args:
      back: a constant tensor of the weight's shape.
    Raises:
      MethodError: the module is not plain nn.Linear or nn.Conv2d.
    """
    kind = type(client.model.module.get_submodule(layer)).forward
    if kind not in (nn.Linear.forward, nn.Conv2d.forward):
        what = f"{layer!r} is neither an nn.Linear nor an nn.Conv2d"
        raise MethodError(what, "feedback alignment", "name other layers")
    size = None
    if scale != "none":
        size = torch.linalg.vector_norm(back)
        size = torch.where(size > 0, size, 1.0)

    def op(module: nn.Module, x: Tensor) -> Tensor:
        y: Tensor
        if not (torch.is_grad_enabled() and x.requires_grad):  # the first layer, or a forward pass only
            y = kind(module, x)
            return y
        weight = module.weight
        assert isinstance(weight, Tensor)
        # Under bfloat16 this layer stays in its own precision: its backward pass is written out here, without autocast's casts.
        with torch.autocast(x.device.type, enabled=False):
            factor = None if size is None else torch.linalg.vector_norm(weight.detach()) / size
            if isinstance(module, nn.Conv2d):
                return _convolution(module, x.to(weight.dtype), back, factor)
            y = _Linear.apply(x.to(weight.dtype), weight, module.bias, back, factor)
            return y

    return op


def direct_ops(
    client: ClientView, layers: Sequence[str], matrix_of: Callable[[str, int, int, torch.device], Tensor]
) -> dict[str, LayerOp]:
    """Return operations of layers (or blocks) whose input gradient is e R, and of the head, which stores e.

    Args:
      matrix_of: (layer, outputs, numbers in the input of one example or position, device) -> R.
    """
    errors: dict[str, Tensor] = {}

    def op(layer: str) -> LayerOp:
        def run(module: nn.Module, x: Tensor) -> Tensor:
            if layer in layers and torch.is_grad_enabled() and x.requires_grad:
                x = with_direct_error(x, partial(matrix_of, layer), errors)
            y: Tensor = type(module).forward(module, x)
            return with_kept_error(y, errors) if layer == client.head and y.requires_grad else y

        return run

    return {name: op(name) for name in dict.fromkeys([*layers, client.head])}


def with_kept_error(logits: Tensor, errors: dict[str, Tensor]) -> Tensor:
    """Return the logits (B, ..., outputs); the backward pass stores their gradient dL/dlogits as errors["output"]."""
    logits = logits.clone()
    assert logits.grad_fn is not None
    logits.grad_fn.register_prehook(lambda above: errors.update(output=above[0]))
    return logits


def with_direct_error(
    x: Tensor, matrix_of: Callable[[int, int, torch.device], Tensor], errors: Mapping[str, Tensor]
) -> Tensor:
    """Return the input x (B, ...) with the gradient errors["output"] @ R in place of the backpropagated gradient.

    Where the output error is (B, length, outputs), x is (B, length, ...), and every position gets its own error.

    Args:
      matrix_of: (outputs, numbers of x in one example or position, device) -> R.
    Raises:
      MethodError: in the backward pass, an input without the positions of the output.
    """
    x, shape, dtype, device = x.clone(), x.shape, x.dtype, x.device
    assert x.grad_fn is not None

    def direct(above: tuple[Tensor, ...]) -> tuple[Tensor]:
        error = errors["output"]
        positions = error.shape[:-1]
        if shape[: len(positions)] != positions:
            what = f"an input of shape {tuple(shape)} gets no error of shape {tuple(error.shape)}"
            raise MethodError(what, "direct feedback", "name blocks whose input has the positions of the output")
        matrix = matrix_of(error.shape[-1], shape[len(positions) :].numel(), device)
        return ((error.to(matrix.dtype) @ matrix).view(shape).to(dtype),)

    x.grad_fn.register_prehook(direct)
    return x


def _convolution(module: nn.Conv2d, x: Tensor, back: Tensor, factor: Tensor | None) -> Tensor:
    """Convolve with the module's geometry; non-zero or unequal padding is added to x beforehand, as in PyTorch."""
    pads = module._reversed_padding_repeated_twice
    common = [min(pair) for pair in zip(pads[::2], pads[1::2], strict=True) for _ in range(2)]
    if module.padding_mode != "zeros":
        x, common = F.pad(x, pads, mode=module.padding_mode), [0] * len(pads)
    elif common != list(pads):
        x = F.pad(x, [pad - both for pad, both in zip(pads, common, strict=True)])
    geometry = (list(module.stride), common[::2][::-1], list(module.dilation), module.groups)
    back = back if factor is None else back * factor
    y: Tensor = _Convolution.apply(x, module.weight, module.bias, back, geometry)
    return y


class _Convolution(torch.autograd.Function):
    """conv2d whose input gradient goes through `back`; geometry: stride, padding, dilation, groups."""

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, weight: Tensor, bias: Tensor | None, back: Tensor, geometry: Geometry
    ) -> Tensor:
        ctx.save_for_backward(x, back)
        ctx.geometry = geometry
        return F.conv2d(x, weight, bias, *geometry)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, error: Tensor) -> tuple[Tensor | None, ...]:
        x, back = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.geometry
        grads = torch.ops.aten.convolution_backward(
            error, x, back, [back.shape[0]], stride, padding, dilation, False, [0, 0], groups, ctx.needs_input_grad[:3]
        )
        return *grads, None, None


class _Linear(torch.autograd.Function):
    """linear whose input gradient goes through `back`, times `factor`, a scalar."""

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, weight: Tensor, bias: Tensor | None, back: Tensor, factor: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, back, factor)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, error: Tensor) -> tuple[Tensor | None, ...]:
        x, back, factor = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        error, rows = error.reshape(-1, error.shape[-1]), x.reshape(-1, x.shape[-1])
        grad_x = grad_weight = grad_bias = None
        if needs_x:
            # B^T δ, with the factor on the smaller of the two tensors.
            if factor is None:
                grad_x = error @ back
            elif back.numel() < error.numel():
                grad_x = error @ (back * factor)
            else:
                grad_x = (error * factor) @ back
            grad_x = grad_x.view(x.shape)
        if needs_weight:
            grad_weight = error.t() @ rows
        if needs_bias:
            grad_bias = error.sum(0)
        return grad_x, grad_weight, grad_bias, None, None
