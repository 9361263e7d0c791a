"""Partitions by a function of the user's own: split(labels, num_clients, *, options) -> positions of each client.

    def split(labels, num_clients, *, rng, power=1.0):    # labels: (n,) int64; rng: numpy Generator of the partition's seed
        ...
        return parts                                      # num_clients arrays of positions in labels, none in two of them

By name it may also take `domains` ((n,) int64, or None) and every key of the partition group. Positions that nobody has
stay unused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from raysim.core.errors import DataError
from raysim.core.own import place_of
from raysim.core.own_code import own_function, with_given
from raysim.core.settings import Raw
from raysim.data.partition import Parts

#: What such a function gets, and what it may ask for besides.
NEEDED = ("labels", "num_clients")
OFFERED = (
    *("rng", "domains", "alpha", "min_samples", "seed"),
    *("shards_per_client", "labels_per_client", "domains_per_client", "samples_per_client"),
)


def find_scheme(name: str) -> Callable[..., object]:
    """The function behind `module:function`, with its own options as its signature; raises LookupError."""
    return with_given(own_function(name, "partition"), NEEDED, OFFERED)


def own_parts(name: str, labels: np.ndarray, known: Mapping[str, object], options: Raw) -> Parts:
    """The partition that the function draws, checked.

    Raises:
      OwnCodeError: it fails. DataError: what it returns is no partition.
    """
    offered = {key: known[key] for key in OFFERED}
    split = find_scheme(name)
    found = split(labels=labels, num_clients=known["num_clients"], **offered, **options)
    where = f"partition {name}, {place_of(own_function(name, 'partition'))}"
    mend = "return an array of positions in `labels` for each client"
    if not isinstance(found, Sequence | np.ndarray) or len(found) != known["num_clients"]:
        count = f" of {len(found)}" if isinstance(found, Sequence | np.ndarray) else ""
        raise DataError(f"got {type(found).__name__}{count} for {known['num_clients']} clients", where, mend)
    parts = [np.asarray(part, np.int64) if not len(part) else np.asarray(part) for part in found]
    fewest = known["min_samples"]
    for client, part in enumerate(parts):
        if part.ndim != 1 or not np.issubdtype(part.dtype, np.integer):
            raise DataError(f"client {client} got an array of shape {part.shape} and type {part.dtype}", where, mend)
        if len(part) and not 0 <= part.min() <= part.max() < len(labels):
            raise DataError(f"client {client} got a position outside 0..{len(labels) - 1}", where, mend)
        if isinstance(fewest, int) and len(part) < fewest:
            what = f"client {client} has {len(part)} examples, fewer than {fewest}"
            raise DataError(what, where, "lower partition.num_clients or partition.min_samples")
    positions, counts = np.unique(np.concatenate(parts), return_counts=True)
    if (counts > 1).any():
        raise DataError(f"position {positions[counts > 1][0]} goes to two clients", where, "give it to one")
    return [np.sort(part.astype(np.int64)) for part in parts]
