"""Metrics of a scored set, from what the model made of each example: pure functions of integers and of fixed floats.

Those of a `Score` without logits are always there; `METRICS` need every logit and are computed where a run asks for them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

#: Equal bins of the confidence in `calibration_error`, as in Guo et al. 2017.
BINS = 15

#: metric(labels (n,) int64, logits (n, classes) float32) -> a number.
Metric = Callable[[np.ndarray, np.ndarray], float]


def confusion(labels: np.ndarray, predictions: np.ndarray, num_classes: int) -> np.ndarray:
    """(classes, classes) int64: examples by true class (row) and predicted class (column)."""
    cells = labels.astype(np.int64) * num_classes + predictions
    return np.bincount(cells, minlength=num_classes**2).reshape(num_classes, num_classes)


def class_scores(labels: np.ndarray, predictions: np.ndarray, num_classes: int) -> tuple[float, float]:
    """Return balanced accuracy and macro F1, as scikit-learn defines them.

    Balanced accuracy is the mean recall over classes with an example; macro F1 is the mean F1 over classes with an example or
    a prediction. Time and memory grow with the number of classes, not with its square as for `confusion`.

    Args:
      labels, predictions: (n,) integers from 0 to num_classes - 1.
    Returns:
      (balanced accuracy, macro F1), both in [0, 1]; NaN for n = 0.
    """
    true, predicted, right = (
        np.bincount(each, minlength=num_classes) for each in (labels, predictions, labels[labels == predictions])
    )
    recalls, sums = right[true > 0] / true[true > 0], true + predicted
    scores = 2 * right[sums > 0] / sums[sums > 0]
    return (float(recalls.mean()), float(scores.mean())) if len(labels) else (float("nan"), float("nan"))


def calibration_error(confidences: np.ndarray, hits: np.ndarray) -> float:
    """Expected calibration error: |accuracy - mean confidence| of a bin, weighed by its share of the examples.

    Guo et al. 2017 (arXiv:1706.04599), eq. 3, with `BINS` bins of equal width.

    Args:
      confidences: (n,) in [0, 1], probability of the predicted class; hits: (n,) bool, whether it is the true one.
    """
    if not len(hits):
        return float("nan")
    # (a, b], as in the paper; a confidence of 0 (not finite logits) counts to the first bin.
    edges = np.linspace(0, 1, BINS + 1)
    bins = np.clip(np.searchsorted(edges, confidences, side="left") - 1, 0, BINS - 1)
    right = np.bincount(bins, weights=hits, minlength=BINS)
    believed = np.bincount(bins, weights=confidences.astype(np.float64), minlength=BINS)
    return float(np.abs(right - believed).sum() / len(hits))


def auroc(labels: np.ndarray, logits: np.ndarray) -> float:
    """Area under the receiver operating characteristic, one class against the rest, mean over the classes.

    As MedMNIST's evaluator and scikit-learn's `multi_class="ovr"`: by the softmax, ties count half. Classes that no
    example, or every example, belongs to are left out; NaN where none is left or a logit is not finite.
    """
    from scipy.stats import rankdata

    if not np.isfinite(logits).all():
        return float("nan")
    scores = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
    scores /= scores.sum(1, keepdims=True)
    areas = []
    for label in range(logits.shape[1]):
        is_mine = labels == label
        count = int(is_mine.sum())
        if 0 < count < len(labels):
            ranks = rankdata(scores[:, label])[is_mine].sum()  # Mann and Whitney's U
            areas.append((ranks - count * (count + 1) / 2) / (count * (len(labels) - count)))
    return float(np.mean(areas)) if areas else float("nan")


#: Metrics that need every logit, by name.
METRICS: dict[str, Metric] = {"auroc": auroc}


def cell_means(
    values: np.ndarray, labels: np.ndarray, domains: np.ndarray | None, shape: tuple[int, int]
) -> np.ndarray:
    """(domains, classes) float64: mean value of the examples of each domain and class, NaN where there is none.

    Args:
      values: (n,), such as hits; labels: (n,); domains: (n,), None for a set without domains, whose `shape` is (1, classes).
    """
    cells = labels if domains is None else domains * shape[1] + labels
    return group_means(cells, values, shape[0] * shape[1]).reshape(shape)


def group_means(groups: np.ndarray, values: np.ndarray, num_groups: int) -> np.ndarray:
    """Return (groups,) float64: mean of (n,) values by group, such as a domain, in one pass; NaN for empty groups."""
    count = np.bincount(groups, minlength=num_groups)
    total = np.bincount(groups, weights=values, minlength=num_groups)
    return np.where(count > 0, total / np.maximum(1, count), np.nan)


def expected_means(counts: np.ndarray, table: np.ndarray) -> np.ndarray:
    """(N,) float64: mean to be expected on each client's own mix of domains and classes.

    Args:
      counts: (N, domains, classes) examples of the clients; table: (domains, classes) or (N, domains, classes), means,
        NaN where unknown: what a client has there does not count. NaN for a client of which nothing is known.
    """
    # In one pass each, without an array of the population's size in between: a million clients take 30 ms.
    total, right = (
        np.einsum("...dc,...dc->...", counts, values)
        for values in ((~np.isnan(table)).astype(float), np.nan_to_num(table))
    )
    return np.where(total > 0, right / np.maximum(total, 1), np.nan)


def client_means(values: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """(N,) float64: mean value of each client's own test examples, which lie client after client; NaN without any."""
    return group_means(np.repeat(np.arange(len(sizes)), sizes), values, len(sizes))
