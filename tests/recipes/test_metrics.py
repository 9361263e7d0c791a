"""The number of a run that a recipe's report shows is the one that its paper prints."""

from __future__ import annotations

import pytest
import yaml

from raysim.reporting.gather import make_report, settings
from raysim.reporting.measure import ReportMetric
from raysim.reporting.published import FOLDER, STATED
from raysim.reporting.runs import find_runs
from tests.support.recipe_files import read_recipe
from tests.support.report_runs import fabricate

#: Where a paper does not say which round it prints, ours is the last one.
NOT_SAID = "accuracy"
#: Folder of recipes -> paper.
FOLDERS = {paper.casefold().replace("-", "_"): paper for paper in STATED}
#: Recipes of measurements for which no accuracy is printed: the agreement of the first round's updates, the mean error of
#: the feedback and the mean drift over the rounds.
OTHERS = {"flfa/figure_4": "accuracy", "flfa/feedback_error": "mean", "flfa/layer_drift": "mean:diagnostics/drift"}
RECIPES = [path for path in sorted(FOLDER.parent.glob("*/*.yaml")) if path.stem != "base"]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_recipes_report_shows_what_its_paper_prints(path, tmp_path):
    fabricate(tmp_path / "sweep" / "a", 0.5)
    (tmp_path / "sweep" / "sweep.yaml").write_text(yaml.safe_dump(read_recipe(path)))
    group = settings(find_runs([tmp_path / "sweep"]), {}, "a test")
    printed = STATED[FOLDERS[path.parent.name]]["metric"] or NOT_SAID
    expected = OTHERS.get(f"{path.parent.name}/{path.stem}", printed)
    if group.metrics:  # the same of several test sets
        ways = {ReportMetric(name).way for every in group.metrics.values() for name in every.values()}
        assert ways == {expected.removesuffix("_accuracy")}
    else:
        assert (group.metric or "accuracy") == expected


def test_papers_words_name_the_rounds_of_their_metric():
    words = {paper: stated["words"] for paper, stated in STATED.items()}
    assert "identify the best round" in words["FedVG"]
    assert STATED["FedVG"]["metric"] == "best_accuracy"
    assert "average of the accuracies from the last 10%" in words["FLFA"]
    assert STATED["FLFA"]["metric"] == "mean_last_10pct_accuracy"
    for paper in ("LIVAR", "UniVarFL", "NIID-Bench"):
        assert STATED[paper]["metric"] is None
        assert "round" not in words[paper]


def test_tables_tests_averages_and_curves_of_fedvg_show_the_best_round(tmp_path):
    raw = read_recipe(FOLDER.parent / "fedvg" / "table_A3.yaml")
    for dataset in ("CIFAR-10", "OrganAMNIST"):
        for method, best, last in (("FedAvg", 0.5, 0.9), ("FedVG", 0.6, 0.1)):
            labels = {"dataset": dataset, "model": "ResNet-18", "method": method, "alpha": 0.1, "seed": 0}
            data = {"name": dataset.replace("-", "").casefold()}
            folder = tmp_path / "a3" / f"{dataset}{method}"
            fabricate(folder, best, labels=labels, summary={"accuracy": last}, data=data)
    (tmp_path / "a3" / "sweep.yaml").write_text(yaml.safe_dump(raw))
    report = make_report([tmp_path / "a3"], {})
    assert report.metric == "best accuracy of the evaluated rounds"
    assert [cell.mean for cell in report.tables[0].column_cells((0.1,)).values()] == pytest.approx([50.0, 60.0])
    (test,) = report.by_table
    assert (test.method, test.other) == ("FedVG", "FedAvg")
    assert test.effect.mean == pytest.approx(10.0)
    (average,) = [extra for extra in report.extras if extra.title == "Average over tables"]
    assert [entries[0].text for _, entries in average.lines] == ["50.00", "60.00"]
    assert report.cells[0].published is not None
    given = make_report([tmp_path / "a3"], {"metric": "accuracy"})
    assert given.cells[0].mean == pytest.approx(90.0)
    (tmp_path / "a3" / "sweep.yaml").write_text(yaml.safe_dump({**raw, "report": {"metric": "accuracy"}}))
    assert make_report([tmp_path / "a3"], {}).cells[0].mean == pytest.approx(90.0)


def test_the_direction_of_a_sweep_goes_with_its_metric(tmp_path):
    root = tmp_path / "loss"
    for name, gap in (("a", 0.2), ("b", 0.3)):
        fabricate(root / name, 0.5, labels={"method": name}, progress={"my/loss": gap})
    (root / "sweep.yaml").write_text(yaml.safe_dump({"tune": {"metric": "my/loss"}}))
    measure = make_report([root], {}).measure
    assert (measure.name, measure.mode) == ("my/loss", "min")
    assert make_report([root], {"metric": "accuracy"}).measure.mode == "max"


def test_the_command_line_goes_before_several_metrics_of_a_recipe(tmp_path):
    fabricate(tmp_path / "sweep" / "a", 0.5)
    raw = read_recipe(FOLDER.parent / "flfa" / "table_2.yaml")
    (tmp_path / "sweep" / "sweep.yaml").write_text(yaml.safe_dump(raw))
    assert make_report([tmp_path / "sweep"], {"metric": "best_accuracy"}).metric.startswith("best accuracy")
