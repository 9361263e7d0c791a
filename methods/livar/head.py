"""Eq. 6 of LIVAR: each class's row of the head is merged by the variance of the class's features at the clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from methods.livar.merging import adapters_of
from methods.moments import Features, class_covariances, linear_head, local_features
from raysim.core.method import ClientView, ServerView
from raysim.core.weights import Weights, normalised

Variance = Literal["correct", "released", "counts"]


def reported_variances(client: ClientView, variance: Variance) -> dict[str, Tensor]:
    """Return (classes,) float64 each: variances over all local examples and, with "correct", over the correctly classified
    examples; empty with "counts"."""
    if variance == "counts":
        return {}
    features = backbone_features(client) if variance == "released" else local_features(client)
    classes, usable = len(client.class_counts), features.is_correct
    values = {"variance_all": class_variances(features.values, features.labels, classes)}
    if variance == "correct":
        values["variance"] = class_variances(features.values[usable], features.labels[usable], classes)
    return values


def head_weights(server: ServerView, variance: Variance) -> Weights:
    """Leaf of the head -> (K, classes), from the reported variances, then from class counts; logged."""
    reported = [server.report[name] for name in ("variance", "variance_all") if name in server.report]
    last = [] if variance == "released" else [server.class_counts.double()]
    rows = row_weights([*reported, *last], server.is_active)
    server.log("head_weights", rows, [f"class {label}" for label in range(rows.shape[1])])
    return {leaf.name: rows for leaf in linear_head(server.layout, "livar")}


def backbone_features(client: ClientView) -> Features:
    """The local examples as the released code takes their statistics: no adapters, and pixels in [0, 1]."""
    point = client.params.clone()
    for pair in adapters_of(client.layout):
        client.layout.view(point, pair.b).zero_()
    return local_features(client, point, is_normalised=False)


def row_weights(candidates: Sequence[Tensor], is_active: Tensor) -> Tensor:
    """Weights of each client on the head's row of each class, eq. 6.

    Args:
      candidates: (K, classes) float64 scores >= 0, NaN where missing, in order of preference: a class takes the first
        that has a positive sum over the active clients.
    Returns:
      (K, classes) float64; columns sum to 1, or are 0 where no candidate serves: the row stays.
    """
    weights = torch.zeros_like(candidates[0])
    is_open = torch.ones(weights.shape[1], dtype=torch.bool)
    for scores in candidates:
        usable = torch.where(is_active[:, None], scores, 0.0).nan_to_num(0.0)
        serves = is_open & (usable.sum(0) > 0)
        weights = torch.where(serves, normalised(usable), weights)
        is_open &= ~serves
    return weights


def class_variances(values: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Spread of each class's features: the mean over dimensions of the per-dimension unbiased variance.

    Returns:
      (classes,) float64; NaN for a class with fewer than two examples.
    """
    # Exactly 0 for identical features, which counts as missing.
    variances = class_covariances(values, labels, num_classes, diagonal=True)
    is_known = torch.bincount(labels, minlength=num_classes) >= 2
    return torch.where(is_known, torch.stack([row.mean() for row in variances]), torch.nan)
