"""The Ray Data pipeline that shards a partitioned set: the only place where ray.data is used."""

from __future__ import annotations

from typing import Any

import numpy as np

from raysim.data.federation import ShardTask, write_shard


def write_with_ray_data(tasks: list[ShardTask]) -> None:
    """Write all shards in parallel on the running Ray: each task maps the set's Arrow file and gathers its own rows.

    Memory is bounded by one shard a worker, whatever the size of the set, and no pixel passes the object store.
    """
    import ray.data

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    items = [{"set_path": t.set_path, "target": t.target, "rows": t.rows.tobytes()} for t in tasks]
    ray.data.from_items(items, override_num_blocks=len(items)).map(_write).materialize()


def _write(item: dict[str, Any]) -> dict[str, Any]:
    rows = np.frombuffer(item["rows"], dtype=np.int64)
    write_shard(ShardTask(item["set_path"], item["target"], rows))
    return {"target": item["target"], "examples": len(rows)}
