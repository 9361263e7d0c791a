"""A partition in numbers: how many examples each client has and how mixed their labels are."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

import numpy as np

from raysim.core.texts import cells


def label_entropy(class_counts: np.ndarray) -> np.ndarray:
    """(num_clients,) bits: 0 for one class, log2(classes) for all alike. class_counts: (num_clients, classes)."""
    shares = class_counts / np.maximum(1, class_counts.sum(axis=1, keepdims=True))
    logs = np.log2(shares, out=np.zeros_like(shares), where=shares > 0)
    return np.abs((shares * logs).sum(axis=1))


def partition_table(
    class_counts: np.ndarray, classes: Sequence[str] = (), validation_counts: np.ndarray | None = None
) -> str:
    """A CSV row per client: examples, classes present, label entropy in bits, the largest class and its share.

    Args:
      classes: names, for a column of examples of each; none, if empty.
      validation_counts: (classes,) of the server's validation set, whose row is the last, `validation`.
    """
    rows: dict[int | str, np.ndarray] = dict(enumerate(class_counts))
    if validation_counts is not None and validation_counts.sum():
        rows["validation"] = validation_counts
    counts = np.stack(list(rows.values()))
    sizes, largest = counts.sum(axis=1), counts.argmax(axis=1)
    shares = counts.max(axis=1) / np.maximum(1, sizes)
    columns = [
        ("client", list(rows)),
        ("examples", sizes),
        ("classes", np.count_nonzero(counts, axis=1)),
        ("label_entropy_bits", [f"{entropy:.4f}" for entropy in label_entropy(counts)]),
        ("largest_class", largest),
        ("largest_share", [f"{share:.4f}" for share in shares]),
        *((f"class {name}", counts[:, i]) for i, name in enumerate(classes)),
    ]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(cells(name for name, _ in columns))
    writer.writerows(zip(*(values for _, values in columns), strict=True))
    return text.getvalue()
