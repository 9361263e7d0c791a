"""Each layer imports only from those above it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE, TRAINING, DATA, CONFIG = "raysim.core", "raysim.training", "raysim.data", "raysim.config"
# From the lowest room up: a file imports from its own room and from those before it. Files at the root stand alone.
FLOORS = (
    "raysim/base",
    "raysim/core",
    "raysim/config",
    "raysim/folders",
    "raysim/training",
    "raysim/data",
    "raysim/models",
    "methods",
    "raysim/engine",
    "raysim/reporting",
    "methods/figures",
    "raysim/plan",
    "raysim/running",
    "raysim/tuning",
    "raysim/launch.py",
    "raysim/cli",
    "raysim/api.py",
    "raysim/__init__.py",
    "raysim/__main__.py",
    "cluster",
)
MUST_NOT_SEE = {  # room -> rooms below it that it does without all the same
    "raysim/training": ("raysim/config", "raysim/folders"),
    "raysim/data": ("raysim/config", "raysim/training"),
    "raysim/models": ("raysim/config",),
    "methods": ("raysim/config", "raysim/folders", "raysim/data", "raysim/models"),
    "raysim/engine": ("raysim/config", "methods"),
    "raysim/reporting": ("raysim/engine", "methods"),
    "methods/figures": ("raysim/engine", "methods"),
}
FORBIDDEN = {  # outside packages that a room must not see
    "raysim/base": {"ray", "torch", "pydantic", "pyarrow", "yaml"},
    "raysim/core": {"ray", "pydantic", "pyarrow", "yaml"},
    "raysim/config": {"ray", "torch"},
    "raysim/folders": {"ray", "pydantic"},
    "raysim/training": {"ray", "pydantic", "pyarrow", "yaml"},
    "raysim/data": {"pydantic"},
    "raysim/models": {"ray", "pydantic", "pyarrow"},
    "methods": {"ray", "pydantic", "pyarrow", "yaml"},
    "raysim/engine": {"pydantic", "yaml"},
    "raysim/reporting": {"ray", "torch"},
    "methods/figures": {"ray", "torch"},
}
# Everything in raysim/engine/ray may import Ray.
RAY_FILES = {"raysim/data/pipeline.py"}
RAY_FILES |= {f"raysim/tuning/{name}.py" for name in ("driver", "trial", "for_tune", "ranges", "ready")}


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


MODULES = {name.removesuffix("/__init__.py").removesuffix(".py").replace("/", "."): name for name in FILES}


def room(name: str) -> str:
    return max((each for each in FLOORS if name == each or name.startswith(each + "/")), key=len)


@pytest.mark.parametrize("name", FILES)
def test_file_imports_only_from_rooms_below_its_own(name):
    used = imports(ROOT / name)
    if name not in RAY_FILES and not name.startswith(("cluster/", "raysim/engine/ray/")):
        assert not {module for module in used if module.split(".")[0] == "ray"}, "ray outside its files"
    here = room(name)
    rooms = {room(MODULES[module]) for module in used if module in MODULES and module not in ("raysim", "methods")}
    allowed = set(FLOORS[: FLOORS.index(here) + 1]) - set(MUST_NOT_SEE.get(here, ()))
    assert rooms <= allowed, f"{name} imports from {sorted(rooms - allowed)}"
    outside = {module.split(".")[0] for module in used} & (
        FORBIDDEN.get(here, set()) - ({"ray"} if name in RAY_FILES else set())
    )
    assert not outside, f"{name} imports {outside}"


def printing_lines(tree: ast.Module) -> list[int]:
    """Lines that print, or that write to a standard stream."""

    def prints(function: ast.expr) -> bool:
        if isinstance(function, ast.Name):
            return function.id == "print"
        if not isinstance(function, ast.Attribute):
            return False
        owner = ast.unparse(function.value)
        return function.attr == "print" or (function.attr == "write" and owner in ("sys.stdout", "sys.stderr"))

    return [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Call) and prints(node.func)]


def test_the_library_does_not_print():
    library = [name for name in FILES if not name.startswith(("raysim/cli/", "raysim/__main__.py", "cluster/"))]
    assert {name: found for name in library if (found := printing_lines(ast.parse((ROOT / name).read_text())))} == {}
    shows = {name for name in library if {"rich", "raysim.cli.terminal"} & imports(ROOT / name)}
    assert shows == {"raysim/api.py"}, "only a call from Python shows progress, unless it is quiet"
    assert printing_lines(ast.parse("print(1)\nsay(2)\nout.print(3)\nsys.stderr.write(4)\nfile.write(5)")) == [1, 3, 4]


@pytest.mark.slow
def test_experiment_of_livar_is_not_imported_with_the_methods():
    code = "import sys, methods, raysim.cli.main; sys.exit('raysim.tuning.calibrate' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


# --- imports inside functions -----------------------------------------------------------------------------------------

SLOW = {  # libraries that take 50 ms and more to load
    *(
        "torch",
        "torchvision",
        "timm",
        "peft",
        "medmnist",
        "shap",
        "sklearn",
        "scipy",
        "pandas",
        "matplotlib",
        "optuna",
        "ray",
    ),
    *("PIL", "tensorboard", "mlxtend", "IPython", "pyarrow", "pydantic", "yaml", "typer", "rich", "numpy", "filelock"),
}
#: (file, what it imports inside a function) -> why, beside libraries and modules that are slow to load.
INSIDE = {
    ("raysim/__init__.py", "raysim.base.user_code"): "`import raysim` loads nothing that it may not need",
    ("raysim/cli/main.py", "methods"): "a folder of the user's called methods is refused first",
}


def _imported(nodes) -> set[str]:
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = {f"{node.module}.{alias.name}" for alias in node.names} & set(MODULES)
            names |= whole or {node.module}
    return names


def _at_the_top(tree: ast.Module) -> set[str]:
    return _imported(tree.body)


def _loads(module: str, tops: dict[str, set[str]]) -> set[str]:
    """Slow libraries that come with a module."""
    seen, waiting, slow = set(), [module], set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if name.split(".")[0] in SLOW:
            slow.add(name.split(".")[0])
        waiting += tops.get(name, ())
    return slow


def test_only_what_is_slow_to_load_is_imported_inside_functions():
    trees = {name: ast.parse((ROOT / name).read_text()) for name in FILES}
    names = {file: module for module, file in MODULES.items()}
    tops = {names[file]: _at_the_top(tree) for file, tree in trees.items()}
    inside = set()
    for file, tree in trees.items():
        here = _loads(names[file], tops)
        functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
        for module in set().union(*(_imported(ast.walk(function)) for function in functions)):
            if module in MODULES and not _loads(module, tops) - here:
                inside.add((file, module))
    assert inside == set(INSIDE)
