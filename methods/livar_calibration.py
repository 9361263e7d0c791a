"""LIVAR's calibration (eq. 4, figure 2, table A): target coefficients, what importances say of them, and the 3 x 3 table.

Numbers in, numbers out; `raysim/calibrate.py` makes the runs and keeps the files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from methods.livar_math import bins_of
from methods.moments import one_thread

Constraint = Literal["nonnegative", "simplex", "box"]

#: Coefficients are shares of a sum, so a cell that comes out at 0 or below (an empty one may) is lifted to this.
SMALLEST = 1e-6

FEATURES = ("importance_a", "importance_b", "num_examples")


# --- targets ----------------------------------------------------------------------------------------------------------


def gram(a: Tensor, b: Tensor) -> np.ndarray:
    """(M, M) inner products <B_i A_i, B_j A_j> = sum((B_i' B_j) * (A_i A_j')), float64; no product is formed.

    Args:
      a: (M, rank, d_in); b: (M, d_out, rank).
    """
    a, b = a.double(), b.double()
    with one_thread():
        left, right = torch.einsum("iop,joq->ijpq", b, b), torch.einsum("ipd,jqd->ijpq", a, a)
        return (left * right).sum((2, 3)).numpy()


def target_coefficients(
    inner: np.ndarray, target: np.ndarray, *, constraint: Constraint = "nonnegative", ridge: float = 1e-6
) -> np.ndarray:
    """argmin ||dW_joint - sum_i lambda_i dW_i||^2 + tau ||lambda - 1/K||^2 (eq. 4), tau = ridge trace(G) / K.

    The ridge settles what the data leave open: identical clients get equal shares of what one of them would get. The
    paper's constraint is lost. Solved by SciPy; the simplex through the least-norm form of the same problem: with
    sum lambda = 1 the target moves into the matrix, and u >= 0 with u nearly summing to 1 is u = s lambda at its best.

    Args:
      inner: (K, K), G, from `gram`; target: (K,), <dW_i, dW_joint>.
      constraint: lambda >= 0; "simplex": and sum lambda = 1; "box": 0 <= lambda <= 1.
    Returns:
      (K,) float64; 1/K where no client moved.
    """
    from scipy.optimize import lsq_linear, nnls

    count = len(target)
    tau = ridge * np.trace(inner) / count
    if not np.trace(inner) > 0:
        return np.full(count, 1 / count)
    # G + tau I = R'R, and R'y = c + tau / K: the least squares of R lambda = y.
    values, vectors = np.linalg.eigh(inner + tau * np.eye(count))
    is_there = values > values.max() * np.finfo(float).eps
    roots = np.sqrt(values[is_there])
    matrix = roots[:, None] * vectors[:, is_there].T
    wanted = vectors[:, is_there].T @ (target + tau / count) / roots
    if constraint == "nonnegative":
        return nnls(matrix, wanted)[0]
    if constraint == "box":
        return lsq_linear(matrix, wanted, bounds=(0, 1), method="bvls", tol=1e-14).x
    moved = matrix - wanted[:, None]
    moved = moved / max(np.abs(moved).max(), np.finfo(float).tiny)
    shares = nnls(np.vstack([moved, np.ones(count)]), np.append(np.zeros(len(moved)), 1.0))[0]
    return shares / shares.sum()


# --- rows -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """One row per run, client that took a step, and layer; n rows, all float64 unless said otherwise.

    Attributes:
      run, client: (n,) int64; layer: (n,) names.
      importances: (n, 2) I_A, I_B; quantiles: (n, 2) their ranks among the values of the run, 0 to 1.
      bins: (n, 2) int64, 0 low, 1 mid, 2 high.
      num_examples, coefficients: (n,) n_i and lambda.
    """

    run: np.ndarray
    client: np.ndarray
    layer: np.ndarray
    importances: np.ndarray
    quantiles: np.ndarray
    bins: np.ndarray
    num_examples: np.ndarray
    coefficients: np.ndarray

    def __len__(self) -> int:
        return len(self.run)


def rows_of_run(
    run: int,
    clients: np.ndarray,
    layers: Sequence[str],
    importance: np.ndarray,
    num_examples: np.ndarray,
    coefficients: np.ndarray,
    cuts: Sequence[Sequence[float]],
) -> Rows:
    """The rows of one run. clients, num_examples: (K,); importance: (K, L, 2); coefficients: (K, L)."""
    count, width = coefficients.shape
    bins = bins_of(torch.from_numpy(importance), cuts)
    return Rows(
        run=np.full(count * width, run),
        client=np.repeat(clients, width),
        layer=np.tile(np.array(layers), count),
        importances=importance.reshape(-1, 2),
        quantiles=np.stack([ranks(importance[..., factor].ravel()) for factor in (0, 1)], axis=1),
        bins=torch.stack(bins, dim=2).reshape(-1, 2).numpy(),
        num_examples=np.repeat(num_examples.astype(float), width),
        coefficients=coefficients.ravel(),
    )


def together(parts: Sequence[Rows]) -> Rows:
    """The rows of several runs."""
    return Rows(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in Rows.__annotations__})


def ranks(values: np.ndarray) -> np.ndarray:
    """(n,) in [0, 1]: 0 the smallest, 1 the largest, ties at their mean rank; 0.5 where there is but one value."""
    from scipy.stats import rankdata

    if len(values) == 1:
        return np.array([0.5])
    return (rankdata(values) - 1) / (len(values) - 1)


# --- forest, explanation, table ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Explanation:
    """A forest's view of the rows: base + contributions.sum(1) = predictions.

    contributions: (n, features), SHAP values; features: their names; oob_r2: R^2 on what each tree has not seen.
    """

    base: float
    contributions: np.ndarray
    predictions: np.ndarray
    oob_r2: float
    features: tuple[str, ...]


def explain(
    rows: Rows, *, features: Literal["quantile", "raw"], count_feature: bool, trees: int, min_leaf: int, seed: int
) -> Explanation:
    """A random forest from importances to coefficients, and the SHAP values of its training rows (tree explainer).

    Args:
      features: importances as ranks inside their run, which is what a table is applied to, or as they are.
      count_feature: n_i is a third feature (appendix B).
    """
    import shap
    from sklearn.ensemble import RandomForestRegressor

    inputs = rows.quantiles if features == "quantile" else rows.importances
    if count_feature:
        inputs = np.column_stack([inputs, rows.num_examples])
    forest = RandomForestRegressor(trees, min_samples_leaf=min_leaf, oob_score=True, random_state=seed, n_jobs=1)
    forest.fit(inputs, rows.coefficients)
    explainer = shap.TreeExplainer(forest)
    contributions = np.asarray(explainer.shap_values(inputs), dtype=float)
    return Explanation(
        base=float(np.ravel(explainer.expected_value)[0]),
        contributions=contributions,
        predictions=forest.predict(inputs),
        oob_r2=float(forest.oob_score_),
        features=FEATURES[: contributions.shape[1]],
    )


def table_from(found: Explanation, bins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(3, 3) coefficients, rows by the bin of I_A, columns by that of I_B, and how many rows each cell has.

    A cell is the base and the mean of SHAP_A + SHAP_B over its rows. Where there are none: the base and both bins' own
    means, 0 for a bin that is empty as well.
    """
    parts = found.contributions[:, :2]
    table, counts = np.empty((3, 3)), np.zeros((3, 3), np.int64)
    alone = [[_mean(parts[bins[:, factor] == level, factor]) for level in range(3)] for factor in (0, 1)]
    for low, column in np.ndindex(3, 3):
        mine = (bins[:, 0] == low) & (bins[:, 1] == column)
        counts[low, column] = mine.sum()
        share = parts[mine].sum(1).mean() if mine.any() else alone[0][low] + alone[1][column]
        table[low, column] = max(found.base + share, SMALLEST)
    return table, counts


def curve(quantiles: np.ndarray, contributions: np.ndarray, num_bins: int = 20) -> dict[str, list[float]]:
    """Mean and deviation of a feature's SHAP values in equal stretches of its quantile; empty ones are left out."""
    place = np.minimum((quantiles * num_bins).astype(int), num_bins - 1)
    found: dict[str, list[float]] = {"quantile": [], "mean": [], "std": [], "count": []}
    for number in np.unique(place):
        mine = contributions[place == number]
        values = ((number + 0.5) / num_bins, mine.mean(), mine.std(), len(mine))
        for name, value in zip(found, values, strict=True):
            found[name].append(float(value))
    return found


def calibration(rows: Rows, found: Explanation, cuts: Sequence[Sequence[float]]) -> dict[str, Any]:
    """What is kept of a calibration: plain lists and numbers, and `table` and `cuts` as livar takes them."""
    table, counts = table_from(found, rows.bins)
    quantiles: Mapping[str, np.ndarray] = {
        "importance_a": rows.quantiles[:, 0],
        "importance_b": rows.quantiles[:, 1],
        "num_examples": ranks(rows.num_examples),
    }
    return {
        "table": table.tolist(),
        "cuts": [[float(cut) for cut in pair] for pair in cuts],
        "counts": counts.tolist(),
        "base": found.base,
        "oob_r2": found.oob_r2,
        "num_rows": len(rows),
        "num_runs": len(np.unique(rows.run)),
        "mean_abs_shap": {
            name: float(np.abs(found.contributions[:, place]).mean()) for place, name in enumerate(found.features)
        },
        "curves": {
            name: curve(quantiles[name], found.contributions[:, place]) for place, name in enumerate(found.features)
        },
    }


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else 0.0
