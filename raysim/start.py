"""From a checked plan to a running server: its shards, its share of the machine, its trainers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from raysim.build import Plan, make_server, make_trainer
from raysim.config import data_cache
from raysim.data.federation import build_shards, write_serially
from raysim.engine.server import Server
from raysim.engine.simulation import ServerHandle
from raysim.engine.trainer import SerialPool
from raysim.environment import environment
from raysim.models import build_model
from raysim.resources import resolve_resources
from raysim.run_folder import RunFolder
from raysim.terminal import err


@contextmanager
def started_server(plan: Plan, folder: RunFolder) -> Iterator[ServerHandle]:
    """A server with its trainers, serial or on Ray; env.json says what they take.

    Raises:
      ConfigError: Ray has not the resources that the configuration asks for.
    """
    if plan.config.resources.backend == "serial":
        yield _serial_server(plan, folder)
    else:
        with _ray_server(plan, folder) as server:
            yield server


def _serial_server(plan: Plan, folder: RunFolder) -> Server:
    wanted = plan.config.resources
    shards = build_shards(plan.manifest, data_cache(plan.config) / "shards")
    wants_gpu = wanted.gpus_per_trainer != 0
    recipe = plan.recipe(shards, num_threads=threads_of(wanted.cpus), wants_gpu=wants_gpu)
    taken = {
        "backend": "serial",
        "trainers": 1,
        "gpus_per_trainer": float(wants_gpu and torch.cuda.is_available()),
        "threads_per_trainer": recipe.num_threads,
    }
    folder.write_json(folder.environment, environment(taken))
    return make_server(recipe, SerialPool(partial(make_trainer, recipe), plan.keeps_memory))


@contextmanager
def _ray_server(plan: Plan, folder: RunFolder) -> Iterator[ServerHandle]:
    config, wanted = plan.config, plan.config.resources
    if config.model.pretrained == "default":  # fetched once, before all trainers ask for the library's weights at once
        build_model(plan.spec, seed=config.seed)
    from raysim.engine.ray.server import RayServer
    from raysim.engine.ray.session import available, is_in_group, placements, ray_session, this_node

    with ray_session():
        from raysim.data.pipeline import write_with_ray_data

        taken = resolve_resources(config, *available(), placements())
        # Ray Data's tasks would wait for CPUs that are not in the group, or would take those of the trainers to come.
        write = write_serially if is_in_group() else write_with_ray_data
        shards = build_shards(plan.manifest, data_cache(config) / "shards", write)
        recipe = plan.recipe(
            shards,
            num_threads=threads_of(taken.cpus_per_trainer),
            wants_gpu=taken.gpus_per_trainer > 0,
            node=this_node(),
        )
        threads = {"threads_per_trainer": recipe.num_threads}
        facts = {"backend": "ray", "placement": wanted.placement, **taken._asdict(), **threads}
        folder.write_json(folder.environment, environment(facts))
        server = RayServer(
            partial(make_server, recipe),
            partial(make_trainer, recipe),
            num_trainers=taken.trainers,
            cpus_per_trainer=taken.cpus_per_trainer,
            gpus_per_trainer=taken.gpus_per_trainer,
            keeps_memory=plan.keeps_memory,
            wait_s=wanted.wait_s,
            say=lambda line: err.print(line, markup=False),
            placement=wanted.placement,
            is_growing=wanted.trainers == "auto",
            client_timeout_s=None if wanted.client_timeout_s == "auto" else wanted.client_timeout_s,
        )
        try:
            server.wait_until_ready()
            yield server
        finally:
            server.close()


def threads_of(cpus: float) -> int:
    """PyTorch threads of a trainer with so many CPUs: at least one."""
    return max(1, int(cpus))
