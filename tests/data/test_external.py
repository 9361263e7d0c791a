"""Validation sets from another set: relabelled, resized, and counted as in FedVG's tables A.5 and A.6."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from raysim.base.errors import DataError
from raysim.config import parse_config
from raysim.data.federation import Federation
from raysim.data.fitting import fit_to
from raysim.data.manifest import PartitionSpec, make_manifest
from raysim.data.splits import ValidationSpec, external_rows
from raysim.plan.find import read_mapping
from tests.support.federations import build_shards
from tests.support.image_sets import CIFAR10, STL10, small_set

# FedVG, tables A.5 and A.6: images of each CIFAR-10 class, with the duplicates of the authors' code.
TABLES = {
    "stl10_to_cifar10": (STL10, {name: 550 for name in CIFAR10 if name != "frog"}, 4950, 4500),
    "cifar100_to_cifar10": (
        ("bus", "motorcycle", "leopard", "lion", "tiger", "wolf", "fox", "apple", "pickup_truck"),
        {"automobile": 531 + 519, "cat": 520 + 514 + 516, "dog": 520 + 530},
        3650,
        3500,
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_shipped_mappings_give_the_totals_of_tables_a5_and_a6(name, tmp_path):
    classes, expected, total, unique = TABLES[name]
    is_test = np.arange(600 * len(classes)) >= 500 * len(classes)  # 500 training images of a class, as in both sets
    splits = np.where(is_test, 2, 0).astype(np.int8)
    external = small_set(tmp_path, "external", classes, per_class=600, shape=(1, 1, 3), splits=splits)
    mapping = read_mapping(name)
    spec = ValidationSpec(mapping=mapping, unique=False)
    rows, labels = external_rows(external, CIFAR10, spec, np.random.default_rng(0))
    assert Counter(CIFAR10[label] for label in labels) == expected
    assert len(rows) == total
    assert len(np.unique(rows)) == unique
    assert not is_test[rows].any()
    pairs = {(CIFAR10[label], classes[source]) for label, source in zip(labels, external.labels[rows], strict=True)}
    assert pairs == set(mapping)
    rows, labels = external_rows(external, CIFAR10, ValidationSpec(mapping=mapping), np.random.default_rng(0))
    assert len(rows) == len(np.unique(rows)) == unique


def test_external_validation_set_is_relabelled_resized_and_written(tmp_path):
    images = small_set(tmp_path, per_class=20)
    external = small_set(tmp_path, "other", STL10, per_class=6, shape=(9, 9, 3))
    spec = PartitionSpec(
        num_clients=3,
        alpha=10.0,
        validation_set=ValidationSpec(mapping=read_mapping("stl10_to_cifar10"), label_noise=0.5),
    )
    manifest = make_manifest(images, spec, external)
    federation = Federation(build_shards(manifest, tmp_path / "shards"))
    pixels, labels = federation.held_out("validation")
    stored, sources = external.take(manifest.validation)
    assert (pixels == fit_to(stored, (4, 4, 3))).all()
    assert (labels == manifest.validation_labels).all()
    names = {"car": "automobile"}
    is_true = [names.get(STL10[s], STL10[s]) == CIFAR10[label] for s, label in zip(sources, labels, strict=True)]
    assert sum(is_true) == len(labels) - int(0.5 * len(labels)) == 27
    assert (federation.held_out("test")[0] == images.take(manifest.test)[0]).all()
    written = json.loads(manifest.to_json())
    assert written["external"][0].endswith("other.arrow")
    assert written["validation_labels"] == labels.tolist()
    plain = make_manifest(images, PartitionSpec(num_clients=3, alpha=10.0))
    assert plain.checksum != manifest.checksum
    assert all((a == b).all() for a, b in zip(plain.clients, manifest.clients, strict=True))


def test_ray_data_writes_an_external_validation_set_as_well(tmp_path, ray_cluster):
    from raysim.data.pipeline import write_with_ray_data

    images, external = small_set(tmp_path, per_class=20), small_set(tmp_path, "other", STL10, 6, (9, 9, 3))
    spec = PartitionSpec(num_clients=3, alpha=10.0, validation_set=ValidationSpec(mapping=(("cat", "monkey"),)))
    manifest = make_manifest(images, spec, external)
    folders = build_shards(manifest, tmp_path / "one"), build_shards(manifest, tmp_path / "two", write_with_ray_data)
    assert (folders[0] / "validation.arrow").read_bytes() == (folders[1] / "validation.arrow").read_bytes()


def test_fit_to_is_pillows_bilinear_and_repeats_grey():
    image = np.random.default_rng(0).integers(0, 256, (96, 96, 3), dtype=np.uint8)
    pillow = np.asarray(Image.fromarray(image).resize((32, 32), Image.Resampling.BILINEAR)).astype(int)
    assert np.abs(fit_to(image[None], (32, 32, 3))[0].astype(int) - pillow).max() <= 1
    grey = fit_to(image[None, :, :, :1], (32, 32, 3))[0]
    assert (grey == grey[..., :1]).all()
    assert (fit_to(image[None, :, :, :1], (96, 96, 3))[0, ..., 2] == image[..., 0]).all()
    with pytest.raises(DataError, match="3 channels for a set with 1"):
        fit_to(image[None], (32, 32, 1))


def test_bad_mappings_are_explained(tmp_path):
    external = small_set(tmp_path, "other", STL10, per_class=2)
    rng = np.random.default_rng(0)
    for mapping, words in (
        ((("cat", "kitten"),), "'kitten', not among the external classes"),
        ((("cats", "cat"),), "'cats', not among the set's 10 classes"),
        ((("cat", "cat"), ("dog", "cat")), "mapped twice"),
    ):
        with pytest.raises(DataError, match=words):
            external_rows(external, CIFAR10, ValidationSpec(mapping=mapping), rng)
    with pytest.raises(DataError, match="Did you mean 'stl10_to_cifar10'"):
        read_mapping("stl_to_cifar10")
    (tmp_path / "bad.yaml").write_text("cat: tiger\n")
    with pytest.raises(DataError, match="dog: "):
        read_mapping(str(tmp_path / "bad.yaml"))


def test_client_order_of_an_external_set_is_class_after_class(tmp_path):
    images, external = small_set(tmp_path), small_set(tmp_path, "other", STL10, 6, (9, 9, 3))
    pairs = tuple((images.info.classes[place], STL10[place]) for place in (2, 0, 1))
    for order, in_blocks in (("client", True), ("stratified", False)):
        spec = PartitionSpec(
            num_clients=5, within_clients=True, validation_set=ValidationSpec(order=order, mapping=pairs)
        )
        labels = make_manifest(images, spec, external).validation_labels.tolist()
        assert (labels == [2] * 6 + [0] * 6 + [1] * 6) == in_blocks
    external_set = {"external": {"name": "x", "mapping": "y"}, "order": "client"}
    assert not parse_config({"data": {"validation_set": external_set}})[1]
    assert "data.validation_set.order" in str(parse_config({"data": {"validation_set": {"order": "client"}}})[1])
