"""LIVAR without a proxy set: the coefficients of each round from the server's validation set.

The paper's section 6 asks for it. Eq. 4 regresses, layer by layer, the update of a jointly trained model on the clients' updates:
    argmin over lambda >= 0 of ||D - sum_k lambda_k dW_k||^2 + tau ||lambda - 1/K||^2
Here D is, in the place of the joint model's update, the descent direction on the server's validation set. With the
factors A_s and B_s that were broadcast, the validation gradients gA and gB with respect to them, and client k's factors,
    dW_k = B_k A_k - B_s A_s = (B_k - B_s) A_k + B_s (A_k - A_s),   D = -(gB A_s + B_s gA).
D is the direction in which a small step of gradient descent on that set moves the layer's product: what training on it for
a moment would give. Its length says nothing (a gradient has no learning rate), so D is scaled to the clients' root mean
square length, and lambda, as LIVAR's raw coefficients are, is normalised to sum 1 over the clients. The scale of the
validation loss then does not count.

Both sides are products of factors of rank 2r, so that a layer takes the (K + 1)^2 inner products of `regression.gram`, of
4 r^2 (d_in + d_out) multiplications each, and no d_out x d_in matrix. Beside them a round takes one gradient over the validation
set, on one trainer, and the clients' factors, which LIVAR fetches anyway.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from methods.livar.merging import Adapter, Coefficients, adapters_of, factors_of
from methods.livar.regression import gram, target_coefficients
from methods.moments import refuse_personal
from raysim.core.layout import Layout
from raysim.core.method import ServerView
from raysim.core.weights import normalised


def from_validation_set() -> Coefficients:
    """lambda from one gradient over the server's validation set in every round."""

    def of(server: ServerView, shares: Tensor) -> Tensor:
        return online_coefficients(factors_of(server), server, server.validation_gradient("eval"), shares)

    def check(layout: Layout) -> None:
        refuse_personal(layout, "livar: table 'online' is taken at the global model, which has no {names}; use a table")

    return Coefficients(of, check=check, needs=frozenset({"validation-set"}))


def online_coefficients(
    factors: Iterable[tuple[Adapter, Tensor, Tensor]], server: ServerView, gradient: Tensor, shares: Tensor
) -> Tensor:
    """lambda of each client and layer for eq. 3. The number of layers in which eq. 4 was solved is logged (`regressed`).

    Args:
      factors: (adapter, A (K, rank, d_in), B (K, d_out, rank)) of the clients after training, of each layer.
      gradient: [num_params], of the validation loss at the broadcast point.
      shares: (K,) float64, n_i / sum n.
    Returns:
      (K, L) float64, layers in order of the layout; columns sum to 1, or are 0 if no client took a step. A layer in
      which no client's update descends (<dW_k, D> <= 0 for all), or with a gradient that is 0 or not finite, gets the
      shares.
    """
    layout, is_active = server.layout, server.is_active
    columns, num_regressed = {}, 0
    for pair, a, b in factors:
        start_a, start_b, grad_a, grad_b = (
            layout.view(vector, leaf).double() for vector in (server.start, gradient) for leaf in (pair.a, pair.b)
        )
        column = shares.clone()
        if bool(is_active.any()):
            right, left = difference_factors(a[is_active], b[is_active], start_a, start_b, grad_a, grad_b)
            solution = _descending(gram(right, left))
            if solution is not None:
                column[is_active] = normalised(torch.from_numpy(solution))
                num_regressed += 1
        columns[pair.layer] = column
    server.log("regressed", num_regressed)
    return torch.stack([columns[pair.layer] for pair in adapters_of(layout)], dim=1)


def difference_factors(
    a: Tensor, b: Tensor, start_a: Tensor, start_b: Tensor, grad_a: Tensor, grad_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Factors of dW_1 ... dW_K and, last, of D, whose products are left[k] @ right[k].

    Args:
      a: (K, rank, d_in); b: (K, d_out, rank), of the clients; the others without the first axis.
    Returns:
      right (K + 1, 2 rank, d_in) and left (K + 1, d_out, 2 rank).
    """
    # Differences of factors, not of products: those would cancel.
    right = torch.cat([torch.cat([a, a - start_a], dim=1), torch.cat([start_a, grad_a])[None]])
    left = torch.cat(
        [torch.cat([b - start_b, start_b.expand_as(b)], dim=2), -torch.cat([grad_b, start_b], dim=1)[None]]
    )
    return right, left


def _descending(inner: np.ndarray) -> np.ndarray | None:
    """(K,) solution of eq. 4 from the (K + 1, K + 1) inner products, D's last; None where no client descends."""
    products, target, length = inner[:-1, :-1], inner[:-1, -1], inner[-1, -1]
    if not (np.isfinite(inner).all() and length > 0 and target.max() > 0):
        return None
    scale = np.sqrt(np.trace(products) / len(products)) / np.sqrt(length)
    return target_coefficients(products, scale * target)
