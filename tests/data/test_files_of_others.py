"""Prepared sets and source files that somebody damaged or made by hand: one sentence, and nothing large is allocated."""

from __future__ import annotations

import io
import json
import os
import zipfile

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from raysim.base.errors import DataError
from raysim.data.arrow import PreparedSet, describe, write_set
from raysim.data.readers.reader_options import ReaderOptions
from raysim.data.rows import record_of
from raysim.data.sources import prepare
from tests.fuzz.verdicts import limited
from tests.support.image_sets import redescribe

PIXELS, LABELS = np.zeros((6, 4, 4, 1), np.uint8), np.arange(6) % 2


@pytest.fixture
def path(tmp_path):
    """A prepared set of two classes."""
    path = tmp_path / "set" / "set.arrow"
    write_set(path, "set", ("a", "b"), [(PIXELS, LABELS)])
    return path


@pytest.mark.parametrize(
    ("change", "words"), [({"colour": "red"}, "colour"), ({"classes": ["a"]}, r"label 1 outside 0\.\.0")]
)
def test_a_description_of_other_examples_is_damaged(change, words, path):
    redescribe(path, **change)
    with pytest.raises(DataError, match=words):
        PreparedSet(path).verify()


@pytest.mark.parametrize(
    "change", [{"classes": ["b", "a"]}, {"mean": [0.25]}, {"deviation": [0.5]}, {"options": "--target a"}]
)
def test_a_description_that_was_changed_by_hand_is_refused(change, path):
    fields = json.loads(describe(path).read_text())
    assert all(fields[name] != value for name, value in change.items())
    describe(path).write_text(json.dumps(fields | change))
    with pytest.raises(DataError, match="a field was changed by hand: description_sha256"):
        PreparedSet(path)


@pytest.mark.parametrize("text", ["3", "[]", "null", "[" * 100_000, "\xff"])
def test_a_description_of_another_form_is_damaged(text, path):
    describe(path).write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=r"set\.json is missing or damaged"):
        PreparedSet(path)


def _tables():
    record = record_of({"input": PIXELS, "target": LABELS})
    yield "without labels", record.drop_columns(["target"])
    yield "without images", record.drop_columns(["input"])
    yield "with text for labels", record.set_column(1, "target", pa.array(["a"] * 6))
    yield "with short labels", record.set_column(1, "target", pa.array([0] * 6, pa.int8()))
    yield "with numbers for images", record.set_column(0, "input", pa.array([0] * 6))
    yield "with another column", record.append_column("weight", pa.array([1.0] * 6))


@pytest.mark.parametrize(("kind", "record"), list(_tables()))
def test_a_table_that_no_set_has_is_not_readable(kind, record, path):
    with pa.ipc.new_file(str(path), record.schema) as writer:
        writer.write_batch(record)
    with pytest.raises(DataError, match="not a readable Arrow IPC file of a set"):
        PreparedSet(path)


@pytest.mark.parametrize("shape", [(6, 0, 4), (6, 4, 4, 0)])
def test_images_without_a_pixel_are_refused(shape, tmp_path):
    np.savez(tmp_path / "a.npz", images=np.zeros(shape, np.uint8), labels=LABELS)
    with pytest.raises(DataError, match="without a pixel"):
        prepare("npz", tmp_path, tmp_path / "a.npz", save_as="a")


def test_a_size_that_no_memory_holds_is_refused_before_it_is_made(tmp_path):
    folder = tmp_path / "tree" / "a"
    folder.mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(folder / "0.png")
    with pytest.raises(DataError, match="1000000 x 1000000 pixels would take at least"):
        prepare("shapes", tmp_path, options=ReaderOptions(size=10**6))
    with pytest.raises(DataError, match=r"an input of shape \(1000000, 1000000, 3\) would take at least"):
        prepare("folder", tmp_path, tmp_path / "tree", options=ReaderOptions(size=10**6))
    with pytest.raises(DataError, match=r"1,000,000,000,000 inputs take 192,000\.0 GB, and .* GB are free"):
        prepare("shapes", tmp_path, options=ReaderOptions(count=10**12, size=8))
    assert not (tmp_path / "shapes" / "shapes.arrow").exists()


def npz_of(path, **headers):
    """An archive whose arrays are said to have such shapes and types, and have few bytes."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, (shape, kind) in headers.items():
            head = io.BytesIO()
            np.lib.format.write_array_header_1_0(head, {"descr": kind, "fortran_order": False, "shape": shape})
            archive.writestr(f"{name}.npy", head.getvalue() + bytes(600))
    return path


@pytest.mark.parametrize(
    ("images", "labels", "words"),
    [
        ((10**13, 8, 8), (10**13,), r"labels would take at least 80\.0 TB"),
        ((20, 8, 8), (10**13,), "20 images and 10000000000000 labels"),
        ((20, 10**6, 10**6), (20,), r"\(1000000, 1000000, 1\) would take at least 1\.0 TB"),
        ((20, 2**32, 2**32), (20,), "would take at least"),
    ],
)
def test_an_npz_that_unpacks_to_more_than_memory_holds_is_refused(images, labels, words, tmp_path):
    path = npz_of(tmp_path / "bomb.npz", images=(images, "|u1"), labels=(labels, "<i8"))
    with pytest.raises(DataError, match=words):
        prepare("npz", tmp_path, path, save_as="a")


def test_an_npz_of_numbers_that_no_memory_holds_is_refused(tmp_path):
    path = npz_of(tmp_path / "bomb.npz", x=((20, 10**12), "<f4"), y=((20,), "<f4"))
    with pytest.raises(DataError, match=r"x would take at least 80\.0 TB"):
        prepare("npz", tmp_path, path, save_as="a")


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_pipes_and_devices_among_source_files_are_refused_at_once(kind, tmp_path):
    folder = tmp_path / "tree" / "a"
    folder.mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(folder / "0.png")
    other = folder / "1.png"
    os.mkfifo(other) if kind == "pipe" else other.symlink_to("/dev/zero")
    with limited(30), pytest.raises(DataError, match=r"a pipe or a device; give a file.*1\.png"):
        prepare("folder", tmp_path, tmp_path / "tree")
    with limited(30), pytest.raises(DataError, match="no such file or folder"):
        prepare("npz", tmp_path, other)
