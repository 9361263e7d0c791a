"""Checks of hook arguments and results; an error names the method, the hook, the file and the line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import Linear, Module

from raysim.base.errors import RaysimError, UserCodeError
from raysim.base.user_places import accepts, place_of
from raysim.core.method import ClientView, LayerOp, Method, ServerView
from raysim.core.weights import RightMap, Weights

T = TypeVar("T")

#: Hook -> its arguments, as in the table of raysim/core/method.py.
CALLS = {
    "partition": ("partition",),
    "init": ("params", "layout"),
    "broadcast": ("message", "state"),
    "forward": ("operations", "client"),
    "loss": ("loss", "client"),
    "grads": ("gradient", "client"),
    "overhear": ("server",),
    "begin": ("client",),
    "own_model": ("client",),
    "outgoing": ("update", "client"),
    "report": ("client",),
    "weigh": ("weights", "server"),
    "server_update": ("update", "state", "server"),
    "evaluation_override": ("state", "server"),
}

#: Hook -> arguments of the functions that the hook returns.
INNER_CALLS = {"forward": ("layer", "inputs"), "loss": ("outputs", "batch"), "grads": ("params", "batch")}


def fault_of_hook(method: Method, hook: str, what: str, mend: str = "") -> UserCodeError:
    """Return an error for a fault in a method's hook. what: the fault, as in "returned str, not a tensor"."""
    mend = mend or "the table at the top of raysim/core/method.py says what each hook takes and returns"
    return UserCodeError(f"method {method.name}: its {hook} {what}", place_of(getattr(method, hook)), mend)


def check_calls(method: Method) -> None:
    """Refuse a hook with an incompatible signature.

    Raises:
      UserCodeError: the hook is not a function, or takes another number of arguments.
    """
    for hook, values in CALLS.items():
        function = getattr(method, hook)
        if function is not None and not callable(function):
            what = f"method {method.name}: its {hook} must be a function, got {type(function).__name__}"
            raise UserCodeError(what, mend=f"give a function of ({', '.join(values)})")
        if function is not None and not accepts(function, len(values)):
            what = f"cannot be called with ({', '.join(values)})"
            raise fault_of_hook(method, hook, what, f"write {hook}({', '.join(values)})")


def returned(value: T, kind: type, method: Method, hook: str) -> T:
    """Return a hook's result after a type check."""
    if not isinstance(value, kind):
        wanted = kind.__name__ if kind.__name__ in ("Partition", "Message") else kind.__name__.lower()
        raise fault_of_hook(method, hook, f"returned {type(value).__name__}, not a {wanted}")
    return value


def shaped(value: object, shape: torch.Size, method: Method, hook: str, where: str = "") -> Tensor:
    """Return a hook's tensor after a shape check.

    Args:
      where: the part of the returned value, as in "as its update".
    """
    behind = f" {where}" if where else ""
    if not isinstance(value, Tensor):
        raise fault_of_hook(method, hook, f"returned {type(value).__name__}{behind}, not a tensor")
    if value.shape != shape:
        what = f"returned a tensor of shape {tuple(value.shape)}{behind}"
        raise fault_of_hook(method, hook, what, f"return one of shape {tuple(shape)}")
    return value


def called(function: Callable[..., T], method: Method, hook: str, view: ClientView) -> Callable[..., T]:
    """Wrap a client's hook so that writing to the shared broadcast point is an error.

    PyTorch counts the writes to a tensor, so the check costs nothing.
    """

    def call(*values: object) -> T:
        writes = view.start._version
        value = function(*values)
        if view.start._version != writes:
            mend = "work on a copy: all clients start from the same vector"
            raise fault_of_hook(method, hook, "wrote to client.start", mend)
        return value

    return call


def wrapped(method: Method, hook: Literal["forward", "loss", "grads"], inner: T, view: ClientView) -> T:
    """Compose wrapping hooks; the returned functions are checked at every call.

    Args:
      inner: the layer operations by layer, the loss, or the gradient function.
    """
    outer = called(getattr(method, hook), method, hook, view)(inner, view)
    if hook == "forward":
        after, before = (cast("Mapping[str, LayerOp]", operations) for operations in (outer, inner))
        return cast("T", _operations(after, before, method, view))
    if not callable(outer):
        raise fault_of_hook(method, hook, f"returned {type(outer).__name__}, not a callable")
    _check_inner(outer, method, hook)
    if outer is inner:
        return inner
    function = called(outer, method, hook, view)

    def checked(first: Tensor, batch: object) -> Tensor:
        """Call the function and check its result. first: outputs for a loss, parameters for a gradient."""
        value = function(first, batch)
        shape = torch.Size() if hook == "loss" else first.shape
        return shaped(value, shape, method, hook, "from the returned function")

    return cast("T", checked)


def _operations(
    outer: Mapping[str, LayerOp], inner: Mapping[str, LayerOp], method: Method, view: ClientView
) -> dict[str, LayerOp]:
    """Layer operations returned by `forward`; new operations are wrapped in a shape check."""
    operations = {}
    for layer, operation in returned(outer, Mapping, method, "forward").items():
        _check_inner(operation, method, "forward")
        is_made = operation is not inner.get(layer)
        operations[layer] = _checked_operation(layer, operation, method, view) if is_made else operation
    return operations


def _checked_operation(name: str, operation: LayerOp, method: Method, view: ClientView) -> LayerOp:
    """Wrap an operation: the result must have a row for each input row and, for a linear layer, the layer's columns.

    The classifier is a linear layer: surplus columns would train without an error.
    """
    function = called(operation, method, "forward", view)

    def checked(layer: Module, inputs: Tensor) -> Tensor:
        outputs = function(layer, inputs)
        where = f"from the function for {name}"
        if isinstance(layer, Linear):  # rows of the weight: a method may run the layer with a narrower weight
            shape = torch.Size((*inputs.shape[:-1], len(layer.weight)))
            return shaped(outputs, shape, method, "forward", where)
        if isinstance(outputs, Tensor) and outputs.shape[:1] != inputs.shape[:1]:
            what = f"returned a tensor of shape {tuple(outputs.shape)} {where}"
            raise fault_of_hook(method, "forward", what, f"return {len(inputs)} rows, as its inputs have")
        return outputs

    return checked


def _check_inner(function: Callable[..., object], method: Method, hook: str) -> None:
    values = INNER_CALLS[hook]
    if not callable(function) or not accepts(function, len(values)):
        what = f"returned a function that cannot be called with ({', '.join(values)})"
        raise fault_of_hook(method, hook, what)


def weighed(method: Method, weights: Weights, view: ServerView) -> Weights:
    """Return the aggregation weights of a method's `weigh`, checked for shape to prevent silent broadcasting.

    Raises:
      UserCodeError: no such leaf, another shape or type. RaysimError: a weight that is not finite.
    """
    assert method.weigh is not None
    new = returned(method.weigh(weights, view), Mapping, method, "weigh")
    leaves, count = view.layout.by_name, len(view.clients)
    for name, weight in new.items():
        if name not in leaves:
            mend = f"leaves: {', '.join(list(leaves)[:8])}{' ...' if len(leaves) > 8 else ''}"
            raise fault_of_hook(method, "weigh", f"returned weights for {name!r}, which is not a leaf", mend)
        if not _is_weight(weight, count, leaves[name].shape):
            values = weight.maps if isinstance(weight, RightMap) else weight
            is_tensor = isinstance(values, Tensor)
            form = f"shape {tuple(values.shape)} and {values.dtype}" if is_tensor else f"type {type(values).__name__}"
            shape = (count, *leaves[name].shape)
            mend = f"return float64 of shape {shape[:1]}, or with further axes of {shape}"
            raise fault_of_hook(method, "weigh", f"returned weights of {name} with {form}", mend)
        if not bool(torch.isfinite(weight.maps if isinstance(weight, RightMap) else weight).all()):
            what = f"method {method.name}: its weigh returned weights of {name} that are not finite"
            raise RaysimError(what, place_of(method.weigh), "give the client weight 0")
    return new


def _is_weight(weight: object, count: int, leaf: tuple[int, ...]) -> bool:
    """Return whether a value has the form of weights of this number of clients on a leaf of this shape."""
    if isinstance(weight, RightMap):
        return weight.maps.dtype == torch.float64 and weight.maps.shape == (count, *leaf[1:], *leaf[1:])
    if not isinstance(weight, Tensor) or weight.dtype != torch.float64 or not weight.dim():
        return False
    return weight.shape == (count, *leaf)[: weight.dim()]
