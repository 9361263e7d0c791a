"""Elastic aggregation: sensitive parameters move less."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from raysim.base.errors import MethodError
from raysim.core.method import Amount, Batch, ClientView, Decay, Fraction, Method, Outputs, ServerView, State, Vector
from raysim.core.weights import RightMap, normalised


def elastic(
    *, tau: Amount = 0.5, mu: Decay = 0.95, sample_ratio: Fraction = 0.3, as_in: Literal["fl-bench"] | None = None
) -> Method:
    """Scales the aggregated update by 1 + tau - sensitivity, element by element.

    Chen et al. 2023, "Elastic Aggregation for Federated Optimization" (CVPR), eqs. 5 to 7 as re-implementations quote
    them; the authors published no code. With s the broadcast point, F the logits, p_k the round's weights:
        client:  Omega_k <- mu Omega_k + (1 - mu) |d||F(s; x)||_2 / dw| over the batches of a sample, from 0
        server:  Omega = sum_k p_k Omega_k,   zeta = 1 + tau - Omega / max(Omega),   w+ = w + zeta * sum_k p_k (y_k - s)
    zeta lies in [tau, 1 + tau]. ||F||_2 is computed for each example and averaged over the batch. p_k is the weight
    after all `weigh` hooks, such as FedVG's s_k, scaled to sum to one. Omega_k is computed after training, but at s,
    and in training mode, so BatchNorm uses the batch's statistics. Buffers are aggregated without zeta. If no Omega is
    above 0, zeta is 1 + tau.

    `as_in: fl-bench` is the rule behind FedVG's tables: cross-entropy with labels, the squared L2 norm of each tensor's
    gradient as its Omega, and as maximum the largest Omega_k of any client. Left out: taking the sample away from
    training (the other methods train on all examples), evaluation mode, sums that run on over batches, clients and
    rounds, Omega = 1 where a gradient is exactly 0, BatchNorm statistics that move by tau, and dropping of training
    batches with one example also without BatchNorm.

    Args:
      tau: factor of the most sensitive element, >= 0; an element of sensitivity 0 has 1 + tau. The paper and FedVG's
        tables use 0.5.
      mu: decay of the running average over batches, in [0, 1); 0.95 in the paper and in FedVG's tables.
      sample_ratio: share of the local examples on which Omega is computed, in (0, 1], drawn again in every round.
        FedVG's tables use 0.3, which costs less than a third of a local epoch.
      as_in: "fl-bench": the rule behind FedVG's tables, with the sensitivity of whole tensors instead of elements.
    Raises:
      MethodError: another method's weights are linear maps, or one per row together with as_in.
    """
    by_element = as_in is None

    def report(client: ClientView) -> dict[str, Tensor | Vector]:
        layout = client.layout
        mean = torch.zeros_like(client.start) if by_element else torch.zeros(len(layout.params), dtype=torch.float64)
        if client.num_steps:
            for batch in sample(client, sample_ratio):
                signal = output_norm if by_element else client.model.criterion
                gradient = client.model.gradient(signal, client.start, batch)
                size = gradient.abs_() if by_element else layout.norms(gradient).square()
                mean.mul_(mu).add_(size, alpha=1 - mu)
        return {"omega": Vector(mean) if by_element else mean}

    def server_update(update: Tensor, state: State, server: ServerView) -> tuple[Tensor, State]:
        leaves = server.layout.params
        shares = {
            leaf.name: _shares(server.weights[leaf.name], leaf.name, by_element)
            for leaf in leaves
            if leaf.name in server.weights
        }
        if by_element:
            omega = server.total("omega", {**shares})
            zeta = elasticity(omega, omega.max(), tau)
        else:
            zeta = elasticity(*_of_tensors(server, shares), tau)
            zeta = zeta.repeat_interleave(torch.tensor([leaf.size for leaf in leaves]))
        means = torch.stack([zeta[leaf.offset : leaf.end].mean() for leaf in leaves])
        server.log("zeta", means, [leaf.name for leaf in leaves])
        return update * zeta.to(update.dtype), state

    excludes = {"is_robust": "sensitivities are means over every client, attackers too, and scale what the rule left"}
    return Method("elastic", report=report, server_update=server_update, excludes=excludes)


def elasticity(omega: Tensor, largest: Tensor, tau: float) -> Tensor:
    """zeta = 1 + tau - Omega / max(Omega), in [tau, 1 + tau].

    Args:
      omega: (n,) float64, >= 0; largest: (n,) or scalar, >= omega.
    """
    return 1 + tau - omega / largest.clamp_min(torch.finfo(largest.dtype).tiny)


def _of_tensors(server: ServerView, shares: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Omega of each parameter leaf, and the largest Omega_k of any client: (parameter leaves,) float64 each."""
    each = server.report["omega"]  # (K, parameter leaves)
    nothing = torch.zeros(len(each), dtype=torch.float64)
    share = torch.stack([shares.get(leaf.name, nothing) for leaf in server.layout.params], dim=1)
    total = (share * each).sum(dim=0)
    return total, each.amax(dim=0) if len(each) else total  # zeros for an empty cohort


def _shares(weight: Tensor | RightMap, name: str, by_element: bool) -> Tensor:
    """Return the round's weights on a leaf, normalised to sum to one, so that Omega is an average."""
    if isinstance(weight, RightMap) or (weight.dim() > 1 and not by_element):
        kind = "a linear map" if isinstance(weight, RightMap) else "one per row"
        raise MethodError(
            f"elastic cannot average sensitivities of {name}: the weight is {kind}",
            "server_update",
            "remove elastic or the method that makes the weights (one weight per row works without as_in)",
        )
    return normalised(weight)


def output_norm(outputs: Outputs, batch: Batch) -> Tensor:
    """Mean L2 norm of the logits of a batch, of each token in a sequence; needs no targets. Scalar."""
    norms: Tensor = torch.linalg.vector_norm(outputs.logits, dim=-1)
    return norms.mean()


def sample(client: ClientView, ratio: float) -> Iterator[Batch]:
    """Yield batches of the client's batch size from a new random sample of at least two of its examples.

    A last batch of one example joins the one before it (BatchNorm cannot take it).
    """
    count = max(min(2, client.num_examples), int(ratio * client.num_examples))
    chosen = torch.zeros(client.num_examples, dtype=torch.bool)
    chosen[torch.randperm(client.num_examples, generator=client.generator)[:count]] = True
    rest: Batch | None = None  # at most batch_size + 1 examples
    begin = 0
    for batch in client.batches():
        end = begin + len(batch.targets)
        is_drawn = chosen[begin:end].to(batch.targets.device)
        begin = end
        images, labels = batch.inputs[is_drawn], batch.targets[is_drawn]
        if rest is not None:
            images, labels = torch.cat([rest.inputs, images]), torch.cat([rest.targets, labels])
        while len(labels) > client.batch_size + 1:
            yield Batch(images[: client.batch_size], labels[: client.batch_size])
            images, labels = images[client.batch_size :], labels[client.batch_size :]
        rest = Batch(images, labels)
    if rest is not None:
        yield rest
