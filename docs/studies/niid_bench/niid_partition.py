"""The Dirichlet partition of NIID-Bench's published table: the authors' own draw.

Li et al. 2022 (arXiv:2102.02079); repository Xtra-Computing/NIID-Bench, utils.py, `noniid-labeldir`. When the table was
published (January 2021), this code called `np.random.seed(2020)` before the draw, so that all runs had one partition. The
call was removed in October 2021; later partitions follow the seed of the run. Each client has as many examples of each
class as in the authors' partition, but other images, since the prepared set and the CIFAR-10 archive order them differently.
"""

from __future__ import annotations

import numpy as np


def dirichlet(labels: np.ndarray, num_clients: int, *, init_seed: int = 2020, beta: float = 0.5) -> list[np.ndarray]:
    """Return the positions of each client's examples, (n_k,) int64 each.

    Args:
      labels: (n,) int, classes from 0.
      num_clients: number of parties; the repository calls it n_parties.
      init_seed: seed of the draw: 2020 in the published table, the seed of the run in later code.
      beta: concentration.
    """
    rng = np.random.RandomState(init_seed)
    parts: list[list[int]] = [[] for _ in range(num_clients)]
    while min(map(len, parts)) < 10:
        parts = [[] for _ in range(num_clients)]
        for label in range(labels.max() + 1):
            rows = np.flatnonzero(labels == label)
            rng.shuffle(rows)
            shares = rng.dirichlet(np.repeat(beta, num_clients))
            # A client that holds an equal share of all examples gets no more.
            shares *= [len(part) < len(labels) / num_clients for part in parts]
            cuts = (np.cumsum(shares / shares.sum()) * len(rows)).astype(int)[:-1]
            parts = [part + own.tolist() for part, own in zip(parts, np.split(rows, cuts), strict=True)]
    return [np.array(part) for part in parts]
