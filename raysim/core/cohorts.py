"""Cohorts, drawn from the seed, the round and the population alone."""

from __future__ import annotations

import numpy as np

from raysim.core.method import Sampling
from raysim.core.seeding import derive_seed, numpy_generator


def choose_cohort(
    population: int, size: int, *, seed: int, round_index: int, sampling: Sampling = "fixed"
) -> np.ndarray:
    """Ids of this round's clients, ascending: the same for every method and machine. (size,) int64.

    With "poisson" each client takes part with the chance size / population, independently of the others: the number of
    clients varies and may be 0.
    """
    rng = numpy_generator(derive_seed(seed, "cohort", round_index))
    if sampling == "poisson":  # every set of this size is equally likely, as with a draw for each client
        size = int(rng.binomial(population, size / population))
    return np.sort(rng.choice(population, size=size, replace=False)).astype(np.int64)


def without_dropouts(clients: np.ndarray, dropout: float, *, seed: int, round_index: int) -> np.ndarray:
    """Return the clients of a cohort without dropouts, ascending; at least one.

    Args:
      dropout: probability that a client drops out, in [0, 1); drawn by round and client, whatever the rest of the
        cohort.
    """
    if dropout == 0 or not len(clients):
        return clients
    draws = np.array([numpy_generator(derive_seed(seed, "dropout-out", round_index, int(c))).random() for c in clients])
    stays = draws >= dropout
    return clients[stays] if stays.any() else clients[[int(draws.argmax())]]
