"""FedProx: a pull towards the broadcast point."""

from __future__ import annotations

import torch
from torch import Tensor

from raysim.core.method import Batch, ClientView, GradFn, Method


def fedprox(*, mu: float = 0.01) -> Method:
    """Adds mu (y - s) to the gradient, the gradient of (mu/2) ||y - s||^2.

    Li et al. 2020, "Federated Optimization in Heterogeneous Networks" (MLSys), eq. 2. Before momentum and weight
    decay; on all trained parameters, never on buffers.

    Args:
      mu: strength of the pull, >= 0. The paper tunes it in {0.001, 0.01, 0.1, 1}; FedVG and UniVarFL use 0.01.
    Raises:
      ValueError: mu < 0.
    """
    if mu < 0:
        raise ValueError(f"fedprox: mu must be >= 0, got {mu}; 0 is FedAvg, 0.01 is common")

    def grads(inner: GradFn, client: ClientView) -> GradFn:
        if mu == 0:
            return inner

        # The difference first: it is exactly zero at s, so one local step is FedAvg for any mu.
        difference = torch.empty_like(client.start)

        def gradient(params: Tensor, batch: Batch) -> Tensor:
            grad = inner(params, batch)
            return grad.add_(torch.sub(params, client.start, out=difference), alpha=mu)

        return gradient

    return Method("fedprox", grads=grads)
