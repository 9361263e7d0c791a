"""The exact fold: a weighted sum of client updates whose bits do not depend on order or grouping.

Every weighted contribution is rounded by itself, to float64 and then to a grid that all contributions to that leaf share; sums of
numbers on one grid that stay below 2^53 grid steps are exact, so addition becomes associative (pre-rounding,
Demmel and Nguyen 2013, "Fast Reproducible Floating-Point Summation"). The grid of a leaf is a power of two derived from
the weights and from the largest absolute update of each client, so any partial sums, formed anywhere, merge by `+`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from raysim.core.layout import Layout, Leaf
from raysim.core.weights import RightMap, Weights

#: Entries of float64 work space: 1.5 MiB stays in a core's cache; measured fastest among 2^14 .. 2^21.
WORK_ENTRIES = 200_000


def rounding_constants(layout: Layout, weights: Weights, peaks: Tensor) -> Tensor:
    """One constant M per leaf such that (x + M) - M rounds x to the leaf's grid.

    With T >= sum_k |a_k u_k| the constant is 1.5 * 2^p, p = ceil(log2 T) + 1: the grid is 2^(p-52) and every partial
    sum stays below 2^53 grid steps, hence is exact.

    Args:
      weights: for K clients.
      peaks: (K, num_leaves) float64, largest absolute update of each client and leaf; a vector that covers only the
        parameters has fewer columns.
    Returns:
      (num_leaves,) float64; 0 where nothing is added.
    Raises:
      ValueError: a peak or a weight is not finite.
    """
    constants = torch.zeros(peaks.shape[1], dtype=torch.float64)
    for index, leaf in enumerate(layout.leaves[: peaks.shape[1]]):
        if leaf.name not in weights:
            continue
        # fsum: correctly rounded, so that even the grid does not depend on the order of the clients.
        total = math.fsum((_largest(weights[leaf.name]) * peaks[:, index]).tolist())
        if not math.isfinite(total):
            raise ValueError(f"rounding_constants: leaf {leaf.name} has a non-finite update or weight")
        if total > 0:
            constants[index] = 1.5 * math.ldexp(1.0, math.frexp(total)[1] + 1)
    return constants


def fold(layout: Layout, updates: Tensor, weights: Weights, constants: Tensor, total: Tensor | None = None) -> Tensor:
    """Partial sum over some clients: sum_k a_k u_k on the shared grid.

    Args:
      updates: (k, size) float32, size = num_params or num_state.
      weights: for these k clients, float64.
      constants: from `rounding_constants` over *all* clients of the round.
      total: (size,) float64, a partial sum to add to in place; zeros if None.
    Returns:
      total. Partial sums of disjoint groups merge exactly by `+`.
    """
    num_clients, size = updates.shape
    if total is None:
        total = torch.zeros(size, dtype=torch.float64, device=updates.device)
    leaves = [leaf for leaf in layout.leaves if leaf.end <= size]
    device = updates.device
    columns: list[Tensor] = []  # (k, segments of the leaf): what repeats over contiguous stretches of the vector
    lengths: list[int] = []
    grids: list[float] = []
    for leaf, constant in zip(leaves, constants.tolist(), strict=True):
        weight = weights.get(leaf.name)
        if isinstance(weight, RightMap):
            _fold_maps(total[leaf.offset : leaf.end], leaf, updates, weight, constant)
            weight = None
        if weight is None or constant == 0:
            weight = torch.zeros(num_clients, dtype=torch.float64)
            constant = 0.0
        segments = _segments(layout, leaf, weight)
        columns.append(segments)
        lengths += [leaf.size // segments.shape[1]] * segments.shape[1]
        grids += [constant] * segments.shape[1]
    if columns:
        table = torch.cat(columns, dim=1).to(device)
        _fold_segments(total, updates, table, torch.tensor(lengths), torch.tensor(grids, dtype=torch.float64))
    return total


def _fold_segments(total: Tensor, updates: Tensor, table: Tensor, lengths: Tensor, grids: Tensor) -> None:
    """total += sum_k round(table[k, segment] * updates[k]); table: (k, segments), lengths and grids: (segments,)."""
    num_clients, size = updates.shape
    ends = torch.cumsum(lengths, 0)
    is_uniform = bool((table == table[:, :1]).all()) if len(grids) and bool((grids != 0).all()) else False
    grids = grids.to(updates.device)
    step = max(4096, WORK_ENTRIES // max(num_clients, 1))
    work = torch.empty(num_clients * min(step, size), dtype=torch.float64, device=updates.device)
    for begin in range(0, size, step):
        end = min(size, begin + step)
        first = int(torch.searchsorted(ends, begin, right=True))
        last = int(torch.searchsorted(ends, end))
        if last == first:
            grid, weight = grids[first], table[:, first : first + 1]
            if float(grid) == 0:
                continue
        else:
            covered = lengths[first : last + 1].clone()
            covered[0] = ends[first] - begin
            covered[-1] = end - (ends[last] - lengths[last])
            covered = covered.to(updates.device)
            grid = grids[first : last + 1].repeat_interleave(covered)
            weight = table[:, :1] if is_uniform else table[:, first : last + 1].repeat_interleave(covered, dim=1)
        part = work[: num_clients * (end - begin)].view(num_clients, end - begin)
        part.copy_(updates[:, begin:end])
        # One rounding to float64, one to the grid; both depend on this entry alone.
        part.mul_(weight).add_(grid).sub_(grid)
        total[begin:end] += part.sum(dim=0)


def _fold_maps(total: Tensor, leaf: Leaf, updates: Tensor, weight: RightMap, constant: float) -> None:
    """total += round(update_k @ map_k) for a leaf of shape (out, in)."""
    for update, matrix in zip(updates, weight.maps.to(updates.device), strict=True):
        mapped = update[leaf.offset : leaf.end].view(leaf.shape).double() @ matrix
        total += mapped.add_(constant).sub_(constant).view(-1)


def _segments(layout: Layout, leaf: Leaf, weight: Tensor) -> Tensor:
    """(k, segments): the weights of one leaf over equal contiguous stretches of the vector."""
    num_clients = weight.shape[0]
    if weight.dim() == 1:
        return weight[:, None]
    if weight.shape[1:] != leaf.shape[: weight.dim() - 1]:
        raise ValueError(f"fold: weights of {leaf.name} have shape {tuple(weight.shape)}, not (K, *{leaf.shape}[:j])")
    if weight.dim() == 2:
        return weight
    rest = (1,) * (1 + len(leaf.shape) - weight.dim())
    full = weight.reshape(*weight.shape, *rest).expand(num_clients, *leaf.shape)
    return torch.stack([layout.pack(leaf, row) for row in full])


def _largest(weight: Tensor | RightMap) -> Tensor:
    """(K,) float64: a bound on |a_k u_k| / max|u_k|."""
    if isinstance(weight, RightMap):
        return weight.maps.abs().sum(dim=1).amax(dim=1)
    return weight.abs().flatten(1).amax(dim=1) if weight.dim() > 1 else weight.abs()
