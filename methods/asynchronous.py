"""Asynchronous methods: the server steps when updates arrive, while the other clients keep training."""

from __future__ import annotations

from torch import Tensor

from raysim.core.method import Amount, Count, Fraction, Method, Positive, ServerView, State
from raysim.core.weights import scale

#: An asynchronous method decides when a round ends, so no client can train after all others.
CLAIMS, EXCLUDES = (
    frozenset({"arrivals"}),
    {"overhear": "clients arrive one by one, and no client trains after the others"},
)


def fedbuff(*, buffer: Count = 10, server_lr: Positive = 1.0, power: Amount = 0.5, by_examples: bool = False) -> Method:
    """The server steps when K updates have arrived: x <- x + eta_g / K sum_k s(tau_k) u_k.

    Nguyen et al. 2022 (arXiv:2106.06639), Algorithm 1, with s(tau) = (1 + tau)^-power: tau_k is the number of server steps since
    client k received its model. `cohort.size` clients are at work at a time (the paper's concurrency); for each update
    that arrives, a free client begins. `rounds` counts server steps. A client contributes at most one update to a step. With
    `server_lr` 1, `power` 0, equal speeds, `buffer` = `cohort.size` and `by_examples`, fedbuff equals FedAvg. The paper's
    secure aggregation is left out.

    Args:
      buffer: K, number of updates in a server step, at least 1 and at most `cohort.size`.
      server_lr: eta_g, factor of the step, > 0.
      power: exponent p in the weight (1 + tau)^-p of stale updates, >= 0; 0 gives all updates the same weight.
      by_examples: weigh updates by numbers of examples in place of 1 / K.
    """

    def server_update(update: Tensor, state: State, server: ServerView) -> tuple[Tensor, State]:
        return server_lr * update, state

    return Method(
        "fedbuff",
        weigh=lambda weights, server: scale(weights, staleness_weight(server, power)),
        server_update=server_update,
        arrivals=buffer,
        base_weights="examples" if by_examples else "uniform",
        needs=frozenset({"clock"}),
        claims=CLAIMS,
        excludes=EXCLUDES,
    )


def fedasync(*, alpha: Fraction = 0.6, power: Amount = 0.5) -> Method:
    """The server mixes each model that arrives into the global model: x <- (1 - a) x + a x_k with a = alpha s(tau).

    Xie et al. 2019 (arXiv:1903.03934), Algorithm 1, with the polynomial s(tau) = (1 + tau)^-power: tau is the number of server
    steps since the client received its model x_tau, and x_k = x_tau + u_k. A round is one update; `cohort.size` clients are at
    work at a time. The proximal term of the paper's clients is `fedprox`, listed with this method; the paper's hinge
    function for s is left out. BatchNorm's statistics move by a times the client's change.

    Args:
      alpha: share of a fresh model, in (0, 1].
      power: exponent p in the weight (1 + tau)^-p of stale models, >= 0; 0 gives all models the same weight.
    """

    def server_update(update: Tensor, state: State, server: ServerView) -> tuple[Tensor, State]:
        for client, share, is_active in zip(
            server.clients.tolist(), (alpha * staleness_weight(server, power)).tolist(), server.is_active, strict=True
        ):
            if is_active:  # a client without a step has no model of its own
                lag = server.began_at(client) - server.start
                update = update + share * server.layout.zero_personal_(lag.clone())
        return update, state

    return Method(
        "fedasync",
        weigh=lambda weights, server: scale(weights, alpha * staleness_weight(server, power)),
        server_update=server_update,
        arrivals=1,
        needs=frozenset({"clock"}),
        claims=CLAIMS,
        excludes=EXCLUDES,
    )


def staleness_weight(server: ServerView, power: float) -> Tensor:
    """Return (K,) float64: (1 + tau_k)^-power."""
    return (1.0 + server.staleness.double()) ** -power
