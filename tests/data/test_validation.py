"""Splits and the server's validation set: disjoint, exact floors, noise that is noise, external sets as in FedVG."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raysim.base.errors import ConfigError, DataError
from raysim.config import parse_config
from raysim.data.division import partition_table
from raysim.data.manifest import PartitionSpec, make_manifest
from raysim.data.splits import (
    VALIDATION,
    ValidationSpec,
    arrange,
    imbalanced,
    noisy,
    split,
    split_officially,
    split_within,
    stratified_order,
    subset,
)
from raysim.plan.check import check
from tests.support.federations import plan_of, raw_config, run
from tests.support.image_sets import small_set


@settings(deadline=None, max_examples=40)
@given(count=st.integers(4, 500), test=st.floats(0, 0.5), validation=st.floats(0, 0.4), seed=st.integers(0, 99))
def test_splits_are_disjoint_and_complete(count, test, validation, seed):
    parts = split(count, test=test, validation=validation, rng=np.random.default_rng(seed))
    assert sorted(np.concatenate(parts).tolist()) == list(range(count))
    assert [len(part) for part in parts[1:]] == [int(count * validation), int(count * test)]


@settings(deadline=None, max_examples=40)
@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=8), seed=st.integers(0, 99))
def test_split_within_clients_holds_out_floors_of_each_client(sizes, seed):
    mixed = np.random.default_rng(0).permutation(sum(sizes))
    parts = np.split(mixed, np.cumsum(sizes)[:-1])
    training, held, tests = split_within(parts, test=0.25, validation=0.1, rng=np.random.default_rng(seed))
    assert sorted(np.concatenate([training, held, tests])) == list(range(sum(sizes)))
    owner = np.empty(sum(sizes), int)
    for client, part in enumerate(parts):
        owner[part] = client
        left = sizes[client] - int(0.25 * sizes[client]) - int(0.1 * sizes[client])
        assert np.count_nonzero(np.isin(training, part)) == left
        assert np.count_nonzero(np.isin(held, part)) == int(0.1 * sizes[client])
    assert (np.diff(owner[held]) >= 0).all()  # client after client


@settings(deadline=None, max_examples=40)
@given(
    scheme=st.sampled_from(["iid", "dirichlet", "shards", "quantity", "nine_plus_one"]),
    within=st.booleans(),
    validation=st.sampled_from([0.0, 0.1, 0.3]),
    chosen=st.builds(
        ValidationSpec,
        subset=st.sampled_from([1.0, 0.5]),
        imbalance=st.sampled_from([None, 1.0, 0.8]),
        label_noise=st.sampled_from([0.0, 0.4]),
    ),
)
def test_no_row_is_in_two_splits(scheme, within, validation, chosen, tmp_path_factory):
    images = small_set(tmp_path_factory.mktemp("set"), per_class=60)
    spec = PartitionSpec(
        scheme=scheme, alpha=1.0, num_clients=5, within_clients=within, validation=validation, validation_set=chosen
    )
    manifest = make_manifest(images, spec)
    rows = np.concatenate([*manifest.clients, manifest.validation, manifest.test])
    assert len(np.unique(rows)) == len(rows)
    again = make_manifest(images, spec)
    assert again.checksum == manifest.checksum
    assert (manifest.class_counts.sum(axis=1) == [len(c) for c in manifest.clients]).all()


def test_official_split_is_the_column():
    rng, splits = np.random.default_rng(0), np.repeat([0, 1, 2], [60, 10, 30]).astype(np.int8)
    training, held, test = split_officially(splits, validation=0.1, rng=rng)
    assert (training.tolist(), held.tolist(), test.tolist()) == (
        list(range(60)), list(range(60, 70)), list(range(70, 100)),
    )  # fmt: skip
    training, held, test = split_officially(splits, validation=0.0, rng=rng)
    assert (len(training), len(held), len(test)) == (60, 0, 30)
    splits[splits == 1] = 0
    training, held, test = split_officially(splits, validation=0.1, rng=rng)
    assert (len(training), len(held), len(test)) == (63, 7, 30)
    assert sorted([*training, *held]) == list(range(70))
    with pytest.raises(DataError, match=r"no official split in data\.split\. Set data\.split to fraction"):
        split_officially(None, validation=0.1, rng=rng)
    with pytest.raises(DataError, match="no training rows"):
        split_officially(splits[70:], validation=0.1, rng=rng)


def test_columns_of_the_set_reach_splits_and_partition(tmp_path):
    count = 300
    splits = np.random.default_rng(0).integers(0, 3, count).astype(np.int8)
    images = small_set(tmp_path, per_class=30, splits=splits, domains=np.arange(count) % 4)
    manifest = make_manifest(images, PartitionSpec(scheme="domain", num_clients=4, split="official"))
    assert (manifest.test == np.flatnonzero(splits == 2)).all()
    assert sorted(manifest.validation) == np.flatnonzero(splits == 1).tolist()
    for client, rows in enumerate(manifest.clients):
        assert (rows == np.flatnonzero((splits == 0) & (np.arange(count) % 4 == client))).all()
        assert (manifest.domain_counts[client, client] == np.bincount(images.labels[rows], minlength=10)).all()
    assert (manifest.domain_counts.sum(1) == manifest.class_counts).all()
    assert (manifest.test_domains == manifest.test % 4).all()
    assert manifest.domains == ("domain 0", "domain 1", "domain 2", "domain 3")


def test_stratified_order_has_the_whole_sets_proportions_in_every_stretch():
    labels = np.repeat([0, 1, 2], [300, 600, 100])
    ordered = labels[stratified_order(labels)]
    for start in range(0, 1000, 100):
        counts = np.bincount(ordered[start : start + 100], minlength=3)
        assert np.abs(counts - [30, 60, 10]).max() <= 2


def test_imbalance_floors_by_hand():
    labels = np.arange(600) % 3
    rng = np.random.default_rng(0)
    # N' = 300; rho 0.5: p = 4/7, 2/7, 1/7 -> 171.4, 85.7, 42.9
    assert np.bincount(labels[imbalanced(labels, 0.5, 3, rng)]).tolist() == [171, 85, 42]
    assert np.bincount(labels[imbalanced(labels, 1.0, 3, rng)]).tolist() == [100, 100, 100]
    # rho 0.1: p = 100/111 -> 270, of which there are only 200
    assert np.bincount(labels[imbalanced(labels, 0.1, 3, rng)]).tolist() == [200, 27, 2]
    # An exact product that floats would miss: 0.3^i of 0.3^0 + 0.3^1 = 1.3, N' = 13 * k.
    two = np.arange(52) % 2
    assert np.bincount(two[imbalanced(two, 0.3, 2, rng)]).tolist() == [20, 6]
    assert (imbalanced(labels, None, 3, rng) == np.arange(600)).all()


@settings(deadline=None, max_examples=40)
@given(count=st.integers(1, 400), fraction=st.floats(0, 1), classes=st.integers(2, 12), seed=st.integers(0, 99))
def test_noisy_labels_are_exactly_so_many_and_never_the_true_one(count, fraction, classes, seed):
    labels = np.random.default_rng(0).integers(0, classes, count)
    changed = noisy(labels, fraction, classes, np.random.default_rng(seed))
    assert np.count_nonzero(changed != labels) == int(count * fraction)
    assert changed.min() >= 0
    assert changed.max() < classes
    assert (changed == noisy(labels, fraction, classes, np.random.default_rng(seed))).all()


def test_noise_reaches_every_wrong_class_alike():
    changed = noisy(np.full(9000, 2), 1.0, 4, np.random.default_rng(0))
    assert np.abs(np.bincount(changed, minlength=4) - [3000, 3000, 0, 3000]).max() < 200


def test_subset_keeps_the_proportions():
    labels = np.random.default_rng(0).permutation(np.repeat([0, 1, 2], [300, 600, 100]))
    kept = subset(labels, 0.3, np.random.default_rng(1))
    assert np.abs(np.bincount(labels[kept]) - [90, 180, 30]).max() <= 1
    assert (np.diff(kept) > 0).all()
    assert not (kept == subset(labels, 0.3, np.random.default_rng(2))).all()
    with pytest.raises(DataError, match="no row is left"):
        arrange(np.arange(2), np.array([1, 1]), 3, ValidationSpec(imbalance=0.1), np.random.default_rng(0))


@pytest.mark.parametrize(("part", "count"), [(0.1, 15), (90.0, 90), (1.0, 150), (0.001, 1)])
def test_a_part_of_the_training_rows_has_their_classes_and_leaves_the_test_rows(part, count, tmp_path):
    images = small_set(tmp_path, per_class=20)
    whole, manifest = (
        make_manifest(images, PartitionSpec(scheme="iid", num_clients=1, test=0.25, validation=0.0, fraction=each))
        for each in (1.0, part)
    )
    rows = np.concatenate(manifest.clients)
    assert len(rows) == count
    assert set(rows) <= set(np.concatenate(whole.clients))
    expected = np.bincount(images.labels[np.concatenate(whole.clients)], minlength=10) * count / 150
    assert np.abs(np.bincount(images.labels[rows], minlength=10) - expected).max() <= 1
    np.testing.assert_array_equal(manifest.test, whole.test)


def test_more_rows_than_there_are_and_a_partition_file_are_refused(tmp_path):
    images = small_set(tmp_path, per_class=20)
    with pytest.raises(
        DataError, match=r"151 rows, and the training rows are 150 in data\.fraction\. Lower the number"
    ):
        make_manifest(images, PartitionSpec(scheme="iid", num_clients=1, validation=0.0, fraction=151))
    rows = "example,client,split\n" + "".join(f"{row},{row % 2},train\n" for row in range(200))
    (tmp_path / "parts.csv").write_text(rows)
    spec = PartitionSpec(scheme="file", file=str(tmp_path / "parts.csv"), num_clients=2, fraction=0.5)
    with pytest.raises(DataError, match=r"the partition file says which rows train in data\.fraction"):
        make_manifest(images, spec)


def spec_from_clients(share, clients=(0, 2), **more):
    chosen = ValidationSpec(subset=0.4, client_share=share, clients=tuple(clients) if share else (), **more)
    return PartitionSpec(num_clients=5, alpha=0.5, validation=0.5, validation_set=chosen)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5])
def test_a_share_of_the_validation_set_has_the_mix_of_some_clients(share, tmp_path):
    images = small_set(tmp_path, per_class=200)
    manifest, plain = (make_manifest(images, spec_from_clients(s)) for s in (share, 0.0))
    assert len(manifest.validation) == len(plain.validation) == 400
    # Nobody's rows, and the clients have what they have without it.
    assert not np.isin(manifest.validation, np.concatenate([*manifest.clients, manifest.test])).any()
    assert len(np.unique(manifest.validation)) == 400
    assert all((a == b).all() for a, b in zip(manifest.clients, plain.clients, strict=True))
    assert (manifest.test == plain.test).all()
    # floor(share n) rows by the pooled mix of clients 0 and 2, to one row a class; the rest as all held-out rows.
    own = manifest.class_counts[[0, 2]].sum(0)
    every = np.bincount(images.labels[manifest.division.rows(VALIDATION)], minlength=10)
    want = int(400 * share) * own / own.sum() + (400 - int(400 * share)) * every / every.sum()
    assert np.abs(manifest.validation_counts - want).max() <= 2
    assert make_manifest(images, spec_from_clients(share)).checksum == manifest.checksum
    if share:
        assert manifest.checksum != plain.checksum
        assert json.loads(manifest.to_json())["spec"]["validation_set"]["clients"] == [0, 2]
        table = partition_table(manifest.class_counts, images.info.classes, manifest.validation_counts)
        assert [int(values[-1]) for values in [*table.values()][-10:]] == manifest.validation_counts.tolist()


def test_clients_mix_counts_domains_where_there_are_some(tmp_path):
    images = small_set(tmp_path, per_class=200, domains=np.arange(2000) // 10 % 4)
    chosen = ValidationSpec(subset=0.05, client_share=1.0, clients=(1,))
    spec = PartitionSpec(scheme="domain", num_clients=4, validation=0.5, validation_set=chosen)
    manifest = make_manifest(images, spec)
    assert set(images.domains[manifest.validation]) == {1}  # client 1 has domain 1
    assert len(manifest.validation) == 50


def test_a_mix_that_the_held_out_rows_do_not_give_is_refused(tmp_path):
    images = small_set(tmp_path)
    with pytest.raises(DataError, match=r"mix of clients 1 asks for \d+ rows .* of which \d+ are held out"):
        make_manifest(images, PartitionSpec(
            scheme="shards", shards_per_client=1, num_clients=10,
            validation_set=ValidationSpec(client_share=1.0, clients=(1,)),
        ))  # fmt: skip


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ({"data": {"validation_set": {"from_clients": {"share": 0.5, "clients": [20]}}}}, "client 20 of 20"),
        ({"data": {"validation_set": {"from_clients": {"share": 0.5}, "imbalance": 0.5}}}, "keep one"),
        ({"data": {"validation_set": {"from_clients": {"share": 0.5}, "external": {"name": "a", "mapping": "b"}}}}, "one"),
        ({"data": {"validation": 0, "validation_set": {"from_clients": {"share": 0.5}}}}, "no validation set"),
        ({"data": {"validation_set": {"from_clients": {"share": 1.5}}}}, "1.5"),
        ({"data": {"validation_set": {"from_clients": {"share": 0.5, "clients": []}}}}, "clients"),
    ],
)  # fmt: skip
def test_faults_of_from_clients(groups, words):
    assert words in str(parse_config(groups)[1])


def test_client_order_keeps_the_clients_apart(tmp_path):
    images = small_set(tmp_path)
    manifests = {
        order: make_manifest(
            images, PartitionSpec(num_clients=5, within_clients=True, validation_set=ValidationSpec(order=order))
        )
        for order in ("client", "stratified")
    }
    assert sorted(manifests["client"].validation) == sorted(manifests["stratified"].validation)
    assert manifests["client"].checksum != manifests["stratified"].checksum
    ordered = images.labels[manifests["stratified"].validation]
    assert (ordered == ordered[stratified_order(ordered)]).all()


@pytest.mark.parametrize(
    ("key", "groups"),
    [
        ("partition.form", {"partition": {"scheme": "iid", "form": "class"}}),
        ("partition.form", {"partition": {"scheme": "quantity", "form": "class"}}),
        ("data", {"data": {"test": 0.6, "validation": 0.5}}),
        ("data.split_within_clients", {"data": {"split": "official", "split_within_clients": True}}),
        ("data.validation_set.external", {"data": {"validation_set": {"external": {"name": "stl10"}}}}),
        ("data.validation_set", {"data": {"validation": 0, "validation_set": {"subset": 0.5}}}),
        ("data.validation_set.order", {"data": {"validation_set": {"order": "client"}}}),
        ("data.validation_set.label_noise", {"data": {"validation_set": {"label_noise": 2}}}),
        ("data.validation_set.external.nam", {"data": {"validation_set": {"external": {"nam": "x"}}}}),
        ("data", {"data": {"split": "official"}}),
        ("partition", {"partition": {"scheme": "domain"}}),
    ],
)
def test_faults_of_the_data_groups(key, groups, root):
    with pytest.raises(ConfigError) as caught:
        check(
            raw_config(root, **{k: {**v, "root": str(root)} if k == "data" else v for k, v in groups.items()}), "a test"
        )
    assert caught.value.faults[0].key == key


@pytest.mark.slow
def test_fedvg_sees_the_validation_set_that_was_asked_for(root, tmp_path):
    names = [str(i) for i in range(10)]
    small_set(root, "digits-like", names, per_class=8, shape=(16, 16, 1))
    (tmp_path / "map.yaml").write_text("".join(f"'{i}': ['{i}']\n" for i in range(9)))
    plain = run(plan_of(root, ["fedvg"], data={"test": 0.25}), root)
    results = [plain.state]
    for chosen in (
        {"subset": 0.5},
        {"imbalance": 0.7},
        {"label_noise": 0.5},
        {"subset": 0.5, "from_clients": {"share": 0.5, "clients": [1, 3]}},
        {"external": {"name": "digits-like", "mapping": str(tmp_path / "map.yaml")}},
    ):
        plan = plan_of(root, ["fedvg"], data={"test": 0.25, "validation_set": chosen})
        results.append(run(plan, root).state)
    for i, a in enumerate(results):
        assert torch.isfinite(a).all()
        assert all(not torch.equal(a, b) for b in results[:i])
