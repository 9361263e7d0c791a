"""Reports over runs of own code, in every form in which a configuration names it."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.figure import Figure

import raysim
from raysim import Method
from tests.fuzz import own_code
from tests.support.federations import SMALL

OWN = "tests.fuzz.own_code"


def parts(labels, num_clients, *, rng, share=0.5):
    """An own partition with an option: the first client has a share, the others divide the rest."""
    order = rng.permutation(len(labels))
    cut = int(share * len(order))
    return [order[:cut], *np.array_split(order[cut:], num_clients - 1)]


def plain(*, mu: float = 0.0) -> Method:
    """An own method with an option."""
    return Method("plain", report=lambda client: {"mu": mu})


def scans(files, *, count: int = 60):
    """An own reader with an option."""
    return np.arange(count * 64, dtype=np.uint32).astype(np.uint8).reshape(count, 8, 8), np.arange(count) % 3


def silent(*, name: str = "x"):
    """An own logger with an option."""
    return SimpleNamespace(start=lambda *_: None, round=lambda *_: None, end=lambda *_: None)


def heat(report):
    """One own figure."""
    return Figure()


FORMS = {
    "method": {"methods": [{f"{__name__}:plain": {"mu": 0.5}}]},
    "method without options": {"methods": [f"{__name__}:plain"]},
    "model": {"model": {"name": f"{OWN}:net", "factor": 0.5}},
    "partition": {"partition": {"scheme": {f"{__name__}:parts": {"share": 0.4}}, "num_clients": 4}},
    "partition without options": {"partition": {"scheme": f"{__name__}:parts", "num_clients": 4}},
    "reader": {"data": {"name": "scans", "reader": {f"{__name__}:scans": {"count": 90}}, "validation": 0.1}},
    "reader without options": {"data": {"name": "scans", "reader": f"{__name__}:scans", "validation": 0.1}},
    "logger": {"loggers": [{f"{__name__}:silent": {"name": "y"}}]},
    "figure": {"report": {"figures": [f"{__name__}:heat", "bars"]}},
    "method by value": {"methods": [plain(mu=0.5)]},
    "method as a function with options": {"methods": [{plain: {"mu": 0.5}}]},
    "model by value": {"model": {"name": own_code.net, "factor": 0.5}},
    "metric by value": {"evaluation": {"metrics": [own_code.plain_metric]}},
    "partition by value": {"partition": {"scheme": {parts: {"share": 0.4}}, "num_clients": 4}},
    "reader by value": {"data": {"name": "scans", "reader": {scans: {"count": 90}}, "validation": 0.1}},
    "logger by value": {"loggers": [silent]},
    "augmentation by value": {"data": {"augment": {own_code.augment: {"factor": 0.9}}}},
    "augmentation": {"data": {"augment": {f"{OWN}:augment": {"factor": 0.9}}}},
    "metric": {"evaluation": {"metrics": [f"{OWN}:plain_metric"]}},
    "task": {
        "task": {"tests.fuzz.tasks:drawn_task": {"base": "classes", "main": "accuracy", "direction": "max"}},
        "report": {"metric": "accuracy"},
    },
}


#: Values of an axis over each kind of own code -> rows of the table.
AXES = {
    "methods": [[f"{__name__}:plain"], [{f"{__name__}:plain": {"mu": 0.5}}]],
    "model.name": [f"{OWN}:net", "mlp"],
    "partition.scheme": ["iid", {f"{__name__}:parts": {"share": 0.4}}, f"{__name__}:parts"],
    "data.augment": ["none", {f"{OWN}:augment": {"factor": 0.9}}],
    "evaluation.metrics": [[], [f"{OWN}:plain_metric"]],
    "data.reader": [{f"{__name__}:scans": {"count": 60}}, {f"{__name__}:scans": {"count": 90}}],
    "task": ["classes", {"tests.fuzz.tasks:drawn_task": {"base": "classes", "main": "accuracy", "direction": "max"}}],
}


def own_data(settings, root, form):
    """The settings of a form; its reader writes below a folder of its own."""
    data = {**settings["data"], **FORMS.get(form, {}).get("data", {})}
    return data | ({"root": str(root)} if "reader" in data else {})


@pytest.mark.parametrize("form", FORMS)
def test_runs_of_own_code_are_reported(form, settings, tmp_path):
    """Two values of a label beside it, so that there is a table with two rows."""
    given = {**settings, **FORMS[form], "data": own_data(settings, tmp_path / "data", form), "rounds": 1}
    runs = [
        raysim.run(
            given | {"name": f"run-{rate}", "labels": {"method": f"lr {rate}"}, "local": {"lr": rate}}, quiet=True
        )
        for rate in (0.1, 0.2)
    ]
    raysim.report(runs, out=tmp_path / "report")
    text = (tmp_path / "report" / "report.md").read_text()
    assert all(f"lr {rate}" in text for rate in (0.1, 0.2))


@pytest.mark.parametrize("axis", AXES)
def test_own_code_may_be_an_axis_of_what_is_reported(axis, settings, tmp_path):
    form = "reader" if axis == "data.reader" else ""
    given = {**settings, "data": own_data(settings, tmp_path / "data", form)}
    runs = [
        raysim.run({**given, "rounds": 1, "name": f"run-{number}"}, {axis: value}, quiet=True)
        for number, value in enumerate(AXES[axis])
    ]
    report = raysim.report(runs, out=tmp_path / "report", metric="server/accuracy")
    (table,) = report.tables.values() if len(report.tables) == 1 else [None]
    assert len(report.cells) == len(AXES[axis])
    assert table is None or table.size == len(AXES[axis])


@pytest.fixture(scope="module")
def two_runs(root, tmp_path_factory):
    """Storage with the finished runs run-0 and run-1."""
    storage = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        names = {"seed": seed, "name": f"run-{seed}", "storage": str(storage)}
        raysim.run({**SMALL, "data": {"root": str(root)}, "rounds": 1, **names}, quiet=True)
    return storage


@pytest.mark.parametrize("content", [b"", b"\xff\xfe{", b"round,server/accuracy\n0,x\n"])
@pytest.mark.parametrize(
    "name",
    ["config.yaml", "summary.json", "progress.csv", "clients.parquet", "env.json", "partition.json", "COMPLETED"],
)
def test_one_damaged_run_never_costs_the_report(name, content, two_runs, tmp_path):
    runs = sorted(shutil.copytree(two_runs, tmp_path / "runs").glob("run-?"))
    path = runs[1] / name
    (next(path.iterdir()) if path.is_dir() else path).write_bytes(content)
    report = raysim.report(runs, out=tmp_path / "report", figures=["bars", "curves", "weights"])
    assert len(report.cells) == 1
    assert report.cells["mean"].notna().all()
    assert "bars" in report.figures
