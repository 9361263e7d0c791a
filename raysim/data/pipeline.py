"""The Ray Data pipeline that shards a partitioned set: the only place where ray.data is used."""

from __future__ import annotations

import pickle
from typing import Any

from raysim.data.federation import ShardTask, write_shard


def write_with_ray_data(tasks: list[ShardTask]) -> None:
    """Write all shards in parallel on the running Ray: each task maps the set's Arrow file and gathers its own rows.

    Memory is bounded by one shard a worker, whatever the size of the set, and no pixel passes the object store.
    """
    import ray.data

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    items = [{"task": pickle.dumps(task)} for task in tasks]
    ray.data.from_items(items, override_num_blocks=len(items)).map(_write).materialize()


def _write(item: dict[str, Any]) -> dict[str, Any]:
    task: ShardTask = pickle.loads(item["task"])
    write_shard(task)
    return {"target": task.target, "examples": len(task.rows)}
