"""LIVAR: adapters merged by layer importance, head rows by feature variance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

from torch import Tensor

from methods.livar.head import Variance, head_weights, reported_variances
from methods.livar.importance import from_importance, table_of
from methods.livar.merging import factor_weights, from_examples, merged_update, refuse_other_steps
from methods.livar.online import from_validation_set
from methods.moments import linear_head, one_thread
from raysim.base.conditions import applies_with, applies_without
from raysim.core.layout import Layout
from raysim.core.method import ClientView, Method, ServerView, State
from raysim.core.weights import Weights

T = TypeVar("T")
Table = Literal["released", "paper", "online"] | list[list[float]] | dict[str, object]

#: Why a method that works after the last round is refused where products are scored.
AT_THE_END = "after the last round no clients' factors are left to score; set evaluate: factors"

#: Options of the adapters.
OfAdapters = Annotated[T, applies_without("components", "head")]


def livar(
    *,
    components: Literal["both", "lora", "head"] = "both",
    layers: OfAdapters[Literal["importance", "examples"]] = "importance",
    table: Annotated[OfAdapters[Table], applies_with("layers", "importance")] = "released",
    variance: Annotated[Variance, applies_without("components", "lora")] = "correct",
    evaluate: OfAdapters[Literal["merged", "code", "factors"]] = "merged",
) -> Method:
    """Merges A and B of every adapted layer l with coefficients lambda_i^l, and row c of the head with weights w_i^c.

    LIVAR (eqs. 3 and 6, table A): lambda from the importances I_A, I_B that each step adds up and a 3 x 3 table over
    their bins, normalised over clients; w proportional to the variance of the class's features at each client, which
    takes one pass over the local examples after training. The merged update of a layer is sum_i lambda_i B_i A_i (eq. 3).
    List it first: the importance then sees the gradient of the loss without other methods' terms.

    A step adds |sum(g.d)| to an importance, with g the gradient before clipping and d = before - after of the step as done.
    In the released code g still carries the loss scale of mixed precision, which changes on the way, so that steps count by
    it; here it does not. Importances add up over the run, as there: clients that take part often collect more. The next
    round starts from sum lambda_i A_i and sum lambda_i B_i, since eq. 3 has a higher rank than one pair of factors.

    Args:
      components: part of the model that LIVAR merges: "lora" (adapters), "head" or "both". A part that LIVAR does not
        merge is averaged by numbers of examples. With "head", the model needs no adapters; for a model with adapters,
        the scored model contains the product of the averaged factors, as with fedavg.
      layers: source of the coefficients lambda_i in eq. 3. "importance": the layers' importances; "examples":
        lambda_i = n_i / sum n, without any other change, for the paper's ablation of layer importance (table 4).
      table: table of coefficients: "released" or "paper", the constants of the released code or of the paper; a table of
        your own as three rows; or a mapping with the keys table and cuts, which `raysim calibrate` writes for the
        `base:` of a run. "online" (ours) replaces the table: lambda is computed from the server's validation set in
        every round, see `methods/livar/online.py`. "online" uses no importances, and costs one gradient over the
        validation set per round and the inner products of the factors of each layer.
      variance: examples and features from which the variances are computed. "correct": the correctly classified local
        examples (the paper). "released": all local examples, with features of the model without adapters, from
        pixels that were not normalised; the head's weights are therefore the same in every round, and the row of a
        class without two examples at any client does not change. "counts" (ours, an ablation): no variances; the weight
        of a client is proportional to its number of local examples of the class, and no pass over the examples is needed.
      evaluate: adapters of the scored model: the products of eq. 3 ("merged"), products weighted by n_i / sum n
        ("code"), or the broadcast factors ("factors"). "code" is the form of the released code, which scores sum (n_i /
        n) B_i A_i whether layer importance is on or off, so that lambda has an effect only from the next round on.
    The released form is {variance: released, evaluate: code}, with layers: examples where its switch is off.
    Degenerate cases: equal importances give 1/K. A class without two usable examples at any client falls back to the
    variances of all examples, then to class counts; a class that no client has keeps its row. Clients without a step get
    weight 0; if no client took a step, nothing changes.
    Raises:
      ValueError: a table that is not 3 x 3 and positive; or, when the run starts, a head that is not one matrix and one
        vector, or table online where leaves are personal.
    """
    has_lora, has_head = components != "head", components != "lora"
    values = None if table == "online" else table_of(table)
    by_layer = from_validation_set() if values is None else from_importance(values)
    coefficients = by_layer if has_lora and layers == "importance" else from_examples()
    is_override = has_lora and evaluate != "factors"

    def init(params: Tensor, layout: Layout) -> State:
        coefficients.check(layout)
        if has_head:
            linear_head(layout, "livar")
        return {}

    def report(client: ClientView) -> dict[str, Tensor]:
        return coefficients.report(client) | (reported_variances(client, variance) if has_head else {})

    def weigh(weights: Weights, server: ServerView) -> Weights:
        factors = factor_weights(server, coefficients) if has_lora else {}
        return {**weights, **factors, **(head_weights(server, variance) if has_head else {})}

    @one_thread()
    def evaluation_override(state: State, server: ServerView) -> Mapping[str, Tensor]:
        if not bool(server.is_active.any()):
            return {}
        refuse_other_steps(server)
        layers = merged_update(server, by_examples=evaluate == "code")
        return {leaf.name: factor.float() for pair, b, a in layers for leaf, factor in ((pair.a, a), (pair.b, b))}

    claims = {"weights:*.lora_[AB].*"} if has_lora else set()
    claims |= {"weights:@head.*"} if has_head else set()
    # What is scored is made from the clients' factors: a server optimizer would go unseen.
    claims |= {"merge", "server-optimizer"} if is_override else set()
    needs = {"lora", "lora-factors"} if has_lora or variance == "released" else set()
    needs |= {"classes", "linear-head"} if has_head else set()
    needs |= {"features"} if has_head and variance != "counts" else set()
    return Method(
        "livar",
        init=init,
        grads=coefficients.grads,
        report=report,
        weigh=weigh,
        evaluation_override=evaluation_override if is_override else None,
        claims=frozenset(claims),
        needs=coefficients.needs | needs,
        excludes={"is_phase": AT_THE_END} if is_override else {},
    )
