"""The Ray Data pipeline that shards a partitioned set: the only place where ray.data is used.

Rows of prepared sets are read (`SetDatasource`), preprocessed (`map_batches`) and written to their places in the shard
files (`map_batches`); the driver counts the places and completes the files (`shard_files.write_files`). On a single
node, Ray Data runs the three steps of a window in one task, and no pixel passes through the object store. With several
nodes, files are read and written on the driver's node, which holds the files, and preprocessing runs on all nodes. Ray
Data limits the blocks in flight.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any

import pyarrow as pa
import ray.data
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask
from ray.exceptions import RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysim.base.errors import RaysimError
from raysim.base.own_code import OwnCode, packed, receive
from raysim.data.preprocess import Preprocess
from raysim.data.rows import columns_of, record_of
from raysim.data.shard_files import Filled, ShardPlan, Window, read_window, scatter, work_on

Placement = dict[str, Any]  # arguments of Ray Data's maps that place and limit their tasks


class SetDatasource(Datasource):
    """Rows of prepared sets with columns input, target and row; each window is a read task."""

    def __init__(self, windows: Sequence[Window]):
        super().__init__()
        self._windows = windows

    def get_name(self) -> str:
        return "PreparedSet"

    def estimate_inmemory_data_size(self) -> int:
        return sum(window.size_bytes for window in self._windows)

    def get_read_tasks(self, parallelism: int, *limits: object, **more: object) -> list[ReadTask]:
        """Return a read task for each window; windows are sized to fit into memory."""
        return [ReadTask(partial(_read, window), _metadata(window)) for window in self._windows]


def _read(window: Window) -> list[pa.Table]:
    return [read_window(window)]


def _metadata(window: Window) -> BlockMetadata:
    known: dict[str, Any] = {"num_rows": window.end - window.start, "size_bytes": window.size_bytes}
    # All fields are required, and the fields differ between versions of Ray.
    return BlockMetadata(**{field.name: known.get(field.name) for field in fields(BlockMetadata)})


def write_with_ray_data(plan: ShardPlan) -> Iterator[Filled]:
    """Write all windows of a plan on the running Ray, in any order; see `shard_files.write_serially`."""
    windows = list(plan.windows())
    here, anywhere = _on_this_node(len(windows)), _anywhere(len(windows))
    with _plain():
        placed = {"concurrency": here["concurrency"], **_reading(here)}
        rows = ray.data.read_datasource(SetDatasource(windows), override_num_blocks=len(windows), **placed)
        batches: Any = {"batch_size": None, "batch_format": "pyarrow", "zero_copy_batch": True}
        if plan.has_work:
            work = partial(_preprocessed, plan.preprocess, packed(plan.preprocess.own))
            rows = rows.map_batches(work, **batches, **anywhere)
        filled = rows.map_batches(partial(_scattered, plan), **batches, **here)
        # In the format of Arrow, since targets may have several numbers a row.
        for table in filled.iter_batches(batch_size=None, batch_format="pyarrow"):
            yield from (Filled(**columns_of(record)) for record in table.to_batches())


def _preprocessed(preprocess: Preprocess, own: OwnCode, table: pa.Table) -> pa.Table:
    receive(own)  # this process may not have loaded the user's function yet
    return work_on(preprocess, table)


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
    own = next(node["Resources"].get("CPU", 0) for node in ray.nodes() if node["NodeID"] == me)
    bounded: Placement = {"num_cpus": 0, "concurrency": max(1, min(num_tasks, int(own) or os.cpu_count() or 1))}
    if _is_alone():
        return bounded
    # Ray 2.52 does not accept `label_selector` here.
    return {**bounded, "scheduling_strategy": NodeAffinitySchedulingStrategy(me, soft=False)}


def _reading(place: Placement) -> Placement:
    """Return the placement for `read_datasource`: a label selector from Ray 2.64 on, remote arguments before."""
    remote = {key: value for key, value in place.items() if key != "concurrency"}
    if "label_selector" not in inspect.signature(ray.data.read_datasource).parameters:
        return {"ray_remote_args": remote}
    if remote.pop("scheduling_strategy", None) is not None:
        remote["label_selector"] = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
    return remote


def _anywhere(num_tasks: int) -> Placement:
    """Return the placement of compute-only tasks: spread over all nodes, or this node if it is the only node."""
    if _is_alone():
        return _on_this_node(num_tasks)
    cpus = int(ray.cluster_resources().get("CPU", 0))
    free = ray.available_resources().get("CPU", 0)
    return {"scheduling_strategy": "SPREAD", "num_cpus": int(free >= 1), "concurrency": max(1, min(num_tasks, cpus))}


def _is_alone() -> bool:
    return sum(node["Alive"] for node in ray.nodes()) == 1
