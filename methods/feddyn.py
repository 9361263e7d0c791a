"""FedDyn: dynamic regularisation."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor

from raysim.base.conditions import applies_with
from raysim.core.layout import Layout
from raysim.core.method import Amount, Batch, ClientView, GradFn, Method, Positive, ServerView, State

#: Reason why FedDyn and robust rules cannot be combined.
EVERYBODY = {"is_robust": "h sums up every client's update, attackers included, and is added after the rule"}


def feddyn(
    *,
    alpha: Amount = 0.1,
    max_grad_norm: Positive | None = None,
    weights: Annotated[Literal["uniform", "examples"], applies_with("as_in", None)] = "uniform",
    as_in: Literal["fl-bench"] | None = None,
) -> Method:
    """Add a linear and a quadratic term, so that a client's stationary point agrees with the global one.

    Acar et al. 2021 (arXiv:2111.04263), in the un-scaled form of the authors' code, with h_k the sum of this client's
    past updates (0 at first; the paper's ∇L_k is -alpha h_k), s the broadcast point, N all clients, S those of the round:
        client:  minimise f_k(y) + alpha <h_k, y> + (alpha/2) ||y - s||^2:   g(y) + alpha (y - s + h_k) in every step,
                 then h_k <- h_k + (y_k - s)
        server:  w+ = mean_S y_k + h,   h = (1/N) sum over all clients of h_k
    The server's step does not depend on alpha: with alpha -> 0 only the clients become FedAvg's. Participants are
    averaged uniformly, or by `weights`, unless a method that claims the weights replaces or mixes this average; h keeps
    its factor 1/N. The server's model is evaluated (the authors' figures show the mean of every client's latest model).
    A round in which no client took a step changes nothing. Buffers and personal leaves have no h. The authors' code
    also divides alpha by the client's relative size; raysim does not, since clients do not know the mean size.

    `as_in: fl-bench` is the rule behind FedVG's tables: the quadratic term is missing, which pushes y away from 0
    without bound, and participants are averaged by their examples. FedVG's values are alpha 0.1, max_grad_norm 10. Left
    out: the h of BatchNorm statistics, a fault by which FedVG + FedDyn writes to unused tensors from round 2 on, and
    dropping of training batches with one example also without BatchNorm.

    Args:
      alpha: strength of both terms, >= 0. The authors use 0.01 on CIFAR-10, FedVG 0.1.
      max_grad_norm: largest L2 norm, > 0, of the gradient of loss and linear part, g(y) + alpha (h_k - s); a larger
        gradient is scaled down, and alpha y is added afterwards, like weight decay. The authors' code does so with 10.
        null: no clipping.
      weights: weights of the mean over participants: "uniform", 1/K; "examples", shares of the examples, as FedVG's
        paper describes FedDyn (section 3.2.3).
      as_in: "fl-bench": the rule behind FedVG's tables, with weights by examples and without the quadratic term.
    """
    is_quadratic = as_in is None
    base_weights: Literal["uniform", "examples"] = "examples" if as_in else weights

    def init(params: Tensor, layout: Layout) -> State:
        return {"h": torch.zeros_like(params)}

    def grads(inner: GradFn, client: ClientView) -> GradFn:
        h = client.memory.get("h")
        centre = client.start.clone() if h is None else client.start - h
        work = torch.empty_like(centre)

        def exact(params: Tensor, batch: Batch) -> Tensor:
            # The difference first: it is exactly zero at s as long as h_k is zero.
            return inner(params, batch).add_(torch.sub(params, centre, out=work), alpha=alpha)

        def clipped(params: Tensor, batch: Batch) -> Tensor:
            grad = inner(params, batch).sub_(centre, alpha=alpha)
            if max_grad_norm is not None:
                grad.mul_((max_grad_norm / (grad.norm() + 1e-6)).clamp(max=1.0))  # as torch's clip_grad_norm_
            return grad.add_(params, alpha=alpha) if is_quadratic else grad

        return exact if is_quadratic and max_grad_norm is None else clipped

    def report(client: ClientView) -> dict[str, Tensor]:
        if client.num_steps:
            update = client.layout.zero_personal_(client.params - client.start)
            h = client.memory.get("h")
            client.memory["h"] = update if h is None else h + update
        return {}

    def server_update(update: Tensor, state: State, server: ServerView) -> tuple[Tensor, State]:
        share = torch.full((len(server.clients),), 1 / server.population, dtype=torch.float64)
        moved = server.total("update", {leaf.name: share for leaf in server.layout.shared})
        h = state["h"] + moved[: server.layout.num_params].float()
        server.log("h_norm", float(h.norm()))
        return (update + h if bool(server.is_active.any()) else update), {"h": h}

    return Method(
        "feddyn",
        init=init,
        grads=grads,
        report=report,
        server_update=server_update,
        needs=frozenset({"client-memory"}),
        excludes=EVERYBODY,
        base_weights=base_weights,
    )
