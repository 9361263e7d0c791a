"""pFedMe: personal models by Moreau envelopes."""

from __future__ import annotations

import torch
from torch import Tensor

from raysim.core.method import Batch, ClientView, Count, GradFn, Method, Positive, require


def pfedme(*, lam: Positive = 15.0, inner_steps: Count = 5, inner_lr: float = 0.01) -> Method:
    """Take local steps along lam * (w - θ), where θ approximately minimises f(θ; batch) + lam / 2 * ||θ - w||^2.

    T. Dinh, Tran and Nguyen 2020, "Personalized Federated Learning with Moreau Envelopes" (NeurIPS), Algorithm 1. θ
    comes from `inner_steps` gradient steps that begin at w; the released code begins at the θ of the batch before. The client's
    own model is the last θ. The paper's beta is a server learning rate, `fedavgm: {beta: 0, server_lr}`.
    BatchNorm's statistics follow the pass at w.

    Args:
      lam: strength of the pull, > 0. The paper takes 15 and more.
      inner_steps: K, gradient steps for θ, >= 1.
      inner_lr: learning rate of θ, > 0. inner_lr * lam above 2 diverges.
    Raises:
      ValueError: inner_lr <= 0, or inner_lr * lam >= 2.
    """
    require("pfedme: inner_lr", inner_lr, 0 < inner_lr * lam < 2, f"between 0 and {2 / lam:g}, which is 2 / lam")

    def grads(inner: GradFn, client: ClientView) -> GradFn:
        def gradient(params: Tensor, batch: Batch) -> Tensor:
            theta = params - inner_lr * inner(params, batch)
            for _ in range(inner_steps - 1):
                theta -= inner_lr * (inner(theta, batch) + lam * (theta - params))
            client.scratch["theta"] = theta
            return lam * (params - theta)

        return gradient

    def own_model(client: ClientView) -> Tensor:
        theta = client.scratch.get("theta", client.start)  # without a step: where the client began
        return torch.cat([theta, client.state[len(theta) :]])

    return Method(
        "pfedme",
        grads=grads,
        own_model=own_model,
        claims=frozenset({"own-model"}),
        needs=frozenset({"client-memory", "sgd"}),
    )
