"""From a checked plan to a running server: its shards, its share of the machine, its trainers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from raysim.build import Plan, make_server, make_trainer
from raysim.config import data_cache
from raysim.data.federation import ShardTask, build_shards, write_serially
from raysim.engine.server import Server
from raysim.engine.trainer import SerialPool
from raysim.environment import environment
from raysim.models import build_model
from raysim.resources import resolve_resources
from raysim.run_folder import RunFolder

#: Sets up to this size are cut into shards by the driver, at 0.2 to 0.6 GB/s. Ray Data's actors take 4 s of CPU time to start,
#: and 250 MB as long as the run lasts.
SMALL_BYTES = 2**30


@contextmanager
def started_server(plan: Plan, folder: RunFolder) -> Iterator[Server]:
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
def _ray_server(plan: Plan, folder: RunFolder) -> Iterator[Server]:
    config, wanted = plan.config, plan.config.resources
    if config.model.pretrained == "default":  # fetched once, before all trainers ask for the library's weights at once
        build_model(plan.spec, seed=config.seed)
    from raysim.engine.ray.session import available, placements, ray_session, this_node
    from raysim.engine.ray.trainers import pool_of_trainers

    with ray_session():
        taken = resolve_resources(config, *available(), placements())
        shards = build_shards(plan.manifest, data_cache(config) / "shards", _writer(plan))
        recipe = plan.recipe(
            shards,
            num_threads=threads_of(taken.cpus_per_trainer),
            wants_gpu=taken.gpus_per_trainer > 0,
            node=this_node(),
        )
        threads = {"threads_per_trainer": recipe.num_threads}
        facts = {"backend": "ray", "placement": wanted.placement, **taken._asdict(), **threads}
        folder.write_json(folder.environment, environment(facts))
        with (
            pool_of_trainers(
                partial(make_trainer, recipe),
                num_trainers=taken.trainers,
                cpus_per_trainer=taken.cpus_per_trainer,
                gpus_per_trainer=taken.gpus_per_trainer,
                keeps_memory=plan.keeps_memory,
                placement=wanted.placement,
                is_growing=wanted.trainers == "auto",
            ) as pool,
            _one_thread(),
        ):
            server = make_server(recipe, pool)
            server.ready()
            yield server


def _writer(plan: Plan) -> Callable[[list[ShardTask]], None]:
    """Who writes shards that are not there: Ray Data, where that is worth while."""
    from raysim.data.pipeline import write_with_ray_data
    from raysim.engine.ray.session import is_in_group

    # In a group, Ray Data's tasks would wait for CPUs that are not in it, or would take those of the trainers to come.
    if is_in_group() or Path(plan.manifest.set_path).stat().st_size <= SMALL_BYTES:
        return write_serially
    return write_with_ray_data


@contextmanager
def _one_thread() -> Iterator[None]:
    """PyTorch with one thread here: the trainers have the cores, a server's work is small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def threads_of(cpus: float) -> int:
    """PyTorch threads of a trainer with so many CPUs: at least one."""
    return max(1, int(cpus))
