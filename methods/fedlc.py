"""FedLC: logits are calibrated by the client's class counts before the softmax."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from raysim.core.method import Amount, Batch, ClientView, LossFn, Method, Outputs

#: Smaller counts are raised to this value: a margin of 100 tau, as in FL-bench.
MIN_COUNT = 1e-8


def fedlc(*, tau: Amount = 1.0, form: Literal["usable", "literal"] = "usable") -> Method:
    """Cross-entropy of logits with a margin that grows for rare classes: o_c = f_c - tau n_c^(-1/4).

    Zhang et al. 2022 (ICML, "Federated Learning with Label Distribution Skew via Logits Calibration"), n_c the client's
    training examples of class c:
        usable (all re-implementations):   -log(e^(o_y) / sum_c e^(o_c))
        literal (as printed):              -log(e^(o_y) / sum_(c != y) e^(o_c)), which has no lower bound
    The margin applies in local training only. A class without examples has n_c = 1e-8, as in FL-bench: a margin of 100
    tau.

    Args:
      tau: size of the margin, >= 0; 0 is plain cross-entropy (usable). Public codes use 1 and 0.1.
      form: one of the two losses in the table above.
    """

    def loss(inner: LossFn, client: ClientView) -> LossFn:
        margin = tau * client.class_counts.float().clamp_min(MIN_COUNT).pow(-0.25) if tau > 0 else None

        def value(outputs: Outputs, batch: Batch) -> Tensor:
            logits = outputs.logits if margin is None else outputs.logits - margin
            return (
                literal_loss(logits, batch.targets)
                if form == "literal"
                else inner(outputs._replace(logits=logits), batch)
            )

        return inner if margin is None and form == "usable" else value

    return Method("fedlc", loss=loss, claims=frozenset({"criterion"}), needs=frozenset({"classes"}))


def literal_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """-log(e^(o_y) / sum_(c != y) e^(o_c)), mean over the batch; equals -logit(p_y). logits: (B, classes), two or more."""
    own = labels[:, None]
    others = logits.scatter(1, own, -torch.inf).logsumexp(dim=1)
    return (others - logits.gather(1, own)[:, 0]).mean()
