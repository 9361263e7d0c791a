"""Aggregation weights from a score of every client: the common part of fedvg, fedvg_loss and fedvg_cosine.

A `ClientScore` defines the values that a client reports or the server computes, and the weights from these values.
`weights_from_score` returns a method that collects and logs the values, and replaces the given weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor

from raysim.core.layout import Layout
from raysim.core.method import ClientView, Method, ServerView, State
from raysim.core.weights import RightMap, Weights, normalised

Granularity = Literal["model", "layer", "block", "auto"]
#: Granularities that "auto" compares; ties go to the first.
GRANULARITIES = ("model", "layer", "block")

Part = Literal["all", "body", "head", "adapters"]
ADAPTERS = "*.lora_[AB].*"
#: The weights that each choice of leaves claims.
CLAIMS: dict[Part, str] = {
    "all": "weights:*",
    "body": "weights:*!weights:@head.*",
    "head": "weights:@head.*",
    "adapters": f"weights:{ADAPTERS}",
}


@dataclass(frozen=True)
class ClientScore:
    """Score of the clients.

    Attributes:
      name: name of the values in reports and records.
      weights: weights(part, values, usable, granularity) -> leaf name -> (K,) float64, summing to 1, or all 0.
        part: the layout of the chosen leaves; values: (K, ...) float64, inf in a row marks a client that diverged;
        usable: (K,) bool.
      measure: measure(client) -> (...) float64, what a client reports; None: `values` needs no report.
      values: values(server) -> (K, ...) float64, computed by the server.
      logged: logged(values, part) -> (the array in the records, names of its columns).
    """

    name: str
    weights: Callable[[Layout, Tensor, Tensor, str], Weights]
    measure: Callable[[ClientView], Tensor] | None = None
    values: Callable[[ServerView], Tensor] | None = None
    logged: Callable[[Tensor, Layout], tuple[Tensor, Sequence[str]]] = lambda values, part: (values, leaf_names(part))


def weights_from_score(
    name: str,
    score: ClientScore,
    *,
    granularity: Granularity = "model",
    leaves: Part = "all",
    mix: Literal["replace", "average"] = "replace",
    every: int = 1,
    needs: Sequence[str] = (),
    init: Callable[[Tensor, Layout], State] | None = None,
) -> Method:
    """Return a method that weights clients by a score.

    Args:
      granularity: one weight for the model, for each layer or layer block; "auto": in every round the granularity whose
        aggregated model has the lowest loss on the validation set, logged as 0, 1 or 2.
      leaves: leaves that get the weights; all other leaves keep their weights.
      mix: "average" takes the mean of these weights and the given weights.
      every: rounds between reports, see `reported`.
      needs, init: see `Method`.
    """

    def weigh(weights: Weights, server: ServerView) -> Weights:
        part = part_of(server.layout, leaves)
        values = score.values(server) if score.values is not None else server.report[score.name]
        server.log(score.name, *score.logged(values, part))
        if every > 1:
            server.log("scored", float(server.report["scored"].sum()))
        usable = server.is_active & ~values.flatten(1).isinf().any(dim=1)

        def weighed(granularity: str) -> Weights:
            return laid_over(weights, score.weights(part, values, usable, granularity), usable, mix)

        return weighed(granularity) if granularity != "auto" else lowest_loss(list(map(weighed, GRANULARITIES)), server)

    needed = {*needs, *({"validation-set"} if granularity == "auto" else ())}
    needed |= {"client-memory"} if every > 1 else set()
    needed |= {"lora"} if leaves == "adapters" else set()
    report = reported(score, every) if score.measure is not None else None
    claims = frozenset({CLAIMS[leaves]})
    return Method(name, init=init, report=report, weigh=weigh, claims=claims, needs=frozenset(needed))


def reported(score: ClientScore, every: int) -> Callable[[ClientView], dict[str, Tensor]]:
    """Return the `report` hook: a client's score, measured in every n-th round, from the first round on.

    In other rounds a client keeps its last score, and only clients without a score are measured (`scored` is 1 for
    them).
    """
    measure = score.measure
    assert measure is not None

    def report(client: ClientView) -> dict[str, Tensor]:
        if every == 1:
            return {score.name: measure(client)}
        is_due = score.name not in client.memory or client.round_index % every == 0
        values = measure(client) if is_due else client.memory[score.name].cpu()
        if is_due and client.num_steps > 0:
            client.memory[score.name] = values
        return {score.name: values, "scored": torch.tensor(float(is_due))}

    return report


def laid_over(weights: Weights, ours: Weights, usable: Tensor, mix: str) -> Weights:
    """Return the given weights, replaced by ours, or the mean of both.

    Leaves in which all our weights are 0 keep the given weights, over usable clients. usable: (K,) bool.
    """
    chosen = {name: ours[name] for name in weights if name in ours}
    for name, weight in chosen.items():
        assert isinstance(weight, Tensor)
        if mix == "average" or not bool(weight.any()):
            given = _among(weights[name], usable)
            chosen[name] = (given + weight) / 2 if bool(weight.any()) else given
    return {**weights, **chosen}


def lowest_loss(candidates: Sequence[Weights], server: ServerView) -> Weights:
    """Return the candidate weights whose aggregated model has the lowest validation loss; ties go to the first."""
    losses = [server.validation_loss(candidate) for candidate in candidates]
    losses = [loss if math.isfinite(loss) else math.inf for loss in losses]
    chosen = losses.index(min(losses))
    server.log("granularity", chosen)
    return candidates[chosen]


def part_of(layout: Layout, leaves: Part) -> Layout:
    """Return the layout of the chosen leaves, with unchanged offsets."""
    if leaves == "all":
        return layout
    if leaves == "adapters":
        return Layout(tuple(leaf for leaf in layout.leaves if fnmatchcase(leaf.name, ADAPTERS)))
    return Layout(tuple(leaf for leaf in layout.leaves if leaf.is_head == (leaves == "head")))


def leaf_names(part: Layout) -> list[str]:
    """Return the names of the parameter leaves, in order."""
    return [leaf.name for leaf in part.params]


def inverse_weights(sizes: Tensor, usable: Tensor, eps: float) -> Tensor:
    """s_k = (1 / (G_k + eps)) / sum_j (1 / (G_j + eps)) over usable clients (FedVG, eq. 5).

    Args:
      sizes: (K,) float64, G_k >= 0; usable: (K,) bool.
    Returns:
      (K,) float64 summing to 1 within 1e-12, 0 for unusable clients.
    """
    denominators = torch.where(usable, sizes + eps, torch.inf)
    if bool((denominators == 0).any()):  # eps = 0 and scores of 0: clients with score 0 share the weight
        return normalised((denominators == 0).double())
    if not bool(denominators.isfinite().any()):
        return torch.zeros_like(sizes)
    return normalised(denominators.min() / denominators)  # scaled so that no inverse overflows


def _among(weight: Tensor | RightMap, usable: Tensor) -> Tensor:
    """(K,): the given weights over usable clients alone."""
    assert isinstance(weight, Tensor)  # `check` refuses another method that decides weights
    return normalised(torch.where(usable, weight, torch.zeros_like(weight)))
