"""RegMean: the merged linear layers that best reproduce all clients' outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from methods.moments import one_thread, pack_symmetric, unpack_symmetric
from raysim.base.conditions import applies_with
from raysim.core.layout import Leaf
from raysim.core.method import ClientView, Method, ServerView, Share
from raysim.core.weights import RightMap, Weights


def regmean(
    *, shrink: Annotated[Share, applies_with("as_in", None)] = 0.9, as_in: Literal["fed-mammoth"] | None = None
) -> Method:
    """W = (sum_k W_k G_k)(sum_k G_k)^-1 for every linear layer, with G_k = X_k' X_k of the layer's inputs at client k.

    Jin et al. 2023 (ICLR), eq. 2. The Gram matrices are taken after training, at the client's own model, in eval mode,
    without augmentation. Each client's weight on the layer is the linear map G_k (sum G)^+ in float64; in directions
    without inputs at any client, the layer keeps the broadcast values. Biases, convolutions and all other leaves keep
    the given weights. Adapters are linear layers, too: A and B are merged separately. G_k is divided by its number of
    rows, so that clients count equally, as in the authors' code. A batch's Gram matrix is a float32 product, as in the
    released code; over batches they are summed in float64. Cost: d_in (d_in + 1) / 2 numbers per layer and client go
    up, and the server holds K matrices d_in x d_in for each.

    Args:
      shrink: a in G <- a G + (1 - a) diag(G), in [0, 1]; 1 leaves G unchanged. The paper recommends 0.9.
      as_in: "fed-mammoth", LIVAR's baseline: shrink 0.5, and G_k is not divided by the number of rows of X_k.
        fed-mammoth also uses
        augmented inputs and sums in float32; raysim does not.
    Degenerate cases: clients without a step have weight 0; if no client took a step, nothing changes.
    """
    if as_in == "fed-mammoth":
        shrink = 0.5

    def report(client: ClientView) -> dict[str, Tensor]:
        grams, counts = gram_matrices(client)
        return {name: pack_symmetric(gram if as_in else gram / counts[name]) for name, gram in grams.items()}

    def weigh(weights: Weights, server: ServerView) -> Weights:
        merged = dict(weights)
        with one_thread():
            for name in server.report:
                gram = unpack_symmetric(server.report[name], server.layout.by_name[name].shape[1])
                gram[~server.is_active] = 0
                merged[name] = RightMap(regression_maps(shrunk(gram, shrink)))
        return merged

    return Method("regmean", report=report, weigh=weigh, claims=frozenset({"weights:*", "merge"}))


def gram_matrices(client: ClientView) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Gram matrix of the inputs, and number of rows, of every linear layer whose weight is trained and shared.

    Returns:
      weight leaf name -> (d_in, d_in) float64; inputs of more axes count as rows (attention: one per token).
    """
    module, layers = client.model.module, linear_leaves(client)
    grams = {
        leaf.name: torch.zeros(leaf.shape[1], leaf.shape[1], dtype=torch.float64, device=client.params.device)
        for leaf in layers
    }
    counts = dict.fromkeys(grams, 0)

    def counter(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def count(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].detach().flatten(0, -2).float()
            grams[name] += x.T @ x
            counts[name] += len(x)

        return count

    handles = [module.get_submodule(leaf.layer).register_forward_pre_hook(counter(leaf.name)) for leaf in layers]
    try:
        for batch in client.batches():
            client.model.apply(client.params, batch.inputs)
    finally:
        for handle in handles:
            handle.remove()
    return grams, counts


def linear_leaves(client: ClientView) -> list[Leaf]:
    """The weights of linear layers that are trained and shared.

    Not the output projection inside torch's MultiheadAttention, whose weight is used without calling the layer.
    """
    return [
        leaf
        for leaf in client.layout.params
        if leaf.is_shared
        and leaf.name == f"{leaf.layer}.weight"
        and isinstance(layer := client.model.module.get_submodule(leaf.layer), nn.Linear)
        and not isinstance(layer, NonDynamicallyQuantizableLinear)
    ]


def shrunk(gram: Tensor, factor: float) -> Tensor:
    """a G + (1 - a) diag(G) for (..., d, d)."""
    return factor * gram + (1 - factor) * torch.diag_embed(gram.diagonal(dim1=-2, dim2=-1))


def regression_maps(gram: Tensor) -> Tensor:
    """G_k (sum G)^- for (K, d, d) float64: applied from the right; they sum to the identity where sum G has full rank.

    The inverse is taken of the correlations, D^-1/2 (sum G) D^-1/2 with D the diagonal, whose eigenvalues below what
    float32 products resolve count as 0: inputs of a LayerNorm lie in a hyperplane, and rounding would be inverted there.
    """
    total = gram.sum(0)
    scale = total.diagonal().clamp_min(0).rsqrt().nan_to_num(posinf=0.0)
    correlations = scale[:, None] * total * scale
    inverse: Tensor = torch.linalg.pinv(correlations, rtol=len(total) * torch.finfo(torch.float32).eps, hermitian=True)
    return gram @ (scale[:, None] * inverse * scale)
