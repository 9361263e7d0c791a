"""NIID-Bench's own draw of its Dirichlet partition: the clients that its published runs had.

Li et al. 2022 (arXiv:2102.02079); repository Xtra-Computing/NIID-Bench, utils.py, `noniid-labeldir`, after
`np.random.seed(init_seed)`. Rows of a class are numbered in the order of the prepared set, theirs in the order of the
CIFAR-10 archive: each client has as many rows of each class as theirs, and other rows.
"""

from __future__ import annotations

import numpy as np


def dirichlet(labels: np.ndarray, num_clients: int, *, init_seed: int = 0, beta: float = 0.5) -> list[np.ndarray]:
    """Return the positions of each client's examples.

    Args:
      labels: [num_examples], classes from 0.
      num_clients: number of parties; the repository calls it n_parties.
      init_seed: the seed of the repository's run; its published table has 0, 1 and 2.
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
