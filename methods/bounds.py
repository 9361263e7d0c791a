"""Quantities of FLFA's bounds: the distance of feedback alignment from the gradient, and the drift of the weights.

With g the gradient of a client's mean cross-entropy at its model after training, g_FA the gradient through the
feedback, and W_i the weight of an overridden layer at client i, `diagnostics` logs over the clients that took a step:
    feedback_error        mean of ||g_FA - g||_2
    local_gradient_norm   mean of ||g||_2
    weight_norms          ||W_i||_2 by client and layer
    weight_norm_gap       root mean square of ||W_i|| - ||W_j|| over pairs of clients and over layers
    weight_gap            root mean square of ||W_i - W_j||, over the same pairs and layers
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from methods.feedback import feedback_layers
from methods.flfa import Spans, update_norms
from methods.moments import mean_gradient
from raysim.core.layout import Leaf
from raysim.core.method import ClientView, LayerOp, ServerView
from raysim.core.weights import normalised
from raysim.training.model import seed_global_stream, streams_kept


def feedback_of(client: ClientView, ops: Mapping[str, LayerOp]) -> dict[str, Tensor]:
    """Return a client's report on its overridden layers; the module docstring defines the numbers.

    Returns:
      error, gradient_norm: float64 scalars; weight_norms: (layers,) float64; layers: (layers,), places in
        `feedback_layers`.
    """
    plain = other = torch.zeros_like(client.params)
    if client.num_steps > 0:  # without a step there may be too few examples for a gradient
        plain = _gradient(client, {})
        other = _gradient(client, ops)
    layers = feedback_layers(client.layout)
    inside = [index for index, name in enumerate(layers) if name in ops]
    weights = [client.layout.view(client.params, leaf) for leaf in layers.values()]
    norms = [float(torch.linalg.vector_norm(weights[index], dtype=torch.float64)) for index in inside]
    return {
        "error": torch.linalg.vector_norm(other - plain, dtype=torch.float64).cpu(),
        "gradient_norm": torch.linalg.vector_norm(plain, dtype=torch.float64).cpu(),
        "weight_norms": torch.tensor(norms, dtype=torch.float64),
        "layers": torch.tensor(inside),
    }


def _gradient(client: ClientView, ops: Mapping[str, LayerOp]) -> Tensor:
    """Return `mean_gradient` at the client's model in training mode, with `ops` in place of some layers.

    Dropout draws the same masks in every call, and the random streams are restored afterwards.
    """
    with streams_kept(client.params.device), client.model.overridden(ops):
        seed_global_stream(client.generator.initial_seed(), client.params.device)
        return mean_gradient(client, client.params)


def log_feedback(server: ServerView) -> None:
    """Log means over the clients that took a step, and the spread of their weights in the overridden layers, if any."""
    if "weight_norms" not in server.report:
        return
    active, layers = server.is_active, feedback_layers(server.layout)
    leaves = [list(layers.values())[index] for index in server.report["layers"][0].tolist()]
    norms = server.report["weight_norms"]
    server.log("feedback_error", float(server.report["error"][active].mean()))
    server.log("local_gradient_norm", float(server.report["gradient_norm"][active].mean()))
    server.log("weight_norms", norms, [leaf.layer for leaf in leaves])
    count = int(active.sum())
    if not leaves or count < 2:
        return
    # The mean square over pairs of d_i - d_j is 2 / (K - 1) sum_i |d_i - mean d|^2.
    server.log("weight_norm_gap", math.sqrt(2 * float(norms[active].var(dim=0).mean())))
    squares = float(distances_to_mean(server, leaves)[active].square().sum())
    server.log("weight_gap", math.sqrt(2 * squares / (count - 1) / len(leaves)))


def distances_to_mean(server: ServerView, leaves: Sequence[Leaf]) -> Tensor:
    """Return (K,) float64: ||u_i - mean u||_2 over all given leaves together, see `layer_distances`."""
    return torch.stack([torch.linalg.vector_norm(distances) for distances in layer_distances(server, leaves)])


def layer_distances(server: ServerView, leaves: Sequence[Leaf]) -> Tensor:
    """Return (K, leaves) float64: ||u_i - mean u||_2 in each leaf, mean u over the clients that took a step (exact)."""
    spans = [(leaf.offset, leaf.end) for leaf in leaves]
    uniform = normalised(server.is_active.double())
    mean = server.total("update", {leaf.name: uniform for leaf in leaves})[: server.layout.num_params]
    return torch.stack(server.map_updates(update_distances, (spans, mean.float())))


def update_distances(update: Tensor, spans_and_mean: tuple[Spans, Tensor]) -> Tensor:
    """Return (leaves,) float64: L2 distance between a client's update and the mean update in each leaf."""
    spans, mean = spans_and_mean
    return update_norms(update - mean, spans)
