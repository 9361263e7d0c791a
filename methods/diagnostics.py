"""Diagnostics: measures of client drift, layers, classifier and features, without changes to the training."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from methods.bounds import distances_to_mean, feedback_of, layer_distances, log_feedback
from methods.feedback import feedback_layers
from methods.flfa import agreements
from methods.moments import one_thread
from methods.rank_correlations import log_premise, log_weights, premise_of
from raysim.core.layout import Layout, Leaf
from raysim.core.method import Batch, ClientView, Count, GradFn, LayerOp, Method, ServerView, State, Vector
from raysim.core.weights import normalised
from raysim.training.local import batch_bounds
from raysim.training.model import seed_global_stream

Measure = Literal[
    "drift", "layer_drift", "agreement", "spectrum", "features", "gradient", "feedback", "weights", "premise"
]

#: The default measures, which cost little.
CHEAP: tuple[Measure, ...] = ("drift", "agreement", "spectrum", "features")
NEEDS: dict[Measure, tuple[str, ...]] = {"features": ("classes", "features"), "premise": ("validation-set", "test-set")}


def diagnostics(*, every: Count = 1, measures: list[Measure] | None = None) -> Method:
    """Logs measures in the first and in every n-th round; weights and update do not change.

    List diagnostics last: a method that replaces the update must be listed before methods that read the update, and the
    measures gradient and feedback include only methods listed before diagnostics.

    - drift: (1/K) sum_i ||u_i - mean u||_2 over the K clients that took a step, u_i the concatenated update of all shared
      parameters (FLFA, figure 3); number `drift`.
    - layer_drift: drift of each linear and convolution layer, from the updates of its weight; array `layer_drift`.
      Measured only if named.
    - agreement: S_l of every linear and convolution layer (FLFA, eq. 14); array `agreement`, and its mean as a number.
    - spectrum: singular values of the new global classifier weight, largest first (UniVarFL, figure 1); array
      `singular_values`, number `effective_rank`, see `effective_rank`.
    - features: distances of the classifier's inputs, over the test set at the new global model (FLFA, figure 2); numbers
      `intra`, `inter` and `separability`, see `log_separation`. Needs one class per row; for other tasks, name other
      measures.
    - gradient: ||sum_k n_k/N grad L_k(theta)||_2 over the shared parameters at the broadcast point theta, over the cohort's
      training examples (UniVarFL, theorem 1, which bounds the smallest square over the rounds); number `gradient_norm`.
      L_k has the terms of the methods listed before this one, in train mode. Costs each client a pass over its
      examples; measured only if named.
    - feedback: distance of feedback alignment from the gradient, if a method listed before uses feedback alignment (the
      quantities of FLFA's bounds, sections 4 and 9), at each client's model after training, over all its examples;
      numbers `feedback_error`, `local_gradient_norm`, `weight_norm_gap`, `weight_gap` and array `weight_norms`, see
      `methods/bounds.py`. Costs each client two passes over its examples; measured only if named.

    - weights: rank correlations (Spearman) over the clients that took a step, between their aggregation
      weight (mean over the shared numbers) and the L2 norm of their update, their number of examples, and the entropy of
      their labels; numbers `weight_by_update`, `weight_by_examples`, `weight_by_entropy`. NaN if one of the two
      quantities is equal for all clients, as the entropy is without classes. Measured only if named.
    - premise: whether clients with small validation gradients generalise better (FedVG). Array `premise`, a row per
      client: the validation gradient (G_k of FedVG's eq. 4) and the accuracy on the test rows, both of the client's
      model after training. Number `accuracy_by_gradient`: their rank correlation, -1 where the premise holds. Other
      tasks have their own score in place of the accuracy; for the RMSE the premise is +1. Costs each client passes over
      both sets; measured only if named.

    `spectrum` and `features` need the new model, which exists only in evaluated rounds: choose `every` and
    `evaluation.every` so that one divides the other. If a method scores another model than it broadcasts (LIVAR), the
    broadcast model is measured.

    Args:
      every: measure in the first round, and in every n-th round, counted from 1.
      measures: names of the measures above; null: drift, agreement, spectrum and features, which cost little.
    Raises:
      ValueError: when the run starts, a measure that the global model does not have.
    """
    chosen = frozenset(CHEAP if measures is None else measures)

    def init(params: Tensor, layout: Layout) -> State:
        reasons = [reason for name, reason in _missing(layout).items() if name in chosen]
        if reasons:
            raise ValueError(f"diagnostics: {'; '.join(reasons)}; choose others with `measures`")
        return {}

    def is_due(round_index: int) -> bool:
        return round_index == 0 or (round_index + 1) % every == 0

    def grads(inner: GradFn, client: ClientView) -> GradFn:
        if is_due(client.round_index):
            client.scratch["gradient"] = local_gradient(inner, client)
        return inner

    def forward(ops: dict[str, LayerOp], client: ClientView) -> dict[str, LayerOp]:
        client.scratch["ops"] = ops
        return ops

    def report(client: ClientView) -> dict[str, Tensor | Vector]:
        values: dict[str, Tensor | Vector] = {}
        if "gradient" in client.scratch:
            values["gradient"] = Vector(client.scratch["gradient"])
        if is_due(client.round_index) and client.scratch.get("ops"):
            values |= feedback_of(client, client.scratch["ops"])
        if is_due(client.round_index) and "premise" in chosen:
            values["premise"] = premise_of(client)
        return values

    def server_update(update: Tensor, state: State, server: ServerView) -> tuple[Tensor, State]:
        if is_due(server.round_index) and bool(server.is_active.any()):
            for name in [name for name in OF_CLIENTS if name in chosen]:
                OF_CLIENTS[name](server)
        return update, state

    def evaluation_override(state: State, server: ServerView) -> Mapping[str, Tensor]:
        if is_due(server.round_index):
            for name in [name for name in OF_NEW_MODEL if name in chosen]:
                OF_NEW_MODEL[name](server)
        return {}

    return Method(
        "diagnostics",
        init=init,
        forward=forward if "feedback" in chosen else None,
        grads=grads if "gradient" in chosen else None,
        report=report if chosen & {"gradient", "feedback", "premise"} else None,
        server_update=server_update,
        evaluation_override=evaluation_override,
        needs=frozenset(need for measure in chosen for need in NEEDS.get(measure, ())),
    )


def _missing(layout: Layout) -> dict[str, str]:
    """Return measure -> reason why the layout lacks the measure."""
    reasons = {}
    if not any(leaf.is_shared for leaf in layout.params):
        reasons["drift"] = "no parameter is shared, so no update exists to compare"
        reasons["gradient"] = "no parameter is shared, so no global gradient exists"
    if not _shared_layers(layout):
        reasons["agreement"] = "no linear or convolution layer is shared, so no agreement exists"
        reasons["layer_drift"] = "no linear or convolution layer is shared, so none drifts"
    if _classifier(layout) is None:
        reasons["spectrum"] = "the classifier is frozen, personal or no matrix, so the spectrum does not move"
    if any(not leaf.is_head for leaf in layout.personal):
        reasons["features"] = "layers below the classifier are personal, so the global model has no features"
    return reasons


def _shared_layers(layout: Layout) -> dict[str, Leaf]:
    """Path -> weight leaf of FLFA's candidates, as far as they are shared."""
    return {name: leaf for name, leaf in feedback_layers(layout).items() if leaf.is_shared}


def _classifier(layout: Layout) -> Leaf | None:
    return next((leaf for leaf in layout.params if leaf.is_head and leaf.is_shared and len(leaf.shape) == 2), None)


def log_drift(server: ServerView) -> None:
    """(1/K) sum_i ||u_i - mean u||_2 over the clients that took a step (FLFA, section 5.3)."""
    leaves = [leaf for leaf in server.layout.params if leaf.is_shared]
    server.log("drift", float(distances_to_mean(server, leaves)[server.is_active].mean()))


def log_layer_drift(server: ServerView) -> None:
    """Log the drift of each linear and convolution layer."""
    layers = _shared_layers(server.layout)
    distances = layer_distances(server, list(layers.values()))
    server.log("layer_drift", distances[server.is_active].mean(dim=0), list(layers))


def log_agreement(server: ServerView) -> None:
    """S_l of FLFA's eq. 14, and its mean."""
    layers = _shared_layers(server.layout)
    scores = agreements(server, list(layers.values()))
    server.log("agreement", scores, list(layers))
    server.log("agreement_mean", float(scores.mean()))


def log_spectrum(server: ServerView) -> None:
    """Singular values of the new classifier weight, largest first."""
    leaf = _classifier(server.layout)
    assert leaf is not None  # checked by `init`
    with one_thread():  # the same digits wherever the server runs
        values = torch.linalg.svdvals(server.layout.view(server.params, leaf).double())
    server.log("singular_values", values)
    server.log("effective_rank", effective_rank(values))


def local_gradient(gradient: GradFn, client: ClientView) -> Tensor:
    """[num_params]: gradient of the client's objective at the broadcast point, over all its examples once.

    Batches have the local batch size, since terms such as UniVarFL's depend on the batch. Under BatchNorm a last batch
    of one example is skipped, as in training. Parameters, buffers and the random draws of training do not change.

    Args:
      gradient: gradient(params, batch) -> [num_params] of the mean loss of a batch.
    """
    module = client.model.module.train()  # as the local steps will be
    seed_global_stream(client.generator.initial_seed(), client.start.device)  # dropout
    skip_single = any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in module.modules())
    total, count = torch.zeros_like(client.start), 0
    for images, labels in client.batches():
        for start, end in batch_bounds(len(labels), client.batch_size, skip_single=skip_single):
            total.add_(gradient(client.start, Batch(images[start:end], labels[start:end])), alpha=end - start)
            count += end - start
    return total.div_(max(1, count))


def log_gradient_norm(server: ServerView) -> None:
    """Log the L2 norm of the mean gradient of the clients that took a step, weighted by examples; shared parameters."""
    leaves = [leaf for leaf in server.layout.params if leaf.is_shared]
    shares = normalised((server.num_examples * server.is_active).double())
    total = server.total("gradient", {leaf.name: shares for leaf in leaves})
    norms = [torch.linalg.vector_norm(total[leaf.offset : leaf.end]) for leaf in leaves]
    server.log("gradient_norm", float(torch.linalg.vector_norm(torch.stack(norms))))


def effective_rank(values: Tensor) -> float:
    """exp of the entropy of singular values that were divided by their sum (Roy and Vetterli 2007).

    Args:
      values: (n,) singular values, >= 0.
    Returns:
      Between 1 (one direction) and n (all equal); 0 where all are 0.
    """
    total = float(values.sum())
    if total == 0:
        return 0.0
    shares = values[values > 0] / total
    return math.exp(-float((shares * shares.log()).sum()))


def log_separation(server: ServerView) -> None:
    """Distances of features on the test set at the global model, in two passes (FLFA, figure 2).

    With mu_c the mean feature of class c, over the classes that the test set has:
        intra = mean over examples of ||z - mu_y||_2,   inter = mean over pairs of classes of ||mu_c - mu_c'||_2
    and separability = inter / intra. NaN if there is only one class, or if all distances inside classes are 0.
    """
    slices = server.map_features(class_sums, server.class_counts.shape[1])
    if not slices:
        return
    # Added in the order of the slices, so that the rounding is always the same.
    sums, counts = (functools.reduce(torch.add, parts) for parts in zip(*slices, strict=True))
    means = sums / counts.clamp_min(1)[:, None]
    inside = functools.reduce(torch.add, server.map_features(distances_to_means, means))
    class_means = means[counts > 0]
    intra = float(inside / counts.sum())
    inter = float(torch.pdist(class_means).mean()) if len(class_means) > 1 else math.nan
    server.log("intra", intra)
    server.log("inter", inter)
    server.log("separability", inter / intra if intra > 0 else math.nan)


def class_sums(features: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Sums (classes, width) float64 and counts (classes,) of one slice."""
    sums = torch.zeros(num_classes, features.shape[1], dtype=torch.float64, device=features.device)
    return sums.index_add_(0, labels, features.double()), torch.bincount(labels, minlength=num_classes)


def distances_to_means(features: Tensor, labels: Tensor, means: Tensor) -> Tensor:
    """float64 scalar: the sum over one slice of each feature's distance to the mean of its class, (classes, width)."""
    distances: Tensor = torch.linalg.vector_norm(features.double() - means[labels], dim=1)
    return distances.sum()


#: Measure -> function that logs it, in this order: measures of a round's clients, and of the model after the round.
OF_CLIENTS: dict[Measure, Callable[[ServerView], None]] = {
    "gradient": log_gradient_norm,
    "feedback": log_feedback,
    "weights": log_weights,
    "premise": log_premise,
    "drift": log_drift,
    "layer_drift": log_layer_drift,
    "agreement": log_agreement,
}
OF_NEW_MODEL: dict[Measure, Callable[[ServerView], None]] = {"spectrum": log_spectrum, "features": log_separation}
