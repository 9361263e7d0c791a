"""Diagnostics: what client drift, layers, classifier and features look like, without touching the training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from methods.feedback import feedback_layers
from methods.flfa import agreements
from methods.moments import one_thread
from raysim.core.layout import Layout, Leaf
from raysim.core.method import Client, LayerOp, Method, Server, State
from raysim.core.weights import normalised
from raysim.training.model import cross_entropy, seed_global_stream

Measure = Literal["drift", "agreement", "spectrum", "features", "feedback"]


def diagnostics(*, every: int = 1, measures: list[Measure] | None = None) -> Method:
    """Logs measures of the round in round 0 and then every so many rounds; weights and update stay as they are.

    List it last: what it sees of the clients does not depend on the place, but methods that replace the update have to
    stand before any other one that looks at it.

    - drift: (1/K) sum_i ||u_i - mean u||_2 over the K clients that took a step, u_i the concatenated update of all shared
      parameters (FLFA, figure 3); number `drift`.
    - agreement: S_l of every linear and convolution layer (FLFA, eq. 14); array `agreement`, and its mean as a number.
    - spectrum: singular values of the new global classifier weight, largest first (UniVarFL, figure 1); array
      `singular_values`, number `effective_rank`, see `effective_rank`.
    - features: distances of the classifier's inputs, over the test set at the new global model (FLFA, figure 2); numbers
      `intra`, `inter` and `separability`, see `separation`.

    - feedback: how far feedback alignment leads away, where a method listed before has it in some layers (FLFA, sections
      4 and 9, the quantities of its bounds), at each client's model after training, over all its examples, with g the
      gradient of the mean cross-entropy and g_FA the same through the feedback: numbers `feedback_error`, the mean of
      ||g_FA - g||_2, and `gradient_norm`, that of ||g||_2; array `weight_norms`, the norm of each such layer's weight by
      client, and numbers `weight_norm_gap` and `weight_gap`, the root mean squares of ||W_i|| - ||W_j|| and of
      ||W_i - W_j|| over pairs of clients and over these layers. Costs two passes over the clients' examples.

    `spectrum` and `features` need the new model, which is only looked at in rounds that are evaluated: let one of `every`
    and `evaluation.every` divide the other. A method that scores another model than it broadcasts (LIVAR) is measured
    at the one it broadcasts.

    Args:
      every: rounds between measurements: 0, every - 1, 2 every - 1, ...
      measures: which; all of them by default.
    Raises:
      ValueError: every < 1, an empty list; or, when the run starts, a measure of something that the global model lacks.
    """
    if every < 1:
        raise ValueError(f"diagnostics: every must be >= 1, got {every}; leave diagnostics out to measure nothing")
    if measures is not None and not measures:
        raise ValueError("diagnostics: measures is empty; name some, or leave diagnostics out")
    chosen = frozenset(get_args(Measure) if measures is None else measures)

    def init(params: Tensor, layout: Layout) -> State:
        found = [words for name, words in _missing(layout).items() if name in chosen]
        if found:
            raise ValueError(f"diagnostics: {'; '.join(found)}; choose others with `measures`")
        return {}

    def is_due(round_index: int) -> bool:
        return round_index == 0 or (round_index + 1) % every == 0

    def forward(ops: dict[str, LayerOp], client: Client) -> dict[str, LayerOp]:
        client.scratch["ops"] = ops
        return ops

    def report(client: Client) -> dict[str, Tensor]:
        ops = client.scratch["ops"]
        if not ops or not is_due(client.round_index):
            return {}
        return feedback_of(client, ops)

    def server_update(update: Tensor, state: State, server: Server) -> tuple[Tensor, State]:
        if is_due(server.round_index) and bool(server.is_active.any()):
            if "weight_norms" in server.report:
                log_feedback(server)
            if "drift" in chosen:
                server.log("drift", local_drift(server))
            if "agreement" in chosen:
                layers = _shared_layers(server.layout)
                scores = agreements(server, list(layers.values()), "mean")
                server.log("agreement", scores, list(layers))
                server.log("agreement_mean", float(scores.mean()))
        return update, state

    def evaluated(state: State, server: Server) -> Mapping[str, Tensor]:
        if is_due(server.round_index):
            if "spectrum" in chosen:
                with one_thread():  # the same digits wherever the server runs
                    values = torch.linalg.svdvals(_classifier(server.layout, server.params).double())
                server.log("singular_values", values)
                server.log("effective_rank", effective_rank(values))
            if "features" in chosen:
                for name, value in separation(server).items():
                    server.log(name, value)
        return {}

    needs = frozenset({"features"}) if "features" in chosen else frozenset[str]()
    sees_feedback = "feedback" in chosen
    return Method(
        "diagnostics",
        init=init,
        forward=forward if sees_feedback else None,
        report=report if sees_feedback else None,
        server_update=server_update,
        evaluated=evaluated,
        needs=needs,
    )


def feedback_of(client: Client, ops: Mapping[str, LayerOp]) -> dict[str, Tensor]:
    """What one client reports about its overridden layers: see `diagnostics`.

    Returns:
      error, gradient_norm: float64 scalars; weight_norms: (layers,) float64; layers: (layers,), their places among all.
    """
    plain = other = torch.zeros_like(client.params)
    if client.num_steps > 0:  # without a step there may be too few examples for a gradient
        plain = local_gradient(client)
        with client.model.overridden(ops):
            other = local_gradient(client)
    known = feedback_layers(client.layout)
    inside = [index for index, name in enumerate(known) if name in ops]
    weights = [client.layout.view(client.params, leaf) for leaf in known.values()]
    norms = [float(torch.linalg.vector_norm(weights[index], dtype=torch.float64)) for index in inside]
    return {
        "error": torch.linalg.vector_norm(other - plain, dtype=torch.float64).cpu(),
        "gradient_norm": torch.linalg.vector_norm(plain, dtype=torch.float64).cpu(),
        "weight_norms": torch.tensor(norms, dtype=torch.float64),
        "layers": torch.tensor(inside),
    }


def local_gradient(client: Client) -> Tensor:
    """[num_params]: gradient of the mean cross-entropy over the client's examples where it stands, in training mode.

    Dropout draws the same masks each time, and what is drawn after it is left alone.
    """
    devices = [client.params.device] if client.params.device.type == "cuda" else []
    total = torch.zeros_like(client.params)
    with torch.random.fork_rng(devices=devices):
        seed_global_stream(client.generator.initial_seed(), client.params.device)
        for batch in client.batches():
            gradient = client.model.gradient(cross_entropy, client.params, batch)
            total.add_(gradient, alpha=len(batch.labels) / client.num_examples)
    return total


def log_feedback(server: Server) -> None:
    """Means over the clients that took a step, and the spread of their weights in the overridden layers."""
    active, known = server.is_active, feedback_layers(server.layout)
    leaves = [list(known.values())[index] for index in server.report["layers"][0].tolist()]
    norms = server.report["weight_norms"]
    server.log("feedback_error", float(server.report["error"][active].mean()))
    server.log("gradient_norm", float(server.report["gradient_norm"][active].mean()))
    server.log("weight_norms", norms, [leaf.layer for leaf in leaves])
    count = int(active.sum())
    if not leaves or count < 2:
        return
    # The mean square over pairs of d_i - d_j is 2 / (K - 1) sum_i |d_i - mean d|^2.
    server.log("weight_norm_gap", math.sqrt(2 * float(norms[active].var(dim=0).mean())))
    squares = float(distances_to_mean(server, leaves)[active].square().sum())
    server.log("weight_gap", math.sqrt(2 * squares / (count - 1) / len(leaves)))


def _missing(layout: Layout) -> dict[str, str]:
    """Measure -> why this layout does not have it."""
    found = {}
    if not any(leaf.is_shared for leaf in layout.params):
        found["drift"] = "no parameter is shared, so there is no update to compare"
    if not _shared_layers(layout):
        found["agreement"] = "no linear or convolution layer is shared, so there is no agreement on one"
    if _classifier_leaf(layout) is None:
        found["spectrum"] = "the classifier is frozen, personal or no matrix, so it has no spectrum that moves"
    if any(not leaf.is_head for leaf in layout.personal):
        found["features"] = "layers below the classifier are personal, so the global model has no features"
    return found


def _shared_layers(layout: Layout) -> dict[str, Leaf]:
    """Path -> weight leaf of FLFA's candidates, as far as they are shared."""
    return {name: leaf for name, leaf in feedback_layers(layout).items() if leaf.is_shared}


def _classifier_leaf(layout: Layout) -> Leaf | None:
    return next((leaf for leaf in layout.params if leaf.is_head and leaf.is_shared and len(leaf.shape) == 2), None)


def _classifier(layout: Layout, params: Tensor) -> Tensor:
    """(classes, width): the classifier's weight in a vector of parameters."""
    leaf = _classifier_leaf(layout)
    assert leaf is not None
    return layout.view(params, leaf)


def local_drift(server: Server) -> float:
    """(1/K) sum_i ||u_i - mean u||_2 over the clients that took a step (FLFA, section 5.3)."""
    leaves = [leaf for leaf in server.layout.params if leaf.is_shared]
    return float(distances_to_mean(server, leaves)[server.is_active].mean())


def distances_to_mean(server: Server, leaves: Sequence[Leaf]) -> Tensor:
    """(K,) float64: ||u_i - mean u||_2 over some leaves, the mean over clients that took a step: exact, and a small map."""
    spans = [(leaf.offset, leaf.end) for leaf in leaves]
    uniform = normalised(server.is_active.double())
    mean = server.total("update", {leaf.name: uniform for leaf in leaves})[: server.layout.num_params]
    return torch.stack(server.map_updates(update_distance, {"spans": spans, "mean": mean.float()}))


def update_distance(update: Tensor, shared: dict[str, Any]) -> Tensor:
    """float64 scalar: L2 distance of one client's update from the mean one, over the shared leaves."""
    gap = update - shared["mean"]
    norms = [torch.linalg.vector_norm(gap[start:end], dtype=torch.float64) for start, end in shared["spans"]]
    return torch.linalg.vector_norm(torch.stack(norms))


def effective_rank(values: Tensor) -> float:
    """exp of the entropy of singular values that were divided by their sum (Roy and Vetterli 2007).

    Args:
      values: (n,) singular values, >= 0.
    Returns:
      Between 1 (one direction) and n (all alike); 0 where all are 0.
    """
    total = float(values.sum())
    if total == 0:
        return 0.0
    shares = values[values > 0] / total
    return math.exp(-float((shares * shares.log()).sum()))


def separation(server: Server) -> dict[str, float]:
    """Distances of features on the test set at the global model, in two passes (FLFA, figure 2).

    With mu_c the mean feature of class c, over the classes that the test set has:
        intra = mean over examples of ||z - mu_y||_2,   inter = mean over pairs of classes of ||mu_c - mu_c'||_2
    and separability = inter / intra. Not a number where there is one class, or no distance inside the classes.
    """
    num_classes = server.class_counts.shape[1]
    first = server.map_features(class_sums, {"classes": num_classes})
    if not first:
        return {}
    sums, counts = (_added([part[name] for part in first]) for name in ("sums", "counts"))
    means = sums / counts.clamp_min(1)[:, None]
    inside = _added(server.map_features(distances_to_means, {"means": means}))
    known = means[counts > 0]
    intra = float(inside / counts.sum())
    inter = float(torch.pdist(known).mean()) if len(known) > 1 else math.nan
    return {"intra": intra, "inter": inter, "separability": inter / intra if intra > 0 else math.nan}


def class_sums(features: Tensor, labels: Tensor, shared: dict[str, Any]) -> dict[str, Tensor]:
    """sums (classes, width) float64 and counts (classes,) of one slice."""
    sums = torch.zeros(shared["classes"], features.shape[1], dtype=torch.float64, device=features.device)
    counts = torch.bincount(labels, minlength=shared["classes"])
    return {"sums": sums.index_add_(0, labels, features.double()), "counts": counts}


def distances_to_means(features: Tensor, labels: Tensor, shared: dict[str, Any]) -> Tensor:
    """float64 scalar: the sum over one slice of each feature's distance to the mean of its class."""
    gaps = features.double() - shared["means"][labels]
    return torch.linalg.vector_norm(gaps, dim=1).sum()


def _added(parts: Sequence[Tensor]) -> Tensor:
    """The sum in the order of the slices, so that its rounding is always the same."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
