"""`raysim calibrate` end to end on a tiny transformer, and the file that it writes as livar's table."""

from __future__ import annotations

import csv
import json

import pytest
import yaml
from typer.testing import CliRunner

from raysim.__main__ import app
from raysim.assemble import check
from raysim.calibrate import FILE, plan_calibration
from raysim.config import read_config
from raysim.core.errors import ConfigError
from tests.helpers import ADAMW, LORA_VIT, lora_plan, raw_config, run

FEW = {"partitions": 1, "seeds": 1, "trees": 6, "min_leaf": 2}


def raw_calibration(root, storage, **groups):
    raw = raw_config(root, rounds=1, cohort={"size": None}, partition={"num_clients": 4, "alpha": 0.5}, **groups)
    raw |= {
        "model": {**LORA_VIT, "depth": 1},
        "local": dict(ADAMW),
        "calibrate": {**FEW, **groups.get("calibrate", {})},
    }
    raw["data"] |= {"test": 0.6}
    return {**raw, "name": "c", "storage": str(storage)}


@pytest.fixture(scope="module")
def calibrated(root, tmp_path_factory):
    """The folder of a calibration, and what the command said."""
    storage = tmp_path_factory.mktemp("runs")
    path = storage / "c.yaml"
    path.write_text(yaml.safe_dump(raw_calibration(root, storage)))
    result = CliRunner().invoke(app, ["calibrate", str(path)], catch_exceptions=False)
    assert result.exit_code == 0
    return storage / "c", result.output


def test_command_leaves_runs_rows_pictures_and_a_table(calibrated):
    folder, said = calibrated
    assert "run 1/2  p0-s0/federated  accuracy" in said
    assert str(folder / FILE) in said
    found = json.loads((folder / FILE).read_text())
    assert found["num_runs"] == 1
    assert sum(map(sum, found["counts"])) == found["num_rows"] == 4 * 4  # clients and adapted layers
    assert found["settings"]["trees"] == 6
    assert set(found["curves"]) == set(found["mean_abs_shap"]) == {"importance_a", "importance_b"}
    assert sum(found["curves"]["importance_b"]["count"]) == 16
    with open(folder / "rows.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 16
    assert {row["layer"] for row in rows} == {
        f"blocks.0.{name}" for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    }
    assert all(float(row["coefficient"]) >= 0 < float(row["importance_b"]) for row in rows)
    assert {"shap.png", "table.png", "prediction.png"} < {path.name for path in folder.iterdir()}
    assert len(list(folder.glob("events.out.tfevents.*"))) == 1
    assert (folder / "p0-s0" / "joint" / "COMPLETED").exists()


def test_again_only_the_fit_is_done_and_from_scratch_the_bytes_are_the_same(calibrated, root, tmp_path):
    folder, _ = calibrated
    before = (folder / FILE).read_bytes()
    stamp = (folder / "p0-s0" / "joint" / "COMPLETED").stat().st_mtime_ns
    again = CliRunner().invoke(app, ["calibrate", str(folder.parent / "c.yaml")], catch_exceptions=False)
    assert "2 of 2 runs are finished" in again.output
    assert (folder / FILE).read_bytes() == before
    assert (folder / "p0-s0" / "joint" / "COMPLETED").stat().st_mtime_ns == stamp
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(raw_calibration(root, tmp_path)))
    words = ["calibrate", str(tmp_path / "c.yaml"), "--beside", str(folder)]
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    assert (tmp_path / "c" / FILE).read_bytes() == before
    assert (tmp_path / "c" / "rows.csv").read_bytes() == (folder / "rows.csv").read_bytes()


def test_finished_runs_of_another_configuration_are_refused(calibrated):
    words = ["calibrate", str(calibrated[0].parent / "c.yaml"), "local.lr=0.5"]
    with pytest.raises(ConfigError, match=r"local: is .* but the finished run has"):
        CliRunner().invoke(app, words, catch_exceptions=False)


def test_livar_runs_with_the_table_of_a_file_which_its_configuration_then_holds(calibrated, root, monkeypatch):
    folder, _ = calibrated
    monkeypatch.chdir(folder.parent)
    plan = lora_plan(root, [{"livar": {"table": "c/calibration.json"}}], cohort={"size": 3}, rounds=1)
    found = json.loads((folder / FILE).read_text())
    content = {"table": found["table"], "cuts": found["cuts"]}
    assert plan.config.methods == [{"livar": {"table": content}}]
    mine = run(plan, root).params_sha256()
    monkeypatch.chdir(root)  # nothing looks for the file any more
    again = lora_plan(root, plan.config.methods, cohort={"size": 3}, rounds=1)
    assert run(again, root).params_sha256() == mine
    released = lora_plan(root, ["livar"], cohort={"size": 3}, rounds=1)
    assert run(released, root).params_sha256() != mine


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "neither released or paper nor a file"),
        ("{", "cannot be used"),
        ("[1, 2]", "holds a mapping"),
        ('{"table": [[1, 2], [3, 4]]}', "3 rows of 3 numbers"),
    ],
)
def test_missing_and_malformed_tables_are_one_fault_each(content, words, root, tmp_path):
    path = tmp_path / "t.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        lora_plan(root, [{"livar": {"table": str(path)}}])
    (fault,) = caught.value.faults
    assert fault.key == "methods[0].livar.table"
    assert words in fault.message


def test_faults_of_a_calibration_are_named_before_anything_runs(root, tmp_path):
    def faults(**changes):
        raw = raw_calibration(root, tmp_path)
        for key, value in changes.items():
            raw[key] = {**raw[key], **value} if isinstance(value, dict) else value
        with pytest.raises(ConfigError) as caught:
            plan_calibration(raw, "a test")
        return {fault.key: fault.message for fault in caught.value.faults}

    found = faults(rounds=2, methods=["fedprox"], partition={"scheme": "joint"}, calibrate={"cuts_a": [0.5, 0.2]})
    assert set(found) == {"rounds", "methods", "partition.scheme", "calibrate.cuts_a"}
    assert "must be > 0" in faults(local={"lr": 0})["local.lr"]
    assert "lora" in faults(model={"lora": None})["methods"]
    assert not (tmp_path / "c").exists()


def test_pairs_share_initial_values_partition_and_held_out_rows(root, tmp_path):
    raw = raw_calibration(root, tmp_path, seed=4, calibrate={"partitions": 2, "seeds": 2})
    found = plan_calibration(raw, "a test")
    assert [pair.name for pair in found.pairs] == ["p0-s0", "p0-s1", "p1-s0", "p1-s1"]
    assert [(p.joint.config.seed, p.joint.config.partition.seed) for p in found.pairs] == [
        (4, 4),
        (5, 4),
        (4, 5),
        (5, 5),
    ]
    for pair in found.pairs:
        assert pair.federated.config.seed == pair.joint.config.seed
        assert (pair.federated.manifest.test == pair.joint.manifest.test).all()
        assert len(pair.joint.manifest.clients) == 1
        assert [next(iter(m)) if isinstance(m, dict) else m for m in pair.federated.config.methods] == [
            "livar",
            "keep_factors",
        ]


def test_calibrate_group_leaves_a_run_alone(root, tmp_path):
    path = tmp_path / "c.yaml"
    raw = raw_calibration(root, tmp_path)
    path.write_text(yaml.safe_dump(raw))
    assert check(read_config(path), "a test").config.calibrate.trees == 6
