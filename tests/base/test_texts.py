"""Texts of others: control characters and formulas."""

from __future__ import annotations

import csv
import io

import pytest

from raysim.base.texts import all_visible, cells, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("alpha = 0,1 é 数 👩‍🔬 a\u00a0b", "alpha = 0,1 é 数 👩‍🔬 a\u00a0b"),
        ("a\n# b\r\tc", r"a\n# b\r\tc"),
        ("\x1b[2J\x9b2J\x00\x7f", r"\x1b[2J\x9b2J\x00\x7f"),
        ("a\u2028b\u202etxt\u2066", r"a\u2028b\u202etxt\u2066"),
        ("\ud800", r"\ud800"),
    ],
)
def test_control_characters_are_shown_and_all_else_stays(text, shown):
    assert visible(text) == shown
    assert all_visible({text: [text, {"a": (text, 1)}], 3: 0.5}) == {shown: [shown, {"a": (text, 1)}], 3: 0.5}
    assert visible("a\nb\r", keep="\n") == "a\nb\\r"


def test_text_that_a_spreadsheet_would_compute_begins_with_an_apostrophe_and_numbers_stay():
    row = ["=cmd()", "+a", "-a", "@b", "\t=1", "-1.5", "+2e3", "-inf", -1.5, None, "a=b", "fedprox + fedvg", "-", ""]
    file = io.StringIO()
    csv.writer(file).writerow(cells(row))
    (read,) = csv.reader(io.StringIO(file.getvalue()))
    assert read[:5] == ["'=cmd()", "'+a", "'-a", "'@b", r"\t=1"]
    assert read[5:] == ["-1.5", "+2e3", "-inf", "-1.5", "", "a=b", "fedprox + fedvg", "'-", ""]
