"""Commands in messages: a shell takes them as they are."""

from __future__ import annotations

import shlex
import sys

import pytest

from raysim.base import commands
from raysim.base.commands import command, shown


@pytest.mark.parametrize("name", ["runs", "my runs", "it's", "-runs", "a;b", "ä"])
def test_a_shell_gets_the_path_that_was_meant(name, tmp_path, monkeypatch):
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    word = shlex.split(command("tensorboard", "--logdir", tmp_path / name))[-1]
    assert not word.startswith("-")
    assert (tmp_path / name).samefile(word)


def test_paths_elsewhere_stay_whole(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert shown(tmp_path / "there") == str(tmp_path / "there")
    assert shown(tmp_path / "here") == "."


def test_a_program_that_path_does_not_find_has_its_path(tmp_path, monkeypatch):
    own = tmp_path / "my venv" / "bin"
    own.mkdir(parents=True)
    (own / "python").touch()
    (own / "raysim").touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(own / "python"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands.shutil, "which", lambda program: None)
    assert command("raysim", "tune", "a.yaml") == "'my venv/bin/raysim' tune a.yaml"
    monkeypatch.setattr(commands.shutil, "which", lambda program: str(own / program))
    assert command("raysim", "tune", "a.yaml") == "raysim tune a.yaml"
