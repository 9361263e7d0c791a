"""LIVAR's calibration (eq. 4, figure 2, table A): target coefficients, their forest over importances, the 3 x 3 table.

Numbers in, numbers out; `raysim/tuning/calibrate.py` makes the runs and keeps the files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import pandas as pd
import torch

from methods.livar.importance import CUTS, bins_of

#: Fewest rows in a leaf of a tree.
MIN_LEAF = 5

#: Coefficients are shares of a sum, so a cell that comes out at 0 or below (an empty one may) is lifted to this.
SMALLEST = 1e-6

#: Features of the forest -> column of the rows.
FEATURES = {"importance_a": "quantile_a", "importance_b": "quantile_b", "num_examples": "num_examples"}


def rows_of_run(
    run: str,
    clients: np.ndarray,
    layers: Sequence[str],
    importance: np.ndarray,
    num_examples: np.ndarray,
    coefficients: np.ndarray,
) -> pd.DataFrame:
    """A row for each layer and each client with a step.

    Args:
      clients, num_examples: (K,); importance: (K, L, 2), I_A and I_B; coefficients: (K, L), lambda.
    Returns:
      Columns run, client, layer, importance_a and _b, quantile_a and _b (ranks among the values of the run, 0 to 1),
      bin_a and _b (0 low, 1 mid, 2 high), num_examples, coefficient.
    """
    width = len(layers)
    rows = pd.DataFrame({"run": run, "client": np.repeat(clients, width), "layer": [*layers] * len(clients)})
    for factor, bins in enumerate(bins_of(torch.from_numpy(importance))):
        name = "ab"[factor]
        rows[f"importance_{name}"] = importance[..., factor].ravel()
        rows[f"quantile_{name}"] = quantile_ranks(importance[..., factor].ravel())
        rows[f"bin_{name}"] = bins.flatten().numpy()
    return rows.assign(num_examples=np.repeat(num_examples.astype(float), width), coefficient=coefficients.ravel())


def quantile_ranks(values: np.ndarray) -> np.ndarray:
    """Return (n,) in [0, 1]: 0 the smallest, 1 the largest, ties at their mean rank; 0.5 for a single value."""
    from scipy.stats import rankdata

    if len(values) == 1:
        return np.array([0.5])
    return np.asarray((rankdata(values) - 1) / (len(values) - 1))


@dataclass(frozen=True)
class Explanation:
    """A forest's view of the rows: base + contributions.sum(1) = predictions.

    contributions: (n, features), SHAP values in the order of FEATURES; oob_r2: R^2 on what each tree has not seen.
    """

    base: float
    contributions: np.ndarray
    predictions: np.ndarray
    oob_r2: float


def explain(rows: pd.DataFrame, *, trees: int, count_feature: bool = False) -> Explanation:
    """A random forest from importances to coefficients, and the SHAP values of its training rows (tree explainer).

    Importances are ranks inside their run: a table is applied to quantiles.

    Args:
      count_feature: n_i is a third feature (appendix B).
    """
    import shap
    from sklearn.ensemble import RandomForestRegressor

    inputs = np.ascontiguousarray(rows[[*FEATURES.values()][: 2 + count_feature]])
    forest = RandomForestRegressor(trees, min_samples_leaf=MIN_LEAF, oob_score=True, random_state=0, n_jobs=1)
    forest.fit(inputs, rows["coefficient"].to_numpy())
    explainer = shap.TreeExplainer(forest)
    return Explanation(
        base=float(np.ravel(explainer.expected_value)[0]),
        contributions=np.asarray(explainer.shap_values(inputs), dtype=float),
        predictions=forest.predict(inputs),
        oob_r2=float(forest.oob_score_),
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
    """A calibration: `table` and `cuts` as livar takes them, the forest's numbers, the SHAP values by feature."""

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


def calibration(rows: pd.DataFrame, explanation: Explanation, settings: dict[str, object]) -> Result:
    """The table of the rows, and the numbers beside it. settings: kept as they are."""
    table, counts = table_from(explanation, rows[["bin_a", "bin_b"]].to_numpy())
    quantiles = rows.assign(num_examples=quantile_ranks(rows["num_examples"].to_numpy()))
    shap_values = dict(zip(FEATURES, explanation.contributions.T, strict=False))
    return {
        "table": table.tolist(),
        "cuts": [[float(cut) for cut in pair] for pair in CUTS],
        "counts": counts.tolist(),
        "base": explanation.base,
        "oob_r2": explanation.oob_r2,
        "num_rows": len(rows),
        "num_runs": rows["run"].nunique(),
        "mean_abs_shap": {name: float(np.abs(values).mean()) for name, values in shap_values.items()},
        "curves": {name: curve(quantiles[FEATURES[name]].to_numpy(), values) for name, values in shap_values.items()},
        "settings": settings,
    }


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else 0.0
