"""What runs in a notebook: those of docs/notebooks, and lines about progress."""

from __future__ import annotations

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from tests.support.notebooks import errors, execute, notebook_files, shorten_

NAMES = [file.stem for file in notebook_files()]

PROGRESS = """
import json
from pathlib import Path
from types import SimpleNamespace
from raysim.cli.terminal import Progress

resources = {"backend": "serial", "device": "cpu", "trainers": 1, "threads_per_trainer": 1}
Path("runs/a").mkdir(parents=True, exist_ok=True)
Path("runs/a/env.json").write_text(json.dumps({"resources": resources}))
Path("runs/a/config.yaml").write_text("progress: []")
progress = Progress()
progress.start(Path("runs/a"), 0, 3)
for index in range(3):
    progress.round(SimpleNamespace(round_index=index, metrics={"train/loss": 0.5, "server/accuracy": index / 4}))
"""


@pytest.fixture(scope="module")
def executed(tmp_path_factory, ray_cluster):
    """Name -> (as it is stored, as it is after short runs in an empty folder), and the cell of PROGRESS.

    One process runs all, on the tests' Ray.
    """
    folder = tmp_path_factory.mktemp("notebooks")
    stored, fresh = ({file.stem: nbformat.read(file, as_version=4) for file in notebook_files()} for _ in range(2))
    for notebook in fresh.values():
        shorten_(notebook)
    cell = new_code_cell(PROGRESS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", ray_cluster.get_runtime_context().gcs_address)
        execute([*fresh.values(), new_notebook(cells=[cell])], folder)
    return {name: (stored[name], fresh[name]) for name in stored}, cell


def shown(cell, kind):
    """What a cell shows in a form, `text/plain` for example; what it prints is left out."""
    return [output["data"][kind] for output in cell.outputs if kind in output.get("data", {})]


def kinds(notebook):
    """For each code cell, what kinds of output it has: pictures, tables, text."""
    return [
        {kind for output in cell.outputs for kind in output.get("data", {output.output_type: None})}
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_notebook_runs_and_is_stored_with_outputs_of_the_same_kinds(executed, name):
    stored, fresh = executed[0][name]
    assert errors(fresh) == []
    assert kinds(stored) == kinds(fresh)  # make notebooks
    assert len(stored.cells) < 15


@pytest.mark.slow
def test_progress_is_one_line_that_changes(executed):
    first, last = shown(executed[1], "text/plain")
    assert first.startswith("running 3 rounds in runs/a")
    assert "serial, 1 thread on cpu)" in first
    assert last.startswith("round 3/3  accuracy 0.5000  loss 0.5000")
