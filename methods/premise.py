"""FedVG's premise: a client whose validation gradient is small has a model that generalises. `diagnostics` measures it."""

from __future__ import annotations

import torch
from torch import Tensor

from methods.fedvg import layer_norms
from methods.weight_ranks import rank_correlation
from raysim.core.method import ClientView, ServerView

#: Columns of the array `premise`.
COLUMNS = ("validation_gradient", "accuracy")


def premise_of(client: ClientView) -> Tensor:
    """(2,) float64, of the client's model after training: G_k of FedVG's eq. 4, and accuracy on the test rows, in [0, 1].

    G_k is FedVG's default, the mean over parameter tensors of the L1 norms of the validation gradient in train mode. Not
    numbers for a client without a step, whose model is the global one.
    """
    if not client.num_steps:
        return torch.full((len(COLUMNS),), torch.nan, dtype=torch.float64)
    norms = layer_norms(client.layout, client.validation_gradient("train"), "l1")
    return torch.tensor([float(norms.mean()), client.accuracy("test")], dtype=torch.float64)


def log_premise(server: ServerView) -> None:
    """The two numbers of each client, and their rank correlation over clients that took a step: the premise is -1."""
    values = server.report["premise"]
    server.log("premise", values, COLUMNS)
    gradients, accuracies = values[server.is_active].T
    server.log("accuracy_by_gradient", rank_correlation(gradients, accuracies))
