"""Rules that leave suspicious updates out: clusters of them, signs, and the direction in which they differ most."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from methods.voters import (
    bounding,
    counter,
    gram_of,
    map_voters,
    mask_of,
    refuse_fewer,
    refuse_low,
    report_norm,
    scaled,
    voting,
)
from raysim.core.layout import Layout
from raysim.core.method import Method, ServerView, State, Value
from raysim.core.weights import normalised

Linkage = Literal["single", "complete", "average"]


def clustering(*, linkage: Linkage = "single") -> Method:
    """Two clusters of the clients by the cosines of their updates; the larger one is averaged.

    Sattler, Müller, Wiegand, Samek 2020 (ICASSP), section 3: two clusters whose largest cosine across is as small as can
    be, which is what single linkage of the distances 1 - cos(Δ_i, Δ_j) finds. The larger cluster's clients count the same,
    on all leaves, buffers included. Of two equal clusters scikit-learn's first is taken.
    Not protected from: attackers whose updates point where the honest ones do, at any length; attackers of half the clients.
    A round without attackers is divided too, and half of the clients may be left out.
    Degenerate cases: an update of 0 has cosine 0 with all; clients without a step have no vote; if nobody took one, all stays.

    Args:
      linkage: distance of two clusters: of their nearest clients ("single", the paper's), of their farthest ("complete"), or
        the mean of all pairs ("average").
    Raises:
      MethodError: in a round, fewer than three clients, of whom no two could outvote the third.
    """

    def decide(gram: Tensor, server: ServerView) -> Tensor:
        from sklearn.cluster import AgglomerativeClustering

        refuse_fewer(server, 3, "clustering, which takes the larger of two clusters,")
        sizes = gram.diagonal().sqrt()
        cosines = gram / torch.outer(sizes, sizes).clamp_min(torch.finfo(sizes.dtype).tiny)
        clusters = AgglomerativeClustering(2, metric="precomputed", linkage=linkage)
        return _largest(clusters.fit_predict((1 - cosines).numpy())).double()

    return voting("clustering", gram_of, lambda gram, server: normalised(decide(gram, server)))


def clipped_clustering(*, linkage: Linkage = "average") -> Method:
    """`clustering` of updates that are first scaled down to the median of all norms seen so far.

    Li, Ngai, Voigt 2023 (IEEE Transactions on Big Data, "An experimental study of Byzantine-robust aggregation schemes in
    federated learning"). With M the median of the norms of all updates of this round and the rounds before:
        w+ = w + 1/|C| sum_{k in C} min(1, M / ||Δ_k||) Δ_k,   C the larger cluster
    Cosines do not change with lengths, so clusters are those of `clustering`. Buffers are the mean of C.
    Not protected from: what `clustering` is not; lengths alone are bounded.
    Degenerate cases: those of `clustering`.

    Args:
      linkage: as of `clustering`; the authors' code takes "average".
    Raises:
      MethodError: in a round, fewer than three clients.
    """

    def server_update(update: Tensor, state: State, server: ServerView) -> tuple[Tensor, State]:
        norms = server.report["norm"]
        seen = torch.cat([state["norms"], norms[server.is_active]])
        if not len(seen):
            return update, state
        weights = scaled(server.weights, bounding(norms, seen.quantile(0.5)), server.layout)
        return server.total("update", weights)[: len(update)].float(), {"norms": seen}

    def init(params: Tensor, layout: Layout) -> State:
        return {"norms": torch.zeros(0, dtype=torch.float64)}

    return replace(
        clustering(linkage=linkage),
        name="clipped_clustering",
        init=init,
        report=report_norm,
        server_update=server_update,
        claims=frozenset({"weights:*", "merge"}),
    )


def sign_guard(*, lower: float = 0.1, upper: float = 3.0, share: float = 0.1) -> Method:
    """Leaves out updates of unusual length or with unusual numbers of positive, zero and negative entries.

    SignGuard, Xu, Huang, Song, Lan 2022 (ICDCS, arXiv:2109.05872), algorithm 2. With M the median of the norms:
        S_1 = {k: lower <= ||Δ_k|| / M <= upper};   S_2 = the largest cluster of the clients' shares of positive, zero and
        negative entries among randomly chosen ones (MeanShift; bandwidth: the mean distance to the half of neighbours)
        w+ = w + 1/|S| sum_{k in S} min(1, M / ||Δ_k||) Δ_k,   S = S_1 and S_2
    Clients of S count the same; on buffers too, without the factor. The variants that cluster a similarity as well are left out.
    Not protected from: attackers that keep signs and lengths, and move the sizes of entries; attackers of half the clients.
    Degenerate cases: where S is empty the model stays as it is (`chosen` logs its size); clients without a step have no
    vote; if nobody took one, all stays.

    Args:
      lower, upper: bounds of the norm over M, > 0; the paper's 0.1 and 3.
      share: of the shared parameters whose signs are looked at, each drawn by itself anew in every round; the paper's 0.1.
    Raises:
      ValueError: an option out of range.
    """
    refuse_low("sign_guard", "the paper's are 0.1, 3 and 0.1", lower=lower, upper=upper, share=share)

    def measure(server: ServerView) -> tuple[Tensor, Tensor]:
        signs = torch.stack(map_voters(server, _count_signs, None, mask_of(server, share)[None])).sum(dim=0)
        norms = server.report["norm"][server.is_active]
        return norms / norms.quantile(0.5), signs / signs.sum(dim=1, keepdim=True)

    def decide(measured: tuple[Tensor, Tensor], server: ServerView) -> Tensor:
        from sklearn.cluster import MeanShift, estimate_bandwidth

        norms, signs = measured[0], measured[1].numpy()
        labels = MeanShift(bandwidth=max(estimate_bandwidth(signs, quantile=0.5), 1e-9)).fit_predict(signs)
        chosen = _largest(labels) & (norms >= lower) & (norms <= upper)
        server.log("chosen", float(chosen.sum()))
        return normalised(chosen.double())

    return voting(
        "sign_guard", measure, decide, scale=lambda measured, _: bounding(measured[0], 1.0), report=report_norm
    )


def dnc(*, attackers: float = 0.2, iterations: int = 1, coordinates: int = 10_000, filter: float = 1.0) -> Method:
    """Leaves out the updates that stand out most in the direction in which all differ most.

    Divide and conquer, Shejwalkar and Houmansadr 2021 (NDSS), algorithm 2, of n clients of whom f attack; `iterations` times:
        x_k: about `coordinates` entries of Δ_k, drawn at random;   v: top right singular vector of the rows x_k - mean x
        good: the n - filter f clients of the lowest <x_k - mean x, v>^2
    The mean of those that are good every time is the update; they count the same on all leaves, buffers included. The scores
    are those of the products of all pairs: <x_k - mean x, v> is the k-th entry of the top eigenvector, up to a factor.
    Not protected from: more attackers than are left out; attackers in directions in which honest clients differ more.
    Degenerate cases: where nobody is good every time the model stays as it is (`chosen` logs how many are); clients without
    a step have no vote; if nobody took one, all stays.

    Args:
      attackers: f, a whole number, or a share below 1 of the clients of a round, rounded up to whole ones.
      iterations: >= 1.
      coordinates: > 0, how many are drawn on average, each by itself; all, where there are no more.
      filter: > 0, times f is how many are left out in an iteration, rounded down.
    Raises:
      ValueError: an option out of range.
      MethodError: in a round, so few clients that all would be left out.
    """
    count_of = counter("dnc", "attackers", attackers)
    refuse_low("dnc", "1, 10000 and 1 are common", iterations=iterations, coordinates=coordinates, filter=filter)

    def measure(server: ServerView) -> list[Tensor]:
        return [gram_of(server, share=coordinates / len(server.start)) for _ in range(iterations)]

    def decide(grams: list[Tensor], server: ServerView) -> Tensor:
        num = len(grams[0])
        count = int(filter * count_of(num))
        refuse_fewer(server, count + 1, f"dnc, which leaves out {count},", "attackers or filter")
        centering = torch.eye(num, dtype=torch.float64) - 1 / num
        chosen = torch.ones(num, dtype=torch.bool)
        for gram in grams:
            scores = torch.linalg.eigh(centering @ gram @ centering).eigenvectors[:, -1].square()
            chosen[scores.argsort(stable=True)[num - count :]] = False
        server.log("chosen", float(chosen.sum()))
        return normalised(chosen.double())

    return voting("dnc", measure, decide)


def _largest(labels: Value) -> Tensor:
    """(n,) bool: the members of the largest cluster, of equal ones the first. labels: (n,) int64 array."""
    clusters = torch.from_numpy(labels)
    return clusters == clusters.bincount().argmax()


def _count_signs(block: Tensor, extra: Tensor, shared: Value) -> Tensor:
    """(n, 3) float64: how many entries are positive, zero and negative, among those where extra (1, width) is 1."""
    signs = block[:, extra[0] > 0].sign()
    return torch.stack([(signs == sign).sum(dim=1) for sign in (1, 0, -1)], dim=1).double()
