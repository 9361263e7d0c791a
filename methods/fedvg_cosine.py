"""Score of a client: the cosine of its update and the descent direction on the validation data."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from methods.agreement import agreements_of, cosines_of, tensor_cosines, weights_from_agreements
from methods.moments import refuse_personal
from methods.scored import ClientScore, Granularity, Part, leaf_names, part_of, weights_from_score
from raysim.core.layout import Layout
from raysim.core.method import Method, ServerView, State
from raysim.core.weights import Weights


def fedvg_cosine(
    *,
    granularity: Granularity = "model",
    leaves: Part = "all",
    mix: Literal["replace", "average"] = "replace",
    val_mode: Literal["train", "eval"] = "train",
) -> Method:
    """A client's weight grows with the agreement of its update and the gradient on the server's validation data.

        s_k = max(0, c_k) / sum_j max(0, c_j)
    with c_k the cosine of client k's update and the descent direction -grad L_val at the broadcast point, over the model,
    a layer or a layer block. The score is FLTrust's trust score (Cao et al., NDSS 2021, arXiv:2012.13995), with a
    gradient in place of the server's local training, and without FLTrust's rescaling of the updates. The method is
    ours, not FedVG's. It costs one gradient per round, not one per client.

    Args:
      granularity: number of weights of a client: one for the whole model, each tensor ("layer"), or each layer block.
        "auto" uses in every round the granularity whose aggregated model has the lowest loss on the validation set.
      leaves: parameters that get these weights and whose cosines are used: all, the classifier ("head"), everything but
        the classifier ("body"), or the adapters of model.lora.
      mix: "replace": these weights alone; "average": the mean of these weights and the clients' shares of the examples;
        if another method of the run, such as `scaffold`, asks for equal weights, equal weights take the place of the
        shares.
      val_mode: mode of the network while the gradient is taken, which changes the gradient of networks with BatchNorm.
    Degenerate cases: an update, or a gradient, of 0 has cosine 0; leaves in which no client's cosine is above 0 keep
    the given weights. The number of clients whose cosine over all leaves is above 0 is logged (`agreeing`).
    Raises:
      ValueError: when the run starts, where leaves are personal.
    """

    def init(params: Tensor, layout: Layout) -> State:
        refuse_personal(layout, "fedvg_cosine: the score is taken at the global model, which has no {names}; use fedvg")
        return {}

    def values(server: ServerView) -> Tensor:
        direction = -server.validation_gradient(val_mode)
        agreements = agreements_of(server, part_of(server.layout, leaves).params, direction)
        server.log("agreeing", float((server.is_active & (cosines_of(agreements) > 0)).sum()))
        return agreements

    def weights(part: Layout, agreements: Tensor, usable: Tensor, granularity: str) -> Weights:
        return dict(weights_from_agreements(part, agreements, usable, granularity=granularity))

    score = ClientScore(
        "cosines", weights, values=values, logged=lambda values, part: (tensor_cosines(values), leaf_names(part))
    )
    needs = ["validation-set"]
    return weights_from_score(
        "fedvg_cosine", score, granularity=granularity, leaves=leaves, mix=mix, needs=needs, init=init
    )
