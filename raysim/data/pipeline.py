"""The Ray Data pipeline that shards a partitioned set: the only place where ray.data is used.

Windows of prepared sets are read and resized, and written to their places in the shard files, both by `map_batches` on
the driver's node, which holds the files; the driver counts the places and completes the files
(`shard_files.write_files`). Ray Data runs both steps of a window in one task, so no pixel passes through the object
store, and limits the blocks in flight.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pyarrow as pa
import ray.data
from ray.exceptions import RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysim.base.errors import RaysimError
from raysim.data.rows import columns_of, record_of
from raysim.data.shard_files import Filled, ShardPlan, Window, read_window, scatter

Placement = dict[str, Any]  # arguments of Ray Data's maps that place and limit their tasks


def write_with_ray_data(plan: ShardPlan) -> Iterator[Filled]:
    """Write all windows of a plan on the running Ray, in any order; see `shard_files.write_serially`."""
    windows = list(plan.windows())
    how: Any = {"batch_size": None, "batch_format": "pyarrow", "zero_copy_batch": True, **_on_this_node(len(windows))}
    with _plain():
        numbers = ray.data.from_items(list(range(len(windows))), override_num_blocks=len(windows))
        rows = numbers.map_batches(partial(_read, windows, plan.info.shape), **how)
        filled: Any = rows.map_batches(partial(_scattered, plan), **how)
        # In the format of Arrow, since targets may have several numbers a row.
        for table in filled.iter_batches(batch_size=None, batch_format="pyarrow"):
            yield from (Filled(**columns_of(record)) for record in table.to_batches())


def _read(windows: Sequence[Window], shape: tuple[int, ...], numbers: pa.Table) -> pa.Table:
    return pa.concat_tables([read_window(windows[number], shape) for number in numbers["item"].to_pylist()])


def _scattered(plan: ShardPlan, table: pa.Table) -> pa.Table:
    return pa.Table.from_batches([record_of(scatter(plan, table)._asdict())])


@contextmanager
def _plain() -> Iterator[None]:
    """Silence Ray Data's output, and raise errors of raysim and of the disk with their original type."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False  # the command has its own progress bar
    context.raise_original_map_exception = True
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, RaysimError | OSError):
            raise error.cause from None
        raise


def _on_this_node(num_tasks: int) -> Placement:
    """Return the placement of tasks that read or write files: this node, which holds the files.

    The tasks reserve no CPU, since a head node may have no CPUs, or other jobs may hold all CPUs, and tasks would then
    wait silently. The number of concurrent tasks is limited instead.
    """
    me = ray.get_runtime_context().get_node_id()
    cpus = next(node["Resources"].get("CPU", 0) for node in ray.nodes() if node["NodeID"] == me)
    bounded: Placement = {"num_cpus": 0, "concurrency": max(1, min(num_tasks, int(cpus) or os.cpu_count() or 1))}
    if sum(node["Alive"] for node in ray.nodes()) == 1:
        return bounded
    return {**bounded, "scheduling_strategy": NodeAffinitySchedulingStrategy(me, soft=False)}
