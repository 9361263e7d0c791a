"""Naive twins of the robust rules: from the papers' equations, on a list of updates, client by client and in float64.

Each takes rows (n, P), the updates of the clients that took a step, and returns (update (P,), weights of these clients on
buffers (n,)).
"""

from __future__ import annotations

import itertools
import math

import numpy as np


def uniform_on(chosen, count):
    return np.array([1 / len(chosen) if client in chosen else 0.0 for client in range(count)])


def mean_of(rows, chosen):
    return sum(rows[client] for client in chosen) / len(chosen)


def coordinate_median(rows):
    return np.array([np.median(column) for column in rows.T]), uniform_on(range(len(rows)), len(rows))


def trimmed_mean(rows, cut):
    columns = [sorted(column)[cut : len(rows) - cut] for column in rows.T.tolist()]
    return np.array([math.fsum(column) / len(column) for column in columns]), uniform_on(range(len(rows)), len(rows))


def krum_score(rows, clients, attackers, client):
    """Krum's score of one of some clients: the squared distances to the nearest others, as many as are surely honest."""
    squares = sorted(float(((rows[client] - rows[other]) ** 2).sum()) for other in clients if other != client)
    return sum(squares[: max(1, len(clients) - attackers - 2)])


def krum_order(rows, clients, attackers):
    """The clients by Krum's score among themselves, lowest first."""
    return sorted(clients, key=lambda client: krum_score(rows, clients, attackers, client))


def krum(rows, attackers, select):
    chosen = krum_order(rows, range(len(rows)), attackers)[:select]
    return mean_of(rows, chosen), uniform_on(chosen, len(rows))


def bulyan(rows, attackers):
    left, chosen = list(range(len(rows))), []
    while len(chosen) < len(rows) - 2 * attackers:
        chosen.append(krum_order(rows, left, attackers)[0])
        left.remove(chosen[-1])
    update = []
    for column in rows[sorted(chosen)].T:
        middle = np.median(column)
        nearest = sorted(column, key=lambda value: abs(value - middle))[: len(chosen) - 2 * attackers]
        update.append(sum(nearest) / len(nearest))
    return np.array(update), uniform_on(range(len(rows)), len(rows))


def geometric_median(rows, sizes, iterations, smoothing):
    alpha = np.array(sizes) / sum(sizes)
    point = sum(a * row for a, row in zip(alpha, rows, strict=True))
    for _ in range(iterations):
        beta = [a / max(smoothing, np.linalg.norm(point - row)) for a, row in zip(alpha, rows, strict=True)]
        point = sum(b * row for b, row in zip(beta, rows, strict=True)) / sum(beta)
    return point, np.array(beta) / sum(beta)


def clipped(vector, length):
    norm = np.linalg.norm(vector)
    return vector * min(1, length / norm) if norm else vector


def centered_clipping(rows, center, tau, iterations):
    for _ in range(iterations):
        center = center + sum(clipped(row - center, tau) for row in rows) / len(rows)
    return center, uniform_on(range(len(rows)), len(rows))


def norm_bounding(rows, sizes, bound):
    bound = np.median([np.linalg.norm(row) for row in rows]) if bound is None else bound
    share = np.array(sizes) / sum(sizes)
    return sum(p * clipped(row, bound) for p, row in zip(share, rows, strict=True)), share


def cosine(x, y):
    return x @ y / (np.linalg.norm(x) * np.linalg.norm(y))


def clustering(rows):
    """Of all ways to part the clients in two, that with the lowest maximum of the cosines across."""
    clients, best = range(len(rows)), (math.inf, ())
    for size in range(1, len(rows)):
        for one in itertools.combinations(clients, size):
            highest = max(cosine(rows[i], rows[j]) for i in one for j in clients if j not in one)
            best = min(best, (highest, one))
    one = best[1]
    chosen = one if 2 * len(one) > len(rows) else [client for client in clients if client not in one]
    return mean_of(rows, chosen), uniform_on(chosen, len(rows))


def clipped_clustering(rows, norms_before):
    """Average linkage: the two clusters with the lowest mean of 1 - cosine are joined until two are left."""
    clusters = [[client] for client in range(len(rows))]

    def distance(pair):
        return np.mean([1 - cosine(rows[i], rows[j]) for i in pair[0] for j in pair[1]])

    while len(clusters) > 2:
        one, two = min(itertools.combinations(clusters, 2), key=distance)
        clusters = [cluster for cluster in clusters if cluster not in (one, two)] + [one + two]
    chosen = max(clusters, key=len)
    bound = np.median([*norms_before, *(np.linalg.norm(row) for row in rows)])
    return sum(clipped(rows[client], bound) for client in chosen) / len(chosen), uniform_on(chosen, len(rows))


def mean_shift(points, bandwidth):
    """Where seeds on a grid come to by steps to the mean of the points within the bandwidth; near ends are one cluster.

    Points that are farther than the bandwidth from every cluster are in none, -1.
    """
    ends, seeds = [], sorted({tuple(np.round(point / bandwidth)) for point in points})
    seeds = [bandwidth * np.array(seed) for seed in seeds] if len(seeds) < len(points) else list(points)
    for point in seeds:
        for _ in range(300):
            near = [other for other in points if np.linalg.norm(other - point) <= bandwidth]
            if not near:
                break
            mean = np.mean(near, axis=0)
            if np.linalg.norm(mean - point) <= 1e-3 * bandwidth:
                break
            point = mean
        if near:
            ends.append(mean)

    def company(end):
        return sum(np.linalg.norm(other - end) <= bandwidth for other in points)

    centers = []
    for end in sorted(ends, key=lambda end: (company(end), tuple(end)), reverse=True):
        if all(np.linalg.norm(end - center) > bandwidth for center in centers):
            centers.append(end)
    distances = [[np.linalg.norm(point - center) for center in centers] for point in points]
    return [int(np.argmin(each)) if min(each) <= bandwidth else -1 for each in distances]


def sign_guard(rows, drawn, lower, upper):
    middle = np.median([np.linalg.norm(row) for row in rows])
    signs = [[np.mean(row[drawn] > 0), np.mean(row[drawn] == 0), np.mean(row[drawn] < 0)] for row in rows]
    largest = np.max(signs, axis=0)
    signs = [np.array(each) / (largest + 1e-8) for each in signs]
    half = max(1, len(rows) // 2)  # neighbours, each point among its own
    distances = [sorted(np.linalg.norm(np.subtract(one, two)) for two in signs) for one in signs]
    labels = mean_shift(np.array(signs), np.mean([each[half - 1] for each in distances]))
    largest = max(set(labels) - {-1}, key=labels.count)
    chosen = [
        client
        for client, row in enumerate(rows)
        if labels[client] == largest and lower <= np.linalg.norm(row) / middle <= upper
    ]
    return sum(clipped(rows[client], middle) for client in chosen) / len(chosen), uniform_on(chosen, len(rows))


def dnc(rows, draws, attackers):
    good = set(range(len(rows)))
    for drawn in draws:
        centered = rows[:, drawn] - rows[:, drawn].mean(axis=0)
        direction = np.linalg.svd(centered)[2][0]
        by_score = sorted(range(len(rows)), key=lambda client: (centered[client] @ direction) ** 2)
        good &= set(by_score[: len(rows) - attackers])
    return mean_of(rows, good), uniform_on(good, len(rows))


def fltrust(rows, reference):
    trust = [max(0.0, cosine(row, reference)) for row in rows]
    length = np.linalg.norm(reference)
    scaled = [t * length / np.linalg.norm(row) * row for t, row in zip(trust, rows, strict=True)]
    return sum(scaled) / sum(trust), np.array(trust) / sum(trust)
