"""FLoRA: the clients' adapters are stacked, so that their weighted sum is exact, and merged into the frozen weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from methods.livar.merging import adapters_of, merged_update, truncated
from methods.moments import one_thread, refuse_personal
from raysim.core.layout import Layout
from raysim.core.method import ClientView, LayerOp, Message, Method, ServerView, State

#: Subspace iteration of `nearest_factors`: columns beyond the rank, and passes over the matrix.
EXTRA_COLUMNS, NUM_PASSES = 8, 2

AFTER_TRAINING = "a client's trained model is seen without the adapters merged into the frozen weights"
EXCLUDES = {
    "report": AFTER_TRAINING,
    "forward": "flora computes every adapted layer with the merged weights",
    "weigh": "the server sees a model without the adapters merged into the frozen weights",
    "is_phase": "after the last round a model is seen without the adapters merged into the frozen weights",
    "broadcast": "A is drawn anew and B is zero at the start of each round, so messages about earlier adapters do not fit",
}


def flora() -> Method:
    """Adds sum_k p_k B_k A_k of every round to the frozen weights; clients begin each round with fresh adapters.

    FLoRA, Wang et al. 2024 (NeurIPS, arXiv:2409.05976). With stacked factors, B = [B_1 ... B_K], A = [p_1 A_1; ...; p_K A_K],
        Delta W += B A = sum_k p_k B_k A_k    (exactly; FedAvg of both factors has cross terms B_i A_j),
    p_k = n_k / sum n, and W + (alpha / rank) Delta W takes the place of W from then on. In every round A is drawn anew
    (Kaiming-uniform, from the seed and the round) and B is zero. The head is averaged. raysim draws one A for all
    clients; in the authors' code each client draws its own. The sum is exact in both forms; with one A, the clients'
    updates begin in one common subspace of rank r, and with K draws in K subspaces.

    Messages: clients send A, B and the head, as with FedAvg. The server sends A, B, the head and, after the first
    round, the dense Delta W, [d_out, d_in] per layer. The paper sends the stacked factors of one round, K r (d_in +
    d_out) numbers per layer, to clients that all took part in the earlier rounds. In raysim clients are sampled, and a
    new client needs the sum of all rounds.
    The scored model is exactly W + (alpha / rank) Delta W. The global parameters have no frozen weights. They, and so
    `model.safetensors`, hold the initial W, the head, and as A and B the nearest factors of Delta W of the same rank
    (randomised subspace iteration, Halko et al. 2011). `flora/kept_share` is the share of ||Delta W||^2 in these factors;
    if it is 1, the file equals the scored model. Adapters in a file of `model.pretrained` are merged at the start.
    Degenerate cases: one client with one round gives the client's model. Clients without a step get weight 0; if no client
    took a step, Delta W does not change.
    Refused with flora: methods that read a client's model after its steps, or that keep state of A and B between rounds.
    Raises:
      ValueError: when the run is checked, adapters of layers that are not linear, or personal layers.
    """
    return Method(
        "flora",
        init=_init,
        broadcast=_broadcast,
        forward=_forward,
        server_update=_server_update,
        evaluation_override=_evaluation_override,
        claims=frozenset({"weights:*.lora_[AB].*", "merge", "broadcast-point", "server-optimizer"}),
        needs=frozenset({"lora", "lora-factors"}),
        excludes=EXCLUDES,
        trusts=frozenset({"freeze"}),
    )


def _init(params: Tensor, layout: Layout) -> State:
    """merged: layer -> Delta W of the adapted layers; fresh: [num_params], A and B of a round, NaN elsewhere."""
    refuse_personal(
        layout, "flora: personal models, here with {names}, are scored without merged adapters; share all layers"
    )
    merged, fresh = {}, torch.full_like(params, torch.nan)
    values, starts = layout.views(params), layout.views(fresh)
    for pair in adapters_of(layout):
        if len(pair.a.shape) != 2:
            raise ValueError(f"flora: {pair.layer} is not a linear layer; remove the name from model.lora.targets")
        a, b = values[pair.a.name], values[pair.b.name]
        if bool(b.any()):
            merged[pair.layer] = b @ a
        starts[pair.a.name].copy_(a)
        starts[pair.b.name].zero_()
    return {"merged": merged, "fresh": fresh}


def _broadcast(message: Message, state: State) -> Message:
    start = torch.where(state["fresh"].isnan(), message.params, state["fresh"])
    return Message(start, {"merged": state["merged"]})


def _forward(ops: dict[str, LayerOp], client: ClientView) -> dict[str, LayerOp]:
    merged: Mapping[str, Tensor] = client.message["merged"]
    return ops | {f"{layer}.base_layer": _merged_op(client, layer, matrix) for layer, matrix in merged.items()}


@one_thread()
def _server_update(update: Tensor, state: State, server: ServerView) -> tuple[Tensor, State]:
    merged = merged_after(server, state["merged"])
    fresh, update = state["fresh"].clone(), update.clone()
    starts, moved = server.layout.views(fresh), server.layout.views(update)
    begun, current = server.layout.views(server.start), server.layout.views(server.params)
    kept, total = 0.0, 0.0
    for pair in adapters_of(server.layout):
        a, b = current[pair.a.name], current[pair.b.name]
        if pair.layer in merged:
            matrix = merged[pair.layer].double()
            a, b = nearest_factors(matrix, pair.a.shape[0], server.generator)
            kept, total = kept + float((b @ a).square().sum()), total + float(matrix.square().sum())
        moved[pair.a.name].copy_(a - begun[pair.a.name])
        moved[pair.b.name].copy_(b - begun[pair.b.name])
        nn.init.kaiming_uniform_(starts[pair.a.name], a=math.sqrt(5), generator=server.generator)  # as peft does
    server.log("kept_share", kept / total if total else 1.0)
    return update, {"merged": merged, "fresh": fresh}


def _evaluation_override(state: State, server: ServerView) -> Mapping[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for pair in adapters_of(server.layout):
        if pair.layer in state["merged"]:
            matrix = state["merged"][pair.layer]
            eye = torch.eye(min(matrix.shape))
            left, right = (matrix, eye) if matrix.shape[1] <= matrix.shape[0] else (eye, matrix)
            tensors |= {pair.a.name: right, pair.b.name: left}
    return tensors


def merged_after(server: ServerView, merged: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Layer -> Delta W [d_out, d_in] with this round's sum_k p_k B_k A_k; unchanged if no client took a step."""
    sums = dict(merged)
    for pair, left, right in merged_update(server) if bool(server.is_active.any()) else ():
        sums[pair.layer] = (left @ right + sums.get(pair.layer, 0.0)).float()
    return sums


def nearest_factors(matrix: Tensor, rank: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """a (rank, d_in) and b (d_out, rank) whose product is nearly the best approximation of a matrix.

    Halko, Martinsson, Tropp 2011, algorithm 4.4: a random subspace, turned towards the leading singular vectors. Exact,
    up to rounding, where the rank of the matrix is at most `rank` + EXTRA_COLUMNS.

    Args:
      matrix: (d_out, d_in) float64.
    """
    columns = min(rank + EXTRA_COLUMNS, *matrix.shape)
    basis = torch.randn(matrix.shape[1], columns, dtype=matrix.dtype, generator=generator)
    for _ in range(NUM_PASSES):
        basis = torch.linalg.qr(matrix @ basis).Q
        basis = torch.linalg.qr(matrix.T @ basis).Q
    basis = torch.linalg.qr(matrix @ basis).Q
    return truncated(basis, basis.T @ matrix, rank)


def _merged_op(client: ClientView, layer: str, matrix: Tensor) -> LayerOp:
    """Return the frozen part of an adapted layer plus the merged weight."""
    module = client.model.module.get_submodule(layer)
    scaling = cast(dict[str, float], module.scaling)["default"]
    weight = cast(Tensor, cast(nn.Module, module.base_layer).weight) + scaling * matrix

    def op(base: nn.Module, x: Tensor) -> Tensor:
        return F.linear(x, weight, cast(Tensor | None, base.bias))

    return op
