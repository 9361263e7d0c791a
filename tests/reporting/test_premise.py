"""The figure of FedVG's premise: which clients and rounds it shows, and the correlation above it."""

from __future__ import annotations

import numpy as np
import pytest

from raysim.reporting.drawing import draw_figures
from raysim.reporting.gather import make_report
from tests.support.report_runs import fabricate


def test_premise_shows_three_rounds_of_all_seeds_and_the_mean_correlation(tmp_path):
    for seed in (0, 1):
        labels = {"dataset": "CIFAR-10", "model": "ResNet-18", "method": "FedVG", "seed": seed}
        progress = {"diagnostics/accuracy_by_gradient": [-0.5 - seed / 10] * 10}
        folder = fabricate(tmp_path / str(seed), 0.5, labels=labels, seed=seed, progress=progress)
        (folder / "arrays").mkdir()
        for index in (0, 3, 5, 9):
            values = np.array([[10.0 + index, 0.2 + seed / 10], [np.nan, np.nan], [2000.0, 0.1]])
            np.savez(folder / "arrays" / f"round_{index:05d}.npz", **{"diagnostics.premise": values})
    missing = {}
    drawn = draw_figures(make_report([tmp_path], {"figures": ["premise"]}), on_missing=missing.__setitem__)
    (axes,) = drawn["premise"].axes
    assert not missing
    assert "mean rank correlation -0.55" in axes.get_title()
    assert [line.get_label() for line in axes.lines] == ["round 1", "round 4", "round 10"]
    for line, index in zip(axes.lines, (0, 3, 9), strict=True):
        points = sorted(zip(line.get_xdata(), line.get_ydata(), strict=True))
        want = sorted([(10 + index, 20), (10 + index, 30), (2000, 10), (2000, 10)])
        assert np.array(points) == pytest.approx(np.array(want))
    assert axes.get_xscale() == "log"


def test_premise_says_what_is_missing(tmp_path):
    missing = {}
    fabricate(tmp_path / "run", 0.5)
    draw_figures(make_report([tmp_path], {"figures": ["premise"]}), on_missing=missing.__setitem__)
    assert "measures: [premise]" in missing["premise"]
