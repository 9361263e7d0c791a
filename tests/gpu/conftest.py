"""Fixtures: a Ray that owns the real GPU, and trainer actors on quarters of it."""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.path.parts:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish():
    """End a worker of xdist whose GPU has failed: all later calls of CUDA would fail, and a new worker takes over."""
    if "PYTEST_XDIST_WORKER" in os.environ and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(3)


@pytest.fixture(scope="session")
def gpu_actors(ray_cluster):
    """Four trainer actors with a quarter of the GPU each, whose trainers can be exchanged between tests."""
    from raysim.engine.ray.slots import TrainerActor

    class Swappable(TrainerActor):
        def __init__(self):
            super().__init__(None, 0.25)

        def become(self, make_trainer):
            self._make_trainer = make_trainer

    options = {"num_cpus": 0.5, "num_gpus": 0.25, "max_restarts": -1, "max_task_retries": 3}
    actor = ray_cluster.remote(Swappable).options(**options)
    return [actor.remote() for _ in range(4)]


@pytest.fixture
def gpu_recipe(root):
    """recipe(plan) of trainers that take the GPU."""
    from tests.support.federations import recipe_of

    return lambda plan: recipe_of(plan, root, wants_gpu=True)


@pytest.fixture
def gpu_pools(gpu_actors, gpu_recipe):
    """pools(plan) -> RayPools of 1, 2 and 4 trainers on one GPU."""
    import ray

    from raysim.engine.ray.pool import RayPool
    from raysim.engine.ray.slots import TrainerSlots
    from raysim.plan.build import make_trainer

    def pools(plan):
        recipe = gpu_recipe(plan)
        ray.get([actor.become.remote(partial(make_trainer, recipe)) for actor in gpu_actors])
        return [RayPool(TrainerSlots(gpu_actors.__getitem__, count, 0.25), plan.keeps_memory) for count in (1, 2, 4)]

    return pools
