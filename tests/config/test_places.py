"""Where the paths of a command lead, and which are refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from raysim.base.errors import DataError
from raysim.cli.main import main
from raysim.config import located_path, path_to_write
from raysim.config.places import cache_folder, home_folder


def test_paths_begin_at_the_home_folder_unless_they_are_there(monkeypatch, tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "runs").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("RAYSIM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    assert path_to_write("runs") == tmp_path / "home" / "runs"
    assert path_to_write("~/runs") == tmp_path / "user" / "runs"
    assert path_to_write(tmp_path) == tmp_path
    assert located_path(Path("runs")) == Path("runs")
    assert located_path(Path("others")) == tmp_path / "home" / "others"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("~nosuchuser/runs", "names the home of an unknown user in ~nosuchuser/runs. Write the whole path"),
        ("a\0b", "with NUL, or with a name of more than 200 bytes, in"),
        ("runs/" + "b" * 201, "with NUL, or with a name of more than 200 bytes, in"),
    ],
)
def test_paths_that_no_system_takes_are_one_sentence(path, words):
    for read in (path_to_write, lambda text: located_path(Path(text))):
        with pytest.raises(DataError) as caught:
            read(path)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "read"), [("RAYSIM_HOME", home_folder), ("RAYSIM_CACHE", cache_folder)])
def test_a_variable_with_the_home_of_nobody_is_named(name, read, monkeypatch):
    monkeypatch.setenv(name, "~nosuchuser/x")
    with pytest.raises(DataError, match=f"{name}.* names the home of an unknown user in ~nosuchuser/x"):
        read()


@pytest.mark.parametrize(
    "words",
    [
        ["report", "~nosuchuser/runs"],
        ["report", ".", "--out", "~nosuchuser/report"],
        ["prepare", "--out", "~nosuchuser/data"],
        ["partition", "paper:fedvg/base", "--out", "~nosuchuser/partitions"],
        ["run", "example:quickstart", "storage=~nosuchuser/runs"],
        ["run", "example:quickstart", "data.root=~nosuchuser/data"],
    ],
    ids=" ".join,
)
def test_a_home_of_nobody_has_status_2(words, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["raysim", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    printed = capsys.readouterr().err
    assert "names the home of an unknown user" in printed
    assert "~nosuchuser" in printed
    assert "Traceback" not in printed
    assert not list(tmp_path.glob("~*"))
