"""FedVG: aggregation weights from the norms of validation gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor

from raysim.core.layout import Layout, Leaf
from raysim.core.method import ClientView, Method, ServerView
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
    score: Literal["gradient", "loss"] = "gradient",
    layers: Literal["tensor", "module"] = "tensor",
    leaves: Part = "all",
    mix: Literal["replace", "average"] = "replace",
    val_mode: Literal["train", "eval"] = "train",
    every: int = 1,
    buffers: Literal["layer", "uniform"] = "layer",
    one_axis: Literal["block", "l2"] = "block",
    as_in: Literal["release"] | None = None,
    eps: float = 1e-8,
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
        number a client, so only with granularity "model", and norm and layers have no meaning.
      layers: what a layer is: a parameter tensor (the released code), or a module's tensors as one vector.
      leaves: the leaves that get these weights, and whose norms count: all, the classifier ("head"), all but it
        ("body"), or the adapters of model.lora. The others keep theirs, so that another method can decide them (LIVAR's
        components: head beside leaves: adapters, and the reverse).
      mix: "average" takes the mean of these weights and n_k/N (the paper's FedAvg + FedVG).
      val_mode: mode of the network while scoring. The released code uses "train"; it matters with BatchNorm.
      every: rounds between scorings, which are 0, every, 2 every, ...; in the others a client has the norms, or the
        loss, of its last one, and only clients without any are scored (`scored` logs how many).
      buffers: with one weight per layer: "layer" gives a BatchNorm statistic the weight of its weight tensor, "uniform"
        the same to every client.
      one_axis: the spectral norm of tensors with one axis: none, so that they have the weight of their layer block, or
        their own L2 norm.
      eps: the constant of eq. 5, >= 0.
    Degenerate cases: a client without a step, or with a non-finite norm, gets weight 0; if no client is left, the
    global model stays. Where norms are exactly 0 and eps is 0, those clients share the weight equally. Buffers have
    the weight of the tensors of their layer; parameters whose kind of norm does not exist, that of their block.
    Raises:
      ValueError: eps < 0, every < 1, or options that do not go together; or, when the run starts, a spectral norm of
        leaves without any tensor of two axes.
    """
    if eps < 0:
        raise ValueError(f"fedvg: eps must be >= 0, got {eps}; the paper's code uses 1e-8")
    if every < 1:
        raise ValueError(f"fedvg: every must be >= 1, got {every}; 1 scores in each round")
    if norm == "spectral" and layers == "module":
        raise ValueError("fedvg: the spectral norm of a module's tensors together is not defined; use layers: tensor")
    if score == "loss" and (granularity, norm, layers) != ("model", "l1", "tensor"):
        raise ValueError("fedvg: score 'loss' is one number a client; drop granularity, norm and layers")
    if as_in and (buffers, one_axis) != ("layer", "block"):
        raise ValueError(f"fedvg: as_in {as_in!r} sets buffers and one_axis; drop these or as_in")
    if as_in:
        buffers, one_axis = "uniform", "l2"
    needs_data = score == "loss" or norm not in ("update", "update-l1")
    key = "loss" if score == "loss" else "norms"

    def init(params: Tensor, layout: Layout) -> dict[str, Any]:
        if norm == "spectral" and not any(len(leaf.shape) >= 2 for leaf in part_of(layout, leaves).params):
            raise ValueError("fedvg: norm 'spectral' needs a tensor of two axes; use l1 or l2 for this model")
        return {}

    def scored(client: ClientView) -> Tensor:
        if score == "loss":
            loss = torch.tensor([client.validation_loss(val_mode)], dtype=torch.float64)
            return loss.nan_to_num(nan=torch.inf, posinf=torch.inf)
        vector = client.validation_gradient(val_mode) if needs_data else client.params - client.start
        return layer_norms(part_of(client.layout, leaves), vector, norm, one_axis=one_axis)

    def report(client: ClientView) -> dict[str, Tensor]:
        if every == 1:
            return {key: scored(client)}
        is_due = key not in client.memory or client.round_index % every == 0
        values = scored(client) if is_due else client.memory[key].cpu()
        if is_due and client.num_steps > 0:
            client.memory[key] = values
        return {key: values, "scored": torch.tensor(float(is_due))}

    def scores_of(server: ServerView, usable: Tensor, granularity: str) -> dict[str, Tensor]:
        part, values = part_of(server.layout, leaves), server.report[key]
        if score == "loss":
            return dict.fromkeys((leaf.name for leaf in part.leaves), inverse_weights(values[:, 0], usable, eps))
        return vg_weights(
            part,
            values,
            server.is_active,
            granularity=granularity,
            eps=eps,
            module_power=None if layers == "tensor" else (1 if norm in ("l1", "update-l1") else 2),
            buffers=buffers,
        )

    def mixed(weights: Weights, server: ServerView, granularity: str) -> Weights:
        usable = server.is_active & ~server.report[key].isinf().any(dim=1)
        scores = scores_of(server, usable, granularity)
        mine = [name for name in weights if name in scores]
        if mix == "average":
            scores |= {name: (_among(weights[name], usable) + scores[name]) / 2 for name in mine}
        return {**weights, **{name: scores[name] for name in mine}}

    def weigh(weights: Weights, server: ServerView) -> Weights:
        names = [leaf.name for leaf in part_of(server.layout, leaves).params]
        server.log(key, server.report[key], names if key == "norms" else ["loss"])
        if every > 1:
            server.log("scored", float(server.report["scored"].sum()))
        if granularity != "auto":
            return mixed(weights, server, granularity)
        candidates = [mixed(weights, server, name) for name in GRANULARITIES]
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
    return Method("fedvg", init=init, report=report, weigh=weigh, claims=claims, needs=frozenset(needs))


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
    values = []
    for leaf in layout.params:
        value = layout.view(vector, leaf).double()
        has_one_axis = value.dim() < 2
        if norm == "spectral" and has_one_axis and one_axis == "block":
            values.append(torch.tensor(torch.nan, dtype=torch.float64))
            continue
        if norm == "spectral" and not has_one_axis and bool(torch.isfinite(value).all()):
            size = torch.linalg.matrix_norm(value.flatten(1), 2)  # (out, in * height * width) for a convolution
        else:
            size = torch.linalg.vector_norm(value, 1 if norm in ("l1", "update-l1") else 2)
        values.append(torch.nan_to_num(size.cpu(), nan=torch.inf, posinf=torch.inf))
    return torch.stack(values)


def vg_weights(
    layout: Layout,
    norms: Tensor,
    is_active: Tensor,
    *,
    granularity: str,
    eps: float,
    module_power: int | None = None,
    buffers: str = "layer",
) -> dict[str, Tensor]:
    """FedVG's weights of every leaf.

    Args:
      norms: (K, parameter leaves) float64, see `layer_norms`.
      is_active: (K,) bool, clients that took a step.
      module_power: combine the tensors of a module into one layer, as their p-norm; None: a layer is a tensor.
      buffers: "uniform": with granularity "layer" they get the same weight from every usable client.
    Returns:
      leaf name -> (K,) float64, summing to 1 (or all 0 if no client is usable).
    """
    leaves = layout.params
    usable = is_active & ~norms.isinf().any(dim=1)
    groups = _groups(leaves, lambda leaf: leaf.name if module_power is None else leaf.layer)
    power = module_power or 1
    sizes = {key: norms[:, group].nan_to_num(0.0).pow(power).sum(dim=1).pow(1 / power) for key, group in groups.items()}
    known = {key for key, group in groups.items() if not bool(norms[:, group].isnan().any(dim=0).all())}

    def weights_of(keys: list[str]) -> Tensor:
        part = [sizes[key] for key in keys if key in known]
        if not part:  # no such norm here: uniform, as the released code does for tensors without a gradient
            return normalised(usable.double())
        return inverse_weights(torch.stack(part).mean(dim=0), usable, eps)

    everything = weights_of(list(groups))
    by_layer: dict[str, Tensor] = {}
    by_block: dict[str, Tensor] = {}
    for block, indices in _groups(leaves, lambda leaf: leaf.block).items():
        inside = [key for key, group in groups.items() if group[0] in indices]
        by_block[block] = weights_of(inside)
        for key in inside:
            own = weights_of([key]) if key in known else by_block[block]
            by_layer |= {leaves[index].name: own for index in groups[key]}
    # A BatchNorm statistic goes with the weight tensor that it belongs to: the first of its module.
    owners = {leaf.layer: leaf.name for leaf in reversed(leaves)}

    def weight_of(leaf: Leaf) -> Tensor:
        if granularity == "model":
            return everything
        if granularity == "layer" and leaf.is_buffer and buffers == "uniform":
            return normalised(usable.double())
        if granularity == "block" or (leaf.is_buffer and leaf.layer not in owners):
            return by_block.get(leaf.block, everything)
        return by_layer[owners[leaf.layer] if leaf.is_buffer else leaf.name]

    return {leaf.name: weight_of(leaf) for leaf in layout.leaves}


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


def _groups(leaves: tuple[Leaf, ...], key: Callable[[Leaf], str]) -> dict[str, list[int]]:
    """key -> indices of the leaves that have it, in order of first appearance."""
    groups: dict[str, list[int]] = {}
    for index, leaf in enumerate(leaves):
        groups.setdefault(key(leaf), []).append(index)
    return groups
