"""Rank correlations over the clients of a round, for `diagnostics`: of aggregation weights, and of FedVG's premise."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from methods.fedvg import layer_norms
from methods.flfa import update_norms
from raysim.core.method import ClientView, ServerView
from raysim.core.weights import RightMap

#: Columns of the array `premise`.
COLUMNS = ("validation_gradient", "accuracy")


def log_weights(server: ServerView) -> None:
    """Rank correlations of the aggregation weights with properties of the clients; see `diagnostics`."""
    active = server.is_active
    leaves = [leaf for leaf in server.layout.params if leaf.is_shared]
    spans = [(leaf.offset, leaf.end) for leaf in leaves]
    norms = torch.stack(server.map_updates(update_norms, spans)).square().sum(dim=1).sqrt()
    counts = server.class_counts.double()
    shares = counts / counts.sum(dim=1, keepdim=True).clamp_min(1)
    entropy = torch.special.entr(shares).sum(dim=1)
    weights = mean_weights(server)
    for name, values in (("update", norms), ("examples", server.num_examples.double()), ("entropy", entropy)):
        server.log(f"weight_by_{name}", rank_correlation(weights[active], values[active]))


def mean_weights(server: ServerView) -> Tensor:
    """(K,) float64: each client's aggregation weight, mean over all numbers of the shared leaves."""
    total, size = torch.zeros(len(server.clients), dtype=torch.float64), 0
    for leaf in server.layout.shared:
        if leaf.name in server.weights:
            weight = server.weights[leaf.name]
            if isinstance(weight, RightMap):
                weight = weight.maps.diagonal(dim1=1, dim2=2)
            total += leaf.size * weight.reshape(len(weight), -1).mean(dim=1)
            size += leaf.size
    return total / max(1, size)


def premise_of(client: ClientView) -> Tensor:
    """(2,) float64, of the client's model after training: G_k of FedVG's eq. 4, and `client.accuracy` on the test rows.

    FedVG's premise is that clients whose validation gradient is small have models that generalise. G_k is FedVG's
    default, the mean over parameter tensors of the L1 norms of the validation gradient in train mode. NaN for a client
    without a step, whose model is the global model.
    """
    if not client.num_steps:
        return torch.full((len(COLUMNS),), torch.nan, dtype=torch.float64)
    norms = layer_norms(client.layout, client.validation_gradient("train"), "l1")
    return torch.tensor([float(norms.mean()), client.accuracy("test")], dtype=torch.float64)


def log_premise(server: ServerView) -> None:
    """Log both numbers of each client, and their rank correlation over clients that took a step; the premise is -1."""
    values = server.report["premise"]
    server.log("premise", values, COLUMNS)
    gradients, accuracies = values[server.is_active].T
    server.log("accuracy_by_gradient", rank_correlation(gradients, accuracies))


def rank_correlation(one: Tensor, other: Tensor) -> float:
    """Return Spearman's rank correlation of (n,) float64 values; mean ranks for ties; NaN if a side is constant."""
    first, second = (_ranks(values) for values in (one, other))
    size = first.norm() * second.norm()
    return float(first @ second / size) if float(size) > 0 else math.nan


def _ranks(values: Tensor) -> Tensor:
    """Return (n,) ranks minus their mean."""
    from scipy.stats import rankdata

    ranks = torch.from_numpy(rankdata(values.numpy()))
    return ranks - (len(values) + 1) / 2
