"""Partition schemes: each scheme is a pure function of labels, number of clients, its options and a generator.

Every scheme returns one sorted array of positions per client, gives each position to at most one client (exactly one,
except `nine_plus_one`), and ends in bounded time. A partition that is not possible raises a DataError with a remedy.

A function of the user's own, split(labels, num_clients, *, options) -> positions of each client, can be a scheme:

    def split(labels, num_clients, *, rng, power=1.0):    # labels: (n,) int64; rng: numpy Generator of the partition's seed
        ...
        return parts                                      # num_clients arrays of positions in labels, none in two of them

The function may also take the arguments `domains` ((n,) int64, or None), `targets` ((n, ...) as stored in the set),
`min_samples` and `seed`. All labels are 0 in a set without classes. Positions given to no client stay unused.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.random import Generator

from raysim.base.errors import DataError
from raysim.base.settings import Raw
from raysim.base.user_code import user_function, with_given
from raysim.base.user_places import place_of
from raysim.data.dirichlet import Draw, cut, cut_capped, filled, multinomial, redraw, whole_counts
from raysim.data.rows import cut_at

#: One sorted array of positions per client.
Parts = list[np.ndarray]

#: on_drawn(number of the successful draw, from 1), for schemes that redraw until every client has enough examples.
OnDrawn = Callable[[int], None]


def iid(labels: np.ndarray, num_clients: int, *, rng: Generator) -> Parts:
    """Cut a random order into equal shares, up to one example."""
    least, more = divmod(len(labels), num_clients)
    return _sorted_parts(rng.permutation(len(labels)), np.repeat([least + 1, least], [more, num_clients - more]))


def dirichlet(
    labels: np.ndarray,
    num_clients: int,
    *,
    rng: Generator,
    alpha: float,
    min_samples: int,
    on_drawn: OnDrawn | None = None,
    draw: Draw = cut,
) -> Parts:
    """Divide each class among the clients by p ~ Dir(alpha); redraw until every client has `min_samples` examples.

    The form of most papers since Hsu et al. 2019 (arXiv:1909.06335). `draw` turns p into numbers of examples.
    """
    counts = redraw(draw, labels, num_clients, rng=rng, alpha=alpha, min_samples=min_samples, on_drawn=on_drawn)
    return _deal(labels, counts, rng)


def dirichlet_balanced(labels: np.ndarray, num_clients: int, *, rng: Generator, alpha: float) -> Parts:
    """Return clients of equal size (up to one example), each with a class mix ~ Dir(alpha), filled in turn.

    An exhausted class is replaced by the client's next most probable class, so that the last clients deviate from their
    mix.
    """
    sizes = np.diff(len(labels) * np.arange(num_clients + 1) // num_clients)
    left = np.unique(labels, return_counts=True)[1]
    return _deal(labels, filled(left, sizes.tolist(), alpha, rng), rng)


def shards(labels: np.ndarray, num_clients: int, *, rng: Generator, shards_per_client: int) -> Parts:
    """Sort examples by label, cut them into equal shards, and give each client `shards_per_client` random shards.

    McMahan et al. 2017 (arXiv:1602.05629), section 3, with 2 shards a client: the "pathological" split.
    """
    return _sorted_pieces(labels, num_clients, shards_per_client, "shards", rng)


def quantiles(
    labels: np.ndarray, num_clients: int, *, rng: Generator, targets: np.ndarray, shards_per_client: int
) -> Parts:
    """Partition as in `shards`, sorted by a number instead of a class; a single shard is a quantile of the target.

    More shards per client mix quantiles and weaken the skew.

    Args:
      targets: (n,) or (n, 1) numbers.
    """
    return _sorted_pieces(targets.reshape(-1), num_clients, shards_per_client, "quantiles", rng)


def labels_each(labels: np.ndarray, num_clients: int, *, rng: Generator, labels_per_client: int) -> Parts:
    """Give every client `labels_per_client` classes; each class is cut evenly among its clients.

    Li et al. 2022 (arXiv:2102.02079), section IV-A, "quantity-based label imbalance": client k has class k modulo the
    number of classes, so that each class has a client, and further classes at random.
    """
    classes = np.unique(labels)
    where = f"partition labels of {len(classes)} classes over {num_clients} clients"
    if labels_per_client > len(classes):
        mend = f"set partition.labels_per_client to {len(classes)} or less"
        raise DataError(f"{labels_per_client} classes a client of a set that has {len(classes)}", where, mend)
    if num_clients < len(classes):
        what = f"{num_clients} clients are fewer than the classes, so a class would have no client"
        raise DataError(what, where, f"raise partition.num_clients to {len(classes)} or more")
    has = np.zeros((len(classes), num_clients), np.bool_)
    for client in range(num_clients):
        first = client % len(classes)
        others = rng.permutation(np.delete(np.arange(len(classes)), first))[: labels_per_client - 1]
        has[[first, *others], client] = True
    return _deal_evenly(labels, has, rng)


def quantity(labels: np.ndarray, num_clients: int, *, rng: Generator, alpha: float, min_samples: int) -> Parts:
    """Give every client `min_samples` examples, and further examples in shares ~ Dir(alpha); classes are iid."""
    return _by_sizes(rng.dirichlet(np.full(num_clients, alpha)), len(labels), min_samples, rng)


def quantity_power(labels: np.ndarray, num_clients: int, *, rng: Generator, alpha: float, min_samples: int) -> Parts:
    """Give every client `min_samples` examples, and further examples in shares ~ rank^(-1/alpha); classes are iid.

    Ranks are random; alpha 1 is Zipf's law.
    """
    # Computed in logarithms, since a small alpha would underflow.
    logs = -np.log(np.arange(1, num_clients + 1)) / alpha
    return _by_sizes(rng.permutation(np.exp(logs) / np.exp(logs).sum()), len(labels), min_samples, rng)


def domain(
    labels: np.ndarray, num_clients: int, *, rng: Generator, domains: np.ndarray | None, domains_per_client: int
) -> Parts:
    """Give each client `domains_per_client` domains in turn, each cut evenly among its clients (feature shift).

    With one domain per client and as many clients as domains, client k holds the k-th domain (UniVarFL on PACS and
    HAM10000).
    """
    column = _domain_column(domains, "domain")
    names = np.unique(column)
    slots = np.arange(num_clients * domains_per_client) % len(names)
    if domains_per_client > len(names):
        what = f"{domains_per_client} domains a client of a set that has {len(names)}"
        raise DataError(what, "partition domain", f"set partition.domains_per_client to {len(names)} or less")
    if len(slots) < len(names):
        what = f"{num_clients} clients with {domains_per_client} each cannot hold all {len(names)} domains"
        enough = f"partition.num_clients to {-(-len(names) // domains_per_client)} or partition.domains_per_client"
        raise DataError(what, "partition domain", f"raise {enough}")
    has = np.zeros((len(names), num_clients), np.bool_)
    has[slots, np.arange(len(slots)) // domains_per_client] = True
    return _deal_evenly(column, has, rng)


def natural(labels: np.ndarray, num_clients: int, *, domains: np.ndarray | None) -> Parts:
    """Give client k the rows with the k-th value of the domain column, in ascending order."""
    values = np.unique(_domain_column(domains, "natural"))
    if len(values) != num_clients:
        what = f"{num_clients} clients, but the column has {len(values)} values"
        raise DataError(what, "partition natural", f"set partition.num_clients to {len(values)}")
    return [np.flatnonzero(domains == value) for value in values]


def nine_plus_one(
    labels: np.ndarray, num_clients: int, *, rng: Generator, alpha: float, samples_per_client: int | None
) -> Parts:
    """Return clients of equal size M: client 1 is balanced, the others (nine in the paper) are skewed by Dir(alpha).

    FedVG, figures 8 and A.7 (alpha 0.05). The paper does not give M; the default is the largest possible multiple of
    the number of classes. The balanced client takes its examples first, since the others could leave too few of a
    class. A skewed client draws p ~ Dir(alpha) and takes M of the remaining examples by p; an exhausted class is
    replaced by the next most probable class. Examples that remain at the end stay unused.
    """
    classes, left = np.unique(labels, return_counts=True)
    where = f"partition nine_plus_one of {len(labels)} examples over {num_clients} clients"
    if num_clients < 2:
        raise DataError(f"{num_clients} client", where, "set partition.num_clients to 2 or more; the paper has 10")
    most = min(len(labels) // num_clients // len(classes), int(left.min())) * len(classes)
    size = most if samples_per_client is None else samples_per_client
    if not 0 < size <= most or size % len(classes):
        what = f"{size} examples a client, as many of each of {len(classes)} classes in client 1, are not possible"
        possible = f"set partition.samples_per_client to {most} or a smaller multiple of {len(classes)}"
        raise DataError(what, where, possible if most else "lower partition.num_clients")
    even = size // len(classes)
    skewed = filled(left - even, [size] * (num_clients - 1), alpha, rng)
    return _deal(labels, np.insert(skewed, 1, even, axis=1), rng)


def from_file(labels: np.ndarray, num_clients: int, *, owners: np.ndarray) -> Parts:
    """Partition by a partition file. owners: (n,) client of each position, see `raysim/data/division.py`."""
    return [np.flatnonzero(owners == client) for client in range(num_clients)]


def joint(labels: np.ndarray, num_clients: int) -> Parts:
    """Return a single client with all examples: centralised training, the upper bound for federated runs.

    As for every client, the optimiser is reset in every round.
    """
    assert num_clients == 1
    return [np.arange(len(labels))]


#: scheme -> form -> function; the first form is the default.
SCHEMES: dict[str, dict[str, Callable[..., Parts]]] = {
    "iid": {"": iid},
    "dirichlet": {
        "class": dirichlet,
        "sample": partial(dirichlet, draw=multinomial),
        "balanced": dirichlet_balanced,
        "capped": partial(dirichlet, draw=cut_capped),
    },
    "labels": {"": labels_each},
    "shards": {"": shards},
    "quantiles": {"": quantiles},
    "quantity": {"dirichlet": quantity, "power": quantity_power},
    "domain": {"": domain},
    "natural": {"": natural},
    "nine_plus_one": {"": nine_plus_one},
    "file": {"": from_file},
    "joint": {"": joint},
}


#: Schemes that partition by class, which need one class a row.
BY_CLASS = ("dirichlet", "labels", "shards", "nine_plus_one")


def divide(labels: np.ndarray, scheme: str, form: str, arguments: Mapping[str, Any]) -> Parts:
    """Return the positions of each client by a scheme.

    Args:
      scheme: a key of SCHEMES, or `module:function` of the user's own; form: form of the scheme, empty for the first.
      arguments: name -> value of each possible argument; a scheme gets the arguments that its signature names.
    Raises:
      DataError: a client has fewer than `min_samples` examples, or the partition is not possible.
    """
    check_enough(len(labels), arguments["num_clients"], arguments["min_samples"], scheme)
    if ":" in scheme:
        parts = user_parts(scheme, labels, arguments, json.loads(arguments["options"] or "{}"))
    else:
        function = SCHEMES[scheme][form or next(iter(SCHEMES[scheme]))]
        taken = inspect.signature(function).parameters
        parts = function(labels, **{name: value for name, value in arguments.items() if name in taken})
    check_sizes(np.array([len(part) for part in parts]), arguments["min_samples"], scheme)
    return parts


def _sorted_pieces(column: np.ndarray, num_clients: int, per_client: int, scheme: str, rng: Generator) -> Parts:
    """Sort positions by a column (ties at random), cut equal pieces, and give each client `per_client` at random."""
    num_pieces = num_clients * per_client
    check_enough(len(column), num_clients, per_client, scheme)
    mixed = rng.permutation(len(column))
    pieces = np.array_split(mixed[np.argsort(column[mixed], kind="stable")], num_pieces)
    owned = rng.permutation(num_pieces).reshape(num_clients, per_client)
    return [np.sort(np.concatenate([pieces[i] for i in row])) for row in owned]


def _deal(labels: np.ndarray, counts: np.ndarray, rng: Generator) -> Parts:
    """Give each client counts[row, client] random examples of the row-th class; return positions."""
    parts: list[list[np.ndarray]] = [[] for _ in range(counts.shape[1])]
    for row, cls in enumerate(np.unique(labels)):
        positions = rng.permutation(np.flatnonzero(labels == cls))
        for client, part in enumerate(np.split(positions, np.cumsum(counts[row]))[:-1]):
            parts[client].append(part)
    return [np.sort(np.concatenate(part)) for part in parts]


def _deal_evenly(column: np.ndarray, has: np.ndarray, rng: Generator) -> Parts:
    """Cut the rows of each value of a column evenly among its clients. has: (values, clients), True for its clients."""
    totals = np.unique(column, return_counts=True)[1]
    least, more = np.divmod(totals, has.sum(axis=1))
    return _deal(column, has * (least[:, None] + (has.cumsum(axis=1) <= more[:, None])), rng)


def _by_sizes(shares: np.ndarray, num_examples: int, min_samples: int, rng: Generator) -> Parts:
    free = num_examples - len(shares) * min_samples
    sizes = min_samples + whole_counts(np.nan_to_num(shares)[None], np.array([free]))[0]
    return _sorted_parts(rng.permutation(num_examples), sizes)


def _domain_column(domains: np.ndarray | None, scheme: str) -> np.ndarray:
    if domains is None:
        mend = "choose a set with domains (folders domain/class), or another partition.scheme"
        raise DataError("the set has no domain column", f"partition {scheme}", mend)
    return domains


def check_enough(num_examples: int, num_clients: int, min_samples: int, where: str) -> None:
    """Raise DataError unless there are `min_samples` examples for every client."""
    if num_examples < num_clients * min_samples:
        what = f"{num_examples} training examples cannot give {num_clients} clients {min_samples} each"
        clients, samples = max(1, num_examples // min_samples), max(1, num_examples // num_clients)
        lower = f", or partition.min_samples to {samples}" if samples < min_samples else ""
        raise DataError(what, f"partition {where}", f"lower partition.num_clients to {clients}{lower}")


def check_sizes(sizes: np.ndarray, min_samples: int, scheme: str) -> None:
    """Raise DataError unless every client has `min_samples` examples. sizes: (num_clients,)."""
    if sizes.min() < min_samples:
        what = f"client {sizes.argmin()} has {sizes.min()} examples, fewer than {min_samples}"
        enough = max(1, sizes.min())
        lower = f", or partition.min_samples to {enough}" if enough < min_samples else ""
        raise DataError(what, f"partition {scheme}", f"lower partition.num_clients{lower}")


#: Required and optional arguments of a user's function.
NEEDED = ("labels", "num_clients")
OFFERED = ("rng", "domains", "targets", "min_samples", "seed")


def find_scheme(name: str) -> Callable[..., object]:
    """Return the function of `module:function`, with its options as signature; raises LookupError."""
    return with_given(user_function(name, "partition"), NEEDED, OFFERED)


def user_parts(name: str, labels: np.ndarray, arguments: Mapping[str, Any], options: Raw) -> Parts:
    """Return the partition of a user's function, after checking it.

    Raises:
      UserCodeError: the function fails. DataError: the returned value is not a partition.
    """
    offered = {key: arguments[key] for key in OFFERED}
    partition = find_scheme(name)(labels=labels, num_clients=arguments["num_clients"], **offered, **options)
    where = f"partition {name}, {place_of(user_function(name, 'partition'))}"
    mend = "return an array of positions in `labels` for each client"
    if not isinstance(partition, Sequence | np.ndarray) or len(partition) != arguments["num_clients"]:
        count = f" of {len(partition)}" if isinstance(partition, Sequence | np.ndarray) else ""
        raise DataError(f"got {type(partition).__name__}{count} for {arguments['num_clients']} clients", where, mend)
    parts = [np.asarray(part, np.int64) if not len(part) else np.asarray(part) for part in partition]
    for client, part in enumerate(parts):
        is_whole = part.ndim == 1 and np.issubdtype(part.dtype, np.integer)
        if not is_whole or (len(part) and not 0 <= part.min() <= part.max() < len(labels)):
            got = f"an array of shape {part.shape} and type {part.dtype}, {part!r:.60}"
            raise DataError(f"client {client} got {got}, not positions in 0..{len(labels) - 1}", where, mend)
    positions, counts = np.unique(np.concatenate(parts), return_counts=True)
    if (counts > 1).any():
        raise DataError(f"position {positions[counts > 1][0]} goes to two clients", where, "give it to one")
    return [np.sort(part.astype(np.int64)) for part in parts]


def _sorted_parts(order: np.ndarray, sizes: np.ndarray) -> Parts:
    """Cut an order into parts of the given sizes, each sorted; vectorised over all parts."""
    owners = np.repeat(np.arange(len(sizes)), sizes)
    return cut_at(order[np.lexsort((order, owners))], sizes)
