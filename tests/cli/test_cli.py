"""Commands as a user types them: one message with all faults, exit status 2, before Ray starts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from raysim.base.errors import ConfigError, DataError
from raysim.cli.main import app, main
from raysim.config import Config, parse_config, read_config
from raysim.data.arrow import describe, write_set
from raysim.data.rows import in_batches
from raysim.data.sources import set_path
from raysim.models import MODELS
from raysim.plan.check import check
from tests.support.federations import plan_of, raw_config

PROJECT = Path(__file__).parents[2]


def command(*words, cwd):
    return subprocess.run(
        [sys.executable, "-m", "raysim", *words],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={"PYTHONPATH": str(PROJECT), "PATH": "/usr/bin:/bin", "HOME": str(cwd)},
    )


def faults_of(raw):
    with pytest.raises(ConfigError) as caught:
        check(raw, "a test")
    return {fault.key: fault.message for fault in caught.value.faults}


@pytest.mark.essential
@pytest.mark.slow
def test_all_faults_at_once_with_status_2_before_ray_starts(root, tmp_path):
    raw = raw_config(root, ["fedprox", {"fedvg": {"granularity": "laier", "epps": 1}}, "uniform"])
    raw["resources"] = {"backend": "ray", "trainers": 1000}
    raw["partition"] |= {"alpha": 1e-4, "num_clients": 100}
    raw["storage"] = str(tmp_path / "runs")
    of_methods_and_data = (
        "fedvg.granularity: must be 'model', 'layer', 'block' or 'auto', got 'laier'",
        "fedvg.epps: unknown key. Did you mean 'eps'?",
        "resources.trainers: 1000 trainers with 1 CPUs each need 1000",
        "gave every client 2 examples",
    )
    refused(raw, of_methods_and_data, tmp_path)
    raw["local"] |= {"lr": 0, "momentu": 0.9}
    raw["methods"] = ["uniform", "fedporx"]
    of_keys_and_names = (
        "methods[1]: unknown method 'fedporx'. Did you mean 'fedprox'?",
        "local.lr: must be greater than 0, got 0",
        "local.momentu: unknown key. Did you mean 'momentum'?",
        "cohort.size:",
        "sed: unknown key. Did you mean 'seed'?",
    )
    refused(raw | {"cohort": {"size": "many"}, "sed": 1}, of_keys_and_names, tmp_path)


def refused(raw, faults, folder):
    (folder / "bad.yaml").write_text(yaml.safe_dump(raw))
    result = command("run", "bad.yaml", cwd=folder)
    text = result.stderr
    assert result.returncode == 2
    assert "Traceback" not in text
    assert f"{len(faults)} faults in bad.yaml" in text
    for words in faults:
        assert words in text, words
    assert not (folder / "runs").exists()
    assert "ray" not in result.stdout.lower()


def test_single_faults(root, tmp_path):
    assert "must be greater than or equal to 1, got 0" in faults_of(raw_config(root, rounds=0))["rounds"]
    assert (
        "must be greater than or equal to 1"
        in faults_of(raw_config(root, resources={"trainers": 0}))["resources.trainers"]
    )
    assert "population of 12" in faults_of(raw_config(root, cohort={"size": 13}))["cohort.size"]
    assert "Did you mean 'cnn'" in faults_of(raw_config(root, model={"name": "cmn"}))["model.name"]
    assert "unknown key" in faults_of(raw_config(root, model={"widht": 3}))["model.widht"]
    assert "must be a valid number" in faults_of(raw_config(root, local={"epochs": "two"}))["local.epochs"]
    for name, words in {"learning_rate": "local.lr", "batch_size": "local.batch_size or evaluation.batch_size"}.items():
        assert faults_of(raw_config(root, **{name: 1}))[name] == f"unknown key. Did you mean {words}?"
    assert "uniform and fedvg both decide" in faults_of(raw_config(root, ["uniform", "fedvg"]))["methods"]
    assert "0, got -1" in faults_of(raw_config(root, [{"fedprox": {"mu": -1}}]))["methods[0].fedprox.mu"]
    assert (
        "no prepared set 'cifar10'" in faults_of(raw_config(root, data={"root": str(root), "name": "cifar10"}))["data"]
    )


def test_what_only_building_shows_is_a_fault_too(root, tmp_path):
    for width in (0, -3):
        assert (
            "must be greater than or equal to 1" in faults_of(raw_config(root, model={"width": width}))["model.width"]
        )
    for name in ("json:dumps", "tests.support.toys:no_method", "tests.no_module:x"):
        assert any(key.startswith("methods[0]") for key in faults_of(raw_config(root, [name])))
    assert "cannot write there" in faults_of(raw_config(root, data={"root": "/proc/nothing"}))["data"]
    assert "not dots alone" in faults_of(raw_config(root, name="../x"))["name"]
    (tmp_path / "map.yaml").write_text("dog: []")
    external = {"external": {"name": "digits", "mapping": str(tmp_path / "map.yaml")}}
    assert "not a mapping" in str(faults_of(raw_config(root, data={"root": str(root), "validation_set": external})))


def test_dirichlet_that_leaves_a_client_empty_is_refused_in_bounded_time(root):
    message = faults_of(
        raw_config(root, partition={"alpha": 1e-3, "num_clients": 500, "min_samples": 1}, cohort={"size": 5})
    )["partition"]
    assert "Raise partition.alpha, or lower partition.num_clients" in message
    message = faults_of(raw_config(root, partition={"num_clients": 2000, "min_samples": 1}, cohort={"size": 5}))[
        "partition"
    ]
    assert "cannot give 2000 clients" in message


def test_file_that_is_no_arrow_file_is_named(tmp_path):
    images = np.zeros((100, 4, 4, 1), np.uint8)
    path = set_path(tmp_path, "mine")
    write_set(path, "mine", "ab", in_batches(images, np.arange(100) % 2))
    groups = {
        "data": {"root": str(tmp_path), "name": "mine"},
        "partition": {"num_clients": 3, "alpha": 10.0},
        "cohort": {"size": 2},
    }
    plan_of(tmp_path, **groups)
    path.write_bytes(b"no arrow at all")
    message = faults_of(raw_config(tmp_path, **groups))["data"]
    assert "not a readable Arrow IPC file" in message
    assert str(path) in message
    write_set(path, "mine", "ab", in_batches(images, np.arange(100) % 2))
    with open(path, "r+b") as file:
        file.truncate(1000)
    assert "not a readable Arrow IPC file" in faults_of(raw_config(tmp_path, **groups))["data"]
    describe(path).unlink()
    assert "description" in faults_of(raw_config(tmp_path, **groups))["data"]


def test_labels_and_shapes_are_checked_and_nothing_half_written_stays(tmp_path):
    path = set_path(tmp_path, "mine")
    good = np.zeros((5, 4, 4, 1), np.uint8)
    with pytest.raises(DataError, match=r"label 7 outside 0\.\.1 in mine, row 8"):
        write_set(path, "mine", "ab", [(good, np.zeros(5, int)), (good, np.array([0, 1, 0, 7, 1]))])
    with pytest.raises(DataError, match=r"shape \(3, 4, 1\)"):
        write_set(path, "mine", "ab", [(good, np.zeros(5, int)), (good[:, :3], np.zeros(5, int))])
    with pytest.raises(DataError, match="no examples"):
        write_set(path, "mine", "ab", [])
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "value"), [("1e-3", 1e-3), ("0.5", 0.5), ("1E5", 1e5), ("-2e2", -200.0), (".5e1", 5.0)]
)
def test_numbers_are_numbers(text, value, tmp_path):
    assert read_config(None, [f"a.b={text}"]) == {"a": {"b": value}}
    (tmp_path / "c.yaml").write_text(f"x: {text}\n")
    assert read_config(tmp_path / "c.yaml") == {"x": value}


def test_precedence_is_command_line_file_default(tmp_path):
    (tmp_path / "c.yaml").write_text("local: {lr: 0.5, batch_size: 8}\n")
    config, faults = parse_config(
        read_config(tmp_path / "c.yaml", ["local.lr=0.25", "methods=[fedprox, {fedvg: {norm: l2}}]"])
    )
    assert not faults
    assert (config.local.lr, config.local.batch_size, config.local.momentum) == (0.25, 8, 0.0)
    assert config.methods == ["fedprox", {"fedvg": {"norm": "l2"}}]


@pytest.mark.parametrize("override", ["lr", "=3", "local.lr.x=3", "a=[1"])
def test_malformed_override_is_refused(override, tmp_path):
    (tmp_path / "c.yaml").write_text("local: {lr: 0.5}\n")
    with pytest.raises(ConfigError):
        read_config(tmp_path / "c.yaml", [override])


def test_missing_or_broken_file_is_one_message(tmp_path):
    for text in (None, "a: [1", "- 1"):
        path = tmp_path / "c.yaml"
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)
        with pytest.raises(ConfigError, match="1 fault in"):
            read_config(path)


def test_print_config_round_trips(root):
    result = CliRunner().invoke(app, ["run", str(PROJECT / "configs" / "quickstart.yaml"), "--print-config", "seed=7"])
    assert result.exit_code == 0
    config = Config.model_validate(yaml.safe_load(result.stdout))
    assert (config.seed, config.partition.num_clients) == (7, 20)


CONFIGS = sorted((PROJECT / "configs").glob("*.yaml"))  # those of papers and studies: test_recipes.py


@pytest.mark.slow
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_shipped_config_passes_its_checks(path, root):
    check(read_config(path, [f"data.root={root}"]), str(path))


@pytest.mark.essential
@pytest.mark.slow
def test_methods_prepare_and_doctor(tmp_path):
    runner = CliRunner()
    listing = runner.invoke(app, ["methods"]).stdout
    assert all(name in listing for name in ("fedavgm", "fedprox", "fedvg", "uniform"))
    assert "eqs. 4 and 5" in runner.invoke(app, ["methods", "fedvg"]).stdout
    for name, architecture in MODELS.items():
        assert f"{architecture.head}.weight" in runner.invoke(app, ["methods", "--model", name]).stdout
        assert name in listing
    result = runner.invoke(app, ["prepare", "digits", "--out", str(tmp_path)])
    assert result.exit_code == 0
    assert "1797 images" in result.stdout
    assert set_path(tmp_path, "digits").is_file()
    assert "digits" in runner.invoke(app, ["prepare"]).stdout
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 0, result.stdout
    assert "torch and torchvision match" in result.stdout


def test_unknown_names_have_status_2(monkeypatch, capsys):
    for words, near in (
        (["methods", "fedprx"], "fedprox"),
        (["prepare", "digitz"], "digits"),
        (["methods", "--model", "cmn"], "cnn"),
        (["tune", "fedvg/table_A3"], "paper:fedvg/table_A3"),
    ):
        monkeypatch.setattr(sys, "argv", ["raysim", *words])
        with pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code == 2
        assert re.search(f"id you mean '?{near}", capsys.readouterr().err), words


def test_a_file_is_laid_over_its_base_key_by_key(tmp_path):
    (tmp_path / "below.yaml").write_text("rounds: 3\nlocal: {lr: 0.1, epochs: 2}\nmethods: [fedprox]\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "above.yaml").write_text("base: ../below.yaml\nlocal: {lr: 0.5}\nmethods: []\n")
    raw = read_config(tmp_path / "sub" / "above.yaml", ["rounds=9"])
    assert raw == {"rounds": 9, "local": {"lr": 0.5, "epochs": 2}, "methods": []}


def test_bases_in_a_circle_and_missing_bases_are_faults(tmp_path):
    (tmp_path / "a.yaml").write_text("base: b.yaml\n")
    (tmp_path / "b.yaml").write_text("base: a.yaml\n")
    with pytest.raises(ConfigError, match="leads back"):
        read_config(tmp_path / "a.yaml")
    (tmp_path / "b.yaml").write_text("base: nowhere.yaml\n")
    with pytest.raises(ConfigError, match="nowhere"):
        read_config(tmp_path / "a.yaml")


def test_scaled_runs_have_a_name_of_their_own_unless_given_one(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("name: full\nrounds: 9\nscale: {rounds: 2}\n")
    for words, name, rounds in (
        ([], "full", 9),
        (["--scaled"], "full_scaled", 2),
        (["--scaled", "name=mine"], "mine", 2),
        (["--scaled", "rounds=3"], "full_scaled", 3),
        (["--scaled", "scale.rounds=4"], "full_scaled", 4),
    ):
        printed = yaml.safe_load(CliRunner().invoke(app, ["run", str(path), "--print-config", *words]).stdout)
        assert (printed["name"], printed["rounds"]) == (name, rounds)
