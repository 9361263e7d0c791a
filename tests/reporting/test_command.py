"""`raysim report` as a command: what it prints and writes, faults, and what starts with it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from raysim.base.errors import DataError
from raysim.cli.main import app, main
from raysim.reporting.gather import make_report
from raysim.reporting.report import write
from tests.support.output import in_order
from tests.support.report_runs import fabricate, sweep

MAIN = ["fedvg_table_A3", "fedvg_table_A4"]


@pytest.mark.slow
def test_command_end_to_end(runs, tmp_path):
    result = CliRunner().invoke(app, ["report", str(runs)])
    assert result.exit_code == 0, result.output
    assert "61.00 ± 1.00 (n=3)" in result.output
    assert "FedVG has the highest mean in 2 of 2 columns" in result.output
    written = {path.relative_to(runs / "report").as_posix() for path in (runs / "report").rglob("*") if path.is_file()}
    assert written == {
        "report.md",
        "table.csv",
        "table.tex",
        "figures/bars.png",
        "figures/lines.png",
        "figures/curves.png",
    }
    words = [
        "report",
        str(runs / "FedAvg-0.1-0"),
        str(runs / "FedVG-0.1-0"),
        "--out",
        str(tmp_path / "two"),
        "--columns",
        "alpha",
    ]
    result = CliRunner().invoke(app, [*words, "--figure", "bars", "--against", "fedvg", "--metric", "accuracy"])
    assert result.exit_code == 0, result.output
    assert "accuracy after the last round" in (tmp_path / "two" / "report.md").read_text()
    assert len(make_report([runs], {}).runs) == 12  # the report's own folder is no run


def test_command_on_published_tables_alone(tmp_path):
    words = ["report", "--published", MAIN[0], "--published", MAIN[1], "--against", "FedVG"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert (
        "FedVG is significantly better than FedAvg at alpha = 0.05; significantly better than FedAvgM at"
        in result.output
    )
    assert "report:" not in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "/nowhere. Give run directories"),
        (["."], "no run directory in ."),
        ([], "give run directories, or --published NAME"),
        (["small", "--published", "fedvg_table_A33"], "Did you mean 'fedvg_table_A3'"),
        (["small", "--metric", "best"], "run has no best in"),
        (["small", "--rows", "metod"], "no run has a label 'metod'. Did you mean 'method'"),
        (["small", "--columns", "alhpa"], "no run has a label 'alhpa'. Did you mean 'alpha'"),
        (["small", "--against", "FedVQ"], "report.against: no row 'FedVQ'. Did you mean 'FedVG'"),
        (["small", "--figure", "pie"], "report.figures"),
        (["failed"], "none of 1 runs is finished (a failed: client 3 failed"),
        (["small", "--out", "file/below"], "cannot write the report"),
    ],
)
def test_faults_are_one_message_and_status_2(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if "small" in words:
        sweep(tmp_path / "small", {("FedVG", 0.1): [0.5]}, {"figures": []})
    if "failed" in words:
        fabricate(tmp_path / "failed" / "a", 0.5, status="FAILED")
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(sys, "argv", ["raysim", "report", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_runs_without_test_data_are_reported_by_another_metric(tmp_path):
    fabricate(tmp_path / "a", 0.5, progress={"train/loss": 1.5})
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    (tmp_path / "a" / "summary.json").write_text(json.dumps({**summary, "accuracy": None}))
    (cell,) = make_report([tmp_path / "a"], {"metric": "train/loss"}).tables[0].cells.values()
    assert cell.mean == 1.5
    with pytest.raises(DataError, match="run has no accuracy in"):
        make_report([tmp_path / "a"], {})
    (tmp_path / "a" / "summary.json").write_text("")
    with pytest.raises(
        DataError, match=r"damaged: no readable summary.json\)\. Finish the runs: .*delete damaged runs"
    ):
        make_report([tmp_path / "a"], {})


def test_a_recipes_missing_row_is_a_note(tmp_path):
    root = sweep(tmp_path / "early", {("FedAvg", 0.1): [0.5]}, {"against": "FedVG", "figures": []})
    assert "no row 'FedVG'" in write(make_report([root], {}), tmp_path / "out").read_text()


def test_report_starts_without_torch():
    code = "import sys, raysim.__main__, raysim.reporting.gather, raysim.reporting.document; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_last_and_best_accuracy_stand_side_by_side_by_name(tmp_path):
    root = sweep(tmp_path / "both", {("FedAvg", 0.1): [0.5], ("FedVG", 0.1): [0.6]}, {"figures": []})
    for path in root.glob("*/summary.json"):
        facts = json.loads(path.read_text())
        path.write_text(json.dumps({**facts, "accuracy": facts["best_accuracy"] - 0.25}))
    for words, first, second in (
        ([], "accuracy after the last round, in %", "best accuracy of the evaluated rounds, in %"),
        (
            ["--metric", "best_accuracy"],
            "best accuracy of the evaluated rounds, in %",
            "accuracy after the last round, in %",
        ),
    ):
        output = CliRunner().invoke(app, ["report", str(root), *words]).output
        in_order(output, first, second, "FedVG has the highest mean in 1")
        numbers = ("35.00", "60.00") if not words else ("60.00", "35.00")
        in_order(output, *numbers)
        assert second in (root / "report" / "report.md").read_text()


def test_a_report_of_several_folders_lies_beside_them(tmp_path):
    one, two = (sweep(tmp_path / name, {(name, 0.1): [0.5]}, {"figures": []}) for name in ("a", "b"))
    output = CliRunner().invoke(app, ["report", str(one), str(two)]).output
    assert (tmp_path / "report" / "report.md").is_file(), output
    assert not (one / "report").exists()
