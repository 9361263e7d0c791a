"""Sets on disk: columns, checks, damage and full disks."""

from __future__ import annotations

import errno
import secrets
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from raysim.base.errors import DataError
from raysim.data.arrow import PreparedSet, describe, write_set
from raysim.data.rows import SetRows, in_batches
from raysim.data.sources import prepare, set_path
from raysim.folders.files import partial_file
from tests.support.image_sets import pixels, same


def test_set_without_optional_columns_has_none(tmp_path):
    path, images = tmp_path / "mine.arrow", pixels(10, 4, 4, 1)
    write_set(path, "mine", "ab", in_batches(images, np.arange(10) % 2))
    source = PreparedSet(path)
    assert pa.ipc.open_file(str(path)).schema.names == ["input", "target"]
    assert (source.domains, source.splits, source.info.domains, source.info.source_checksum) == (None, None, (), "")
    source.verify()
    same(source, images, np.arange(10) % 2)


def test_domains_and_splits_are_checked(tmp_path):
    path, images, labels = tmp_path / "mine.arrow", pixels(4, 4, 4, 1), np.zeros(4, int)
    with pytest.raises(DataError, match=r"domain 2 outside 0\.\.1 in mine, row 3"):
        write_set(path, "mine", "a", [SetRows(images, labels, np.array([0, 1, 0, 2]))], domains="xy")
    with pytest.raises(DataError, match=r"split 3 outside 0\.\.2 in mine, row 1"):
        write_set(path, "mine", "a", [SetRows(images, labels, None, np.array([0, 3, 0, 2]))])
    with pytest.raises(DataError, match="some batches lack a domain"):
        write_set(path, "mine", "a", [SetRows(images, labels, labels), SetRows(images, labels)], domains="x")
    with pytest.raises(DataError, match="inputs of type float64"):
        write_set(path, "mine", "a", [(images / 255, labels)])
    with pytest.raises(DataError, match=r"labels of shape \(3,\) for 4 images"):
        write_set(path, "mine", "a", [(images, labels[:3])])
    assert list(tmp_path.iterdir()) == []


def test_damaged_set_is_refused_and_kept_set_is_verified(tmp_path):
    info = prepare("digits", tmp_path)
    path = set_path(tmp_path, "digits")
    assert prepare("digits", tmp_path) == info
    data = bytearray(path.read_bytes())
    data[20_000] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"checksum \w+ where the description says \w+ in .*digits.arrow"):
        prepare("digits", tmp_path)
    assert prepare("digits", tmp_path, again=True) == info
    path.write_bytes(path.read_bytes()[:50_000])
    with pytest.raises(DataError, match="not a readable Arrow IPC file"):
        prepare("digits", tmp_path)
    describe(path).unlink()  # as if preparing had been cut off: it is done anew
    assert prepare("digits", tmp_path) == info


def test_full_disk_is_one_error_and_keeps_the_old_set(tmp_path, monkeypatch):
    info = prepare("digits", tmp_path)
    path = set_path(tmp_path, "digits")
    before = path.read_bytes()
    monkeypatch.setattr(secrets, "token_hex", lambda _: "x")
    partial_file(path).symlink_to("/dev/full")  # every write fails as on a full disk
    with pytest.raises(DataError, match=rf"no space left .* in {path.parent}"):
        prepare("digits", tmp_path, again=True)
    assert sorted(file.name for file in path.parent.iterdir()) == ["digits.arrow", "digits.json"]
    assert path.read_bytes() == before
    assert prepare("digits", tmp_path) == info


def test_full_disk_at_the_description_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(DataError, match="no space left"):
        prepare("digits", tmp_path)
    assert list((tmp_path / "digits").iterdir()) == []
