"""Aggregation weights: values of `weigh` hooks, with which updates are summed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from raysim.base.errors import MethodError


@dataclass(frozen=True)
class RightMap:
    """A linear map as a client's weight on a two-dimensional leaf: update -> update @ maps[k].

    Like scalar weights that sum to one, the maps of a cohort usually sum to the identity (RegMean: G_k (sum G)^-1).

    Example, two clients of which the first decides the first column and the second the other:
      >>> first, second = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
      >>> weight = RightMap(torch.stack([torch.diag(first), torch.diag(second)]).double())
      >>> updates = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]], dtype=torch.float64)  # (K, out, in)
      >>> (updates @ weight.maps).sum(dim=0)
      tensor([[1., 4.]], dtype=torch.float64)

    Attributes:
      maps: (K, in, in) for a leaf of shape (out, in), float64.
    """

    maps: Tensor


#: leaf name -> (K,), (K, rows) or (K, *leading axes of the leaf) in float64, or a linear map.
#: A leaf that is missing keeps its value.
Weights = dict[str, Tensor | RightMap]


def take(weights: Weights, rows: Tensor) -> Weights:
    """The weights of some of the clients, in the order of `rows` (int64).

    Example:
      >>> weights = {"fc.weight": torch.tensor([0.5, 0.125, 0.375], dtype=torch.float64)}
      >>> take(weights, torch.tensor([2, 0]))
      {'fc.weight': tensor([0.3750, 0.5000], dtype=torch.float64)}
    """
    return {name: RightMap(w.maps[rows]) if isinstance(w, RightMap) else w[rows] for name, w in weights.items()}


def scale(weights: Weights, factors: Tensor) -> Weights:
    """Return the weights times a factor of each client. factors: (K,) float64."""

    def scaled(weight: Tensor | RightMap) -> Tensor | RightMap:
        if isinstance(weight, RightMap):
            return RightMap(weight.maps * factors[:, None, None])
        return weight * factors.view(-1, *[1] * (weight.dim() - 1))

    return {name: scaled(weight) for name, weight in weights.items()}


def refuse_factors(weight: Tensor, leaf: str, why: str) -> None:
    """Check shares (K, ...): raise MethodError unless they sum to one, or to zero without clients.

    Args:
      why: what the method does with the shares, for the message.
    """
    totals = weight.sum(dim=0)
    if bool(((totals - 1).abs() > 1e-6).logical_and(totals != 0).any()):
        what = f"the weights of {leaf} do not sum to one, and {why}"
        mend = "remove the method with scaled weights, for example norm_bounding or fednova"
        raise MethodError(what, "the weights", mend)


def normalised(scores: Tensor) -> Tensor:
    """Normalise scores >= 0 of shape (K, ...) to sum to one over the clients; all zeros stay zeros.

    Example, the scores of two clients for three rows:
      >>> normalised(torch.tensor([[1.0, 0.0, 0.0], [3.0, 2.0, 0.0]], dtype=torch.float64))
      tensor([[0.2500, 0.0000, 0.0000],
              [0.7500, 1.0000, 0.0000]], dtype=torch.float64)
    """
    total = scores.sum(dim=0, keepdim=True)
    return torch.where(total > 0, scores / total.clamp_min(torch.finfo(torch.float64).tiny), torch.zeros_like(scores))
