"""Reports of what is unusual and possible: less is better, uneven seeds and grids, odd names, many columns, empty records."""

from __future__ import annotations

import csv

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from matplotlib.text import Text

from raysim.base.errors import ConfigError
from raysim.folders.run_folder import RunFolder
from raysim.reporting.contents import cost
from raysim.reporting.document import document
from raysim.reporting.gather import make_report
from raysim.reporting.measure import ReportMetric
from raysim.reporting.published import is_same
from raysim.reporting.report import Report, write
from raysim.reporting.runs import find_runs
from raysim.running.pictures import class_picture, png
from raysim.running.record import judged
from tests.support.report_runs import drawn, fabricate, labels_of, sweep

# --- which number -----------------------------------------------------------------------------------------------------


def test_a_target_counts_upwards_alone(tmp_path):
    error = {"server/calibration_error": [0.3] * 10}
    fabricate(tmp_path / "a", 0.5, labels={"method": "A"}, progress=error)
    with pytest.raises(ConfigError, match=r"report\.target: is an accuracy, and this report is about"):
        make_report([tmp_path], {"metric": "server/calibration_error", "target": "A"})


def test_a_target_is_looked_for_in_the_column_of_its_own_metric(tmp_path):
    metrics = {"number": {"accuracy": "server/accuracy", "AUROC": "server/auroc"}}
    fabricate(tmp_path / "a", 0.8, labels={"method": "A"}, progress={"server/auroc": [0.6] * 10})
    report = make_report([tmp_path], {"metrics": metrics, "columns": ["number"], "target": 70})
    (costs,) = report.extras
    (line,) = costs.lines
    assert [entry.text for entry in line[1]][::3] == ["7.0", "never"]


def test_a_metric_of_the_command_line_does_not_keep_the_mode_of_the_recipes(tmp_path):
    scores = {("A", 0.1): [0.5, 0.6], ("B", 0.1): [0.7, 0.8]}
    runs = sweep(tmp_path / "s", scores, {"metric": "server/score", "mode": "min"})
    (table,) = make_report([runs], {"metric": "accuracy"}).tables
    assert (table.metric.mode, table.marks["B", ()]) == ("max", "best")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [("mu=1.0", "mu=10", False), ("mu=0.01", "MU = 0.01", True), ("inf", float("inf"), True), ("v1.5", "v15", False)],
)
def test_names_differ_by_the_point_of_a_fraction(one, other, same):
    assert is_same(one, other) is same


def test_gains_are_paired_by_seed_in_words_and_in_the_table(tmp_path):
    for method, seed, score in (("A", 0, 0.3), ("A", 1, 0.7), ("A + FLFA", 0, 0.35)):
        fabricate(tmp_path / f"{method}{seed}", score, labels={"method": method}, seed=seed)
    report = make_report([tmp_path], {"gain": "FLFA", "baseline": "A", "against": "A + FLFA"})
    (gain,) = report.tables[0].gains.values()
    assert gain.mean == pytest.approx(5.0)
    assert "A + FLFA differs from A by +5.00 points" in document(report, {}, [])
    assert report.by_seed[report.tables[0].title][0].effect.mean == pytest.approx(5.0)


def test_the_evaluation_before_a_run_was_made_longer_counts_nowhere(tmp_path):
    scores = ["" if index % 2 == 0 else 0.5 for index in range(20)]
    scores[18], scores[19] = 0.8, 0.6
    folder = fabricate(tmp_path / "a", 0.6, rounds=20, labels={"method": "A"}, evaluation={"every": 2})
    with open(folder / "progress.csv") as file:
        rows = [{**row, "server/accuracy": score} for row, score in zip(csv.DictReader(file), scores, strict=True)]
    pd.DataFrame(rows).to_csv(folder / "progress.csv", index=False)
    told = judged([{key: str(value) for key, value in row.items()} for row in rows], 20, every=2)
    (run,) = find_runs([folder])
    for way, key in (("best", "best_accuracy"), ("mean_last_10pct", "mean_last_10pct_accuracy"), ("last", "accuracy")):
        assert ReportMetric(f"{way}:server/accuracy").score(run) == pytest.approx(100 * told[key])
    assert cost(folder, "server/accuracy", 0.55).rounds == 20


def test_a_correlation_is_no_share_and_an_ece_is_better_when_small(tmp_path):
    assert not ReportMetric("mean:diagnostics/accuracy_by_gradient").is_share
    for method, error in (("A", 0.2), ("B", 0.05)):
        fabricate(tmp_path / method, 0.5, labels={"method": method}, progress={"server/ece": [error] * 10})
    (table,) = make_report([tmp_path], {"metric": "server/ece", "mode": "min"}).tables
    assert table.marks["B", ()] == "best"


def test_each_line_of_table_csv_names_its_own_metric(tmp_path):
    metrics = {"number": {"accuracy": "server/accuracy", "AUROC": "server/auroc"}}
    fabricate(tmp_path / "a", 0.8, labels={"method": "A"}, progress={"server/auroc": [0.6] * 10})
    fabricate(tmp_path / "b", 0.7, labels={"method": "B"})
    report = make_report([tmp_path / "a", tmp_path / "b"], {"metrics": metrics, "columns": ["number"]})
    assert "`report.metrics`: 1 of 2 runs did not record server/auroc." in report.notes
    write(report, tmp_path / "out")
    lines = pd.read_csv(tmp_path / "out" / "table.csv")
    assert sorted(zip(lines["method"], lines["metric"], strict=True)) == [
        ("A", "server/accuracy_pct"),
        ("A", "server/auroc_pct"),
        ("B", "server/accuracy_pct"),
    ]


def test_tests_call_the_only_column_as_the_tables_do(tmp_path):
    for method in "AB":
        fabricate(tmp_path / method, 0.5, labels={"method": method}, progress={"server/loss": [0.5] * 10})
    report = Report.write([tmp_path], tmp_path / "out", {"metric": "server/loss", "baseline": "A"})
    (table,) = report.tables.values()
    assert set(report.p_values["column"]) == set(table.columns) == {"server/loss"}


def test_a_further_test_set_is_not_the_published_one(tmp_path):
    labels = labels_of("FedAvg", 0.1)
    fabricate(tmp_path / "a", 0.5, labels=labels, progress={"server/accuracy_other": [0.4] * 10})

    def published(metric):
        report = make_report([tmp_path], {"metric": metric, "published": ["fedvg_table_A3"], "columns": ["alpha"]})
        return [cell.published is not None for cell in report.tables[0].cells.values() if cell.n]

    assert published("server/accuracy") == [True]
    assert published("server/accuracy_other") == [False]


def test_an_upper_bound_that_was_to_be_tested_is_named(tmp_path):
    for method, scheme in (("Joint", "joint"), ("FedAvg", "dirichlet")):
        for seed in range(2):
            partition = {"scheme": scheme, **({"num_clients": 1} if scheme == "joint" else {})}
            fabricate(tmp_path / f"{method}{seed}", 0.5, labels={"method": method}, seed=seed, partition=partition)
    text = document(make_report([tmp_path], {"against": "Joint"}), {}, [])
    assert "Nothing was tested: Joint was trained on all examples together; upper bounds are not tested." in text


# --- figures ----------------------------------------------------------------------------------------------------------


def test_more_columns_than_bars_can_stand_for_are_told(tmp_path):
    for index in range(70):
        fabricate(tmp_path / f"{index}", 0.5, labels={"method": "A", "lr": index / 100})
    _, made, missing = drawn([tmp_path], {"figures": ["bars"], "columns": ["lr"]})
    assert made == {}
    assert "more than 60 columns" in missing["bars"]


def test_an_infinite_label_is_a_name(tmp_path):
    for alpha in ("inf", 0.1, 1.0):
        fabricate(tmp_path / str(alpha), 0.5, labels={"method": "A", "alpha": alpha})
    _, made, missing = drawn([tmp_path], {"figures": ["bars", "lines"], "columns": ["alpha"]})
    assert "bars" in made
    assert "lines" in missing


def test_a_dollar_sign_begins_no_formula(tmp_path):
    odd = "$5% to $x_$"
    for seed in range(2):
        for method in ("A", odd):
            for alpha in (0.1, odd):
                labels = {"method": method, "alpha": alpha}
                fabricate(tmp_path / f"{len(method)}{alpha == 0.1}{seed}", 0.5, labels=labels, seed=seed)
    figures = ["bars", "ranks", "curves", "gains"]
    path = write(make_report([tmp_path], {"figures": figures, "baseline": "A", "columns": ["alpha"]}), tmp_path / "out")
    assert {file.stem for file in (path.parent / "figures").glob("*.png")} == set(figures)
    _, made, _ = drawn([tmp_path], {"figures": figures, "baseline": "A", "columns": ["alpha"]})
    texts = [text.get_text() for figure in made.values() for text in figure.findobj(Text)]
    assert any("$" in text for text in texts)
    assert not [text for text in texts if "$" in text.replace(r"\$", "")]
    assert png(class_picture(np.ones((3, 2), int), ["plain", odd]))


def test_a_run_without_client_rows_has_an_empty_panel(tmp_path):
    folder = fabricate(tmp_path / "a", 0.5, labels={"method": "A"}, clients=3)
    (part,) = RunFolder(folder).client_parts()
    pq.write_table(pq.read_table(part).slice(0, 0), part)
    _, made, _ = drawn([tmp_path], {"figures": ["weights"]})
    assert len(made["weights"].axes[0].lines) == 0
    assert png(class_picture(np.zeros((2500, 2), int), ["a", "b"]))


def test_maps_paint_less_blue_where_less_is_better(tmp_path):
    for method, loss in (("A", 0.5), ("B", 0.4)):
        for alpha in (0.1, 1.0):
            labels, losses = labels_of(method, alpha), {"server/loss": [loss] * 10}
            fabricate(tmp_path / f"{method}{alpha}", 0.5, labels=labels, progress=losses)
    _, made, _ = drawn(
        [tmp_path], {"metric": "server/loss", "baseline": "A", "figures": ["gains"], "columns": ["alpha"]}
    )
    axes = made["gains"].axes[0]
    assert axes.get_title().endswith("difference in server/loss to A")
    assert {text.get_text() for text in axes.texts} == {"−0.1"}
    image = axes.images[0]
    red, _, blue, _ = image.cmap(image.norm(-0.1))
    assert blue > red


@pytest.mark.parametrize("kind", ["curves", "weights"])
def test_more_panels_than_a_page_holds_make_further_figures(kind, tmp_path):
    for index in range(15):
        fabricate(tmp_path / f"{index}", 0.5, labels={"method": "A", "lr": index / 10}, clients=3)
    _, made, _ = drawn([tmp_path], {"figures": [kind], "columns": ["lr"]})
    assert [len(figure.axes) for figure in made.values()] == [12, 3]


def test_bars_of_uneven_grids_name_the_alpha_of_each_group(tmp_path):
    for dataset, alphas in (("CIFAR-10", (0.1, 1.0)), ("CIFAR-100", (0.05, 1.0))):
        for alpha in alphas:
            labels = {**labels_of("A", alpha), "dataset": dataset}
            data = {"data": {"name": dataset.replace("-", "").lower()}}
            fabricate(tmp_path / f"{dataset}{alpha}", 0.5, labels=labels, model={"name": "resnet18"}, **data)
    _, made, _ = drawn([tmp_path], {"figures": ["bars"], "columns": ["alpha"]})
    (axes,) = made["bars"].axes
    assert axes.get_title() == ""
    names = ["".join(tick.get_text().split()) for tick in axes.get_xticklabels()]
    assert names == ["CIFAR-10ResNet-18,alpha=0.1", "CIFAR-100ResNet-18,alpha=0.05"]


def test_strategies_of_several_methods_stand_apart(tmp_path):
    for method, less in (("FedVG", 0.0), ("loss", 0.3)):
        for granularity in ("model", "block"):
            labels = {"method": method, "granularity": granularity}
            fabricate(tmp_path / f"{method}{granularity}", 0.6 - less, labels=labels)
    _, made, _ = drawn([tmp_path], {"figures": ["strategies"]})
    (axes,) = made["strategies"].axes
    assert len(axes.patches) == 4
    names = [" ".join(tick.get_text().split()) for tick in axes.get_xticklabels()]
    assert names == [f"digits cnn, method = {name}" for name in ("FedVG", "loss")]


def test_one_evaluation_is_a_point(tmp_path):
    fabricate(tmp_path / "a", 0.5, rounds=1, labels={"method": "A"})
    _, made, _ = drawn([tmp_path], {"figures": ["curves"]})
    assert made["curves"].axes[0].lines[0].get_marker() == "o"


def test_figures_of_an_earlier_report_go_and_other_files_stay(tmp_path):
    fabricate(tmp_path / "a", 0.5, labels={"method": "A"})
    (tmp_path / "out" / "figures").mkdir(parents=True)
    for name in ("ranks", "curves_2", "mine"):
        (tmp_path / "out" / "figures" / f"{name}.png").write_bytes(b"")
    write(make_report([tmp_path / "a"], {"figures": ["bars"]}), tmp_path / "out")
    assert {file.stem for file in (tmp_path / "out" / "figures").iterdir()} == {"bars", "mine"}
