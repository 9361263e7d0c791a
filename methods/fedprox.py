"""FedProx: a pull towards the broadcast point."""

from __future__ import annotations

import torch
from torch import Tensor

from raysim.core.method import Amount, Batch, ClientView, GradFn, Method


def fedprox(*, mu: Amount = 0.01) -> Method:
    """Adds mu (y - s), the gradient of (mu/2) ||y - s||^2, to the gradient at y; s is the broadcast point.

    Li et al. 2020, "Federated Optimization in Heterogeneous Networks" (MLSys), eq. 2. The sum then enters momentum and
    weight decay like any gradient.

    Args:
      mu: strength of the pull, >= 0. The paper tunes it in {0.001, 0.01, 0.1, 1}; FedVG and UniVarFL use 0.01.
    """

    def grads(inner: GradFn, client: ClientView) -> GradFn:
        difference = torch.empty_like(client.start)

        def gradient(params: Tensor, batch: Batch) -> Tensor:
            # The difference first: it is exactly zero at s, so one local step is FedAvg for any mu.
            torch.sub(params, client.start, out=difference)
            return inner(params, batch).add_(difference, alpha=mu)

        return gradient

    return Method("fedprox", grads=grads)
