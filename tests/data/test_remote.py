"""Data roots at URIs."""

from __future__ import annotations

import numpy as np
import pytest

from raysim.base.errors import ConfigError, DataError
from raysim.base.uri import is_uri
from raysim.data.arrow import PreparedSet, write_set
from raysim.data.rows import in_batches
from raysim.data.sources import fetch_set, set_path
from tests.support.federations import plan_of, run


def test_set_at_a_uri_is_copied_once_and_again_when_it_changed(tmp_path):
    there, here = tmp_path / "there", tmp_path / "here"
    images = np.arange(2400, dtype=np.uint8).reshape(150, 4, 4, 1)
    write_set(set_path(there, "mine"), "mine", "ab", in_batches(images, np.arange(150) % 2))
    uri = f"file://{there}"
    assert is_uri(uri)
    assert not is_uri(str(there))
    local = fetch_set(uri, "mine", here)
    assert (PreparedSet(set_path(local, "mine")).whole()[0] == images).all()
    stamp = set_path(local, "mine").stat().st_mtime_ns
    assert fetch_set(uri, "mine", here) == local
    assert set_path(local, "mine").stat().st_mtime_ns == stamp
    write_set(set_path(there, "mine"), "mine", "ab", in_batches(images[::-1], np.arange(150) % 2))  # of equal length
    assert (PreparedSet(set_path(fetch_set(uri, "mine", here), "mine")).whole()[0] == images[::-1]).all()
    write_set(set_path(there, "mine"), "mine", "ab", in_batches(images[:50], np.arange(50) % 2))
    assert len(PreparedSet(set_path(fetch_set(uri, "mine", here), "mine"))) == 50


def test_run_on_a_uri_gives_the_same_bits(root, tmp_path):
    groups = {"data": {"root": f"file://{root}"}, "storage": str(tmp_path)}
    plan = plan_of(root, **groups)
    assert run(plan, tmp_path).params_sha256() == run(plan_of(root), root).params_sha256()


def test_missing_or_odd_uris_are_one_clear_error(root, tmp_path):
    with pytest.raises(DataError, match=r"cannot read set 'mine'.*orrect data\.root"):
        fetch_set(f"file://{tmp_path}/nothing", "mine", tmp_path)
    with pytest.raises(ConfigError, match="nosuch"):
        plan_of(root, data={"root": "nosuch://bucket/data"}, storage=str(tmp_path))
