"""Any metric of a run in a report, the cost of a target accuracy, Holm's adjustment, and bounds that are not tested."""

from __future__ import annotations

import csv
import itertools
import math

import numpy as np
import pytest

from raysim.base import direction
from raysim.base.direction import DIRECTIONS, direction_of
from raysim.base.errors import ConfigError, DataError
from raysim.reporting import figures
from raysim.reporting.document import conclusions
from raysim.reporting.drawing import draw_figures
from raysim.reporting.gather import make_report
from raysim.reporting.measure import ReportMetric
from raysim.reporting.render import HOLM, PUBLISHED, lines_of, p_values
from raysim.reporting.report import write
from raysim.reporting.runs import find_runs
from raysim.reporting.significance import holm
from tests.support.report_runs import fabricate, labels_of, sweep


def run_with(folder, **more):
    fabricate(folder, 0.5, labels=labels_of("FedVG", 0.1), **more)
    (run,) = find_runs([folder])
    return run


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_a_column_of_progress_is_read_in_three_ways(tmp_path):
    values = [0.2, 0.9, 0.4, 0.4, 0.3, 0.5, 0.6, 0.7, 0.8, 0.6, *[0.5] * 8, 0.3, 0.4]
    run = run_with(tmp_path / "a", rounds=20, progress={"server/macro_f1": values, "train/loss": [2.0, *[0.25] * 19]})
    ways = {
        name: ReportMetric(name).score(run)
        for name in ("server/macro_f1", "last:server/macro_f1", "best:server/macro_f1")
    }
    assert list(ways.values()) == pytest.approx([40.0, 40.0, 90.0])
    assert ReportMetric("mean_last_10pct:server/macro_f1").score(run) == pytest.approx(35.0)  # 2 of 20 rounds
    assert ReportMetric("best:server/macro_f1", "min").score(run) == pytest.approx(20.0)
    assert (ReportMetric("train/loss").score(run), ReportMetric("best:train/loss", "min").score(run)) == (0.25, 0.25)
    assert ReportMetric("mean:server/macro_f1").score(run) == pytest.approx(100 * np.mean(values))
    assert ReportMetric("server/nothing").score(run) is None


@pytest.mark.parametrize("name", ["server/loss", "mean_last_10pct:server/loss", "mean:server/loss"])
def test_a_run_that_diverged_is_left_out_with_a_note(name, tmp_path):
    good, bad = [2.0] * 9 + [6.0], [2.3, 5.0, "inf", *["nan"] * 7]
    for method, losses in (("FedAvg", good), ("FedVG", bad)):
        fabricate(tmp_path / "runs" / method, 0.5, labels=labels_of(method, 0.1), progress={"server/loss": losses})
    report = make_report([tmp_path / "runs"], {"metric": name})
    assert [cell.labels["method"] for cell in report.cells] == ["FedAvg"]
    assert "`report.metric`: 1 of 2 runs ended with a non-finite number and are left out: FedVG." in report.notes
    write(report, tmp_path / "out")
    with pytest.raises(DataError, match="no run has a finite"):
        make_report([tmp_path / "runs" / "FedVG"], {"metric": name})


def test_a_summary_that_is_not_a_number_wins_nothing(tmp_path):
    for method, number in (("A", math.nan), ("B", 0.7), ("C", 0.6)):
        fabricate(tmp_path / "runs" / method, 0.5, labels=labels_of(method, 0.1), summary={"auroc": number})
    report = make_report([tmp_path / "runs"], {"metric": "auroc", "figures": ["bars"]})
    (table,) = report.tables
    assert {row: mark for (row, _), mark in table.marks.items()} == {"B": "best", "C": "second"}
    write(report, tmp_path / "out")


def test_metrics_of_two_directions_are_no_table(tmp_path):
    run = run_with(tmp_path / "a", progress={"server/loss": 1.0})
    with pytest.raises(ConfigError, match=r"report\.metrics: mixes .* server/loss \(lower is better\)"):
        make_report(
            [run.folder], {"metrics": {"what": {"acc": "server/accuracy", "loss": "server/loss"}}, "columns": ["what"]}
        )


@pytest.mark.parametrize(
    ("name", "better"),
    [
        *(
            (name, "min")
            for name in ("seconds_total", "seconds_per_round", "best_mae", "server/validation_mae", "server/mae")
        ),
        *((name, "max") for name in ("server/accuracy", "server/accuracy_domain_s", "server/accuracy_lossy")),
        *((name, "min") for name in ("backdoor/success", "comm/up_mb", "server/loss_lossy", "system/round_s")),
    ],
)
def test_times_and_errors_are_better_when_small(name, better):
    assert direction_of(name) == better


@pytest.mark.parametrize("name", ["server/mse", "server/error", "best_brier", "clients/nll_worst", "server/accuracy2"])
def test_an_own_metric_that_declares_no_direction_is_asked_for_it(name, monkeypatch):
    bare = name.rpartition("/")[2].removeprefix("best_").removesuffix("_worst")
    with pytest.raises(
        ConfigError, match=rf"tune.metric: '{bare}\w*' does not declare a better direction; use another"
    ):
        direction_of(name, key="tune.metric")
    with pytest.raises(ConfigError, match=r"report\.mode: .* set report\.mode to max or min, or set"):
        direction_of(name, key="report.mode")
    monkeypatch.setitem(DIRECTIONS, bare, "min")
    assert (direction_of(name), direction_of(name, "max")) == ("min", "max")


@pytest.mark.parametrize("name", ["accuracy_gap", "loss_ratio"])
def test_an_own_metric_is_not_taken_for_the_one_that_its_name_begins_with(name, monkeypatch):
    monkeypatch.setattr(direction, "DIRECTIONS", dict(DIRECTIONS))
    direction.declare(name, None)
    with pytest.raises(ConfigError, match=f"'{name}' does not declare"):
        direction_of(f"server/{name}")
    direction.declare("accuracy", None)
    assert direction_of("server/accuracy") == "max"


def test_the_mean_of_late_rounds_is_that_of_the_summary(tmp_path):
    run = run_with(tmp_path / "a", rounds=25, progress={"server/auroc": ["", 0.1] * 12 + [0.9]})
    assert ReportMetric("mean_last_10pct:server/auroc").score(run) == pytest.approx(
        100 * (0.1 + 0.9) / 2
    )  # rounds 22, 23, 24
    late = run_with(tmp_path / "b", rounds=25, progress={"server/auroc": [0.2] * 20 + [""] * 5})
    assert ReportMetric("mean_last_10pct:server/auroc").score(late) == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("name", "is_share", "is_accuracy"),
    [
        ("accuracy_at_best_validation", True, True),
        ("server/accuracy", True, True),
        ("mean_last_10pct:server/accuracy_cifar10_1_v4", True, True),
        ("server/accuracy_domain_sketch", True, False),
        ("server/balanced_accuracy", True, False),
        ("clients/accuracy_worst", True, False),
        ("server/macro_f1", True, False),
        ("server/auroc", True, False),
        ("server/expected_calibration_error", True, False),
        ("server/loss", False, False),
        ("seconds_total", False, False),
    ],
)
def test_shares_are_told_in_percent_and_only_accuracies_stand_beside_published_ones(name, is_share, is_accuracy):
    metric = ReportMetric(name)
    assert (metric.is_share, metric.is_accuracy) == (is_share, is_accuracy)
    assert metric.axis.endswith(" (%)") == is_share


def test_a_report_of_another_metric(tmp_path):
    for method, f1 in (("FedAvg", 0.4), ("FedVG", 0.3)):
        more = {"summary": {"accuracy_at_best_validation": f1 + 0.1}, "progress": {"server/macro_f1": [f1] * 10}}
        fabricate(tmp_path / "r" / method, 0.5, labels=labels_of(method, 0.1), **more)
    given = {"published": ["fedvg_table_A3"], "columns": ["alpha"], "figures": ["bars", "curves"]}
    report = make_report([tmp_path / "r"], {**given, "metric": "server/macro_f1"})
    assert [line for line, _ in lines_of(report.tables[0])] == ["FedAvg", "FedVG"]  # no published lines
    text = write(report, tmp_path / "out").read_text()
    assert text.startswith("# r: last value of server/macro_f1\n")
    assert "## Last value of server/macro_f1, in %: mean" in text
    assert "| FedAvg | **40.00** |" in text
    assert "published number beside" not in text
    with open(tmp_path / "out" / "table.csv", newline="") as file:
        assert [row["metric"] for row in csv.DictReader(file)] == ["server/macro_f1_pct"] * 2
    drawn = draw_figures(report, on_missing=pytest.fail)
    assert drawn["bars"].axes[0].get_ylabel().startswith("server/macro_f1 (%)")
    assert list(drawn["curves"].axes[0].lines[0].get_ydata()) == pytest.approx([40.0] * 10)
    report = make_report([tmp_path / "r"], {**given, "metric": "accuracy_at_best_validation"})
    assert [line for line, _ in lines_of(report.tables[0])].count(PUBLISHED) == 2
    assert report.tables[0].cells["FedAvg", (0.1,)].mean == pytest.approx(50.0)


def test_a_metric_of_which_less_is_better(tmp_path):
    for method, loss in (("FedAvg", 0.0512), ("FedVG", 0.0509)):
        fabricate(tmp_path / method, 0.5, labels=labels_of(method, 0.1), progress={"server/loss": [loss] * 10})
    report = make_report([tmp_path], {"metric": "server/loss", "mode": "min", "columns": ["alpha"]})
    (table,) = report.tables
    assert table.marks == {("FedVG", (0.1,)): "best", ("FedAvg", (0.1,)): "second"}
    assert [entry.text for _, (entry,) in lines_of(table)] == ["0.0512", "0.0509"]
    assert (
        draw_figures(report, on_missing=pytest.fail)["bars"].axes[0].get_ylabel()
        == "server/loss; the axis begins at 0.0507"
    )


def test_an_unknown_metric_names_the_nearest(tmp_path):
    run_with(tmp_path / "a", progress={"server/macro_f1": [0.5] * 10})
    with pytest.raises(DataError, match=r"run has no server/makro_f1 in .*Did you mean 'server/macro_f1'"):
        make_report([tmp_path], {"metric": "server/makro_f1"})


def test_runs_that_did_not_record_the_metric_are_named_and_left_out(tmp_path):
    fabricate(tmp_path / "a", 0.5, labels=labels_of("FedAvg", 0.1), progress={})
    for alpha in (0.1, 1.0):
        fabricate(tmp_path / f"b{alpha}", 0.5, labels=labels_of("FLFA", alpha), progress={"flfa/error": [0.25] * 10})
    report = make_report([tmp_path], {"metric": "flfa/error", "mode": "min", "columns": ["alpha"]})
    (table,) = report.tables
    assert {name: cell.mean for name, cell in table.cells.items()} == {("FLFA", (0.1,)): 0.25, ("FLFA", (1.0,)): 0.25}
    assert "`report.metric`: 1 of 3 runs did not record it and are left out: FedAvg." in report.notes
    assert len(report.runs) == 3


def test_one_run_gives_a_cell_for_each_of_several_metrics(tmp_path):
    """FLFA's table 2: one model, two test sets."""
    columns = {
        f"server/accuracy_cifar10_1_{version}": [0.1] * 9 + [score] for version, score in (("v4", 0.5), ("v6", 0.6))
    }
    labels = {"dataset": "CIFAR-10.1", "model": "MobileNetV2", "method": "FedAvg"}
    fabricate(tmp_path / "a", 0.7, labels=labels, data={"name": "cifar10"}, progress=columns)
    metrics = {"version": {version: f"mean_last_10pct:server/accuracy_cifar10_1_{version}" for version in ("v4", "v6")}}
    report = make_report([tmp_path], {"metrics": metrics, "columns": ["version"], "published": ["flfa_table_02"]})
    (table,) = report.tables
    assert {column: table.cells["FedAvg", column].mean for column in table.columns} == {("v4",): 50.0, ("v6",): 60.0}
    assert {column: table.cells["FedAvg", column].published.value for column in table.columns} == {
        ("v4",): 52.61,
        ("v6",): 52.82,
    }
    assert "v4: mean of server/accuracy_cifar10_1_v4 over the last 10 % of the rounds" in report.metric
    assert report.axis == "accuracy (%)"


def test_an_axis_names_what_several_metrics_share(tmp_path):
    names = {"mean": "clients/personal_accuracy_mean", "worst tenth": "clients/personal_accuracy_p10"}
    fabricate(
        tmp_path / "a", 0.7, labels=labels_of("FedAvg", 0.1), progress={name: [0.5] * 10 for name in names.values()}
    )
    report = make_report([tmp_path / "a"], {"metrics": {"accuracy": names}, "columns": ["accuracy"]})
    axes = draw_figures(report, on_missing=pytest.fail)["bars"].axes[0]
    assert axes.get_ylabel().replace("\n", " ").startswith("clients/personal_accuracy (%)")


# --- columns ----------------------------------------------------------------------------------------------------------


def test_a_metric_beside_several_is_refused(tmp_path):
    root = sweep(tmp_path / "a", {("FedAvg", 0.1): [0.5]})
    given = {"metric": "best_accuracy", "metrics": {"seen": {"last": "accuracy"}}}
    with pytest.raises(ConfigError, match=r"report\.metric: has no effect with report\."):
        make_report([root], given)


def test_an_ignored_label_makes_no_column_but_finds_its_published_cell(tmp_path):
    base = {"dataset": "CIFAR-10", "model": "MobileNetV2", "method": "FedAvg"}
    fabricate(tmp_path / "bp", 0.6, labels={**base, "variant": "BP"})
    fabricate(tmp_path / "fa", 0.7, labels={**base, "variant": "FLFA", "select": "lowest"})
    given = {"rows": "variant", "published": ["flfa_table_04"]}
    assert len(make_report([tmp_path], given).tables[0].columns) == 2
    (table,) = make_report([tmp_path], {**given, "ignore": ["select"]}).tables
    assert table.columns == ((),)
    assert {row: cell.published.value for (row, _), cell in table.cells.items()} == {"BP": 65.81, "FLFA": 68.05}


def test_runs_that_differ_in_an_ignored_label_alone_are_pooled(tmp_path):
    for place, (form, mu) in enumerate(itertools.product(("masked", "literal"), (0.1, 1.0, 10.0))):
        for seed in range(2):
            labels = {"form": form, "mu": mu, "seed": seed}
            fabricate(tmp_path / f"{place}-{seed}", 0.5 + place / 100 + seed / 10, labels=labels, seed=seed)
    report = make_report([tmp_path], {"rows": "form", "ignore": ["mu"], "baseline": "masked"})
    (table,) = report.tables
    assert {row: (cell.n, round(cell.mean, 6)) for (row, _), cell in table.cells.items()} == {
        "masked": (6, 56.0), "literal": (6, 59.0),
    }  # fmt: skip
    assert len({*table.cells["masked", ()].folders.values()}) == 6
    assert report.by_seed["digits / cnn"][0].result.num_pairs == 6  # by mu and seed


def test_a_column_label_that_only_the_recipe_asks_for_becomes_a_note(tmp_path):
    root = sweep(tmp_path / "s", {("FedVG", 0.1): [0.5]}, {"columns": ["alpha", "select"], "figures": []})
    report = make_report([root], {})
    assert report.tables[0].names == ("alpha",)
    assert report.notes == ["`report.columns`: no run has a label select."]
    with pytest.raises(ConfigError, match="no run has a label 'select'"):
        make_report([root], {"columns": ["select"]})


# --- tests ------------------------------------------------------------------------------------------------------------


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.6]) == [1.0, 1.0]
    assert holm([]) == []


def test_holm_is_the_closed_test_of_bonferroni():
    """Marcus et al. 1976: p of a hypothesis is the largest over all sets of hypotheses with it; of a set |S| min p."""
    rng = np.random.default_rng(0)
    for _ in range(5):
        p = rng.uniform(0, 0.3, 6)
        subsets = [s for size in range(1, 7) for s in itertools.combinations(range(6), size)]
        closed = [max(min(1.0, len(s) * min(p[list(s)])) for s in subsets if i in s) for i in range(6)]
        assert holm(p) == pytest.approx(closed)


def test_p_values_have_their_adjusted_ones_below(tmp_path):
    gains = {"A": 0.05, "B": 0.05, "C": -0.05}
    scores = {(name, 0.1): [0.5 - gain + seed / 1000 for seed in range(6)] for name, gain in gains.items()}
    root = sweep(tmp_path / "s", {**scores, ("FedVG", 0.1): [0.5 + seed / 500 for seed in range(6)]})
    report = make_report([root], {"against": "FedVG", "columns": ["alpha"]})
    (found,) = report.by_seed.values()
    _, lines = p_values(found, ["alpha"], report.measure)
    assert [name for name, _ in lines] == ["FedVG > A", HOLM, "FedVG > B", HOLM, "FedVG > C", HOLM]
    told = [(entry.text, entry.mark) for _, (entry,) in lines]
    assert told[:4] == [("0.0156", "best"), ("0.0469", "best")] * 2  # 1/64, and three times that
    assert told[4:] == [("1.0000", ""), ("1.0000", "")]
    assert "Adjusted for all 3 tests (Holm), p stays below the level in 2 of these cases." in "\n".join(
        conclusions(report)
    )


def test_upper_bounds_are_not_tested(tmp_path):
    sweep(tmp_path / "s", {("FedAvg", 0.1): [0.5] * 5, ("FedVG", 0.1): [0.6] * 5}, {"columns": ["alpha"]})
    for seed in range(5):
        labels = labels_of("Joint", 0.1, seed)
        fabricate(tmp_path / "s" / f"j{seed}", 0.9, labels=labels, seed=seed, partition={"scheme": "joint"})

    def tested(**given):
        return {
            (item.method, item.other) for found in make_report([tmp_path], given).by_seed.values() for item in found
        }

    assert tested(against="FedVG") == {("FedVG", "FedAvg")}
    assert tested(baseline="FedAvg") == {("FedVG", "FedAvg")}
    assert tested(against="Joint") == tested(baseline="Joint") == set()
    text = "\n".join(conclusions(make_report([tmp_path], {"against": "FedVG"})))
    assert "Wilcoxon" in text
    assert "Joint" not in text.split("Wilcoxon")[1]


def test_sets_weigh_equally_in_the_shares_of_layers(tmp_path):
    """One set has ten times the rounds of the other, and chooses another layer in all of them."""
    for dataset, rounds, chosen in (("CIFAR-10", 10, 0), ("BloodMNIST", 1, 1)):
        labels = {"dataset": dataset, "model": "MobileNetV2", "method": "FLFA", "strategy": "lowest"}
        folder = fabricate(tmp_path / dataset, 0.5, labels=labels, data={"name": dataset.casefold().replace("-", "")})
        (folder / "arrays").mkdir()
        for index in range(rounds):
            counts = {
                "flfa.selected": np.eye(2, dtype=int)[chosen],
                "flfa.selected:columns": np.array(["stem", "head"]),
            }
            np.savez(folder / "arrays" / f"round_{index:05}.npz", **counts)
    given = {"rows": "strategy", "columns": ["dataset"], "figures": ["selection"]}
    (extra,) = make_report([tmp_path], given).extras
    assert {name: entry.text for name, (entry,) in extra.lines} == {"stem": "50.00", "head": "50.00"}


def test_training_time_needs_a_second_round(tmp_path):
    for method in ("FedAvg", "FedVG"):
        fabricate(tmp_path / method, 0.5, rounds=1, labels=labels_of(method, 0.1), progress={"system/train_s": 1.0})
    assert make_report([tmp_path], {"time": "FedAvg"}).extras == []


@pytest.mark.parametrize(
    ("metric", "words", "column"),
    [
        ("mean_last_10pct_rmse", "mean rmse of the last 10 % of the rounds", "server/rmse"),
        ("best_accuracy", "best accuracy of the evaluated rounds", "server/accuracy"),
        ("accuracy_at_best_validation", "accuracy at the round of the best validation accuracy", "server/accuracy"),
        ("rounds", "rounds", "server/rounds"),
        ("best:server/rmse_domain_red", "best value of server/rmse_domain_red", "server/rmse_domain_red"),
    ],
)
def test_numbers_of_a_run_are_named_in_words_whatever_the_task(metric, words, column):
    assert ReportMetric(metric).words == words
    assert ReportMetric(metric).column == column


def test_curves_of_several_numbers_show_each_its_own_column(tmp_path):
    progress = {"server/rmse": [3.0, 2.0], "server/rmse_domain_red": [9.0, 8.0]}
    named = {"all": "server/rmse", "red": "server/rmse_domain_red"}
    for seed in (0, 1):
        fabricate(tmp_path / str(seed), 0.5, labels={"method": "A"}, rounds=2, progress=progress, seed=seed)
    report = make_report([tmp_path], {"metrics": {"domain": named}, "columns": ["domain"]})
    (figure,) = figures.curves(report)
    drawn = {axes.get_title(): axes.lines[0].get_ydata().tolist() for axes in figure.axes if axes.lines}
    assert drawn == {"domain = all": [3.0, 2.0], "domain = red": [9.0, 8.0]}
