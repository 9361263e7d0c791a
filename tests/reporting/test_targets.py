"""What it cost to reach a target accuracy."""

from __future__ import annotations

import numpy as np
import pytest
from typer.testing import CliRunner

from raysim.base.errors import ConfigError
from raysim.cli.main import app
from raysim.reporting.contents import Cost, cost
from raysim.reporting.gather import make_report
from raysim.reporting.measure import ReportMetric
from raysim.reporting.runs import find_runs
from tests.support.report_runs import fabricate, labels_of, sweep


def test_cost_of_a_target_by_hand(tmp_path):
    scores = [0.1, "", 0.35, "", 0.6, 0.5]
    more = {"server/accuracy_x": scores, "comm/up_mb": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], "comm/down_mb": 10.0}
    fabricate(tmp_path / "a", 0.5, rounds=6, labels=labels_of("FedVG", 0.1), progress=more)
    assert cost(tmp_path / "a", "server/accuracy_x", 0.35) == Cost(3, 1.0 + 2.0 + 3.0 + 30.0, 3.0)
    assert cost(tmp_path / "a", "server/accuracy_x", 0.4) == Cost(5, 15.0 + 50.0, 5.0)
    assert cost(tmp_path / "a", "server/accuracy_x", 0.61) is None


def test_simulated_hours_stand_beside_the_other_costs(tmp_path):
    more = {"comm/up_mb": 1.0, "comm/down_mb": 2.0, "time/simulated_s": [1800.0 * (index + 1) for index in range(10)]}
    fabricate(tmp_path / "a", 0.6, labels=labels_of("FedVG", 0.1), progress=more, time={})
    (extra,) = make_report([tmp_path], {"target": "45", "columns": ["alpha"]}).extras
    assert [name.rpartition(": ")[2] for name in extra.header[1:]] == ["rounds", "MB", "s", "simulated h"]
    (_, entries), *_ = extra.lines
    assert [entry.text for entry in entries] == ["4.0", "12.0", "4.0", "2.000"]


def test_hours_stand_there_if_one_run_of_the_table_has_a_clock(tmp_path):
    more = {"comm/up_mb": 1.0, "comm/down_mb": 2.0}
    hours = {"time/simulated_s": [1800.0 * (index + 1) for index in range(10)]}
    fabricate(tmp_path / "a", 0.6, labels=labels_of("FedVG", 0.1), progress=more | hours, time={})
    fabricate(tmp_path / "b", 0.6, labels=labels_of("FedAvg", 0.1), progress=more)
    (extra,) = make_report([tmp_path], {"target": "45", "columns": ["alpha"]}).extras
    assert extra.header[-1].endswith(": simulated h")
    assert [entries[-1].text == "2.000" for name, entries in extra.lines if name == "FedVG"] == [True]


def targets(folder):
    for method, best in (("FedAvg", (0.5, 0.52)), ("FedVG", (0.6, 0.4)), ("Slow", (0.2, 0.2))):
        for seed, value in enumerate(best):
            path = folder / f"{method}{seed}"
            more = {"comm/up_mb": 1.0, "comm/down_mb": 2.0}
            fabricate(path, value, labels=labels_of(method, 0.1, seed), seed=seed, progress=more)
    return folder


def test_costs_are_means_over_the_seeds_that_got_there(tmp_path):
    report = make_report([targets(tmp_path)], {"target": "45", "columns": ["alpha"]})
    (extra,) = report.extras
    assert extra.header == ["method", *(f"alpha = 0.1, 45.00 %: {unit}" for unit in ("rounds", "MB", "s"))]
    lines = {name: [entry.text for entry in entries] for name, entries in extra.lines}
    assert lines["Slow"] == ["never"] * 3
    assert lines["FedVG"] == ["4.0 (1 of 2)", "12.0 (1 of 2)", "4.0 (1 of 2)"]  # 0.6 (1 - 0.6 exp(-0.3 r)), r = 3
    rounds = [cost(tmp_path / f"FedAvg{seed}", "server/accuracy", 0.45).rounds for seed in (0, 1)]
    assert lines["FedAvg"][0] == f"{np.mean(rounds):.1f} ± {np.std(rounds, ddof=1):.1f}"


def test_a_row_can_be_the_target(tmp_path):
    (extra,) = make_report([targets(tmp_path)], {"target": "FedAvg", "columns": ["alpha"]}).extras
    assert extra.header[1] == "alpha = 0.1, 51.00 %: rounds"
    assert [entries[0].text for name, entries in extra.lines if name == "FedAvg"] == ["10.0 (1 of 2)"]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("0.45", "must be an accuracy in percent, .*got '0.45'"),
        ("101", "must be an accuracy in percent"),
        ("FedAvgg", "no row 'FedAvgg'. Did you mean 'FedAvg'"),
    ],
)
def test_a_target_that_is_no_percentage_and_no_row_is_a_fault(tmp_path, target, message):
    with pytest.raises(ConfigError, match=f"report.target: {message}"):
        make_report([targets(tmp_path)], {"target": target})


def test_a_target_row_that_only_the_recipe_asks_for_becomes_a_note(tmp_path):
    root = sweep(tmp_path / "s", {("FedVG", 0.1): [0.5]}, {"target": "Joint", "figures": []})
    report = make_report([root], {})
    assert (report.extras, report.notes) == ([], ["`report.target`: no row 'Joint'. Known: FedVG"])


def test_command_takes_a_target_and_a_mode(tmp_path):
    words = ["report", str(targets(tmp_path / "r")), "--target", "45", "--metric", "server/accuracy", "--mode", "max"]
    result = CliRunner().invoke(app, [*words, "--figure", "bars", "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "## To a target accuracy: CIFAR-10 / ResNet-18" in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.parametrize("count", [360, 10_000])
def test_a_row_reaches_its_own_accuracy(count, tmp_path):
    for share in range(200, 260):
        run = fabricate(tmp_path / str(share), share / count, labels=labels_of("A", 0.1))
        metric = ReportMetric("accuracy")
        (found,) = find_runs([run])
        assert cost(run, "server/accuracy", metric.score(found) / 100) is not None


def test_a_target_is_an_accuracy(tmp_path):
    run = fabricate(tmp_path / "a", 0.5, labels=labels_of("FedVG", 0.1), progress={"server/loss": 1.0})
    with pytest.raises(ConfigError, match=r"report\.target: is an accuracy, and this report is about server/loss"):
        make_report([run], {"metric": "server/loss", "target": "FedVG"})
