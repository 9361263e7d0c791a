"""Every row of docs/reliability.md names a test that is there."""

from __future__ import annotations

import re
from pathlib import Path

PROJECT = Path(__file__).parent.parent


def test_every_row_is_a_test():
    rows = [
        line
        for line in (PROJECT / "docs" / "reliability.md").read_text().splitlines()
        if line.startswith("| ") and not line.startswith("| fault")
    ]
    assert len(rows) > 25
    for row in rows:
        named = re.findall(r"`(tests/\S+\.py)::(test_\w+)`", row)
        assert named, row
        for file, name in named:
            assert (PROJECT / file).exists(), row
            assert f"def {name}(" in (PROJECT / file).read_text(), row
