"""`raysim recipes`, `raysim schema` and `--version`."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

import raysim
from raysim.base.errors import ConfigError
from raysim.cli.json_schema import json_schema
from raysim.cli.main import app
from raysim.config.shipped import KINDS, RECIPES, shipped_file, shipped_files


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(*words):
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_the_list_has_every_recipe_with_a_sentence():
    lines = dict(
        re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in said("recipes").splitlines() if ":" in line[:9]
    )
    names = {name for kind in RECIPES for name, file in shipped_files(kind).items() if file.stem != "base"}
    assert set(lines) == names
    assert all(len(line) > 20 for line in lines.values())
    assert lines["paper:fedvg/table_A3"].endswith("seven methods on ResNets, 5 alphas, 5 seeds.")
    for kind in KINDS:
        assert all(len(line.split()) > 1 for line in said("recipes", kind).splitlines())


def test_a_name_prints_its_file():
    assert said("recipes", "fedvg/table_A3") == shipped_file("fedvg/table_A3").read_text()


def test_a_name_runs_from_python_and_as_partitions(here):
    settings = {"scale": True, "quiet": True, "rounds": 1, "resources": {"backend": "serial"}}
    with pytest.raises(ConfigError, match=r"tune: makes the configuration a sweep: run .* tune paper:fedvg/figure_A1."):
        raysim.run("paper:fedvg/figure_A1", **settings)
    run = raysim.run("paper:fedvg/figure_A1", tune=None, **settings)
    assert run.folder == here / "runs" / "fedvg_figure_A1_scaled"
    said("partition", "example:quickstart")
    assert [path.name for path in (here / "partitions").iterdir()] == ["quickstart"]


def test_an_unknown_name_is_one_message():
    fault = r"fedvg/table_A33: no file of raysim has this name. Did you mean 'paper:fedvg/table_A3'"
    with pytest.raises(ConfigError, match=fault):
        CliRunner().invoke(app, ["recipes", "fedvg/table_A33"], catch_exceptions=False)


def test_schema_is_json_and_version_is_the_packages():
    assert json.loads(said("schema")) == json_schema()
    assert said("--version") == f"raysim {raysim.__version__}\n"
