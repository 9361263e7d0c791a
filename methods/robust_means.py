"""Robust means: the median and the trimmed mean of each coordinate, the geometric median, centered clipping, Krum, Bulyan."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from methods import voters
from methods.moments import one_thread
from methods.voters import Iterations, gram_of, merging_columns, squared_distances
from raysim.core.method import Count, Method, Positive, ServerView, State, Value
from raysim.core.weights import normalised


def coordinate_median() -> Method:
    """The update is the median of the clients' updates, coordinate by coordinate.

    Yin, Chen, Ramchandran, Bartlett 2018 (ICML, arXiv:1803.01498), definition 1 and algorithm 1, option I. With an even
    number of clients it is the mean of the middle two. If fewer than half of the clients attack, every coordinate stays
    in the range of the honest values. Every client has the same weight, whatever its number of examples.
    Not protected from: attackers whose values stay in this range, which is wide if clients' data differ; buffers, which are
    averaged. The median of skewed values differs from their mean, also without an attacker.
    Degenerate cases: clients without a step have no vote; if no client took a step, nothing changes.
    """
    return merging_columns("coordinate_median", _medians)


def trimmed_mean(*, trim: float = 0.1) -> Method:
    """The update is the mean of the clients' updates, coordinate by coordinate, without the largest and smallest values.

    Yin, Chen, Ramchandran, Bartlett 2018 (ICML, arXiv:1803.01498), definition 2 and algorithm 1, option II. As long as
    no more clients attack than are cut off at one end, every coordinate stays in the range of the honest values. Every
    client has the same weight, whatever its number of examples.
    Not protected from: attackers whose values stay in this range; more attackers than are cut off at one end; buffers,
    which are averaged.
    Degenerate cases: trim 0 is the mean of all (`uniform`); clients without a step have no vote; if no client took a step,
    nothing changes.

    Args:
      trim: clients cut off at each end: a share below 0.5, rounded up to whole clients, or a whole number.
    Raises:
      ValueError: trim out of range.
      MethodError: in a round, so few clients that no client is left.
    """
    count_of = voters.counter("trimmed_mean", "trim", trim, below=0.5)

    def cut(server: ServerView) -> int:
        count = count_of(int(server.is_active.sum()))
        voters.refuse_fewer(server, 2 * count + 1, f"trimmed_mean, which cuts off {count} at each end,", "lower trim")
        return count

    fits = voters.fewest(lambda num: 2 * count_of(num) + 1, "lower trim")
    return merging_columns("trimmed_mean", _trimmed_means, cut, fits=fits)


def geometric_median(*, iterations: Iterations = 100, smoothing: Positive = 1e-6) -> Method:
    """The update is the point with the lowest weighted sum of distances to the clients' updates.

    RFA, Pillutla, Kakade, Harchaoui (IEEE TSP 2022, arXiv:1912.13445), algorithm 2, smoothed Weiszfeld. With alpha_k the
    shares of the examples, from v = sum_k alpha_k Δ_k:
        beta_k = alpha_k / max(nu, ||v - Δ_k||),   v <- sum_k beta_k Δ_k / sum_j beta_j
    The distances of every iteration follow from the products of all pairs, computed once, so iterations cost next to
    nothing. The result is a set of weights that sum to one. The weights apply to buffers as well; buffers have no
    effect on distances. If attackers hold a share a < 1/2 of alpha, the median lies within 2 (1 - a) / (1 - 2a) times
    the honest clients' largest distance from any point (Lopuhaä and Rousseeuw 1991, theorem 2.2).
    Not protected from: attackers with half of the weight or more; a drift within this bound. The pull of far outliers
    vanishes only after some iterations.
    Degenerate cases: one client is its own median; clients without a step have weight 0; if no client took a step, nothing
    changes.

    Args:
      iterations: number of Weiszfeld steps, >= 1. The paper needs a secure sum for each step, and stops after a few
        steps.
      smoothing: nu > 0, the lower bound of the distance by which a client's weight is divided: shorter distances count as
        nu; in units of the update; 1e-6 in the paper.
    """

    def decide(gram: Tensor, server: ServerView) -> Tensor:
        alpha = share = normalised(server.num_examples[server.is_active].double())
        for _ in range(iterations):
            share = normalised(alpha / voters.distances_from(gram, share).clamp_min(smoothing))
        return share

    return voters.voting("geometric_median", gram_of, decide)


def centered_clipping(*, tau: Positive = 10.0, iterations: Iterations = 1) -> Method:
    """The server's last update moves by the mean of the clients' differences from it, each clipped to length tau.

    Karimireddy, He, Jaggi 2021 (ICML, arXiv:2012.10333), centered clipping, from v = the update of the round before (0 at first):
        v <- v + 1/n sum_k (Δ_k - v) min(1, tau / ||Δ_k - v||),   `iterations` times;   w+ = w + v
    An iteration moves v by at most tau, and one client moves v by at most tau / n. The distances of every iteration
    follow from the products of all pairs and the old v. All clients have equal weights. In the paper clients send
    momenta; in raysim clients send updates.
    Not protected from: attackers that pull in the same direction in every round, by tau / n each; buffers, which are
    averaged.
    `clipped` logs the number of updates that were clipped in the last iteration.
    Degenerate cases: tau above all distances gives the mean of all (`uniform`); clients without a step have no vote; if
    no client took a step, the model and v do not change.

    Args:
      tau: clipping length, > 0, in units of the update. Choose tau well below the distance of attackers from v, and not
        below the distance of honest clients.
      iterations: number of repetitions of the rule, >= 1; 1 in the paper's experiments.
    """

    def merged(state: State, server: ServerView) -> tuple[Tensor, State]:
        gram = gram_of(server, state["center"])
        mixture = torch.eye(len(gram), dtype=torch.float64)[-1]  # of the updates and the center, which is the last
        with one_thread():
            for _ in range(iterations):
                lengths = voters.bounding(voters.distances_from(gram, mixture)[:-1], tau)
                factor = lengths / (len(gram) - 1)
                mixture = torch.cat([factor, factor.new_zeros(1)]) + mixture * (1 - factor.sum())
        server.log("clipped", float((lengths < 1).sum()))
        moved = server.total("update", dict.fromkeys(server.weights, voters.of_all(server, mixture[:-1])))
        center = (moved[: len(server.start)] + mixture[-1] * state["center"]).float()
        return center, {"center": center}

    return voters.merging("centered_clipping", merged, init=lambda params, layout: {"center": torch.zeros_like(params)})


def krum(*, attackers: float = 0.2, select: Count = 1) -> Method:
    """Return the update closest to its n - f - 2 nearest neighbours, or the mean of several.

    Blanchard, El Mhamdi, Guerraoui, Stainer 2017 (NeurIPS), section 4, of n clients of whom f attack:
        s_k = sum of ||Δ_k - Δ_j||^2 over the n - f - 2 clients j nearest to k;   a_k = 1/m for the m lowest s_k
    m = 1 is Krum, m > 1 Multi-Krum. The paper's condition is n > 2f + 2. Distances come from the products of all pairs,
    in float64. Weights are the same on all leaves, buffers included. Of equal scores, the first client's is used.
    Not protected from: attackers that all send the same update close to the honest updates, and so are near each other. If
    clients' data differ, a single client represents few others.
    Degenerate cases: clients without a step have no vote; if no client took a step, nothing changes.

    Args:
      attackers: f: a whole number, or a share below 1 of the clients of a round, rounded up to whole clients.
      select: m, number of clients that are averaged.
    Raises:
      ValueError: attackers out of range.
      MethodError: in a round, too few clients: n < 2f + 3 or n < f + m.
    """
    count_of = voters.counter("krum", "attackers", attackers)
    mend = "lower attackers or select"

    def least(num: int) -> int:
        return max(2 * count_of(num) + 3, count_of(num) + select)

    def decide(gram: Tensor, server: ServerView) -> Tensor:
        count = count_of(len(gram))
        voters.refuse_fewer(server, least(len(gram)), f"krum with f = {count}", mend)
        chosen = krum_scores(squared_distances(gram), count).argsort(stable=True)[:select]
        return torch.zeros_like(gram[0]).index_fill(0, chosen, 1.0)

    return voters.voting("krum", gram_of, decide, fits=voters.fewest(least, mend))


def bulyan(*, attackers: float = 0.1) -> Method:
    """Choose n - 2f clients by repeated Krum; return the mean of the values nearest to the median, by coordinate.

    El Mhamdi, Guerraoui, Rouault 2018 (ICML, arXiv:1802.07927), section 4, with f of n clients attacking:
        theta = n - 2f times: the client with Krum's lowest score among the remaining clients joins the selection;
        each coordinate: the mean of the theta - 2f values of the selection that are nearest to the selection's median;
        of values equally near, the values of the first clients.
    The condition is n >= 4f + 3. Krum sums over the nearest m - f - 2 of the m remaining clients, at least one. All
    clients have equal weights.
    Not protected from: small shifts of every coordinate within the spread of the honest values; buffers, which are averaged.
    Degenerate cases: attackers 0 is the mean of all; clients without a step have no vote; if no client took a step,
    nothing changes.

    Args:
      attackers: f: a whole number, or a share below 1 of the clients of a round, rounded up to whole clients.
    Raises:
      ValueError: attackers out of range.
      MethodError: in a round, n < 4f + 3.
    """
    count_of = voters.counter("bulyan", "attackers", attackers)

    def prepare(server: ServerView) -> tuple[Tensor, int]:
        squared = squared_distances(gram_of(server))
        count, left = count_of(num := len(squared)), [*range(num)]
        voters.refuse_fewer(server, 4 * count + 3, f"bulyan with f = {count}", "lower attackers")
        chosen = [left.pop(int(krum_scores(squared[left][:, left], count).argmin())) for _ in range(num - 2 * count)]
        return torch.tensor(sorted(chosen)), len(chosen) - 2 * count

    fits = voters.fewest(lambda num: 4 * count_of(num) + 3, "lower attackers")
    return merging_columns("bulyan", _means_near_medians, prepare, fits=fits)


def krum_scores(squared: Tensor, count: int) -> Tensor:
    """(n,): sums of the n - count - 2 lowest of each row without the diagonal, one at least. squared: (n, n)."""
    nearest = slice(max(1, len(squared) - count - 2))
    return squared.clone().fill_diagonal_(torch.inf).sort(dim=1).values[:, nearest].sum(dim=1)


def _ordered(block: Tensor) -> Tensor:
    """The columns of (n, width) sorted, by NumPy, which takes a tenth of PyTorch's time."""
    return torch.from_numpy(np.sort(block.numpy(), axis=0))


def _medians(block: Tensor, extra: Tensor, shared: Value) -> Tensor:
    """(width,): median of each column of (n, width), of an even n the mean of the middle two."""
    ordered, last = _ordered(block), len(block) - 1
    return ordered[[last // 2, (last + 1) // 2]].double().mean(dim=0).float()  # in float32 the sum may overflow


def _trimmed_means(block: Tensor, extra: Tensor, count: int) -> Tensor:
    return _ordered(block)[count : len(block) - count].double().mean(dim=0).float()


def _means_near_medians(block: Tensor, extra: Tensor, prepared: tuple[Tensor, int]) -> Tensor:
    chosen, count = block[prepared[0]], prepared[1]
    distances = (chosen - _medians(chosen, extra, None)).abs()
    nearest = torch.from_numpy(np.argsort(distances.numpy(), axis=0, kind="stable")[:count])
    return chosen.gather(0, nearest).double().mean(dim=0).float()
