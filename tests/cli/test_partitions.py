"""`raysim partition`: what a run or a sweep would train and score on, without training."""

from __future__ import annotations

import csv
import json
from collections import Counter

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from raysim.base.errors import ConfigError, DataError
from raysim.cli.main import app
from raysim.cli.partitions import partitions
from tests.support.federations import raw_config


def a_sweep(root, **space):
    raw = raw_config(root, [], data={"root": str(root), "validation": 0.3})
    raw["tune"] = {"param_space": {name: {"grid_search": values} for name, values in space.items()}}
    return raw


def rows_of(folder):
    with open(folder / "partition.csv") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_each_partition_of_a_sweep_is_drawn_once_with_its_validation_set(root, tmp_path):
    space = {
        "method": {"FedAvg": {"methods": []}, "FedVG": {"methods": ["fedvg"]}},
        "partition.alpha": [100.0, 0.3],
        "data.validation_set.imbalance": [1.0, 0.5],
    }
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(a_sweep(root, **space), sort_keys=False))
    result = CliRunner().invoke(app, ["partition", str(path), "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    names = {f"alpha={alpha}_imbalance={rho}" for alpha in (100.0, 0.3) for rho in (1.0, 0.5)}
    assert {folder.name for folder in (tmp_path / "out").iterdir()} == names  # methods make no difference
    for name in names:
        folder = tmp_path / "out" / name
        files = {file.name for file in folder.iterdir()}
        assert files == {"partition.json", "partition.csv", "examples.csv", "partition.png", "validation.png"}
        *clients, validation = rows_of(folder)
        known = json.loads((folder / "partition.json").read_text())
        with open(folder / "examples.csv") as file:
            owners = Counter(row["client"] for row in csv.DictReader(file) if row["split"] == "train")
        assert {row["client"]: int(row["examples"]) for row in clients} == owners
        assert all(sum(int(row[f"class {i}"]) for i in range(10)) == int(row["examples"]) for row in clients)
        assert validation["client"] == "validation"
        counts = np.array([int(validation[f"class {i}"]) for i in range(10)])
        assert counts.sum() == len(known["validation"]) == int(validation["examples"])
        if "imbalance=0.5" in name:  # FedVG, eq. E.8: halved from class to class, of half the 539 rows
            shares = 0.5 ** np.arange(10)
            wanted = np.floor(539 / 2 * shares / shares.sum())
            assert (counts <= wanted).all()
            assert (counts[3:] == wanted[3:]).all()  # the first classes have fewer rows than that
    assert not (tmp_path / "runs").exists()


def test_partitions_have_names_of_their_own_where_an_axis_counts_with_some_labels_only(root):
    """FedVG's figure 7: rho is an axis of FedVG's trials alone."""
    raw = a_sweep(root, method=["FedAvg", "FedVG"], **{"data.validation_set.imbalance": [0.9, 0.5]})
    raw["tune"]["settings"] = {"method": {"FedAvg": {"methods": []}, "FedVG": {"methods": ["fedvg"]}}}
    raw["tune"]["only"] = {"data.validation_set.imbalance": {"method": ["FedVG"]}}
    names = [partition.name for partition in partitions(raw, "a test")]
    assert names == ["method=FedAvg", "method=FedVG_imbalance=0.9", "method=FedVG_imbalance=0.5"]


def test_ranges_that_no_partition_depends_on_are_passed_over(root):
    raw = a_sweep(root, **{"partition.alpha": [0.1, 1.0], "seed": [0]})
    raw["tune"] |= {
        "search": "random",
        "param_space": {**raw["tune"]["param_space"], "local.lr": {"log_uniform": [0.01, 0.1]}},
        "only": {"local.lr": {"seed": [0]}},
    }
    assert [partition.name for partition in partitions(raw, "a test")] == ["alpha=0.1", "alpha=1.0"]
    raw["tune"]["param_space"] = {"partition.alpha": {"log_uniform": [0.01, 0.1]}}
    with pytest.raises(ConfigError, match=r"partition\.alpha: is a range"):
        partitions({**raw, "tune": {**raw["tune"], "only": {}}}, "a test")
    single = {**raw, "tune": {"param_space": {"local.lr": {"log_uniform": [0.01, 0.1]}}}}
    assert [partition.name for partition in partitions(single, "a test")] == ["partition"]


@pytest.mark.parametrize("tune", [{"only": 5}, {"settings": {"case": {"a": 5}}}])
def test_a_fault_of_the_sweep_is_one_of_the_file(root, tune):
    raw = a_sweep(root, seed=[0, 1])
    raw["tune"] |= tune
    with pytest.raises(ConfigError, match="tune"):
        partitions(raw, "a test")


def test_a_run_has_one_partition_and_its_number_of_draws(root):
    raw = raw_config(root, [], partition={"alpha": 0.1, "num_clients": 20, "min_samples": 12})
    (only,) = partitions(raw, "a test")
    assert only.name == "partition"
    assert only.manifest.num_draws > 1
    assert json.loads(only.manifest.to_json())["num_draws"] == only.manifest.num_draws
    with pytest.raises(DataError, match="trial num_clients=5000: "):
        partitions(a_sweep(root, **{"partition.num_clients": [12, 5000]}), "a test")
