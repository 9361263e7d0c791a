"""FedLC: logits are calibrated by the client's class counts before the softmax."""

from __future__ import annotations

from raysim.core.method import Amount, ClientView, LossFn, Method

#: Smaller counts are raised to this value: a margin of 100 tau, as in FL-bench.
MIN_COUNT = 1e-8


def fedlc(*, tau: Amount = 1.0) -> Method:
    """Cross-entropy of logits with a margin that grows for rare classes: o_c = f_c - tau n_c^(-1/4).

    Zhang et al. 2022 (ICML, "Federated Learning with Label Distribution Skew via Logits Calibration"), n_c the client's
    training examples of class c. As in all re-implementations, the denominator of the softmax has all classes; as
    printed, it leaves out the true class, and the loss has no lower bound. The margin applies in local training only. A
    class without examples has n_c = 1e-8, as in FL-bench: a margin of 100 tau.

    Args:
      tau: size of the margin, >= 0; 0 is plain cross-entropy. Public codes use 1 and 0.1.
    """

    def loss(inner: LossFn, client: ClientView) -> LossFn:
        if tau == 0:
            return inner
        margin = tau * client.class_counts.float().clamp_min(MIN_COUNT).pow(-0.25)
        return lambda outputs, batch: inner(outputs._replace(logits=outputs.logits - margin), batch)

    return Method("fedlc", loss=loss, claims=frozenset({"criterion"}), needs=frozenset({"classes"}))
