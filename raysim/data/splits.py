"""Training, validation and test rows: disjoint, from fractions, from the set's own split, or inside each client.

And what becomes of the server's validation set: smaller, imbalanced, noisy, or from another set (FedVG, figures 6 and 7,
appendix E), or biased towards some clients, which FedVG's section 6 warns of.
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
from raysim.data.dirichlet import whole

#: Values of a set's split column.
TRAIN, VALIDATION, TEST = 0, 1, 2


#: (training, validation, test) rows, disjoint.
Split = tuple[np.ndarray, np.ndarray, np.ndarray]


def split(num_examples: int, *, test: float, validation: float, rng: Generator) -> Split:
    """(training, validation, test) rows, disjoint, from one random order; fractions of the whole set, rounded down."""
    order = rng.permutation(num_examples)
    num_test, num_validation = int(num_examples * test), int(num_examples * validation)
    cuts = np.split(order, [num_test, num_test + num_validation])
    return np.sort(cuts[2]), np.sort(cuts[1]), np.sort(cuts[0])


def split_officially(splits: np.ndarray | None, *, validation: float, rng: Generator) -> Split:
    """(training, validation, test) rows as the set's authors split it.

    Args:
      splits: (n,) 0 training, 1 validation, 2 test; None if the set has no such column.
      validation: 0 keeps no validation set (official validation rows then stay unused); otherwise the official
        validation rows, or where there are none this fraction of the official training rows, rounded down.
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
    """(training, validation, test) rows, cut inside each client in random order, client after client.

    The order of FedVG's code: partition everything, then hold out 25 % and 10 % of each client, rounded down.
    """
    cut = [[part[rows] for rows in split(len(part), test=test, validation=validation, rng=rng)] for part in parts]
    training, held_out, tests = map(np.concatenate, zip(*cut, strict=True))
    return training, held_out, tests


def stratified_order(labels: np.ndarray) -> np.ndarray:
    """An order in which every stretch has nearly the class proportions of the whole.

    FedVG's score in train mode depends on the composition of the batches, whose statistics BatchNorm takes: this fixes
    it.
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
      subset: fraction that is kept, stratified.
      client_share, clients: so large a part of the subset, rounded down, has the mix of these clients, see `mixed`; 0: none.
      imbalance: rho of `imbalanced`; None: as it is.
      label_noise: fraction of the rows that get a wrong label.
      order: "stratified", or "client": client after client (with a split inside the clients), and class after class of an
        external set, as in FedVG's code.
      mapping: (class of the set, class of the external set) pairs; empty: no external set.
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
    """Mix of some clients: (n,) cell of each validation row, and (cells,) number of the clients' training rows by
    cell.

    A cell is a class or, in a set with domains, a class of a domain.
    """

    cells: np.ndarray
    counts: np.ndarray


def arrange(
    rows: np.ndarray, labels: np.ndarray, num_classes: int, spec: ValidationSpec, rng: Generator, mix: Mix | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(rows, labels (n,) int64) of the validation set that a spec makes of all validation rows.

    Args:
      mix: of `spec.clients`, if it has a share of clients.
    Raises:
      DataError: nothing is left of a set that had rows, or too few rows of a class for the clients' mix.
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
      part: up to 1: a fraction, rounded down, at least one row; above 1: a number of rows.
    """
    if part == 1.0:
        return np.arange(len(labels))
    order = rng.permutation(len(labels))
    order = order[stratified_order(labels[order])]
    return np.sort(order[: int(part) if part > 1 else max(1, int(len(labels) * part))])


def mixed(labels: np.ndarray, mix: Mix, spec: ValidationSpec, rng: Generator) -> np.ndarray:
    """Positions, rising, of a subset of which a share is distributed as the training rows of some clients.

    Of its n rows (as `subset` counts them) m = floor(client_share * n) have the clients' mix, the other n - m are a
    stratified subset as always. Of what these leave, each cell gives rows in proportion to the clients' training rows there,
    without replacement. All are held-out rows: nobody trains on one, and the clients' own rows are the same whatever the
    share.

    Raises:
      DataError: a cell has fewer held-out rows than the mix asks for, or the clients have no training rows.
    """
    where, named = "data.validation_set.from_clients", f"clients {', '.join(map(str, spec.clients))}"
    if not mix.counts.any():
        raise DataError(f"{named} have no training rows, hence no mix", where, "name others")
    size = max(1, int(len(labels) * spec.subset))
    wanted = whole(mix.counts[None] / mix.counts.sum(), np.array([int(size * spec.client_share)]))[0]
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
    """Positions, rising, of a class-imbalanced half of the rows; all of them without a rho.

    FedVG, eqs. E.8 and E.9: class i gets floor(p_i * N / 2) of N rows, p_i = rho^i / sum_j rho^j, without replacement;
    a class that has fewer gives all it has. Exact: in fractions, not floats.
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
    """Labels of which a fraction (rounded down) is replaced by another class, never the true one."""
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
    """(rows of another set, their labels in this set's classes): the training rows of every mapped class.

    FedVG's code first takes 50 random rows of each mapped class of this set and then all of them, so 50 occur twice;
    `spec.unique=False` does the same.
    Raises:
      DataError: the mapping names a class that a set does not have, or a class of the external set twice.
    """
    where, targets, sources = f"validation set {external.info.name}", *zip(*spec.mapping, strict=True)
    known_classes = ((f"the set's {len(classes)}", targets, classes), ("the external", sources, external.info.classes))
    for owner, named, known in known_classes:
        if missing := sorted(set(named) - set(known)):
            what = f"the mapping names {', '.join(map(repr, missing))}, not among {owner} classes"
            raise DataError(what, where, f"known: {', '.join(list(known)[:100])}")
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
