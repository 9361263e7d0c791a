"""Partitions, manifests and shards."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from raysim.base.errors import DataError, RaysimError
from raysim.data.arrow import PreparedSet, write_set
from raysim.data.federation import COUNTS, Federation
from raysim.data.manifest import PartitionSpec, make_manifest
from raysim.data.rows import in_batches
from raysim.data.shard_files import clients_per_shard, shard_plan, write_serially
from raysim.data.sources import set_path
from raysim.training.tasks import TASKS
from tests.support.federations import build_shards
from tests.support.task_sets import write_task_set


def test_digits_are_the_librarys_digits(root):
    from sklearn.datasets import load_digits

    images, labels = PreparedSet(set_path(root, "digits")).take(np.array([5, 1796, 0]))
    source = load_digits()
    assert (labels == source.target[[5, 1796, 0]]).all()
    assert (np.rint(images[..., 0] / 255 * 16) == source.images[[5, 1796, 0]]).all()


def random_set(folder: Path, count=500):
    rng = np.random.default_rng(1)
    images = rng.integers(0, 256, (count, 5, 4, 3), dtype=np.uint8)
    path = set_path(folder, "mine")
    write_set(path, "mine", "abc", in_batches(images, np.arange(count) % 3, rows=64))
    return PreparedSet(path), images


def test_shards_hold_exactly_the_clients_examples(tmp_path):
    source, images = random_set(tmp_path)
    manifest = make_manifest(source, PartitionSpec(num_clients=130, alpha=100.0, scheme="iid"))
    folder = build_shards(manifest, tmp_path / "shards")
    federation = Federation(folder)
    assert len(list(folder.glob("clients-*.arrow"))) == 3
    for client, rows in enumerate(manifest.clients):
        pixels, labels = federation.client(client)
        assert (pixels == images[rows]).all()
        assert (labels == rows % 3).all()
        assert not pixels.flags.writeable
    for name, rows in (("validation", manifest.validation), ("test", manifest.test)):
        assert (federation.held_out(name)[0] == images[rows]).all()
    assert (federation.class_counts == manifest.class_counts).all()


@pytest.mark.parametrize("every", [1, 3, 7, 1000])
def test_every_so_many_th_held_out_row_is_each_ones_own_still(tmp_path, every):
    source, _ = random_set(tmp_path)
    split = {"test": 0.4, "validation": 0.2, "within_clients": True}
    manifest = make_manifest(source, PartitionSpec(num_clients=9, alpha=100.0, scheme="iid", **split))
    folder = build_shards(manifest, tmp_path / "shards")
    whole, part = Federation(folder), Federation(folder, every=every)
    for name in ("validation", "test"):
        for all_rows, rows in zip(whole.held_out(name), part.held_out(name), strict=True):
            assert (rows == all_rows[::every]).all()
    assert (part.num_validation, part.num_test) == tuple(len(part.held_out(n)[1]) for n in ("validation", "test"))
    owners = np.repeat(np.arange(9), whole.test_sizes)[::every]
    for client in range(9):
        start, end = part.test_range(client)
        assert (owners[start:end] == client).all()
        assert end - start == (owners == client).sum()
        assert (part.client(client)[1] == whole.client(client)[1]).all()


def test_many_clients_share_files(tmp_path, monkeypatch):
    assert [clients_per_shard(count) for count in (1, 32_768, 32_769, 1_000_000)] == [64, 64, 65, 1954]
    monkeypatch.setattr("raysim.data.shard_files.LEAST_CLIENTS", 2)
    monkeypatch.setattr("raysim.data.shard_files.MOST_FILES", 4)
    source, images = random_set(tmp_path)
    manifest = make_manifest(source, PartitionSpec(num_clients=30, scheme="iid"))
    folder = build_shards(manifest, tmp_path / "shards")
    assert len(list(folder.glob("clients-*.arrow"))) == 4
    federation = Federation(folder)
    assert all((federation.client(client)[0] == images[rows]).all() for client, rows in enumerate(manifest.clients))


@pytest.mark.parametrize("kind", ["images", *TASKS])
def test_ray_data_writes_the_same_bytes(kind, tmp_path, ray_cluster):
    from raysim.data.pipeline import write_with_ray_data

    if kind == "images":
        source, _ = random_set(tmp_path)
    else:
        source = PreparedSet(set_path(tmp_path, write_task_set(tmp_path, kind)))
    manifest = make_manifest(source, PartitionSpec(num_clients=130 if kind == "images" else 30, scheme="iid"))
    folders = build_shards(manifest, tmp_path / "one"), build_shards(manifest, tmp_path / "two", write_with_ray_data)
    names = sorted(path.name for path in folders[0].glob("*.arrow"))
    assert names == sorted(path.name for path in folders[1].glob("*.arrow"))
    for name in names:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()


def test_shards_are_built_once_and_whole_or_not_at_all(tmp_path):
    source, _ = random_set(tmp_path)
    manifest = make_manifest(source, PartitionSpec(num_clients=10, scheme="iid"))

    def fails(plan):
        yield next(write_serially(plan))
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DataError, match=r"No space left.*Free space"):
        build_shards(manifest, tmp_path / "shards", fails)
    assert [path.name for path in (tmp_path / "shards").iterdir() if path.suffix != ".lock"] == []
    folder = build_shards(manifest, tmp_path / "shards")
    assert build_shards(manifest, tmp_path / "shards", fails) == folder
    other = make_manifest(source, PartitionSpec(num_clients=10, scheme="iid", seed=1))
    assert other.checksum != manifest.checksum
    assert build_shards(other, tmp_path / "shards") != folder
    assert len(shard_plan([(manifest, folder)]).files) == 3
    assert json.loads(manifest.to_json())["checksum"] == manifest.checksum


@pytest.mark.parametrize(
    "damage", ["cut", "gone", "garbage", "index", "one bit", "a count", "all counts", "other counts"]
)
def test_damaged_shards_are_built_again(tmp_path, damage):
    source, images = random_set(tmp_path)
    manifest = make_manifest(source, PartitionSpec(num_clients=10, scheme="iid"))
    folder = build_shards(manifest, tmp_path / "shards")
    path = folder / "clients-00000.arrow"
    size = path.stat().st_size
    if damage == "cut":
        os.truncate(path, size - 1)
    elif damage == "gone":
        path.unlink()
    elif damage == "garbage":
        path.write_bytes(b"x" * size)
    elif damage == "one bit":
        content = bytearray(path.read_bytes())
        content[size // 2] ^= 1
        path.write_bytes(content)
    elif damage == "all counts":
        (folder / COUNTS).write_bytes(b"x" * (folder / COUNTS).stat().st_size)
    elif damage == "other counts":
        save_file({"class_counts": manifest.class_counts[::-1].astype(np.int32)}, folder / COUNTS)
    elif damage == "a count":
        text = (folder / "index.json").read_text()
        (folder / "index.json").write_text(text.replace(f'"num_test": {len(manifest.test)}', '"num_test": 1'))
    else:
        (folder / "index.json").write_text("{")
    assert build_shards(manifest, tmp_path / "shards") == folder
    assert (Federation(folder).client(3)[0] == images[manifest.clients[3]]).all()


def test_runs_that_start_together_build_once(tmp_path):
    source, _ = random_set(tmp_path)
    manifest = make_manifest(source, PartitionSpec(num_clients=10, scheme="iid"))
    builds = []

    def slow(plan):
        builds.append(len(plan.files))
        time.sleep(0.2)
        return write_serially(plan)

    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(lambda _: build_shards(manifest, tmp_path / "shards", slow), range(4)))
    assert len(set(folders)) == 1
    assert builds == [3]


def test_a_node_without_the_disk_fetches_each_file_once(tmp_path):
    source, images = random_set(tmp_path)
    manifest = make_manifest(source, PartitionSpec(num_clients=130, scheme="iid"))
    folder = build_shards(manifest, tmp_path / "shards")
    fetched = []

    def fetch(name):
        fetched.append(name)
        shutil.copy(folder / name, tmp_path / "node" / name)

    for _ in range(2):
        federation = Federation(tmp_path / "node", fetch)
        for client in (0, 129, 1):
            assert (federation.client(client)[0] == images[manifest.clients[client]]).all()
    assert sorted(fetched) == sorted(
        ["index.json"] * 2 + [COUNTS] + [f"clients-0000{i}.{kind}" for i in (0, 2) for kind in ("json", "arrow")]
    )


def test_a_file_that_was_cut_short_is_fetched_again_or_refused(tmp_path):
    source, images = random_set(tmp_path)
    manifest = make_manifest(source, PartitionSpec(num_clients=10, scheme="iid"))
    folder = build_shards(manifest, tmp_path / "shards")
    node = tmp_path / "node"

    def fetch(name):
        shutil.copy(folder / name, node / name)

    def fetch_half(name):
        fetch(name)
        if name.endswith(".arrow"):
            os.truncate(node / name, 100)

    with pytest.raises(DataError, match=r"clients-00000\.arrow arrived with another length"):
        Federation(node, fetch_half).client(3)
    assert (node / "clients-00000.arrow").stat().st_size == 100
    assert (Federation(node, fetch).client(3)[0] == images[manifest.clients[3]]).all()


def test_a_file_that_was_damaged_on_its_way_is_fetched_again_or_refused(tmp_path):
    source, images = random_set(tmp_path)
    manifest = make_manifest(source, PartitionSpec(num_clients=10, scheme="iid"))
    folder = build_shards(manifest, tmp_path / "shards")
    node, times = tmp_path / "node", []

    def fetch(name):
        shutil.copy(folder / name, node / name)
        if name == "clients-00000.arrow":
            times.append(name)
            if len(times) < bad:
                content = bytearray((node / name).read_bytes())
                content[len(content) // 2] ^= 1
                (node / name).write_bytes(content)

    bad = 2
    assert (Federation(node, fetch).client(3)[0] == images[manifest.clients[3]]).all()
    bad = 9
    shutil.rmtree(node)
    with pytest.raises(DataError, match="was damaged or changed"):
        Federation(node, fetch).client(3)


def test_shard_host_needs_no_pytorch():
    code = "import sys, raysim.engine.ray.shards; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_shard_host_serves_files_through_ray_and_is_replaced_when_lost(tmp_path, ray_cluster):
    import ray

    from raysim.engine.ray.session import this_node
    from raysim.engine.ray.shards import shard_fetcher

    source, images = random_set(tmp_path)
    manifest = make_manifest(source, PartitionSpec(num_clients=130, scheme="iid"))
    folder = build_shards(manifest, tmp_path / "shards")
    node = this_node()
    assert shard_fetcher(str(folder), node) == (folder, None)

    # The place where a node without the disk would have it; the host gets the real folder.
    hidden = tmp_path / "away" / folder.name
    name = f"raysim-files-{sha256(str(hidden).encode()).hexdigest()[:16]}"
    elsewhere, fetch = shard_fetcher(str(hidden), node)
    with pytest.raises(ValueError, match=name):  # who sees the folder starts no host
        ray.get_actor(name)
    shutil.rmtree(elsewhere, ignore_errors=True)
    hidden.parent.mkdir()
    os.symlink(folder, hidden)
    try:
        federation = Federation(elsewhere, fetch)
        for client in (3, 129):
            assert (federation.client(client)[0] == images[manifest.clients[client]]).all()
            host = ray.get_actor(name)
            ray.kill(host)
            with suppress(ray.exceptions.RayActorError):  # a dying host may still serve a read
                while True:
                    ray.get(host.read.remote("index.json"))
    finally:
        shutil.rmtree(elsewhere, ignore_errors=True)


def test_a_single_file_reaches_a_node_that_does_not_see_it_once_and_as_it_was(tmp_path, ray_cluster, monkeypatch):
    import raysim.engine.ray.shards as shards
    from raysim.engine.ray.session import this_node

    content, folder = os.urandom(1000), tmp_path / "driver"
    folder.mkdir()
    (folder / "weights.pt").write_bytes(content)
    path, digest = str(folder / "weights.pt"), sha256(content).hexdigest()
    assert shards.fetched_file(path, digest, this_node()) == Path(path)

    # What this process does not see has another name for it than for the host.
    hidden, asked = tmp_path / "hidden" / "weights.pt", []

    def read(_, node, file):
        asked.append(file)
        return shards._read(str(folder), node, file)

    monkeypatch.setattr(
        shards, "_copy", lambda _, node, file, target: target.write_bytes(read(_, node, file).tobytes())
    )
    monkeypatch.setattr(shards, "_local_folder", lambda: tmp_path / "node")
    for _ in range(2):
        shards.fetched_file.cache_clear()
        assert shards.fetched_file(str(hidden), digest, this_node()).read_bytes() == content
    assert asked == ["weights.pt"]
    with pytest.raises(RaysimError, match="a file changed while it was copied"):
        shards.fetched_file(str(hidden), "0" * 64, this_node())
