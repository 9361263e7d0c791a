"""Texts: sequences and the characters that follow, speakers as domains, by hand; what cannot be used is one sentence."""

from __future__ import annotations

import numpy as np
import pytest
from typer.testing import CliRunner

import raysim
from raysim.base.errors import DataError
from raysim.cli.main import app
from raysim.data.readers import text_files
from raysim.data.readers.reader_options import ReaderOptions
from raysim.data.sources import prepare, set_path
from raysim.folders.run_folder import RunFolder
from raysim.plan.check import check
from raysim.running.runner import write_partition
from tests.support.image_sets import prepared

PLAY = """Rome:
We go: now
or never.

Ann:
No.

Rome:
Why, then:
so.

All men:
Aye aye aye!
"""


def read(text, folder, **options):
    """(the prepared set, inputs, targets) of a text."""
    path = folder / "text.txt"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return prepared("text", path, folder / "out", options=ReaderOptions(**options))


def test_windows_do_not_overlap_and_targets_are_the_next_characters(tmp_path):
    source, inputs, targets = read("abcabdab", tmp_path, length=3)
    np.testing.assert_array_equal(inputs, [[0, 1, 2], [0, 1, 3]])
    np.testing.assert_array_equal(targets, [[1, 2, 0], [1, 3, 0]])
    info = source.info
    assert (info.task, info.classes, info.vocabulary, info.domains) == ("tokens", ("a", "b", "c", "d"), 4, ())
    assert (inputs.dtype, targets.dtype, info.mean) == (np.int32, np.int32, ())
    _, inputs, targets = read("abcabda", tmp_path, length=3)  # the last window has its target at the very end
    assert inputs.shape == targets.shape == (2, 3)
    assert read("abcabd", tmp_path, length=3)[1].shape == (1, 3)


def test_length_is_80_if_not_given(tmp_path):
    assert read("ab" * 81, tmp_path)[1].shape == (2, 80)


@pytest.mark.parametrize(
    ("domains", "names", "owners"),
    [("folders", ("ann", "bob"), [0, 0, 0, 1]), ("files", ("ann/1", "ann/2", "bob/1"), [0, 0, 1, 2])],
)
def test_folders_of_texts_are_domains_and_no_sequence_crosses_files(domains, names, owners, tmp_path):
    files = {"ann/1": "abcabcab", "ann/2": "cabcab", "bob/1": "bbabbc", "bob/2": "ab"}
    for name, text in files.items():
        path = tmp_path / "texts" / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    options = ReaderOptions(length=3, domains=domains)
    source, inputs, targets = prepared("text", tmp_path / "texts", tmp_path / "out", options=options)
    assert (source.info.domains, source.domains.tolist()) == (names, owners)
    np.testing.assert_array_equal(inputs, [[0, 1, 2], [0, 1, 2], [2, 0, 1], [1, 1, 0]])
    np.testing.assert_array_equal(targets, [[1, 2, 0], [1, 2, 0], [0, 1, 2], [1, 0, 1]])
    assert source.info.left_out == ("1 file with fewer than 4 characters" if domains == "files" else "")
    (tmp_path / "texts" / "c.txt").write_text("abcd")
    if domains == "folders":
        with pytest.raises(DataError, match=r"a text beside the folders in .*c\.txt\. Move it into a folder"):
            prepare("text", tmp_path / "out2", tmp_path / "texts", options=options)
    with pytest.raises(DataError, match=r"2 \.txt files in .*--domains files or folders"):
        prepare("text", tmp_path / "out3", tmp_path / "texts" / "ann")


def test_each_speakers_lines_are_joined(tmp_path):
    source, inputs, targets = read(PLAY, tmp_path, length=6, domains="speakers")
    info = source.info
    assert info.classes == tuple(name.replace("\n", "\\n") for name in sorted(set(PLAY)))
    assert info.domains == ("All men", "Rome")
    assert info.left_out == "1 speaker with fewer than 7 characters"
    characters = np.array(sorted(set(PLAY)))
    texts = {"All men": "Aye aye aye!\n", "Rome": "We go: now\nor never.\nWhy, then:\nso.\n"}
    for number, (name, text) in enumerate(texts.items()):
        count = (len(text) - 1) // 6
        rows = source.domains == number
        assert "".join(characters[inputs[rows]].ravel()) == text[: 6 * count], name
        assert "".join(characters[targets[rows]].ravel()) == text[1 : 6 * count + 1]


def test_line_ends_of_other_systems_are_the_same_text(tmp_path):
    plain = read(PLAY, tmp_path, length=6, domains="speakers")
    other = read(b"\xef\xbb\xbf" + PLAY.replace("\n", "\r\n").encode(), tmp_path, length=6, domains="speakers")
    assert plain[0].info.checksum == other[0].info.checksum


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("", {}, r"an empty file in .*text\.txt"),
        (b"\xff\xfea", {}, r"not UTF-8 text \(byte 0\)"),
        (
            "abc",
            {"length": 3},
            "no sequence of 3 characters and a next character; the longest text has 3.*lower --length",
        ),
        ("abcd\n" * 9, {"length": 3, "domains": "speakers"}, r"words before the first speaker in .*text\.txt, line 1"),
        ("\n\n" * 9, {"length": 3, "domains": "speakers"}, "no speaker says a word"),
        (PLAY, {"length": 3, "domains": "clients"}, "--domains clients in text. Give --domains speakers"),
        (PLAY, {"length": 3, "domains": 4}, "--domains 4 in text"),
    ],
)
def test_a_text_that_cannot_be_used_is_one_sentence(text, options, words, tmp_path):
    with pytest.raises(DataError, match=f"(?i){words}"):
        read(text, tmp_path, **options)
    assert not set_path(tmp_path / "out", "text").exists()


def test_shakespeare_is_the_published_one(tmp_path, monkeypatch):
    (tmp_path / "input.txt").write_text(PLAY)
    with pytest.raises(
        DataError, match=rf"{len(PLAY)} characters, 24 different; 1,115,394 and 65 expected.*prepare text"
    ):
        prepare("shakespeare", tmp_path / "out", tmp_path)
    monkeypatch.setattr(text_files, "SHAKESPEARE", (len(PLAY), len(set(PLAY))))
    source, _, _ = prepared("shakespeare", tmp_path, tmp_path / "out", options=ReaderOptions(length=6))
    assert source.info.domains == ("All men", "Rome")


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path):
    tokens = np.array([[0, 1], [2, 5]])
    with pytest.raises(DataError, match=r"token 5 outside 0\.\.2"):
        raysim.arrays(tokens, tokens, name="a", vocabulary=3, root=tmp_path)
    with pytest.raises(DataError, match=r"token 5 outside 0\.\.2"):
        raysim.arrays(tokens.clip(max=2), tokens, name="a", vocabulary=3, root=tmp_path)


def test_the_partition_of_a_text_counts_rows_and_no_classes(tmp_path):
    read(PLAY, tmp_path, length=4, domains="speakers")
    data = {"root": str(tmp_path / "out"), "name": "text", "split_within_clients": True, "test": 0.3}
    groups = {"partition": {"scheme": "natural", "num_clients": 2}, "cohort": {"size": 2}, "model": {"name": "gru"}}
    plan = check({"data": data, "resources": {"backend": "serial"}, **groups}, "a test")
    write_partition(RunFolder(tmp_path), plan.manifest, plan.info)
    header, *rows = (tmp_path / "partition.csv").read_text().splitlines()
    assert header.endswith("largest_share,class all")
    assert [row.split(",")[1] for row in rows] == ["3", "6"]  # of 3 and 8 sequences, without the test rows


def test_the_command_prepares_a_text(tmp_path):
    (tmp_path / "play.txt").write_text(PLAY)
    words = ["prepare", "text", "--root", str(tmp_path / "play.txt"), "--length", "6", "--domains", "speakers"]
    result = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "text: 7 inputs (6,), 24 tokens, 2 domains, sha256" in result.stdout
    assert "left out: 1 speaker with fewer than 7 characters" in result.stdout
    result = CliRunner().invoke(app, ["prepare", "shapes", "--domains", "speakers", "--out", str(tmp_path)])
    assert "--domains must be 1..6, got speakers" in str(result.exception)
