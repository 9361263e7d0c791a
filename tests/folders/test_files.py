"""Files written whole or not at all, whoever else writes them, and what a folder holds."""

from __future__ import annotations

import os

from raysim.folders.files import partial_file, replaced_file
from raysim.folders.filesystems import reached_folder, stamps


def test_two_containers_that_write_one_file_each_put_a_whole_one_there(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 1)  # as in a container
    path = tmp_path / "a.json"
    with replaced_file(path) as first:
        first.write_text("first, long")
        with replaced_file(path) as second:
            second.write_text("second")
        assert path.read_text() == "second"
    assert path.read_text() == "first, long"
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]
    assert len({partial_file(path) for _ in range(100)}) == 100


def test_two_containers_that_send_one_file_each_put_a_whole_one_there(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 1)
    there = reached_folder(f"file://{tmp_path}")

    def fill(part):
        with open(part, "w") as file:
            file.write("first")
        there.write("a.json", b"second")

    there._replace("a.json", fill)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("a.json", "first")]


def test_links_that_lead_nowhere_are_no_files_of_a_run(tmp_path):
    (tmp_path / "a").write_text("abc")
    (tmp_path / "gone").symlink_to(tmp_path / "nothing")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert {name: size for name, (size, _) in stamps(tmp_path).items()} == {"a": 3}
