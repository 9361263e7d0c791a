"""From a checked plan to a running server with shards, resources and trainers."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from raysim.base.progress import Lines, Tell, silent
from raysim.config import data_cache
from raysim.data.federation import build_all_shards
from raysim.data.shard_files import Write, write_serially
from raysim.engine.device import arithmetic_kept
from raysim.engine.pool import SerialPool
from raysim.engine.server import Server
from raysim.engine.simulation import ServerHandle
from raysim.folders.environment import environment
from raysim.folders.run_folder import RunFolder
from raysim.plan.build import Made, Plan, Recipe, device_of, make_server, make_trainer
from raysim.plan.held_weights import HeldWeights, held_weights
from raysim.plan.resources import resolve_resources, share_of


@contextmanager
def started_server(
    plan: Plan, folder: RunFolder, on_step: Tell = silent, on_note: Tell = silent, patience_s: float = 0.0
) -> Iterator[ServerHandle]:
    """Start a server with trainers, serial or on Ray; env.json records the resources.

    Args:
      on_step: on_step(what begins now, in words). on_note: on_note(a trainer's loss or restart, in words).
      patience_s: seconds to wait for a cluster that does not answer, or has lost resources.
    Raises:
      ClusterLost: also in the block. ConfigError: Ray lacks resources that the configuration needs.
    """
    if plan.config.is_serial():
        with arithmetic_kept():
            yield _serial_server(plan, folder, on_step)
    else:
        with _ray_server(plan, folder, on_step, on_note, patience_s) as server:
            yield server


def _serial_server(plan: Plan, folder: RunFolder, on_step: Tell) -> Server:
    recipe = serial_recipe(plan, on_step)
    device = device_of(recipe)
    taken = {
        "backend": "serial",
        "device": device,
        "trainers": 1,
        "gpus_per_trainer": float(device != "cpu"),
        "threads_per_trainer": recipe.num_threads,
    }
    folder.write_json(folder.environment, environment(taken))
    on_step("building the model")
    return make_server(recipe, SerialPool(partial(make_trainer, recipe), plan.keeps_memory))


def serial_recipe(plan: Plan, on_step: Tell = silent) -> Recipe:
    """Make the shards, and return the recipe of a server and a trainer in this process."""
    wanted = plan.config.resources
    made = _made(plan, write_serially, "", on_step)
    return plan.recipe(made, num_threads=threads_of(wanted.cpus), wants_gpu=wanted.gpus_per_trainer != 0)


@contextmanager
def _ray_server(
    plan: Plan, folder: RunFolder, on_step: Tell, on_note: Tell, patience_s: float
) -> Iterator[ServerHandle]:
    config, wanted = plan.config, plan.config.resources
    from raysim.engine.ray.room import autoscales, find_room
    from raysim.engine.ray.server import RayServer, TrainerStarter
    from raysim.engine.ray.session import is_in_group, patiently, placements, ray_session, this_node
    from raysim.engine.ray.shards import write_shards
    from raysim.engine.ray.slots import START_S

    with ray_session(on_step=on_step, patience_s=patience_s, models=[config.model.kind]):
        has_group = is_in_group()
        may_grow = not has_group and autoscales()
        taken = patiently(lambda: resolve_resources(config, placements(), may_grow=may_grow), patience_s, on_step)
        # Ray Data's tasks would wait for CPUs that are not in the group, or would take the CPUs of later trainers.
        write = write_serially if has_group else write_shards
        made, num_threads = _made(plan, write, this_node(), on_step), threads_of(taken.cpus_per_trainer)
        recipe = plan.recipe(made, num_threads=num_threads, wants_gpu=taken.gpus_per_trainer > 0)
        threads = {"threads_per_trainer": recipe.num_threads}
        # The trainer's node decides the type of a GPU, unless the configuration sets the type.
        device = "cpu" if not taken.gpus_per_trainer else "gpu" if wanted.device == "auto" else wanted.device
        facts = {"backend": "ray", "device": device, **taken._asdict(), "custom": wanted.custom, **threads}
        folder.write_json(folder.environment, environment(facts))
        # A trainer may compile for minutes after another one, whose clients had no full batch, has answered.
        timeout_s = math.inf if config.local.compile else None
        wait_s, share = 0.0 if has_group else wanted.wait_s, share_of(taken, config)
        on_step(f"starting {taken.trainers} trainer{'s' * (taken.trainers != 1)}")
        deadline, nodes = time.monotonic() + wait_s, []
        if not has_group:
            least = taken.trainers if wanted.trainers == "auto" else wanted.least
            nodes = find_room(share, taken.trainers, least=least, wait_s=wait_s, say=on_note, may_grow=may_grow)
        starter = TrainerStarter(
            partial(make_trainer, recipe),
            share,
            num_trainers=len(nodes) or taken.trainers,
            nodes=nodes,
            most=wanted.most,
            timeout_s=timeout_s if wanted.client_timeout_s == "auto" else wanted.client_timeout_s,
            patience_s=max(START_S, wait_s if may_grow else 0.0),
        )
        make = partial(make_server, recipe)
        server = RayServer(make, starter, keeps_memory=plan.keeps_memory, deadline=deadline, say=on_note)
        try:
            server.wait_until_ready()
            yield server
        finally:
            server.close()


def _made(plan: Plan, write: Write, node: str, on_step: Tell) -> Made:
    """Return the shards and weights of a run; made here, unless a sweep's driver has made them.

    Args:
      write: writes the shards' files; node: this node, from which Ray's other nodes fetch files, or empty.
    """
    if plan.ready is not None:
        return plan.ready.made
    on_step("looking for the shards")
    cache, lines = data_cache(plan.config), Lines("writing shards", on_step)
    (shards,) = build_all_shards([plan.manifest], cache / "shards", write, lines.progress)
    return Made(str(shards), node, held_weights(plan.spec, cache / "weights") if node else HeldWeights())


def threads_of(cpus: float) -> int:
    """Return the number of PyTorch threads of a trainer with this number of CPUs: at least one."""
    return max(1, int(cpus))
