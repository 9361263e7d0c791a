"""Drawn slips: each is another program, and a seed draws the same ones again."""

from __future__ import annotations

import ast
import json

import pytest

from tests.fuzz.drawn import AREAS, Slip, costs_of, draw, relevant_tests, slips_of
from tests.fuzz.mutants import MUTANTS, PROJECT, slipped


@pytest.mark.slow
def test_a_seed_draws_the_same_slips_of_every_area_and_another_seed_others():
    slips = draw(5, 60)
    assert slips == draw(5, 60) != draw(6, 60)
    assert len({(slip.file, slip.line, slip.column) for slip in slips}) == 60
    assert all(sum(slip.file.startswith(area) for slip in slips) >= 6 for area in AREAS)
    for slip in slips:
        content = (PROJECT / slip.file).read_text()
        line = content.splitlines()[slip.line - 1]
        assert line[slip.column :].startswith(slip.token)
        assert ast.dump(ast.parse(slip.of(content))) != ast.dump(ast.parse(content)), slip


@pytest.mark.parametrize("group", MUTANTS)
def test_what_is_to_slip_stands_once_in_its_file(group):
    told, pairs = MUTANTS[group]
    assert all((PROJECT / word).exists() for word in told.split() if word.startswith("tests/"))
    for text, slip in pairs:
        assert slipped(PROJECT / group.partition(",")[0], text, slip) != text


def test_tests_of_the_line_come_first_then_cheap_ones_of_the_file(tmp_path):
    lines = {
        "a": [5, {"f.py": [7]}],
        "b": [1, {"f.py": [8]}],
        "c": [58, {"f.py": [8]}],
        "d": [2, {"f.py": [7, 8]}],
        "e": [0, {}],
    }
    records = (json.dumps([name, wall_s, 0, executed]) for name, (wall_s, executed) in lines.items())
    (tmp_path / "costs").write_text("\n".join(records))
    assert relevant_tests(Slip("f.py", 7, 0, "<", ">"), costs_of(tmp_path / "costs"), 60) == ["d", "a", "b"]


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
