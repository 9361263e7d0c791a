"""FedAlign: the last block's Lipschitz constant follows that of a slimmer copy of itself."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raysim.base.errors import MethodError
from raysim.core.layout import Layout
from raysim.core.method import Amount, Batch, ClientView, LayerOp, LossFn, Method, OpenShare, Outputs, State

#: Layers that can be cut to the first channels of each of their tensors.
SLIM = (nn.Conv2d, nn.Linear, nn.modules.batchnorm._BatchNorm, nn.GroupNorm)

#: Power iterations of a spectral norm, as in the authors' code.
ITERATIONS = 10


def fedalign(*, mu: Amount = 0.45, width: OpenShare = 0.25, block: str | None = None) -> Method:
    """Adds a loss term that distils the last block's spectral norms into the block's own first channels.

    Mendieta et al. 2022 (CVPR, arXiv:2111.14213) and their code. For one image, x the input and y the output of the block,
    as (channels, pixels) matrices, x pooled to y's pixels:
        s(x, y) = spectral norm of x y^T / pixels
        L_lip   = mean over images of (s(x_slim, y_slim) - s(x, y))^2
        loss    = inner + mu (inner / L_lip) L_lip,   the ratio in brackets a constant
    y_slim is the block's output for the first channels of x, by the first channels of the block's layers, under
    BatchNorm with the batch's statistics, which are not kept. x and s(x, y) are constants, so only the block's first
    channels learn from the term. The term costs a second pass of a narrow block. The ratio is taken from the code: the
    term always equals mu times the loss so far, so a constant factor of L_lip has no effect.

    The block is the last layer block in front of the classifier (`raysim methods --model` lists layer blocks), or the
    projector of a model with a projector. The paper takes the last stage of a ResNet: `block: layer4`. The authors
    clip gradients at 10 (`local.max_grad_norm`) and use Nesterov momentum 0.9.

    Args:
      mu: strength of the pull, >= 0; 0.45 in the paper.
      width: share of the channels, in (0, 1), rounded, at least one; 0.25 in the paper.
      block: path of the aligned block; null: the last layer block in front of the classifier.
    Raises:
      ValueError: when the run starts, no such block.
      MethodError: a layer of the block has no first channels (attention, grouped convolutions).
    """

    def init(params: Tensor, layout: Layout) -> State:
        block_of(layout, block)
        return {}

    def forward(ops: dict[str, LayerOp], client: ClientView) -> dict[str, LayerOp]:
        if mu == 0:
            return ops
        name = block_of(client.layout, block)
        check_slim(client.model.module.get_submodule(name), name, width)
        inner = ops.get(name)

        def keep(module: nn.Module, x: Tensor) -> Tensor:
            y = inner(module, x) if inner else type(module).forward(module, x)
            if torch.is_grad_enabled():  # not the passes of other methods' reference models
                # Copies: the next layer may work in place.
                client.scratch["passed"] = x.detach().clone(), y.detach().clone()
            return y

        return {**ops, name: keep}

    def loss(inner: LossFn, client: ClientView) -> LossFn:
        if mu == 0:
            return inner
        module = client.model.module.get_submodule(block_of(client.layout, block))

        def value(outputs: Outputs, batch: Batch) -> Tensor:
            total = inner(outputs, batch)
            passed = client.scratch.pop("passed", None)
            if passed is None:  # a pass without the `forward` hook, such as a measurement's
                return total
            x, y = passed
            narrow = x[..., : slim(x.shape[-1], width)] if x.dim() == 3 else x[:, : slim(x.shape[1], width)]
            gap = F.mse_loss(spectral_norms(narrow, slim_pass(module, narrow, width)), spectral_norms(x, y))
            ratio = torch.where(gap > 0, total / gap.clamp_min(torch.finfo(gap.dtype).tiny), 0.0).detach()
            return total + mu * ratio * gap

        return value

    return Method("fedalign", init=init, forward=forward, loss=loss, claims=frozenset({"backward:*"}))


def block_of(layout: Layout, wanted: str | None) -> str:
    """Path of the block: the given one, or the last layer block with weights in front of the classifier."""
    bodies = [leaf for leaf in layout.params if not leaf.is_head]
    if wanted is None:
        blocks = [leaf.block for leaf in bodies if len(leaf.shape) >= 2 and leaf.block != "stem"]
        if not blocks:
            raise ValueError("fedalign: no trained block in front of the classifier; use a deeper model")
        return blocks[-1]
    if not any(leaf.name.startswith(f"{wanted}.") for leaf in bodies):
        names = ", ".join(dict.fromkeys(leaf.block for leaf in bodies))
        raise ValueError(f"fedalign: there is no block {wanted!r} in front of the classifier; there are {names}")
    return wanted


def check_slim(block: nn.Module, name: str, width: float) -> None:
    """Raise MethodError unless every layer with parameters can be cut to its first channels."""
    for path, module in block.named_modules():
        owns = next(module.parameters(recurse=False), None) is not None
        if owns and (not isinstance(module, SLIM) or getattr(module, "groups", 1) != 1):
            raise MethodError(
                f"layer {f'{name}.{path}'.rstrip('.')} is a {type(module).__name__} without first channels of its own",
                "fedalign",
                "choose a block of plain convolutions, linear layers and their normalisation with `block`",
            )
        if isinstance(module, nn.GroupNorm) and (kept := slim(module.num_channels, width)) % module.num_groups:
            raise MethodError(
                f"{kept} of {module.num_channels} channels do not divide into {module.num_groups} groups",
                f"fedalign, layer {name}.{path}",
                "choose another `width`, or another number of groups for the model",
            )


def slim(channels: int, width: float) -> int:
    """Return the number of first channels in a share: rounded, at least one."""
    return max(1, round(channels * width))


def slim_pass(block: nn.Module, x: Tensor, width: float) -> Tensor:
    """Return (B, slim channels, ...): the block at a share of the width, on an input with the same share of the
    channels.

    Every tensor is cut to the first entries of its channel axes: a convolution's or linear layer's outputs and inputs, a
    normalisation's channels. Running statistics are copied, so the pass does not change them.
    """
    values: dict[str, Tensor] = {}
    for name, value in [*block.named_parameters(), *block.named_buffers()]:
        cut = tuple(slice(slim(size, width)) for size in value.shape[:2])
        part = value[cut] if value.dim() else value
        values[name] = part if value.requires_grad else part.clone()
    y: Tensor = torch.func.functional_call(block, values, (x,))
    return y


def spectral_norms(x: Tensor, y: Tensor) -> Tensor:
    """(B,): spectral norm of x y^T / pixels for each image; with several pixels, by power iterations from ones.

    Args:
      x, y: (B, channels), (B, length, channels) or (B, channels, height, width), input and output of a block; y has no
        more pixels than x. A position of a sequence counts as a pixel.
    """
    if x.dim() == 3:
        x, y = x.transpose(1, 2), y.transpose(1, 2)
    if x.dim() == 2:  # of one pixel, an outer product; iterating would only add gradients too small for fast arithmetic
        lengths: list[Tensor] = [torch.linalg.vector_norm(side, dim=1) for side in (x, y)]
        return lengths[0] * lengths[1]
    if x.dim() == 4 and x.shape[2] > y.shape[2]:
        x = F.adaptive_avg_pool2d(x, (y.shape[2], y.shape[3]))
    x, y = x.flatten(2), y.flatten(2)
    tiny = torch.finfo(x.dtype).tiny
    vector = torch.ones_like(x[:, :, :1])
    for _ in range(ITERATIONS):  # through the pixels, which are few: x y^T itself may be large
        vector = x @ (y.transpose(1, 2) @ (y @ (x.transpose(1, 2) @ vector))) / x.shape[2] ** 2
        size = (vector.square().sum(dim=1, keepdim=True) + tiny).sqrt()
        vector = vector / size
    return size[:, 0, 0].sqrt()
