"""Several methods as a unit: the one place where hooks are applied.

A `Stack` applies the hooks of its methods in list order; in wrapping hooks (`loss`, `grads`) the first method is the
innermost. A stack uses no processes, files or tasks: hooks get views and return values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from raysim.core.hooks import called, check_calls, fault_of_hook, returned, shaped, weighed, wrapped
from raysim.core.layout import Layout
from raysim.core.method import (
    ClientView,
    Crowd,
    GradFn,
    LayerOp,
    LossFn,
    Message,
    Method,
    Partition,
    ServerView,
    State,
    Update,
    Value,
)
from raysim.core.weights import Weights


class ClientStep(NamedTuple):
    """Parts of a client's local loop: replaced layer operations, the loss, and the gradient (None if unused)."""

    ops: dict[str, LayerOp]
    loss: LossFn
    gradient: GradFn | None


class Stack:
    """A list of methods as a unit.

    Example, two server steps in both orders:
      >>> import torch
      >>> halve = Method("halve", server_update=lambda update, state, server: (update / 2, state))
      >>> shift = Method("shift", server_update=lambda update, state, server: (update + 1, state))
      >>> update, states = Stack([halve, shift]).server_update(torch.tensor([4.0]), {}, lambda name: None)
      >>> update, states
      (tensor([3.]), {'halve': {}, 'shift': {}})
      >>> Stack([shift, halve]).server_update(torch.tensor([4.0]), {}, lambda name: None)[0]
      tensor([2.5000])

    Args:
      methods: in the order of the configuration; the empty list is FedAvg.
    """

    def __init__(self, methods: Iterable[Method] = ()):
        listed: list[Method] = []
        for method in methods:
            check_calls(method)
            for wraps in [each.wraps for each in listed if each.wraps is not None]:
                method = wraps(method)
            listed.append(method)
        self.methods = tuple(listed)
        self.needs = frozenset(need for method in self.methods for need in method.needs)
        self.arrivals = next((method.arrivals for method in self.methods if method.arrivals), None)
        is_uniform = any(method.base_weights == "uniform" for method in self.methods)
        self.base_weights: Literal["examples", "uniform"] = "uniform" if is_uniform else "examples"

    def _hooks(self, hook: str) -> Iterator[tuple[Method, Callable[..., Any]]]:
        """Return (method, function of the hook) of each method with the hook, in list order."""
        return ((method, run) for method in self.methods if (run := getattr(method, hook)) is not None)

    def _client_hooks(
        self, hook: str, views: Mapping[str, ClientView]
    ) -> Iterator[tuple[Method, ClientView, Callable[..., Any]]]:
        """Return (method, view, function) of each method with the hook of a client; see `called`."""
        for method, run in self._hooks(hook):
            view = views[method.name]
            yield method, view, called(run, method, hook, view)

    def partition(self, partition: Partition) -> Partition:
        """Return the trained and shared tensors after all methods (intersection).

        Args:
          partition: of the model without methods.
        """
        for method, run in self._hooks("partition"):
            wanted = returned(run(partition), Partition, method, "partition")
            frozen = partition.trained - wanted.trained
            shared = (partition.shared & wanted.shared) - frozen
            partition = replace(partition, trained=partition.trained - frozen, shared=shared)
        return partition

    def init(self, params: Tensor, layout: Layout) -> dict[str, State]:
        """Method name -> its server state at the start of a run. params: [num_params], copied for each method."""
        return {m.name: returned(run(params.clone(), layout), Mapping, m, "init") for m, run in self._hooks("init")}

    def broadcast(self, params: Tensor, states: Mapping[str, State]) -> Message:
        """The broadcast point, and the message fields by method name. params: [num_params], the global parameters."""
        fields: dict[str, Value] = {}
        num_bytes = None
        for method, run in self._hooks("broadcast"):
            sent = run(Message(params, {}), states.get(method.name, {}))
            message = returned(sent, Message, method, "broadcast")
            params = shaped(message.params, params.shape, method, "broadcast", "as the broadcast point")
            fields[method.name] = dict(message.fields)
            num_bytes = num_bytes if message.num_bytes is None else message.num_bytes
        return Message(params, fields, num_bytes)

    def client_step(
        self, views: Mapping[str, ClientView], loss: LossFn, gradient_of: Callable[[LossFn], GradFn]
    ) -> ClientStep:
        """Return the parts of a client's local loop after all methods.

        Args:
          views: method name -> the method's view of the client.
          loss: the base loss.
          gradient_of: gradient_of(loss) -> the innermost gradient function.
        """
        ops: dict[str, LayerOp] = {}
        for method, _ in self._hooks("forward"):
            ops = wrapped(method, "forward", ops, views[method.name])
        for method, _ in self._hooks("loss"):
            loss = wrapped(method, "loss", loss, views[method.name])
        gradient: GradFn | None = None
        for method, _ in self._hooks("grads"):
            gradient = wrapped(method, "grads", gradient or gradient_of(loss), views[method.name])
        return ClientStep(ops, loss, gradient)

    def latecomers(self, clients: Tensor, crowd_of: Callable[[str], Crowd]) -> Tensor:
        """Return (K,) bool: which clients train last. clients: (K,) int64. crowd_of(method name) -> all clients."""
        late = torch.zeros(len(clients), dtype=torch.bool)
        for method, _ in self._hooks("overhear"):
            late |= torch.isin(clients, crowd_of(method.name).drawn(method.late_share))
        return late

    def overhear(self, view_of: Callable[[str], ServerView]) -> dict[str, Mapping[str, Value]]:
        """Return method name -> values for latecomers. view_of(method name) -> the round of the earlier clients."""
        return {m.name: returned(run(view_of(m.name)), Mapping, m, "overhear") for m, run in self._hooks("overhear")}

    def begin(self, views: Mapping[str, ClientView]) -> Tensor | None:
        """Return where the client's local steps begin, [num_state]; None: at the broadcast point."""
        state = None
        for method, view, run in self._client_hooks("begin", views):
            state = shaped(run(view), view.state.shape, method, "begin")
        return state

    def own_model(self, views: Mapping[str, ClientView], *, is_scored: bool) -> Tensor | None:
        """Return a copy of the client's own model, [num_state], or None.

        Args:
          is_scored: whether own models are scored in this round; otherwise only models kept by the client are computed.
        """
        state = None
        for method, view, run in self._client_hooks("own_model", views):
            is_kept = "client-memory" in method.needs
            if is_scored or is_kept:
                state = shaped(run(view), view.state.shape, method, "own_model").clone()
            if is_kept:
                view.memory["own_model"] = state
        return state

    def outgoing(self, update: Update, views: Mapping[str, ClientView]) -> Update:
        """Return the update that a client sends. update: result of the local steps."""
        for method, view, run in self._client_hooks("outgoing", views):
            sent = returned(run(update, view), Update, method, "outgoing")
            shaped(sent.values, update.values.shape, method, "outgoing", "as the update's values")
            update = sent
        return update

    def report(self, views: Mapping[str, ClientView]) -> dict[str, Mapping[str, Value]]:
        """Method name -> {name: number, Tensor or Vector} of a client after its last local step."""
        hooks = self._client_hooks("report", views)
        return {method.name: returned(run(view), Mapping, method, "report") for method, view, run in hooks}

    def weigh(self, weights: Weights, view_of: Callable[[str, Weights], ServerView]) -> Weights:
        """Return the aggregation weights. view_of(method name, weights so far) -> the method's view of the round."""
        for method, _ in self._hooks("weigh"):
            weights = weighed(method, weights, view_of(method.name, weights))
        return weights

    def server_update(
        self, update: Tensor, states: Mapping[str, State], view_of: Callable[[str], ServerView]
    ) -> tuple[Tensor, dict[str, State]]:
        """(update [num_params] to add to the broadcast point, new server states). update: the weighted sum."""
        states = dict(states)
        for method, run in self._hooks("server_update"):
            made = run(update, states.get(method.name, {}), view_of(method.name))
            pair = returned(made, tuple, method, "server_update")
            if len(pair) != 2:
                raise fault_of_hook(method, "server_update", f"returned {len(pair)} values, not (update, state)")
            update = shaped(pair[0], update.shape, method, "server_update", "as the update")
            states[method.name] = returned(pair[1], Mapping, method, "server_update")
        return update, states

    def evaluation_override(
        self, states: Mapping[str, State], view_of: Callable[[str], ServerView]
    ) -> dict[str, Tensor]:
        """Return leaf name -> tensor that replaces the leaf while the global model is scored."""
        tensors: dict[str, Tensor] = {}
        for method, run in self._hooks("evaluation_override"):
            override = run(states.get(method.name, {}), view_of(method.name))
            tensors |= returned(override, Mapping, method, "evaluation_override")
        return tensors
