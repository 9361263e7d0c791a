"""Eq. 4 of LIVAR, the regression behind the coefficients: inner products of factor products, and the solution."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from methods.moments import one_thread

#: Pull of the coefficients towards 1/K, as a share of the mean squared update.
RIDGE = 1e-6


def gram(a: Tensor, b: Tensor) -> np.ndarray:
    """(M, M) inner products <B_i A_i, B_j A_j> = sum((B_i' B_j) * (A_i A_j')), float64; no product is formed.

    Args:
      a: (M, rank, d_in); b: (M, d_out, rank).
    """
    a, b = a.double(), b.double()
    with one_thread():
        left, right = torch.einsum("iop,joq->ijpq", b, b), torch.einsum("ipd,jqd->ijpq", a, a)
        return np.asarray((left * right).sum((2, 3)))


def target_coefficients(inner: np.ndarray, target: np.ndarray, *, ridge: float = RIDGE) -> np.ndarray:
    """argmin ||dW_joint - sum_i lambda_i dW_i||^2 + tau ||lambda - 1/K||^2 over lambda >= 0 (eq. 4), tau = ridge trace(G) / K.

    The ridge decides what the data leave open: identical clients get equal shares of what one of them would get. The
    paper's constraint is lost; coefficients are not negative here.

    Args:
      inner: (K, K), G, from `gram`; target: (K,), <dW_i, dW_joint>.
    Returns:
      (K,) float64; 1/K where no client moved.
    """
    from scipy.optimize import nnls

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
    return np.asarray(nnls(matrix, wanted)[0])
