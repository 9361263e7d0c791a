"""APFL: each client mixes a local and the global model."""

from __future__ import annotations

import torch
from torch import Tensor

from raysim.core.method import Batch, ClientView, GradFn, Method, ServerView, Share, State


def apfl(*, alpha: Share = 0.5, adaptive: bool = False) -> Method:
    """Train a local model v through the mixture alpha * v + (1 - alpha) * w, beside the client's copy w of the global model.

    Deng, Kamani and Mahdavi 2020, "Adaptive Personalized Federated Learning" (arXiv:2003.13461), Algorithm 1. At each local
    step, with m the mixture before the step and the gradients of one batch:
        w <- w - lr * gradient at w,   v <- v - lr * alpha * gradient at m
    The client's own model is the mixture. v begins at the first broadcast point that the client receives; v and alpha are
    client memory. Momentum and weight decay apply to w alone, and BatchNorm's statistics follow the pass at w.

    Args:
      alpha: share of the local model, in [0, 1]. 0: the personal model is the client's copy of the global model.
      adaptive: alpha takes one gradient step at the first batch of a round, and stays in [0, 1]. `apfl/alpha` is
        the mean over the clients of the round.
    """

    def grads(inner: GradFn, client: ClientView) -> GradFn:
        memory = client.memory
        local = memory["local"] = memory.get("local", client.start).clone()
        memory.setdefault("alpha", alpha)
        is_due = adaptive

        def gradient(params: Tensor, batch: Batch) -> Tensor:
            nonlocal is_due
            share = memory["alpha"]
            at_mixture = inner(share * local + (1 - share) * params, batch)
            if is_due:
                slope = torch.dot(at_mixture, local - params)
                memory["alpha"], is_due = min(1.0, max(0.0, share - client.lr * float(slope))), False
            local.sub_(at_mixture, alpha=client.lr * share)
            return inner(params, batch)

        return gradient

    def own_model(client: ClientView) -> Tensor:
        share, local = client.memory["alpha"], client.memory["local"]
        return torch.cat([share * local + (1 - share) * client.params, client.state[len(local) :]])

    def log(update: Tensor, state: State, server: ServerView) -> tuple[Tensor, State]:
        if len(server.clients):
            server.log("alpha", float(server.report["alpha"].mean()))
        return update, state

    return Method(
        "apfl",
        grads=grads,
        own_model=own_model,
        report=(lambda client: {"alpha": client.memory["alpha"]}) if adaptive else None,
        server_update=log if adaptive else None,
        claims=frozenset({"own-model"}),
        needs=frozenset({"client-memory", "sgd"}),
    )
