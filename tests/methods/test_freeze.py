"""Freeze's property checks."""

from __future__ import annotations

import pytest
import torch

from raysim.models import build_model
from raysim.plan.build import make_trainer
from tests.support.federations import plan_of, recipe_of, run, server_on, steps_plan

LOCALS = {"momentum": 0.9, "weight_decay": 0.1, "lr": 0.05}


def initial_head(plan):
    spec = plan.spec
    return {n: p.detach().clone() for n, p in build_model(spec, seed=plan.config.seed).fc2.named_parameters()}


def test_the_head_keeps_its_initial_value_everywhere(root):
    plan = plan_of(root, ["freeze"], local=LOCALS)
    want = initial_head(plan)
    server = run(plan, root)
    trainer = server.pool._trainer  # has trained, folded and evaluated
    other = make_trainer(recipe_of(plan, root))
    for name, value in want.items():
        assert torch.equal(trainer.model.module.fc2.get_parameter(name), value)
        assert torch.equal(other.model.module.fc2.get_parameter(name), value)
    assert not any(leaf.name.startswith("fc2") for leaf in server.layout.leaves)
    assert "conv1.weight" in server.layout.by_name


def test_the_frozen_head_is_part_of_what_is_evaluated(root):
    server, plain = server_on(plan_of(root, ["freeze"]), root), server_on(plan_of(root), root)
    assert server.evaluate() == plain.evaluate()
    server.run_round(0)
    views, mine = plain.layout.views(plain.state), server.layout.views(server.state)
    for name, value in mine.items():
        views[name].copy_(value)
    assert server.evaluate() == plain.evaluate()


def test_the_first_steps_body_gradient_is_fedavgs(root):
    states = []
    for methods in ([], ["freeze"]):
        server = run(steps_plan(root, methods, steps=1, local={"lr": 0.1}), root, rounds=1)
        states.append({name: value.clone() for name, value in server.layout.views(server.state).items()})
    plain, frozen = states
    assert set(plain) - set(frozen) == {"fc2.weight", "fc2.bias"}
    for name, value in frozen.items():
        assert torch.equal(value, plain[name]), name


def test_the_head_is_not_sent(root):
    plain, frozen = (server_on(plan_of(root, m), root) for m in ([], ["freeze"]))
    sizes = [server.run_round(0).metrics["comm/up_mb"] for server in (plain, frozen)]
    head = sum(p.numel() for p in initial_head(plan_of(root)).values())
    assert sizes[0] - sizes[1] == pytest.approx(7 * 4 * head / 1e6)


def test_trained_locally_but_never_averaged(root):
    plan = plan_of(root, [{"freeze": {"trains_locally": True}}], local=LOCALS)
    server = run(plan, root)
    values = server.layout.views(server.state)
    for name, value in initial_head(plan).items():
        assert torch.equal(values[f"fc2.{name}"], value)
    frozen = run(plan_of(root, ["freeze"], local=LOCALS), root)
    assert not torch.equal(values["fc1.weight"], frozen.layout.view(frozen.state, "fc1.weight"))
