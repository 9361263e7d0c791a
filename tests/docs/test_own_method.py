"""The tutorial on writing a method runs as it stands, its own tests included."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "own_method.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (\w+\.(?:py|yaml))\n")
BLOCKS = BLOCK.findall(PAGE.read_text())
FILES = {name[1]: text for _, text in BLOCKS if (name := FILE.match(text))}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the page's files, as its reader has it; their modules are forgotten afterwards."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in (set(sys.modules) - before) & {Path(name).stem for name in FILES}:
        del sys.modules[name]


@pytest.mark.slow
def test_the_pages_code_runs_in_order(folder, capsys):
    said, names = [text for kind, text in BLOCKS if kind == "text"], {}
    for kind, text in BLOCKS:
        if kind == "python" and not FILE.match(text):
            exec(text, names)
    out = capsys.readouterr().out
    assert said
    assert all(text.strip() in out for text in said)


@pytest.mark.slow
def test_the_pages_tests_pass(folder):
    page = importlib.import_module("test_clipped")
    tests = [test for name, test in vars(page).items() if name.startswith("test_") and "ray" not in name]
    assert len(tests) == 3
    for test in tests:
        test()


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_the_pages_method_has_the_same_bits_on_ray(folder):
    importlib.import_module("test_clipped").test_ray_gives_the_bits_of_a_serial_run()
