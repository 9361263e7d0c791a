"""A partition in numbers: how many examples each client has and how mixed their labels are."""

from __future__ import annotations

import csv
import io

import numpy as np


def label_entropy(class_counts: np.ndarray) -> np.ndarray:
    """(num_clients,) bits: 0 for one class, log2(classes) for all alike. class_counts: (num_clients, classes)."""
    shares = class_counts / np.maximum(1, class_counts.sum(axis=1, keepdims=True))
    logs = np.log2(shares, out=np.zeros_like(shares), where=shares > 0)
    return np.abs((shares * logs).sum(axis=1))


def partition_table(class_counts: np.ndarray) -> str:
    """A CSV row per client: examples, classes present, label entropy in bits, the largest class and its share."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["client", "examples", "classes", "label_entropy_bits", "largest_class", "largest_share"])
    entropies = label_entropy(class_counts)
    for client, counts in enumerate(class_counts):
        size, largest = int(counts.sum()), int(counts.argmax())
        share = counts[largest] / max(1, size)
        writer.writerow([client, size, np.count_nonzero(counts), f"{entropies[client]:.4f}", largest, f"{share:.4f}"])
    return text.getvalue()
