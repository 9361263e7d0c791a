"""Training, validation and test rows: disjoint, from fractions, from the set's own split, or inside each client.

Also changes to the server's validation set: smaller, imbalanced, noisy, or from another set (FedVG, figures 6 and 7,
appendix E), or biased towards some clients, a risk named in FedVG's section 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from raysim.base.errors import DataError
from raysim.data.arrow import PreparedSet
from raysim.data.dirichlet import whole_counts

#: Values of a set's split column.
TRAIN, VALIDATION, TEST = 0, 1, 2


#: (training, validation, test) rows, disjoint.
Split = tuple[np.ndarray, np.ndarray, np.ndarray]


def split(num_examples: int, *, test: float, validation: float, rng: Generator) -> Split:
    """Return disjoint (training, validation, test) rows from one random order; sizes are rounded down."""
    order = rng.permutation(num_examples)
    num_test, num_validation = int(num_examples * test), int(num_examples * validation)
    cuts = np.split(order, [num_test, num_test + num_validation])
    return np.sort(cuts[2]), np.sort(cuts[1]), np.sort(cuts[0])


def split_officially(splits: np.ndarray | None, *, validation: float, rng: Generator) -> Split:
    """Return (training, validation, test) rows of the set's official split.

    Args:
      splits: (n,) 0 training, 1 validation, 2 test; None if the set has no such column.
      validation: 0 for no validation set (official validation rows stay unused). Otherwise the official validation rows
        are used; without them, this fraction of the official training rows is held out, rounded down.
    Raises:
      DataError: no split column, or no training row in it.
    """
    if splits is None:
        raise DataError("the set has no official split", "data.split", "set data.split to fraction")
    training, held_out, test = (np.flatnonzero(splits == part) for part in (TRAIN, VALIDATION, TEST))
    if not len(training):
        mend = "set data.split to fraction, or take another set"
        raise DataError("the official split has no training rows", "data.split", mend)
    if not validation:
        return training, held_out[:0], test
    if not len(held_out):
        order = rng.permutation(training)
        count = int(len(training) * validation)
        training, held_out = np.sort(order[count:]), np.sort(order[:count])
    return training, held_out, test


def split_within(parts: Sequence[np.ndarray], *, test: float, validation: float, rng: Generator) -> Split:
    """Return (training, validation, test) rows, split at random inside each client, client after client.

    The order of FedVG's code: partition everything, then hold out 25 % and 10 % of each client, rounded down.
    """
    cut = [[part[rows] for rows in split(len(part), test=test, validation=validation, rng=rng)] for part in parts]
    training, held_out, tests = map(np.concatenate, zip(*cut, strict=True))
    return training, held_out, tests


def stratified_order(labels: np.ndarray) -> np.ndarray:
    """Return an order in which every contiguous part has nearly the class proportions of the whole.

    In train mode, FedVG's score depends on the composition of the batches through BatchNorm; the order fixes the
    composition.
    """
    rank = np.empty(len(labels))
    for cls in np.unique(labels):
        rows = np.flatnonzero(labels == cls)
        rank[rows] = (np.arange(len(rows)) + 0.5) / len(rows)
    return np.lexsort((labels, rank))


#: Copies that FedVG's code adds for each mapped class before it adds all images of the class (tables A.5, A.6).
DUPLICATES = 50


@dataclass(frozen=True)
class ValidationSpec:
    """Changes to the validation rows, in this order: subset (partly with the clients' mix), imbalance, label noise.

    Attributes:
      subset: fraction of rows that is kept, stratified by class.
      client_share, clients: fraction of the subset, rounded down, with the mix of these clients, see `mixed`; 0 for
      none.
      imbalance: rho of `imbalanced`; None for no change.
      label_noise: fraction of the rows that get a wrong label.
      order: "stratified", or "client" for the original order: client after client (with `within_clients`), or class
        after class of an external set, as in FedVG's code.
      mapping: (class of the set, class of the external set) pairs; empty without an external set.
      unique: False adds the duplicates of FedVG's code to an external set.
    """

    subset: float = 1.0
    client_share: float = 0.0
    clients: tuple[int, ...] = ()
    imbalance: float | None = None
    label_noise: float = 0.0
    order: str = "stratified"
    mapping: tuple[tuple[str, str], ...] = ()
    unique: bool = True


class Mix(NamedTuple):
    """Mix of some clients.

    A cell is a class or, in a set with domains, a class within a domain. cells: (n,) cell of each validation row;
    counts: (cells,) number of the clients' training rows in each cell.
    """

    cells: np.ndarray
    counts: np.ndarray


def arrange(
    rows: np.ndarray, labels: np.ndarray, num_classes: int, spec: ValidationSpec, rng: Generator, mix: Mix | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return (rows, labels (n,) int64) of the validation set, after applying a spec to all validation rows.

    Args:
      mix: mix of `spec.clients`, for a spec with a `client_share`.
    Raises:
      DataError: no row is left, or a class has too few rows for the clients' mix.
    """
    if not len(rows):
        return rows, labels
    kept = subset(labels, spec.subset, rng) if mix is None else mixed(labels, mix, spec, rng)
    kept = kept[imbalanced(labels[kept], spec.imbalance, num_classes, rng)]
    rows, labels = rows[kept], labels[kept]
    if not len(rows):
        what = f"no row is left (subset {spec.subset:g}, imbalance {spec.imbalance})"
        mend = "raise data.validation, data.validation_set.subset or data.validation_set.imbalance"
        raise DataError(what, "data.validation_set", mend)
    labels = noisy(labels, spec.label_noise, num_classes, rng)
    order = stratified_order(labels) if spec.order == "stratified" else slice(None)
    return rows[order], labels[order]


def subset(labels: np.ndarray, part: float, rng: Generator) -> np.ndarray:
    """Return sorted positions of a part of the rows, stratified by class.

    Args:
      part: a fraction up to 1 (rounded down, at least one row), or above 1 a number of rows.
    """
    if part == 1.0:
        return np.arange(len(labels))
    order = rng.permutation(len(labels))
    order = order[stratified_order(labels[order])]
    return np.sort(order[: int(part) if part > 1 else max(1, int(len(labels) * part))])


def mixed(labels: np.ndarray, mix: Mix, spec: ValidationSpec, rng: Generator) -> np.ndarray:
    """Return sorted positions of a subset of which a share is distributed as the training rows of some clients.

    The subset has n rows, as in `subset`. n - m rows are stratified by class. The other m = floor(client_share * n)
    rows have the clients' mix: they are drawn without replacement from the remaining rows, from each cell in proportion
    to the clients' training rows in the cell. All rows are held out: no client trains on them, and the clients'
    training rows do not depend on the share.

    Raises:
      DataError: a cell has fewer held-out rows than the mix requires, or the clients have no training rows.
    """
    where, named = "data.validation_set.from_clients", f"clients {', '.join(map(str, spec.clients))}"
    if not mix.counts.any():
        raise DataError(f"{named} have no training rows, hence no mix", where, "name others")
    size = max(1, int(len(labels) * spec.subset))
    wanted = whole_counts(mix.counts[None] / mix.counts.sum(), np.array([int(size * spec.client_share)]))[0]
    order = rng.permutation(len(labels))
    order = order[stratified_order(labels[order])]
    rest, left = np.split(order, [size - wanted.sum()])
    held_out = np.bincount(mix.cells[left], minlength=len(wanted))
    worst = int((wanted - held_out).argmax())
    if wanted[worst] > held_out[worst]:
        what = f"the mix of {named} asks for {wanted[worst]} rows of a class (or of a class of a domain)"
        mend = "lower data.validation_set.subset or from_clients.share, name more clients, or raise data.validation"
        raise DataError(f"{what} of which {held_out[worst]} are held out", where, mend)
    left = rng.permutation(left)
    drawn = [left[mix.cells[left] == cell][:count] for cell, count in enumerate(wanted)]
    return np.sort(np.concatenate([rest, *drawn]))


def imbalanced(labels: np.ndarray, rho: float | None, num_classes: int, rng: Generator) -> np.ndarray:
    """Return sorted positions of a class-imbalanced half of the rows; all positions if rho is None.

    FedVG, eqs. E.8 and E.9: class i gets floor(p_i * N / 2) of N rows, p_i = rho^i / sum_j rho^j, without replacement;
    a class with fewer rows gives all its rows. Computed exactly, in fractions instead of floats.
    """
    if rho is None:
        return np.arange(len(labels))
    weights = [Fraction(repr(rho)) ** i for i in range(num_classes)]
    half, total = Fraction(len(labels), 2), sum(weights)
    chosen = []
    for cls, weight in enumerate(weights):
        chosen.append(rng.permutation(np.flatnonzero(labels == cls))[: int(weight / total * half)])
    return np.sort(np.concatenate(chosen))


def noisy(labels: np.ndarray, fraction: float, num_classes: int, rng: Generator) -> np.ndarray:
    """Return labels of which a fraction (rounded down) is replaced by a random wrong class."""
    count = int(len(labels) * fraction)
    if not count:
        return labels
    if num_classes < 2:
        raise DataError("label noise needs two classes", "data.validation_set.label_noise", "set it to 0")
    chosen = rng.permutation(len(labels))[:count]
    changed = labels.copy()
    changed[chosen] = (labels[chosen] + rng.integers(1, num_classes, count)) % num_classes
    return changed


def external_rows(
    external: PreparedSet, classes: Sequence[str], spec: ValidationSpec, rng: Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return (training rows of the external set in the mapped classes, their labels as indices into `classes`).

    FedVG's code takes, for each mapped class of `classes`, 50 random rows and then all rows, so that 50 rows occur
    twice; `spec.unique=False` also adds 50 rows, after all rows.

    Args:
      classes: class names of the partitioned set.
    Raises:
      DataError: the mapping names a class that a set does not have, or a class of the external set twice.
    """
    where, targets, sources = f"validation set {external.info.name}", *zip(*spec.mapping, strict=True)
    known_classes = ((f"the set's {len(classes)}", targets, classes), ("the external", sources, external.info.classes))
    for owner, named, class_names in known_classes:
        if missing := sorted(set(named) - set(class_names)):
            what = f"the mapping names {', '.join(map(repr, missing))}, not among {owner} classes"
            raise DataError(what, where, f"known: {', '.join(list(class_names)[:100])}")
    if len(set(sources)) < len(sources):
        raise DataError("a class is mapped twice", where, "map each class once")
    relabel = {external.info.classes.index(source): list(classes).index(target) for target, source in spec.mapping}
    labels, splits = external.labels, external.splits
    is_training = np.ones(len(labels), bool) if splits is None else splits == TRAIN
    parts: list[np.ndarray] = []
    for target in dict.fromkeys(relabel.values()):
        same = [source for source, to in relabel.items() if to == target]
        rows = np.flatnonzero(np.isin(labels, same) & is_training)
        parts += [rows, rows[:0] if spec.unique else rng.permutation(rows)[:DUPLICATES]]
    chosen = np.concatenate(parts)
    return chosen, np.array([relabel[label] for label in labels[chosen].tolist()], np.int64)
