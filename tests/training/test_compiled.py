"""Compiled local steps: the numbers of uncompiled ones, by one graph for each model."""

from __future__ import annotations

import math
import os
import shutil

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from raysim.base.errors import ConfigError
from raysim.core.layout import layout_of
from raysim.core.method import Batch
from raysim.engine.simulation import Stopped
from raysim.running.runner import execute
from raysim.training.model import BoundModel, compiled
from raysim.training.tasks import cross_entropy
from tests.support.federations import lora_plan, plan_of, run
from tests.support.method_cases import ADAPTER_CASES, CNN_CASES

#: Hooks that change the loss, ask for features and other passes, differentiate elsewhere, and change the gradient.
HOOKS = ["fedrs", "moon", "fedsol", "scaffold"]


@pytest.fixture
def num_graphs():
    """num_graphs(): graphs compiled in this process since the test began."""
    before = counters["stats"]["unique_graphs"]
    return lambda: counters["stats"]["unique_graphs"] - before


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("methods", [[], HOOKS], ids=["fedavg", "hooks"])
def test_clients_of_all_sizes_share_a_graph_and_have_the_same_bits(methods, backend, root, num_graphs):
    groups, local = {"model": {"norm": "batch"}, "rounds": 2, "cohort": {"size": 12}}, {"batch_size": 20, "epochs": 2}
    plan = plan_of(root, methods, **groups, local={"compile": backend, **local})
    sizes = plan.manifest.sizes
    assert len({size % 20 for size in sizes}) > 4  # last batches
    assert min(sizes) < 20 < max(sizes)
    expected = run(plan_of(root, methods, **groups, local=local), root).params_sha256()
    assert num_graphs() == 0
    assert run(plan, root).params_sha256() == expected
    assert num_graphs() == 1


def test_adapters_with_dropout_in_bfloat16_have_the_same_bits(root, num_graphs):
    model, local, groups = {"dropout": 0.2}, {"precision": "bfloat16"}, {"rounds": 1, "cohort": {"size": 5}}
    expected = run(lora_plan(root, ADAPTER_CASES["livar"], model=model, local=local, **groups), root).params_sha256()
    compiled = lora_plan(root, ADAPTER_CASES["livar"], model=model, local={**local, "compile": "eager"}, **groups)
    assert run(compiled, root).params_sha256() == expected
    assert num_graphs() == 1


def test_no_kernel_is_chosen_by_timing(monkeypatch):
    given = []
    monkeypatch.setattr(torch, "compile", lambda forward, **options: given.append(options) or forward)
    monkeypatch.setattr("torch._inductor.list_options", lambda: ["deterministic"])
    compiled(nn.Linear(2, 2), True, 4, torch.device("cpu"))
    assert given == [{"options": {"deterministic": True}, "dynamic": False}]


def test_a_batch_of_another_size_is_not_compiled(num_graphs):
    model = small(batch_size=8)
    for size in (3, 8, 5, 8, 1):
        model.descend(cross_entropy, Batch(torch.ones(size, 6), torch.zeros(size, dtype=torch.int64)), 0.1)
        assert num_graphs() == (0 if size == 3 else 1)


def test_each_of_many_models_of_a_process_is_compiled(num_graphs):
    """PyTorch compiles nothing more after eight graphs of one function."""
    for count in range(1, 13):
        model = small(batch_size=2, width=count)
        model.descend(cross_entropy, Batch(torch.ones(2, 6), torch.zeros(2, dtype=torch.int64)), 0.1)
        assert num_graphs() == count


def small(*, batch_size, width=4):
    module = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))
    return BoundModel(module, layout_of(module, head="2"), head="2", backend="eager", batch_size=batch_size)


def test_a_method_that_replaces_layer_operations_is_refused(root):
    with pytest.raises(ConfigError, match=r"local\.compile: flfa replaces operations of layers for each client"):
        plan_of(root, CNN_CASES["flfa"], local={"compile": True})


def test_a_resumed_run_has_the_bits_of_one_run_through(root, tmp_path):
    def executed(name, stop_after=0, **local):
        groups = {"rounds": 3, "name": name, "storage": str(tmp_path), "checkpoint": {"every_s": 0}}

        def on_round(record):
            if record.round_index + 1 == stop_after:
                raise Stopped

        return execute(plan_of(root, ["scaffold"], **groups, local=local), on_round=on_round)["params_sha256"]

    with pytest.raises(Stopped):
        executed("halves", stop_after=2, compile="eager")
    assert executed("halves", compile="eager") == executed("whole")


def test_trainers_on_ray_have_the_same_bits(root, ray_pools):
    plan = plan_of(root, HOOKS, rounds=2, local={"compile": "eager"})
    expected = run(plan_of(root, HOOKS, rounds=2), root).params_sha256()
    assert {run(plan, root, pool).params_sha256() for pool in ray_pools(plan)} == {expected}


@pytest.mark.slow
def test_a_trainer_on_ray_may_compile_for_as_long_as_it_takes(root, tmp_path, ray_cluster, monkeypatch):
    limits = []

    def noted(*_, timeout_s, **__):
        limits.append(timeout_s)
        raise Stopped

    monkeypatch.setattr("raysim.engine.ray.server.TrainerStarter", noted)
    for backend in (False, "eager"):
        plan = plan_of(
            root, name=str(backend), storage=str(tmp_path), resources={"backend": "ray"}, local={"compile": backend}
        )
        with pytest.raises(Stopped):
            execute(plan)
    assert limits == [None, math.inf]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
@pytest.mark.skipif("ATEN_CPU_CAPABILITY" in os.environ, reason="inductor writes this CPU's vector instructions")
def test_inductor_differs_by_rounding(root):
    start, plain = (run(plan_of(root, HOOKS), root, rounds=count).state for count in (0, 2))
    compiled = run(plan_of(root, HOOKS, local={"compile": True}), root, rounds=2).state
    assert float((compiled - plain).norm() / (plain - start).norm()) < 1e-4
