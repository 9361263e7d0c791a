"""What runs in a notebook: the example in docs/notebooks, and lines about progress."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def executed(tmp_path, monkeypatch):
    """executed(notebook) -> its cells after a run in an empty folder."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")

    def execute(notebook):
        NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
        return notebook.cells

    return execute


def shown(cell, kind):
    """What a cell shows in a form, `text/plain` for example; what it prints is left out."""
    return [output["data"][kind] for output in cell.outputs if kind in output.get("data", {})]


@pytest.mark.slow
def test_example_goes_from_import_to_a_plot_of_three_methods_and_an_own_one(executed, tmp_path):
    notebook = nbformat.read(ROOT / "docs" / "notebooks" / "three_methods.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # committed without outputs
    *_, runs, plot, report = (cell for cell in executed(notebook) if cell.cell_type == "code")
    assert any("round 20/20" in line for line in shown(runs, "text/plain"))
    (picture,) = shown(plot, "image/png")
    content = base64.b64decode(picture)
    assert content.startswith(b"\x89PNG")
    (tmp_path / "plot.png").write_bytes(content)
    (table,) = shown(report, "text/plain")
    assert all(name in table for name in ("FedAvg", "FedProx", "FedVG", "by classes"))
    assert (tmp_path / "runs" / "three_methods" / "report" / "report.md").is_file()
    assert len(list((tmp_path / "runs" / "three_methods").glob("*/COMPLETED"))) == 4


def test_progress_is_one_line_that_changes(executed):
    code = """
        import json
        from pathlib import Path
        from types import SimpleNamespace
        from raysim.terminal import Progress

        resources = {"backend": "serial", "trainers": 1, "threads_per_trainer": 1}
        Path("runs/a").mkdir(parents=True, exist_ok=True)
        Path("runs/a/env.json").write_text(json.dumps({"resources": resources}))
        progress = Progress()
        progress.start(Path("runs/a"), 0, 3)
        for index in range(3):
            progress.round(SimpleNamespace(round_index=index, metrics={"train/loss": 0.5, "server/accuracy": index / 4}))
    """
    (cell,) = executed(new_notebook(cells=[new_code_cell("\n".join(line[8:] for line in code.splitlines()))]))
    first, last = shown(cell, "text/plain")
    assert first.startswith("running 3 rounds in runs/a")
    assert "serial, 1 thread)" in first
    assert last.startswith("round 3/3  accuracy 0.5000  loss 0.5000")
