"""A partition in numbers: how many examples each client has and how mixed their labels are."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

import numpy as np


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
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = ["client", "examples", "classes", "label_entropy_bits", "largest_class", "largest_share"]
    writer.writerow([*columns, *(f"class {name}" for name in classes)])
    rows: list[tuple[int | str, np.ndarray]] = list(enumerate(class_counts))
    if validation_counts is not None and validation_counts.sum():
        rows.append(("validation", validation_counts))
    entropies = label_entropy(np.stack([counts for _, counts in rows]))
    for (name, counts), entropy in zip(rows, entropies, strict=True):
        size, largest = int(counts.sum()), int(counts.argmax())
        told = [
            name,
            size,
            np.count_nonzero(counts),
            f"{entropy:.4f}",
            largest,
            f"{counts[largest] / max(1, size):.4f}",
        ]
        writer.writerow([*told, *(counts.tolist() if classes else ())])
    return text.getvalue()
