"""Naive twins of the attacks, from their papers: loops over clients and entries, searches instead of roots."""

from __future__ import annotations

import numpy as np
from scipy.stats import norm

from tests.twins.robust import krum_order, krum_score


def alie(honest, num_attackers, z=None):
    """Baruch et al. 2019: s supporters are needed for a majority; the z with the quantile (n - m - s) / (n - m)."""
    n, m = len(honest) + num_attackers, num_attackers
    s = np.floor(n / 2 + 1) - m
    z = norm.ppf((n - m - s) / (n - m)) if z is None else z
    sent = np.zeros_like(honest[0])
    for j in range(len(sent)):
        column = [update[j] for update in honest]
        sent[j] = np.mean(column) - z * np.std(column)
    return sent


def ipm(honest, scale):
    """Xie et al. 2019: minus epsilon times the mean of the honest updates."""
    return -scale / len(honest) * np.sum(honest, axis=0)


def perturbation(honest, direction):
    """The three directions of Shejwalkar and Houmansadr 2021."""
    mean = np.mean(honest, axis=0)
    return {"std": -np.std(honest, axis=0), "unit": -mean / np.linalg.norm(mean), "sign": -np.sign(mean)}[direction]


def is_hidden(sent, honest, kind, bound=max):
    """Whether what is sent is as near to the honest updates as these are to each other."""
    squared = [[float(np.sum((one - other) ** 2)) for other in honest] for one in honest]
    away = [float(np.sum((sent - one) ** 2)) for one in honest]
    if kind == "min_max":
        return max(away) <= max(max(row) for row in squared)
    return sum(away) <= bound(sum(row) for row in squared)


def largest_hidden(honest, kind, direction, bound=max, first=50.0, precision=1e-10):
    """(vector, gamma): their halving search for the largest gamma with which the vector is hidden."""
    mean, p = np.mean(honest, axis=0), perturbation(honest, direction)
    gamma, step, best = first, first, 0.0
    while step > precision * first:
        step /= 2
        if is_hidden(mean + gamma * p, honest, kind, bound):
            best, gamma = gamma, gamma + step
        else:
            gamma -= step
    return mean + best * p, best


def krum(updates, num_attackers):
    """The place of the update that Krum chooses."""
    return krum_order(updates, range(len(updates)), num_attackers)[0]


def against_krum(honest, num_attackers):
    """(vector, lambda) of Fang et al. 2020: from the bound of their Theorem 1 down by halves, until Krum chooses it."""
    s = np.sign(np.mean(honest, axis=0))
    n, c, d = len(honest) + num_attackers, num_attackers, np.sum(np.abs(s))
    everybody = range(len(honest))
    nearest = [krum_score(honest, everybody, 0, client) for client in everybody]
    step = np.sqrt(min(nearest) / ((n - 2 * c - 1) * d)) + max(np.linalg.norm(one) for one in honest) / np.sqrt(d)
    while step > 1e-5:
        if krum([*[-step * s] * c, *honest], c) < c:
            break
        step /= 2
    return -step * s, step


def beyond(honest, factor=2.0):
    """(lowest, highest) value of each entry that attackers of the trimmed mean draw from, Fang et al. 2020."""
    ends = []
    for j in range(len(honest[0])):
        column = [update[j] for update in honest]
        low, high = min(column), max(column)
        if np.mean(column) > 0:
            ends.append((low / factor, low) if low > 0 else (factor * low, low))
        else:
            ends.append((high, factor * high) if high > 0 else (high, high / factor))
    return np.array(ends).T
