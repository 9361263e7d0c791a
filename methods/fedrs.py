"""FedRS: the logits of classes that a client lacks are damped in local training."""

from __future__ import annotations

import torch
from torch import Tensor

from raysim.core.method import Batch, ClientView, LossFn, Method, Outputs, Share


def fedrs(*, alpha: Share = 0.5) -> Method:
    """Restricted softmax: cross-entropy of o_c = s_c <W_c, h> + b_c.

    Li, Zhan 2021 (KDD, "FedRS: Federated Learning with Restricted Softmax for Label Distribution Non-IID Data"):
        s_c = 1 if the client has class c, else alpha
    The bias, which the authors' head does not have, is not scaled. The scale applies in local training only; evaluation
    and scoring use the plain logits. The released code has s_c = alpha + (1 - alpha) n_c / max n, and takes at least
    five local steps, however few batches a client has.

    Args:
      alpha: scale of an absent class, in [0, 1]; 1 is plain cross-entropy. 0 gives absent classes the logit b_c, not minus
        infinity.
    """

    def loss(inner: LossFn, client: ClientView) -> LossFn:
        scale = torch.where(client.class_counts > 0, 1.0, alpha)
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
