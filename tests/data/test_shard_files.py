"""Shard files that are laid out first and filled by windows in any order."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import raysim.data.shard_files as shard_files
from raysim.base.errors import DataError
from raysim.data.arrow import SEAL, PreparedSet, write_set
from raysim.data.federation import COUNTS, build_all_shards
from raysim.data.fitting import fit_to
from raysim.data.manifest import PartitionSpec, make_manifest
from raysim.data.rows import in_batches
from raysim.data.shard_files import Filled, read_window, scatter, shard_plan, write_serially
from raysim.data.sources import set_path
from raysim.data.splits import ValidationSpec
from tests.support.federations import build_shards

CLASSES = ("a", "b", "c")


def a_set(root: Path, name: str, count: int, shape=(5, 4, 3), rows=64) -> PreparedSet:
    rng = np.random.default_rng(len(name))
    images = rng.integers(0, 256, (count, *shape), dtype=np.uint8)
    path = set_path(root, name)
    write_set(path, name, CLASSES, in_batches(images, rng.integers(0, 3, count), rows=rows))
    return PreparedSet(path)


@pytest.fixture
def small_windows(monkeypatch):
    """Windows of about 20 rows, which cross the record batches, and writes of 3."""
    monkeypatch.setattr(shard_files, "LEAST_WINDOW", 1200)
    monkeypatch.setattr(shard_files, "MOST_WINDOW", 1200)
    monkeypatch.setattr(shard_files, "WRITE_BYTES", 200)


def twin(manifest, folder: Path) -> dict[str, bytes]:
    """Name -> bytes of the files as `write_set` writes them from all their rows at once."""
    clients = manifest.clients
    wanted = {
        f"clients-{number:05d}": (manifest.set_path, np.concatenate(clients[start : start + 64]), None)
        for number, start in enumerate(range(0, len(clients), 64))
    }
    path = manifest.external[0] if manifest.external else manifest.set_path
    wanted["validation"] = (path, manifest.validation, manifest.validation_labels)
    wanted["test"] = (manifest.set_path, manifest.test, None)
    found = {}
    for name, (path, rows, labels) in wanted.items():
        images, own = PreparedSet(Path(path)).take(rows)
        images = fit_to(images, manifest.input_shape or PreparedSet(Path(manifest.set_path)).info.shape)
        write_set(folder / f"{name}.arrow", name, CLASSES, [(images, own if labels is None else labels)], source=path)
        found |= {f"{name}.{kind}": (folder / f"{name}.{kind}").read_bytes() for kind in ("arrow", "json")}
    return found


def files(folder: Path) -> dict[str, bytes]:
    """Of the rows; of descriptions all but what is computed of a whole set at once."""
    contents = {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in ("index.json", COUNTS)}
    return {name: whole if name.endswith("arrow") else without_moments(whole) for name, whole in contents.items()}


def without_moments(description: bytes) -> bytes:
    return json.dumps({**json.loads(description), "mean": [], "deviation": [], SEAL: ""}).encode()


def backwards_and_twice(plan):
    """Windows from the last to the first, each written twice, as after a lost worker."""
    for window in reversed(list(plan.windows())):
        scatter(plan, read_window(window, plan.info.shape))
        yield scatter(plan, read_window(window, plan.info.shape))


def without_maps(plan):
    """As with inputs of a page and more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_files, "PAGE_BYTES", 0)
        yield from write_serially(plan)


@pytest.mark.parametrize("write", [write_serially, backwards_and_twice, without_maps])
def test_files_are_those_of_a_set_written_whole_whatever_the_windows(tmp_path, small_windows, write):
    images, external = a_set(tmp_path, "mine", 700), a_set(tmp_path, "other", 90, shape=(7, 6, 1))
    mapping = ValidationSpec(mapping=tuple((name, name) for name in CLASSES), unique=False, label_noise=0.3)
    spec = PartitionSpec(num_clients=130, scheme="iid", validation_set=mapping)
    manifest = make_manifest(images, spec, external)
    assert len(np.unique(manifest.validation)) < len(manifest.validation)  # rows that go to two places
    assert len(list(shard_plan([(manifest, tmp_path)]).windows())) > 30
    folder = build_shards(manifest, tmp_path / "shards", write)
    twins = twin(manifest, tmp_path / "twin")
    assert files(folder) == {
        name: whole if name.endswith("arrow") else without_moments(whole) for name, whole in twins.items()
    }


def test_partitions_of_one_set_are_built_from_one_reading(tmp_path, small_windows, monkeypatch):
    images = a_set(tmp_path, "mine", 300)
    manifests = [make_manifest(images, PartitionSpec(num_clients=9, alpha=1.0, seed=seed)) for seed in (0, 1, 0, 2)]
    read, said = [], []
    monkeypatch.setattr(shard_files, "read_window", lambda *of: read.append(of) or read_window(*of))
    folders = build_all_shards(manifests, tmp_path / "all", on_progress=lambda done, total: said.append((done, total)))
    assert folders[0] == folders[2]
    assert len(set(folders)) == 3
    assert len(read) == len(set(read)) == len(said)
    assert said[-1] == (900, 900)
    for manifest, folder in zip(manifests, folders, strict=True):
        alone = build_shards(manifest, tmp_path / "alone")
        assert files(folder) == files(alone)
    count = len(read)
    shutil.rmtree(folders[1])
    build_all_shards(manifests, tmp_path / "all")
    assert len(list(folders[1].iterdir())) == len(list(folders[0].iterdir()))
    assert len(read) > count


def test_file_with_a_row_missing_is_refused_and_one_that_is_laid_out_is_no_set(tmp_path, small_windows):
    images = a_set(tmp_path, "mine", 300)
    manifest = make_manifest(images, PartitionSpec(num_clients=9, scheme="iid"))
    refused = []

    def but_one(plan):
        *all_but_last, last = write_serially(plan)
        yield from all_but_last
        yield Filled(*(values[1:] for values in last))
        # Only this file: threads give the others their descriptions at about this time.
        with pytest.raises(DataError, match="description"):
            PreparedSet(Path(plan.files[last.numbers[0]].path))
        refused.append(last.numbers[0])

    with pytest.raises(DataError, match=r"1 rows were not written in .*\.arrow"):
        build_shards(manifest, tmp_path / "shards", but_one)
    assert len(refused) == 1
    assert [path.name for path in (tmp_path / "shards").iterdir() if path.suffix != ".lock"] == []


def test_leftovers_of_a_killed_run_are_no_shards(tmp_path):
    images = a_set(tmp_path, "mine", 300)
    manifest = make_manifest(images, PartitionSpec(num_clients=9, scheme="iid"))
    name = manifest.checksum[:24]
    part = tmp_path / "shards" / f".{name}.12345.part"
    part.mkdir(parents=True)
    plan = shard_plan([(manifest, part)])
    for file in plan.files:
        shard_files._lay_out(file, plan.info)
    folder = build_shards(manifest, tmp_path / "shards")
    assert not part.exists()
    twins = twin(manifest, tmp_path / "twin")
    assert files(folder) == {
        name: whole if name.endswith("arrow") else without_moments(whole) for name, whole in twins.items()
    }


def test_many_clients_open_the_set_once_a_window(tmp_path, monkeypatch):
    images = a_set(tmp_path, "mine", 3000, shape=(2, 2, 1), rows=500)
    manifest = make_manifest(images, PartitionSpec(num_clients=1000, scheme="iid"))
    opened = []
    init = PreparedSet.__init__
    monkeypatch.setattr(PreparedSet, "__init__", lambda self, path: opened.append(path) or init(self, path))
    folder = build_shards(manifest, tmp_path / "shards")
    assert len(list(folder.glob("clients-*.arrow"))) == 16
    assert len(opened) <= 2
