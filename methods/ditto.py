"""Ditto: a personal model on each client, pulled towards the global model."""

from __future__ import annotations

from torch import Tensor

from raysim.core.method import Amount, Batch, ClientView, GradFn, Method, Positive


def ditto(*, lam: Amount = 1.0, epochs: Positive | None = None) -> Method:
    """Train a personal model v beside the global model w: v <- v - lr * (gradient of F_k at v + lam * (v - w)).

    Li, Hu, Beirami and Smith 2021, "Ditto: Fair and Robust Federated Learning Through Personalization" (ICML), Algorithm 1.
    w is the broadcast point. A client's personal model begins at the first broadcast point that the client receives, and is
    client memory. The global model trains as without this method.

    Args:
      lam: strength of the pull, >= 0. 0: each client trains alone; the paper selects from {0.1, 1, 2}.
      epochs: local epochs of the personal model, > 0; null: as many as the global model has.
    """

    def own_model(client: ClientView) -> Tensor:
        def pulled(inner: GradFn) -> GradFn:
            def gradient(params: Tensor, batch: Batch) -> Tensor:
                return inner(params, batch).add_(params - client.start, alpha=lam)

            return gradient

        begin = client.memory.get("own_model", client.start_state)
        return client.train(begin, grads=pulled, epochs=epochs)

    return Method("ditto", own_model=own_model, claims=frozenset({"own-model"}), needs=frozenset({"client-memory"}))
