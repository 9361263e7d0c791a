"""A named set is what its publisher says, or an error that says what was expected, what was found, and the likely cause."""

from __future__ import annotations

import gzip
import shutil

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from raysim.base.errors import DataError
from raysim.cli.main import app
from raysim.data import sources
from raysim.data.arrow import PreparedSet
from raysim.data.facts import FACTS, Facts, _some
from raysim.data.readers.reader_options import ReaderOptions
from raysim.data.sources import prepare, set_path
from tests.support.image_sets import class_tree

DOMAINS, CLASSES = ("art", "photo"), ("ant", "bee", "cat")
PACS = Facts({"art": 6, "photo": 6}, CLASSES, (10, 12, 3), DOMAINS, "us")
SPLIT = Facts({"train": 6, "test": 3}, CLASSES, (10, 12, 3), source="us")


@pytest.fixture
def pacs(tmp_path, monkeypatch):
    """A tree of two domains as published, in the folder of a mirror, with what such folders hold beside it."""
    monkeypatch.setattr(sources, "FACTS", {"pacs": PACS, "cifar10": SPLIT})
    for domain in DOMAINS:
        class_tree(tmp_path / "mirror" / "PACS" / domain, CLASSES, each=2)
    (tmp_path / "mirror" / "README.md").write_text("# Homework")
    (tmp_path / "mirror" / "train.py").write_text("print()")
    (tmp_path / "mirror" / ".git").mkdir()
    return tmp_path / "mirror"


@pytest.fixture
def halves(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "FACTS", {"cifar10": SPLIT})
    for part, each in (("train", 2), ("test", 1)):
        class_tree(tmp_path / "mirror" / part, CLASSES, each=each)
    (tmp_path / "mirror" / "README.md").write_text("# A mirror")
    return tmp_path / "mirror"


@pytest.mark.parametrize("above", ["PACS", "."])
@pytest.mark.parametrize("name", ["pacs", "pacs_small"])
def test_folder_above_the_published_one_is_as_good(pacs, name, above, tmp_path):
    info = prepare("pacs", tmp_path / "out", pacs / above, save_as=name)
    assert (info.domains, info.classes, info.num_examples) == (DOMAINS, CLASSES, 12)


def test_reader_of_classes_on_a_tree_of_domains_is_refused(pacs, tmp_path):
    with pytest.raises(DataError, match=r"the domains, art, photo, were read as classes .*prepare domains"):
        prepare("folder", tmp_path / "out", pacs / "PACS", save_as="pacs")
    assert not set_path(tmp_path / "out", "pacs").exists()


def test_missing_class_is_named(halves, tmp_path):
    for part in ("train", "test"):
        shutil.rmtree(halves / part / "bee")
    with pytest.raises(
        DataError, match=r"2 classes, ant, cat; 3 expected, and bee is missing in .*fetch the set again"
    ):
        prepare("folder", tmp_path / "out", halves, save_as="cifar10")


def test_further_class_is_named(halves, tmp_path):
    class_tree(halves / "train", ["dog"], each=1)
    with pytest.raises(DataError, match=r"dog is not a class of the set"):
        prepare("folder", tmp_path / "out", halves, save_as="cifar10")


def test_half_the_images_are_refused_and_leave_nothing(halves, tmp_path):
    for name in CLASSES:
        next((halves / "train" / name).iterdir()).unlink()
    with pytest.raises(
        DataError, match=r"3 train, 3 test examples; 6 train, 3 test examples expected in .*fetch the set again"
    ):
        prepare("folder", tmp_path / "out", halves, save_as="cifar10")
    assert not set_path(tmp_path / "out", "cifar10").exists()


def test_one_split_alone_is_refused(halves, tmp_path):
    with pytest.raises(DataError, match=r"6 examples; 6 train, 3 test examples expected in .*the publisher's archive"):
        prepare("folder", tmp_path / "out", halves / "train", save_as="cifar10")


def test_order_of_classes_is_checked(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "FACTS", {"cifar10": Facts({"": 2}, ("bee", "ant"))})
    archive = tmp_path / "set.npz"
    np.savez(archive, images=np.zeros((2, 4, 4, 3), np.uint8), labels=np.arange(2), classes=np.array(["ant", "bee"]))
    with pytest.raises(DataError, match="classes in the order ant, bee, bee, ant expected"):
        prepare("npz", tmp_path / "out", archive, save_as="cifar10")


def test_other_pixels_are_another_release_unless_they_were_asked_for(halves, tmp_path, monkeypatch):
    wide = Facts(SPLIT.examples, CLASSES, (32, 32, 3))
    monkeypatch.setattr(sources, "FACTS", {"cifar10": wide})
    with pytest.raises(DataError, match=r"images of 10 x 12 x 3, 32 x 32 x 3 expected"):
        prepare("folder", tmp_path / "out", halves, save_as="cifar10")
    assert prepare(
        "folder", tmp_path / "out", halves, save_as="cifar10", options=sources.ReaderOptions(size=8)
    ).shape == (8, 8, 3)


def test_set_of_another_name_is_not_checked(halves, tmp_path):
    assert prepare("folder", tmp_path / "out", halves / "train", save_as="part").num_examples == 6


def test_folders_of_other_sets_beside_the_files_are_passed_over(tmp_path):
    """torchvision's usual root holds many sets."""
    for part in ("train", "val"):
        class_tree(tmp_path / "pets" / part, ("cat", "dog"), each=1)
    with pytest.raises(DataError, match=rf"data_batch_1.*{tmp_path}/cifar-10"):
        prepare("cifar10", tmp_path / "out", tmp_path)
    with pytest.raises(DataError, match="idx"):
        prepare("mnist", tmp_path / "out", tmp_path, save_as="mine")


def test_drawn_shapes_that_are_there_are_not_taken_for_others(tmp_path):
    first = prepare("shapes", tmp_path, options=ReaderOptions(count=20, size=16, domains=2))
    assert (
        prepare("shapes", tmp_path)
        == first
        == prepare("shapes", tmp_path, options=ReaderOptions(count=20, size=16, domains=2))
    )
    for other in (ReaderOptions(count=30, size=16, domains=2), ReaderOptions(size=24), ReaderOptions(seed=7)):
        with pytest.raises(DataError, match=r"the set exists with --count 20 --domains 2 --size 16, and .* --again"):
            prepare("shapes", tmp_path, options=other)


def test_second_preparation_says_that_the_first_is_kept(pacs, tmp_path):
    words = ["prepare", "pacs", "--out", str(tmp_path / "out"), "--root"]
    first = CliRunner().invoke(app, [*words, str(pacs)])
    assert first.exit_code == 0
    assert "note" not in first.output
    same, other = (CliRunner().invoke(app, [*words, str(root)]) for root in (pacs, pacs / "PACS"))
    assert (same.exit_code, other.exit_code) == (0, 0)
    text, other_text = (" ".join(result.output.split()) for result in (same, other))
    assert f"was made before from {pacs}; --again repeats the preparation" in text
    assert f"was made before from {pacs}; {pacs / 'PACS'} is not read; --again repeats the preparation" in other_text


@pytest.mark.parametrize(("names", "text"), [("abc", "a, b, c"), ("abcd", "a, b, c, ...")])
def test_a_sentence_names_three_classes_at_most(names, text):
    assert _some(names) == text


def test_every_fact_is_whole():
    assert set(FACTS) <= set(sources.SOURCES)
    for facts in FACTS.values():
        assert facts.source
        assert not facts.domains or set(facts.examples) == set(facts.domains)
        assert not isinstance(facts.classes, tuple) or list(facts.classes) == sorted(set(facts.classes))


def test_mnist_is_read_from_idx_files_and_from_trees(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "FACTS", {"mnist": Facts({"train": 20, "test": 10}, tuple("0123456789"), (28, 28, 1))})
    generator = np.random.default_rng(0)
    images, labels = generator.integers(0, 256, (30, 28, 28), np.uint8), np.arange(30) % 10
    (tmp_path / "idx").mkdir()
    for part, prefix, rows in (("train", "train", slice(0, 20)), ("test", "t10k", slice(20, 30))):
        for row in range(30)[rows]:
            folder = tmp_path / "tree" / part / str(labels[row])
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(images[row]).save(folder / f"{row:02}.png")
        write_idx(tmp_path / "idx" / f"{prefix}-images-idx3-ubyte", images[rows])
        write_idx(tmp_path / "idx" / f"{prefix}-labels-idx1-ubyte", labels[rows])
    by_class = np.lexsort((np.arange(30), labels, np.arange(30) >= 20))
    for reader, files, order in (("mnist", "idx", np.arange(30)), ("folder", "tree", by_class)):
        info = prepare(reader, tmp_path / "out", tmp_path / files, again=True, save_as="mnist")
        assert (info.shape, info.num_examples) == ((28, 28, 1), 30)
        read, found = PreparedSet(set_path(tmp_path / "out", "mnist")).whole()
        np.testing.assert_array_equal(read[..., 0], images[order])
        np.testing.assert_array_equal(found, labels[order])


@pytest.mark.parametrize(("split", "first"), [("letters", 1), ("balanced", 0)])
def test_emnist_is_read_upright_with_labels_from_0(split, first, tmp_path):
    upright = np.random.default_rng(1).integers(0, 256, (4, 28, 28), np.uint8)
    labels = np.array([0, 2, 1, 0])
    folder = tmp_path / "files" / "gzip"
    folder.mkdir(parents=True)
    for part in ("train", "test"):
        write_idx(folder / f"emnist-{split}-{part}-images-idx3-ubyte", upright.swapaxes(1, 2), packed=True)
        write_idx(folder / f"emnist-{split}-{part}-labels-idx1-ubyte", labels + first, packed=True)
    info = prepare(f"emnist_{split}", tmp_path / "out", tmp_path / "files")
    images, found = PreparedSet(set_path(tmp_path / "out", info.name)).whole()
    np.testing.assert_array_equal(images[:4, ..., 0], upright)
    np.testing.assert_array_equal(found[:4], labels)
    assert len(info.classes) == FACTS[info.name].classes


def write_idx(path, array, *, packed: bool = False) -> None:
    data = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes() + array.astype(np.uint8).tobytes()
    if packed:
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(data))
    else:
        path.write_bytes(data)


def test_covid19_is_described_with_both_of_its_counts():
    """Section 4.1 of FedVG's paper, and the page of the set's version 4: no number to check files against."""
    assert "covid19" not in FACTS
    assert all(count in sources.SOURCES["covid19"].description for count in ("9,523", "9,208"))
