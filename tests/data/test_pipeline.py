"""The Ray Data pipeline: the files of the serial writer, whatever happens to its workers."""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace

import pytest

from raysim.base.errors import DataError
from raysim.data import pipeline
from raysim.data.federation import build_all_shards
from raysim.plan.check import check
from raysim.training.tasks import TASKS
from tests.support import toys
from tests.support.busy import no_cpu_left
from tests.support.federations import build_shards, raw_config
from tests.support.task_sets import task_config, write_task_sets

pytestmark = pytest.mark.ray


def manifest_of(root, stored_size, **groups):
    return check(raw_config(root, data={"root": str(root), "stored_size": stored_size}, **groups), "a test").manifest


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_resized_rows_of_several_partitions_are_those_of_the_serial_writer(root, tmp_path, ray_cluster):
    from raysim.data.pipeline import write_with_ray_data

    manifests = [manifest_of(root, 12, seed=seed) for seed in (0, 1)]
    one = build_all_shards(manifests, tmp_path / "one")
    two = build_all_shards(manifests, tmp_path / "two", write_with_ray_data)
    assert [files(folder) for folder in one] == [files(folder) for folder in two]


def test_rows_of_every_task_are_those_of_the_serial_writer(tmp_path, ray_cluster):
    """Several labels and the tokens that follow are targets of more than one number."""
    from raysim.data.pipeline import write_with_ray_data

    folder = write_task_sets(tmp_path)
    manifests = [check(task_config(folder, task), "a test").manifest for task in TASKS]
    for number, manifest in enumerate(manifests):
        one = build_shards(manifest, tmp_path / f"one {number}")
        two = build_shards(manifest, tmp_path / f"two {number}", write_with_ray_data)
        assert files(one) == files(two)


def test_a_worker_killed_in_the_middle_of_its_rows_changes_no_byte(root, tmp_path, ray_cluster, monkeypatch):
    from raysim.data import pipeline

    manifest = manifest_of(root, 16)
    monkeypatch.setattr(pipeline, "_scattered", partial(toys.scatter_killed_once, str(tmp_path)))
    folder = build_shards(manifest, tmp_path / "two", pipeline.write_with_ray_data)
    assert (tmp_path / "killed").exists()
    assert files(folder) == files(build_shards(manifest, tmp_path / "one"))


def test_an_error_in_a_worker_is_one_sentence_and_leaves_nothing(root, tmp_path, ray_cluster, monkeypatch):
    from raysim.data import pipeline

    def full(plan, table):
        raise DataError("no space left (a test)", "there", "free some")

    monkeypatch.setattr(pipeline, "_scattered", full)
    with pytest.raises(DataError, match=r"^no space left \(a test\) in there\. Free some$"):
        build_shards(manifest_of(root, None), tmp_path / "shards", pipeline.write_with_ray_data)
    assert [path.name for path in (tmp_path / "shards").iterdir() if path.suffix != ".lock"] == []


def test_shards_are_built_though_others_have_all_cpus(root, tmp_path, ray_cluster):
    from raysim.data.pipeline import write_with_ray_data

    manifest, found = manifest_of(root, 12), []
    with no_cpu_left():
        builder = threading.Thread(
            target=lambda: found.append(build_shards(manifest, tmp_path / "two", write_with_ray_data)), daemon=True
        )
        builder.start()
        builder.join(120)
        assert found, "it waits for a CPU"
    assert files(found[0]) == files(build_shards(manifest, tmp_path / "one"))


def test_only_sets_of_several_windows_are_sharded_by_ray_data(root, tmp_path, ray_cluster, monkeypatch):
    from raysim.data import pipeline, shard_files
    from raysim.engine.ray.shards import write_shards

    calls, original = [], pipeline.write_with_ray_data
    monkeypatch.setattr(pipeline, "write_with_ray_data", lambda plan: calls.append(plan) or original(plan))
    manifest = manifest_of(root, 12)
    one = files(build_shards(manifest, tmp_path / "one", write_shards))
    assert calls == []
    for name in ("LEAST_WINDOW", "MOST_WINDOW"):
        monkeypatch.setattr(shard_files, name, 50_000)
    assert files(build_shards(manifest, tmp_path / "two", write_shards)) == one
    assert len(calls) == 1


@pytest.mark.essential
def test_tasks_that_read_and_write_files_ask_for_no_cpu(monkeypatch):
    me = "0" * 56
    nodes = [{"NodeID": me, "Alive": True, "Resources": {"CPU": 2.0}}]
    monkeypatch.setattr(pipeline.ray, "nodes", lambda: nodes)
    monkeypatch.setattr(pipeline.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: me))
    assert pipeline._on_this_node(8) == {"num_cpus": 0, "concurrency": 2}
    nodes.append({"NodeID": "other", "Alive": True, "Resources": {"CPU": 2.0}})
    strategy = pipeline._on_this_node(8)["scheduling_strategy"]
    assert (strategy.node_id, strategy.soft) == (me, False)
