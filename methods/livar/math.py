"""LIVAR's formulas: importance to coefficients, variances to row weights, products of factors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from raysim.core.layout import Layout, Leaf
from raysim.core.weights import normalised

Reduction = Literal["abs_of_sum", "signed", "sum_of_abs", "grad_only"]

#: Raw coefficients by the bins of I_A (rows: low, mid, high) and I_B (columns): the released code's constants, and the
#: paper's table A, which differs in the column "mid".
TABLES = {
    "released": (
        (0.03813978, 0.09813978, 0.19313978),
        (0.03813978, 0.08813978, 0.11813978),
        (0.03813978, 0.07813978, 0.09313978),
    ),
    "paper": ((0.038, 0.100, 0.193), (0.038, 0.089, 0.118), (0.038, 0.078, 0.093)),
}
#: Quantiles at which I_A and I_B are cut into low, mid and high.
CUTS = ((0.25, 0.50), (0.60, 0.80))


class CoefficientTable(NamedTuple):
    """Raw coefficients, 3 rows by the bin of I_A and 3 columns by that of I_B, and the quantiles that part the bins."""

    values: Sequence[Sequence[float]]
    cuts: Sequence[Sequence[float]] = CUTS


def table_of(value: object) -> CoefficientTable:
    """The table of a name, of three rows, or of a mapping with `table` and perhaps `cuts`.

    Raises:
      ValueError: it is none of these; numbers are not positive and finite; cuts do not rise inside [0, 1].
    """
    if isinstance(value, CoefficientTable):
        return value
    if isinstance(value, str):
        if value not in TABLES:
            raise ValueError(f"livar: unknown table {value!r}; known: {', '.join(TABLES)}")
        return CoefficientTable(TABLES[value])
    given = value if isinstance(value, Mapping) else {"table": value}
    table = CoefficientTable(
        _numbers(given.get("table"), 3, 3, "table"), _numbers(given.get("cuts", CUTS), 2, 2, "cuts")
    )
    if not all(0 < number < math.inf for row in table.values for number in row):
        raise ValueError(f"livar: coefficients must be > 0, got {table.values}")
    if not all(0 <= low <= high <= 1 for low, high in table.cuts):
        raise ValueError(f"livar: cuts must be two rising quantiles in [0, 1] for I_A and for I_B, got {table.cuts}")
    return table


def plain_table(content: Mapping[str, object]) -> dict[str, list[list[float]]]:
    """What the option `table` takes of a calibration. Raises ValueError as `table_of`."""
    table = table_of(content)
    return {"table": [list(row) for row in table.values], "cuts": [list(pair) for pair in table.cuts]}


def _numbers(value: object, rows: int, columns: int, what: str) -> list[list[float]]:
    message = f"livar: {what} must be {rows} rows of {columns} numbers, got {value!r}"
    try:
        numbers = np.array(value, dtype=float)
    except (TypeError, ValueError) as error:
        raise ValueError(message) from error
    if numbers.shape != (rows, columns):
        raise ValueError(message)
    return [[float(number) for number in row] for row in numbers]


class Adapter(NamedTuple):
    """The leaves of one adapted layer: its product is B A. `layer` is the path of the adapted layer."""

    layer: str
    a: Leaf
    b: Leaf


def adapters_of(layout: Layout) -> list[Adapter]:
    """Every adapted layer, in order of the layout; peft's names tell which leaf is which."""
    adapters = []
    for leaf in layout.params:
        layer, is_a, rest = leaf.name.partition(".lora_A.")
        if is_a:
            adapters.append(Adapter(layer, leaf, layout.by_name[f"{layer}.lora_B.{rest}"]))
    return adapters


def reduced(grad: Tensor, moved: Tensor, reduction: Reduction) -> Tensor:
    """What one step adds to the importance of one factor. Scalar, float64.

    LIVAR's I_A and I_B are sums of it over the steps; `moved` is before - after, so that descent is positive:
        abs_of_sum: |sum(g . moved)|,   signed: sum(g . moved),   sum_of_abs: sum|g . moved|,   grad_only: |sum g|
    grad_only is zero by construction, up to rounding, for B of every layer whose output enters a LayerNorm (in a ViT the
    attention projection and the second MLP layer), since the gradient of what enters one sums to zero.
    """
    if reduction == "grad_only":
        return grad.sum(dtype=torch.float64).abs()
    product = grad.double() * moved.double()
    if reduction == "sum_of_abs":
        return product.abs().sum()
    return product.sum() if reduction == "signed" else product.sum().abs()


def bins_of(importance: Tensor, cuts: Sequence[Sequence[float]] = CUTS) -> tuple[Tensor, Tensor]:
    """Bin of I_A and bin of I_B, 0 low, 1 mid, 2 high.

    LIVAR, table A, with the released code's thresholds: quantiles over all clients and layers with linear
    interpolation; strictly below the lower one is low, strictly above the upper one high, all else mid.

    Args:
      importance: (K, L, 2) float64: I_A and I_B.
    Returns:
      (K, L) and (K, L) int64.
    """
    bins = []
    for factor in (0, 1):
        values = importance[..., factor]
        low, high = torch.quantile(values.flatten(), torch.tensor(cuts[factor], dtype=torch.float64))
        bins.append(1 - (values < low).long() + (values > high).long())
    return bins[0], bins[1]


def raw_coefficients(importance: Tensor, table: str | CoefficientTable = "released") -> Tensor:
    """The table's value for each client and layer, (K, L) float64, from (K, L, 2) importances."""
    chosen = table_of(table)
    return torch.tensor(chosen.values, dtype=torch.float64)[bins_of(importance, chosen.cuts)]


def layer_coefficients(
    importance: Tensor, is_active: Tensor, shares: Tensor, table: str | CoefficientTable = "released"
) -> Tensor:
    """lambda of each client and layer for eq. 3: the raw coefficients, normalised over the clients that took a step.

    Args:
      importance: (K, L, 2) float64; is_active: (K,) bool; shares: (K,) float64, n_i / sum n.
    Returns:
      (K, L) float64; columns sum to 1, or are 0 if no client is active. A layer with a non-finite importance gets the
      shares. That is ours: in the released code an infinite importance is "high" and one that is not a number makes all
      quantiles so, which puts every client and layer into the middle; its own fallback to the shares asks after the table,
      whose numbers are finite, and never acts.
    """
    coefficients = torch.zeros(importance.shape[:2], dtype=torch.float64)
    if bool(is_active.any()):
        active = importance[is_active]
        is_finite = torch.isfinite(active).all(dim=2).all(dim=0)
        coefficients[is_active] = shares[is_active, None]
        if bool(is_finite.any()):
            raw = normalised(raw_coefficients(active[:, is_finite], table))
            coefficients[is_active.nonzero(), is_finite.nonzero().T] = raw
    return coefficients


def row_weights(candidates: Sequence[Tensor], is_active: Tensor) -> Tensor:
    """Weights of each client on the head's row of each class, eq. 6.

    Args:
      candidates: (K, classes) float64 scores >= 0, NaN where missing, in order of preference: a class takes the first
        that has a positive sum over the active clients.
    Returns:
      (K, classes) float64; columns sum to 1, or are 0 where no candidate serves: the row stays.
    """
    weights = torch.zeros_like(candidates[0])
    is_open = torch.ones(weights.shape[1], dtype=torch.bool)
    for scores in candidates:
        usable = torch.where(is_active[:, None], scores, 0.0).nan_to_num(0.0)
        serves = is_open & (usable.sum(0) > 0)
        weights = torch.where(serves, normalised(usable), weights)
        is_open &= ~serves
    return weights


def class_variances(values: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Spread of each class's features: the mean over dimensions of the per-dimension unbiased variance.

    Returns:
      (classes,) float64; NaN for a class with fewer than two examples.
    """
    variances = torch.full((num_classes,), torch.nan, dtype=torch.float64)
    for label in set(labels.tolist()):
        own = values[labels == label].double()
        if len(own) >= 2:
            # Two passes: identical features must give exactly 0, which counts as missing.
            variances[label] = ((own - own.mean(0)).square().sum(0) / (len(own) - 1)).mean()
    return variances


def stacked(weights: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of the merged update of eq. 3, sum_k w_k B_k A_k = left @ right, of rank K r at most.

    Args:
      weights: (K,); a: (K, rank, d_in); b: (K, d_out, rank); all float64.
    Returns:
      left (d_out, s) and right (s, d_in), s = min(K r, d_out, d_in).
    """
    right = a.flatten(0, 1)
    left = (weights[:, None, None] * b).permute(1, 0, 2).flatten(1)
    size, d_out, d_in = right.shape[0], left.shape[0], right.shape[1]
    if size <= min(d_out, d_in):
        return left, right
    dense = left @ right
    eye = torch.eye(min(d_out, d_in), dtype=dense.dtype)
    return (dense, eye) if d_in <= d_out else (eye, dense)


def truncated(left: Tensor, right: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best rank-r approximation of left @ right as balanced factors, B = U sqrt(S), A = sqrt(S) V'.

    Through QR of both factors, so that no d_out x d_in matrix is decomposed.

    Returns:
      a (rank, d_in) and b (d_out, rank); zero-padded where the product has a lower rank.
    """
    q_left, r_left = torch.linalg.qr(left)
    q_right, r_right = torch.linalg.qr(right.T)
    u, s, vt = torch.linalg.svd(r_left @ r_right.T)
    root = s[:rank].sqrt()
    a, b = right.new_zeros(rank, right.shape[1]), left.new_zeros(left.shape[0], rank)
    a[: len(root)] = root[:, None] * (vt[:rank] @ q_right.T)
    b[:, : len(root)] = (q_left @ u[:, :rank]) * root
    return a, b
