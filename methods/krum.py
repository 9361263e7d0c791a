"""Rules of the distances between clients' updates: Krum, the geometric median, and centered clipping."""

from __future__ import annotations

import torch
from torch import Tensor

from methods import voters
from methods.voters import gram_of, squared_distances
from raysim.core.method import Method, ServerView, State
from raysim.core.weights import normalised


def krum(*, attackers: float = 0.2, select: int = 1) -> Method:
    """The update of the client that lies closest to its n - f - 2 nearest others; or the mean of several such.

    Blanchard, El Mhamdi, Guerraoui, Stainer 2017 (NeurIPS), section 4, of n clients of whom f attack:
        s_k = sum of ||Δ_k - Δ_j||^2 over the n - f - 2 clients j nearest to k;   a_k = 1/m for the m lowest s_k
    m = 1 is Krum, m > 1 Multi-Krum. The paper's condition is n > 2f + 2. Distances come from the products of all pairs,
    in float64. Weights are the same on all leaves, buffers included. Of equal scores the first client's counts.
    Not protected from: attackers that send one update close to the honest ones, and so are near each other. One client of
    many whose data differ stands for few of them.
    Degenerate cases: clients without a step have no vote; if nobody took one, all stays.

    Args:
      attackers: f, a whole number, or a share below 1 of the clients of a round, rounded up to whole ones.
      select: m, how many are averaged.
    Raises:
      ValueError: an option out of range.
      MethodError: in a round, too few clients: n < 2f + 3 or n < f + m.
    """
    count_of = voters.counter("krum", "attackers", attackers)
    voters.refuse_low("krum", "1 is Krum, more is Multi-Krum", select=select)

    def decide(gram: Tensor, server: ServerView) -> Tensor:
        count, options = count_of(len(gram)), "attackers or select"
        voters.refuse_fewer(server, max(2 * count + 3, count + select), f"krum with {count} attackers", options)
        chosen = krum_scores(squared_distances(gram), count).argsort(stable=True)[:select]
        return torch.zeros_like(gram[0]).index_fill(0, chosen, 1 / select)

    return voters.voting("krum", gram_of, decide)


def krum_scores(squared: Tensor, count: int) -> Tensor:
    """(n,): sums of the n - count - 2 lowest of each row without the diagonal, one at least. squared: (n, n)."""
    others = squared.clone().fill_diagonal_(torch.inf).sort(dim=1).values
    return others[:, : max(1, len(squared) - count - 2)].sum(dim=1)


def geometric_median(*, iterations: int = 100, smoothing: float = 1e-6) -> Method:
    """The update is the point with the lowest weighted sum of distances to the clients' updates.

    RFA, Pillutla, Kakade, Harchaoui (IEEE TSP 2022, arXiv:1912.13445), algorithm 2, smoothed Weiszfeld. With alpha_k the
    shares of the examples, from v = sum_k alpha_k Δ_k:
        beta_k = alpha_k / max(nu, ||v - Δ_k||),   v <- sum_k beta_k Δ_k / sum_j beta_j
    The distances of every iteration follow from the products of all pairs, taken once, so that iterations cost nothing.
    What comes out are weights that sum to one. They hold on buffers too, whose distances do not count.
    With a share a < 1/2 of alpha at attackers, wherever they are, the median lies within 2 (1 - a) / (1 - 2a) times the
    honest clients' largest distance from any point (Lopuhaä and Rousseeuw 1991, theorem 2.2).
    Not protected from: attackers of half the weight or more; a drift within that distance. Far outliers take iterations to
    lose their pull.
    Degenerate cases: one client is its own median; clients without a step have weight 0; if nobody took one, all stays.

    Args:
      iterations: >= 1. The paper needs a secure sum for each and stops after a few.
      smoothing: nu > 0, the distance below which clients count alike, in units of the update; the paper's 1e-6.
    Raises:
      ValueError: an option out of range.
    """
    voters.refuse_low("geometric_median", "100 and 1e-6 are common", iterations=iterations, smoothing=smoothing)

    def decide(gram: Tensor, server: ServerView) -> Tensor:
        alpha, squared = server.num_examples[server.is_active].double(), squared_distances(gram)
        share = normalised(alpha)
        for _ in range(iterations):
            share = normalised(alpha / voters.distances_from(squared, share).clamp_min(smoothing))
        return share

    return voters.voting("geometric_median", gram_of, decide)


def centered_clipping(*, tau: float = 10.0, iterations: int = 1) -> Method:
    """The server's last update moves by the mean of the clients' differences from it, each clipped to length tau.

    Karimireddy, He, Jaggi 2021 (ICML, arXiv:2012.10333), algorithm 2, from v = the update of the round before (0 at first):
        v <- v + 1/n sum_k (Δ_k - v) min(1, tau / ||Δ_k - v||),   `iterations` times;   w+ = w + v
    An iteration moves v by tau at most, and one client's part of it is tau / n. The distances of every iteration follow from
    the products of all pairs and the old v. Every client counts the same. The paper's clients send momenta; here they send
    updates.
    Not protected from: attackers that pull the same way in every round, by tau / n each; buffers, which are averaged.
    Degenerate cases: tau above all distances gives the mean of all (`uniform`); clients without a step have no vote; if
    nobody took one, the model stays, and so does v.

    Args:
      tau: > 0, in units of the update; well below the distance of attackers, and not below that of honest clients.
      iterations: >= 1; the paper's experiments do with 1.
    Raises:
      ValueError: an option out of range.
    """
    voters.refuse_low(
        "centered_clipping", "take about the norm of an honest update, and 1", tau=tau, iterations=iterations
    )

    def merged(state: State, server: ServerView) -> tuple[Tensor, State]:
        center = state["center"]
        mixture = clipped_mixture(squared_distances(gram_of(server, center)), tau, iterations)
        names = [leaf.name for leaf in server.layout.params if leaf.is_shared]
        moved = server.total("update", dict.fromkeys(names, voters.of_all(server, mixture[:-1])))[: len(center)]
        center = (moved + mixture[-1] * center).float()
        return center, {"center": center}

    return voters.merging("centered_clipping", merged, init=lambda params, layout: {"center": torch.zeros_like(params)})


def clipped_mixture(squared: Tensor, tau: float, iterations: int) -> Tensor:
    """(n + 1,) float64 that sum to one: shares of n updates and of the old center, the last, in the new one.

    Args:
      squared: (n + 1, n + 1), squared distances of all pairs of these.
    """
    mixture = torch.zeros_like(squared[0]).index_fill(0, torch.tensor([len(squared) - 1]), 1.0)
    for _ in range(iterations):
        factor = voters.bounding(voters.distances_from(squared, mixture)[:-1], tau) / (len(squared) - 1)
        mixture = torch.cat([factor, torch.zeros_like(factor[:1])]) + mixture * (1 - factor.sum())
    return mixture
