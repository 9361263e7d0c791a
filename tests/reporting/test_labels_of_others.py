"""What labels of somebody else's runs may do to a report, and to the terminal of who reads it: nothing."""

from __future__ import annotations

import csv
import io
import re

from typer.testing import CliRunner

from raysim.cli.main import app
from tests.support.report_runs import fabricate


def test_control_characters_and_formulas_of_labels_do_not_reach_files_or_the_terminal(tmp_path):
    evil = "=a\n# heading\x1b[2J\u2028"
    for name, labels in (("a", {"method": evil, "alpha": "@b\r"}), ("b", {"method": "fedavg", "alpha": "@b\r"})):
        fabricate(tmp_path / name, 0.5, labels=labels)
    fabricate(tmp_path / "c", 0.5, status="FAILED")
    (tmp_path / "c" / "FAILED").write_text("client \x1b]0;title\x07 failed")
    result = CliRunner().invoke(app, ["report", str(tmp_path), "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert r"client \x1b]0;title\x07 failed" in result.output
    document, table = ((tmp_path / "out" / name).read_text() for name in ("report.md", "table.csv"))
    for text in (result.output, document, table, (tmp_path / "out" / "table.tex").read_text()):
        assert "heading" in text
        assert not re.search(
            r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028]|^# heading", text.replace("\r\n", "\n"), re.MULTILINE
        )
    rows = list(csv.DictReader(io.StringIO(table)))
    assert {row["method"] for row in rows} == {r"'=a\n# heading\x1b[2J\u2028", "fedavg"}
    assert {row["alpha"] for row in rows} == {r"'@b\r"}
