"""Drawn slips: each is another program, and a seed draws the same ones again."""

from __future__ import annotations

import ast

import pytest

from tests.fuzz.drawn import AREAS, draw, files_about, slips_of
from tests.fuzz.mutants import PROJECT


@pytest.mark.slow
def test_a_seed_draws_the_same_slips_of_every_area_and_another_seed_others():
    slips = draw(5, 60)
    assert slips == draw(5, 60) != draw(6, 60)
    assert len({(slip.file, slip.line, slip.column) for slip in slips}) == 60
    assert all(sum(slip.file.startswith(area) for slip in slips) > 5 for area in AREAS)
    for slip in slips:
        content = (PROJECT / slip.file).read_text()
        line = content.splitlines()[slip.line - 1]
        assert line[slip.column :].startswith(slip.token)
        assert ast.dump(ast.parse(slip.of(content))) != ast.dump(ast.parse(content)), slip
        assert all((PROJECT / word).exists() for word in files_about(slip.file).split() if word.startswith("tests/"))


@pytest.mark.parametrize(
    ("code", "slips"),
    [
        ("def f(*a, b: int | None = 3, **c): ...", ["4", "2"]),  # neither types nor the stars of arguments
        ("from a import b\nfor x in y: break", ["continue"]),  # nor the `in` of a loop
        ("x = not a is not b", ["", ""]),
        ("x = a not in b", [""]),
        ("x = -a - 1", ["", "+", "2", "0"]),
        ("x = min(a.min, 'a < b')", ["max"]),
        ("@f(1)\ndef g(): ...", ["2", "0"]),
    ],
)
def test_what_may_slip(code, slips, tmp_path, monkeypatch):
    monkeypatch.setattr("tests.fuzz.drawn.PROJECT", tmp_path)
    (tmp_path / "a.py").write_text(f"{code}\npass\n")
    places, _ = slips_of(tmp_path / "a.py")
    assert [slip.slip for place in places for slip in place] == slips
