"""Score of a client: its validation loss, which FedVG's paper calls a worse score than the gradient."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from methods.scored import ClientScore, Part, inverse_weights, weights_from_score
from raysim.core.layout import Layout
from raysim.core.method import Amount, ClientView, Count, Method
from raysim.core.weights import Weights


def fedvg_loss(
    *,
    leaves: Part = "all",
    mix: Literal["replace", "average"] = "replace",
    val_mode: Literal["train", "eval"] = "train",
    every: Count = 1,
    as_in: Literal["release"] | None = None,
    eps: Amount = 1e-8,
) -> Method:
    """A client's weight is inverse to the loss of its model on the server's validation data.

    FedVG (Devkota et al., arXiv:2602.21399), eq. 5 with G_k the mean cross-entropy of client k's model on the validation
    set: one number a client, so one weight for all of the chosen leaves.

    Args:
      leaves: parameters that get these weights: all, the classifier ("head"), everything but the classifier ("body"),
        or the adapters of model.lora.
      mix: "replace": these weights alone; "average": the mean of these weights and the clients' shares of the examples;
        if another method of the run, such as `scaffold`, asks for equal weights, equal weights take the place of the
        shares.
      val_mode: mode of the network while scoring, which changes the scores of networks with BatchNorm. The released
        code uses "train".
      every: n: clients are scored in every n-th round, from the first round on. In the other rounds, a client keeps its
        last score (the metric `scored` is the number of scored clients).
      as_in: "release" requires data.validation_set.order: client, the order in which the released code scores the
        validation rows, and changes nothing else.
      eps: the constant of eq. 5, >= 0.
    Degenerate cases: a client without a step, or with a non-finite loss, gets weight 0; if no client is left, the global
    model stays.
    """

    def measure(client: ClientView) -> Tensor:
        loss = torch.tensor([client.validation_loss(val_mode)], dtype=torch.float64)
        return loss.nan_to_num(nan=torch.inf, posinf=torch.inf)

    def weights(part: Layout, losses: Tensor, usable: Tensor, granularity: str) -> Weights:
        return dict.fromkeys((leaf.name for leaf in part.leaves), inverse_weights(losses[:, 0], usable, eps))

    score = ClientScore("loss", weights, measure=measure, logged=lambda losses, part: (losses, ["loss"]))
    needs = ["validation-set", *(["client-order"] if as_in else [])]
    return weights_from_score("fedvg_loss", score, leaves=leaves, mix=mix, every=every, needs=needs)
