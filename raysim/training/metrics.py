"""Metrics of a scored set: pure functions of the measurements of each example.

Metrics in `METRICS` need all logits and are computed only if a run requests them; other metrics are always computed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

#: Equal bins of the confidence in `calibration_error`, as in Guo et al. 2017.
BINS = 15

#: metric(labels (n,) int64, logits (n, classes) float32) -> a number.
Metric = Callable[[np.ndarray, np.ndarray], float]


def confusion(labels: np.ndarray, predictions: np.ndarray, num_classes: int) -> np.ndarray:
    """Return (classes, classes) int64: number of examples by true class (row) and predicted class (column)."""
    cells = labels.astype(np.int64) * num_classes + predictions
    return np.bincount(cells, minlength=num_classes**2).reshape(num_classes, num_classes)


def class_scores(labels: np.ndarray, predictions: np.ndarray, num_classes: int) -> tuple[float, float]:
    """Return balanced accuracy and macro F1, as scikit-learn defines them.

    Balanced accuracy is the mean recall over classes with an example; macro F1 is the mean F1 over classes with an
    example or a prediction. Time and memory grow linearly with the number of classes, unlike for `confusion`.

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
    """Return the expected calibration error: mean |accuracy - mean confidence| of bins, weighted by their examples.

    Guo et al. 2017 (arXiv:1706.04599), eq. 3, with `BINS` bins of equal width.

    Args:
      confidences: (n,) in [0, 1], probability of the predicted class.
      hits: (n,) bool, whether the predicted class is the true class.
    """
    if not len(hits):
        return float("nan")
    # Bins are (a, b], as in the paper; a confidence of 0 (non-finite logits) belongs to the first bin.
    edges = np.linspace(0, 1, BINS + 1)
    bins = np.clip(np.searchsorted(edges, confidences, side="left") - 1, 0, BINS - 1)
    right = np.bincount(bins, weights=hits, minlength=BINS)
    believed = np.bincount(bins, weights=confidences.astype(np.float64), minlength=BINS)
    return float(np.abs(right - believed).sum() / len(hits))


def auroc(labels: np.ndarray, logits: np.ndarray) -> float:
    """Return the area under the receiver operating characteristic, one class against the rest, mean over the classes.

    As in MedMNIST's evaluator and scikit-learn's `multi_class="ovr"`: from the softmax, ties count half. Classes with
    no example or with all examples are left out. NaN if no class is left or a logit is not finite.
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
    """Return (domains, classes) float64: mean value of the examples of each domain and class; NaN without examples.

    Args:
      values: (n,), such as hits.
      labels: (n,), class of each example.
      domains: (n,), domain of each example; None for a set without domains.
      shape: (domains, classes); (1, classes) for a set without domains.
    """
    cells = labels if domains is None else domains * shape[1] + labels
    return group_means(cells, values, shape[0] * shape[1]).reshape(shape)


def group_means(groups: np.ndarray, values: np.ndarray, num_groups: int) -> np.ndarray:
    """Return (groups,) float64: mean of (n,) values by group, such as a domain, in one pass; NaN for empty groups."""
    count = np.bincount(groups, minlength=num_groups)
    total = np.bincount(groups, weights=values, minlength=num_groups)
    return np.where(count > 0, total / np.maximum(1, count), np.nan)


def expected_means(counts: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Return (N,) float64: the mean of `table`, weighted by each client's number of examples by domain and class.

    Args:
      counts: (N, domains, classes), numbers of examples of the clients.
      table: (domains, classes) or (N, domains, classes), means; NaN entries are left out. The result is NaN for clients
        without an example in the remaining entries.
    """
    # In one pass each, without a temporary array of the population's size: a million clients take 30 ms.
    total, right = (
        np.einsum("...dc,...dc->...", counts, values)
        for values in ((~np.isnan(table)).astype(float), np.nan_to_num(table))
    )
    return np.where(total > 0, right / np.maximum(total, 1), np.nan)


def client_means(values: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return (N,) float64: mean value of each client's examples, which are sorted by client; NaN without examples."""
    return group_means(np.repeat(np.arange(len(sizes)), sizes), values, len(sizes))
