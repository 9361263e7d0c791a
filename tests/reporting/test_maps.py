"""The map of combinations: gains over one cell, and what they are beyond their two parts."""

from __future__ import annotations

import numpy as np
import pytest

from raysim.reporting.drawing import draw_figures
from raysim.reporting.gather import make_report
from raysim.reporting.maps import base_of, beyond_parts, gains_over
from tests.support.report_runs import fabricate

MAP = {"rows": "local", "columns": ["server"], "baseline": "SGD", "gain": "server=FedAvg", "figures": ["map"]}

#: Accuracy of each pair in seed 0; seeds 1 and 2 are 0.1 and 0.2 below, all pairs alike but one.
PAIRS = {
    ("SGD", "FedAvg"): 0.5, ("FedProx", "FedAvg"): 0.52, ("SGD", "FedVG"): 0.53, ("FedProx", "FedVG"): 0.59,
    ("MOON", "FedAvg"): 0.4,
}  # fmt: skip


@pytest.fixture
def runs(tmp_path):
    for (local, server), accuracy in PAIRS.items():
        for seed in range(3):
            noise = 0.05 * seed if (local, server) == ("MOON", "FedAvg") else 0.0
            labels = {"dataset": "digits", "model": "cnn", "local": local, "server": server, "seed": seed}
            fabricate(tmp_path / f"{local}-{server}-{seed}", accuracy - 0.1 * seed + noise, labels=labels, seed=seed)
    return tmp_path


def test_gains_are_paired_and_beyond_is_what_the_parts_do_not_explain(runs):
    (table,) = make_report([runs], MAP).tables
    base = base_of(table, "SGD", "server=FedAvg")
    assert base == ("SGD", ("FedAvg",))
    gains = gains_over(table, base)
    means = {(row, column): round(effect.mean, 6) for (row, (column,)), effect in gains.items()}
    assert means == {
        ("SGD", "FedAvg"): 0, ("FedProx", "FedAvg"): 2, ("SGD", "FedVG"): 3, ("FedProx", "FedVG"): 9,
        ("MOON", "FedAvg"): -5,
    }  # fmt: skip
    assert gains["FedProx", ("FedVG",)].is_certain  # the seeds differ by ten points, all alike
    assert not gains["MOON", ("FedAvg",)].is_certain  # -10, -5, 0
    assert {place: round(value, 6) for place, value in beyond_parts(gains, base).items()} == {
        ("FedProx", ("FedVG",)): 4
    }


def test_figure_has_a_number_for_each_pair_and_none_where_nothing_ran(runs):
    missing = {}
    made = draw_figures(make_report([runs], MAP), on_missing=missing.__setitem__)
    assert not missing
    left, right = made["map"].axes[:2]
    assert [tick.get_text() for tick in left.get_xticklabels()] == ["FedAvg", "FedVG"]
    assert left.get_yticklabels()[0].get_text() == "SGD"
    grid = np.ma.filled(left.images[0].get_array(), np.nan)
    assert np.isnan(grid).sum() == 1  # MOON with FedVG
    words = {text.get_text(): text.get_weight() for text in left.texts}
    assert words["+9.0"] == "bold"
    assert words["−5.0"] == "normal"
    assert [text.get_text() for text in right.texts] == ["+4.0"]


@pytest.mark.parametrize("less", ["baseline", "gain"])
def test_without_a_cell_to_count_from_there_is_no_map(less, runs):
    missing = {}
    given = {key: value for key, value in MAP.items() if key != less}
    assert not draw_figures(make_report([runs], given), on_missing=missing.__setitem__)
    assert "report.baseline" in missing["map"]


def test_gains_over_the_baseline_of_each_column(runs):
    given = {"rows": "local", "columns": ["server"], "baseline": "SGD", "figures": ["gains"]}
    missing = {}
    made = draw_figures(make_report([runs], given), on_missing=missing.__setitem__)
    assert not missing
    axes = made["gains"].axes[0]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["FedProx", "MOON"]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["FedAvg", "FedVG"]
    words = {text.get_position(): (text.get_text(), text.get_weight()) for text in axes.texts}
    assert words == {(0, 0): ("+2.0", "bold"), (1, 0): ("+6.0", "bold"), (0, 1): ("−5.0", "normal")}
    del given["baseline"]
    assert not draw_figures(make_report([runs], given), on_missing=missing.__setitem__)
    assert "report.baseline" in missing["gains"]
