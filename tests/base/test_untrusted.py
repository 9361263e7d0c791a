"""Files of others: what is no file is refused at once, and depth is bounded; long words of messages are cut."""

from __future__ import annotations

import os

import pytest

from raysim.base.errors import DataError, Fault
from raysim.base.untrusted import read_json, regular_file
from raysim.config.yaml_text import load_yaml, read_yaml, unfit_values
from raysim.folders.files import file_digest
from tests.fuzz.verdicts import limited


def test_pipes_devices_and_folders_are_no_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe", tmp_path / "link", tmp_path, tmp_path / "gone"):
        for read in (regular_file, read_json, file_digest):
            with limited(5), pytest.raises(OSError, match=str(path)):
                read(path)
        with limited(5), pytest.raises(ValueError, match="cannot be read: "):
            read_yaml(path)


def test_json_and_yaml_have_a_bound_on_depth_and_size(tmp_path):
    for text in ("[" * 100_000, '{"a":' * 5000 + "1" + "}" * 5000):
        (tmp_path / "deep.json").write_text(text)
        with pytest.raises(ValueError, match="nested too deeply"):
            read_json(tmp_path / "deep.json")
    (tmp_path / "large.yaml").write_text("a: 1\n" + "#" * 2_000_001)
    with pytest.raises(ValueError, match=r"2,000,006 bytes; a configuration has 2,000,000 at most"):
        read_yaml(tmp_path / "large.yaml")


@pytest.mark.parametrize("text", ["!!int x", "!!float x", "!!bool x", "!!timestamp x", "9" * 5000])
def test_values_that_yaml_cannot_convert_are_no_valid_yaml(text):
    with pytest.raises(ValueError, match="is not valid YAML"):
        load_yaml(text)


def test_an_integer_that_python_would_not_print_is_one_fault():
    assert [str(fault) for fault in unfit_values({"rounds": 1 << 20000})] == [
        "rounds: must be a number of at most 1000 bits, got one of 20001"
    ]


def test_words_that_nobody_reads_are_cut_in_messages():
    path = "/".join(["folder" * 40] * 9)
    for error in (DataError(f"value {'9' * 5000}", path), Fault("local.lr", f"got {'9' * 5000} in {path}")):
        assert path in str(error)
        assert f" {'9' * 60}... (5,000 letters)" in str(error)
        assert len(str(error)) < 2600
