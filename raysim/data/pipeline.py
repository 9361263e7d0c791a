"""The Ray Data pipelines that decode images and shard a partitioned set: the only place where ray.data is used."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypedDict, TypeVar

import numpy as np

from raysim.core.errors import DataError
from raysim.data.federation import ShardTask, write_shard

if TYPE_CHECKING:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

Item = TypeVar("Item")
Work = Callable[[Item], np.ndarray]


class _Placed(TypedDict, total=False):
    """Options of `Dataset.map` that say where its tasks run."""

    scheduling_strategy: NodeAffinitySchedulingStrategy
    num_cpus: int
    concurrency: int | None


def write_with_ray_data(tasks: list[ShardTask]) -> None:
    """Write all shards in parallel on the running Ray: each task maps the set's Arrow file and gathers its own rows.

    Memory is bounded by one shard a worker, whatever the size of the set, and no pixel passes the object store. With
    several nodes the tasks stay on this one, whose disk holds the set and gets the shards; trainers fetch from there.
    """
    for _ in _mapped(_write, tasks):
        pass


def _write(task: ShardTask) -> np.ndarray:
    write_shard(task)
    return np.zeros(0, np.uint8)


def map_with_ray_data(work: Work[Item], items: Sequence[Item]) -> Iterator[np.ndarray]:
    """`reader_api.map_in_threads` on Ray Data: work(item) for each item, in order, on the running Ray or a local one.

    The backlog is bounded by the object store, so that sets larger than memory pass through.
    """
    import ray

    is_ours = not ray.is_initialized()
    if is_ours:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
    try:
        yield from _mapped(work, items)
    finally:
        if is_ours:
            ray.shutdown()


def _mapped(work: Work[Item], items: Sequence[Item]) -> Iterator[np.ndarray]:
    """work(item) for each item, in order. A DataError of a worker arrives as it was raised, not wrapped in Ray's errors."""
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False  # the command has its own
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    rows = [{"item": pickle.dumps(item)} for item in items]
    dataset = ray.data.from_items(rows, override_num_blocks=max(1, len(rows)))
    dataset.context.execution_options.preserve_order = True
    for row in dataset.map(partial(_attempt, work), **_on_this_node()).iter_rows():
        if row["fault"]:
            raise DataError(*row["fault"])
        yield row["result"]


def _attempt(work: Work[Item], row: dict[str, bytes]) -> dict[str, object]:
    try:
        return {"result": work(pickle.loads(row["item"])), "fault": []}
    except DataError as error:
        return {"result": np.zeros(0, np.uint8), "fault": [error.what, error.where, error.mend]}


def _on_this_node() -> _Placed:
    """Where a pipeline's tasks run if there are several nodes: here, where the files are.

    No CPUs are asked for, since a head without any can drive a cluster; so their number is bounded by this machine's.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if sum(node["Alive"] for node in ray.nodes()) == 1:
        return {}
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    # Not `compute` and `label_selector`: Ray has `ray.data.TaskPoolStrategy` from 2.51 on only, and 2.44 no label selector.
    return {"scheduling_strategy": here, "num_cpus": 0, "concurrency": os.cpu_count()}
