"""LIVAR: adapters merged by layer importance, head rows by feature variance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal

import torch
from torch import Tensor

from methods.livar.math import (
    Adapter,
    Reduction,
    adapters_of,
    class_variances,
    layer_coefficients,
    reduced,
    row_weights,
    stacked,
    table_of,
    truncated,
)
from methods.livar.online import online_coefficients
from methods.moments import Features, linear_head, local_features, one_thread
from raysim.core.counting import counts_with, counts_without
from raysim.core.layout import Layout
from raysim.core.method import Batch, ClientView, GradFn, Method, ServerView, State
from raysim.core.weights import Weights, normalised


def livar(
    *,
    components: Literal["both", "lora", "head"] = "both",
    layers: Annotated[Literal["importance", "examples"], counts_without("components", "head")] = "importance",
    importance: Annotated[
        Reduction,
        counts_without("components", "head"),
        counts_with("layers", "importance"),
        counts_without("table", "online"),
    ] = "abs_of_sum",
    accumulate: Annotated[
        Literal["run", "round"],
        counts_without("components", "head"),
        counts_with("layers", "importance"),
        counts_without("table", "online"),
    ] = "run",
    table: Annotated[
        Literal["released", "paper", "online"] | list[list[float]] | dict[str, object],
        counts_without("components", "head"),
        counts_with("layers", "importance"),
    ] = "released",
    variance: Annotated[Literal["correct", "all", "released"], counts_without("components", "lora")] = "correct",
    next: Annotated[Literal["factors", "svd"], counts_without("components", "head")] = "factors",
    evaluate: Annotated[Literal["merged", "code", "factors"], counts_without("components", "head")] = "merged",
) -> Method:
    """Merges A and B of every adapted layer l with coefficients lambda_i^l, and row c of the head with weights w_i^c.

    LIVAR (eqs. 3 and 6, table A): lambda from the importances I_A, I_B that each step adds up and a 3 x 3 table over
    their bins, normalised over clients; w proportional to the variance of the class's features at each client, which
    takes one pass over the local examples after training. The merged update of a layer is sum_i lambda_i B_i A_i (eq. 3).
    List it first: the importance then sees the gradient of the loss without other methods' terms.

    Args:
      components: "lora" or "head" alone leave the other part to n_i-weighted averaging; "head" needs no adapters, and
        scores, as averaging does, the product of averaged factors.
      layers: "examples" puts lambda_i = n_i / sum n into eq. 3 and leaves all else as it is: the paper's ablation of
        layer importance (table 4) with one change at a time.
      importance: what a step adds, with g the gradient before clipping and d = before - after of what the step really
        did: |sum(g.d)|, sum(g.d), sum|g.d|, or |sum g|. In the released code g still carries the loss scale of mixed
        precision, which changes on the way, so that steps count by it; here it does not.
      accumulate: importances add up over the run (the released code; frequent clients then collect more) or start anew
        in every round.
      table: the released code's constants, or the paper's; three rows of your own; or a mapping of table
        and cuts, as in the YAML that `raysim calibrate` writes for a run's `base:`. "online", ours, has no table: lambda
        comes from the server's validation set in every round, see `methods/livar/online.py`. No importance is counted; it
        costs one gradient over that set a round and, a layer, the factors' inner products.
      variance: over the correctly classified local examples (the paper), or all. "released" is the released code's: over
        all, with the features that the model without its adapters has of pixels that were not normalised, whatever was
        learnt; the head's weights are then the same in every round, and a class without two examples at any client
        keeps its row.
      next: what the next round starts from, since eq. 3 has a higher rank than one pair of factors. "factors":
        sum lambda_i A_i and sum lambda_i B_i; "svd": the best approximation of that rank.
      evaluate: the scored model has the products of eq. 3 ("merged"), products weighted by n_i / sum n ("code"), or what
        is broadcast ("factors"). "code" is the released form: there both positions of the switch for layer importance
        score sum (n_i / n) B_i A_i, and lambda reaches the next round only.
    The released form is {variance: released, evaluate: code}, with layers: examples where its switch is off.
    Degenerate cases: equal importances give 1/K. A class without two usable examples at any client falls back to the
    variances of all examples, then to class counts; a class that nobody has keeps its row. Clients without a step get
    weight 0; if nobody took one, all stays.
    Raises:
      ValueError: a table that is not 3 x 3 and positive; or, when the run starts, a head that is not one matrix and one
        vector, or table online where leaves are personal.
    """
    has_lora, has_head = components != "head", components != "lora"
    has_table = table != "online"
    is_online = has_lora and layers == "importance" and not has_table
    counts = has_lora and layers == "importance" and has_table

    coefficient_table = table_of(table if has_table else "released")

    def init(params: Tensor, layout: Layout) -> State:
        if is_online and layout.personal:
            names = ", ".join(leaf.name for leaf in layout.personal[:3])
            raise ValueError(f"livar: table 'online' is taken at the global model, which has no {names}; use a table")
        if has_head:
            linear_head(layout, "livar")
        return {}

    def grads(inner: GradFn, client: ClientView) -> GradFn:
        count = _ImportanceCount(client, importance)
        client.scratch["count"] = count

        def gradient(params: Tensor, batch: Batch) -> Tensor:
            count.close_step()
            grad = inner(params, batch)
            count.open_step(grad)
            return grad

        return gradient

    def report(client: ClientView) -> dict[str, Tensor]:
        values: dict[str, Tensor] = {}
        if counts:
            count = client.scratch["count"]
            count.close_step()
            total = count.sums.cpu()
            if accumulate == "run":
                total = total + client.memory.get("importance", torch.zeros_like(total)).cpu()
                client.memory["importance"] = total
            values["importance"] = total
        if has_head:
            features = backbone_features(client) if variance == "released" else local_features(client)
            classes, usable = len(client.class_counts), features.is_correct
            values["variance_all"] = class_variances(features.values, features.labels, classes)
            if variance == "correct":
                values["variance"] = class_variances(features.values[usable], features.labels[usable], classes)
        return values

    def weigh(weights: Weights, server: ServerView) -> Weights:
        shares = normalised(server.num_examples.double() * server.is_active)
        merged = dict(weights)
        if has_lora:
            adapters = adapters_of(server.layout)
            names = [pair.layer for pair in adapters]
            coefficients = shares[:, None].expand(-1, len(adapters))
            if counts:
                importances = server.report["importance"]
                coefficients = layer_coefficients(importances, server.is_active, shares, coefficient_table)
                server.log("importance_a", importances[..., 0], names)
                server.log("importance_b", importances[..., 1], names)
            if is_online:
                gradient = server.validation_gradient("eval")
                coefficients = online_coefficients(factors_of(server), server, gradient, shares)
            server.log("coefficients", coefficients, names)
            for index, pair in enumerate(adapters):
                merged |= dict.fromkeys((pair.a.name, pair.b.name), coefficients[:, index].clone())
        if has_head:
            first = [server.report["variance"]] if variance == "correct" else []
            last = [] if variance == "released" else [server.class_counts.double()]
            rows = row_weights([*first, server.report["variance_all"], *last], server.is_active)
            server.log("head_weights", rows, [f"class {label}" for label in range(rows.shape[1])])
            merged |= {leaf.name: rows for leaf in linear_head(server.layout, "livar")}
        return merged

    @one_thread()
    def server_update(update: Tensor, state: State, server: ServerView) -> tuple[Tensor, State]:
        if not bool(server.is_active.any()):
            return update, state
        update = update.clone()
        old, views = server.layout.views(server.start), server.layout.views(update)
        for pair, left, right in _merged(server, None):
            new_a, new_b = truncated(left, right, pair.a.shape[0])
            views[pair.a.name].copy_(new_a - old[pair.a.name])
            views[pair.b.name].copy_(new_b - old[pair.b.name])
        return update, state

    @one_thread()
    def evaluation_override(state: State, server: ServerView) -> Mapping[str, Tensor]:
        if not bool(server.is_active.any()):
            return {}
        shares = normalised(server.num_examples.double() * server.is_active) if evaluate == "code" else None
        tensors: dict[str, Tensor] = {}
        for pair, left, right in _merged(server, shares):
            tensors |= {pair.a.name: right.float(), pair.b.name: left.float()}
        return tensors

    is_override = has_lora and evaluate != "factors"
    is_product = has_lora and (next != "factors" or is_override)
    claims = {"weights:*.lora_[AB].*"} if has_lora else set()
    claims |= {"weights:@head.*"} if has_head else set()
    claims |= {"merge"} if is_product else set()
    # What is scored is made from the clients' factors: a server optimizer would go unseen.
    claims |= {"server-optimizer"} if is_override else set()
    needs = {"lora", "lora-factors"} if has_lora or variance == "released" else set()
    needs |= {"features", "linear-head"} if has_head else set()
    needs |= {"validation-set"} if is_online else set()
    needs |= {"client-memory"} if counts and accumulate == "run" else set()
    return Method(
        "livar",
        init=init,
        grads=grads if counts else None,
        report=report,
        weigh=weigh,
        server_update=server_update if has_lora and next != "factors" else None,
        evaluation_override=evaluation_override if is_override else None,
        claims=frozenset(claims),
        needs=frozenset(needs),
    )


class _ImportanceCount:
    """Sums over the steps of one client's round; `sums` is (L, 2) float64. Owns copies of a step's gradient and start."""

    def __init__(self, client: ClientView, reduction: Reduction):
        self._client, self._reduction = client, reduction
        self._adapters = adapters_of(client.layout)
        self.sums = torch.zeros(len(self._adapters), 2, dtype=torch.float64, device=client.params.device)
        self._grad, self._before = torch.empty_like(client.start), torch.empty_like(client.start)
        self._is_open = False

    def open_step(self, grad: Tensor) -> None:
        # Copies: the optimizer and other methods work in place.
        self._grad.copy_(grad)
        self._before.copy_(self._client.params)
        self._is_open = True

    def close_step(self) -> None:
        """Count the step since `open_step`: the parameters now stand where it has put them."""
        if not self._is_open:
            return
        moved = self._before.sub_(self._client.params)
        parts = [
            reduced(self._grad[leaf.offset : leaf.end], moved[leaf.offset : leaf.end], self._reduction)
            for pair in self._adapters
            for leaf in (pair.a, pair.b)
        ]
        # A step on a non-finite gradient counts 0: the released code does so for NaN, and takes the largest float for inf.
        self.sums += torch.stack(parts).view(-1, 2).nan_to_num(0.0, 0.0, 0.0)
        self._is_open = False


def backbone_features(client: ClientView) -> Features:
    """The local examples as the released code takes their statistics: no adapters, and pixels in [0, 1]."""
    point = client.params.clone()
    for pair in adapters_of(client.layout):
        client.layout.view(point, pair.b).zero_()
    return local_features(client, point, is_normalised=False)


def _merged(server: ServerView, shares: Tensor | None) -> Iterator[tuple[Adapter, Tensor, Tensor]]:
    """(adapter, left, right) of every layer, whose product is the merged update of eq. 3; see `stacked`.

    Args:
      shares: (K,) weights of the products; None: the final weights of the leaves.
    """
    for pair, a, b in factors_of(server):
        weights = server.weights[pair.a.name] if shares is None else shares
        assert isinstance(weights, Tensor)  # nobody else may decide the weights of adapters
        yield pair, *stacked(weights, a, b)


def factors_of(server: ServerView) -> Iterator[tuple[Adapter, Tensor, Tensor]]:
    """(adapter, A (K, rank, d_in), B (K, d_out, rank)) of the clients after training, float64, in order of the layout.

    They are fetched one layer block at a time: small beside the model, K times what is broadcast.
    """
    blocks: dict[str, list[Adapter]] = {}
    for pair in adapters_of(server.layout):
        blocks.setdefault(pair.a.block, []).append(pair)
    for pairs in blocks.values():
        leaves = [leaf for pair in pairs for leaf in (pair.a, pair.b)]
        updates = server.map_updates(parts_of, [(leaf.offset, leaf.end) for leaf in leaves])
        values = {
            leaf: server.start[leaf.offset : leaf.end].double()
            + torch.stack([parts[index] for parts in updates]).double()
            for index, leaf in enumerate(leaves)
        }
        for pair in pairs:
            yield pair, values[pair.a].view(-1, *pair.a.shape), values[pair.b].view(-1, *pair.b.shape)


def parts_of(update: Tensor, spans: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Stretches of one client's update."""
    return [update[start:end] for start, end in spans]
