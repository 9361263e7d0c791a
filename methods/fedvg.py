"""FedVG: aggregation weights from the norms of validation gradients.

Clients report the norms (`layer_norms`); `weights_from_norms` computes weights from the norms (eqs. 4 and 5).
`scored.py` defines scores, and replaces the given weights by the weights of a score.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

import torch
from torch import Tensor

from methods.granularity import spread
from methods.scored import ClientScore, Granularity, Part, inverse_weights, part_of, weights_from_score
from raysim.base.conditions import applies_with, applies_without
from raysim.core.layout import Layout
from raysim.core.method import Amount, ClientView, Count, Method, State
from raysim.core.weights import Weights, normalised

Norm = Literal["l1", "l2", "spectral", "update", "update-l1"]


def fedvg(
    *,
    granularity: Granularity = "model",
    norm: Norm = "l1",
    leaves: Part = "all",
    mix: Literal["replace", "average"] = "replace",
    val_mode: Annotated[Literal["train", "eval"], applies_without("norm", "update", "update-l1")] = "train",
    every: Count = 1,
    one_axis: Annotated[
        Literal["block", "l2"], applies_with("norm", "spectral"), applies_with("as_in", None)
    ] = "block",
    as_in: Annotated[
        Literal["release"] | None,
        applies_without("norm", "update", "update-l1") | applies_with("granularity", "layer", "auto"),
    ] = None,
    eps: Amount = 1e-8,
) -> Method:
    """A client's weight is inverse to the size of the validation gradient at its model.

    FedVG (Devkota et al., arXiv:2602.21399), eqs. 4 and 5, with v_k^l the norm of client k's validation gradient on layer
    l (a parameter tensor):
        model:  G_k = (1/L) sum_l v_k^l,   s_k = (1 / (G_k + eps)) / sum_j (1 / (G_j + eps))
        layer:  one weight per layer from v_k^l;   block: one per layer block from the mean of v_k^l inside it.
    The gradient is taken by the trainer that holds the client's model, straight after local training, by plain
    backpropagation of the mean cross-entropy; only the norms travel.

    `as_in: release` is the released code where it deviates. With one weight per layer, buffers have the same weight from
    every client, and one_axis is "l2". The validation rows are scored client by client, so the rows must have this
    order (data.validation_set.order: client), which changes weights under train-mode BatchNorm. Left out: the released
    eps, which has another unit and matters only if a gradient vanishes; layer blocks that are stages of a ResNet
    (model.blocks: stage).

    Args:
      granularity: number of weights of a client: one for the whole model, one for each tensor ("layer"), or one for
        each layer block. "auto" (ours) uses in every round the granularity whose aggregated model has the lowest loss
        on the validation set, and logs the choice (0 model, 1 layer, 2 block).
      norm: number by which a client is scored. "l1", "l2": norm of the validation gradient; "spectral": largest
        singular value of the gradient, for tensors with two or more axes, reshaped to (first, rest); "update": L2 norm
        of the client's update instead of a gradient (the paper's "delta"; needs no data); "update-l1": L1 norm of the
        update. The paper does not state the norm inside "delta".
      leaves: parameters that get these weights and whose norms are used: all, the classifier ("head"), everything but
        the classifier ("body"), or the adapters of model.lora. All other parameters keep the aggregation weights that
        they have, for example those of a second method: `livar` with `components: head` and `leaves: adapters`.
      mix: "replace": these weights alone; "average": the mean of these weights and the clients' shares of the examples
        (the paper's FedAvg + FedVG); if another method of the run, such as `scaffold`, asks for equal weights, equal
        weights take the place of the shares.
      val_mode: mode of the network while scoring, which changes the scores of networks with BatchNorm. The released
        code uses "train". With BatchNorm or dropout in train mode, scoring uses the clients' batch size, as the
        released code does; otherwise it uses larger batches, which are faster and change the sum of the gradients only
        by rounding.
      every: n: clients are scored in every n-th round, from the first round on. In the other rounds, a client keeps its
        last score, and only clients without a score are scored (the metric `scored` is their number). If few clients
        take part in a round, last scores are old, and accuracy suffers.
      one_axis: replacement for the spectral norm of a tensor with one axis: the weight of the tensor's layer block, or
        the tensor's L2 norm.
      as_in: "release" sets one_axis and the weight of buffers as in the released code. If norm is a norm of the
        gradient, data.validation_set.order must be client, the order of the released code.
      eps: the constant in eq. 5, >= 0.
    Degenerate cases: a client without a step, or with a non-finite norm, gets weight 0; if no client is left, the
    global model stays. If eps is 0 and some norms are exactly 0, the clients with these norms share the weight equally.
    A buffer has the weight of the first tensor of its layer; a parameter without the chosen kind of norm has the weight
    of its layer block.
    Raises:
      ValueError: when the run starts, a spectral norm of leaves without any tensor of two axes.
    """
    buffers = "uniform" if as_in else "layer"
    one_axis = "l2" if as_in else one_axis
    needs_data = norm not in ("update", "update-l1")

    def init(params: Tensor, layout: Layout) -> State:
        if norm == "spectral" and not any(len(leaf.shape) >= 2 for leaf in part_of(layout, leaves).params):
            raise ValueError("fedvg: norm 'spectral' needs a tensor of two axes; use l1 or l2 for this model")
        return {}

    def measure(client: ClientView) -> Tensor:
        vector = client.validation_gradient(val_mode) if needs_data else client.params - client.start
        return layer_norms(part_of(client.layout, leaves), vector, norm, one_axis=one_axis)

    def weights(part: Layout, norms: Tensor, usable: Tensor, granularity: str) -> Weights:
        return weights_from_norms(part, norms, usable, granularity=granularity, eps=eps, buffers=buffers)

    needs = ["validation-set"] * needs_data + ["client-order"] * bool(as_in and needs_data)
    score = ClientScore("norms", weights, measure=measure)
    return weights_from_score(
        "fedvg", score, granularity=granularity, leaves=leaves, mix=mix, every=every, needs=needs, init=init
    )


def layer_norms(layout: Layout, vector: Tensor, norm: Norm, *, one_axis: str = "block") -> Tensor:
    """Norm of each parameter leaf of a vector.

    Args:
      vector: [num_params].
      one_axis: "l2": the spectral norm of a tensor with one axis is its L2 norm.
    Returns:
      (parameter leaves,) float64. NaN where the norm does not exist (spectral of a one-axis tensor), inf where it is
      not finite, which marks the client as diverged.
    """
    order = 1 if norm in ("l1", "update-l1") else 2
    sizes = []
    for leaf in layout.params:
        value = layout.view(vector, leaf).double()
        is_spectral = norm == "spectral" and value.dim() >= 2
        if norm == "spectral" and not is_spectral and one_axis == "block":
            sizes.append(torch.tensor(torch.nan, dtype=torch.float64))
            continue
        if is_spectral and bool(torch.isfinite(value).all()):
            size = torch.linalg.matrix_norm(value.flatten(1), 2)  # (out, in * height * width) for a convolution
        else:
            size = torch.linalg.vector_norm(value, order)
        sizes.append(torch.nan_to_num(size.cpu(), nan=torch.inf, posinf=torch.inf))
    return torch.stack(sizes)


def weights_from_norms(
    layout: Layout, norms: Tensor, is_active: Tensor, *, granularity: str, eps: float, buffers: str = "layer"
) -> Weights:
    """FedVG's weights of every leaf, eqs. 4 and 5.

    Args:
      norms: (K, parameter leaves) float64, see `layer_norms`.
      is_active: (K,) bool, clients that took a step.
      buffers: "uniform": with granularity "layer", buffers get the same weight from every usable client.
    Returns:
      leaf name -> (K,) float64, summing to 1 (or all 0 if no client is usable).
    """
    # Tensors without the chosen norm are left out.
    sizes = {leaf.name: size for leaf, size in zip(layout.params, norms.T, strict=True) if not bool(size.isnan().any())}
    usable = is_active & ~norms.isinf().any(dim=1)

    def weights_of(tensors: Iterable[str]) -> Tensor | None:
        tensor_norms = [sizes[name] for name in tensors if name in sizes]
        return inverse_weights(torch.stack(tensor_norms).mean(dim=0), usable, eps) if tensor_norms else None

    # Where no tensor has the chosen norm: uniform, as the released code does for tensors without a gradient.
    uniform = normalised(usable.double())
    return dict(spread(layout, weights_of, granularity=granularity, otherwise=uniform, buffers=buffers))
