"""Several methods as a unit: the one place where hooks are applied and methods are composed.

A `Stack` applies the hooks of its methods in list order; in wrapping hooks (`loss`, `grads`) the first method is the
innermost. A stack uses no processes, files or tasks: hooks get views and return values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from raysim.core.conflicts import exclusions
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

T = TypeVar("T")


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

    def partition(self, partition: Partition) -> Partition:
        """Return the trained and shared tensors after all methods (intersection).

        Args:
          partition: of the model without methods.
        """
        for method in self.methods:
            if method.partition is not None:
                wanted = returned(method.partition(partition), Partition, method, "partition")
                frozen = partition.trained - wanted.trained
                shared = (partition.shared & wanted.shared) - frozen
                partition = replace(partition, trained=partition.trained - frozen, shared=shared)
        return partition

    def init(self, params: Tensor, layout: Layout) -> dict[str, State]:
        """Method name -> its server state at the start of a run. params: [num_params], copied for each method."""
        return {
            m.name: returned(m.init(params.clone(), layout), Mapping, m, "init")
            for m in self.methods
            if m.init is not None
        }

    def broadcast(self, params: Tensor, states: Mapping[str, State]) -> Message:
        """The broadcast point, and the message fields by method name. params: [num_params], the global parameters."""
        fields: dict[str, Value] = {}
        num_bytes = None
        for method in self.methods:
            if method.broadcast is not None:
                sent = method.broadcast(Message(params, {}), states.get(method.name, {}))
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
        for method in self.methods:
            if method.forward is not None:
                ops = wrapped(method, "forward", ops, views[method.name])
            if method.loss is not None:
                loss = wrapped(method, "loss", loss, views[method.name])
        gradient: GradFn | None = None
        for method in self.methods:
            if method.grads is not None:
                gradient = wrapped(method, "grads", gradient or gradient_of(loss), views[method.name])
        return ClientStep(ops, loss, gradient)

    def latecomers(self, clients: Tensor, crowd_of: Callable[[str], Crowd]) -> Tensor:
        """Return (K,) bool: which clients train last. clients: (K,) int64. crowd_of(method name) -> all clients."""
        late = torch.zeros(len(clients), dtype=torch.bool)
        for method in self.methods:
            if method.overhear is not None:
                late |= torch.isin(clients, crowd_of(method.name).drawn(method.late_share))
        return late

    def overhear(self, view_of: Callable[[str], ServerView]) -> dict[str, Mapping[str, Value]]:
        """Return method name -> values for latecomers. view_of(method name) -> the round of the earlier clients."""
        return {
            m.name: returned(m.overhear(view_of(m.name)), Mapping, m, "overhear")
            for m in self.methods
            if m.overhear is not None
        }

    def begin(self, views: Mapping[str, ClientView]) -> Tensor | None:
        """Return where the client's local steps begin, [num_state]; None: at the broadcast point."""
        state = None
        for method in self.methods:
            if method.begin is not None:
                view = views[method.name]
                made = called(method.begin, method, "begin", view)(view)
                state = shaped(made, view.state.shape, method, "begin")
        return state

    def own_model(self, views: Mapping[str, ClientView], *, is_scored: bool) -> Tensor | None:
        """Return a copy of the client's own model, [num_state], or None.

        Args:
          is_scored: whether own models are scored in this round; otherwise only models kept by the client are computed.
        """
        state = None
        for method in self.methods:
            if method.own_model is not None and (is_scored or "client-memory" in method.needs):
                view = views[method.name]
                state = called(method.own_model, method, "own_model", view)(view)
                state = shaped(state, view.state.shape, method, "own_model").clone()
                if "client-memory" in method.needs:
                    view.memory["own_model"] = state
        return state

    def outgoing(self, update: Update, views: Mapping[str, ClientView]) -> Update:
        """Return the update that a client sends. update: result of the local steps."""
        for method in self.methods:
            if method.outgoing is not None:
                view = views[method.name]
                sent = returned(
                    called(method.outgoing, method, "outgoing", view)(update, view), Update, method, "outgoing"
                )
                shaped(sent.values, update.values.shape, method, "outgoing", "as the update's values")
                update = sent
        return update

    def report(self, views: Mapping[str, ClientView]) -> dict[str, Mapping[str, Value]]:
        """Method name -> {name: number, Tensor or Vector} of a client after its last local step."""
        return {
            m.name: returned(called(m.report, m, "report", views[m.name])(views[m.name]), Mapping, m, "report")
            for m in self.methods
            if m.report is not None
        }

    def weigh(self, weights: Weights, view_of: Callable[[str, Weights], ServerView]) -> Weights:
        """Return the aggregation weights. view_of(method name, weights so far) -> the method's view of the round."""
        for method in self.methods:
            if method.weigh is not None:
                weights = weighed(method, weights, view_of(method.name, weights))
        return weights

    def server_update(
        self, update: Tensor, states: Mapping[str, State], view_of: Callable[[str], ServerView]
    ) -> tuple[Tensor, dict[str, State]]:
        """(update [num_params] to add to the broadcast point, new server states). update: the weighted sum."""
        states = dict(states)
        for method in self.methods:
            if method.server_update is not None:
                state = states.get(method.name, {})
                pair = returned(
                    method.server_update(update, state, view_of(method.name)), tuple, method, "server_update"
                )
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
        for method in self.methods:
            if method.evaluation_override is not None:
                override = method.evaluation_override(states.get(method.name, {}), view_of(method.name))
                tensors |= returned(override, Mapping, method, "evaluation_override")
        return tensors


def chain(name: str, *parts: Method) -> Method:
    """Compose several methods into one, in their order.

    Each part keeps its own message fields, client memory, scratch, reports and server state inside those of the chain.

    Example:
      >>> from methods.fedavgm import fedavgm
      >>> from methods.fedprox import fedprox
      >>> chain("near_and_steady", fedprox(mu=0.1), fedavgm(beta=0.9)).grads is not None
      True

    Raises:
      ValueError: a part is a phase of its own, which cannot be inside another method, or has a hook that another part excludes.
    """
    if phases := [part.name for part in parts if part.is_phase]:
        raise ValueError(f"chain {name!r}: {', '.join(phases)} runs as a separate phase; list it beside the chain")
    if faults := exclusions(parts):
        raise ValueError(f"chain {name!r}: {faults[0]}")
    stack = Stack(parts)

    def where(hook: str, run: T) -> T | None:
        return run if any(getattr(part, hook) is not None for part in parts) else None

    def report(view: ClientView) -> dict[str, Value]:
        reports = stack.report(_clients_inside(view, parts))
        return {f"{part}.{key}": value for part, values in reports.items() for key, value in values.items()}

    def begin(view: ClientView) -> Tensor:
        return cast("Tensor", stack.begin(_clients_inside(view, parts)))  # the chain has a hook if a part has it

    def own_model(view: ClientView) -> Tensor:
        return cast("Tensor", stack.own_model(_clients_inside(view, parts), is_scored=True))

    def weigh(weights: Weights, view: ServerView) -> Weights:
        return stack.weigh(weights, lambda part, so_far: replace(_server_inside(view, part), weights=so_far))

    def server_update(update: Tensor, state: State, view: ServerView) -> tuple[Tensor, State]:
        return stack.server_update(update, state, lambda part: _server_inside(view, part))

    def override(state: State, view: ServerView) -> dict[str, Tensor]:
        return stack.evaluation_override(state, lambda part: _server_inside(view, part))

    return Method(
        name,
        partition=where("partition", stack.partition),
        init=where("init", stack.init),
        broadcast=where("broadcast", lambda message, state: stack.broadcast(message.params, state)),
        begin=where("begin", begin),
        forward=_one_after_another(parts, "forward"),
        loss=_one_after_another(parts, "loss"),
        grads=_one_after_another(parts, "grads"),
        overhear=where("overhear", lambda view: stack.overhear(lambda part: _server_inside(view, part))),
        own_model=where("own_model", own_model),
        outgoing=where("outgoing", lambda update, view: stack.outgoing(update, _clients_inside(view, parts))),
        report=where("report", report),
        weigh=where("weigh", weigh),
        server_update=where("server_update", server_update),
        evaluation_override=where("evaluation_override", override),
        claims=frozenset(claim for part in parts for claim in part.claims),
        needs=stack.needs,
        excludes={hook: reason for part in parts for hook, reason in part.excludes.items()},
        trusts=frozenset(other for part in parts for other in part.trusts),
        is_robust=any(part.is_robust for part in parts),
        fits=lambda sizes: next(filter(None, (part.fits(sizes) for part in parts if part.fits is not None)), ""),
        base_weights=stack.base_weights,
        arrivals=stack.arrivals,
        late_share=max((part.late_share for part in parts), default=0.0),  # shares of one crowd are nested
    )


def _one_after_another(
    parts: Sequence[Method], hook: Literal["forward", "loss", "grads"]
) -> Callable[[Any, ClientView], Any] | None:
    """Compose the parts' `forward`, `loss` or `grads` hooks; None if no part has the hook."""
    wrapping = [part for part in parts if getattr(part, hook) is not None]

    def run(inner: Any, view: ClientView) -> Any:
        for part in wrapping:
            inner = wrapped(part, hook, inner, _client_inside(view, part))
        return inner

    return run if wrapping else None


def _clients_inside(view: ClientView, parts: Sequence[Method]) -> dict[str, ClientView]:
    """Return name of a part -> view of the client for the part."""
    return {part.name: _client_inside(view, part) for part in parts}


def _client_inside(view: ClientView, part: Method) -> ClientView:
    """Return a chain part's view of the client, with the part's message fields, memory and scratch."""
    inside = copy(view)
    inside.message = view.message.get(part.name, {})
    inside.overheard = view.overheard.get(part.name, {})
    inside.memory = view.memory.setdefault(part.name, {}) if "client-memory" in part.needs else {}
    inside.scratch = view.scratch.setdefault(part.name, {})
    return inside


def _server_inside(view: ServerView, part: str) -> ServerView:
    """Return a chain part's view of the round, with the part's reports and Vectors."""
    start, inside = f"{part}.", copy(view)
    inside.report = {key.removeprefix(start): value for key, value in view.report.items() if key.startswith(start)}
    inside.total = lambda vector, weights: view.total(vector if vector == "update" else start + vector, weights)
    return inside
