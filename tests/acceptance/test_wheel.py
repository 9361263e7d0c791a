"""The built wheel, in an environment and a folder of its own, does what a clone does."""

from __future__ import annotations

import email
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import venv
from functools import partial
from pathlib import Path

import pytest
import yaml

import raysim

PROJECT = Path(__file__).parent.parent.parent
SOURCES = ("raysim", "methods", "cluster", "configs", "setup.py", "pyproject.toml", "README.md", "LICENSE")


def output(*command, cwd, **variables):
    """What a command prints; the folder of the tests is on no path of it."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "RAYSIM_HOME")}
    result = subprocess.run(command, cwd=cwd, env={**environment, **variables}, capture_output=True, text=True)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder with the commands of an environment that has the wheel, and this environment's packages but not its raysim."""
    folder = tmp_path_factory.mktemp("wheel")
    (folder / "src").mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    # A copy: a build leaves files behind, and takes up those of an earlier one.
    for source in map(PROJECT.joinpath, SOURCES):
        copy = partial(shutil.copytree, ignore=ignored) if source.is_dir() else shutil.copy
        copy(source, folder / "src" / source.name)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    output(*pip, "wheel", "-q", "./src", "--no-deps", "--no-build-isolation", "--no-index", "-w", "dist", cwd=folder)
    (wheel,) = (folder / "dist").iterdir()
    assert wheel.name == f"raysim_fl-{raysim.__version__}-py3-none-any.whl"
    venv.create(folder / "venv", symlinks=True)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    # Folders in a .pth file are not searched for .pth files: an editable installation of raysim is not seen.
    (site / "base.pth").write_text("\n".join(dict.fromkeys(map(sysconfig.get_path, ("purelib", "platlib")))))
    python = str(folder / "venv" / "bin" / "python")
    output(*pip, "--python", python, "install", "-q", "--no-deps", "--no-index", str(wheel), cwd=folder)
    return folder / "venv" / "bin"


@pytest.fixture
def command(installed, tmp_path):
    """Run a command of that environment in an empty folder."""
    return lambda name, *words: output(str(installed / name), *words, cwd=tmp_path, OMP_NUM_THREADS="1")


@pytest.mark.slow
def test_the_wheel_is_what_runs_and_holds_every_file(command, installed):
    code = "import raysim, raysim.config as c; print(raysim.__file__, *map(c.shipped_folder, ('configs', 'cluster')))"
    package, *folders = map(Path, command("python", "-c", code).split())
    assert package.is_relative_to(installed.parent)
    for top, folder in zip(("configs", "cluster"), folders, strict=True):
        assert folder == package.parent / top
        ours, theirs = (
            {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file() and path.suffix != ".pyc"}
            for root in (PROJECT / top, folder)
        )
        assert ours == theirs
    assert command("python", "-c", "from importlib.metadata import version; print(version('raysim-fl'))").strip() == (
        raysim.__version__
    )


@pytest.mark.slow
def test_verbs_that_need_no_run(command, tmp_path):
    assert command("raysim", "--version") == f"raysim {raysim.__version__}\n"
    assert "paper:fedvg/table_A3" in command("raysim", "recipes")
    assert "base: base.yaml" in command("raysim", "recipes", "fedvg/table_A3")
    assert "symmetric-run" in command("raysim", "recipes", "cluster:slurm.sh")
    # One process, since each of these imports PyTorch.
    words = (["schema"], ["methods"], ["report", "--published", "paper:fedvg/table_A3", "--against", "FedVG"])
    code = f"from raysim.cli.main import app\nfor words in {words}: app(words, standalone_mode=False); print('=====')"
    schema, methods, report, _ = command("python", "-c", code).split("=====\n")
    assert "LocalGroup" in json.loads(schema)["$defs"]
    assert "fedprox" in methods
    assert "FedVG has the highest mean in 8 of 25 columns" in report


@pytest.mark.slow
def test_a_recipe_with_a_class_mapping_runs_in_an_empty_folder(command, tmp_path):
    few = ("--scaled", "tune=null", "resources.backend=serial", "rounds=1", "scale.rounds=1")
    text = command("raysim", "run", "paper:fedvg/figure_6", *few, "name=mine")
    assert "run directory" in text
    environment = json.loads((tmp_path / "runs" / "mine" / "env.json").read_text())
    assert (environment["packages"]["raysim"], environment["git_commit"]) == (raysim.__version__, None)


RELATIVE = re.compile(r"\]\((?!\w+:)")


def test_the_readme_of_a_package_index_has_no_link_that_leads_nowhere():
    readme = runpy.run_path(str(PROJECT / "setup.py"), run_name="setup")["readme"]
    text = (PROJECT / "README.md").read_text()
    assert RELATIVE.search(text)
    address = "https://code.example.org/raysim"
    linked, plain = readme(text, address), readme(text, None)
    assert not RELATIVE.search(linked)
    assert f"shard files]({address}/raw/main/docs/pictures/round.svg)" in linked
    assert f"[Start]({address}/blob/main/docs/start.md)" in linked
    assert not RELATIVE.search(plain)
    assert "[Ray](https://docs.ray.io)" in plain
    assert "(performance)." in plain
    assert "round.svg" not in plain
    assert 'raysim.run(\n    name="costs"' in plain


def test_metadata_says_what_it_is_for_whom_and_where_it_is_explained(tmp_path):
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(PROJECT / name, tmp_path)
    for folder in ("raysim", "configs", "cluster", "out"):
        (tmp_path / folder).mkdir()
    (tmp_path / "raysim" / "base").mkdir()
    shutil.copy(PROJECT / "raysim" / "base" / "__init__.py", tmp_path / "raysim" / "base")
    (tmp_path / "raysim" / "__init__.py").touch()
    code = "from setuptools.build_meta import prepare_metadata_for_build_wheel as make; make('out')"
    output(sys.executable, "-c", code, cwd=tmp_path)
    (file,) = tmp_path.glob("out/*.dist-info/METADATA")
    metadata = email.message_from_string(file.read_text())
    assert metadata["Summary"].startswith("A federated-learning simulator for research")
    assert metadata["Keywords"].split(",") == yaml.safe_load((PROJECT / "CITATION.cff").read_text())["keywords"]
    assert "Operating System :: POSIX :: Linux" in metadata.get_all("Classifier")
    assert any("arxiv.org/abs/2602.21399" in url for url in metadata.get_all("Project-URL"))
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload().startswith("# raysim\n")
    assert not RELATIVE.search(metadata.get_payload())


def test_the_versions_that_are_written_down_are_one():
    assert f"\nversion: {raysim.__version__}\n" in (PROJECT / "CITATION.cff").read_text()
