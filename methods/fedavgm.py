"""FedAvgM: momentum on the server."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from raysim.core.layout import Layout
from raysim.core.method import Method, ServerView, State


def fedavgm(
    *, beta: float = 0.9, server_lr: float = 1.0, form: Literal["heavy_ball", "nesterov", "damped"] = "heavy_ball"
) -> Method:
    """Server momentum v over the aggregated update Δ, in one of the three forms in use.

    Hsu, Qi, Brown 2019 (arXiv:1909.06335), with u the step that is added to w:
        heavy_ball:  v <- beta v + Δ,               u = server_lr v
        nesterov:    v <- beta v + Δ,               u = server_lr (Δ + beta v)   (torch.optim.SGD(nesterov=True))
        damped:      v <- beta v + (1 - beta) Δ,    u = server_lr v
    FedVG's tables use nesterov with 0.9 on parameters and BatchNorm statistics; here buffers never see momentum, since
    it can drive a running variance below zero.

    Args:
      beta: momentum, 0 <= beta < 1; 0 with server_lr 1 is FedAvg.
      server_lr: > 0.
    Raises:
      ValueError: beta or server_lr out of range.
    """
    if not 0 <= beta < 1:
        raise ValueError(f"fedavgm: beta must be in [0, 1), got {beta}; 0.9 is common")
    if server_lr <= 0:
        raise ValueError(f"fedavgm: server_lr must be > 0, got {server_lr}; 1.0 is common")

    def init(params: Tensor, layout: Layout) -> State:
        return {"velocity": torch.zeros_like(params)}

    def server_update(update: Tensor, state: State, server: ServerView) -> tuple[Tensor, State]:
        velocity = beta * state["velocity"] + (update if form != "damped" else (1 - beta) * update)
        step = update + beta * velocity if form == "nesterov" else velocity
        return server_lr * step, {"velocity": velocity}

    return Method("fedavgm", init=init, server_update=server_update, claims=frozenset({"server-optimizer"}))
