"""FLFA: the error of one layer travels down through the round's global weight, the same on every client."""

from __future__ import annotations

import functools
import warnings
from typing import Annotated, Literal

import torch
from torch import Tensor

from methods.feedback import (
    Scale,
    backward_claims,
    chosen_layers,
    direct_matrix,
    direct_ops,
    feedback_layers,
    feedback_op,
    idle_layer,
    random_feedback,
)
from raysim.base.conditions import applies_without
from raysim.core.layout import Layout, Leaf
from raysim.core.method import ClientView, Count, LayerOp, Message, Method, ServerView, State
from raysim.core.seeding import derive_seed

Candidates = Literal["all", "pointwise"] | list[str]
Spans = list[tuple[int, int]]  # (start, end) of some leaves in the vector


def flfa(
    *,
    num_layers: Count = 1,
    candidates: Candidates = "all",
    first_layer: bool = True,
    strategy: Literal["auto", "lowest", "highest"] = "auto",
    scale: Annotated[Scale, applies_without("feedback", "direct")] = "layer",
    feedback: Literal["round", "random", "resampled", "direct"] = "round",
    seed: Annotated[int, applies_without("feedback", "round")] = 0,
) -> Method:
    """Feedback alignment with the round's global weights, in the layers whose updates agree least (or most).

    FLFA, section 4. In a layer l of the round's set F the input gradient is B_l^T δ_l instead of W_l^T δ_l,
        B_l = W_l^r ||W_{i,l}|| / ||W_l^r||   (W^r: what the round started from; W_i: the client's current weight),
    and the layer's own gradients stay exact, so that only the gradients below l change. The server sets the next
    round's F from the updates u_{i,l} of this round,
        S_l = (1/K) sum_i cos(u_{i,l}, mean_i u_{i,l})   (eq. 14),
    over the clients that moved the layer; 0 if no client moved the layer, or if the updates cancel. Round 0 is plain
    backpropagation. Ties go to the layer that comes first in the model. Logged: S of every candidate, which of them
    were chosen, how many in each layer block (`selected`; with model.blocks width these are MobileNetV2's stages, table
    13), and `is_plain`, 1 in rounds that were plain backpropagation: round 0, and rounds with the first layer alone.

    FLFA has no effect in the first layer, since images need no gradient (trained embeddings do): a round with this
    layer alone equals a round without FLFA, to the bit, and the first such round logs a warning. A gradient taken at a
    perturbed point (FedSOL) also uses B, with the norm of the weight at this point. FedVG's scores use plain
    backpropagation. If W^r is 0, B is 0, and a warning reports that no error passes the layer in the round.

    Args:
      num_layers: number of selected layers; the paper uses 1 and compares 1 to 3.
      candidates: layers that may be selected: all linear and convolution layers; "pointwise": 1x1 convolutions and the
        classifier only; or paths of layers.
      first_layer: whether the first linear or convolution layer of the model is a candidate.
      strategy: layers that are selected by S_l: the layers with the lowest or the highest values. "auto" decides once,
        after the first round: the lowest if S is skewed to the right (its bulk lies at the low end), otherwise the
        highest.
      scale: rescaling of the feedback to the norm of the local weight: "layer", one factor for each layer; "none", no
        rescaling (FLFA†).
      feedback: tensor of the feedback. "round": W^r; "random" (FLFA*): a fixed tensor from the layer's default
        initialiser, the same on all clients; "resampled": a new random tensor in every round; "direct" (table 4's DFA):
        the layer's input gets the output error through a fixed random matrix, as in `dfa`, instead of the error that comes down
        through the layer. The paper gives no details of DFA; here it is FLFA's rule with e R instead of B^T δ, without a
        scale.
      seed: seed of the random feedback.
    Raises:
      ValueError: num_layers above the number of candidates; no or unknown candidates.
    """

    layers_of = functools.partial(candidate_layers, candidates=candidates, first_layer=first_layer)

    def init(params: Tensor, layout: Layout) -> State:
        count = len(layers_of(layout))
        if num_layers > count:
            raise ValueError(f"flfa: num_layers {num_layers} exceeds the {count} candidates; lower it")
        return {"layers": [], "strategy": strategy}

    def broadcast(message: Message, state: State) -> Message:
        return Message(message.params, {"layers": list(state["layers"])})

    @functools.lru_cache(maxsize=None if feedback == "random" else num_layers)
    def random_back(layer: str, round_index: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
        name = derive_seed(seed, f"feedback/{layer}", round_index)
        return random_feedback(shape, seed=name).to(device)

    @functools.lru_cache(maxsize=num_layers)
    def direct_back(layer: str, outputs: int, size: int, device: torch.device) -> Tensor:
        return direct_matrix(layer, outputs, size, seed=seed).to(device)

    def forward(ops: dict[str, LayerOp], client: ClientView) -> dict[str, LayerOp]:
        layers = list(layers_of(client.layout).items())
        chosen = dict(layers[index] for index in client.message["layers"])
        if feedback == "direct":
            return ops | (direct_ops(client, list(chosen), direct_back) if chosen else {})
        when, device = client.round_index if feedback == "resampled" else 0, client.params.device
        for name, leaf in chosen.items():
            back = global_weight(client, leaf) if feedback == "round" else random_back(name, when, leaf.shape, device)
            ops = ops | {name: feedback_op(client, name, back, scale)}
        return ops

    def server_update(update: Tensor, state: State, server: ServerView) -> tuple[Tensor, State]:
        if not bool(server.is_active.any()):
            return update, state
        layers = layers_of(server.layout)
        scores = agreements(server, list(layers.values()))
        order, decided = layers_by_score(scores, state["strategy"])
        log_choice(server, layers, scores, state["layers"], order[:num_layers])
        return update, {"layers": order[:num_layers], "strategy": decided}

    claims = backward_claims("all" if feedback == "direct" else candidates)  # the output error is taken at the head
    return Method("flfa", init=init, broadcast=broadcast, forward=forward, server_update=server_update, claims=claims)


def global_weight(client: ClientView, leaf: Leaf) -> Tensor:
    """Return W^r of a layer; warn if all its entries are 0."""
    weight = client.layout.view(client.start, leaf)
    if not bool(weight.any()):  # waits for the device: once a round, not for a step
        fault = f"flfa: all of {leaf.layer!r} is 0 at the start of the round, and so is the feedback"
        warnings.warn(f"{fault}: no error passes it", stacklevel=3)
    return weight


def layers_by_score(scores: Tensor, strategy: str) -> tuple[list[int], str]:
    """Return the places of the candidates, preferred first, and the strategy; "auto" decides by the skewness of S."""
    if strategy == "auto":
        strategy = "lowest" if skewness(scores) > 0 else "highest"
    return torch.argsort(scores, stable=True, descending=strategy == "highest").tolist(), strategy


def log_choice(server: ServerView, layers: dict[str, Leaf], scores: Tensor, used: list[int], chosen: list[int]) -> None:
    """Log the scores and the chosen layer; warn if the next round is plain backpropagation.

    Args:
      layers: the candidates; used, chosen: places of this round's and of the next round's layers among the candidates.
    """
    is_idle = [name == idle_layer(server.layout) for name in layers]
    server.log("is_plain", float(all(is_idle[index] for index in used)))
    if all(is_idle[index] for index in chosen):
        where = f"flfa: the chosen layer {list(layers)[chosen[0]]!r} is the first, whose input needs no gradient"
        mend = "flfa/is_plain marks plain rounds, first_layer: false excludes the layer"
        warnings.warn(f"{where}: the next round is plain backpropagation, to the bit; {mend}", stacklevel=3)
    server.log("agreement", scores, list(layers))
    for rank, index in enumerate(chosen, start=1):
        server.log("layer" if rank == 1 else f"layer_{rank}", index)
    inside = [leaf.block for leaf in layers.values()]
    blocks = [block for block in server.layout.blocks if block in inside]
    server.log("selected", torch.tensor([sum(inside[index] == block for index in chosen) for block in blocks]), blocks)


def candidate_layers(layout: Layout, candidates: Candidates, *, first_layer: bool) -> dict[str, Leaf]:
    """Path -> weight leaf of the layers to choose from, in module order.

    Raises:
      ValueError: an unknown name, or none at all.
    """
    chosen = chosen_layers(layout, candidates if isinstance(candidates, list) else "all", "flfa")
    if candidates == "pointwise":
        chosen = {name: leaf for name, leaf in chosen.items() if leaf.is_head or leaf.shape[2:] == (1, 1)}
    chosen = {name: leaf for name, leaf in chosen.items() if leaf.is_shared}  # personal layers have no global weight
    if not first_layer:
        chosen.pop(next(iter(feedback_layers(layout))), None)
    if not chosen:
        raise ValueError(f"flfa: no candidates are left of candidates={candidates}, first_layer={first_layer}")
    return chosen


def agreements(server: ServerView, leaves: list[Leaf]) -> Tensor:
    """Return S of each layer; the sum of the updates is exact, and updates stay on the trainers.

    Returns:
      (len(leaves),) float64 in [-1, 1]; 0 if no client moved the layer, or if the updates cancel.
    """
    spans: Spans = [(leaf.offset, leaf.end) for leaf in leaves]
    uniform = torch.full((len(server.clients),), 1 / len(server.clients), dtype=torch.float64)
    total = server.total("update", {leaf.name: uniform for leaf in leaves})
    mean = torch.cat([total[start:end] for start, end in spans]).float()
    cosines = torch.stack(server.map_updates(update_cosines, (spans, mean)))
    is_moved = ~cosines.isnan()
    return (cosines.nan_to_num(0.0).sum(dim=0) / is_moved.sum(dim=0).clamp_min(1)).clamp(-1, 1)


def update_norms(update: Tensor, spans: Spans) -> Tensor:
    """(layers,) float64: the L2 norm of one client's update of each layer."""
    return torch.stack([torch.linalg.vector_norm(update[start:end], dtype=torch.float64) for start, end in spans])


def update_cosines(update: Tensor, spans_and_mean: tuple[Spans, Tensor]) -> Tensor:
    """Return (layers,) float64: cosine between a client's update and the mean update; NaN for a zero update, 0 for a
    zero mean.
    """
    spans, means = spans_and_mean
    sizes = [end - start for start, end in spans]
    cosines = []
    for (start, end), mean in zip(spans, torch.split(means.double(), sizes), strict=True):
        layer_update = update[start:end].double()
        size = mean.norm() * layer_update.norm()
        cosine = layer_update @ mean / torch.where(size > 0, size, 1.0)
        cosines.append(torch.where(layer_update.any(), cosine, torch.nan))
    return torch.stack(cosines)


def skewness(values: Tensor) -> float:
    """Sample skewness g1 = m3 / m2^1.5 (central moments); 0 where all values are equal."""
    centred = values.double() - values.double().mean()
    spread = float(centred.square().mean())
    return float(centred.pow(3).mean()) / spread**1.5 if spread > 0 else 0.0
