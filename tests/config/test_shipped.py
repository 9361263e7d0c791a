"""Files that come with raysim, by name: as configurations, as bases, and in an editor's schema."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest
import yaml

from raysim.base.errors import ConfigError
from raysim.cli.json_schema import json_schema
from raysim.config import Config, is_recipe_name, read_config, shipped_file, shipped_files
from raysim.config.shipped import KINDS, RECIPES
from raysim.config.yaml_text import read_yaml
from raysim.reporting.runs import tables_of

PROJECT = Path(__file__).parents[2]
CONFIGS = sorted(path for path in (PROJECT / "configs").rglob("*.yaml") if path.parent.name != "mappings")
SCHEMA = jsonschema.Draft202012Validator(json_schema())


def test_every_file_of_configs_and_cluster_has_one_name():
    files = [file for kind in KINDS for file in shipped_files(kind).values()]
    there = [path for top in ("configs", "cluster") for path in (PROJECT / top).rglob("*")]
    assert sorted(files) == sorted(
        p for p in there if p.is_file() and not p.match("__*") and "__pycache__" not in p.parts
    )
    assert len(set(files)) == len(files)
    assert sorted(CONFIGS) == sorted(file for kind in RECIPES for file in shipped_files(kind).values())


def test_a_name_is_read_as_its_file_is():
    path = PROJECT / "configs" / "papers" / "fedvg" / "table_A3.yaml"
    assert read_config(Path("paper:fedvg/table_A3"), ["rounds=3"]) == read_config(path, ["rounds=3"])
    assert shipped_file("fedvg/table_A3") == path == shipped_file("paper:fedvg/table_A3")
    assert read_config(Path("example:quickstart"))["name"] == "quickstart"
    assert tables_of("paper:fedvg/table_A3") == ["fedvg_table_A3"]
    assert [is_recipe_name(text) for text in ("paper:x", "paper/x", "my_module:paper")] == [True, False, False]


def test_a_file_of_the_users_own_builds_on_a_recipe(tmp_path):
    (tmp_path / "mine.yaml").write_text("base: paper:univarfl/table_2\nrounds: 3\n")
    assert read_config(tmp_path / "mine.yaml") == {**read_config(Path("paper:univarfl/table_2")), "rounds": 3}


def test_a_wrong_name_is_one_fault_with_the_nearest():
    for read in (lambda name: read_config(Path(name)), shipped_file):
        with pytest.raises(
            ConfigError, match=r"Did you mean 'paper:fedvg/table_A3' or .*`raysim recipes` lists"
        ) as caught:
            read("paper:fedvg/tabel_A3")
        assert len(caught.value.faults) == 1
    with pytest.raises(ConfigError, match="Did you mean 'study:fedvg_digits'"):
        shipped_file("fedvg_digit")
    with pytest.raises(ConfigError, match="paper:fedvg/stragglers has no published table"):
        tables_of("paper:fedvg/stragglers")
    with pytest.raises(ConfigError, match="`raysim recipes` lists the files"):
        read_config(Path("nowhere.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_shipped_config_is_valid_by_the_schema(path):
    raw = read_yaml(path)
    assert not [f"{error.json_path}: {error.message}" for error in SCHEMA.iter_errors(raw)]


def test_the_schema_knows_every_key_and_refuses_what_a_run_refuses():
    assert SCHEMA.is_valid(Config().model_dump(mode="json"))
    for raw in ("round: 3", "local: {lr: 0}", "methods: [fedporx]", "methods: [{fedprox: {nu: 1}}]", "base: 3"):
        assert not SCHEMA.is_valid(yaml.safe_load(raw)), raw
    for raw in (
        "base: b.yaml",
        "methods: ['mine:f', fedprox, {fedvg: }, {'mine:f': {a: 1}}]",
        "model: {name: x, y: 1}",
    ):
        assert SCHEMA.is_valid(yaml.safe_load(raw)), raw
    assert SCHEMA.schema["$defs"]["LocalGroup"]["properties"]["lr"]["description"].startswith("client learning rate")


def test_a_missing_file_names_the_file_beside_it_and_no_far_off_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.yaml").write_text("rounds: 1\n")
    (tmp_path / "other.yaml").write_text("rounds: 1\n")

    def said(name: str) -> str:
        with pytest.raises(ConfigError) as error:
            read_config(Path(name))
        return str(error.value)

    assert "Did you mean 'other.yaml'" in said(str(tmp_path / "othr.yaml"))
    assert "Did you mean" not in said("q")
    assert "Did you mean 'example:quickstart'?" in said("quickstart.yaml")
    assert "paper:fedvg/table_A3" in said("fedvg/table_A3")
