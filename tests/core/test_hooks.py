"""What a stack hands from one method's hook to the next, without a federation."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from raysim.core.method import Method, Partition
from raysim.core.stack import Stack, chain, conflicts


@dataclass
class View:
    """As much of a round at the server as these hooks look at."""

    weights: dict
    report: dict = field(default_factory=dict)
    total: object = None


def test_gradients_go_through_every_method_the_first_one_innermost():
    def adds(inner, view):
        return lambda params, batch: inner(params, batch) + 1

    def doubles(inner, view):
        return lambda params, batch: 2 * inner(params, batch)

    stack = Stack([Method("adds", grads=adds), Method("doubles", grads=doubles)])
    step = stack.client_step({"adds": None, "doubles": None}, None, lambda loss: lambda params, batch: params)
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


def test_a_part_of_a_chain_sees_the_weights_that_the_part_before_it_made():
    def doubles(weights, view):
        return {name: 2 * view.weights[name] for name in weights}

    both = chain("both", Method("first", weigh=doubles), Method("second", weigh=doubles))
    weights = {"leaf": torch.ones(2)}
    assert both.weigh(weights, View(weights))["leaf"].tolist() == [4, 4]


def test_a_claim_leaves_out_what_stands_behind_its_mark():
    most = Method("most", claims=frozenset({"weights:*!weights:head"}))
    head = Method("head", claims=frozenset({"weights:head"}))
    resources = ["weights:body", "weights:head"]
    assert conflicts([most, head], resources, ()) == []
    (fault,) = conflicts([Method("all", claims=frozenset({"weights:*"})), head], resources, ())
    assert "both decide weights:head" in fault
