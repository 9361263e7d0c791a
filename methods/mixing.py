"""Mixing before a robust rule: means of a few updates replace the updates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from methods import voters
from raysim.core.method import Count, Method, RunSizes, ServerView, State, Value
from raysim.core.weights import Weights

#: Rules that are functions of the updates alone; other rules also use reports or the server's validation set.
RULES = frozenset(
    [
        "coordinate_median",
        "trimmed_mean",
        "geometric_median",
        "centered_clipping",
        "krum",
        "bulyan",
        "clustering",
        "dnc",
    ]
)


def nnm(*, attackers: float = 0.2) -> Method:
    """Replace each update, before a robust rule, by the mean of its n - f nearest updates (nearest-neighbour mixing).

    Allouah, Farhadkhani, Guerraoui, Gupta, Pinot, Stephan 2023 (AISTATS, arXiv:2302.01772), algorithm 2, with n clients
    of which f attack:
        Y_k = mean of the n - f updates nearest to Δ_k, Δ_k itself among them
    Mixing brings the honest updates together, whatever the skew of the clients' data. After mixing, the rules named
    below have an error of order f / n times the variance of the honest updates, the lowest possible order. Distances
    come from the products of all pairs; among equally near updates, the first clients are taken.
    Rules that may follow: coordinate_median, trimmed_mean, geometric_median, centered_clipping, krum, bulyan,
    clustering and dnc. Every client has one vote.
    Degenerate cases: with attackers 0 the rule sees n copies of the mean of all updates; clients without a step have no
    vote.

    Args:
      attackers: f: a whole number, or a share below 1 of the clients of a round, rounded up to whole clients.
    Raises:
      ValueError: attackers out of range.
      MethodError: a round has no more clients than attackers.
    """
    count_of = voters.counter("nnm", "attackers", attackers)

    def matrix(server: ServerView) -> Tensor:
        # -1: an update is its own nearest, also beside equal updates
        squared = voters.squared_distances(voters.gram_of(server)).fill_diagonal_(-1.0)
        count = count_of(len(squared))
        voters.refuse_fewer(server, count + 1, f"nnm with f = {count}", "lower attackers")
        nearest = squared.argsort(dim=1, stable=True)[:, : len(squared) - count]
        return torch.zeros_like(squared).scatter_(1, nearest, 1.0 / nearest.shape[1])

    return _mixing("nnm", matrix, lambda num: num)


def bucketing(*, size: Count = 2) -> Method:
    """Replace the updates, before a robust rule, by means of a few updates drawn at random without replacement.

    Karimireddy, He, Jaggi 2022 (ICLR, arXiv:2006.09365), algorithm 1, with n clients in a random order pi:
        Y_i = mean of Δ_pi(k) for k in bucket i of s clients,   i = 1, ..., ceil(n / s)
    Means of a few clients with different data differ less than the updates. A bucket with an attacker counts as an
    attacker, so the rule must withstand f attackers among ceil(n / s) vectors. The last bucket may hold fewer clients
    and has the same vote. The rules that may follow are listed in `nnm`.
    Degenerate cases: size 1 only changes the order of the clients; clients without a step have no vote.

    Args:
      size: s, clients of a bucket, >= 1; 2 in the paper's experiments.
    """

    def matrix(server: ServerView) -> Tensor:
        num = int(server.is_active.sum())
        places = torch.randperm(num, generator=server.generator)
        buckets = torch.zeros(-(-num // size), num, dtype=torch.float64)
        buckets[torch.arange(num) // size, places] = 1.0
        return buckets / buckets.sum(dim=1, keepdim=True)

    return _mixing("bucketing", matrix, lambda num: -(-num // size))


def _mixing(name: str, matrix: Callable[[ServerView], Tensor], count: Callable[[int], int]) -> Method:
    """Return a method that mixes the updates before the robust rules listed after it.

    Args:
      matrix: matrix(server) -> (m, n) float64, the m vectors that the rule sees as mixtures of the n voters' updates.
      count: count(n) -> m.
    """

    def wraps(rule: Method) -> Method:
        if rule.name not in RULES:
            return rule

        def weigh(weights: Weights, server: ServerView) -> Weights:
            assert rule.weigh is not None
            if not bool(server.is_active.any()):
                return weights
            mixed, mixture = _mixed(server, matrix(server))
            return _unmixed(rule.weigh(mixed.weights, mixed), mixture)

        def server_update(update: Tensor, state: State, server: ServerView) -> tuple[Tensor, State]:
            assert rule.server_update is not None
            is_nobody = not bool(server.is_active.any())
            return rule.server_update(update, state, server if is_nobody else _mixed(server, matrix(server))[0])

        def fits_mixed(sizes: RunSizes) -> str:
            return rule.fits(sizes._replace(cohort_size=count(sizes.cohort_size))) if rule.fits else ""

        weighs, updates = rule.weigh and weigh, rule.server_update and server_update
        return replace(rule, weigh=weighs, server_update=updates, fits=fits_mixed)

    def fits(sizes: RunSizes) -> str:
        after = sizes.methods[sizes.methods.index(name) + 1 :]
        return "" if RULES & set(after) else f"has no rule to mix for; list one of {', '.join(sorted(RULES))} after it"

    return Method(name, wraps=wraps, fits=fits)


def _mixed(server: ServerView, matrix: Tensor) -> tuple[ServerView, Tensor]:
    """Return (the round with m mixtures as clients, mixtures (m, K) over all clients). matrix: (m, n), over voters."""
    mixture = torch.zeros(len(matrix), len(server.clients), dtype=torch.float64)
    mixture[:, server.is_active] = matrix
    same = torch.ones(len(matrix), dtype=torch.int64)

    def map_columns(function: voters.Rule, shared: Value = None, rows: Tensor | None = None, /) -> list[Value]:
        return server.map_columns(partial(_on_mixtures, function), (mixture, shared), rows)

    view = replace(
        server,
        clients=same.cumsum(0) - 1,
        num_examples=same,
        num_steps=same,
        weights={leaf: same.double() / len(same) for leaf in server.weights},
        total=lambda vector, weights: server.total(vector, _unmixed(weights, mixture)),
        map_columns=map_columns,
    )
    return view, mixture


def _on_mixtures(function: voters.Rule, block: Tensor, extra: Tensor, about: tuple[Tensor, Value]) -> Value:
    mixture, shared = about
    return function((mixture @ block.double()).float(), extra, shared)


def _unmixed(weights: Weights, mixture: Tensor) -> Weights:
    """Return weights (K, ...) of the clients from weights (m, ...) of the mixtures. mixture: (m, K)."""
    return {leaf: torch.tensordot(mixture.T, weight, 1) for leaf, weight in weights.items()}
