"""FedNova: normalised averaging of unequal local work."""

from __future__ import annotations

import torch
from torch import Tensor

from raysim.base.errors import MethodError
from raysim.core.method import Amount, ClientView, Method, ServerView
from raysim.core.weights import RightMap, Weights


def fednova(*, mu: Amount = 0.0) -> Method:
    """Divides each update by the client's effective number of steps, and multiplies the sum by the mean number.

    Wang et al. 2020 (arXiv:2007.07481), with p_k the weights so far and Δ_k = -lr sum_j a_j g_j:
        w+ = w + tau_eff sum_k p_k Δ_k / ||a_k||_1,   tau_eff = sum_k p_k ||a_k||_1
    ||a_k||_1 is K_k for plain SGD and (K - rho (1 - rho^K) / (1 - rho)) / (1 - rho) with momentum rho. FedNova
    multiplies the given weights (by examples, uniform, or FedVG's if listed after fedvg) leaf by leaf; the products
    need not sum to one. Buffers keep their weights (in the authors' code buffers stay local). Clipped gradients are
    treated as the gradients. The authors' slow momentum gmf is `fedavgm` with beta = gmf, as long as local.lr does not
    decay.

    Args:
      mu: mu of `fedprox`, if fedprox is listed too: every step then multiplies the earlier steps by 1 - lr mu, and the
        factor of the sum becomes the weighted mean of K_k, as in the authors' code. With momentum, raysim computes
        tau_k step by step, with the pull and momentum in each step; the authors' code applies the rule for the pull
        and then the rule for momentum.
    Raises:
      MethodError: another method's weight is a linear map (regmean).
    """

    def report(client: ClientView) -> dict[str, Tensor]:
        steps = effective_steps(client.num_steps, momentum=client.momentum, shrink=client.lr * mu)
        return {"effective_steps": torch.tensor(steps, dtype=torch.float64)}

    def weigh(weights: Weights, server: ServerView) -> Weights:
        effective = server.report["effective_steps"]
        wanted = server.num_steps.double() if mu else effective
        params = {leaf.name for leaf in server.layout.params}
        server.log("effective_steps", effective)
        return {
            name: _normalised_by(weight, effective, wanted, name) if name in params else weight
            for name, weight in weights.items()
        }

    return Method("fednova", report=report, weigh=weigh, needs=frozenset({"sgd"}))


def effective_steps(num_steps: int, *, momentum: float = 0.0, shrink: float = 0.0) -> float:
    """||a||_1: how often a gradient that never changes enters an update of num_steps steps, in units of -lr.

    Args:
      momentum: rho of v <- rho v + g, y <- y - lr v.
      shrink: lr mu of a pull mu (y - s) that is part of g.
    """
    velocity = total = 0.0
    for _ in range(num_steps):
        velocity = momentum * velocity + 1 - shrink * total
        total += velocity
    return total


def _normalised_by(weight: Tensor | RightMap, effective: Tensor, wanted: Tensor, name: str) -> Tensor:
    """p_k tau_eff / ||a_k||_1 with tau_eff the mean of `wanted` under p; weights of 0 stay 0.

    Args:
      weight: (K, ...) float64; effective, wanted: (K,) float64.
    """
    if isinstance(weight, RightMap):
        raise MethodError(
            f"fednova cannot normalise {name}: its weight is a linear map",
            "weigh",
            "remove fednova or the method that makes the weights",
        )
    shape = (-1, *[1] * (weight.dim() - 1))
    effective, wanted = effective.view(shape), wanted.view(shape)
    total = weight.sum(dim=0, keepdim=True)
    mean = (weight * wanted).sum(dim=0, keepdim=True) / torch.where(total == 0, 1.0, total)
    return torch.where(effective > 0, weight * mean / effective.clamp_min(1e-300), 0.0)
