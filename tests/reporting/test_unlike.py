"""Reports of runs that were not planned together: readable columns, and notes on the terminal."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

import raysim
from raysim.base.texts import number
from raysim.cli.main import app
from raysim.reporting.gather import make_report
from raysim.reporting.tables import heading
from raysim.running.results import Run, Runs
from tests.support.report_runs import fabricate, sweep


def headings(report):
    return [heading(table.names, column) for table in report.tables for column in table.columns]


def settings(methods=(), lr=0.1, alpha=0.1, **more):
    return {"methods": list(methods), "local": {"lr": lr}, "partition": {"scheme": "dirichlet", "alpha": alpha}, **more}


def test_a_sweep_over_methods_has_them_as_rows_alone(tmp_path):
    lists = (["fedavgm"], [{"fedprox": {"mu": 0.1}}], [{"fedprox": {"mu": 1.0}}], [])
    for index, (methods, lr) in enumerate((methods, lr) for methods in lists for lr in (0.1, 0.2)):
        labels = {"methods": str(methods), "lr": lr}
        fabricate(tmp_path / "all" / str(index), 0.5, labels=labels, **settings(methods, lr))
    report = make_report([tmp_path / "all"], {})
    assert headings(report) == ["lr = 0.1", "lr = 0.2"]
    assert report.tables[0].rows == ("fedavg", "fedavgm", "fedprox (mu=0.1)", "fedprox (mu=1.0)")
    assert len(report.cells) == 8


def test_labels_of_methods_that_are_names_stay(tmp_path):
    for name in ("mine", "theirs"):
        fabricate(tmp_path / "all" / name, 0.5, labels={"methods": name}, **settings())
    assert headings(make_report([tmp_path / "all"], {})) == ["methods = mine", "methods = theirs"]


def test_columns_name_only_the_labels_that_they_have(tmp_path):
    one = sweep(tmp_path / "one", {("A", 0.1): [0.5], ("A", 1.0): [0.5]})
    labels = {"dataset": "CIFAR-10", "model": "ResNet-18", "method": "A"}
    for rho in (1, 2):
        fabricate(tmp_path / "two" / str(rho), 0.5, labels={**labels, "rho": rho})
    fabricate(tmp_path / "three", 0.5, labels=labels)
    report = make_report([one, tmp_path / "two", tmp_path / "three"], {})
    assert headings(report) == ["alpha = 0.1", "alpha = 1", "rho = 1", "rho = 2", "no alpha, rho"]


def test_runs_of_one_cell_with_other_settings_are_told_apart_by_them(tmp_path):
    labels = {"method": "A", "alpha": 0.1}
    for index, (rounds, alpha) in enumerate([(10, 0.1), (20, 0.1), (20, 1.0)]):
        facts = {"params_sha256": str(index)}
        labels = {"method": "A", "alpha": alpha}
        fabricate(tmp_path / "runs" / str(index), 0.5, labels=labels, rounds=rounds, summary=facts, **settings())
    assert headings(make_report([tmp_path / "runs"], {})) == [
        "alpha = 0.1, rounds = 10",
        "alpha = 0.1, rounds = 20",
        "alpha = 1, rounds = 20",
    ]


def test_seeds_of_one_cell_with_other_settings_are_told_apart_too(tmp_path):
    for seed, rounds in ((0, 10), (1, 10), (2, 20), (3, 20)):
        facts = {"params_sha256": str(seed)}
        other = settings(seed=seed, partition={"seed": seed})
        fabricate(tmp_path / "runs" / str(seed), 0.5, labels={"method": "A"}, rounds=rounds, summary=facts, **other)
    report = make_report([tmp_path / "runs"], {})
    assert headings(report) == ["rounds = 10", "rounds = 20"]
    assert [cell.n for cell in report.cells] == [2, 2]


def test_the_same_run_under_other_settings_still_counts_once(tmp_path):
    for name, stop in (("a", {}), ("b", {"stop": {"patience": 3}})):
        facts = {"params_sha256": "same"}
        fabricate(tmp_path / "runs" / name, 0.5, labels={"method": "A"}, summary=facts, **settings(**stop))
    (cell,) = make_report([tmp_path / "runs"], {}).cells
    assert cell.n == 1


def test_notes_stand_on_the_terminal(tmp_path):
    root = sweep(tmp_path / "one", {("FedAvg", 0.1): [0.5]}, {"against": "FedVG"})
    output = CliRunner().invoke(app, ["report", str(root), "--time", "FedAvg", "--figure", "gains"]).output
    for note in (
        "note: `report.against`: no row 'FedVG'",
        "note: `report.time`: no run other than FedAvg has the seconds of two rounds or more.",
        "note: Figure `gains` is not drawn: it needs report.baseline and two columns or more.",
    ):
        assert note in " ".join(output.split())
        assert note.removeprefix("note: ") in (root / "report" / "report.md").read_text()


def test_a_sweep_and_a_run_make_one_report_from_python(tmp_path):
    root = sweep(tmp_path / "sweep", {("FedAvg", 0.1): [0.5], ("FedVG", 0.1): [0.6]})
    other = fabricate(tmp_path / "other", 0.8, labels={"method": "Mine", "alpha": 0.1}, **settings())
    runs = Runs([Run(root / "FedAvg-0.1-0"), Run(root / "FedVG-0.1-0")], root)
    report = raysim.report([Run(other), runs], out=tmp_path / "out", figures=[])
    assert sorted(number(value) for value in report.cells["mean"]) == [50.0, 60.0, 80.0]


NOTE = (
    "Rows of the tables trained on different examples of digits: `data.validation` is not the same (fedavg: 0.0; fedvg: 0.1). "
    "Set it in all runs."
)


@pytest.mark.parametrize("labels", [{}, {"alpha": 0.1}])
def test_runs_that_were_started_apart_say_that_they_trained_on_different_rows(tmp_path, labels):
    for name, methods in (("a", []), ("b", ["fedvg"])):
        data = {"name": "digits", "validation": 0.1 if methods else 0.0}
        own = {**labels, "method": name} if labels else {}
        fabricate(tmp_path / "runs" / name, 0.5, labels=own, **settings(methods, data=data))
    note = NOTE.replace("fedavg", "a").replace("fedvg", "b") if labels else NOTE
    assert make_report([tmp_path / "runs"], {}).notes == [note]


def test_columns_with_other_held_out_rows_need_no_word(tmp_path):
    for index, (methods, share) in enumerate((m, s) for m in ([], ["fedvg"]) for s in (0.1, 0.2)):
        labels = {"method": str(methods), "validation": share}
        data = {"name": "digits", "validation": share}
        fabricate(tmp_path / "runs" / str(index), 0.5, labels=labels, **settings(methods, data=data))
    assert make_report([tmp_path / "runs"], {}).notes == []


def test_a_report_names_files_without_the_folders_of_this_machine(tmp_path):
    model = {"name": "cnn", "pretrained": str(tmp_path / "runs" / "before" / "model.safetensors")}
    for seed in (0, 1):
        fabricate(tmp_path / "runs" / str(seed), 0.5, labels={"method": "A"}, **settings(), seed=seed, model=model)
    raysim.report(tmp_path / "runs", out=tmp_path / "out")
    page = (tmp_path / "out" / "report.md").read_text()
    assert "`model.pretrained=.../before/model.safetensors`" in page
    assert str(tmp_path) not in page


def test_one_name_of_several_methods_is_told(tmp_path):
    for seed, mu in ((0, 0.01), (1, 0.01), (2, 1.0)):
        more = settings(seed=seed, methods=[{"fedprox": {"mu": mu}}])
        fabricate(
            tmp_path / "runs" / str(seed), 0.5, labels={"method": "A"}, summary={"params_sha256": str(seed)}, **more
        )
    (note,) = make_report([tmp_path / "runs"], {}).notes
    assert note.startswith("One cell of A averages over several methods:")
    assert '"mu": 0.01}}] in seed 0, 1; ' in note
    assert '"mu": 1.0}}] in seed 2.' in note
