"""FedAdam, FedYogi and FedAdagrad: adaptive optimisers on the server."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from raysim.core.layout import Layout
from raysim.core.method import Amount, Decay, Method, Positive, ServerView, State

NextMoment = Callable[[Tensor, Tensor], Tensor]


def fedadam(
    *, server_lr: Positive = 0.01, beta1: Decay = 0.9, beta2: Decay = 0.99, tau: Positive = 1e-3, init_v: Amount = 0.0
) -> Method:
    """Adam on the server; the aggregated update Δ is the negative gradient.

    Reddi et al. 2021 (arXiv:2003.00295), Algorithm 2:
        m <- beta1 m + (1 - beta1) Δ,   v <- beta2 v + (1 - beta2) Δ^2,   w <- w + server_lr m / (sqrt(v) + tau)
    Δ is weighted by examples, as in the paper's experiments, unless other methods say otherwise. The step applies to
    parameters only: BatchNorm statistics are averaged, since an optimiser can drive a running variance below zero. A
    round in which no client took a step changes nothing. The authors' code (Keras) corrects the bias of m and v, which
    Algorithm 2 does not.

    Args:
      server_lr: server learning rate, > 0: about the size of a step of one parameter where sqrt(v) is well above tau.
        0.01 is a cautious start; the paper tunes it for every task.
      beta1: decay of m, in [0, 1); 0.9 in the paper.
      beta2: decay of v, in [0, 1); 0.99 in the paper.
      tau: constant, > 0, added to sqrt(v): steps of all parameters have about equal size where |Δ| is well above tau,
        and are proportional to Δ where |Δ| is well below tau.
      init_v: v at the start, >= 0; 0 in the paper's experiments, though Algorithm 2 asks for at least tau^2.
    """

    def next_v(v: Tensor, square: Tensor) -> Tensor:
        return beta2 * v + (1 - beta2) * square

    return _fedopt("fedadam", next_v, server_lr, beta1, tau, init_v)


def fedyogi(
    *, server_lr: Positive = 0.01, beta1: Decay = 0.9, beta2: Decay = 0.99, tau: Positive = 1e-3, init_v: Amount = 0.0
) -> Method:
    """Yogi on the server: as `fedadam`, but v moves by at most (1 - beta2) Δ^2.

    Reddi et al. 2021 (arXiv:2003.00295), Algorithm 2:
        v <- v - (1 - beta2) Δ^2 sign(v - Δ^2);   m and the step as in `fedadam`
    With init_v 0 the first round is fedadam's.

    Args:
      server_lr: server learning rate, > 0: the size of a step where sqrt(v) is well above tau.
      beta1: decay of m, in [0, 1).
      beta2: decay of v, in [0, 1).
      tau: constant, > 0, added to sqrt(v): steps of all parameters have about equal size where |Δ| is well above tau,
        and are proportional to Δ where |Δ| is well below tau.
      init_v: v at the start, >= 0.
    """

    def next_v(v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - beta2) * square * torch.sign(v - square)

    return _fedopt("fedyogi", next_v, server_lr, beta1, tau, init_v)


def fedadagrad(*, server_lr: Positive = 0.01, beta1: Decay = 0.0, tau: Positive = 1e-3, init_v: Amount = 0.0) -> Method:
    """Adagrad on the server: as `fedadam`, but v is the sum of all Δ^2.

    Reddi et al. 2021 (arXiv:2003.00295), Algorithm 2:
        v <- v + Δ^2;   m and the step as in `fedadam`

    Args:
      server_lr: server learning rate, > 0: the size of the first step where sqrt(v) is well above tau. v only grows, so
        later steps are smaller.
      beta1: decay of m, in [0, 1); 0 (no momentum) in the paper's experiments.
      tau: constant, > 0, added to sqrt(v): steps of all parameters have about equal size where |Δ| is well above tau,
        and are proportional to Δ where |Δ| is well below tau.
      init_v: v at the start, >= 0.
    """
    return _fedopt("fedadagrad", torch.add, server_lr, beta1, tau, init_v)


def _fedopt(name: str, next_v: NextMoment, server_lr: float, beta1: float, tau: float, init_v: float) -> Method:
    """Return the method with the given rule for the second moment, next_v(v, Δ^2)."""

    def init(params: Tensor, layout: Layout) -> State:
        return {"m": torch.zeros_like(params), "v": torch.full_like(params, init_v)}

    def server_update(update: Tensor, state: State, server: ServerView) -> tuple[Tensor, State]:
        if not bool(update.any()):  # not `server.is_active`: with `dp`, who took part must stay hidden
            return update, state
        m = beta1 * state["m"] + (1 - beta1) * update
        v = next_v(state["v"], update * update)
        return server_lr * m / (v.sqrt() + tau), {"m": m, "v": v}

    return Method(name, init=init, server_update=server_update, claims=frozenset({"server-optimizer"}))
