"""FedAvgM: momentum on the server."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor

from raysim.base.conditions import applies_with
from raysim.core.layout import Layout
from raysim.core.method import Decay, Method, Positive, ServerView, State


def fedavgm(
    *,
    beta: Decay = 0.9,
    server_lr: Positive = 1.0,
    form: Annotated[Literal["heavy_ball", "nesterov", "damped"], applies_with("as_in", None)] = "heavy_ball",
    as_in: Literal["fl-bench"] | None = None,
) -> Method:
    """Server momentum v over the aggregated update Δ, in one of the three forms in use.

    Hsu, Qi, Brown 2019 (arXiv:1909.06335), with u the step that is added to w:
        heavy_ball:  v <- beta v + Δ,               u = server_lr v
        nesterov:    v <- beta v + Δ,               u = server_lr (Δ + beta v)   (torch.optim.SGD(nesterov=True))
        damped:      v <- beta v + (1 - beta) Δ,    u = server_lr v
    Buffers have no momentum, since momentum can drive a running variance below zero.

    `as_in: fl-bench` is the rule behind FedVG's tables: nesterov, on BatchNorm statistics as well, with the risk of a
    negative variance, which makes the model's outputs NaN. Left out: momentum of the counters of batches.

    Args:
      beta: momentum, 0 <= beta < 1; 0 with server_lr 1 is FedAvg.
      server_lr: factor of the step, > 0.
      form: one of the three forms in the table above.
      as_in: "fl-bench": the rule behind FedVG's tables, nesterov, applied to BatchNorm statistics as well.
    """

    if as_in:
        form = "nesterov"

    def init(params: Tensor, layout: Layout) -> State:
        return {"velocity": params.new_zeros(layout.num_state) if as_in else torch.zeros_like(params)}

    def stepped(update: Tensor, state: State) -> tuple[Tensor, Tensor]:
        """(u, v)."""
        velocity = beta * state["velocity"] + (update if form != "damped" else (1 - beta) * update)
        step = update + beta * velocity if form == "nesterov" else velocity
        return server_lr * step, velocity

    def server_update(update: Tensor, state: State, server: ServerView) -> tuple[Tensor, State]:
        if not as_in:
            step, velocity = stepped(update, state)
            return step, {"velocity": velocity}
        buffers = {leaf.name: server.weights[leaf.name] for leaf in server.layout.buffers if leaf.is_shared}
        moved = server.total("update", buffers)[server.layout.num_params :].float()
        step, velocity = stepped(torch.cat([update, moved]), state)
        server.move_buffers(step[len(update) :] - moved)
        return step[: len(update)], {"velocity": velocity}

    return Method("fedavgm", init=init, server_update=server_update, claims=frozenset({"server-optimizer"}))
