"""`raysim calibrate` end to end on a tiny transformer, and the file that it writes as livar's table."""

from __future__ import annotations

import csv
import json
import re
import shutil

import numpy as np
import pytest
import torch
import yaml
from matplotlib.figure import Figure
from safetensors.torch import load_file, save_file
from scipy.optimize import nnls
from typer.testing import CliRunner

from raysim.base.errors import ConfigError
from raysim.cli.main import app
from raysim.config import read_config
from raysim.config.schema_data import PartitionGroup
from raysim.folders.run_folder import RunFolder
from raysim.plan.check import check
from raysim.running.runner import execute
from raysim.tuning.calibrate import FILE, plan_calibration, rows_of
from raysim.tuning.calibrate_figures import curves_figure, prediction_figure, table_figure
from tests.support.federations import ADAMW, LORA_VIT, lora_plan, raw_config, run

TABLE_A = [[0.038, 0.100, 0.193], [0.038, 0.089, 0.118], [0.038, 0.078, 0.093]]
FEW = {"partitions": 1, "seeds": 1, "trees": 6}


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
def calibrated(root, tmp_path_factory, ray_cluster):
    """The folder of a calibration, and what the command said."""
    storage = tmp_path_factory.mktemp("runs")
    path = storage / "c.yaml"
    path.write_text(yaml.safe_dump(raw_calibration(root, storage)))
    result = CliRunner().invoke(app, ["calibrate", str(path)], catch_exceptions=False)
    assert result.exit_code == 0
    return storage / "c", result.output


@pytest.mark.slow
def test_command_leaves_runs_rows_pictures_and_a_table(calibrated):
    folder, said = calibrated
    assert re.search(r"[12]/2  p0-s0/federated  accuracy 0\.", said)
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
    for row, paper in zip(found["table"], TABLE_A, strict=True):
        for own, theirs in zip(row, paper, strict=True):
            assert f"{own:.4f} ({theirs:.3f})" in said
    assert (folder / "p0-s0" / "joint" / "COMPLETED").exists()


LAYERS = [f"blocks.0.{name}" for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]


def kept(folder):
    """Arrays of the federated run, and the joint run's tensors."""
    with np.load(folder / "p0-s0" / "federated" / "arrays" / "round_00000.npz") as arrays:
        return dict(arrays), load_file(folder / "p0-s0" / "joint" / "model.safetensors")


def joint_name(layer, factor):
    return f"{layer}.lora_{factor.upper()}.default.weight"


def test_rows_are_what_dense_least_squares_say_of_the_runs(calibrated):
    """Importances, counts and coefficients of every row; eq. 4 with the ridge as further equations, solved densely."""
    arrays, joint = kept(calibrated[0])
    with open(calibrated[0] / "rows.csv", newline="") as file:
        found = {(int(row["client"]), row["layer"]): row for row in csv.DictReader(file)}
    clients = arrays["livar.importance_a:clients"].tolist()
    columns = arrays["livar.importance_a:columns"].tolist()
    assert set(found) == {(client, layer) for client in clients for layer in LAYERS}
    for layer in LAYERS:
        a, b = (arrays[f"keep_factors.{layer}.{factor}"].astype(float) for factor in "ab")
        products = np.stack([(b[k] @ a[k]).ravel() for k in range(4)], axis=1)
        wanted = joint[joint_name(layer, "b")].double() @ joint[joint_name(layer, "a")].double()
        ridge = (1e-6 * np.square(products).sum() / 4) ** 0.5
        matrix = np.vstack([products, ridge * np.eye(4)])
        coefficients = nnls(matrix, np.concatenate([wanted.numpy().ravel(), np.full(4, ridge / 4)]))[0]
        for k, client in enumerate(clients):
            row = found[client, layer]
            assert float(row["coefficient"]) == pytest.approx(coefficients[k], rel=1e-6, abs=1e-9)
            assert float(row["num_examples"]) == arrays["keep_factors.num_examples"][k]
            for name in ("importance_a", "importance_b"):
                assert float(row[name]) == arrays[f"livar.{name}"][k, columns.index(layer)]


def test_rows_find_the_client_that_the_joint_run_is_made_of(calibrated, root, tmp_path):
    """In layer l the joint update is 0.2 (l + 1) times client l's, so mixed-up layers, factors or clients would show."""
    shutil.copytree(calibrated[0], tmp_path / "c")
    arrays, joint = kept(tmp_path / "c")
    for index, layer in enumerate(LAYERS):
        for factor, share in (("a", 1.0), ("b", 0.2 * (index + 1))):
            joint[joint_name(layer, factor)].copy_(
                share * torch.from_numpy(arrays[f"keep_factors.{layer}.{factor}"][index])
            )
    save_file(joint, tmp_path / "c" / "p0-s0" / "joint" / "model.safetensors")
    RunFolder(tmp_path / "c" / "p0-s0" / "joint").mark("COMPLETED", "")  # as if the run had written it
    rows = rows_of(plan_calibration(raw_calibration(root, tmp_path), "a test"))
    assert rows.client.tolist() == np.repeat(arrays["livar.importance_a:clients"], 4).tolist()
    assert rows.layer.tolist() == LAYERS * 4
    assert np.allclose(rows.coefficient.to_numpy().reshape(4, 4), np.diag([0.2, 0.4, 0.6, 0.8]), atol=1e-3)


def test_forest_with_the_number_of_examples_leaves_the_table_alone(calibrated, tmp_path):
    shutil.copytree(calibrated[0], tmp_path / "c")
    (tmp_path / "c.yaml").write_text((calibrated[0].parent / "c.yaml").read_text())
    before = {path.name: path.read_bytes() for path in (tmp_path / "c").iterdir() if path.is_file()}
    words = ["calibrate", str(tmp_path / "c.yaml"), f"storage={tmp_path}", "calibrate.count_feature=true"]
    said = CliRunner().invoke(app, words, catch_exceptions=False).output
    assert "2 of 2 runs are finished" in said
    assert str(tmp_path / "c" / "count" / "calibration.json") in said.replace("\n", "")
    after = {path.name: path.read_bytes() for path in (tmp_path / "c").iterdir() if path.is_file()}
    # The settings of the calibration are those of the last command.
    assert {**after, "sweep.yaml": b""} == {**before, "sweep.yaml": b""}
    count = {path.name: path.read_bytes() for path in (tmp_path / "c" / "count").iterdir()}
    (events,) = (name for name in count if name.startswith("events."))
    files = {"calibration.json", "calibration.yaml", "rows.csv", "shap.png", "table.png", "prediction.png"}
    assert set(count) == {events, *files}
    assert set(json.loads(count["calibration.json"])["curves"]) == {"importance_a", "importance_b", "num_examples"}
    assert count["rows.csv"] == before["rows.csv"]


@pytest.mark.slow
def test_again_only_the_fit_is_done_and_elsewhere_the_bytes_are_the_same(calibrated, root, tmp_path):
    """That runs of the same seed are the same is for other tests: here only their folders are elsewhere."""
    folder, _ = calibrated
    before = (folder / FILE).read_bytes()
    stamp = (folder / "p0-s0" / "joint" / "COMPLETED").stat().st_mtime_ns
    again = CliRunner().invoke(app, ["calibrate", str(folder.parent / "c.yaml")], catch_exceptions=False)
    assert "2 of 2 runs are finished" in again.output
    assert (folder / FILE).read_bytes() == before
    assert (folder / "p0-s0" / "joint" / "COMPLETED").stat().st_mtime_ns == stamp
    shutil.copytree(folder / "p0-s0", tmp_path / "c" / "p0-s0")
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(raw_calibration(root, tmp_path)))
    words = ["calibrate", str(tmp_path / "c.yaml"), "--beside", str(folder)]
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    assert (tmp_path / "c" / FILE).read_bytes() == before
    assert (tmp_path / "c" / "rows.csv").read_bytes() == (folder / "rows.csv").read_bytes()


def test_finished_runs_of_another_configuration_are_refused(calibrated):
    words = ["calibrate", str(calibrated[0].parent / "c.yaml"), "local.lr=0.5"]
    with pytest.raises(
        ConfigError, match=r"local\.lr: is 0\.5, but finished trial p0-s0/federated \(and 1 more\) has 0\.005"
    ):
        CliRunner().invoke(app, words, catch_exceptions=False)


def test_livar_runs_with_the_table_of_the_yaml_that_a_calibration_writes(calibrated, root, tmp_path):
    folder, _ = calibrated
    (tmp_path / "mine.yaml").write_text(f"base: {folder / 'calibration.yaml'}\nrounds: 1\n")
    methods = read_config(tmp_path / "mine.yaml")["methods"]
    found = json.loads((folder / FILE).read_text())
    assert methods == [{"livar": {"table": {"table": found["table"], "cuts": found["cuts"]}}}]
    mine = run(lora_plan(root, methods, cohort={"size": 3}, rounds=1), root).params_sha256()
    released = lora_plan(root, ["livar"], cohort={"size": 3}, rounds=1)
    assert run(released, root).params_sha256() != mine


@pytest.mark.parametrize(
    ("content", "words"), [("t.json", "'released', 'paper'"), ({"table": [[1, 2], [3, 4]]}, "3 rows of 3 numbers")]
)
def test_malformed_tables_are_one_fault_each(content, words, root):
    with pytest.raises(ConfigError) as caught:
        lora_plan(root, [{"livar": {"table": content}}])
    (fault,) = caught.value.faults
    assert fault.key.startswith("methods[0].livar")
    assert words in fault.message


def test_faults_of_a_calibration_are_named_before_anything_runs(root, tmp_path):
    def faults(**changes):
        raw = raw_calibration(root, tmp_path)
        for key, value in changes.items():
            raw[key] = {**raw[key], **value} if isinstance(value, dict) else value
        with pytest.raises(ConfigError) as caught:
            plan_calibration(raw, "a test")
        return {fault.key: fault.message for fault in caught.value.faults}

    joint = {**PartitionGroup().model_dump(), "scheme": "joint"}
    found = faults(rounds=2, methods=["fedprox"], partition=joint)
    assert set(found) == {"rounds", "methods", "partition.scheme"}
    assert "must be greater than 0" in faults(local={"lr": 0})["local.lr"]
    assert "lora" in faults(model={"lora": None})["methods"]
    for options in ({"components": "head"}, {"layers": "examples"}):
        assert "counts the importances" in faults(methods=[{"livar": options}])["methods"]
    assert not (tmp_path / "c").exists()


@pytest.mark.slow
def test_a_start_with_adapters_in_it_is_refused_and_one_without_keeps_its_place(root, tmp_path, monkeypatch):
    raw = raw_calibration(root, tmp_path)
    for name, lora in (("with", LORA_VIT["lora"]), ("without", None)):
        model, few = {"depth": 1, "lora": lora}, {"rounds": 1, "cohort": {"size": 2}}
        plan = lora_plan(root, name=name, storage=str(tmp_path), model=model, **few)
        execute(plan, on_start=lambda *_: None, on_round=lambda _: None)
    raw["model"] = {**raw["model"], "pretrained": str(tmp_path / "with" / "model.safetensors")}
    with pytest.raises(ConfigError) as caught:
        plan_calibration(raw, "a test")
    (fault,) = caught.value.faults
    assert fault.key == "model.pretrained"
    assert "holds adapters" in fault.message
    raw["model"]["pretrained"] = str(tmp_path / "without" / "model.safetensors")
    assert len(plan_calibration(raw, "a test").trials) == 2
    monkeypatch.chdir(tmp_path)
    raw["model"]["pretrained"] = "without/model.safetensors"  # trials run elsewhere and record the whole path
    kept = {trial.config.model.pretrained for trial in plan_calibration(raw, "a test").trials}
    assert kept == {str(tmp_path / "without" / "model.safetensors")}
    raw["model"]["pretrained"] = str(tmp_path / "nowhere.pt")
    with pytest.raises(ConfigError, match="no such file"):
        plan_calibration(raw, "a test")


def test_pairs_share_initial_values_partition_and_held_out_rows(root, tmp_path):
    raw = raw_calibration(root, tmp_path, seed=4, calibrate={"partitions": 2, "seeds": 2})
    trials = plan_calibration(raw, "a test").trials
    names = ["p0-s0", "p0-s1", "p1-s0", "p1-s1"]
    assert [trial.name for trial in trials] == [f"{name}/{kind}" for name in names for kind in ("federated", "joint")]
    seeds = [(trial.config.seed, trial.config.partition.seed) for trial in trials]
    assert seeds[::2] == seeds[1::2] == [(4, 4), (5, 4), (4, 5), (5, 5)]
    for pair in zip(trials[::2], trials[1::2], strict=True):
        federated, joint = (check(trial.config.model_dump(mode="json"), "a test").manifest for trial in pair)
        assert (federated.test == joint.test).all()
        assert len(joint.clients) == 1
        assert [spec.name for spec in pair[0].config.methods] == ["livar", "keep_factors"]


def test_calibrate_group_leaves_a_run_alone(root, tmp_path):
    path = tmp_path / "c.yaml"
    raw = raw_calibration(root, tmp_path)
    path.write_text(yaml.safe_dump(raw))
    assert check(read_config(path), "a test").config.calibrate.trees == 6


# --- figures ----------------------------------------------------------------------------------------------------------


def found_of(scale, **features):
    curves = {
        name: {"quantile": [0.25, 0.75], "mean": [-scale, scale], "std": [0.1 * scale, 0.2 * scale], "count": [1, 1]}
        for name in ("importance_a", "importance_b", *features)
    }
    table = [[scale * (3 * row + column + 1) for column in range(3)] for row in range(3)]
    counts = [[2 * (row + column) for column in range(3)] for row in range(3)]
    cuts = [[0.25, 0.5], [0.6, 0.8 + scale / 100]]
    return {"curves": curves, "cuts": cuts, "table": table, "counts": counts, "base": 0.5, "oob_r2": 0.125}


def test_curves_are_drawn_over_each_other_with_the_first_ones_cuts():
    figure = curves_figure({"own": found_of(1.0, num_examples=True), "other": found_of(3.0)})
    panels = figure.axes
    assert [axes.get_xlabel() for axes in panels] == [
        "quantile of $I_A$", "quantile of $I_B$", "quantile of number of examples $n_i$"
    ]  # fmt: skip
    for axes, cuts, labels in zip(panels, [[0.25, 0.5], [0.6, 0.81], []], ["own other"] * 2 + ["own"], strict=True):
        curves = {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}
        assert list(curves) == labels.split()
        for label, scale in (("own", 1.0), ("other", 3.0)):
            if label in curves:
                assert curves[label].get_xydata().tolist() == [[0.25, -scale], [0.75, scale]]
        dotted = [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == ":"]
        assert dotted == pytest.approx(cuts)
        bands = [band.get_paths()[0].vertices[:, 1] for band in axes.collections]
        assert [(low.min(), low.max()) for low in bands] == [
            pytest.approx((-1.1 * scale, 1.2 * scale)) for scale in (1.0, 3.0)[: len(curves)]
        ]
        assert axes.get_ylim() == panels[0].get_ylim()
    assert [text.get_text() for text in figure.legends[0].texts] == ["own", "other"]
    assert not curves_figure({"own": found_of(1.0)}).legends


def test_table_and_prediction_show_their_numbers():
    axes = table_figure(found_of(0.1)).axes[0]
    assert axes.images[0].get_array().tolist() == found_of(0.1)["table"]
    told = {text.get_position(): text.get_text() for text in axes.texts}
    assert told[2, 0] == "0.300\n4 rows"  # column high of the row low: I_B right, I_A down
    assert told[0, 1] == "0.400\n2 rows"
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_title()) == (
        "$I_B$",
        "$I_A$",
        "raw coefficients, base 0.5000; hatched: fewer than 5 rows",
    )
    hatched = {(int(patch.get_x() + 0.5), int(patch.get_y() + 0.5)) for patch in axes.patches if patch.get_hatch()}
    assert hatched == {place for place in np.ndindex(3, 3) if 2 * sum(place) < 5}
    enough = table_figure({**found_of(0.1), "counts": [[5] * 3] * 3}).axes[0]
    assert (len(enough.patches), enough.get_title()) == (0, "raw coefficients, base 0.5000")
    assert len(axes.figure.axes) == 2  # and the colour bar
    both = table_figure(found_of(0.1), {"table A": TABLE_A}).axes
    assert both[1].get_title() == "table A"
    assert both[1].images[0].get_array().tolist() == TABLE_A
    assert {text.get_position(): text.get_text() for text in both[1].texts}[2, 0] == "0.193"
    assert both[0].images[0].get_clim() == both[1].images[0].get_clim()  # one scale of colours
    figure = prediction_figure(np.array([0.1, 0.9]), np.array([0.2, 0.4]), 0.125)
    assert isinstance(figure, Figure)
    points, diagonal = figure.axes[0].lines
    assert points.get_xydata().tolist() == [[0.1, 0.2], [0.9, 0.4]]
    assert diagonal.get_xydata().tolist() == [[0.1, 0.1], [0.9, 0.9]]
    assert figure.axes[0].get_title() == "out-of-bag $R^2$ 0.125"
