"""`raysim report`: numbers checked by hand, the paper's significance claims, every form of output, every figure."""

from __future__ import annotations

import csv
import itertools
import subprocess
import sys

import numpy as np
import pytest
from scipy.stats import wilcoxon
from typer.testing import CliRunner

from raysim.__main__ import app, main
from raysim.config import Config, parse_config, parse_report, read_config
from raysim.core.errors import ConfigError, DataError
from raysim.report.build import make_report, write
from raysim.report.document import conclusions
from raysim.report.drawing import draw, figure_faults
from raysim.report.published import FOLDER, is_same, match, published
from raysim.report.render import latex, latex_text, lines_of, markdown, write_csv
from raysim.report.runs import find_runs, method_names
from raysim.report.significance import wilcoxon_greater
from raysim.report.statement import winners
from raysim.report.tables import cells_of, make_tables, mean_and_std, published_cells
from raysim.run import FREE_KEYS, hyperparameters
from raysim.sweep import grid
from tests.support.report_runs import SCORES, fabricate, labels_of, sweep

MAIN = ["fedvg_table_A3", "fedvg_table_A4"]


@pytest.fixture
def runs(tmp_path):
    group = {"columns": ["alpha"], "published": ["fedvg_table_A3"], "baseline": "FedAvg", "against": "FedVG"}
    return sweep(tmp_path / "small", SCORES, group)


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


# --- published numbers ---------------------------------------------------------------------------------------------


def test_published_cells_are_found_by_all_their_labels():
    granular, main_table = published("fedvg_table_A8"), published("fedvg_table_A3")
    block = {"dataset": "cifar10", "model": "resnet18", "method": "fedvg", "alpha": 0.05, "granularity": "blockwise"}
    assert match(granular, block).value == 50.30
    assert match(main_table, block) is None  # table A.3 has no granularity: not the same setting
    plain = {key: value for key, value in block.items() if key != "granularity"}
    assert match(main_table, plain).value == 53.58
    assert match(granular, plain) is None
    assert match(main_table, {**plain, "alpha": 0.2}) is None
    assert match(main_table, {**plain, "local.lr": 0.1}) is None
    assert match(main_table, {"method": "FedVG", "alpha": 0.05}) is None
    dotted = {**plain, "partition.alpha": 0.05}
    del dotted["alpha"]
    assert match(main_table, dotted).value == 53.58
    bare = {"dataset": "BloodMNIST", "model": "MobileNetV2", "method": "FedAvg"}
    assert match(published("flfa_table_01"), bare).value == 59.26


def test_a_published_dash_is_printed_and_has_no_difference(tmp_path):
    (tmp_path / "mine.csv").write_text(
        "paper,table,dataset,model,method,setting,metric,value,std\n"
        "P,1,CIFAR-10,ResNet-18,FedAvg,alpha=0.1,accuracy_pct,,\nP,1,CIFAR-10,ResNet-18,FedVG,alpha=0.1,accuracy_pct,60.0,\n"
    )
    root = sweep(tmp_path / "dash", {("FedAvg", 0.1): [0.5], ("FedVG", 0.1): [0.61]})
    report = make_report([root], {"published": [str(tmp_path / "mine.csv")], "columns": ["alpha"]})
    assert cell_at(report, "FedAvg", 0.1).difference is None
    assert [entry.text for _, (entry,) in lines_of(report.tables[0])] == ["50.00", "-", "61.00", "60.00 (+1.00)"]


def test_names_mean_the_same_however_written():
    assert is_same("FedAvg + FedVG", "fedavg+fedvg")
    assert is_same(0.1, "0.10")
    assert is_same("ViT-B/16 (IN-21k)", "vit_b16_in21k")
    assert not is_same("FLFA*", "FLFA")
    assert not is_same("FedAvg", "FedAvgM")
    assert not is_same(1, "01a")


def test_every_shipped_table_reads():
    tables = {path.stem: published(path.stem) for path in FOLDER.glob("*.csv")}
    assert len(tables) == 30
    assert sum(map(len, tables.values())) == 1712
    missing = [cell for cells in tables.values() for cell in cells if cell.text == "-"]
    assert missing
    assert all(cell.value is None for cell in missing)
    for name in ("fedvg_table_A7", "flfa_table_01", "livar_table_1", "univarfl_table_1"):
        assert make_report([], {"published": [name]}).tables


def test_unknown_published_table_names_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'fedvg_table_A3'"):
        published("fedvg_tabel_A3")


# --- significance --------------------------------------------------------------------------------------------------


def claims():
    return {
        (cell.method.removeprefix("FedVG vs "), float(cell.setting["alpha"]))
        for cell in published("fedvg_inline")
        if cell.metric == "fedvg_significantly_better"
    }


def test_wilcoxon_on_the_published_means_reproduces_the_papers_claims():
    report = make_report([], {"published": MAIN, "columns": ["alpha"], "against": "FedVG"})
    assert len(report.by_table) == 6 * 5
    assert all(item.result.num_pairs == 7 for item in report.by_table)
    found = {(item.other, item.column[0]) for item in report.by_table if item.result.is_significant}
    assert found == claims()
    assert len(found) == 13
    for baseline in ("FedAvg", "FedAvgM", "FedProx", "Scaffold", "FedDyn", "Elastic"):
        reverse = make_report([], {"published": MAIN, "columns": ["alpha"], "against": baseline}).by_table
        assert not [item for item in reverse if item.other == "FedVG" and item.result.is_significant]


def test_published_p_values_equal_scipys_exact_form():
    tables = make_report([], {"published": MAIN, "columns": ["alpha"], "against": "FedVG"}).tables
    for other, column in itertools.product(("FedAvg", "Scaffold", "Elastic"), tables[0].columns):
        ours = [table.cells["FedVG", column].mean for table in tables]
        theirs = [table.cells[other, column].mean for table in tables]
        result = wilcoxon_greater(ours, theirs)
        if not result.has_ties:
            assert result.p == pytest.approx(wilcoxon(ours, theirs, alternative="greater", method="exact").pvalue)


def test_wilcoxon_by_hand():
    assert wilcoxon_greater([2, 3, 4, 5, 6], [1, 1, 1, 1, 1]).p == 1 / 32  # the smallest that five pairs can give
    assert wilcoxon_greater([1, 1], [2, 3]).p == 1.0
    result = wilcoxon_greater([3, 1, 4], [1, 2, 1])  # ranks 2, -1, 3: W+ = 5, reached by 5 and 6 of 8 patterns
    assert (result.p, result.statistic) == (2 / 8, 5.0)


def test_wilcoxon_drops_equal_pairs_and_shares_ranks_of_ties():
    result = wilcoxon_greater([1, 2, 3, 4], [1, 1, 2, 5])  # 0, +1, +1, -1: ranks 2, 2, 2; W+ = 4 or more in 4 of 8
    assert (result.p, result.num_pairs, result.num_used, result.has_ties) == (4 / 8, 4, 3, True)
    assert result.smallest_p == 1 / 8
    assert wilcoxon_greater([1.0], [1.0]).p == 1.0
    assert wilcoxon_greater([80.74, 80.75], [80.37, 80.38]).has_ties  # 0.37 twice, but not in floating point
    with pytest.raises(ValueError, match="no pairs"):
        wilcoxon_greater([1], [1, 2])


def test_wilcoxon_with_ties_equals_counting_all_signs():
    rng = np.random.default_rng(0)
    for _ in range(20):
        gaps = rng.integers(-3, 5, 7).astype(float)
        used = gaps[gaps != 0]
        sizes = np.abs(used)
        ranks = np.array([np.mean(np.flatnonzero(np.sort(sizes) == size) + 1) for size in sizes])
        observed = ranks[used > 0].sum()
        sums = [ranks[np.array(signs) > 0].sum() for signs in itertools.product((0, 1), repeat=len(used))]
        expected = np.mean(np.array(sums) >= observed - 1e-9)
        assert wilcoxon_greater(gaps, np.zeros(7)).p == pytest.approx(expected)


def test_over_seeds_pairs_runs_of_the_same_seed(tmp_path):
    root = sweep(tmp_path / "s", {("FedAvg", 0.1): [0.5] * 5, ("FedVG", 0.1): [0.51, 0.52, 0.53, 0.54, 0.55]})
    report = make_report([root], {"against": "fedvg", "columns": ["alpha"]})
    (item,) = report.by_seed["CIFAR-10 / ResNet-18"]
    assert (item.result.p, item.result.num_pairs, item.result.is_significant) == (1 / 32, 5, True)
    assert "FedVG is significantly better than FedAvg at alpha = 0.1" in "\n".join(conclusions(report))


def test_few_seeds_are_said_to_be_too_few(runs, tmp_path):
    text = write(make_report([runs], {"figures": []}), tmp_path / "out").read_text()
    assert "fewer than five pairs this test cannot reach" in text
    assert "| FedVG \\> FedAvg | 0.1250 (n=3) | 0.5000 (n=1) |" in text


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
    write_csv(tmp_path / "t.csv", report.tables, "best_accuracy")
    with open(tmp_path / "t.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 5
    for row in rows:
        cell = cell_at(report, row["method"], float(row["alpha"]))
        assert (float(row["mean"]), int(row["n"])) == (cell.mean, cell.n)
        assert (float(row["std"]) if row["std"] else None) == cell.std
        assert float(row["difference"]) == cell.difference
        assert (row["metric"], row["published_source"]) == ("best_accuracy_pct", "FedVG, table A.3")


def test_conclusions_by_hand(runs):
    changed, best, gain, tested, theirs = conclusions(make_report([runs], {}))
    assert changed.startswith("NOT the labelled experiment: rounds = 10 (recipe: 200); ")
    assert best == "FedVG is best in 2 of 2 columns and second best in 0."
    assert gain == "FedVG differs from FedAvg by +5.50 points on average (from +4.00 to +7.00) over 2 columns."
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
        "FedVG is best in 1 of 2 columns (alpha = 0.1) and second best in 1; also best: FedAvg in 1. "
        "Upper bound, trained on all examples together and not ranked: Joint."
    )
    assert winners([table], "FedVG") == want
    assert winners([table], "Joint").startswith("FedAvg is best in 1 of 2 columns")


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
    assert text.startswith("# small: best accuracy of the evaluated rounds\n")
    assert "- runs: 12 finished of 12" in text
    assert "- seeds: 1 in 1 cells, 2 in 1 cells, 3 in 3 cells (0, 1, 2)" in text
    assert "`rounds=10`" in text
    assert "- torch: 2.14.1" in text
    for name in ("bars", "lines", "curves"):
        assert f"](figures/{name}.png)" in text
        assert (tmp_path / "out" / "figures" / f"{name}.png").read_bytes()[:4] == b"\x89PNG"


# --- the command ---------------------------------------------------------------------------------------------------


def test_command_end_to_end(runs, tmp_path):
    result = CliRunner().invoke(app, ["report", str(runs)])
    assert result.exit_code == 0, result.output
    assert "61.00 ± 1.00 (n=3)" in result.output
    assert "FedVG is best in 2 of 2 columns" in result.output
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
        (["nowhere"], "no folder nowhere"),
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


def test_a_recipes_missing_row_is_a_note(tmp_path):
    root = sweep(tmp_path / "early", {("FedAvg", 0.1): [0.5]}, {"against": "FedVG", "figures": []})
    assert "no row 'FedVG'" in write(make_report([root], {}), tmp_path / "out").read_text()


def test_report_starts_without_torch():
    code = "import sys, raysim.__main__, raysim.report.build, raysim.report.document; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


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
    (table, *_) = make_tables(cells, rows="method", columns=["alpha"])
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


def test_a_papers_figure_number_is_its_kind(runs):
    names = ["figure_1", "bars", "figure_3", "curves"]
    made = draw(make_report([runs], {"figures": names}), on_missing=pytest.fail)
    assert list(made) == ["bars", "lines", "curves"]


RECIPES = sorted(FOLDER.parents[1].rglob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_ask_for_reports_that_can_be_made(path):
    group = parse_report(read_config(path).get("report"), str(path))
    assert all(published(name) for name in group.published)
    assert not figure_faults(group.figures or ())


@pytest.mark.parametrize("name", ["table_A3", "table_A4", "table_A7", "table_A8", "figure_6", "figure_8"])
def test_every_trial_of_a_recipe_finds_its_published_cell(name):
    path = FOLDER.parent / "fedvg" / f"{name}.yaml"
    raw = read_config(path)
    theirs = [cell for table in raw["report"]["published"] for cell in published(table)]
    found = set()
    for trial in grid(raw, str(path)):
        labels = {"method": method_names(trial.raw), **trial.raw["labels"]}
        del labels["seed"]
        cell = match(theirs, labels)
        assert cell is not None, labels
        found.add(id(cell))
    if name.startswith("table_A"):
        assert len(found) == len(theirs)
