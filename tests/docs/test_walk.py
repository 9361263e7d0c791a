"""The names of files and functions in docs/design.md are those of the code."""

from __future__ import annotations

import importlib
import re
from functools import reduce
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "design.md").read_text()
TABLE, _, WALK = PAGE.partition("## Where things are")[2].partition("## A walk through the code")
NAMES = sorted(set(re.findall(r"`([\w/]+\.py)::([\w.]+)`", WALK)))
ROOMS = re.findall(r"^\| `([\w/]+)` \| (.+) \|$", TABLE, re.MULTILINE)


def test_the_walk_has_ten_steps_and_names_in_each():
    steps = re.split(r"^\d+\. ", WALK, flags=re.MULTILINE)[1:]
    assert len(steps) == 10
    assert all("::" in step for step in steps)


@pytest.mark.parametrize(("file", "name"), NAMES)
def test_every_named_function_is_in_its_file(file, name):
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    assert (ROOT / file).is_file()
    assert reduce(getattr, name.split("."), module).__module__ == module.__name__


@pytest.mark.parametrize(("room", "text"), ROOMS, ids=[room for room, _ in ROOMS])
def test_every_named_file_is_in_its_room(room, text):
    assert (ROOT / room).is_dir()
    files = [file for file in re.findall(r"`([\w/]+\.py)`", text) if "/" not in file]
    assert all((ROOT / room / file).is_file() for file in files), files


def test_the_table_has_every_room():
    folders = {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "raysim").glob("*/__init__.py")}
    assert folders <= {room for room, _ in ROOMS}
