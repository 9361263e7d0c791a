"""Each layer imports only from those above it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE, TRAINING, DATA, CONFIG = "raysim.core", "raysim.training", "raysim.data", "raysim.config"
ALLOWED = {  # folder or file -> raysim modules it may import
    "raysim/core": [CORE],
    "raysim/training": [CORE, TRAINING],
    # The user's own readers, partitions and models are found by `raysim.own_code`, which knows no more than `core`.
    "raysim/own_code.py": [CORE],
    "raysim/data": [CORE, DATA, "raysim.files", "raysim.filesystems", "raysim.own_code"],
    "raysim/models": [CORE, "raysim.files", "raysim.models", "raysim.own_code"],
    "methods/livar/figures.py": ["methods.livar", "raysim.reporting.panels"],  # the pictures of an experiment
    "methods": [CORE, TRAINING, "methods"],
    "raysim/config": [CORE, CONFIG],
    "raysim/sweep.py": [CORE],
    "raysim/environment.py": [CORE],
    "raysim/recipes.py": [CORE, CONFIG],
    "raysim/editor.py": [CORE, CONFIG, "methods"],
    "raysim/files.py": [],
    "raysim/filesystems.py": [CORE, "raysim.files"],
    "raysim/storage.py": [
        CORE,
        CONFIG,
        "raysim.files",
        "raysim.filesystems",
        "raysim.run_folder",
    ],
    "raysim/run_folder.py": [CORE, "raysim.files"],
    "raysim/pictures.py": [],
    "raysim/album.py": [],
    "raysim/board.py": [],
    "raysim/record.py": [
        CORE,
        "raysim.album",
        "raysim.board",
        "raysim.engine.metrics",
        "raysim.pictures",
        "raysim.run_folder",
    ],
    "raysim/engine": [CORE, TRAINING, DATA, "raysim.files", "raysim.engine"],
    "raysim/reporting/command.py": [CORE, CONFIG, "raysim.reporting", "raysim.terminal"],
    "raysim/reporting": [CORE, CONFIG, "raysim.sweep", "raysim.run_folder", "raysim.reporting"],
}
FORBIDDEN = {  # outside packages that a layer must not see
    "raysim/core": {"ray", "pydantic", "pyarrow", "yaml"},
    "raysim/training": {"ray", "pydantic", "pyarrow", "yaml"},
    "raysim/data": {"pydantic"},
    "raysim/models": {"ray", "pydantic", "pyarrow"},
    "methods": {"ray", "pydantic", "pyarrow", "yaml"},
    "raysim/config": {"ray", "torch"},
    "raysim/sweep.py": {"ray", "torch", "pydantic"},
    "raysim/recipes.py": {"ray", "torch"},
    "raysim/engine": {"pydantic", "yaml"},
    "raysim/filesystems.py": {"ray", "torch", "pydantic"},
    "raysim/storage.py": {"ray", "torch", "pydantic"},
    "raysim/run_folder.py": {"ray", "torch", "pydantic"},
    "raysim/reporting": {"ray", "torch"},
}
WITHOUT_TUNE = {f"raysim/tuning/{name}.py" for name in ("plan", "planner", "outcome", "command", "search")}
TUNING = WITHOUT_TUNE | {f"raysim/tuning/{name}.py" for name in ("driver", "trial", "resources", "ranges", "ready")}
# Everything in raysim/engine/ray may import Ray.
RAY_FILES = {"raysim/data/pipeline.py"}
RAY_FILES |= TUNING - WITHOUT_TUNE  # part of the root: Tune by configuration
ROOTS = {
    "raysim/check.py",
    "raysim/check_own.py",
    "raysim/check_training.py",
    "raysim/check_data.py",
    "raysim/find.py",
    "raysim/resources.py",
    "raysim/build.py",
    "raysim/runner.py",
    "raysim/start.py",
    "raysim/__main__.py",
    "raysim/doctor.py",
    "raysim/submit.py",
    "raysim/reporting/build.py",
    "raysim/reporting/command.py",
}
ROOTS |= {"raysim/partitions.py", "raysim/api.py", "raysim/results.py", "raysim/method_names.py"}
ROOTS |= {"raysim/reporting/results.py", "raysim/listings.py", "raysim/loggers.py", "raysim/__init__.py"}
# A method may own an experiment, with its verb and its pictures. It makes runs, so it stands above the root, though it lies
# beside its method, which knows nothing of it. File -> the one file that imports it.
EXPERIMENTS = {
    "methods/livar/calibrate.py": "raysim/__main__.py",
    "methods/livar/figures.py": "methods/livar/calibrate.py",
}
ROOTS |= {"methods/livar/calibrate.py", "raysim/entry.py", "raysim/preparation.py"}
ROOTS |= TUNING | {"raysim/terminal.py"}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


FILES = sorted(
    p.relative_to(ROOT).as_posix() for d in ("raysim", "methods", "cluster") for p in (ROOT / d).rglob("*.py")
)


@pytest.mark.parametrize("name", FILES)
def test_file_imports_only_from_its_layers(name):
    used = imports(ROOT / name)
    if name not in RAY_FILES and not name.startswith(("cluster/", "raysim/engine/ray/")):
        assert not {m for m in used if m == "ray" or m.startswith("ray.")}, "ray outside its file"
    if not name.startswith("cluster/") and name not in ROOTS:
        assert not {m for m in used if m in {p[:-3].replace("/", ".") for p in ROOTS}}, "imports the composition root"
    layer = next((key for key in ALLOWED if name == key or name.startswith(key + "/")), None)
    if layer is None or name == "methods/livar/calibrate.py":
        return
    ours = {m for m in used if m.split(".")[0] in ("raysim", "methods")}
    bad = {m for m in ours if not any(m == a or m.startswith(a + ".") or a.startswith(m + ".") for a in ALLOWED[layer])}
    assert not bad, f"{name} imports {bad}"
    outside = {m.split(".")[0] for m in used} & (
        FORBIDDEN.get(layer, set()) - ({"ray"} if name in RAY_FILES else set())
    )
    assert not outside, f"{name} imports {outside}"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiment_is_imported_by_one_file_and_not_with_the_methods(name):
    module = name[:-3].replace("/", ".")
    assert [file for file in FILES if module in imports(ROOT / file)] == [EXPERIMENTS[name]]
    code = f"import sys, methods, raysim.__main__; sys.exit({module!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
