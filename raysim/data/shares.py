"""How many examples of each class each client gets: draws of (classes, clients) counts, bounded in time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from raysim.core.errors import DataError

#: Most redraws, and most random numbers spent on them: about two seconds. FLFA's table 5 needs up to a few thousand.
MAX_DRAWS, MAX_ENTRIES = 10_000, 10**7

#: (examples per class, number of clients, alpha, generator) -> (classes, clients) int64: how many each client gets.
Draw = Callable[[np.ndarray, int, float, np.random.Generator], np.ndarray]


def cut(totals: np.ndarray, num_clients: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """Each class in shares ~ Dir(alpha), rounded."""
    # Tiny alphas can underflow to 0/0: the last client then gets the class.
    shares = np.nan_to_num(rng.dirichlet(np.full(num_clients, alpha), size=len(totals)))
    return whole(shares, totals)


def whole(shares: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """(rows, n) shares of (rows,) totals in whole numbers that add up."""
    cuts = np.floor(np.cumsum(shares, axis=1) * totals[:, None] + 1e-9).astype(np.int64)
    cuts[:, -1] = totals
    return np.diff(cuts, axis=1, prepend=0)


def multinomial(totals: np.ndarray, num_clients: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """Each example of a class draws its client from the class's p ~ Dir(alpha)."""
    return rng.multinomial(totals, np.nan_to_num(rng.dirichlet(np.full(num_clients, alpha), size=len(totals))))


def cut_capped(totals: np.ndarray, num_clients: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """Each class in shares ~ Dir(alpha), class after class; clients that have their equal share already take no part.

    As in the code of MOON and FedUV: the cuts are truncated as they are, so that rounding leaves single examples of a
    class at the next client, full or not. At alpha 0.01 that is a third of the classes that a client of CIFAR-100 has.
    """
    counts = np.zeros((len(totals), num_clients), np.int64)
    # Gammas, of which only ratios matter: `rng.dirichlet` rounds the tiny shares of a small alpha, which decide among
    # the clients that are left, to 0.
    for row, shares in enumerate(rng.standard_gamma(alpha, size=(len(totals), num_clients))):
        is_open = counts.sum(axis=0) < totals.sum() / num_clients
        shares = shares * is_open if (shares * is_open).sum() > 0 else is_open.astype(float)
        cuts = (np.cumsum(shares / shares.sum()) * totals[row]).astype(np.int64)
        cuts[-1] = totals[row]
        counts[row] = np.diff(cuts, prepend=0)
    return counts


def fill(left: np.ndarray, size: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """(classes,) int64 that sum to `size`: drawn from p ~ Dir(alpha), then the most probable classes with any left."""
    shares = np.nan_to_num(rng.dirichlet(np.full(len(left), alpha)))
    taken = np.minimum(rng.multinomial(size, shares), left)
    for row in np.argsort(-shares, kind="stable"):
        taken[row] += min(size - taken.sum(), left[row] - taken[row])
    return taken


def redraw(
    draw: Draw, labels: np.ndarray, num_clients: int, *, rng: np.random.Generator, alpha: float, min_samples: int
) -> np.ndarray:
    """(classes, clients) int64: the first of a bounded number of draws in which every client has `min_samples`.

    Raises:
      DataError: there is none; names an alpha and a number of clients that a few quick draws show to work.
    """
    check_enough(len(labels), num_clients, min_samples, f"dirichlet(alpha={alpha})")
    totals = np.unique(labels, return_counts=True)[1]
    tries = min(MAX_DRAWS, max(10, MAX_ENTRIES // (num_clients * len(totals))))
    most = 0
    for _ in range(tries):
        counts = draw(totals, num_clients, alpha, rng)
        least = int(counts.sum(axis=0).min())
        if least >= min_samples:
            return counts
        most = max(most, least)
    raise DataError(
        f"no draw of {tries} gave every client {min_samples} examples; the best left one with {most}",
        f"partition dirichlet(alpha={alpha}) of {len(labels)} examples over {num_clients} clients",
        _remedy(draw, totals, num_clients, alpha, min_samples),
    )


def _remedy(draw: Draw, totals: np.ndarray, num_clients: int, alpha: float, min_samples: int) -> str:
    """What a few draws show to work: the next larger round alpha, the largest number of clients."""
    rng = np.random.default_rng(0)

    def works(clients: int, alpha: float) -> bool:
        return any(draw(totals, clients, alpha, rng).sum(axis=0).min() >= min_samples for _ in range(5))

    ladder = [m * 10.0**e for e in range(-3, 3) for m in (1, 2, 5)]
    enough = next((a for a in ladder if a > alpha and works(num_clients, a)), None)
    low, high = 1, num_clients  # works with `low`, not with `high`
    while high - low > max(1, low // 20):
        middle = (low + high) // 2
        low, high = (middle, high) if works(middle, alpha) else (low, middle)
    raised = f"raise partition.alpha to {enough:g}, " if enough is not None else ""
    return f"{raised}lower partition.num_clients to {low}, or lower partition.min_samples"


def check_enough(num_examples: int, num_clients: int, min_samples: int, where: str) -> None:
    """Raise DataError unless there are `min_samples` examples for every client."""
    if num_examples < num_clients * min_samples:
        raise DataError(
            f"{num_examples} training examples cannot give {num_clients} clients {min_samples} each",
            f"partition {where}",
            f"lower partition.num_clients to {max(1, num_examples // min_samples)}, or partition.min_samples to "
            f"{max(1, num_examples // num_clients)}",
        )
