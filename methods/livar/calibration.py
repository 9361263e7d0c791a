"""LIVAR's calibration (eq. 4, figure 2, table A): target coefficients, what importances say of them, and the 3 x 3 table.

Numbers in, numbers out; `methods/livar/calibrate.py` makes the runs and keeps the files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from methods.livar.math import bins_of
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
        return np.asarray((left * right).sum((2, 3)))


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
        return np.asarray(nnls(matrix, wanted)[0])
    if constraint == "box":
        return np.asarray(lsq_linear(matrix, wanted, bounds=(0, 1), method="bvls", tol=1e-14).x)
    moved = matrix - wanted[:, None]
    moved = moved / max(np.abs(moved).max(), np.finfo(float).tiny)
    shares = nnls(np.vstack([moved, np.ones(count)]), np.append(np.zeros(len(moved)), 1.0))[0]
    return np.asarray(shares / shares.sum())


# --- rows -------------------------------------------------------------------------------------------------------------


def rows_of_run(
    run: str,
    clients: np.ndarray,
    layers: Sequence[str],
    importance: np.ndarray,
    num_examples: np.ndarray,
    coefficients: np.ndarray,
    cuts: Sequence[Sequence[float]],
) -> pd.DataFrame:
    """One row per client that took a step, and layer.

    Args:
      clients, num_examples: (K,); importance: (K, L, 2), I_A and I_B; coefficients: (K, L), lambda.
    Returns:
      Columns run, client, layer, importance_a and _b, quantile_a and _b (ranks among the values of the run, 0 to 1),
      bin_a and _b (0 low, 1 mid, 2 high), num_examples, coefficient.
    """
    width = len(layers)
    rows = pd.DataFrame({"run": run, "client": np.repeat(clients, width), "layer": [*layers] * len(clients)})
    for factor, bins in enumerate(bins_of(torch.from_numpy(importance), cuts)):
        name = "ab"[factor]
        rows[f"importance_{name}"] = importance[..., factor].ravel()
        rows[f"quantile_{name}"] = ranks(importance[..., factor].ravel())
        rows[f"bin_{name}"] = bins.flatten().numpy()
    return rows.assign(num_examples=np.repeat(num_examples.astype(float), width), coefficient=coefficients.ravel())


def ranks(values: np.ndarray) -> np.ndarray:
    """(n,) in [0, 1]: 0 the smallest, 1 the largest, ties at their mean rank; 0.5 where there is but one value."""
    from scipy.stats import rankdata

    if len(values) == 1:
        return np.array([0.5])
    return np.asarray((rankdata(values) - 1) / (len(values) - 1))


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
    rows: pd.DataFrame,
    *,
    features: Literal["quantile", "raw"],
    count_feature: bool,
    trees: int,
    min_leaf: int,
    seed: int,
) -> Explanation:
    """A random forest from importances to coefficients, and the SHAP values of its training rows (tree explainer).

    Args:
      features: importances as ranks inside their run, which is what a table is applied to, or as they are.
      count_feature: n_i is a third feature (appendix B).
    """
    import shap
    from sklearn.ensemble import RandomForestRegressor

    kind = "quantile" if features == "quantile" else "importance"
    names = [f"{kind}_a", f"{kind}_b", *(["num_examples"] if count_feature else [])]
    inputs = np.ascontiguousarray(rows[names])
    forest = RandomForestRegressor(trees, min_samples_leaf=min_leaf, oob_score=True, random_state=seed, n_jobs=1)
    forest.fit(inputs, rows["coefficient"].to_numpy())
    explainer = shap.TreeExplainer(forest)
    contributions = np.asarray(explainer.shap_values(inputs), dtype=float)
    return Explanation(
        base=float(np.ravel(explainer.expected_value)[0]),
        contributions=contributions,
        predictions=forest.predict(inputs),
        oob_r2=float(forest.oob_score_),
        features=FEATURES[: contributions.shape[1]],
    )


def table_from(explanation: Explanation, bins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(3, 3) coefficients, rows by the bin of I_A, columns by that of I_B, and how many rows each cell has.

    A cell is the base and the mean of SHAP_A + SHAP_B over its rows. Where there are none: the base and both bins' own
    means, 0 for a bin that is empty as well.

    Args:
      bins: (n, 2) int64, of I_A and I_B.
    """
    shap_values = explanation.contributions[:, :2]
    table, counts = np.empty((3, 3)), np.zeros((3, 3), np.int64)
    alone = [[_mean(shap_values[bins[:, factor] == level, factor]) for level in range(3)] for factor in (0, 1)]
    for row, column in np.ndindex(3, 3):
        inside = shap_values[(bins[:, 0] == row) & (bins[:, 1] == column)]
        counts[row, column] = len(inside)
        share = inside.sum(1).mean() if len(inside) else alone[0][row] + alone[1][column]
        table[row, column] = max(explanation.base + share, SMALLEST)
    return table, counts


def curve(quantiles: np.ndarray, contributions: np.ndarray, num_bins: int = 20) -> dict[str, list[float]]:
    """Mean and deviation of a feature's SHAP values in equal stretches of its quantile; empty ones are left out."""
    stretch = np.minimum((quantiles * num_bins).astype(int), num_bins - 1)
    parts = {int(number): contributions[stretch == number] for number in np.unique(stretch)}
    return {
        "quantile": [(number + 0.5) / num_bins for number in parts],
        "mean": [float(values.mean()) for values in parts.values()],
        "std": [float(values.std()) for values in parts.values()],
        "count": [float(len(values)) for values in parts.values()],
    }


class Result(TypedDict):
    """What is kept of a calibration: `table` and `cuts` as livar takes them, the forest's numbers, by feature its SHAP."""

    table: list[list[float]]
    cuts: list[list[float]]
    counts: list[list[int]]
    base: float
    oob_r2: float
    num_rows: int
    num_runs: int
    mean_abs_shap: dict[str, float]
    curves: dict[str, dict[str, list[float]]]
    settings: dict[str, object]


def calibration(
    rows: pd.DataFrame, explanation: Explanation, cuts: Sequence[Sequence[float]], settings: dict[str, object]
) -> Result:
    """The table of the rows, and the numbers beside it. settings: kept as they are."""
    table, counts = table_from(explanation, rows[["bin_a", "bin_b"]].to_numpy())
    quantiles = (rows["quantile_a"].to_numpy(), rows["quantile_b"].to_numpy(), ranks(rows["num_examples"].to_numpy()))
    shap_values = dict(zip(explanation.features, explanation.contributions.T, strict=True))
    return {
        "table": table.tolist(),
        "cuts": [[float(cut) for cut in pair] for pair in cuts],
        "counts": counts.tolist(),
        "base": explanation.base,
        "oob_r2": explanation.oob_r2,
        "num_rows": len(rows),
        "num_runs": rows["run"].nunique(),
        "mean_abs_shap": {name: float(np.abs(values).mean()) for name, values in shap_values.items()},
        "curves": {name: curve(quantiles[place], values) for place, (name, values) in enumerate(shap_values.items())},
        "settings": settings,
    }


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else 0.0
