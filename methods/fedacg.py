"""FedACG: clients start from the model advanced by the server's momentum, and stay near that point."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from methods.fedprox import fedprox
from raysim.core.layout import Layout
from raysim.core.method import Amount, Decay, Message, Method, ServerView, State


def fedacg(*, lam: Decay = 0.85, beta: Amount = 1e-3) -> Method:
    """Server momentum m with lookahead s = w + lam m, and a pull of clients towards s.

    Kim, Kim, Han 2024 (CVPR), Δ the uniform mean of y_k - s:
        client:  minimise f_k(y) + (beta/2) ||y - s||^2, starting at s
        server:  m <- lam m + Δ,   w <- s + Δ   (the mean of y_k; this model is evaluated)
    BatchNorm statistics get neither momentum nor lookahead. The released code also decays the learning rate after every
    local epoch (local.lr_decay applies after every round), and clips gradients to an L2 norm of 10
    (local.max_grad_norm).

    Args:
      lam: momentum, 0 <= lam < 1; the paper uses 0.85.
      beta: strength of the pull, >= 0. The paper says 0.001; the released code, which leaves out the 1/2, acts as 0.002.
    """

    def init(params: Tensor, layout: Layout) -> State:
        return {"momentum": torch.zeros_like(params)}

    def broadcast(message: Message, state: State) -> Message:
        return Message(message.params + lam * state["momentum"], message.fields)

    def server_update(update: Tensor, state: State, server: ServerView) -> tuple[Tensor, State]:
        # The engine adds the update to s, which already holds lam m: w = s + Δ.
        return update, {"momentum": lam * state["momentum"] + update}

    return replace(
        fedprox(mu=beta),
        name="fedacg",
        init=init,
        broadcast=broadcast,
        server_update=server_update,
        claims=frozenset({"broadcast-point", "server-optimizer"}),
        base_weights="uniform",
    )
