"""The Wilcoxon test: by hand, against scipy, and the paper's own significance claims."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.stats import ttest_rel, wilcoxon

from raysim.reporting.document import conclusions
from raysim.reporting.gather import make_report
from raysim.reporting.published import published
from raysim.reporting.report import write
from raysim.reporting.significance import Effect, effect_of, wilcoxon_greater
from tests.support.report_runs import fabricate, sweep

MAIN = ["fedvg_table_A3", "fedvg_table_A4"]


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
    assert wilcoxon_greater([1.0], [1.0]).p == 1.0
    assert wilcoxon_greater([80.74, 80.75], [80.37, 80.38]).has_ties  # 0.37 twice, but not in floating point


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


def test_effect_by_hand():
    """Differences 1, 2, 3: mean 2, deviation 1, t(2) = 4.3027, half 4.3027 / sqrt(3); d = 2."""
    effect = effect_of([2, 4, 6], [1, 2, 3])
    assert (effect.mean, effect.d, effect.num_pairs) == (2.0, pytest.approx(2.0), 3)
    assert (effect.low, effect.high) == (pytest.approx(2 - 2.4841, abs=1e-3), pytest.approx(2 + 2.4841, abs=1e-3))
    assert not effect.is_certain
    assert effect_of([5.0], [3.0]) == Effect(2.0, None, None, None, 1)
    assert effect_of([2, 4], [1, 2]).d is None  # two differences say little of their deviation
    same = effect_of([0.3, 0.4, 0.5], [0.1, 0.2, 0.3])
    assert (same.d, same.is_certain) == (None, True)  # equal differences have no spread to be measured in


def test_interval_of_the_effect_is_scipys_and_paired():
    rng = np.random.default_rng(0)
    for count in (3, 5, 12):
        left, right = rng.normal(1, 1, count), rng.normal(0, 5, count)
        effect, interval = effect_of(left, right), ttest_rel(left, right).confidence_interval(0.95)
        assert (effect.low, effect.high) == pytest.approx((interval.low, interval.high))
        shift = rng.normal(0, 50, count)  # of both runs of a seed
        moved = effect_of(left + shift, right + shift)
        assert (moved.low, moved.high, moved.d) == pytest.approx((effect.low, effect.high, effect.d))
        assert effect_of(right, left).d == pytest.approx(-effect.d)


def test_report_has_the_differences_below_the_tests(tmp_path):
    root = sweep(tmp_path / "s", {("FedAvg", 0.1): [0.5] * 5, ("FedVG", 0.1): [0.51, 0.52, 0.53, 0.54, 0.55]})
    text = write(
        make_report([root], {"against": "FedVG", "columns": ["alpha"], "figures": []}), tmp_path / "o"
    ).read_text()
    # 1 to 5 points: mean 3, deviation 1.58, t(4) = 2.776
    assert "| FedVG - FedAvg | **+3.00 [+1.04, +4.96], d +1.9** |" in text
    assert "| FedVG \\> FedAvg | **0.0312** |" in text


def test_over_seeds_pairs_runs_of_the_same_seed(tmp_path):
    root = sweep(tmp_path / "s", {("FedAvg", 0.1): [0.5] * 5, ("FedVG", 0.1): [0.51, 0.52, 0.53, 0.54, 0.55]})
    report = make_report([root], {"against": "fedvg", "columns": ["alpha"]})
    (item,) = report.by_seed["CIFAR-10 / ResNet-18"]
    assert (item.result.p, item.result.num_pairs, item.result.is_significant) == (1 / 32, 5, True)
    assert "FedVG is significantly better than FedAvg at alpha = 0.1" in "\n".join(conclusions(report))


def test_few_seeds_are_said_to_be_too_few(runs, tmp_path):
    text = write(make_report([runs], {"figures": []}), tmp_path / "out").read_text()
    assert "fewer than five pairs, no test can reach" in text
    assert "| FedVG \\> FedAvg | 0.1250 (n=3) | 0.5000 (n=1) |" in text


def test_five_seeds_are_not_said_to_be_too_few(tmp_path):
    root = sweep(tmp_path / "s", {("FedAvg", 0.1): [0.5] * 5, ("FedVG", 0.1): [0.51, 0.52, 0.53, 0.54, 0.55]})
    said = " ".join(conclusions(make_report([root], {"against": "fedvg", "columns": ["alpha"]})))
    assert "p < 0.05" in said
    assert "fewer than five pairs" not in said


def test_no_baseline_beats_fedvg_is_computed_on_runs_as_on_published_means(tmp_path):
    """Section 5.1 of FedVG: no baseline significantly outperforms it."""
    said = conclusions(make_report([], {"published": ["fedvg_table_A3", "fedvg_table_A4"], "against": "FedVG"}))
    assert any("In the opposite direction, no row is significantly better than FedVG." in line for line in said)
    up = [0.61, 0.62, 0.63, 0.64, 0.65]
    scores = {("FedVG", 0.1): up, ("FedAvg", 0.1): [value - 0.01 * (1 + value) for value in up]}
    worse = {("FedVG", 1.0): [0.3] * 5, ("FedAvg", 1.0): up}
    for name, values, wanted in (
        ("none", scores, "no row is significantly better than FedVG"),
        ("one", scores | worse, "significantly better than FedVG: FedAvg at alpha = 1"),
    ):
        report = make_report([sweep(tmp_path / name, values, {"columns": ["alpha"]})], {"against": "FedVG"})
        assert any(f"In the opposite direction, {wanted}." in line for line in conclusions(report))


def test_the_command_lines_baseline_goes_before_a_recipes_subject(runs):
    def pairs(given):
        (tests,) = make_report([runs], given).by_seed.values()
        return {(test.method, test.other) for test in tests}

    assert pairs({}) == {("FedVG", "FedAvg"), ("FedVG", "FedProx")}
    assert pairs({"baseline": "fedprox"}) == {("FedAvg", "FedProx"), ("FedVG", "FedProx")}
    assert pairs({"baseline": "FedProx", "against": "FedVG"}) == {("FedVG", "FedAvg"), ("FedVG", "FedProx")}


def test_a_smaller_loss_is_tested_as_the_better_one(tmp_path):
    for name, base in (("low", 0.1), ("high", 0.2)):
        for seed in range(5):
            losses = {"train/loss": base + seed / 100}
            fabricate(tmp_path / "sweep" / f"{name}{seed}", 0.5, labels={"method": name, "seed": seed}, progress=losses)
    report = make_report([tmp_path / "sweep"], {"metric": "train/loss", "against": "low"})
    ((test,),) = report.by_seed.values()
    assert (test.result.p, test.reverse.p) == (1 / 32, 1.0)
    assert test.effect.mean == pytest.approx(-0.1)
    assert "low has the lowest mean in 1 of 1 column" in conclusions(report)[0]


def test_best_is_said_only_of_what_tests_tell_apart_and_ties_are_called_ties(tmp_path):
    near, far = [0.60, 0.61, 0.62, 0.63, 0.64], [0.30, 0.32, 0.33, 0.34, 0.36]
    mixed = [0.63, 0.58, 0.63, 0.61, 0.62]  # the mean is lower by 0.6 points
    alpha = {"columns": ["alpha"]}

    def first(name, values):
        return conclusions(make_report([sweep(tmp_path / name, values, alpha)], {}))[0]

    clear = first("clear", {("A", 0.1): near, ("B", 0.1): far})
    assert "A has the highest mean in 1 of 1 column" in clear
    assert "Best, by tests over seeds against every other row (p < 0.05): A in 1." in clear
    close = first("close", {("A", 0.1): near, ("B", 0.1): mixed, ("C", 0.1): far})
    assert "so no row is called best" in close
    tied = first("tied", {("A", 0.1): near, ("B", 0.1): near[::-1], ("C", 0.1): far})
    assert tied.startswith(
        "A has the highest mean in 0 of 1 column, ties for it in 1 and the second highest in 0; tied: B"
    )
    assert "best" not in tied.casefold()


def test_equal_averages_are_told_together(tmp_path):
    for dataset in ("CIFAR-10", "OrganAMNIST"):
        for method, best in (("A", 0.5), ("B", 0.5), ("C", 0.4)):
            labels = {"dataset": dataset, "model": "ResNet-18", "method": method}
            data = {"name": dataset.replace("-", "").casefold()}
            fabricate(tmp_path / "all" / f"{dataset}{method}", best, labels=labels, data=data)
    report = make_report([tmp_path / "all"], {})
    assert "Highest on average over 2 tables: A and B (50.00 each; next C, 40.00)." in conclusions(report)
    (average,) = report.extras
    assert [entries[0].mark for _, entries in average.lines] == ["best", "best", ""]
