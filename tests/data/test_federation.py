"""Partitions, manifests and shards."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysim.core.errors import DataError
from raysim.data.arrow import ImageSet, in_batches, write_set
from raysim.data.federation import Federation, PartitionSpec, build_shards, make_manifest, shard_tasks
from raysim.data.partition import SCHEMES, split, stratified_order
from raysim.data.sources import set_path


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_every_example_goes_to_exactly_one_client(data):
    count = data.draw(st.integers(50, 400))
    labels = np.array(data.draw(st.lists(st.integers(0, 5), min_size=count, max_size=count)))
    scheme = data.draw(st.sampled_from(sorted(SCHEMES)))
    clients, least = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 3))
    alpha, seed = data.draw(st.sampled_from([0.3, 1.0, 100.0])), data.draw(st.integers(0, 99))
    try:
        parts = SCHEMES[scheme](labels, clients, rng=np.random.default_rng(seed), alpha=alpha, min_samples=least)
    except DataError:
        return
    assert len(parts) == clients
    assert sorted(np.concatenate(parts).tolist()) == list(range(count))
    assert min(len(part) for part in parts) >= least
    again = SCHEMES[scheme](labels, clients, rng=np.random.default_rng(seed), alpha=alpha, min_samples=least)
    assert all((a == b).all() for a, b in zip(parts, again, strict=True))


def test_alpha_decides_how_skewed_clients_are():
    labels = np.arange(20_000) % 10
    share = {}
    for alpha in (100.0, 0.1):
        parts = SCHEMES["dirichlet"](labels, 20, rng=np.random.default_rng(0), alpha=alpha, min_samples=1)
        share[alpha] = np.mean([np.bincount(labels[part], minlength=10).max() / len(part) for part in parts])
    assert share[100.0] < 0.15
    assert share[0.1] > 0.4


@settings(deadline=None, max_examples=40)
@given(count=st.integers(4, 500), test=st.floats(0, 0.5), validation=st.floats(0, 0.4), seed=st.integers(0, 99))
def test_splits_are_disjoint_and_complete(count, test, validation, seed):
    parts = split(count, test=test, validation=validation, rng=np.random.default_rng(seed))
    assert sorted(np.concatenate(parts).tolist()) == list(range(count))
    assert [len(part) for part in parts[1:]] == [int(count * validation), int(count * test)]


def test_stratified_order_has_the_whole_sets_proportions_in_every_stretch():
    labels = np.repeat([0, 1, 2], [300, 600, 100])
    ordered = labels[stratified_order(labels)]
    for start in range(0, 1000, 100):
        counts = np.bincount(ordered[start : start + 100], minlength=3)
        assert np.abs(counts - [30, 60, 10]).max() <= 2


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
