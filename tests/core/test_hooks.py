"""What a stack hands from one method's hook to the next, without a federation."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from raysim.base.errors import RaysimError
from raysim.core.conflicts import conflicts
from raysim.core.method import Message, Method, Partition
from raysim.core.stack import Stack


@dataclass
class View:
    """As much of a round at the server as these hooks look at."""

    weights: dict
    report: dict = field(default_factory=dict)
    total: object = None
    clients: torch.Tensor = field(default_factory=lambda: torch.arange(2))
    layout: object = field(default_factory=lambda: SimpleNamespace(by_name={"leaf": SimpleNamespace(shape=(3, 4))}))


def client():
    """As much of a client as these hooks look at."""
    return SimpleNamespace(message={}, overheard={}, memory={}, scratch={}, start=torch.zeros(3))


def test_gradients_go_through_every_method_the_first_one_innermost():
    def adds(inner, view):
        return lambda params, batch: inner(params, batch) + 1

    def doubles(inner, view):
        return lambda params, batch: 2 * inner(params, batch)

    stack = Stack([Method("adds", grads=adds), Method("doubles", grads=doubles)])
    views = dict.fromkeys(("adds", "doubles"), client())
    step = stack.client_step(views, None, lambda loss: lambda params, batch: params)
    assert step.gradient(torch.tensor([1.0, 4.0]), None).tolist() == [4, 10]


def test_every_method_gets_parameters_of_its_own_at_the_start():
    def init(params, layout):
        return {"params": params.add_(1)}

    params = torch.zeros(3)
    states = Stack([Method("a", init=init), Method("b", init=init)]).init(params, None)
    assert params.tolist() == [0, 0, 0]
    assert all(state["params"].tolist() == [1, 1, 1] for state in states.values())


def test_one_method_is_enough_for_uniform_base_weights():
    assert Stack([Method("a"), Method("b", base_weights="uniform")]).base_weights == "uniform"
    assert Stack([Method("a")]).base_weights == Stack().base_weights == "examples"


def test_what_a_method_freezes_is_not_sent():
    def partition(whole):
        return Partition(whole.trained - {"a"}, whole.shared, whole.head)

    names = frozenset({"a", "b"})
    left = Stack([Method("freezes", partition=partition)]).partition(Partition(names, names, "b"))
    assert (left.trained, left.shared) == ({"b"}, {"b"})


def test_a_method_sees_the_weights_that_the_method_before_it_made():
    def doubles(weights, view):
        return {name: 2 * view.weights[name] for name in weights}

    both = Stack([Method("first", weigh=doubles), Method("second", weigh=doubles)])
    weights = {"leaf": torch.ones(2, dtype=torch.float64)}
    assert both.weigh(weights, lambda name, so_far: View(so_far))["leaf"].tolist() == [4, 4]


def test_a_claim_leaves_out_what_stands_behind_its_mark():
    most = Method("most", claims=frozenset({"weights:*!weights:head"}))
    head = Method("head", claims=frozenset({"weights:head"}))
    resources = ["weights:body", "weights:head"]
    assert conflicts([most, head], resources, ()) == []
    (fault,) = conflicts([Method("all", claims=frozenset({"weights:*"})), head], resources, ())
    assert "both decide weights:head" in fault


# --- slips of the user's own hooks: each names the method, the hook, the file and the line ----------------------------

PLACE = r".* in .*test_hooks\.py, line \d+, in "


def run_grads(*methods):
    views = {method.name: client() for method in methods}
    step = Stack(methods).client_step(views, None, lambda loss: lambda params, batch: params)
    return step.gradient(torch.zeros(3), None)


def run_loss(method):
    step = Stack([method]).client_step({method.name: client()}, lambda outputs, batch: outputs.sum(), None)
    return step.loss(torch.zeros(3), None)


def run_forward(operation=None, layer=None, hook=None):
    """A layer of five outputs, done by the hook or its operation, on two rows."""
    method = Method("mine", forward=hook or (lambda operations, client: {**operations, "fc": operation}))
    step = Stack([method]).client_step({"mine": client()}, None, None)
    return step.ops["fc"](layer or nn.Linear(4, 5), torch.ones(2, 4))


def writes(inner, client):
    """As a hook, and as what it makes."""
    client.start.add_(1)
    return inner


def makes_writer(inner, client):
    def made(first, second):
        client.start.add_(1)
        return inner(first, second)

    return made


INNOCENT = Method("innocent", grads=lambda inner, client: lambda params, batch: inner(params, batch))


def run_weigh(weight):
    weights = {"leaf": torch.full((2,), 0.5, dtype=torch.float64)}
    method = Method("mine", weigh=lambda weights, server: {"leaf": weight})
    return Stack([method]).weigh(weights, lambda name, so_far: View(so_far))


def run_server(function):
    method = Method("mine", server_update=function)
    return Stack([method]).server_update(torch.zeros(3), {}, lambda name: None)


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (
            lambda: run_grads(Method("mine", grads=lambda inner, client: lambda params, batch: params[:2])),
            r"its grads returned a tensor of shape \(2,\) from the returned function" + PLACE,
        ),
        (
            lambda: run_grads(Method("mine", grads=lambda inner, client: lambda params, batch: None)),
            "its grads returned NoneType from the returned function, not a tensor" + PLACE,
        ),
        (
            lambda: run_grads(Method("mine", grads=lambda inner, client: lambda params: params)),
            r"its grads returned a function that cannot be called with \(params, batch\)" + PLACE,
        ),
        (
            lambda: run_loss(Method("mine", loss=lambda inner, client: lambda outputs, batch: outputs)),
            r"its loss returned a tensor of shape \(3,\) from the returned function" + PLACE,
        ),
        (
            lambda: Stack([Method("mine", broadcast=lambda sent, state: Message(torch.ones(2), {}))]).broadcast(
                torch.ones(3), {}
            ),
            r"its broadcast returned a tensor of shape \(2,\) as the broadcast point" + PLACE,
        ),
        (
            lambda: run_server(lambda update, state, server: (update[:2], state)),
            r"its server_update returned a tensor of shape \(2,\) as the update" + PLACE,
        ),
        (
            lambda: run_server(lambda update, state, server: (update, state, 1)),
            "its server_update returned 3 values" + PLACE,
        ),
        (
            lambda: run_weigh(torch.ones(3, dtype=torch.float64)),
            r"its weigh returned weights of leaf with shape \(3,\)" + PLACE,
        ),
        (
            lambda: run_weigh(torch.ones(2, 4, dtype=torch.float64)),
            r"its weigh returned weights of leaf with shape \(2, 4\)" + PLACE,
        ),
        (lambda: run_weigh(torch.ones(2)), r"its weigh returned weights of leaf with .*float32" + PLACE),
        (lambda: run_weigh(0.5), "its weigh returned weights of leaf with type float" + PLACE),
        (
            lambda: run_weigh(torch.full((2,), float("nan"), dtype=torch.float64)),
            "its weigh returned weights of leaf that are not finite" + PLACE,
        ),
        (
            lambda: Stack([Method("mine", grads=lambda inner: inner)]),
            r"its grads cannot be called with \(gradient, client\)" + PLACE,
        ),
        (
            lambda: Stack([Method("mine", weigh=lambda: {})]),
            r"its weigh cannot be called with \(weights, server\)" + PLACE,
        ),
        (lambda: Stack([Method("mine", report=3)]), "its report must be a function, got int"),
        (
            lambda: run_forward(lambda layer, inputs: layer(inputs)[:1]),
            r"its forward returned a tensor of shape \(1, 5\) from the function for fc" + PLACE,
        ),
        (
            lambda: run_forward(lambda layer, inputs: inputs),
            r"its forward returned a tensor of shape \(2, 4\) .* for fc" + PLACE + r".*Return one of shape \(2, 5\)",
        ),
        (lambda: run_forward(lambda layer, inputs: None), "its forward returned NoneType .* not a tensor" + PLACE),
        (
            lambda: run_forward(lambda layer, inputs: inputs[:1], nn.ReLU()),
            r"its forward returned a tensor of shape \(1, 4\) .*" + PLACE + ".*Return 2 rows",
        ),
        *(
            (act, f"its {hook} wrote to client.start" + PLACE)
            for hook, act in (
                ("grads", lambda: run_grads(Method("mine", grads=writes))),
                ("grads", lambda: run_grads(Method("mine", grads=makes_writer))),
                ("grads", lambda: run_grads(Method("mine", grads=makes_writer), INNOCENT)),
                ("loss", lambda: run_loss(Method("mine", loss=makes_writer))),
                ("forward", lambda: run_forward(hook=writes)),
                (
                    "forward",
                    lambda: run_forward(hook=lambda _, client: {"fc": makes_writer(nn.Module.__call__, client)}),
                ),
                ("report", lambda: Stack([Method("mine", report=lambda c: writes({}, c))]).report({"mine": client()})),
            )
        ),
    ],
)
def test_a_slip_of_a_hook_names_method_file_and_line(act, words):
    with pytest.raises(RaysimError, match="method mine: " + words):
        act()


def test_hooks_of_the_right_shapes_pass():
    assert run_weigh(torch.ones(2, 3, dtype=torch.float64))["leaf"].shape == (2, 3)
    assert run_loss(Method("mine", loss=lambda inner, client: inner)) == 0
    assert run_grads(Method("mine", grads=lambda *anything: anything[0])).shape == (3,)
    assert run_forward(lambda layer, inputs: layer(inputs)).shape == (2, 5)
    assert run_forward(lambda layer, inputs: layer(inputs)[:, :2], nn.ReLU()).shape == (2, 2)
