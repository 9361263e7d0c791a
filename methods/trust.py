"""Rules about the lengths of updates: a bound that none exceeds, and FLTrust, which takes the server's own as its measure."""

from __future__ import annotations

import torch
from torch import Tensor

from methods.agreement import agreements_of, cosines_of, init_without_personal
from methods.voters import bounding, refuse_low, report_norm, scaled, voting
from raysim.core.method import Method, ServerView
from raysim.core.weights import Weights, normalised


def norm_bounding(*, bound: float | None = None) -> Method:
    """Updates longer than a bound are scaled down to it, then averaged with the weights of the round.

    Sun, Kairouz, Suresh, McMahan 2019 (arXiv:1911.07963), section 4, without their noise:
        w+ = w + sum_k p_k min(1, bound / ||Δ_k||_2) Δ_k
    The norm is over the shared parameters. It multiplies whatever weights it is given, also FedVG's or Krum's, listed before
    it. These then need not sum to one; buffers keep theirs. No client moves the model by more than p_k times the bound.
    Not protected from: attackers that are many, or that stay below the bound for many rounds; buffers.
    Degenerate cases: clients without a step have weight 0; if nobody took one, all stays. How many were scaled down is logged
    (`bounded`).

    Args:
      bound: > 0, in units of the update. None: the median of the norms of the round, which attackers that are fewer than
        half cannot move beyond the others'.
    Raises:
      ValueError: bound <= 0.
    """
    refuse_low("norm_bounding", "leave it out for the median of the norms", bound=1.0 if bound is None else bound)

    def weigh(weights: Weights, server: ServerView) -> Weights:
        if not bool(server.is_active.any()):
            return weights
        norms = server.report["norm"]
        factor = bounding(norms, norms[server.is_active].quantile(0.5) if bound is None else bound)
        server.log("bounded", float((factor < 1).sum()))
        return scaled(weights, factor, server.layout)

    return Method("norm_bounding", report=report_norm, weigh=weigh)


def fltrust() -> Method:
    """The server trains on its validation set as a client does; clients count by their cosine with that update.

    Cao, Fang, Liu, Gong 2021 (NDSS, arXiv:2012.13995), equations 2 to 5, with g_0 the server's update and Δ_k the clients':
        t_k = max(0, cos(Δ_k, g_0)),   w+ = w + sum_k t_k (||g_0|| / ||Δ_k||) Δ_k / sum_j t_j
    Updates are rescaled to the length of g_0, longer or shorter, so lengths count for nothing. On parameters the weights of
    clients are t_k ||g_0|| / ||Δ_k|| / sum t and need not sum to one; on buffers t_k / sum t. The server's learning rate
    is 1 (`fedavgm` with beta 0 has another). `fedvg_cosine` is its trust score alone: there the direction is one gradient
    on the validation set and updates keep their lengths; here it is a whole local training, and lengths are the server's.
    Not protected from: a validation set of another distribution than the clients', which rejects honest ones; attackers
    that turn their updates up to a right angle from g_0.
    Degenerate cases: an update of 0 has no trust; where nobody's cosine is above 0, the model stays as it is. How many
    are trusted is logged (`trusted`).
    Raises:
      ValueError: when the run starts, where leaves are personal.
    """

    def measure(server: ServerView) -> Tensor:
        return agreements_of(server, server.layout.params, server.validation_update())[server.is_active]

    def decide(agreements: Tensor, server: ServerView) -> Tensor:
        trust = cosines_of(agreements).clamp_min(0)
        server.log("trusted", float((trust > 0).sum()))
        return normalised(trust)

    needs, init = frozenset({"validation-set"}), init_without_personal("fltrust", "the server trains the global model")
    return voting("fltrust", measure, decide, scale=_rescaling, needs=needs, init=init)


def _rescaling(agreements: Tensor, server: ServerView) -> Tensor:
    """(n,): ||g_0|| / ||Δ_k||, 0 for an update of 0. agreements: (n, leaves, 3), see `agreements_of`."""
    _, squares, wanted = agreements.sum(dim=1).unbind(dim=1)
    return torch.where(squares > 0, (wanted / squares).sqrt(), 0.0)
