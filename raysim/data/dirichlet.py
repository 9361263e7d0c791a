"""Dirichlet draws of (classes, clients) counts: the examples of each class for each client. Redraws are bounded."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from numpy.random import Generator

from raysim.base.errors import DataError

#: Limit of random numbers in all redraws (about ten seconds), and in one batch of draws. CIFAR-10 over 100 clients at
#: alpha 0.05, at least 10 examples each (FedVG), takes up to 30,000 draws of 1,000 numbers.
MAX_NUMBERS, BATCH_NUMBERS = 10**8, 10**6

#: Limit of redraws for forms that draw one by one, at up to 5 ms a draw.
MAX_SINGLE_DRAWS = 10_000

#: After TRIAL_DRAWS draws, redraws stop if a draw would succeed with a probability below HOPELESS.
TRIAL_DRAWS, HOPELESS = 200, 1e-12

#: (examples per class, number of clients, alpha, generator) -> (classes, clients) int64 counts.
Draw = Callable[[np.ndarray, int, float, Generator], np.ndarray]


def cut(totals: np.ndarray, num_clients: int, alpha: float, rng: Generator) -> np.ndarray:
    """Cut each class into shares ~ Dir(alpha), rounded: the form of FedVG and FLFA."""
    return cut_many(totals, num_clients, alpha, rng, 1)[0]


def cut_many(totals: np.ndarray, num_clients: int, alpha: float, rng: Generator, num_draws: int) -> np.ndarray:
    """Return (draws, classes, clients) int64: the results of repeated calls of `cut`."""
    # Tiny alphas can underflow to 0/0: the last client then gets the class.
    shares = np.nan_to_num(rng.dirichlet(np.full(num_clients, alpha), size=num_draws * len(totals)))
    return whole_counts(shares, np.tile(totals, num_draws)).reshape(num_draws, len(totals), num_clients)


def whole_counts(shares: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Return (rows, n) whole numbers close to shares * totals; each row sums to its total. shares: (rows, n)."""
    cuts = np.floor(np.cumsum(shares, axis=1) * totals[:, None] + 1e-9).astype(np.int64)
    cuts[:, -1] = totals
    return np.diff(cuts, axis=1, prepend=0)


def multinomial(totals: np.ndarray, num_clients: int, alpha: float, rng: Generator) -> np.ndarray:
    """Draw the client of each example from its class's p ~ Dir(alpha): LIVAR's form."""
    return rng.multinomial(totals, np.nan_to_num(rng.dirichlet(np.full(num_clients, alpha), size=len(totals))))


def cut_capped(totals: np.ndarray, num_clients: int, alpha: float, rng: Generator) -> np.ndarray:
    """Cut each class into shares ~ Dir(alpha), class after class, among clients below an equal share of all examples.

    As in the code of MOON and FedUV, the cuts are truncated, so that rounding gives single examples of a class to the
    next client, even to a client above its equal share. At alpha 0.01, a third of the classes of a CIFAR-100 client are
    due to this rounding.
    """
    counts = np.zeros((len(totals), num_clients), np.int64)
    gammas = rng.standard_gamma(alpha, size=(len(totals), num_clients))
    # Normalised as in `np.random.dirichlet`, bit by bit, since truncation depends on the last bit. `rng.dirichlet`
    # would round the tiny shares of a small alpha to 0, although they decide among the clients below their equal share.
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = gammas * (1 / np.cumsum(gammas, axis=1)[:, -1:])
    for row, shares in enumerate(drawn):
        is_open = counts.sum(axis=0) < totals.sum() / num_clients
        # If all shares vanish, the code of MOON and FedUV fails; here the clients below their equal share share evenly.
        shares = shares * is_open if 0 < (shares * is_open).sum() < np.inf else is_open.astype(float)
        cuts = (np.cumsum(shares / shares.sum()) * totals[row]).astype(np.int64)
        cuts[-1] = totals[row]
        counts[row] = np.diff(cuts, prepend=0)
    return counts


def filled(left: np.ndarray, sizes: Sequence[int], alpha: float, rng: Generator) -> np.ndarray:
    """Return (classes, clients) int64: clients of the given sizes draw in turn from the remaining examples.

    Each client draws its examples by p ~ Dir(alpha); where a class is exhausted, it takes examples of the most probable
    remaining classes instead.
    """
    columns = []
    for size in sizes:
        shares = np.nan_to_num(rng.dirichlet(np.full(len(left), alpha)))
        taken = np.minimum(rng.multinomial(size, shares), left)
        for row in np.argsort(-shares, kind="stable"):
            taken[row] += min(size - taken.sum(), left[row] - taken[row])
        columns.append(taken)
        left = left - taken
    return np.stack(columns, axis=1)


def redraw(
    draw: Draw,
    labels: np.ndarray,
    num_clients: int,
    *,
    rng: Generator,
    alpha: float,
    min_samples: int,
    on_drawn: Callable[[int], None] | None = None,
) -> np.ndarray:
    """Return (classes, clients) int64: the first draw in which every client has at least `min_samples` examples.

    `_most_draws` limits the number of draws.

    Args:
      on_drawn: on_drawn(number of the successful draw, from 1).
    Raises:
      DataError: no draw succeeded.
    """
    totals = np.unique(labels, return_counts=True)[1]
    before = pickle.dumps(rng.bit_generator.state)
    limit = _most_draws(draw, num_clients * len(totals))
    counts, tried, after = _first(draw, tuple(totals.tolist()), num_clients, alpha, min_samples, before, limit)
    rng.bit_generator.state = pickle.loads(after)
    least = int(counts.sum(axis=0).min())
    if least < min_samples:
        what = f"no draw of {tried} gave every client {min_samples} examples; the best left one with {least}"
        where = f"partition dirichlet(alpha={alpha}) of {len(labels)} examples over {num_clients} clients"
        raise DataError(what, where, "raise partition.alpha, or lower partition.num_clients or partition.min_samples")
    if on_drawn is not None:
        on_drawn(tried)
    return counts.copy()


def _most_draws(draw: Draw, num_numbers: int) -> int:
    """Return the limit of draws of `num_numbers` random numbers each; it does not depend on the machine's speed."""
    most = MAX_NUMBERS // num_numbers
    return max(1, most if draw is cut else min(most, MAX_SINGLE_DRAWS))


# A sweep repeats the same draw for several validation sets, and in the process of each trial.
@lru_cache(maxsize=128)
def _first(
    draw: Draw, totals: tuple[int, ...], num_clients: int, alpha: float, min_samples: int, state: bytes, limit: int
) -> tuple[np.ndarray, int, bytes]:
    """Return (counts, number of draws made, generator state after them) of the first sufficient draw, or the best draw.

    At most `limit` draws are made, fewer if success is hopeless. Draws are made in batches of doubling length; the
    results are the same as of draws one by one.
    """
    sizes, rng = np.array(totals), np.random.default_rng()
    rng.bit_generator.state = pickle.loads(state)
    most = max(1, BATCH_NUMBERS // (num_clients * len(totals))) if draw is cut else 1

    def draw_many(count: int) -> np.ndarray:
        """Return (count, classes, clients) draws. `cut` draws many at once; other forms draw one, and count is 1."""
        if draw is cut:
            return cut_many(sizes, num_clients, alpha, rng, count)
        return draw(sizes, num_clients, alpha, rng)[None]

    best: tuple[int, np.ndarray] | None = None
    tried, length = 0, 1
    num_short = 0  # clients with too few, over all draws
    while best is None or (tried < limit and not _is_hopeless(num_short, tried, num_clients)):
        before = rng.bit_generator.state
        drawn = draw_many(length)
        client_sizes = drawn.sum(axis=1)
        least = client_sizes.min(axis=1)
        num_short += int((client_sizes < min_samples).sum())
        enough = np.flatnonzero(least >= min_samples)
        if len(enough):
            used = int(enough[0]) + 1
            if used < length:  # leave the generator in the state after single draws
                rng.bit_generator.state = before
                draw_many(used)
            return drawn[used - 1], tried + used, pickle.dumps(rng.bit_generator.state)
        top = int(least.argmax())
        if best is None or least[top] > best[0]:
            best = int(least[top]), drawn[top].copy()
        tried += length
        length = min(2 * length, most, limit - tried)
    return best[1], tried, pickle.dumps(rng.bit_generator.state)


def _is_hopeless(num_short: int, num_draws: int, num_clients: int) -> bool:
    """Return whether the draws so far show that success is hopeless.

    The probability that all clients have enough examples is at most the product of the clients' probabilities, since
    the shares of a whole are negatively associated.
    """
    if num_draws < TRIAL_DRAWS:
        return False
    return bool((1 - num_short / (num_draws * num_clients)) ** num_clients < HOPELESS)
