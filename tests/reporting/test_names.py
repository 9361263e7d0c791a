"""Whether a run is what its labels say: printed names, recipes, what a scaled run is called, and runs made twice."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from raysim.base.errors import DataError
from raysim.base.settings import assign
from raysim.config import Config
from raysim.config.overlays import layered
from raysim.config.sweep import grid
from raysim.reporting import runs
from raysim.reporting.contents import best_on_average
from raysim.reporting.document import conclusions, document
from raysim.reporting.drawing import draw_figures
from raysim.reporting.gather import make_report
from raysim.reporting.published import FOLDER, published
from raysim.reporting.runs import ReportedRun, changed_settings, find_runs, label, misnamed
from tests.support.recipe_files import read_recipe
from tests.support.report_runs import fabricate, labels_of

RECIPES = sorted(
    path for path in FOLDER.parent.glob("*/*.yaml") if (read_recipe(path).get("tune") or {}).get("param_space")
)
VIT = {"name": "timm:vit_base_patch16_224.augreg_in21k", "pretrained": "default"}


def claim(dataset, model, data, net):
    """A run with these labels, on that set and network."""
    config = Config.model_validate({"data": {"name": data}, "model": net}).model_dump(mode="json")
    return ReportedRun(Path(data), "finished", config, {}, {}, {"dataset": dataset, "model": model}, 0)


def runs_of(path, *, is_scaled=False, **more):
    """The trials of a recipe with its first seed, as finished runs; keys in `more` were changed on the command line."""
    raw = read_recipe(path)
    if "seed" in raw["tune"]["param_space"] and not is_scaled:
        raw["tune"]["param_space"]["seed"] = {"grid_search": [0]}
    found = []
    for index, trial in enumerate(grid(layered(raw, {}, str(path), is_scaled=True) if is_scaled else raw, str(path))):
        for key, value in more.items():
            assign(trial.raw, key, value)
        checked = Config.model_validate(trial.raw)
        config = checked.model_dump(mode="json")
        config["data"]["split"] = "fraction" if checked.data.asks_for_fractions else config["data"]["split"]
        labels = {key: value for key, value in trial.raw["labels"].items() if key != "seed"}
        found.append(ReportedRun(Path(str(index)), "finished", config, {}, {}, labels, 0))
    return found


def tables_of(path):
    return (read_recipe(path).get("report") or {}).get("published", [])


def deviations(path, runs):
    return changed_settings(
        label(runs), [cell for name in tables_of(path) for cell in published(name)], tables_of(path)
    )


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "data"),
    [("CIFAR-10", "cifar10"), ("FMNIST", "fashion_mnist"), ("DermaMNIST", "dermamnist_224"), ("my set", "cifar10")],
)
def test_a_set_bears_its_printed_name_out(dataset, data):
    assert misnamed(label([claim(dataset, "mine", data, {"name": "cnn"})])) == []


@pytest.mark.parametrize(
    ("dataset", "data"),
    [("CIFAR-100", "cifar10"), ("CIFAR-10", "cifar100"), ("COVID19", "covid19_radiography"), ("PACS", "pacs2")],
)
def test_another_set_does_not_though_its_name_is_in_it(dataset, data):
    assert misnamed(label([claim(dataset, "mine", data, {"name": "cnn"})])) == [f"{dataset} (ran on {data})"]


@pytest.mark.parametrize(
    ("model", "net"),
    [
        ("ViT-B/16 (IN-21k)", VIT),
        ("ViT-B/16 (IN-21k)", {**VIT, "pretrained": "weights.safetensors", "lora": {"rank": 16}}),
        ("small CNN", {"name": "univarfl_cnn", "projector_width": 256}),
        ("ResNet-18", {"name": "resnet18", "stem": "small"}),
        ("not stated", {"name": "cnn"}),
        ("my own", {"name": "cnn"}),
    ],
)
def test_a_network_bears_its_printed_name_out(model, net):
    assert misnamed(label([claim("mine", model, "digits", net)])) == []


@pytest.mark.parametrize(
    ("model", "net"),
    [
        ("ViT-B/16 (IN-21k)", {**VIT, "pretrained": None}),
        ("ViT-B/16 (IN-21k)", {"name": "vit"}),
        ("ViT-B/16", {"name": "vit"}),
        ("small CNN", {"name": "cnn"}),
        ("small CNN or ResNet-18 (text names both)", {"name": "cnn"}),
    ],
)
def test_another_network_does_not(model, net):
    assert misnamed(label([claim("mine", model, "digits", net)])) == [f"{model} (was {net['name']})"]


# --- recipes ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_no_run_of_a_recipe_is_another_experiment_and_every_scaled_one_is(path):
    runs = runs_of(path)
    assert misnamed(label(runs)) == []
    assert deviations(path, runs) == []
    small = runs_of(path, is_scaled=True)
    assert all(misnamed([run]) for run in label(small))
    if tables_of(path) and (path.parent.name, path.stem) != ("flfa", "table_3"):  # its scaled set is none of that table
        assert "rounds = 2" in deviations(path, small)[0]  # what was scaled is named beside published numbers
    assert all(run.labels["dataset"] == run.config["data"]["name"] for run in label(small))


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [path for path in RECIPES if tables_of(path)], ids=lambda p: f"{p.parent.name}/{p.stem}"
)
def test_a_changed_recipe_with_published_numbers_says_so(path):
    whole = runs_of(path)[0].config["rounds"]
    assert deviations(path, runs_of(path, rounds=3))[0] == f"rounds = 3 (recipe: {whole})"


def test_what_moves_no_result_is_no_change():
    path = FOLDER.parent / "flfa" / "table_8.yaml"
    free = {"seed": 7, "data.root": "/elsewhere", "resources.trainers": 4, "model.pretrained": None, "storage": "there"}
    assert deviations(path, runs_of(path, **free)) == []
    (run, *_) = runs_of(path)
    config = {
        **run.config,
        "cohort": {"size": 10, "fraction": None},
        "methods": ["diagnostics", *run.config["methods"]],
    }
    assert deviations(path, [ReportedRun(run.folder, "finished", config, {}, {}, run.labels, 0)]) == []
    (told,) = deviations(
        path, [ReportedRun(run.folder, "finished", {**config, "cohort": {"size": 5}}, {}, {}, run.labels, 0)]
    )
    assert told == "cohort.size = 5 (recipe: 10)"


def test_a_split_that_a_run_of_the_recipe_decided_itself_is_no_change():
    path = FOLDER.parent / "fedvg" / "table_A3.yaml"
    run, *_ = runs_of(path)
    assert "split" not in read_recipe(path)["data"]
    for split, told in (("fraction", []), ("official", ["data.split = official (recipe: fraction)"])):
        config = {**run.config, "data": {**run.config["data"], "split": split}}
        assert deviations(path, [ReportedRun(run.folder, "finished", config, {}, {}, run.labels, 0)]) == told


def test_what_a_recipe_leaves_to_the_set_is_no_change():
    path = FOLDER.parent / "niid_bench" / "dirichlet.yaml"
    run, *_ = runs_of(path)
    for data, told in (
        ({"split": "official", "validation": 0.0}, []),
        ({"split": "official", "validation": 0.0, "augment": "none"}, ["data.augment = none (recipe: cifar-reflect)"]),
    ):
        config = {**run.config, "data": {**run.config["data"], **data}}
        assert deviations(path, [ReportedRun(run.folder, "finished", config, {}, {}, run.labels, 0)]) == told


def test_an_own_partition_with_options_is_named_and_keys_without_effect_are_not():
    path = FOLDER.parent / "niid_bench" / "dirichlet.yaml"
    scheme = {"mine:split": {"beta": 0.5}}
    run, *_ = runs_of(path, partition={"scheme": scheme, "num_clients": 10, "min_samples": 10})
    named, option = deviations(path, [run])
    assert named == "partition.scheme = mine:split (recipe: dirichlet)"
    assert option == "partition.scheme.mine:split.beta = 0.5 (recipe: None)"


def test_a_run_without_labels_beside_a_published_number_is_compared_too():
    cells = published("fedvg_table_A3")
    config = {"data": {"name": "cifar10"}, "model": {"name": "resnet18"}, "methods": ["fedvg"], "rounds": 50}
    whole = Config.model_validate({**config, "partition": {"alpha": 0.05}}).model_dump(mode="json")
    labels = {"dataset": "cifar10", "model": "resnet18", "method": "fedvg", "partition.alpha": 0.05}
    run = ReportedRun(Path("mine"), "finished", whole, {}, {}, labels, 0)
    assert "rounds = 50 (recipe: 200)" in changed_settings([run], cells, ["fedvg_table_A3"])
    assert (
        changed_settings(
            [ReportedRun(Path("mine"), "finished", whole, {}, {}, {**labels, "mu": 1}, 0)], cells, ["fedvg_table_A3"]
        )
        == []
    )


# --- what a scaled run is called --------------------------------------------------------------------------------------


def test_tables_and_figures_of_a_scaled_sweep_name_what_ran(tmp_path):
    small = {"data": {"name": "digits"}, "model": {"name": "cnn"}}
    for method, best in (("FedAvg", 0.5), ("FedVG", 0.6)):
        fabricate(tmp_path / method, best, labels=labels_of(method, 0.1), **small)
    report = make_report(
        [tmp_path], {"published": ["fedvg_table_A3"], "columns": ["alpha"], "figures": ["bars", "curves"]}
    )
    (table,) = report.tables
    assert table.title == "digits / cnn"
    assert all(cell.published is None for cell in table.cells.values())
    text = document(report, [], [])
    assert "### digits / cnn\n" in text
    assert "published (difference)" not in text
    assert "rounds = 10 (recipe: 200)" in text
    assert "partition.num_clients = 20 (recipe: 100)" in text
    assert "more)" not in text  # all settings that differ are named
    drawn = draw_figures(report, on_missing=pytest.fail)
    titles = [axes.get_title() for axes in drawn["bars"].axes] + [drawn["curves"]._suptitle.get_text()]
    assert titles == ["digits / cnn", "digits / cnn"]
    assert not [line for line in drawn["bars"].axes[0].lines if line.get_marker() == "D"]


def test_scaled_cases_that_ran_on_one_set_stay_apart(tmp_path):
    small = {"data": {"name": "digits"}, "model": {"name": "cnn"}}
    for index, dataset in enumerate(("CIFAR-10", "OrganAMNIST")):
        fabricate(tmp_path / dataset, 0.5 + index, labels={**labels_of("FedVG", 0.1), "dataset": dataset}, **small)
    titles = [table.title for table in make_report([tmp_path], {"columns": ["alpha"]}).tables]
    assert titles == [
        "digits / cnn, in place of = CIFAR-10 / ResNet-18",
        "digits / cnn, in place of = OrganAMNIST / ResNet-18",
    ]


def test_flfas_table_4_is_one_column_with_backpropagation_among_the_variants(tmp_path):
    path = FOLDER.parent / "flfa" / "table_4.yaml"
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "sweep.yaml").write_text(json.dumps({"report": read_recipe(path)["report"]}))
    for index, run in enumerate(runs_of(path)):
        config = {key: run.config[key] for key in ("data", "model", "methods")}
        fabricate(tmp_path / "s" / run.folder, 0.5 + index / 100, labels=run.labels, **config)
    (table,) = make_report([tmp_path / "s"], {}).tables
    assert (len(table.rows), table.columns, set(table.marks.values())) == (5, ((),), {"best", "second"})
    assert all(cell.published is not None for cell in table.cells.values())


# --- the same run twice -----------------------------------------------------------------------------------------------


def twice(folder, **second):
    labels = labels_of("FedVG", 0.1)
    fabricate(folder / "a3" / "one", 0.5, labels=labels, summary={"params_sha256": "abc"})
    fabricate(folder / "a7" / "two", **{"best": 0.5, "labels": labels, "summary": {"params_sha256": "abc"}, **second})


def test_a_run_that_two_sweeps_share_counts_once(tmp_path):
    twice(tmp_path)
    report = make_report([tmp_path / "a3", tmp_path / "a7"], {})
    assert [(cell.n, cell.mean) for cell in report.cells] == [(1, 50.0)]
    assert len(report.runs) == 2


@pytest.mark.parametrize("second", [{"summary": {"params_sha256": "other"}}, {"summary": {}}, {"best": 0.6}])
def test_two_runs_that_differ_are_refused(tmp_path, second):
    twice(tmp_path, **second)
    with pytest.raises(
        DataError, match=r"two different runs of CIFAR-10 / ResNet-18, method = FedVG, alpha = 0.1 with seed 0"
    ):
        make_report([tmp_path], {})


def test_recipes_headers_name_the_report_that_joins_their_tables():
    names = ("table_A3", "table_A4", "table_A7")
    paths = [FOLDER.parent / "fedvg" / f"{name}.yaml" for name in names]
    command = "raysim report " + " ".join(f"runs/{read_recipe(path)['name']}" for path in paths)
    assert all(command in path.read_text() for path in paths)


def test_fedvgs_tables_join_in_one_report(tmp_path):
    first, second = ("CIFAR-10", "ResNet-18"), ("COVID19", "ViT-S/16")
    nets = {"ResNet-18": "resnet18", "ViT-S/16": "vit_s16"}
    for name, (dataset, model) in {"table_A3": first, "table_A4": second, "table_A7": first}.items():
        group = read_recipe(FOLDER.parent / "fedvg" / f"{name}.yaml")["report"]
        (tmp_path / name).mkdir()
        (tmp_path / name / "sweep.yaml").write_text(json.dumps({"report": group}))
        true = {"data": {"name": dataset.casefold().replace("-", "")}, "model": {"name": nets[model]}}
        rows = ("FedAvg", "FedAvg + FedVG") if name == "table_A7" else ("FedAvg", "FedVG")
        for (index, method), alpha in itertools.product(enumerate(rows), (0.1, 0.05)):
            labels = {**labels_of(method, alpha), "dataset": dataset, "model": model}
            summary = {"params_sha256": f"{labels}"}
            folder = tmp_path / name / f"{index}-{alpha}"
            fabricate(folder, 0.5 + index / 10, labels=labels, summary=summary, **true)
    report = make_report([tmp_path], {})
    assert report.group.published == ["fedvg_table_A3", "fedvg_table_A4", "fedvg_table_A7"]
    assert [table.title for table in report.tables] == ["CIFAR-10 / ResNet-18", "COVID19 / ViT-S/16"]
    assert report.tables[0].rows == ("FedAvg", "FedVG", "FedAvg + FedVG")
    pairs = {(item.other, *item.column): item.result.num_pairs for item in report.by_table}
    assert pairs == {(row, alpha): n for row, n in (("FedAvg", 2), ("FedAvg + FedVG", 1)) for alpha in (0.1, 0.05)}
    made = draw_figures(report, on_missing=pytest.fail)
    assert set(made) >= {"bars", "integration"}
    (axes,) = made["bars"].axes  # figure A.5
    assert (axes.get_title(), [tick.get_text() for tick in axes.get_xticklabels()]) == (
        "alpha = 0.05",
        ["CIFAR-10\nResNet-18", "COVID19\nViT-S/16"],
    )


def test_the_papers_sentence_on_averages_is_computed():
    given = {
        "published": ["fedvg_table_A3", "fedvg_table_A4", "fedvg_table_A7"],
        "columns": ["alpha"],
        "against": "FedVG",
    }
    report = make_report([], given)
    assert len(report.tables) == 7
    (extra,) = report.extras
    lines = {name: entries for name, entries in extra.lines}
    best = [name for name, entries in lines.items() if entries[-1].mark == "best"]
    assert (extra.header[-1], best) == ("alpha = 0.05", ["FedVG"])
    means = [table.cells["FedVG", (0.05,)].mean for table in report.tables]
    assert lines["FedVG"][-1].text == f"{sum(means) / 7:.2f}"
    assert lines["FedAvg + FedVG"][-1].text.endswith("(3 of 7)")
    (sentence,) = [line for line in conclusions(report) if line.startswith("Highest on average over 7 tables: ")]
    assert f"FedVG at alpha = 0.05 ({sum(means) / 7:.2f}; next " in sentence


def test_a_row_that_some_tables_lack_is_not_ranked_among_the_averages(tmp_path):
    accuracies = {("CIFAR-10", "FedAvg"): 0.6, ("CIFAR-10", "FedVG"): 0.5, ("CIFAR-10", "Elastic"): 0.9}
    accuracies |= {("TinyImageNet", "FedAvg"): 0.4, ("TinyImageNet", "FedVG"): 0.3}
    for (dataset, method), best in accuracies.items():
        fabricate(tmp_path / f"{dataset}-{method}", best, labels={"dataset": dataset, "method": method, "alpha": 0.1})
    ranked = best_on_average(make_report([tmp_path], {"columns": ["alpha"]}).tables)
    assert [(row, average.n) for row, average in ranked[(0.1,)]] == [("FedAvg", 2), ("FedVG", 2)]


def test_where_less_is_better_the_lowest_average_comes_first(tmp_path):
    for dataset, method in itertools.product(("CIFAR-10", "TinyImageNet"), ("FedAvg", "FedVG")):
        labels = {"dataset": dataset, "method": method, "alpha": 0.1}
        fabricate(tmp_path / f"{dataset}-{method}", {"FedAvg": 0.6, "FedVG": 0.4}[method], labels=labels)
    ranked = best_on_average(make_report([tmp_path], {"columns": ["alpha"], "mode": "min"}).tables)
    assert [row for row, _ in ranked[(0.1,)]] == ["FedVG", "FedAvg"]


def test_runs_without_labels_are_named_in_time_linear_in_their_number(tmp_path, monkeypatch):
    asked = []
    for index in range(12):
        fabricate(tmp_path / f"{index}", 0.5, methods=[{"fedprox": {"mu": 0.1 * (index % 2 + 1)}}], seed=index // 2)
    monkeypatch.setattr(runs, "row_methods", lambda config: asked.append(1) or "fedprox")
    found = find_runs([tmp_path])
    assert {run.labels["method"] for run in found} == {"fedprox (mu=0.1)", "fedprox (mu=0.2)"}
    assert len(asked) <= 4 * len(found)
