"""Drawn slips: each is another program, and a seed draws the same ones again."""

from __future__ import annotations

import ast

import pytest

from tests.fuzz.drawn import AREAS, NEAR, draw, files_about, slips_of
from tests.fuzz.mutants import MUTANTS, PROJECT, slipped


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


@pytest.mark.parametrize("group", MUTANTS)
def test_what_is_to_slip_stands_once_in_its_file(group):
    told, pairs = MUTANTS[group]
    assert all((PROJECT / word).exists() for word in told.split() if word.startswith("tests/"))
    for text, slip in pairs:
        assert slipped(PROJECT / group.partition(",")[0], text, slip) != text


def test_files_and_the_tests_about_them_are_there():
    for start, tests in NEAR.items():
        assert (PROJECT / start).exists(), start
        assert all((PROJECT / word).exists() for word in tests.split() if word.startswith("tests/")), start


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
