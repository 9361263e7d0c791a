"""Eq. 4 of LIVAR, the regression behind the coefficients: inner products of factor products, and the solution."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from methods.moments import one_thread

Constraint = Literal["nonnegative", "simplex", "box"]


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
