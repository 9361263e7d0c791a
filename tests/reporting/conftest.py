"""A sweep of five settings that several files of tests report on."""

from __future__ import annotations

import pytest

from tests.support.report_runs import SCORES, sweep


@pytest.fixture
def runs(tmp_path):
    group = {"columns": ["alpha"], "published": ["fedvg_table_A3"], "baseline": "FedAvg", "against": "FedVG"}
    return sweep(tmp_path / "small", SCORES, group)
