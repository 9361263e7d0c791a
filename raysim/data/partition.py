"""From labels to clients: pure functions of (labels, number of clients, parameters, seed)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from raysim.core.errors import DataError

MAX_DRAWS = 1000


def iid(
    labels: np.ndarray, num_clients: int, *, rng: np.random.Generator, alpha: float, min_samples: int
) -> list[np.ndarray]:
    """Equal shares of a random order. Returns one array of positions per client."""
    if len(labels) < num_clients * min_samples:
        raise _too_few(len(labels), num_clients, min_samples, "iid")
    return [np.sort(part) for part in np.array_split(rng.permutation(len(labels)), num_clients)]


def dirichlet(
    labels: np.ndarray, num_clients: int, *, rng: np.random.Generator, alpha: float, min_samples: int
) -> list[np.ndarray]:
    """Each class is dealt to the clients with proportions ~ Dir(alpha); redrawn until every client has `min_samples`.

    The form of FedVG (and of most papers since Hsu et al. 2019): per class over clients. At most 1,000 draws, then an
    error that says what would work.
    """
    if len(labels) < num_clients * min_samples:
        raise _too_few(len(labels), num_clients, min_samples, f"dirichlet(alpha={alpha})")
    classes, counts = np.unique(labels, return_counts=True)
    smallest = 0
    for _ in range(MAX_DRAWS):
        shares = rng.dirichlet(np.full(num_clients, alpha), size=len(classes))
        shares = np.nan_to_num(shares)  # tiny alphas can underflow to 0/0: then nobody gets the class, and we redraw
        cuts = np.floor(np.cumsum(shares, axis=1) * counts[:, None] + 1e-9).astype(np.int64)
        cuts[:, -1] = counts
        sizes = np.diff(cuts, axis=1, prepend=0).sum(axis=0)
        smallest = max(smallest, int(sizes.min()))
        if sizes.min() >= min_samples:
            break
    else:
        raise DataError(
            f"no draw of {MAX_DRAWS} gave every client {min_samples} examples; the best left one with {smallest}",
            f"dirichlet(alpha={alpha}) of {len(labels)} examples over {num_clients} clients",
            "raise partition.alpha, or lower partition.num_clients or partition.min_samples",
        )
    parts: list[list[np.ndarray]] = [[] for _ in range(num_clients)]
    for row, cls in enumerate(classes):
        positions = rng.permutation(np.flatnonzero(labels == cls))
        for client, part in enumerate(np.split(positions, cuts[row, :-1])):
            parts[client].append(part)
    return [np.sort(np.concatenate(part)) for part in parts]


SCHEMES: dict[str, Callable[..., list[np.ndarray]]] = {"iid": iid, "dirichlet": dirichlet}


def split(
    num_examples: int, *, test: float, validation: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(training, validation, test) rows, disjoint, from one random order; fractions of the whole set, rounded down."""
    order = rng.permutation(num_examples)
    num_test, num_validation = int(num_examples * test), int(num_examples * validation)
    cuts = np.split(order, [num_test, num_test + num_validation])
    return np.sort(cuts[2]), np.sort(cuts[1]), np.sort(cuts[0])


def stratified_order(labels: np.ndarray) -> np.ndarray:
    """An order in which every stretch has nearly the class proportions of the whole.

    FedVG's score in train mode depends on the composition of the batches (sheet 1.6, no. 2): this fixes it.
    """
    rank = np.empty(len(labels))
    for cls in np.unique(labels):
        mine = np.flatnonzero(labels == cls)
        rank[mine] = (np.arange(len(mine)) + 0.5) / len(mine)
    return np.lexsort((labels, rank))


def _too_few(num_examples: int, num_clients: int, min_samples: int, where: str) -> DataError:
    return DataError(
        f"{num_examples} training examples cannot give {num_clients} clients {min_samples} each",
        where,
        "lower partition.num_clients or partition.min_samples",
    )
