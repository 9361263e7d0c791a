"""Training, validation and test rows: disjoint, from fractions, from the set's own split, or inside each client."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.random import Generator

from raysim.core.errors import DataError

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


def split_within(
    parts: Sequence[np.ndarray], *, test: float, validation: float, rng: Generator
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """(training rows of each client, all validation rows, all test rows), cut inside each client in random order.

    The order of FedVG's code: partition everything, then hold out 25 % and 10 % of each client, rounded down; the
    held-out unions keep the order of the clients.
    """
    triples = [split(len(part), test=test, validation=validation, rng=rng) for part in parts]
    training, validations, tests = (
        [part[triple[i]] for part, triple in zip(parts, triples, strict=True)] for i in range(3)
    )
    return training, np.concatenate(validations), np.concatenate(tests)


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
