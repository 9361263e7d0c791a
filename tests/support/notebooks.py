"""The notebooks of docs/notebooks, executed. `python -m tests.support.notebooks` stores them with their outputs anew."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "docs" / "notebooks"


def notebook_files() -> list[Path]:
    return sorted(FOLDER.glob("*.ipynb"))


def shorten_(notebook: NotebookNode) -> None:
    """Make its runs short, and seeds two, in place: what a cell shows does not depend on how many there are."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            fewer = re.sub(r'(\brounds"?[=:] ?)(\d+)', lambda found: f"{found[1]}{2 + int(found[2]) // 6}", cell.source)
            fewer = fewer.replace('"grid_search": [0, 1, 2]', '"grid_search": [0, 1]')
            cell.source = fewer.replace('"param_space":', '"max_concurrent": 1, "param_space":')


@contextmanager
def kernel_environment() -> Iterator[None]:
    """What a kernel inherits: raysim of this tree, and one thread, as trainers on Ray have it."""
    before = dict(os.environ)
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "JUPYTER_PLATFORM_DIRS": "1"}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before


def execute(notebooks: Sequence[NotebookNode], folder: Path) -> None:
    """Execute notebooks in place, in one process, so that PyTorch is imported once; each begins without names.

    An error in a cell stays in its outputs, and the next cells are executed.

    Args:
      folder: where their runs are written.
    """
    cells = [cell for notebook in notebooks for cell in [new_code_cell("%reset -f"), *notebook.cells]]
    resources = {"metadata": {"path": str(folder)}}
    joined = new_notebook(cells=cells)
    with kernel_environment():
        NotebookClient(joined, timeout=600, resources=resources, allow_errors=True, record_timing=False).execute()


def errors(notebook: NotebookNode) -> list[str]:
    """The tracebacks in its outputs."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return ["\n".join(output.traceback) for output in outputs if output.output_type == "error"]


def store(files: Sequence[Path]) -> None:
    """Execute notebooks and write them with their outputs. A notebook with an error ends the program, nothing written."""
    notebooks = [nbformat.read(file, as_version=4) for file in files]
    with tempfile.TemporaryDirectory() as folder:
        execute(notebooks, Path(folder))
    if found := [text for notebook in notebooks for text in errors(notebook)]:
        sys.exit("\n\n".join(found))
    for file, notebook in zip(files, notebooks, strict=True):
        for number, cell in enumerate(notebook.cells):
            cell.id = f"{file.stem}-{number}"  # no two notebooks have the same, since they are executed as one
        for number, cell in enumerate(cell for cell in notebook.cells if cell.cell_type == "code"):
            cell.execution_count = number + 1
            for output in cell.outputs:
                if "execution_count" in output:
                    output.execution_count = number + 1
        text = nbformat.writes(notebook).replace(f"{folder}/", "")  # paths as a reader's own folder would have them
        file.write_text(re.sub(r"/tmp/ipykernel_\d+/", "", text) + "\n")  # where a kernel puts the code of a cell
        print(f"{file.relative_to(ROOT)}: {len(text) // 1024} KB")


if __name__ == "__main__":
    chosen = sys.argv[1:]
    store([file for file in notebook_files() if not chosen or file.stem in chosen])
