"""Partitions, manifests and shards."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from raysim.data.arrow import ImageSet, in_batches, write_set
from raysim.data.federation import Federation, build_shards, shard_tasks
from raysim.data.manifest import PartitionSpec, make_manifest
from raysim.data.sources import set_path


def test_digits_are_the_librarys_digits(root):
    from sklearn.datasets import load_digits

    images, labels = ImageSet(set_path(root, "digits")).take(np.array([5, 1796, 0]))
    source = load_digits()
    assert (labels == source.target[[5, 1796, 0]]).all()
    assert (np.rint(images[..., 0] / 255 * 16) == source.images[[5, 1796, 0]]).all()


def random_set(folder: Path, count=500):
    rng = np.random.default_rng(1)
    images = rng.integers(0, 256, (count, 5, 4, 3), dtype=np.uint8)
    path = set_path(folder, "mine")
    write_set(path, "mine", "abc", in_batches(images, np.arange(count) % 3, rows=64))
    return ImageSet(path), images


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


def test_ray_data_writes_the_same_bytes(tmp_path, ray_cluster):
    from raysim.data.pipeline import write_with_ray_data

    source, _ = random_set(tmp_path)
    manifest = make_manifest(source, PartitionSpec(num_clients=130, scheme="iid"))
    folders = build_shards(manifest, tmp_path / "one"), build_shards(manifest, tmp_path / "two", write_with_ray_data)
    names = sorted(path.name for path in folders[0].glob("*.arrow"))
    assert names == sorted(path.name for path in folders[1].glob("*.arrow"))
    for name in names:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()


def test_shards_are_built_once_and_whole_or_not_at_all(tmp_path):
    source, _ = random_set(tmp_path)
    manifest = make_manifest(source, PartitionSpec(num_clients=10, scheme="iid"))

    def fails(tasks):
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        build_shards(manifest, tmp_path / "shards", fails)
    assert list((tmp_path / "shards").iterdir()) == []
    folder = build_shards(manifest, tmp_path / "shards")
    assert build_shards(manifest, tmp_path / "shards", fails) == folder
    other = make_manifest(source, PartitionSpec(num_clients=10, scheme="iid", seed=1))
    assert other.checksum != manifest.checksum
    assert build_shards(other, tmp_path / "shards") != folder
    assert len(shard_tasks(manifest, folder)) == 3
    assert json.loads(manifest.to_json())["checksum"] == manifest.checksum
