"""Robust filters: weights of updates by norms, clusters, signs, outlying directions or the server's update."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from methods import voters
from methods.agreement import agreements_of, cosines_of
from methods.moments import refuse_personal
from methods.voters import Iterations, bounding, gram_of, report_norm, scaled, voting
from raysim.core.layout import Layout
from raysim.core.method import Count, Fraction, Method, Positive, ServerView, State, Value, require
from raysim.core.weights import Weights


def norm_bounding(*, bound: Positive | None = None) -> Method:
    """Updates longer than a bound are scaled down to it, then averaged with the weights of the round.

    Sun, Kairouz, Suresh, McMahan 2019 (arXiv:1911.07963), their norm thresholding, without noise:
        w+ = w + sum_k p_k min(1, bound / ||Δ_k||_2) Δ_k
    The norm is over the shared parameters. norm_bounding multiplies the given weights, such as FedVG's or Krum's if
    listed before it. The products need not sum to one; buffers keep their weights. No client moves the model by more
    than p_k times the bound.
    Not protected from: attackers that are many, or that stay below the bound for many rounds; buffers.
    Degenerate cases: clients without a step have weight 0; if no client took a step, nothing changes. `bounded` logs
    the number of updates that were scaled down.

    Args:
      bound: b, largest norm of an update, > 0. null: the median of the norms in the round; fewer than half of the
        clients cannot move this bound beyond the norms of the others.
    """

    def weigh(weights: Weights, server: ServerView) -> Weights:
        if not bool(server.is_active.any()):
            return weights
        norms = server.report["norm"]
        factor = bounding(norms, norms[server.is_active].quantile(0.5) if bound is None else bound)
        server.log("bounded", float((factor < 1).sum()))
        return scaled(weights, factor, server.layout)

    return Method("norm_bounding", report=report_norm, weigh=weigh, is_robust=True)


def clustering(*, linkage: Literal["single", "complete", "average"] = "single") -> Method:
    """Two clusters of the clients by the cosines of their updates; the larger one is averaged.

    Sattler, Müller, Wiegand, Samek 2020 (ICASSP, "On the Byzantine robustness of clustered federated learning"): the
    two clusters whose largest cosine between clusters is smallest, which single linkage of the distances 1 - cos(Δ_i,
    Δ_j) finds. The clients of the larger cluster have equal weights on all leaves, buffers included. Of two equal
    clusters, scikit-learn's first cluster is used.
    Not protected from: attackers whose updates have the direction of the honest updates, at any length; half of the
    clients as attackers. A round without attackers is divided, too, and up to half of the clients may be left out.
    Degenerate cases: an update of 0 has cosine 0 with all; clients without a step have no vote; if no client took a
    step, nothing changes.

    Args:
      linkage: distance of two clusters: between their nearest clients ("single", the paper), their farthest clients
        ("complete"), or the mean of all pairs ("average").
    Raises:
      MethodError: in a round, fewer than three clients, since two clients cannot outvote each other.
    """

    def decide(gram: Tensor, server: ServerView) -> Tensor:
        from sklearn.cluster import AgglomerativeClustering

        voters.refuse_fewer(server, 3, "clustering", "drop it")
        sizes = gram.diagonal().sqrt()
        cosines = gram / torch.outer(sizes, sizes).clamp_min(torch.finfo(sizes.dtype).tiny)
        clusters = AgglomerativeClustering(2, metric="precomputed", linkage=linkage)
        return _largest(clusters.fit_predict((1 - cosines).numpy()))

    return voting("clustering", gram_of, decide, fits=voters.fewest(lambda _: 3, "drop it"))


def clipped_clustering() -> Method:
    """`clustering` of updates that are first scaled down to the median of all norms seen so far.

    Li, Ngai, Voigt 2023 (IEEE Transactions on Big Data, "An experimental study of Byzantine-robust aggregation schemes in
    federated learning"). With M the median of the norms of all updates of this round and the rounds before:
        w+ = w + 1/|C| sum_{k in C} min(1, M / ||Δ_k||) Δ_k,   C the larger cluster
    Cosines do not change with lengths, so clusters are those of `clustering` with linkage "average". Buffers are the mean
    of C.
    Not protected from: the attackers that pass `clustering`, except for long updates.
    Degenerate cases: those of `clustering`.
    Raises:
      MethodError: in a round, fewer than three clients.
    """

    def step(update: Tensor, state: State, server: ServerView) -> tuple[Tensor, State]:
        norms = server.report["norm"]
        seen = torch.cat([state["norms"], norms[server.is_active]])
        if not len(seen):
            return update, state
        weights = scaled(server.weights, bounding(norms, seen.quantile(0.5)), server.layout)
        return server.total("update", weights)[: len(update)].float(), {"norms": seen}

    base, init = clustering(linkage="average"), lambda params, layout: {"norms": torch.zeros(0).double()}
    claims, name = base.claims | {"merge"}, "clipped_clustering"
    return replace(base, name=name, init=init, report=report_norm, server_update=step, claims=claims)


def sign_guard(*, lower: Positive = 0.1, upper: Positive = 3.0, share: Fraction = 0.1) -> Method:
    """Leaves out updates of unusual length or with unusual numbers of positive, zero and negative entries.

    SignGuard, Xu, Huang, Song, Lan 2022 (ICDCS, arXiv:2109.05872), algorithm 2. With M the median of the norms:
        S_1 = {k: lower <= ||Δ_k|| / M <= upper};   S_2 = the largest cluster of the clients' shares of positive, zero and
        negative entries among randomly chosen ones, each over the largest client's (MeanShift with seeds on a grid;
        bandwidth: the mean distance to the half of neighbours; some clients may be in no cluster)
        w+ = w + 1/|S| sum_{k in S} min(1, M / ||Δ_k||) Δ_k,   S = S_1 and S_2
    Clients of S have equal weights, on buffers without the factor. The variants that also cluster by similarity are
    left out.
    Not protected from: attackers that keep signs and lengths, and change the sizes of entries; half of the clients as
    attackers.
    Degenerate cases: if S is empty, the model does not change (`chosen` logs the size of S); clients without a step have no
    vote; if no client took a step, nothing changes.

    Args:
      lower: lower bound of the norm over the median norm, in (0, upper]; 0.1 in the paper.
      upper: upper bound of the norm over the median norm; 3 in the paper.
      share: share of the shared parameters whose signs are read, in (0, 1], each drawn independently in every round;
        0.1 in the paper.
    Raises:
      ValueError: lower > upper.
    """
    require("sign_guard: lower", lower, lower <= upper, f"<= upper, {upper}", "the paper has 0.1 and 3")

    def measure(server: ServerView) -> tuple[Tensor, Tensor]:
        counts = torch.stack(voters.map_voters(server, _signs, None, voters.mask_of(server, share)[None])).sum(dim=0)
        norms = server.report["norm"][server.is_active]
        return norms / norms.quantile(0.5).clamp_min(1e-300), counts / counts.sum(dim=1, keepdim=True).clamp_min(1)

    def decide(measured: tuple[Tensor, Tensor], server: ServerView) -> Tensor:
        from sklearn.cluster import MeanShift, estimate_bandwidth

        norms = measured[0]
        signs = (measured[1] / (measured[1].amax(dim=0) + 1e-8)).numpy()
        bandwidth = estimate_bandwidth(signs, quantile=0.5, n_samples=50)
        if bandwidth < 1e-9:  # all alike
            return (norms >= lower) & (norms <= upper)
        labels = MeanShift(bandwidth=bandwidth, bin_seeding=True, cluster_all=False).fit_predict(signs)
        return _largest(labels) & (norms >= lower) & (norms <= upper)

    return voting("sign_guard", measure, decide, lambda measured, _: bounding(measured[0], 1.0), report=report_norm)


def dnc(*, attackers: float = 0.2, iterations: Iterations = 1, coordinates: Count = 10_000) -> Method:
    """Leaves out the updates that stand out most in the direction in which the updates differ most.

    Divide and conquer, Shejwalkar and Houmansadr 2021 (NDSS), algorithm 2, of n clients of whom f attack; `iterations` times:
        x_k: about `coordinates` entries of Δ_k, drawn at random;   v: top right singular vector of the rows x_k - mean x
        good: the n - f clients of the lowest <x_k - mean x, v>^2
    The update is the mean of the clients that are good every time, with equal weights on all leaves, buffers included.
    Scores are computed from the products of all pairs: <x_k - mean x, v> is the k-th entry of the top eigenvector of
    the products, up to a factor. The paper's filtering fraction c is 1; another c corresponds to another f.
    Not protected from: more attackers than are left out; attackers that act along directions in which honest clients
    differ more.
    Degenerate cases: if no client is good every time, the model does not change (`chosen` logs the number of good clients);
    clients without a step have no vote; if no client took a step, nothing changes.

    Args:
      attackers: f: a whole number, or a share below 1 of the clients of a round, rounded up to whole clients.
      iterations: number of times that clients are left out, >= 1.
      coordinates: average number of parameters in the sample, > 0; each parameter is drawn independently. A model with
        fewer parameters is used as a whole.
    Raises:
      ValueError: attackers out of range.
      MethodError: in a round, so few clients that all would be left out.
    """
    count_of = voters.counter("dnc", "attackers", attackers)

    def measure(server: ServerView) -> list[Tensor]:
        return [gram_of(server, share=coordinates / len(server.start)) for _ in range(iterations)]

    def decide(grams: list[Tensor], server: ServerView) -> Tensor:
        num, count = len(grams[0]), count_of(len(grams[0]))
        voters.refuse_fewer(server, count + 1, f"dnc, which leaves out {count},", "lower attackers")
        chosen, centering = torch.ones(num), torch.eye(num, dtype=torch.float64) - 1 / num
        for gram in grams:
            scores = torch.linalg.eigh(centering @ gram @ centering).eigenvectors[:, -1].square()
            chosen[scores.argsort(stable=True)[num - count :]] = 0
        return chosen

    return voting("dnc", measure, decide, fits=voters.fewest(lambda num: count_of(num) + 1, "lower attackers"))


def fltrust() -> Method:
    """Weight clients by the cosine with the server's own update, trained on the validation set.

    Cao, Fang, Liu, Gong 2021 (NDSS, arXiv:2012.13995), equations 2 to 5, with g_0 the server's update and Δ_k the clients':
        t_k = max(0, cos(Δ_k, g_0)),   w+ = w + sum_k t_k (||g_0|| / ||Δ_k||) Δ_k / sum_j t_j
    Updates are rescaled to the length of g_0, longer or shorter, so lengths have no effect. On parameters the weights
    of clients are t_k ||g_0|| / ||Δ_k|| / sum t and need not sum to one; on buffers t_k / sum t. The server's learning
    rate is 1 (`fedavgm` with beta 0 sets another). `fedvg_cosine` uses the trust score alone: its direction is one
    gradient on the validation set, and updates keep their lengths. The direction of fltrust is a whole local training.
    Not protected from: attackers that turn their updates up to a right angle from g_0. If the validation set has another
    distribution than the clients' data, honest clients are rejected.
    Degenerate cases: an update of 0 has no trust; if no client's cosine is above 0, the model does not change. `chosen`
    logs the number of trusted clients.
    Raises:
      ValueError: when the run starts, where leaves are personal.
    """

    def init(params: Tensor, layout: Layout) -> State:
        refuse_personal(layout, "fltrust: the server cannot train the personal {names}; share all layers")
        return {}

    def measure(server: ServerView) -> Tensor:
        return agreements_of(server, server.layout.params, server.validation_update())[server.is_active]

    def decide(agreements: Tensor, server: ServerView) -> Tensor:
        return cosines_of(agreements).clamp_min(0)

    return voting("fltrust", measure, decide, _rescaling, needs=frozenset({"validation-set"}), init=init)


def _rescaling(agreements: Tensor, server: ServerView) -> Tensor:
    """(n,): ||g_0|| / ||Δ_k||, 0 for an update of 0. agreements: (n, leaves, 3), see `agreements_of`."""
    _, squares, wanted = agreements.sum(dim=1).unbind(dim=1)
    return torch.where(squares > 0, (wanted / squares).sqrt(), 0.0)


def _largest(labels: Value) -> Tensor:
    """(n,) bool: members of the largest cluster, of equal ones the first. labels: (n,) int64 array, -1: no cluster."""
    clusters = torch.from_numpy(labels)
    return clusters == clusters[clusters >= 0].bincount(minlength=1).argmax()


def _signs(block: Tensor, extra: Tensor, shared: Value) -> Tensor:
    """(n, 3) float64: numbers of positive, zero and negative entries, among the entries where extra (1, width) is 1."""
    signs = block[:, extra[0] > 0].sign()
    return torch.stack([(signs == sign).sum(dim=1) for sign in (1, 0, -1)], dim=1).double()
