"""Attackers who train after the honest clients and know all honest updates.

These attacks are an upper bound on real attackers, who know their own updates only. mean, std, min and max are taken
over the honest clients of the round, entry by entry, each client once. h clients are honest, c attack, n = h + c. With
Poisson sampling, c is its expected value given h; with dropout, missing clients are included in c. In a round without
an honest client, attackers send the updates that they trained. With one honest client std is 0, and alie, min_max and
min_sum send the honest update. Honest clients without a step are ignored.
"""

from __future__ import annotations

import warnings
from functools import partial
from statistics import NormalDist
from typing import Literal

import torch
from torch import Tensor

from methods.attack import attacked
from methods.robust_means import krum_scores
from methods.voters import gram_of, map_voters, squared_distances
from raysim.core.method import ClientView, Method, Positive, ServerView, Share, Value, Whole

Direction = Literal["std", "unit", "sign"]

#: Fang et al. 2020: largest ratio of an attacker's value to the extreme honest value; lambda at which the search ends.
BEYOND, SMALLEST = 2.0, 1e-5


def alie(*, share: Share = 0.2, from_round: Whole = 0, z: float | None = None) -> Method:
    """Attackers send mean - z std (Baruch et al., NeurIPS 2019, arXiv:1902.06156).

    z is the standard normal quantile of (h - s) / h with s = floor(n/2 + 1) - c, s at least 1 and z at least 0. With
    too few attackers z is 0: attackers send the honest mean, which is not an attack, and a warning is logged. `z` is
    logged.

    Args:
      share: share of all clients that attack, drawn once from the seed, rounded to whole clients.
      from_round: first round with attackers; all clients are honest before.
      z: number of standard deviations from the mean; null: the largest that the paper's formula allows.
    """

    def craft(server: ServerView, attackers: Tensor) -> dict[str, Tensor]:
        factor = largest_z(*_counts(server, attackers)) if z is None else z
        server.log("z", factor)
        if factor <= 0:
            warnings.warn("alie sends the honest mean, since its z is 0 for so few attackers; set z", stacklevel=2)
        mean, std, _, _ = statistics_of(server)
        return {"vector": mean - factor * std}

    return attacked(share, from_round, craft=craft, send=overheard)


def ipm(*, share: Share = 0.2, from_round: Whole = 0, scale: Positive = 1.0) -> Method:
    """Attackers send -scale mean, inner-product manipulation (Xie et al., UAI 2019, arXiv:1903.03936).

    Args:
      share: share of all clients that attack, drawn once from the seed, rounded to whole clients.
      from_round: first round with attackers; all clients are honest before.
      scale: factor of the mean, > 0.
    """

    def craft(server: ServerView, attackers: Tensor) -> dict[str, Tensor]:
        return {"vector": -scale * statistics_of(server)[0]}

    return attacked(share, from_round, craft=craft, send=overheard)


def min_max(*, share: Share = 0.2, from_round: Whole = 0, direction: Direction = "std") -> Method:
    """Attackers send mean + gamma p, as far from any honest update as two honest updates are at most.

    Shejwalkar and Houmansadr (NDSS 2021), with the largest such gamma, the root of a quadratic in place of their search.

    Args:
      share: share of all clients that attack, drawn once from the seed, rounded to whole clients.
      from_round: first round with attackers; all clients are honest before.
      direction: p: the negative standard deviation ("std"), -mean / ||mean|| ("unit"), or -sign(mean) ("sign").
    """
    craft = partial(hidden, direction=direction, bound="max")
    return attacked(share, from_round, craft=craft, send=overheard)


def min_sum(*, share: Share = 0.2, from_round: Whole = 0, direction: Direction = "std") -> Method:
    """Attackers send mean + gamma p; the bound is the sum of an honest update's squared distances to the others.

    Shejwalkar and Houmansadr (NDSS 2021), with the largest such gamma, the root of a quadratic in place of their search. The
    bound is the largest such sum, as in the paper; the authors' notebooks take the smallest.

    Args:
      share: share of all clients that attack, drawn once from the seed, rounded to whole clients.
      from_round: first round with attackers; all clients are honest before.
      direction: p: the negative standard deviation ("std"), -mean / ||mean|| ("unit"), or -sign(mean) ("sign").
    """
    craft = partial(hidden, direction=direction, bound="sum")
    return attacked(share, from_round, craft=craft, send=overheard)


def fang(
    *, share: Share = 0.2, from_round: Whole = 0, against: Literal["trimmed_mean", "krum"] = "trimmed_mean"
) -> Method:
    """Attackers move every entry against s = sign(mean) (Fang et al., USENIX Security 2020, arXiv:1911.11815).

    Against trimmed_mean and the median, entries are uniform: where s > 0, between min and 2 min (min / 2 if min > 0);
    elsewhere, between max and 2 max (max / 2 if max < 0). Against krum, attackers send -lambda s; lambda starts at
    Theorem 1's bound and is halved until Krum chooses the vector. Departures from the paper: min and max are taken of
    updates, not of models; against krum all c attackers send the same vector.

    Args:
      share: share of all clients that attack, drawn once from the seed, rounded to whole clients.
      from_round: first round with attackers; all clients are honest before.
      against: the defence that the attackers expect.
    """

    def craft(server: ServerView, attackers: Tensor) -> dict[str, Tensor]:
        mean, _, low, high = statistics_of(server)
        if against == "krum":
            s = mean.sign()
            return {"vector": -krum_step(gram_of(server, s), _counts(server, attackers)[1]) * s}
        # The extreme value against the honest direction, and the distance from it to 2 times or to half the value.
        vector = torch.where(mean > 0, low, high)
        spread = torch.where((mean > 0) == (vector > 0), 1 / BEYOND - 1, BEYOND - 1) * vector
        return {"vector": vector, "spread": spread}

    return attacked(share, from_round, craft=craft, send=overheard)


def overheard(update: Tensor, client: ClientView) -> Tensor:
    """Return the crafted vector [num_params], plus spread times uniform numbers; without a vector, the own update."""
    vector: Tensor = client.overheard.get("vector", update)
    spread: Tensor | None = client.overheard.get("spread")
    if spread is None:
        return vector
    return vector + spread * torch.rand(len(update), generator=client.generator).to(update.device)


def statistics_of(server: ServerView) -> tuple[Tensor, ...]:
    """(mean, standard deviation, lowest, highest), each [num_params], of the honest updates, without personal leaves."""
    return tuple(map(server.layout.zero_personal_, torch.cat(map_voters(server, _statistics), dim=1)))


def hidden(server: ServerView, attackers: Tensor, *, direction: Direction, bound: str) -> dict[str, Tensor]:
    """The vector of min_max or min_sum."""
    mean, std, _, _ = statistics_of(server)
    p = {"std": -std, "unit": -mean / mean.norm().clamp_min(torch.finfo().tiny), "sign": -mean.sign()}[direction]
    return {"vector": mean + largest_gamma(gram_of(server, mean, p), bound) * p}


def largest_z(num_honest: int, num_attackers: int) -> float:
    """z_max of Baruch et al. 2019; see `alie` for where the formula has no value."""
    supporters = (num_honest + num_attackers) // 2 + 1 - num_attackers
    return NormalDist().inv_cdf(max(0.5, 1 - max(1, supporters) / num_honest))


def largest_gamma(gram: Tensor, bound: str) -> float:
    """The largest gamma >= 0 of min_max or min_sum.

    ||mean + gamma p - u_i||^2 = a_i + 2 b_i gamma + c gamma^2, so the bound is met up to a root.

    Args:
      gram: (h + 2, h + 2) float64, products of the honest updates, their mean and p.
      bound: "max" (min_max) or "sum" (min_sum).
    """
    h = len(gram) - 2
    honest = squared_distances(gram[:h, :h])
    a, b, c = squared_distances(gram)[h, :h], gram[h + 1, h] - gram[h + 1, :h], gram[h + 1, h + 1]
    limit = honest.max()
    if bound == "sum":
        limit, a, b, c = honest.sum(1).max(), a.sum(), b.sum(), h * c
    roots = ((b.square() + c * (limit - a)).clamp_min(0).sqrt() - b) / c
    return float(roots.min().clamp_min(0)) if c > 0 else 0.0


def krum_step(gram: Tensor, num_attackers: int) -> float:
    """Return lambda of Fang et al. 2020: Krum chooses -lambda s, sent by all attackers.

    Args:
      gram: (h + 1, h + 1) float64, products of the honest updates and of s.
    """
    h, size = len(gram) - 1, gram[-1, -1].clamp_min(1)
    nearest = krum_scores(squared_distances(gram[:h, :h]), 0).min() if h > 1 else torch.tensor(0.0)
    # Theorem 1.
    bound = (nearest / (max(1, h - num_attackers - 1) * size)).sqrt() + (gram.diagonal()[:h].max() / size).sqrt()
    step, rows = float(bound), [*range(h), *[h] * num_attackers]
    products, factors = gram[rows][:, rows], torch.ones(len(rows), dtype=gram.dtype)
    while step > SMALLEST:
        factors[h:] = -step
        if krum_scores(squared_distances(products * torch.outer(factors, factors)), num_attackers).argmin() >= h:
            break
        step /= 2
    return step


def _statistics(block: Tensor, extra: Tensor, shared: Value) -> Tensor:
    """(4, width): mean, standard deviation, lowest and highest of some columns."""
    exact = block.double()
    low, high = exact.aminmax(dim=0)
    return torch.stack([exact.mean(0), exact.std(0, correction=0), low, high]).float()


def _counts(server: ServerView, attackers: Tensor) -> tuple[int, int]:
    """Return (honest clients, attackers) of the round; `server` shows the honest clients only."""
    honest, attacking = len(server.clients), len(attackers)
    if server.sampling == "fixed":
        return honest, max(1, server.cohort_size - honest)
    return honest, max(1, round(honest * attacking / (server.population - attacking)))
