"""Each layer imports only from those above it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE, TRAINING, DATA, CONFIG = "raysim.core", "raysim.training", "raysim.data", "raysim.config"
ALLOWED = {  # folder or file -> raysim modules it may import
    "raysim/core": [CORE],
    "raysim/training": [CORE, TRAINING],
    "raysim/data": [CORE, DATA],
    "raysim/models": [CORE, "raysim.models"],
    "methods": [CORE, TRAINING, "methods"],
    "raysim/config": [CORE, CONFIG],
    "raysim/sweep.py": [CORE],
    "raysim/files.py": [],
    "raysim/run_folder.py": [CORE, "raysim.files"],
    "raysim/pictures.py": [],
    "raysim/record.py": [CORE, "raysim.engine.metrics", "raysim.pictures", "raysim.run_folder"],
    "raysim/engine": [CORE, TRAINING, DATA, "raysim.files", "raysim.engine"],
    "raysim/report": [CORE, CONFIG, "raysim.sweep", "raysim.run_folder", "raysim.report"],
}
FORBIDDEN = {  # outside packages that a layer must not see
    "raysim/core": {"ray", "pydantic", "pyarrow", "yaml"},
    "raysim/training": {"ray", "pydantic", "pyarrow", "yaml"},
    "raysim/data": {"pydantic"},
    "raysim/models": {"ray", "pydantic", "pyarrow"},
    "methods": {"ray", "pydantic", "pyarrow", "yaml"},
    "raysim/config": {"ray", "torch"},
    "raysim/sweep.py": {"ray", "torch", "pydantic"},
    "raysim/engine": {"pydantic", "yaml"},
    "raysim/run_folder.py": {"ray", "torch", "pydantic"},
    "raysim/report": {"ray", "torch"},
}
TUNING = {f"raysim/tuning/{name}.py" for name in ("plan", "driver", "trial", "resources", "outcome", "twins")}
# Everything in raysim/engine/ray may import Ray.
# ray_facts.py: doctor's questions to a cluster, none of which runs a federation; the rest of the engine does not use it.
RAY_FILES = {"raysim/engine/ray_facts.py", "raysim/data/pipeline.py"}
RAY_FILES |= TUNING - {
    f"raysim/tuning/{name}.py" for name in ("plan", "outcome", "twins")
}  # part of the root: Tune by configuration
ROOTS = {
    "raysim/check.py",
    "raysim/find.py",
    "raysim/resources.py",
    "raysim/build.py",
    "raysim/run.py",
    "raysim/__main__.py",
    "raysim/doctor.py",
    "raysim/report/build.py",
}
ROOTS |= {"raysim/calibrate.py", "raysim/partitions.py"}
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
    if layer is None:
        return
    ours = {m for m in used if m.split(".")[0] in ("raysim", "methods")}
    bad = {m for m in ours if not any(m == a or m.startswith(a + ".") or a.startswith(m + ".") for a in ALLOWED[layer])}
    assert not bad, f"{name} imports {bad}"
    outside = {m.split(".")[0] for m in used} & (
        FORBIDDEN.get(layer, set()) - ({"ray"} if name in RAY_FILES else set())
    )
    assert not outside, f"{name} imports {outside}"
