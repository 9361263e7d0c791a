"""Agreement of the clients' updates with a direction, and aggregation weights computed from the agreement."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from methods.granularity import spread
from raysim.core.layout import Layout, Leaf
from raysim.core.method import ServerView
from raysim.core.weights import normalised

Spans = list[tuple[int, int]]  # (start, end) of some leaves in the vector


def agreements_of(server: ServerView, leaves: Sequence[Leaf], direction: Tensor) -> Tensor:
    """(K, leaves, 3) float64: <u, d>, ||u||^2 and ||d||^2 of each client's update u and the direction d in each leaf.

    The trainers compute these numbers; no update is sent.

    Args:
      direction: [num_params].
    """
    spans: Spans = [(leaf.offset, leaf.end) for leaf in leaves]
    parts = torch.cat([direction[start:end] for start, end in spans])
    products = server.map_updates(update_agreement, (spans, parts))
    return torch.stack(products) if products else torch.zeros(0, len(leaves), 3, dtype=torch.float64)


def update_agreement(update: Tensor, spans_and_direction: tuple[Spans, Tensor]) -> Tensor:
    """(leaves, 3) float64 of one client's update; see `agreements_of`."""
    spans, direction = spans_and_direction
    parts = torch.split(direction.double(), [end - start for start, end in spans])
    pairs = [(update[start:end].double(), part) for (start, end), part in zip(spans, parts, strict=True)]
    return torch.stack([torch.stack([u @ d, u @ u, d @ d]) for u, d in pairs])


def cosines_of(agreements: Tensor) -> Tensor:
    """Return (K,) cosines over all leaves together, 0 for an update or direction of 0. agreements: (K, leaves, 3)."""
    products, updates, directions = agreements.sum(dim=1).unbind(dim=1)
    size = updates.sqrt() * directions.sqrt()  # the roots first: the product of squares may underflow
    return torch.where(size > 0, products / torch.where(size > 0, size, 1.0), 0.0).clamp(-1, 1)


def tensor_cosines(agreements: Tensor) -> Tensor:
    """Return (K, leaves): the cosine of each leaf."""
    return torch.stack([cosines_of(agreements[:, index : index + 1]) for index in range(agreements.shape[1])], dim=1)


def agreeing_weights(cosines: Tensor, usable: Tensor) -> Tensor:
    """Return (K,) float64: max(0, c_k) / sum_j max(0, c_j); all 0 if no usable client's cosine is above 0."""
    return normalised(torch.where(usable, cosines, 0.0).clamp_min(0))


def weights_from_agreements(
    layout: Layout, agreements: Tensor, usable: Tensor, *, granularity: str
) -> dict[str, Tensor]:
    """Return weights of every leaf from cosines over the model, the layer (a tensor) or the layer block.

    Args:
      agreements: (K, parameter leaves, 3), see `agreements_of`; usable: (K,) bool.
    Returns:
      leaf name -> (K,) float64 that sum to 1, or are all 0 if no cosine is above 0.
    """
    places = {leaf.name: index for index, leaf in enumerate(layout.params)}

    def weights_of(leaves: Sequence[str]) -> Tensor:
        return agreeing_weights(cosines_of(agreements[:, [places[name] for name in leaves]]), usable)

    uniform = normalised(usable.double())
    return spread(layout, weights_of, granularity=granularity, otherwise=uniform)
