"""The figure of a search: every run along what was drawn."""

from __future__ import annotations

import pytest

from raysim.reporting.drawing import draw_figures
from raysim.reporting.gather import make_report
from tests.support.report_runs import fabricate

GIVEN = {"rows": "form", "ignore": ["mu", "eps", "kind"], "figures": ["space"]}


def test_every_run_is_a_dot_in_each_panel_and_those_that_failed_are_crosses(tmp_path):
    points = [(0.01 * 3**k, 0.1 + k / 10) for k in range(6)]
    for k, (mu, eps) in enumerate(points):
        labels = {"form": "masked", "mu": mu, "eps": eps, "kind": f"k{k}", "seed": 0}
        fabricate(tmp_path / f"a{k}", 0.5 + k / 100, labels=labels)
    fabricate(tmp_path / "lost", 0.5, labels={"form": "masked", "mu": 5.0, "eps": 0.1, "seed": 0}, status="FAILED")
    fabricate(tmp_path / "plain", 0.6, labels={"form": "FedAvg", "seed": 0})
    missing = {}
    made = draw_figures(make_report([tmp_path], GIVEN), on_missing=missing.__setitem__)
    assert not missing
    by_mu, by_eps, both, *_ = made["space"].axes
    assert by_mu.get_xscale() == "log"
    assert by_eps.get_xscale() == "linear"
    assert sorted(by_mu.collections[0].get_offsets()[:, 1]) == pytest.approx([50, 51, 52, 53, 54, 55])
    assert by_mu.lines[0].get_ydata()[0] == 60  # a row without mu is a level
    dots, crosses = both.collections
    assert len(dots.get_offsets()) == 6
    assert crosses.get_offsets().tolist() == [[5.0, 0.1]]


def test_two_searches_without_a_run_of_both_labels_have_no_plane(tmp_path):
    for k in range(6):
        for name in ("mu", "eps"):
            fabricate(tmp_path / f"{name}{k}", 0.5, labels={"form": name, name: 0.1 * k, "seed": 0})
    made = draw_figures(make_report([tmp_path], GIVEN), on_missing=lambda *_: None)
    assert [axes.get_xlabel() for axes in made["space"].axes] == ["mu", "eps"]


def test_without_a_label_of_many_numbers_there_is_none(tmp_path):
    for k in range(3):
        fabricate(tmp_path / f"a{k}", 0.5, labels={"form": "masked", "mu": k, "seed": k}, seed=k)
    missing = {}
    assert not draw_figures(make_report([tmp_path], GIVEN), on_missing=missing.__setitem__)
    assert "report.ignore" in missing["space"]
