"""The GPU path on a real card: the same bits from any number of trainers, shares of its memory, numbers near the CPU's."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from raysim.engine.pool import SerialPool
from raysim.plan.build import make_server, make_trainer
from raysim.running.runner import execute
from tests.support.federations import ADAMW, lora_plan, plan_of, run
from tests.support.method_cases import ADAPTER_CASES, CNN_CASES


def outcome(plan, recipe, pool=None):
    """(digest, losses) of a run on the GPU, serial unless a pool is given."""
    server = make_server(recipe, pool or SerialPool(partial(make_trainer, recipe), plan.keeps_memory))
    records = [server.run_round(index) for index in range(plan.num_rounds)]
    assert pool is not None or server.pool._trainer.model.device.type == "cuda"
    return server.params_sha256(), [record.metrics["server/loss"] for record in records]


@pytest.mark.parametrize("name", CNN_CASES)
def test_any_number_of_trainers_on_one_gpu_gives_the_same_bits(name, root, gpu_pools, gpu_recipe):
    plan = plan_of(root, CNN_CASES[name], model={"norm": "batch"})
    expected = outcome(plan, gpu_recipe(plan))
    assert [outcome(plan, gpu_recipe(plan), pool) for pool in gpu_pools(plan)] == [expected] * 3


@pytest.mark.parametrize("name", ADAPTER_CASES)
def test_adapters_give_the_same_bits_on_one_gpu(name, root, gpu_pools, gpu_recipe):
    plan = lora_plan(root, ADAPTER_CASES[name], data={"test": 0.7}, rounds=2, cohort={"size": 5})
    expected = outcome(plan, gpu_recipe(plan))
    assert [outcome(plan, gpu_recipe(plan), pool) for pool in gpu_pools(plan)] == [expected] * 3


def test_livar_with_adapters_on_vit_s16_gives_the_same_bits(root, gpu_pools, gpu_recipe):
    plan = plan_of(
        root,
        ["livar"],
        model={"name": "vit_s16", "lora": {"rank": 8}},
        local=ADAMW,
        data={"resize": 224, "channels": 3, "test": 0.7},
        rounds=1,
        cohort={"size": 4},
    )
    expected = outcome(plan, gpu_recipe(plan))
    assert [outcome(plan, gpu_recipe(plan), pool) for pool in gpu_pools(plan)] == [expected] * 3


@pytest.mark.parametrize("name", ["fedavg", "fedvg-block", "scaffold", "flfa", "regmean"])
def test_gpu_is_near_the_cpu(name, root, gpu_recipe):
    """Not equal: sums are made in another order, and convolutions in TF32."""
    plan = plan_of(root, CNN_CASES[name], rounds=2)
    start, cpu = (run(plan, root, rounds=count).state for count in (0, 2))
    recipe = gpu_recipe(plan)
    server = make_server(recipe, SerialPool(partial(make_trainer, recipe), plan.keeps_memory))
    for index in range(2):
        server.run_round(index)
    assert float((server.state - cpu).norm() / (cpu - start).norm()) < 0.02


@pytest.mark.parametrize("name", ["fedavg", "fedrs", "moon", "fedsol", "scaffold", "univarfl", "fedproto"])
def test_cuda_graphs_give_the_same_bits_near_the_cpus(name, root, gpu_pools, gpu_recipe):
    plain = plan_of(root, CNN_CASES[name], rounds=2)
    start, cpu = (run(plain, root, rounds=count).state for count in (0, 2))
    plan = plan_of(root, CNN_CASES[name], rounds=2, local={"compile": True})
    server = make_server(gpu_recipe(plan), SerialPool(partial(make_trainer, gpu_recipe(plan)), plan.keeps_memory))
    for index in range(2):
        server.run_round(index)
    assert float((server.state - cpu).norm() / (cpu - start).norm()) < 0.02
    pools = gpu_pools(plan)[1:]
    assert {outcome(plan, gpu_recipe(plan), pool)[0] for pool in pools} == {server.params_sha256()}


@pytest.mark.parametrize("backend", ["serial", "ray"])
def test_run_takes_the_gpu_and_says_so(backend, root, tmp_path, ray_cluster):
    resources = {"backend": backend} | ({"trainers": 2} if backend == "ray" else {})
    plan = plan_of(root, ["fedvg"], storage=str(tmp_path), name=backend, resources=resources)
    execute(plan, on_start=lambda *_: None, on_round=lambda _: None)
    environment = json.loads((tmp_path / backend / "env.json").read_text())["resources"]
    assert environment["gpus_per_trainer"] == (1.0 if backend == "serial" else 0.5)
    assert backend == "ray" or torch.cuda.max_memory_allocated() > 0


def test_trainer_keeps_to_its_share_of_the_memory(root, gpu_actors, gpu_pools, gpu_recipe):
    """A client that asks for more than a quarter of the card ends its trainer; with half the card it goes through.

    The last test: it ends an actor.
    """
    groups = {"cohort": {"size": 12}, "rounds": 2}
    plain = plan_of(root, **groups)
    expected = outcome(plain, gpu_recipe(plain))
    plan = plan_of(root, [{"tests.support.toys:hungry": {"client": 1, "share": 0.4}}], **groups)
    pool = gpu_pools(plan)[1]  # two trainers with a quarter each: the one that is left may use a half
    assert outcome(plan, gpu_recipe(plan), pool) == expected
    assert sum(place.is_retired for place in pool.slots._slots) == 1
