"""FedRS: the logits of classes that a client lacks are damped in local training."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor

from raysim.base.counting import counts_with, counts_without
from raysim.core.method import Batch, ClientView, LossFn, Method, Outputs


def fedrs(
    *,
    alpha: float = 0.5,
    form: Annotated[Literal["binary", "continuous"], counts_without("alpha", 1)] = "binary",
    count_as_missing: Annotated[int, counts_without("alpha", 1), counts_with("form", "binary")] = 0,
) -> Method:
    """Restricted softmax: cross-entropy of o_c = s_c <W_c, h> + b_c.

    Li, Zhan 2021 (KDD, "FedRS: Federated Learning with Restricted Softmax for Label Distribution Non-IID Data"):
        binary (the paper):                  s_c = 1 if the client has class c, else alpha
        continuous (the released code):      s_c = alpha + (1 - alpha) n_c / max n
    The bias, which the authors' head does not have, is not scaled. In local training only; evaluation and scoring use
    the plain logits. The released code takes at least five local steps, however few batches a client has.

    Args:
      alpha: scale of an absent class, in [0, 1]; 1 is plain cross-entropy. 0 gives absent classes the logit b_c, not minus
        infinity.
      form: which of the two scales above.
      count_as_missing: binary form: classes with at most that many examples count as absent.
    Raises:
      ValueError: alpha or count_as_missing out of range.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"fedrs: alpha must be in [0, 1], got {alpha}; 0.5 is the paper's, 1 is plain cross-entropy")
    if count_as_missing < 0:
        raise ValueError(f"fedrs: count_as_missing must be >= 0, got {count_as_missing}")

    def loss(inner: LossFn, client: ClientView) -> LossFn:
        if form == "binary":
            scale = class_scale(client.class_counts > count_as_missing, alpha)
        else:
            scale = class_scale(client.class_counts / client.class_counts.max().clamp_min(1), alpha)
        if bool((scale == 1).all()):
            return inner
        head = client.model.module.get_submodule(client.head)

        def value(outputs: Outputs, batch: Batch) -> Tensor:
            logits = scale * outputs.logits
            if isinstance(head.bias, Tensor):
                logits = logits + (1 - scale) * head.bias
            return inner(outputs._replace(logits=logits), batch)

        return value

    return Method("fedrs", loss=loss, claims=frozenset({"criterion"}), needs=frozenset({"classes", "linear-head"}))


def class_scale(presence: Tensor, alpha: float) -> Tensor:
    """(classes,) float32: alpha + (1 - alpha) presence, exactly 1 where presence is 1."""
    presence = presence.float()
    return torch.where(presence == 1, torch.ones_like(presence), alpha + (1 - alpha) * presence)
