"""Aggregation weights: what `weigh` hooks exchange and the fold consumes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RightMap:
    """A linear map as a client's weight on a two-dimensional leaf: update -> update @ maps[k].

    Like scalar weights that sum to one, the maps of a cohort usually sum to the identity (RegMean: G_k (sum G)^-1).

    Attributes:
      maps: (K, in, in) for a leaf of shape (out, in), float64.
    """

    maps: Tensor

    def take(self, rows: Tensor) -> RightMap:
        """The maps of some of the clients, in the order of `rows`."""
        return RightMap(self.maps[rows])


#: leaf name -> (K,), (K, rows) or (K, *leading axes of the leaf) in float64, or a linear map.
#: A leaf that is missing keeps its value.
Weights = dict[str, Tensor | RightMap]


def take(weights: Weights, rows: Tensor) -> Weights:
    """The weights of some of the clients, in the order of `rows` (int64)."""
    return {name: w.take(rows) if isinstance(w, RightMap) else w[rows] for name, w in weights.items()}


def normalised(scores: Tensor) -> Tensor:
    """Scores >= 0 of shape (K, ...) -> weights that sum to one over the clients; all zeros where all scores are."""
    total = scores.sum(dim=0, keepdim=True)
    return torch.where(total > 0, scores / total.clamp_min(torch.finfo(torch.float64).tiny), torch.zeros_like(scores))
