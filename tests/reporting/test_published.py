"""Published numbers: read, matched with runs by their labels, and found by every trial of a recipe."""

from __future__ import annotations

import pytest

from raysim.base.errors import ConfigError, DataError
from raysim.config import parse_report, read_config
from raysim.config.sweep import grid
from raysim.reporting.drawing import figure_faults
from raysim.reporting.gather import make_report
from raysim.reporting.published import FOLDER, is_same, match, published
from raysim.reporting.render import lines_of
from raysim.reporting.report import write
from raysim.reporting.runs import compared, row_methods
from tests.support.report_runs import sweep


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


def test_a_line_that_is_not_whole_is_named(tmp_path):
    head = "paper,table,dataset,model,method,setting,metric,value,std\n"
    (tmp_path / "mine.csv").write_text(f"{head}P,1,CIFAR-10,CNN,FedAvg,,accuracy_pct,60.0\n# my numbers\n")
    with pytest.raises(DataError, match=r"line 3 has fewer columns than 9 in .*mine\.csv"):
        published(str(tmp_path / "mine.csv"))
    (tmp_path / "mine.csv").write_text(f"{head}P,1,CIFAR-10,CNN,FedAvg,,accuracy_pct,60.0\n")
    assert published(str(tmp_path / "mine.csv"))[0].value == 60.0  # nobody has to give a deviation


def test_a_published_dash_is_printed_and_has_no_difference(tmp_path):
    (tmp_path / "mine.csv").write_text(
        "paper,table,dataset,model,method,setting,metric,value,std\n"
        "P,1,CIFAR-10,ResNet-18,FedAvg,alpha=0.1,accuracy_pct,,\nP,1,CIFAR-10,ResNet-18,FedVG,alpha=0.1,accuracy_pct,60.0,\n"
    )
    root = sweep(tmp_path / "dash", {("FedAvg", 0.1): [0.5], ("FedVG", 0.1): [0.61]})
    report = make_report([root], {"published": [str(tmp_path / "mine.csv")], "columns": ["alpha"]})
    assert report.tables[0].cells["FedAvg", (0.1,)].difference is None
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
    assert len(tables) == 31
    assert sum(map(len, tables.values())) == 1742
    missing = [cell for cells in tables.values() for cell in cells if cell.text == "-"]
    assert missing
    assert all(cell.value is None for cell in missing)
    for name in ("fedvg_table_A7", "flfa_table_01", "livar_table_1", "univarfl_table_1"):
        assert make_report([], {"published": [name]}).tables


def test_unknown_published_table_names_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'fedvg_table_A3'"):
        published("fedvg_tabel_A3")


RECIPES = sorted(FOLDER.parents[1].rglob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_ask_for_reports_that_can_be_made(path):
    group = parse_report(read_config(path).get("report"), str(path))
    assert all(published(name) for name in group.published)
    assert not figure_faults(group.figures or ())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["table_A3", "table_A4", "table_A7", "table_A8", "figure_6", "figure_8"])
def test_every_trial_of_a_recipe_finds_its_published_cell(name):
    path = FOLDER.parent / "fedvg" / f"{name}.yaml"
    raw = read_config(path)
    theirs = [cell for table in raw["report"]["published"] for cell in published(table)]
    found = set()
    for trial in grid(raw, str(path)):
        labels = {"method": row_methods(trial.raw), **trial.raw["labels"]}
        del labels["seed"]
        cell = match(theirs, labels)
        assert cell is not None, labels
        found.add(id(cell))
    if name.startswith("table_A"):
        assert len(found) == len(theirs)


def test_a_recipes_published_table_compares_the_rows_that_the_recipe_compares():
    (table,) = make_report([], {"published": ["paper:flfa/table_4"]}).tables
    assert table.rows == ("BP", "FLFA", "FLFA* (fixed random B)", "FLFA-dagger (no scaling)")
    assert table.columns == ((),)
    report = make_report([], {"published": ["paper:fedvg/table_A3"]})
    assert report.subject == "FedVG"
    assert make_report([], {"published": ["paper:fedvg/table_A3"], "against": "FedAvg"}).subject == "FedAvg"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fedvg_table_A3", "best accuracy of the evaluated rounds (FedVG)"),
        ("flfa_table_01", "mean accuracy of the last 10 % of the rounds (FLFA)"),
        ("livar_table_1", "accuracy of unnamed rounds (LIVAR)"),
    ],
)
def test_published_numbers_alone_are_headed_by_what_they_are(name, words, tmp_path):
    text = write(make_report([], {"published": [name], "figures": []}), tmp_path).read_text()
    assert f"# {name}: as published, {words}\n" in text
    assert f"## As published, {words}, in %" in text
    assert "after the last round" not in text


def test_flfas_sentences_are_complete():
    """Sections 5.1 and 5.2."""
    cells = {(cell.metric, cell.dataset): cell.value for cell in published("flfa_inline")}
    assert cells["gain_points", "PathMNIST"] == 2.84
    assert cells["separability_ratio_gain_pct", "CIFAR-10"] == 20


def test_what_only_watches_a_run_does_not_define_the_experiment():
    size = {"cohort.size": None, "cohort.fraction": 0.1, "partition.num_clients": 25}
    methods = [{"fedvg": {"mix": "average"}}, "fedavgm", {"diagnostics": {"measures": ["weights"]}}, "keep_factors"]
    assert compared({**size, "methods": methods, "local.lr": 0.1, "name": "mine"}) == {
        "cohort.size": 2,
        "partition.num_clients": 25,
        "methods": [{"fedvg": {"mix": "average"}}, {"fedavgm": {}}],
        "local.lr": 0.1,
    }
