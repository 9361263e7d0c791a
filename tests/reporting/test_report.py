"""`raysim report`: numbers checked by hand, which runs are collected, every form of output."""

from __future__ import annotations

import csv
import itertools
from dataclasses import replace

import pytest

from raysim.base.errors import ConfigError, DataError
from raysim.config import Config, ReportGroup, parse_config
from raysim.folders.run_folder import FREE_KEYS
from raysim.reporting.document import conclusions, winners
from raysim.reporting.gather import make_report
from raysim.reporting.published import published
from raysim.reporting.render import latex, latex_text, lines_of, markdown, with_sign, write_csv
from raysim.reporting.report import write
from raysim.reporting.runs import find_runs
from raysim.reporting.tables import cells_of, make_tables, mean_and_std, published_cells
from raysim.running.runner import hyperparameters
from tests.support.report_runs import fabricate, labels_of, sweep


def cell_at(report, row, alpha):
    return report.tables[0].cells[row, (alpha,)]


# --- numbers -------------------------------------------------------------------------------------------------------


def test_mean_and_deviation_by_hand():
    assert mean_and_std([50.0, 54.0, 58.0]) == (54.0, 4.0)  # ((16 + 0 + 16) / 2) ** 0.5
    assert mean_and_std([45.0]) == (45.0, None)


def test_cells_hold_mean_deviation_count_and_difference(runs):
    report = make_report([runs], {})
    cell = cell_at(report, "FedAvg", 0.1)
    assert (cell.mean, cell.std, cell.n) == (pytest.approx(54.0), pytest.approx(4.0), 3)
    assert cell.published.value == 57.93
    assert cell.difference == pytest.approx(54.0 - 57.93)
    single = cell_at(report, "FedVG", 0.05)
    assert (single.mean, single.std, single.n) == (45.0, None, 1)
    assert ("FedProx", (0.05,)) not in report.tables[0].cells
    assert report.tables[0].rows == ("FedAvg", "FedProx", "FedVG")  # the paper's order
    assert report.tables[0].columns == ((0.1,), (0.05,))


def test_other_metrics(runs):
    assert cell_at(make_report([runs], {"metric": "mean_last_10pct_accuracy"}), "FedVG", 0.05).mean == pytest.approx(44)
    for path in runs.glob("*/summary.json"):
        path.write_text(path.read_text().replace("mean_last_10pct_accuracy", "something"))
    with pytest.raises(DataError, match="has no mean_last_10pct_accuracy"):
        make_report([runs], {"metric": "mean_last_10pct_accuracy"})


def test_best_and_second_with_ties_by_printed_value(tmp_path):
    values = {"a": 0.500012, "b": 0.500008, "c": 0.49, "d": 0.48, "e": 0.49}  # a and b both print 50.00
    root = sweep(tmp_path / "ties", {(name, 0.1): [value] for name, value in values.items()})
    (table,) = make_report([root], {"columns": ["alpha"]}).tables
    assert {row: table.marks.get((row, (0.1,)), "") for row in table.rows} == {
        "a": "best", "b": "best", "c": "second", "d": "", "e": "second"
    }  # fmt: skip


def test_a_column_of_one_row_has_no_mark(tmp_path):
    (table,) = make_report([sweep(tmp_path / "one", {("FedVG", 0.1): [0.5]})], {}).tables
    assert table.marks == {}


# --- collecting ----------------------------------------------------------------------------------------------------


def test_failed_unfinished_and_damaged_runs_are_listed(runs, tmp_path):
    fabricate(runs / "broken", 0.3, labels=labels_of("FedVG", 0.05, 1), status="FAILED", seed=1)
    fabricate(runs / "halfway", 0.3, labels=labels_of("FedVG", 0.05, 2), status="", seed=2)
    (fabricate(runs / "torn", 0.3) / "config.yaml").write_text("a: [")
    (fabricate(runs / "empty", 0.3) / "summary.json").unlink()
    report = make_report([runs], {"figures": []})
    text = write(report, tmp_path / "out").read_text()
    assert "## Not in the tables: 4 of 16 runs" in text
    assert "`broken` (CIFAR-10 / ResNet-18, method = FedVG, alpha = 0.05, seed 1): failed: client 3 failed" in text
    assert "unfinished: 5 of 10 rounds" in text
    assert "damaged: no readable config.yaml" in text
    assert "damaged: no readable summary.json" in text
    assert cell_at(report, "FedVG", 0.05).n == 1


def test_two_runs_of_one_cell_and_seed_are_refused(runs):
    fabricate(runs / "again", 0.3, labels=labels_of("FedVG", 0.1, 2), seed=2)
    with pytest.raises(
        DataError, match=r"two different runs of CIFAR-10 / ResNet-18, method = FedVG, alpha = 0.1 with seed 2"
    ):
        make_report([runs], {})


def test_labels_are_derived_from_what_differs(tmp_path):
    for seed, alpha in itertools.product((0, 1), (0.1, 1.0)):
        for name, methods in (("avg", []), ("p1", [{"fedprox": {"mu": 0.1}}]), ("p2", [{"fedprox": {"mu": 0.01}}, "fedvg"]),
                              ("p3", [{"fedprox": {"mu": 0.5}}])):  # fmt: skip
            fabricate(tmp_path / f"{name}-{alpha}-{seed}", 0.5, methods=methods, seed=seed, partition={"alpha": alpha})
    found = find_runs([tmp_path])
    assert found[0].labels == {"dataset": "digits", "model": "cnn", "method": "fedavg", "partition.alpha": 0.1}
    assert found[0].seed == 0
    (table,) = make_report([tmp_path], {}).tables
    assert table.names == ("partition.alpha",)
    assert table.rows == ("fedavg", "fedprox (mu=0.1)", "fedprox (mu=0.5)", "fedprox + fedvg")
    assert {cell.n for cell in table.cells.values()} == {2}


def test_one_run_without_labels_is_a_table_of_one_cell(tmp_path):
    fabricate(tmp_path / "mine", 0.5, methods=["fedvg"])
    (table,) = make_report([tmp_path / "mine"], {}).tables
    assert (table.title, table.rows, table.columns) == ("digits / cnn", ("fedvg",), ((),))


def test_overlapping_paths_count_once(runs):
    assert len(make_report([runs, runs / "FedAvg-0.1-0", runs.parent], {}).runs) == 12


def test_labels_that_are_neither_row_nor_column_make_tables(tmp_path):
    for index, (model, alpha, norm) in enumerate(itertools.product(("A", "B"), (0.1, 1.0), ("l1", "l2"))):
        fabricate(tmp_path / str(index), 0.5, labels={**labels_of("FedVG", alpha), "model": model, "norm": norm})
    tables = make_report([tmp_path], {"columns": ["alpha"]}).tables
    assert [table.title for table in tables] == [f"CIFAR-10 / {m}, norm = {n}" for m in "AB" for n in ("l1", "l2")]
    tables = make_report([tmp_path], {"rows": "norm"}).tables
    assert [(table.title, table.rows, table.names) for table in tables] == [
        (f"CIFAR-10 / {m}", ("l1", "l2"), ("alpha",)) for m in "AB"
    ]


def test_groups_of_several_sweeps_are_joined_or_refused(tmp_path):
    one = sweep(tmp_path / "one", {("FedVG", 0.1): [0.5]}, {"published": ["fedvg_table_A3"], "metric": "accuracy"})
    two = sweep(tmp_path / "two", {("FedVG", 1.0): [0.5]}, {"published": ["fedvg_table_A4"]})
    group = make_report([one, two], {}).group
    assert (group.published, group.metric) == (["fedvg_table_A3", "fedvg_table_A4"], "accuracy")
    (two / "sweep.yaml").write_text("report: {columns: [alpha, choice]}")
    (one / "sweep.yaml").write_text("report: {metric: accuracy, columns: [alpha]}")
    assert make_report([one, two], {}).group.columns == ["alpha", "choice"]
    (two / "sweep.yaml").write_text("report: {metric: mean_last_10pct_accuracy}")
    with pytest.raises(ConfigError, match=r"report\.metric"):
        make_report([one, two], {})
    assert make_report([one, two], {"metric": "best_accuracy"}).group.metric == "best_accuracy"
    (two / "sweep.yaml").write_text("report: {metrik: accuracy}")
    with pytest.raises(ConfigError, match=r"report.metrik: unknown key. Did you mean 'metric'"):
        make_report([one, two], {})


# --- output --------------------------------------------------------------------------------------------------------


def test_markdown_by_hand(runs):
    (table,) = make_report([runs], {}).tables
    assert markdown(["method", "a", "b"], lines_of(table)) == (
        "| method | a | b |\n| --- | ---: | ---: |\n"
        "| FedAvg | 54.00 ± 4.00 (n=3) | <u>41.00 ± 1.41 (n=2)</u> |\n"
        "| &nbsp;&nbsp;*published (difference)* | 57.93 ± 1.82 (−3.93) | 48.83 ± 5.53 (−7.83) |\n"
        "| FedProx | <u>54.00 ± 1.00 (n=3)</u> | - |\n"
        "| &nbsp;&nbsp;*published (difference)* | 55.22 ± 5.56 (−1.22) |  |\n"
        "| FedVG | **61.00 ± 1.00 (n=3)** | **45.00 (n=1)** |\n"
        "| &nbsp;&nbsp;*published (difference)* | 61.06 ± 0.34 (−0.06) | 53.58 ± 2.78 (−8.58) |\n"
    ).replace("FedAvg | 54.00 ± 4.00 (n=3)", "FedAvg | <u>54.00 ± 4.00 (n=3)</u>")


def test_latex_escapes_and_marks(tmp_path):
    assert latex_text("a_b & 50% {x} #1 ~ ^ \\ <") == (
        r"a\_b \& 50\% \{x\} \#1 \textasciitilde{} \textasciicircum{} \textbackslash{} \textless{}"
    )
    root = sweep(tmp_path / "tex", {("a_b & c", 0.1): [0.5, 0.6], ("d", 0.1): [0.4], ("e", 0.1): [0.3]})
    tex = latex(make_report([root], {"columns": ["alpha"]}).tables, "method", "best")
    assert r"a\_b \& c & \textbf{55.00 $\pm$ 7.07 (n=2)} \\" in tex
    assert r"d & \underline{40.00 (n=1)} \\" in tex
    assert tex.count(r"\toprule") == tex.count(r"\bottomrule") == 1
    assert tex.count("{") == tex.count("}")


def test_csv_read_again_is_equal(runs, tmp_path):
    report = make_report([runs], {})
    write_csv(tmp_path / "t.csv", report.tables)
    with open(tmp_path / "t.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 5
    for row in rows:
        cell = cell_at(report, row["method"], float(row["alpha"]))
        assert (float(row["mean"]), int(row["n"])) == (cell.mean, cell.n)
        assert (float(row["std"]) if row["std"] else None) == cell.std
        assert float(row["difference"]) == cell.difference
        assert (row["metric"], row["published_source"]) == ("accuracy_pct", "FedVG, table A.3")


def test_conclusions_by_hand(runs):
    changed, best, gain, tested, theirs = conclusions(make_report([runs], {}))
    assert changed.startswith("NOT the labelled experiment: rounds = 10 (recipe: 200); ")
    assert best == (
        "FedVG has the highest mean in 2 of 2 columns and the second highest in 0. "
        "No lead is significant in tests over seeds (p < 0.05), so no row is called best."
    )
    assert gain == "FedVG differs from FedAvg by +6.00 points on average (from +5.00 to +7.00) over 2 columns."
    assert "FedVG is nowhere significantly better than FedAvg, FedProx" in tested
    assert theirs.startswith(
        "5 of 5 cells have a published number: ours differ by −4.32 points on average, 4.32 in size"
    )
    assert "2 within one published standard deviation" in theirs


def test_joint_rows_are_named_as_the_bound_and_not_ranked(tmp_path):
    values = {("FedAvg", 0.1): [0.5, 0.6], ("FedVG", 0.1): [0.6, 0.6], ("FedAvg", 1.0): [0.7], ("FedVG", 1.0): [0.6]}
    sweep(tmp_path / "few", values, {"columns": ["alpha"]})
    for alpha in (0.1, 1.0, 10.0):  # the last column holds joint training and one competitor
        fabricate(tmp_path / "few" / f"j{alpha}", 0.9, labels=labels_of("Joint", alpha), partition={"scheme": "joint"})
    fabricate(tmp_path / "few" / "alone", 0.5, labels=labels_of("FedVG", 10.0))
    (table,) = make_report([tmp_path / "few"], {}).tables
    assert table.bounds == {"Joint"}
    assert table.marks == {
        ("FedVG", (0.1,)): "best", ("FedAvg", (0.1,)): "second",
        ("FedAvg", (1.0,)): "best", ("FedVG", (1.0,)): "second",
    }  # fmt: skip
    want = (
        "FedVG has the highest mean in 1 of 2 columns (alpha = 0.1) and the second highest in 1; also highest: FedAvg in 1. "
        "No lead is significant in tests over seeds (p < 0.05), so no row is called best. "
        "Upper bound, trained on all examples together and not ranked: Joint."
    )
    assert winners([table], "FedVG") == want
    assert "; highest: FedVG in 1" in winners([replace_best(table)], "FedAvg")  # not "also": FedAvg leads nowhere
    assert winners([table], "Joint").startswith("FedAvg has the highest mean in 1 of 2 columns")


def replace_best(table):
    """The table with its first column alone, in which FedVG leads."""
    return replace(table, columns=table.columns[:1])


def test_joint_rows_by_themselves_compete(tmp_path):
    for name, best in (("slow", 0.8), ("fast", 0.9)):
        fabricate(tmp_path / name, best, labels=labels_of(name, 0.1), partition={"scheme": "joint"})
    (table,) = make_report([tmp_path], {}).tables
    assert not table.bounds
    assert {row: mark for (row, _), mark in table.marks.items()} == {"fast": "best", "slow": "second"}
    fabricate(tmp_path / "mixed", 0.7, labels=labels_of("slow", 0.1, 1))  # one federated run makes it a competitor
    (table,) = make_report([tmp_path], {}).tables
    assert table.bounds == {"fast"}


def test_report_names_what_is_shared_and_links_its_figures(runs, tmp_path):
    text = write(make_report([runs], {}), tmp_path / "out").read_text()
    assert text.startswith("# small: accuracy after the last round\n")
    assert "- runs: 12 finished of 12" in text
    assert "- seeds: 1 in 1 cells, 2 in 1 cells, 3 in 3 cells (0, 1, 2)" in text
    assert "`rounds=10`" in text
    assert "- torch: 2.14.1" in text
    for name in ("bars", "lines", "curves"):
        assert f"](figures/{name}.png)" in text
        assert (tmp_path / "out" / "figures" / f"{name}.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("scheme", "shown"), [("dirichlet", True), ("quantity", True), ("labels", False), ("iid", False)]
)
def test_shared_settings_have_an_alpha_only_where_it_counts(tmp_path, scheme, shown):
    run = fabricate(tmp_path / "run", 0.5, partition={"scheme": scheme})
    text = write(make_report([run], {}), tmp_path / "out").read_text()
    assert f"`partition.scheme={scheme}`" in text
    assert ("`partition.alpha=0.1`" in text) is shown


# --- configuration -------------------------------------------------------------------------------------------------


def test_labels_and_report_are_free_keys_with_quiet_defaults():
    assert {"labels", "report"} <= set(FREE_KEYS)
    config, faults = parse_config(
        {"labels": {"method": "FedVG", "alpha": 0.05, "seed": 3}, "report": {"columns": ["alpha"]}}
    )
    assert not faults
    assert config.labels == {"method": "FedVG", "alpha": 0.05, "seed": 3}
    assert isinstance(config.labels["seed"], int)
    assert hyperparameters(config)["labels.method"] == "FedVG"
    assert Config().labels == {}
    assert Config().report.figures is None
    _, faults = parse_config({"report": {"colums": ["alpha"]}})
    assert "Did you mean 'columns'" in str(faults[0])


def test_cells_of_runs_and_of_published_tables_have_the_same_form():
    cells = published_cells(published("fedvg_table_A3"))
    (table, *_) = make_tables(cells, ReportGroup(columns=["alpha"]))
    assert table.cells["FedVG", (0.05,)].mean == 53.58
    assert table.cells["FedVG", (0.05,)].n == 0
    assert cells_of([], "best_accuracy", []) == []


def test_runs_on_other_data_than_their_labels_say_are_called_so(tmp_path):
    labels = labels_of("FedVG", 0.05)
    fabricate(tmp_path / "scaled" / "a", 0.5, labels=labels, data={"name": "digits"}, model={"name": "cnn"})
    warning, *_ = conclusions(make_report([tmp_path / "scaled"], {"published": ["fedvg_table_A3"]}))
    assert warning.startswith("NOT the labelled experiment: CIFAR-10 (ran on digits); ResNet-18 (was cnn).")
    fabricate(tmp_path / "full" / "a", 0.5, labels=labels)
    assert "NOT" not in "".join(conclusions(make_report([tmp_path / "full"], {})))
    larger = {"data": {"name": "dermamnist_224"}, "model": {"name": "vit_b16"}}
    fabricate(tmp_path / "large" / "a", 0.5, labels={**labels, "dataset": "DermaMNIST", "model": "ViT-B/16"}, **larger)
    assert "NOT" not in "".join(conclusions(make_report([tmp_path / "large"], {})))


def test_a_difference_that_rounds_to_zero_has_no_minus():
    assert [with_sign(points) for points in (-0.004, 0.004, -0.006)] == ["+0.00", "+0.00", "−0.01"]
