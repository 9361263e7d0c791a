"""Methods: frozen records of up to fourteen hooks, and the objects of a round that hooks see.

A run takes a list of methods. Most hooks take an object of the round and a view of the client or the server, and return a
changed object of the same kind. A missing hook is the identity, so the empty list is FedAvg, and the engine has no special
case for any method. Hooks compose left to right; in wrapping hooks (`loss`, `grads`) the first method of the list is the
innermost.

| hook                | where, when                  | call                                                        |
|---------------------|------------------------------|-------------------------------------------------------------|
| partition           | once, at build               | partition(Partition) -> Partition                           |
| init                | server, start of the run     | init(params, layout) -> state                               |
| broadcast           | server, round start          | broadcast(Message, state) -> Message                        |
| begin               | client, before its steps     | begin(ClientView) -> Tensor [num_state]                     |
| forward             | client, once per round       | forward({layer: LayerOp}, ClientView) -> {layer: LayerOp}   |
| loss                | client, once per round       | loss(LossFn, ClientView) -> LossFn                          |
| grads               | client, built once per round | grads(GradFn, ClientView) -> GradFn, called every step      |
| own_model           | client, after the last step  | own_model(ClientView) -> Tensor [num_state]                 |
| outgoing            | client, after own_model      | outgoing(Update, ClientView) -> Update                      |
| report              | client, after outgoing       | report(ClientView) -> {name: number, Tensor or Vector}      |
| overhear            | server, before latecomers    | overhear(ServerView of the others) -> {name: Value}         |
| weigh               | server, after the reports    | weigh(Weights, ServerView) -> Weights                       |
| server_update       | server, last                 | server_update(update, state, ServerView) -> (update, state) |
| evaluation_override | server, before a scoring     | evaluation_override(state, ServerView) -> {leaf: Tensor}    |

`begin` returns the point at which the client's local steps begin, in place of the broadcast point. The update is still the
difference from the broadcast point.

`own_model` returns the client's personal model beside the global model. The personal model is scored as `clients/personal_*`,
in place of the client's local model if layers are personal. With the need "client-memory" the personal model is kept as
`memory["own_model"]`; without the need, the hook runs only in rounds with an evaluation.

`outgoing` returns the update that the client sends. The server sums the sent updates, and reports see the model after the sent
update (`ClientView.params`). Attacks, compression and noise of a client use this hook.

`overhear` is for attackers who see the honest updates. A fixed share of all clients, the latecomers (`late_share`), trains
after all other clients and sees the result of `overhear` as `ClientView.overheard`. No other hook may depend on an order among
clients.

`evaluation_override` is for methods whose merged model does not fit into the layout (LIVAR's sum of products has a higher rank
than its broadcast factors). The returned tensors replace leaves by name while the global model is scored on the
test set, and may have any shape with which the model can run. The hook runs only in rounds with an evaluation, after the new
global parameters are set (`ServerView.params`). A method that only measures parameters returns {}, which changes no score.

Messages, client memory, scratch, reports and server state are namespaced: a hook sees only the values of its own method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from raysim.base.options import Bounds
from raysim.core.layout import Layout
from raysim.core.seeding import torch_generator
from raysim.core.weights import Weights

#: What a method sends, reports or keeps: tensors, numbers, strings, None, and lists and dicts of them. Any, because only
#: the method itself knows the form of its own values.
Value = Any

#: How cohorts are drawn, see `raysim.core.cohorts.choose_cohort`.
Sampling = Literal["fixed", "poisson"]

#: A method's server state: its own values by name.
State = dict[str, Value]

#: Types of options, whose bounds are checked with the configuration.
Positive = Annotated[float, Bounds(gt=0)]
Amount = Annotated[float, Bounds(ge=0)]
Share = Annotated[float, Bounds(ge=0, le=1)]
Fraction = Annotated[float, Bounds(gt=0, le=1)]
OpenShare = Annotated[float, Bounds(gt=0, lt=1)]
Decay = Annotated[float, Bounds(ge=0, lt=1)]
Count = Annotated[int, Bounds(ge=1)]
Whole = Annotated[int, Bounds(ge=0)]


class Batch(NamedTuple):
    """Inputs ready for the model, and their targets.

    inputs: images as (B, channels, height, width) float32, other arrays as (B, ...) float32, tokens as (B, length) int64;
    targets: (B,) int64 classes; (B, labels) uint8; (B,) or (B, numbers) float32; (B, length) int32 tokens.
    """

    inputs: Tensor
    targets: Tensor


class Outputs(NamedTuple):
    """logits: (B, outputs), of tokens (B, length, vocabulary); features: (B, ..., width), the head's input, or None.

    features are computed only if a method of the run needs "features".
    """

    logits: Tensor
    features: Tensor | None


class Message(NamedTuple):
    """Message from the server: params [num_params] (the broadcast point) and the fields of a method.

    num_bytes: size of the encoded global parameters, if `params` are their decoded values; the server then adds the
    update to the global parameters. None: not encoded, 4 bytes for each shared parameter; the server adds the update to
    `params`.
    """

    params: Tensor
    fields: Mapping[str, Value]
    num_bytes: int | None = None


class Update(NamedTuple):
    """Update that a client sends. values: [num_params]; num_bytes: size of the encoded values, without buffers.

    Without an `outgoing` hook, num_bytes is 4 bytes for each shared parameter.
    """

    values: Tensor
    num_bytes: int


class Crowd(NamedTuple):
    """All clients of the run, from which a method may draw a fixed subset. seed: of the method and the run."""

    population: int
    seed: int

    def drawn(self, share: float) -> Tensor:
        """Ids of a share of all clients, rounded to whole ones, (n,) int64, ascending: the same in every round."""
        return _drawn(self.population, self.seed, round(share * self.population))


NO_CROWD = Crowd(0, 0)


class RunSizes(NamedTuple):
    """Sizes of a run for `Method.fits`, before the run starts.

    population: clients; cohort_size: clients of a round; num_classes: outputs; input_shape: of one input of the model,
    images as (height, width, channels); methods: names of all methods; sampling, dropout: of the cohort; stop_epsilon: the
    epsilon that the run may spend.
    """

    population: int
    cohort_size: int
    num_rounds: int
    num_classes: int
    input_shape: tuple[int, ...]
    methods: tuple[str, ...] = ()
    sampling: str = "fixed"
    dropout: float = 0.0
    stop_epsilon: float | None = None


@lru_cache(maxsize=8)
def _drawn(population: int, seed: int, count: int) -> Tensor:
    return torch.randperm(population, generator=torch_generator(seed))[:count].sort().values


class Vector(NamedTuple):
    """A [num_params] tensor in a report. The tensor stays in the trainer; the server gets sums and maps only."""

    value: Tensor


@dataclass(frozen=True)
class Partition:
    """Which parameters the client optimiser steps (trained) and which tensors are sent and aggregated (shared).

    `shared` begins as all trained parameters and float buffers. Tensors that a method removes from `shared` are personal:
    they are kept in the client's memory between its rounds. `head` is the path of the classifier layer; `norms` are the
    names of the parameters and buffers of normalisation layers.
    """

    trained: frozenset[str]
    shared: frozenset[str]
    head: str
    norms: frozenset[str] = frozenset()


LossFn = Callable[[Outputs, Batch], Tensor]
GradFn = Callable[[Tensor, Batch], Tensor]
LayerOp = Callable[[nn.Module, Tensor], Tensor]


class Model(Protocol):
    """The client's model as hooks may use it: at any point, without disturbing the training point.

    criterion: the task's mean loss of a batch, to which no method has added anything.
    """

    module: nn.Module
    criterion: LossFn

    def apply(self, point: Tensor, inputs: Tensor) -> Outputs:
        """Outputs at a point, in eval mode, without gradients; (B, ...).

        `point` is [num_params] or, with buffers, [num_state].
        """
        ...

    def gradient(self, loss: LossFn, point: Tensor, batch: Batch, *, moves_buffers: bool = False) -> Tensor:
        """[num_params]: a new vector, the gradient of the loss of one batch at `point`.

        The pass does not change buffers, unless `moves_buffers` makes it count as the pass of the training step.
        """
        ...

    def overridden(self, ops: Mapping[str, LayerOp]) -> AbstractContextManager[None]:
        """Replace layer operations inside the block; training uses the operations of all `forward` hooks."""
        ...


@dataclass
class ClientView:
    """A client in a round, as hooks see it. `start` is read-only; `memory` and `scratch` may be written.

    Attributes:
      num_examples: n_k, training examples of this client.
      class_counts: (classes,) int64.
      lr, momentum, batch_size: settings of the local steps in this round.
      num_steps: optimiser steps taken: 0 until the local loop has ended.
      start: [num_params], the broadcast point.
      params: [num_params], the current parameters; after the local loop, the client's final parameters.
      start_state, state: [num_state], `start` and `params`, each followed by the buffers.
      trained: [num_state], in `report`: the model after the local steps. If `outgoing` encoded the update, `state` is
        the model after the sent update instead.
      head: path of the classifier layer.
      message: this method's downlink fields.
      overheard: for latecomers, the result of this method's `overhear`; {} for all other clients.
      memory: this method's state on this client, kept between rounds (needs "client-memory").
      scratch: values of this method on this client, dropped after the round.
      train: train(start, *, grads=None, epochs=None, steps=None, lr=None) -> [num_state], the model after local steps on
        the client's examples from start [num_state], without the methods' hooks. The settings are those of the run,
        except for the epochs, steps and learning rate given here; `grads` wraps the gradient function. The client's
        ordinary training is not affected.
      batches: batches() is a pass over the local examples, in an order drawn once for the client, without augmentation;
        with is_normalised=False the images are pixels in [0, 1], whole, at the size of the model's inputs.
      validation_gradient: [num_params], gradient of the mean cross-entropy over the server's validation set at the
        client's current parameters, plain backpropagation, in "train" or "eval" mode (needs "validation-set"). Batches
        have the client's batch size if BatchNorm or dropout depend on it, and are larger otherwise.
      validation_loss: the mean cross-entropy whose gradient is `validation_gradient`, in the same modes.
      accuracy: accuracy("test") or ("validation"): the share of the set's rows that the client's current parameters
        classify correctly, in eval mode. Use it for measures only, since a method that acts on test rows trains on them
        (needs "test-set" or "validation-set").
      initial_state: [num_state] of a network built anew, with random values of this client's own, the same in every
        round.
      generator: this method's own random stream for this client and round.
      crowd: all clients of the run.
    """

    id: int
    round_index: int
    num_examples: int
    class_counts: Tensor
    lr: float
    layout: Layout
    start: Tensor
    params: Tensor
    start_state: Tensor
    state: Tensor
    head: str
    model: Model
    message: Mapping[str, Value]
    memory: dict[str, Value]
    generator: torch.Generator
    batches: Callable[..., Iterable[Batch]]
    train: Callable[..., Tensor]
    validation_gradient: Callable[[str], Tensor]
    validation_loss: Callable[[str], float]
    accuracy: Callable[[str], float]
    initial_state: Callable[[], Tensor]
    crowd: Crowd = NO_CROWD
    overheard: Mapping[str, Value] = field(default_factory=dict)
    momentum: float = 0.0
    batch_size: int = 32
    num_steps: int = 0
    scratch: dict[str, Value] = field(default_factory=dict)
    trained_state: Tensor | None = None

    @property
    def trained(self) -> Tensor:
        return self.state if self.trained_state is None else self.trained_state


@dataclass
class ServerView:
    """A round at the server, as hooks see it. K participants in client order.

    Attributes:
      population: number of all clients.
      cohort_size: cohort size of the configuration; with Poisson sampling, the expected size.
      sampling: sampling of cohorts: "fixed" (of fixed size, without replacement) or "poisson".
      num_rounds: number of rounds of the whole run.
      crowd: all clients of the run.
      clients: (K,) int64 client ids, ascending.
      num_examples, num_steps: (K,) int64.
      class_counts: (K, classes) int64.
      start: [num_params], the broadcast point of the round.
      params: [num_params], the global parameters at the start of the round; in `evaluation_override`, at its end.
      report: this method's reports, stacked: name -> (K, ...).
      weights: the aggregation weights; final from `server_update` on.
      total: total(name, weights) -> float64, exact weighted sum, computed on the trainers that hold the vectors:
        [num_params] for a reported Vector, [num_state] for "update".
      map_updates: map_updates(f, shared) -> [f(update_k, shared) for k], run on the trainers that hold the updates;
        `update_k` is [num_params]; results should be small.
      map_columns: map_columns(f, shared, rows) -> [f(block, extra, shared) for each block of columns, in their order]:
        block is (K, width) float32, `width` neighbouring entries of all K updates, one client per row; extra is (m,
        width), the same entries of `rows` (m, num_params). Blocks depend only on K and num_params. For functions of all
        updates at once, which no process could hold, such as a median or products of pairs.
      map_test: map_test(f, shared) -> [f(model, batch, shared)] for each batch of the test set, run on the trainers
        with the global model in eval mode; meant for `evaluation_override` (needs "test-set").
      map_features: map_features(f, shared) -> [f(features, labels, shared)], run on the trainers, once for each slice
        of the test set at the global parameters, in eval mode: features (B, width), the head's input, and labels (B,)
        int64. The slices, and so the results in their order, do not depend on the trainers. Meant for
        `evaluation_override`; the tensors that methods return from this hook are not in the model yet (needs
        "features").
      validation_loss: validation_loss(weights) -> mean cross-entropy over the server's validation set, in eval mode, of
        the model that would result from these weights before any `server_update` (needs "validation-set").
      validation_gradient: validation_gradient(mode) -> [num_params], gradient of the mean cross-entropy over the
        validation set at the broadcast point, with the buffers of the start of the round, in "train" or "eval" mode. It
        is computed once per round on one trainer, by plain backpropagation, as `ClientView.validation_gradient` (needs
        "validation-set"). Personal layers have their initial values at the server, so a method that uses this gradient
        should refuse personal layers.
      validation_update: validation_update() -> [num_params], the update of a client whose examples are the server's
        validation set, from the broadcast point, with the clients' settings and without methods (needs "validation-set").
      move_buffers: move_buffers(change) adds change, [num_state - num_params], to the new global buffers; for
        `server_update`.
      log: log(name, value, columns) records a number as the metric `method/name`. A tensor whose first axis is the
        cohort, or with a single axis, becomes an array of the run and a heat map; `columns` are the names along its
        last axis.
      generator: this method's own random stream of this round at the server.
      staleness: (K,) int64, server steps since each client received its model; 0 in synchronous rounds.
      began_at: began_at(client) -> [num_params], the broadcast point that a client of the round received.
    """

    round_index: int
    population: int
    layout: Layout
    clients: Tensor
    num_examples: Tensor
    num_steps: Tensor
    class_counts: Tensor
    start: Tensor
    params: Tensor
    report: Mapping[str, Tensor]
    weights: Weights
    total: Callable[[str, Weights], Tensor]
    map_updates: Callable[[Callable[[Tensor, Value], Value], Value], list[Value]]
    map_columns: Callable[..., list[Value]]
    map_test: Callable[[Callable[[Model, Batch, Value], Value], Value], list[Value]]
    map_features: Callable[[Callable[[Tensor, Tensor, Value], Value], Value], list[Value]]
    validation_loss: Callable[[Weights], float]
    validation_gradient: Callable[[str], Tensor]
    validation_update: Callable[[], Tensor]
    move_buffers: Callable[[Tensor], None]
    log: Callable[..., None]
    generator: torch.Generator
    staleness: Tensor
    began_at: Callable[[int], Tensor]
    crowd: Crowd = NO_CROWD
    cohort_size: int = 0
    sampling: Sampling = "fixed"
    num_rounds: int = 1

    @property
    def is_active(self) -> Tensor:
        """(K,) bool: clients with at least one step. Clients without a step get no weight."""
        return self.num_steps > 0


@dataclass(frozen=True)
class Method:
    """A method as a value; see the module's table for the hooks.

    Example, aggregation weights in proportion to the steps that clients took:
      >>> def weigh(weights: Weights, server: ServerView) -> Weights:
      ...     share = server.num_steps.double() / server.num_steps.sum()
      ...     return {name: share for name in weights}
      >>> by_steps = Method("by_steps", weigh=weigh, claims=frozenset({"weights:*"}))
      >>> from types import SimpleNamespace
      >>> by_steps.weigh({"fc.weight": torch.zeros(2)}, SimpleNamespace(num_steps=torch.tensor([10, 30])))
      {'fc.weight': tensor([0.2500, 0.7500], dtype=torch.float64)}

    Attributes:
      init: init(params, layout) -> the method's server state at the start of the run.
      claims: exclusive resources as shell patterns, "a!b" for resources that match a and not b: "criterion",
        "own-model", "weights:<leaf>", "backward:<layer>", "arrivals", "broadcast-point", "merge" (the method's
        `server_update` computes the update of its leaves anew from the clients' updates, and ignores the update that it
        receives), "server-optimizer"; "@head" in a pattern stands for the path of the classifier layer.
      needs: "classes" (one class per row), "clock" (the group `time`), "validation-set", "test-set", "client-order" (of
        the validation rows), "sgd", "features", "linear-head", "client-memory", "lora" (adapters), "lora-factors" (A
        and B of each adapter are trained and shared).
      excludes: hook, "is_phase" or "is_robust" -> the reason why no other method of the run may have this hook or
        property; methods named in `trusts` may have it.
      base_weights: weights with which the `weigh` hooks start: shares of the examples, or equal weights. If one method
        has "uniform", the whole run starts with equal weights; a method that claims weights replaces the starting
        weights.
      arrivals: number of updates that end a round of an asynchronous method. `cohort.size` clients are at work at a
        time; clients whose updates have not arrived continue to train from the models that they received. None: a round
        waits for all its clients.
      late_share: share of all clients that are latecomers, drawn once for the run (`Crowd.drawn`); see `overhear`.
      is_phase: whether the method runs after the last round, in an extra round with all clients and without local steps
        (CCVR).
      fits: fits(sizes) -> the reason why the method cannot run with these sizes; "" if it can.
      wraps: wraps(method) -> the method that runs in place of each method listed after this one.
      is_robust: whether the method bounds the effect of attackers on the model; no other method of the run may then use
        a sum of all updates.
    """

    name: str
    partition: Callable[[Partition], Partition] | None = None
    init: Callable[[Tensor, Layout], State] | None = None
    broadcast: Callable[[Message, State], Message] | None = None
    begin: Callable[[ClientView], Tensor] | None = None
    forward: Callable[[dict[str, LayerOp], ClientView], dict[str, LayerOp]] | None = None
    loss: Callable[[LossFn, ClientView], LossFn] | None = None
    grads: Callable[[GradFn, ClientView], GradFn] | None = None
    overhear: Callable[[ServerView], Mapping[str, Value]] | None = None
    own_model: Callable[[ClientView], Tensor] | None = None
    outgoing: Callable[[Update, ClientView], Update] | None = None
    report: Callable[[ClientView], Mapping[str, Value]] | None = None
    weigh: Callable[[Weights, ServerView], Weights] | None = None
    server_update: Callable[[Tensor, State, ServerView], tuple[Tensor, State]] | None = None
    evaluation_override: Callable[[State, ServerView], Mapping[str, Tensor]] | None = None
    claims: frozenset[str] = frozenset()
    needs: frozenset[str] = frozenset()
    excludes: Mapping[str, str] = field(default_factory=dict)
    trusts: frozenset[str] = frozenset()
    base_weights: Literal["examples", "uniform"] = "examples"
    arrivals: int | None = None
    late_share: float = 0.0
    is_phase: bool = False
    is_robust: bool = False
    fits: Callable[[RunSizes], str] | None = None
    wraps: Callable[[Method], Method] | None = None


def require(option: str, value: object, is_right: object, words: str, hint: str = "") -> None:
    """Raise ValueError for an option outside of its range. words: the range; hint: a usual value."""
    if not is_right:
        raise ValueError(f"{option} must be {words}, got {value}" + (f"; {hint}" if hint else ""))
