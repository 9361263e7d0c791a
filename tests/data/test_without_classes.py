"""Partitions of sets whose targets are no classes, and clients that never train."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest

from raysim.api import arrays
from raysim.base.errors import ConfigError, DataError
from raysim.data.arrow import PreparedSet
from raysim.data.division import table_file
from raysim.data.federation import Federation
from raysim.data.manifest import PartitionSpec, make_manifest
from raysim.data.partition import BY_CLASS, SCHEMES
from raysim.data.sources import set_path
from raysim.data.splits import ValidationSpec
from raysim.plan.check import check
from tests.support.federations import build_shards
from tests.support.task_sets import contents, task_config, write_task_set

DOMAINS = np.arange(60) % 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    for task in ("classes", "labels", "regression", "tokens"):
        write_task_set(folder, task, domains=DOMAINS)
    return folder


def manifest_of(folder, task, **spec):
    return make_manifest(PreparedSet(set_path(folder, f"tiny_{task}")), PartitionSpec(num_clients=3, **spec))


# --- which schemes fit ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["labels", "regression", "tokens"])
@pytest.mark.parametrize("scheme", BY_CLASS)
def test_schemes_by_class_are_refused_without_classes(scheme, task, folder):
    with pytest.raises(DataError, match=f"tiny_{task} has no class for each row") as caught:
        manifest_of(folder, task, scheme=scheme)
    fit = caught.value.mend.removeprefix("set partition.scheme to ").removesuffix(", file or a function of your own")
    assert ("quantiles" in fit.split(", ")) == (task == "regression")
    for name in fit.split(", "):
        assert len(manifest_of(folder, task, scheme=name).clients) == 3


@pytest.mark.parametrize("task", ["classes", "labels", "tokens"])
def test_quantiles_need_a_number(task, folder):
    with pytest.raises(DataError, match=f"tiny_{task} has no number for each row") as caught:
        manifest_of(folder, task, scheme="quantiles")
    assert ("shards" in caught.value.mend) == (task == "classes")


def test_the_refusal_is_one_fault_of_a_configuration(folder):
    raw = task_config(folder, "regression", partition={"scheme": "dirichlet", "alpha": 0.5})
    with pytest.raises(
        ConfigError, match=r"partition: tiny_regression has no class for each row .*iid, quantity, quantiles"
    ):
        check(raw, "a test")


def test_each_scheme_says_whether_it_needs_classes():
    free = {"iid", "quantity", "quantiles", "domain", "natural", "file", "joint"}
    assert set(SCHEMES) == {*BY_CLASS, *free}


def test_own_function_gets_the_targets(folder, tmp_path, monkeypatch):
    code = "import numpy as np\n\ndef by_sign(labels, num_clients, *, targets):\n"
    code += "    assert not labels.any()\n"
    code += "    return [np.flatnonzero((targets[:, 0] > 0) == sign) for sign in (False, True)]\n"
    (tmp_path / "signs.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    _, targets = contents("regression")
    images = PreparedSet(set_path(folder, "tiny_regression"))
    manifest = make_manifest(images, PartitionSpec(scheme="signs:by_sign", num_clients=2, test=0.0, validation=0.0))
    assert [set(targets[rows, 0] > 0) for rows in manifest.clients] == [{False}, {True}]


@pytest.mark.parametrize(("key", "value"), [("imbalance", 0.5), ("label_noise", 0.2)])
def test_validation_sets_by_class_are_refused_without_classes(key, value, folder):
    spec = ValidationSpec(**{key: value})
    with pytest.raises(DataError, match=f"{key} goes by class, and tiny_regression has no class for each row"):
        manifest_of(folder, "regression", scheme="iid", validation_set=spec)


def test_an_external_validation_set_needs_classes(folder):
    images = PreparedSet(set_path(folder, "tiny_regression"))
    spec = PartitionSpec(scheme="iid", num_clients=3, validation_set=ValidationSpec(mapping=(("regression 0",) * 2,)))
    with pytest.raises(DataError, match="external goes by class"):
        make_manifest(images, spec, images)


# --- quantiles ------------------------------------------------------------------------------------------------------------


def test_one_piece_each_is_a_quantile_each(folder):
    _, targets = contents("regression")
    manifest = manifest_of(folder, "regression", scheme="quantiles", shards_per_client=1, test=0.0, validation=0.0)
    spans = sorted((targets[rows].min(), targets[rows].max()) for rows in manifest.clients)
    assert all(below[1] <= above[0] for below, above in pairwise(spans))
    assert manifest.sizes.tolist() == [20, 20, 20]
    assert manifest.class_counts.shape == (3, 1)


def test_more_pieces_are_less_heterogeneous(folder):
    _, targets = contents("regression")

    def gap(pieces):
        spreads = []
        for seed in range(20):
            spec = {"scheme": "quantiles", "shards_per_client": pieces, "seed": seed}
            clients = manifest_of(folder, "regression", test=0.0, validation=0.0, **spec).clients
            spreads.append(np.std([targets[rows].mean() for rows in clients]))
        return np.mean(spreads)

    assert gap(1) > gap(3) > gap(10)


def test_quantiles_of_equal_targets_are_random_pieces():
    labels, rng = np.zeros(30, np.int64), np.random.default_rng(0)
    parts = SCHEMES["quantiles"][""](labels, 3, rng=rng, targets=np.ones((30, 1), np.float32), shards_per_client=1)
    assert sorted(np.concatenate(parts).tolist()) == list(range(30))
    assert any((np.diff(part) > 1).any() for part in parts)  # not the order of the file


# --- unseen clients -------------------------------------------------------------------------------------------------------

OPTIONS = [{}, {"within_clients": True}, {"scheme": "domain"}]


@pytest.mark.parametrize("options", OPTIONS, ids=["fraction", "within clients", "domain"])
def test_unseen_clients_rows_are_nobody_elses(options, folder):
    spec = {"scheme": "iid", "validation": 0.2, "test": 0.2, **options}
    whole, manifest = (manifest_of(folder, "regression", **spec, num_unseen=count) for count in (0, 1))
    others = np.concatenate([*manifest.clients, manifest.validation, manifest.test])
    assert not set(manifest.unseen) & set(others)
    assert set(manifest.unseen) | set(others) == set(range(60))
    assert len(manifest.clients) == len(manifest.class_counts) == 2
    assert manifest.unseen_sizes.tolist() == [len(manifest.unseen)]
    assert manifest.checksum != whole.checksum
    # Who trains has the same rows as without unseen clients.
    assert {tuple(rows) for rows in manifest.clients} <= {tuple(rows) for rows in whole.clients}
    assert manifest.division.num_clients == 3
    if manifest.test_sizes is not None:
        assert manifest.test_sizes.sum() == len(manifest.test)


def test_unseen_clients_are_drawn_by_the_seed(folder):
    drawn = [manifest_of(folder, "regression", scheme="natural", num_unseen=1, seed=seed).unseen for seed in range(9)]
    assert {int(DOMAINS[rows[0]]) for rows in drawn} == {0, 1, 2}
    again = manifest_of(folder, "regression", scheme="natural", num_unseen=1, seed=4)
    assert np.array_equal(again.unseen, drawn[4])


@pytest.mark.parametrize("within", [False, True])
def test_first_and_last_clients_are_two_halves_of_a_set(within, folder):
    """What one run trains on is what the other one never sees, whatever the seed of each."""
    spec = {"scheme": "natural", "validation": 0.2, "test": 0.2, "within_clients": within}
    first = manifest_of(folder, "regression", **spec, num_unseen=2, unseen_choice="first", seed=5)
    last = manifest_of(folder, "regression", **spec, num_unseen=1, unseen_choice="last", seed=6)
    assert ({*DOMAINS[first.unseen]}, {*DOMAINS[np.concatenate(first.clients)]}) == ({0, 1}, {2})
    assert ({*DOMAINS[last.unseen]}, {*DOMAINS[np.concatenate(last.clients)]}) == ({2}, {0, 1})
    if within:
        assert {*first.unseen} == {*np.concatenate([*last.clients, last.validation, last.test])}
        assert {*last.unseen} == {*np.concatenate([*first.clients, first.validation, first.test])}


def test_the_first_clients_of_a_file_may_be_the_unseen_ones(folder, tmp_path):
    file = tmp_path / "examples.json"
    file.write_text(json.dumps({str(client): np.flatnonzero(client == DOMAINS).tolist() for client in range(3)}))
    spec = {"scheme": "file", "file": str(file), "validation": 0.2, "test": 0.2, "num_unseen": 1}
    for choice, domain in ((None, 2), ("last", 2), ("first", 0)):
        manifest = manifest_of(folder, "regression", **spec, unseen_choice=choice)
        assert {*DOMAINS[manifest.unseen]} == {domain}


@pytest.mark.parametrize("within", [False, True])
def test_a_partition_with_unseen_clients_read_back_is_the_same(within, folder, tmp_path):
    spec = {"scheme": "iid", "num_unseen": 1, "validation": 0.2, "test": 0.2, "within_clients": within}
    manifest = manifest_of(folder, "regression", **spec)
    file = tmp_path / "examples.csv"
    file.write_bytes(table_file(manifest.division.table)[1])
    again = manifest_of(folder, "regression", scheme="file", file=str(file), num_unseen=1)
    assert again.checksum == manifest.checksum


def test_shards_hold_unseen_clients_one_after_the_other(folder, tmp_path):
    manifest = manifest_of(folder, "regression", scheme="iid", num_unseen=2)
    federation = Federation(build_shards(manifest, tmp_path))
    inputs, targets = contents("regression")
    assert np.array_equal(federation.held_out("unseen")[0], inputs[manifest.unseen])
    assert np.array_equal(federation.held_out("unseen")[1], targets[manifest.unseen])
    assert federation.unseen_sizes.tolist() == manifest.unseen_sizes.tolist()
    assert json.loads(manifest.to_json())["unseen"] == manifest.unseen.tolist()


def test_without_unseen_clients_files_are_as_they_were(folder, tmp_path):
    manifest = manifest_of(folder, "regression", scheme="iid")
    folder = build_shards(manifest, tmp_path)
    assert "unseen" not in (folder / "index.json").read_text()
    assert "unseen" not in {name for name in json.loads(manifest.to_json()) if name != "spec"}
    assert Federation(folder).unseen_sizes is None


# --- further test sets ----------------------------------------------------------------------------------------------------


def test_a_further_test_set_keeps_its_numbers(folder, tmp_path):
    images = PreparedSet(set_path(folder, "tiny_regression"))
    inputs, targets = contents("regression", 30, seed=8)
    arrays(inputs, targets, name="other", classes=["regression 0"], root=tmp_path)
    other = PreparedSet(set_path(tmp_path, "other"))
    manifest = make_manifest(images, PartitionSpec(scheme="iid", num_clients=3), tests={"other": other})
    federation = Federation(build_shards(manifest, tmp_path / "shards"))
    assert np.array_equal(federation.held_out("test-other")[1], targets)


def test_a_further_test_set_of_another_kind_is_refused(folder, tmp_path):
    images = PreparedSet(set_path(folder, "tiny_regression"))
    inputs, _ = contents("regression")
    arrays(inputs, np.zeros(60, np.int64), name="other", classes=["regression 0"], root=tmp_path)
    with pytest.raises(DataError, match=r"targets of int64 \(\).*Take a set with"):
        make_manifest(
            images,
            PartitionSpec(scheme="iid", num_clients=3),
            tests={"other": PreparedSet(set_path(tmp_path, "other"))},
        )
