"""FedVG: aggregation weights from the norms of validation gradients, and its rivals: the loss, the agreement of updates.

Clients report the norms (`layer_norms`); `weights_from_norms` makes the weights of them (eqs. 4 and 5, by `inverse_weights`);
the hook `weigh` puts these in the place of the weights so far.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Annotated, Literal

import torch
from torch import Tensor

from methods.agreement import agreements_of, cosines_of, tensor_cosines, weights_from_agreements
from methods.granularity import spread
from raysim.core.counting import counts_with, counts_without
from raysim.core.layout import Layout
from raysim.core.method import ClientView, Method, ServerView, State
from raysim.core.weights import RightMap, Weights, normalised

#: What "auto" chooses from; the first wins a tie.
GRANULARITIES = ("model", "layer", "block")

Norm = Literal["l1", "l2", "spectral", "update", "update-l1"]
Part = Literal["all", "body", "head", "adapters"]

ADAPTERS = "*.lora_[AB].*"

#: The weights that each choice of leaves claims.
CLAIMS: dict[Part, str] = {
    "all": "weights:*",
    "body": "weights:*!weights:@head.*",
    "head": "weights:@head.*",
    "adapters": f"weights:{ADAPTERS}",
}


def fedvg(
    *,
    granularity: Literal["model", "layer", "block", "auto"] = "model",
    norm: Norm = "l1",
    score: Literal["gradient", "loss", "cosine"] = "gradient",
    layers: Literal["tensor", "module"] = "tensor",
    leaves: Part = "all",
    mix: Literal["replace", "average"] = "replace",
    val_mode: Annotated[Literal["train", "eval"], counts_without("norm", "update", "update-l1")] = "train",
    every: int = 1,
    buffers: Annotated[Literal["layer", "uniform"], counts_with("granularity", "layer", "auto")] = "layer",
    one_axis: Annotated[Literal["block", "l2"], counts_with("norm", "spectral")] = "block",
    as_in: Annotated[
        Literal["release"] | None,
        counts_without("norm", "update", "update-l1") | counts_with("granularity", "layer", "auto"),
    ] = None,
    eps: Annotated[float, counts_without("score", "cosine")] = 1e-8,
) -> Method:
    """A client's weight is inverse to the size of the validation gradient at its model.

    FedVG, eqs. 4 and 5, with v_k^l the norm of client k's validation gradient on layer l (a parameter tensor):
        model:  G_k = (1/L) sum_l v_k^l,   s_k = (1 / (G_k + eps)) / sum_j (1 / (G_j + eps))
        layer:  one weight per layer from v_k^l;   block: one per layer block from the mean of v_k^l inside it.
    The gradient is taken by the trainer that holds the client's model, straight after local training, by plain
    backpropagation of the mean cross-entropy; only the norms travel.

    `as_in: release` is the released code where it deviates: buffers are "uniform" and one_axis is "l2"; it scores the
    validation rows client after client, so the data have to come in that order (data.validation_set.order: client),
    which moves weights under train-mode BatchNorm. Left out: its eps, which is that of another unit and matters only
    where a gradient vanishes; layer blocks that are stages of a ResNet (model.blocks: stage).

    Args:
      granularity: "auto" is ours, not the paper's: every round the one of the three whose aggregated model has the
        lowest loss on the validation set; the choice is logged (0 model, 1 layer, 2 block).
      norm: "l1", "l2"; "spectral": largest singular value of tensors with two or more axes, as (first, rest);
        "update": L2 norm of the client's update instead of a gradient (the paper's "delta"; needs no data);
        "update-l1": the same with the L1 norm; the paper does not say which.
      score: "loss": G_k is the mean cross-entropy on the validation set, which the paper calls the worse score; one
        number a client, so only with granularity "model", and norm and layers have no meaning. "cosine" is ours: s_k =
        max(0, c_k) / sum_j max(0, c_j), with c_k the cosine of client k's update and the descent direction -grad L_val at
        the broadcast point, over the model, a layer or a layer block. It is FLTrust's trust score (Cao et al., NDSS 2021)
        without its rescaling of the updates. One gradient a round, not one a client. An update, or a gradient, of 0 has
        cosine 0; where no client's cosine is above 0, those leaves keep the weights given. The number of clients whose
        cosine over all leaves is above 0 is logged (`agreeing`), and the cosines by tensor.
      layers: what a layer is: a parameter tensor (the released code), or a module's tensors as one vector.
      leaves: the leaves that get these weights, and whose norms count: all, the classifier ("head"), all but it
        ("body"), or the adapters of model.lora. The others keep theirs, so that another method can decide them (LIVAR's
        components: head beside leaves: adapters, and the reverse).
      mix: "average" takes the mean of these weights and n_k/N (the paper's FedAvg + FedVG).
      val_mode: mode of the network while scoring. The released code uses "train"; it matters with BatchNorm. Only where it
        does, or where dropout draws, is scoring done in the clients' batch size, as there; else in larger batches, which
        are faster and change the sum of the gradients by its rounding alone.
      every: rounds between scorings, of which the first round is one; in the others a client has the norms, or the
        loss, of its last one, and only clients without any are scored (`scored` logs how many).
      buffers: with one weight per layer: "layer" gives a BatchNorm statistic the weight of its weight tensor, "uniform"
        the same to every client.
      one_axis: the spectral norm of tensors with one axis: none, so that they have the weight of their layer block, or
        their own L2 norm.
      as_in: "release" sets buffers, one_axis and the order of the validation rows as the released code has them.
      eps: the constant of eq. 5, >= 0.
    Degenerate cases: a client without a step, or with a non-finite norm, gets weight 0; if no client is left, the
    global model stays. Where norms are exactly 0 and eps is 0, those clients share the weight equally. Buffers have
    the weight of the tensors of their layer; parameters whose kind of norm does not exist, that of their block.
    Raises:
      ValueError: eps < 0, every < 1, or options that do not go together; or, when the run starts, a spectral norm of
        leaves without any tensor of two axes, or score "cosine" where leaves are personal.
    """
    if eps < 0:
        raise ValueError(f"fedvg: eps must be >= 0, got {eps}; the paper's code uses 1e-8")
    if every < 1:
        raise ValueError(f"fedvg: every must be >= 1, got {every}; 1 scores in each round")
    if norm == "spectral" and layers == "module":
        raise ValueError("fedvg: the spectral norm of a module's tensors together is not defined; use layers: tensor")
    if score == "loss" and (granularity, norm, layers) != ("model", "l1", "tensor"):
        raise ValueError("fedvg: score 'loss' is one number a client; drop granularity, norm and layers")
    if score == "cosine" and (norm, layers, every, as_in) != ("l1", "tensor", 1, None):
        raise ValueError(
            "fedvg: score 'cosine' has no norms and is taken in every round; drop norm, layers, every, as_in"
        )
    if as_in and (buffers, one_axis) != ("layer", "block"):
        raise ValueError(f"fedvg: as_in {as_in!r} sets buffers and one_axis; drop these or as_in")
    if as_in:
        buffers, one_axis = "uniform", "l2"
    needs_data = score != "gradient" or norm not in ("update", "update-l1")
    key = {"gradient": "norms", "loss": "loss", "cosine": "cosines"}[score]
    module_power = None if layers == "tensor" else (1 if norm in ("l1", "update-l1") else 2)

    def init(params: Tensor, layout: Layout) -> State:
        if norm == "spectral" and not any(len(leaf.shape) >= 2 for leaf in part_of(layout, leaves).params):
            raise ValueError("fedvg: norm 'spectral' needs a tensor of two axes; use l1 or l2 for this model")
        if score == "cosine" and layout.personal:
            names = ", ".join(leaf.name for leaf in layout.personal[:3])
            raise ValueError(f"fedvg: score 'cosine' is taken at the global model, which has no {names}; use gradient")
        return {}

    def measure(client: ClientView) -> Tensor:
        """What the client's weights are made of: (parameter leaves,) norms or (1,) loss, float64; inf: it diverged."""
        if score == "loss":
            loss = torch.tensor([client.validation_loss(val_mode)], dtype=torch.float64)
            return loss.nan_to_num(nan=torch.inf, posinf=torch.inf)
        vector = client.validation_gradient(val_mode) if needs_data else client.params - client.start
        return layer_norms(part_of(client.layout, leaves), vector, norm, one_axis=one_axis)

    def report(client: ClientView) -> dict[str, Tensor]:
        if every == 1:
            return {key: measure(client)}
        is_due = key not in client.memory or client.round_index % every == 0
        values = measure(client) if is_due else client.memory[key].cpu()
        if is_due and client.num_steps > 0:
            client.memory[key] = values
        return {key: values, "scored": torch.tensor(float(is_due))}

    def values_of(server: ServerView) -> Tensor:
        """(K, ...) float64, what weights are made of: as reported, or `agreements_of` the updates."""
        if score != "cosine":
            return server.report[key]
        params, direction = part_of(server.layout, leaves).params, -server.validation_gradient(val_mode)
        values = agreements_of(server, params, direction)
        is_agreeing = server.is_active & (cosines_of(values) > 0)
        server.log("agreeing", float(is_agreeing.sum()))
        return values

    def with_fedvg(weights: Weights, server: ServerView, values: Tensor, granularity: str) -> Weights:
        """The weights so far, those of the chosen leaves replaced by FedVG's, or averaged with them."""
        part, form = part_of(server.layout, leaves), {"granularity": granularity, "buffers": buffers}
        usable = server.is_active & ~values.flatten(1).isinf().any(dim=1)
        if score == "loss":
            own = dict.fromkeys((leaf.name for leaf in part.leaves), inverse_weights(values[:, 0], usable, eps))
        elif score == "cosine":
            own = weights_from_agreements(part, values, usable, **form)
        else:
            own = weights_from_norms(part, values, server.is_active, eps=eps, module_power=module_power, **form)
        chosen = {name: own[name] for name in weights if name in own}
        for name, weight in chosen.items():
            if mix == "average" or not bool(weight.any()):
                given = _among(weights[name], usable)
                chosen[name] = (given + weight) / 2 if bool(weight.any()) else given
        return {**weights, **chosen}

    def weigh(weights: Weights, server: ServerView) -> Weights:
        values, names = values_of(server), [leaf.name for leaf in part_of(server.layout, leaves).params]
        server.log(key, tensor_cosines(values) if score == "cosine" else values, ["loss"] if score == "loss" else names)
        if every > 1:
            server.log("scored", float(server.report["scored"].sum()))
        if granularity != "auto":
            return with_fedvg(weights, server, values, granularity)
        candidates = [with_fedvg(weights, server, values, name) for name in GRANULARITIES]
        losses = [server.validation_loss(candidate) for candidate in candidates]
        losses = [loss if math.isfinite(loss) else math.inf for loss in losses]
        chosen = losses.index(min(losses))
        server.log("granularity", chosen)
        return candidates[chosen]

    needs = {"validation-set"} if needs_data or granularity == "auto" else set()
    needs |= {"client-order"} if as_in and needs_data else set()
    needs |= {"client-memory"} if every > 1 else set()
    needs |= {"lora"} if leaves == "adapters" else set()
    claims = frozenset({CLAIMS[leaves]})
    reports = None if score == "cosine" else report
    return Method("fedvg", init=init, report=reports, weigh=weigh, claims=claims, needs=frozenset(needs))


def part_of(layout: Layout, leaves: Part) -> Layout:
    """The chosen leaves of a layout, where they lie."""
    if leaves == "all":
        return layout
    if leaves == "adapters":
        return Layout(tuple(leaf for leaf in layout.leaves if fnmatchcase(leaf.name, ADAPTERS)))
    return Layout(tuple(leaf for leaf in layout.leaves if leaf.is_head == (leaves == "head")))


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
    layout: Layout,
    norms: Tensor,
    is_active: Tensor,
    *,
    granularity: str,
    eps: float,
    module_power: int | None = None,
    buffers: str = "layer",
) -> dict[str, Tensor]:
    """FedVG's weights of every leaf, eqs. 4 and 5.

    Args:
      norms: (K, parameter leaves) float64, see `layer_norms`.
      is_active: (K,) bool, clients that took a step.
      module_power: combine the tensors of a module into one layer, as their p-norm; None: a layer is a tensor.
      buffers: "uniform": with granularity "layer" they get the same weight from every usable client.
    Returns:
      leaf name -> (K,) float64, summing to 1 (or all 0 if no client is usable).
    """
    layer_of = {leaf.name: leaf.name if module_power is None else leaf.layer for leaf in layout.params}
    sizes = _layer_sizes(norms, list(layer_of.values()), module_power or 1)
    usable = is_active & ~norms.isinf().any(dim=1)

    def weights_of(layers: Iterable[str]) -> Tensor | None:
        known = [sizes[layer] for layer in layers if layer in sizes]
        return inverse_weights(torch.stack(known).mean(dim=0), usable, eps) if known else None

    # No such norm here: uniform, as the released code does for tensors without a gradient.
    uniform = normalised(usable.double())
    return spread(layout, weights_of, granularity=granularity, otherwise=uniform, layer_of=layer_of, buffers=buffers)


def _layer_sizes(norms: Tensor, layers: list[str], power: int) -> dict[str, Tensor]:
    """Layer -> (K,): the p-norm of its tensors' norms; a layer without any norm is left out.

    Args:
      norms: (K, parameter leaves) float64; layers: the layer of each of these leaves.
    """
    sizes = {}
    for layer in dict.fromkeys(layers):
        own = norms[:, [index for index, name in enumerate(layers) if name == layer]]
        if not bool(own.isnan().any(dim=0).all()):
            sizes[layer] = own.nan_to_num(0.0).pow(power).sum(dim=1).pow(1 / power)
    return sizes


def inverse_weights(sizes: Tensor, usable: Tensor, eps: float) -> Tensor:
    """s_k = (1 / (G_k + eps)) / sum_j (1 / (G_j + eps)) over usable clients, eq. 5.

    Args:
      sizes: (K,) float64, G_k >= 0; usable: (K,) bool.
    Returns:
      (K,) float64 summing to 1 within 1e-12, 0 for unusable clients.
    """
    denominators = torch.where(usable, sizes + eps, torch.inf)
    if bool((denominators == 0).any()):  # eps = 0 and a vanishing gradient: these share everything
        return normalised((denominators == 0).double())
    smallest = denominators.min()
    if torch.isinf(smallest):
        return torch.zeros_like(sizes)
    return normalised(smallest / denominators)  # scaled so that no inverse overflows


def _among(weight: Tensor | RightMap, usable: Tensor) -> Tensor:
    """(K,): the given weights over usable clients alone."""
    assert isinstance(weight, Tensor)  # `check` refuses another method that decides weights
    return normalised(torch.where(usable, weight, torch.zeros_like(weight)))
