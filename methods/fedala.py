"""FedALA: a client begins at a mixture of the global model and the client's own model, with learned weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from raysim.core.layout import Layout
from raysim.core.method import ClientView, Count, Fraction, Method, Positive


def fedala(*, layers: Count = 1, eta: Positive = 1.0, share: Fraction = 0.8, first_passes: Count = 10) -> Method:
    """Local steps begin at v + W (w - v) in the last layers, and at the global model w in all others.

    Zhang et al. 2023, "FedALA: Adaptive Local Aggregation for Personalized Federated Learning" (AAAI, arXiv:2212.01197),
    Algorithm 1, with v the client's model after its last local steps. W has a weight in [0, 1] for each entry, begins at 1, and
    is learned before the local steps, on a share of the client's examples: W <- clip(W - eta g (w - v), 0, 1) batch by batch,
    with g the gradient at the mixture. The model after the local steps is sent to the server, and is the client's own model.
    In a client's first round, the local steps begin at w. v and W are client memory.

    When a client first has both models, the paper learns W until the loss settles; raysim learns W for `first_passes` passes.
    W is learned on the batches in which models are scored (`evaluation.batch_size`). The order of the examples is drawn once for
    the client, and each pass draws its batches anew.

    Args:
      layers: p, number of last layers that have weights W, >= 1; all other layers begin at the global model.
      eta: learning rate of W, > 0.
      share: share of the client's batches on which a pass learns W, in (0, 1].
      first_passes: passes when W is learned for the first time, >= 1; later rounds take one pass.
    """

    def begin(client: ClientView) -> Tensor:
        if "own_model" not in client.memory:
            return client.start_state
        state, top = client.start_state.clone(), _last(client.layout, layers)
        own_top = client.memory["own_model"][: len(client.start)][top]
        change = client.start[top] - own_top
        passes = 1 if "weights" in client.memory else first_passes
        weights = client.memory.get("weights", torch.ones_like(own_top))
        point = state[: len(client.start)]
        for _ in range(passes):
            batches = list(client.batches())
            count = math.ceil(share * len(batches))
            for index in torch.randperm(len(batches), generator=client.generator)[:count].tolist():
                point[top] = own_top + weights * change
                gradient = client.model.gradient(client.model.criterion, point, batches[index])[top]
                weights = (weights - eta * gradient * change).clamp(0, 1)
        point[top] = own_top + weights * change
        client.memory["weights"] = weights
        return state

    return Method(
        "fedala",
        begin=begin,
        own_model=lambda client: client.state,
        claims=frozenset({"own-model"}),
        needs=frozenset({"client-memory"}),
    )


def _last(layout: Layout, count: int) -> slice:
    """The entries of the last layers of the network."""
    layers = list(dict.fromkeys(leaf.layer for leaf in layout.params))[-count:]
    return slice(min(leaf.offset for leaf in layout.params if leaf.layer in layers), layout.num_params)
