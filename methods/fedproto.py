"""FedProto: features are pulled to global class prototypes."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from methods.moments import class_means, local_features
from raysim.base.conditions import applies_with
from raysim.core.layout import Layout
from raysim.core.method import Amount, Batch, ClientView, LossFn, Message, Method, Outputs, Partition, ServerView, State
from raysim.core.weights import normalised


def fedproto(
    *,
    strength: Amount = 1.0,
    share: Annotated[Literal["weights", "nothing"], applies_with("as_in", None)] = "weights",
    prototypes: Annotated[Literal["clients", "examples"], applies_with("as_in", None)] = "clients",
    as_in: Literal["fed-mammoth"] | None = None,
) -> Method:
    """Adds strength * MSE(z, P_y) to the loss, P_c the global prototype: the mean of the clients' mean features of c.

    Tan et al. 2022 (AAAI). z is the input of the head; the MSE is over batch and dimensions, and examples of a class
    without a prototype add nothing, so the first round is without the term. Client means are taken after training, in
    eval mode, over all local examples (the released code: during the last epoch). A class that is absent from a round
    keeps its prototype.

    Args:
      strength: strength of the pull to the prototypes, >= 0; 1 in the released code, 0.1 in LIVAR's baseline.
      share: what the clients share in addition to prototypes. "nothing": the original, in which every client keeps its own
        model, scored by `clients/personal_accuracy_*` (`clients/expected_personal_accuracy_*` if clients have no test
        rows), while the global model of `server/*` stays at its initial values. "weights": models are averaged as well,
        as in LIVAR's comparison.
      prototypes: the prototype of a class is the mean of the mean features of the clients that hold the class
        ("clients", the released code), or the mean over all examples of the class ("examples", the paper).
      as_in: "fed-mammoth", LIVAR's baseline: the loss gains strength times the distance of the mean feature of each
        class of a batch to its prototype, summed over classes; prototypes over examples; uniform aggregation weights.
        The code fails at a class without a prototype; raysim adds nothing to the loss for such a class. The code
        computes prototypes from pixels that were not normalised, unlike the inputs of training; raysim takes the
        model's own inputs.
    Degenerate cases: clients without a step have no effect on prototypes.
    Raises:
      ValueError: when the run starts, a model without a trained head.
    """
    over_examples = prototypes == "examples" or as_in == "fed-mammoth"

    def init(params: Tensor, layout: Layout) -> State:
        head = [leaf for leaf in layout.params if leaf.is_head and len(leaf.shape) == 2]
        if not head:
            raise ValueError("fedproto: the head is not trained, so classes and width are unknown; train the head")
        return {"prototypes": torch.full(head[0].shape, torch.nan)}

    def broadcast(message: Message, state: State) -> Message:
        return Message(message.params, {"prototypes": state["prototypes"]})

    def loss(inner: LossFn, client: ClientView) -> LossFn:
        table = client.message["prototypes"]
        is_known = ~table.isnan().any(dim=1)
        if strength == 0 or not bool(is_known.any()):
            return inner
        table = table.nan_to_num(0.0)
        term = batch_mean_distance if as_in == "fed-mammoth" else prototype_distance

        def value(outputs: Outputs, batch: Batch) -> Tensor:
            assert outputs.features is not None
            return inner(outputs, batch) + strength * term(outputs.features, batch.targets, table, is_known)

        return value

    def server_update(update: Tensor, state: State, server: ServerView) -> tuple[Tensor, State]:
        counts = server.report["counts"] * server.is_active[:, None]
        table = merged_prototypes(server.report["means"], counts, over_examples=over_examples)
        return update, {"prototypes": torch.where(table.isnan(), state["prototypes"], table)}

    return Method(
        "fedproto",
        partition=shares_nothing if share == "nothing" else None,
        init=init,
        broadcast=broadcast,
        loss=loss,
        report=client_prototypes,
        server_update=server_update,
        needs=frozenset({"classes", "features", "linear-head"} | ({"client-memory"} if share == "nothing" else set())),
        excludes={"is_robust": "prototypes are means over every client, attackers too, and clients train towards them"},
        base_weights="uniform" if as_in == "fed-mammoth" else "examples",
    )


def shares_nothing(part: Partition) -> Partition:
    """Every client keeps a model of its own."""
    return Partition(part.trained, frozenset(), part.head)


def client_prototypes(client: ClientView) -> dict[str, Tensor]:
    """means (classes, width), NaN for a class that the client lacks, and counts (classes,), of the trained model's features."""
    features = local_features(client)
    means = class_means(features.values, features.labels, len(client.class_counts))
    return {"means": means.float(), "counts": client.class_counts}


def prototype_distance(features: Tensor, labels: Tensor, table: Tensor, is_known: Tensor) -> Tensor:
    """Mean over batch and dimensions of (z - P_y)^2; 0 for examples whose class has no prototype.

    Args:
      features: (B, width); labels: (B,); table: (classes, width); is_known: (classes,) bool.
    """
    target = torch.where(is_known[labels, None], table[labels], features.detach())
    return F.mse_loss(features, target)


def batch_mean_distance(features: Tensor, labels: Tensor, table: Tensor, is_known: Tensor) -> Tensor:
    """fed-mammoth: sum over the classes of the batch of the mean over dimensions of (mean z - P_c)^2."""
    members = F.one_hot(labels, len(table)).to(features.dtype)
    counts = members.sum(0)
    chosen = is_known & (counts > 0)
    means = (members.T @ features)[chosen] / counts[chosen, None]
    return (means - table[chosen]).square().mean(1).sum()


def merged_prototypes(means: Tensor, counts: Tensor, *, over_examples: bool) -> Tensor:
    """Global prototypes.

    Args:
      means: (K, classes, width), any value where the count is 0; counts: (K, classes).
    Returns:
      (classes, width) float32; NaN for a class that no client has.
    """
    weights = normalised((counts if over_examples else counts > 0).double())
    table = (weights[:, :, None] * torch.where(counts[:, :, None] > 0, means.double(), 0.0)).sum(0)
    return torch.where((counts.sum(0) > 0)[:, None], table, torch.nan).float()
