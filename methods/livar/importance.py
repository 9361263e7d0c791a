"""Layer importance (LIVAR, section 4 and table A): sums over the steps, their bins, and coefficients for eq. 3."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from methods.livar.merging import Coefficients, adapters_of
from raysim.core.method import Batch, ClientView, GradFn, ServerView
from raysim.core.weights import normalised

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
    """Raw coefficients, 3 rows by the bin of I_A and 3 columns by the bin of I_B, and the quantiles between the
    bins.
    """

    values: Sequence[Sequence[float]]
    cuts: Sequence[Sequence[float]] = CUTS


def table_of(value: object) -> CoefficientTable:
    """The table of a name, of three rows, or of a mapping with `table` and perhaps `cuts`.

    Raises:
      ValueError: it is none of these; numbers are not positive and finite; cuts do not rise inside [0, 1].
    """
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


def from_importance(table: CoefficientTable) -> Coefficients:
    """Return lambda from the importances I_A and I_B accumulated in the clients' steps; both are logged."""

    def grads(inner: GradFn, client: ClientView) -> GradFn:
        count = client.scratch["count"] = ImportanceCount(client)

        def gradient(params: Tensor, batch: Batch) -> Tensor:
            count.close_step(client.params)
            grad = inner(params, batch)
            count.open_step(grad)
            return grad

        return gradient

    def report(client: ClientView) -> dict[str, Tensor]:
        count = client.scratch["count"]
        count.close_step(client.trained[: client.layout.num_params])
        total: Tensor = count.sums.cpu()
        total = total + client.memory.get("importance", torch.zeros_like(total)).cpu()
        client.memory["importance"] = total
        return {"importance": total}

    def of(server: ServerView, shares: Tensor) -> Tensor:
        values, names = server.report["importance"], [pair.layer for pair in adapters_of(server.layout)]
        server.log("importance_a", values[..., 0], names)
        server.log("importance_b", values[..., 1], names)
        return layer_coefficients(values, server.is_active, shares, table)

    return Coefficients(of, grads, report, needs=frozenset({"client-memory"}))


class ImportanceCount:
    """Sums over the steps of one client's round; `sums` is (L, 2) float64. Owns copies of a step's gradient and start."""

    def __init__(self, client: ClientView):
        self._client = client
        self._adapters = adapters_of(client.layout)
        self.sums = torch.zeros(len(self._adapters), 2, dtype=torch.float64, device=client.params.device)
        self._grad, self._before = torch.empty_like(client.start), torch.empty_like(client.start)
        self._is_open = False

    def open_step(self, grad: Tensor) -> None:
        # Copies: the optimizer and other methods work in place.
        self._grad.copy_(grad)
        self._before.copy_(self._client.params)
        self._is_open = True

    def close_step(self, after: Tensor) -> None:
        """Count the step since `open_step`, which has put the parameters [num_params] where they are in `after`."""
        if not self._is_open:
            return
        moved = self._before.sub_(after)
        parts = [
            step_importance(self._grad[leaf.offset : leaf.end], moved[leaf.offset : leaf.end])
            for pair in self._adapters
            for leaf in (pair.a, pair.b)
        ]
        # A step on a non-finite gradient counts 0: the released code does so for NaN, and takes the largest float for inf.
        self.sums += torch.stack(parts).view(-1, 2).nan_to_num(0.0, 0.0, 0.0)
        self._is_open = False


def step_importance(grad: Tensor, moved: Tensor) -> Tensor:
    """|sum(g . moved)|, the contribution of a step to the importance of a factor. Scalar, float64.

    Args:
      moved: before - after, so that descent is positive.
    """
    return (grad.double() * moved.double()).sum().abs()


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


def raw_coefficients(importance: Tensor, table: CoefficientTable) -> Tensor:
    """The table's value for each client and layer, (K, L) float64, from (K, L, 2) importances."""
    return torch.tensor(table.values, dtype=torch.float64)[bins_of(importance, table.cuts)]


def layer_coefficients(importance: Tensor, is_active: Tensor, shares: Tensor, table: CoefficientTable) -> Tensor:
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
