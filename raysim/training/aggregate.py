"""The exact fold: a weighted sum of client updates whose bits do not depend on order or grouping.

Every weighted contribution is rounded alone, to float64 and then to a grid shared by all contributions to the leaf.
Sums of numbers on one grid that stay below 2^53 grid steps are exact, so addition becomes associative (pre-rounding,
Demmel and Nguyen 2013, "Fast Reproducible Floating-Point Summation"). The grid step of a leaf is a power of two derived
from the weights and the largest absolute update of each client, so partial sums of any trainers merge by `+`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from raysim.core.layout import Layout, Leaf
from raysim.core.weights import RightMap, Weights

#: Entries that are summed at a time over all clients: two stretches in float64 (1 MiB) fit in a core's cache.
STRETCH = 2**16


def rounding_constants(layout: Layout, weights: Weights, peaks: Tensor) -> Tensor:
    """Return a constant M per leaf; (x + M) - M rounds x to the leaf's grid.

    With T >= sum_k |a_k u_k| the constant is 1.5 * 2^p, p = floor(log2 T) + 2. The grid step is 2^(p-52), and every
    partial sum stays below 2^53 grid steps, hence is exact. docs/design.md has the proof.

    Example, T = 0.5 * 3 + 0.5 * 5 = 4:
      >>> from torch import nn
      >>> from raysim.core.layout import layout_of
      >>> layout = layout_of(nn.Sequential(nn.Linear(1, 1, bias=False)), head="0")
      >>> weights = {"0.weight": torch.tensor([0.5, 0.5], dtype=torch.float64)}
      >>> rounding_constants(layout, weights, torch.tensor([[3.0], [5.0]], dtype=torch.float64))
      tensor([24.], dtype=torch.float64)

    Args:
      weights: weights of K clients.
      peaks: (K, num_leaves) float64, largest absolute update of each client and leaf; for a vector of the parameters
        only, there are no columns for buffers.
    Returns:
      (num_leaves,) float64; 0 for leaves without weights or updates.
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


def fold(
    layout: Layout, updates: Iterable[Tensor], weights: Weights, constants: Tensor, total: Tensor | None = None
) -> Tensor:
    """Return the partial sum over some clients: sum_k a_k u_k on the shared grid.

    Example, a sum whose float32 result depends on the order:
      >>> from torch import nn
      >>> from raysim.core.layout import layout_of
      >>> from raysim.core.weights import take
      >>> updates = torch.tensor([[2.0**30], [1.0], [-(2.0**30)]])
      >>> float(updates[0] + updates[1] + updates[2]), float(updates[0] + updates[2] + updates[1])
      (0.0, 1.0)
      >>> layout = layout_of(nn.Sequential(nn.Linear(1, 1, bias=False)), head="0")
      >>> weights = {"0.weight": torch.ones(3, dtype=torch.float64)}
      >>> constants = rounding_constants(layout, weights, updates.abs().double())
      >>> fold(layout, updates, weights, constants)
      tensor([1.], dtype=torch.float64)
      >>> groups = [torch.tensor([1]), torch.tensor([2, 0])]  # as two trainers may hold them
      >>> partial = [fold(layout, updates[rows], take(weights, rows), constants) for rows in groups]
      >>> partial[0] + partial[1], partial[1] + partial[0]
      (tensor([1.], dtype=torch.float64), tensor([1.], dtype=torch.float64))

    Args:
      updates: updates of k >= 1 clients, [size] float32 each, size = num_params or num_state; or one tensor (k, size).
      weights: float64 weights of the k clients.
      constants: from `rounding_constants` over *all* clients of the round.
      total: (size,) float64, a partial sum to add to in place; zeros if None.
    Returns:
      total. Partial sums of disjoint groups merge exactly by `+`.
    """
    updates = list(updates)
    num_clients, size, device = len(updates), len(updates[0]), updates[0].device
    if total is None:
        total = torch.zeros(size, dtype=torch.float64, device=device)
    leaves = [leaf for leaf in layout.leaves if leaf.end <= size]
    columns: list[Tensor] = []  # (k, segments) per leaf; in a segment of the vector each client has a single weight
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


def _fold_segments(total: Tensor, updates: Sequence[Tensor], table: Tensor, lengths: Tensor, grids: Tensor) -> None:
    """total += sum_k round(table[k, segment] * updates[k]); table: (k, segments), lengths and grids: (segments,)."""
    size, device, ends = len(total), total.device, torch.cumsum(lengths, 0)
    # Neighbouring segments with the same weights are one run, in which a client's weight is a scalar. Usually there is
    # one run.
    is_new = (table[:, 1:] != table[:, :-1]).any(dim=0).cpu()
    runs = [0, *is_new.cumsum(0).tolist()]
    work = torch.empty(min(STRETCH, size), dtype=torch.float64, device=device)
    for begin in range(0, size, STRETCH):
        end = min(size, begin + STRETCH)
        first, last = int(torch.searchsorted(ends, begin, right=True)), int(torch.searchsorted(ends, end))
        if last == first and grids[first] == 0:
            continue
        covered = lengths[first : last + 1].clone()
        covered[0] = ends[first] - begin
        covered[-1] -= ends[last] - end
        covered = covered.to(device)
        grid = grids[first].item() if last == first else grids[first : last + 1].to(device).repeat_interleave(covered)
        part, into = work[: end - begin], total[begin:end]
        for update, weights in zip(updates, table[:, first : last + 1], strict=True):
            weight = weights[0] if runs[first] == runs[last] else weights.repeat_interleave(covered)
            part.copy_(update[begin:end])
            # One rounding to float64, one to the grid; both depend on the single entry only.
            into.add_(part.mul_(weight).add_(grid).sub_(grid))


def _fold_maps(total: Tensor, leaf: Leaf, updates: Sequence[Tensor], weight: RightMap, constant: float) -> None:
    """total += sum_k round(update_k @ map_k) for a leaf of shape (out, in)."""
    for update, matrix in zip(updates, weight.maps.to(total.device), strict=True):
        mapped = update[leaf.offset : leaf.end].view(leaf.shape).double() @ matrix
        total += mapped.add_(constant).sub_(constant).view(-1)


def _segments(layout: Layout, leaf: Leaf, weight: Tensor) -> Tensor:
    """Return (k, segments): the weights of a leaf, one for each of its equally long stretches of the vector."""
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
    """Return (K,) float64: a bound on |a_k u_k| / max|u_k|."""
    if isinstance(weight, RightMap):
        return weight.maps.abs().sum(dim=1).amax(dim=1)
    return weight.abs().flatten(1).amax(dim=1) if weight.dim() > 1 else weight.abs()
