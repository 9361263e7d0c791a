"""Whole runs: the run directory, and errors."""

from __future__ import annotations

import csv
import json
import time

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from raysim.base.errors import ClientError, RaysimError, RunExists
from raysim.data.readers.reader_options import ReaderOptions
from raysim.data.sources import prepare
from raysim.running.runner import execute
from tests.support.federations import plan_of, run
from tests.support.runs import a_plan, quietly, rows_of, stopped_after


def test_run_directory_is_complete_and_its_parts_agree(root, tmp_path):
    methods = ["fedprox", {"fedvg": {"granularity": "block"}}]
    summary = quietly(a_plan(root, tmp_path, methods, data={"test": 0.25}))  # curves that do not move are not shown
    folder = tmp_path / "a"
    names = {path.name for path in folder.iterdir()}
    assert {
        "config.yaml",
        "env.json",
        "partition.csv",
        "partition.json",
        "progress.csv",
        "clients.parquet",
        "confusion.csv",
        "confusion.png",
        "summary.json",
        "COMPLETED",
    } <= names
    assert "FAILED" not in names
    assert summary == json.loads((folder / "summary.json").read_text())
    rows = rows_of(folder)
    assert [row["round"] for row in rows] == ["0", "1", "2"]
    assert summary["accuracy"] == float(rows[-1]["server/accuracy"])
    assert summary["best_accuracy"] == max(float(row["server/accuracy"]) for row in rows)
    clients = pq.read_table(folder / "clients.parquet").to_pandas()
    assert len(clients) == 3 * 7
    assert np.allclose(clients.groupby("round")["weight"].sum(), 1)
    assert set(clients.columns) >= {"round", "client", "num_examples", "num_steps", "seconds", "train_loss", "weight"}
    board = EventAccumulator(str(folder), size_guidance={"images": 0}).Reload()
    for tag in ("server/accuracy", "train/loss", "system/round_s", "clients/expected_accuracy_mean"):
        points = [(event.step, event.value) for event in board.Scalars(tag)]
        assert [step for step, _ in points] == [0, 1, 2]
        assert np.allclose([value for _, value in points], [float(row[tag]) for row in rows], rtol=1e-6)
    assert "system/nodes" in board.Tags()["scalars"]  # a constant, too
    assert "weights/all" in board.Tags()["histograms"]
    assert {"weights/client_by_block", "partition/classes", "server/confusion"} <= set(board.Tags()["images"])
    assert yaml.safe_load((folder / "config.yaml").read_text())["partition"]["num_clients"] == 12
    partition = json.loads((folder / "partition.json").read_text())
    with open(folder / "partition.csv") as file:
        *rows, validation = csv.DictReader(file)
    assert (validation["client"], int(validation["examples"])) == ("validation", len(partition["validation"]))
    examples = pd.read_csv(folder / "examples.csv")
    assert examples["example"].tolist() == list(range(1797))
    assert examples["client"].value_counts().sort_index().tolist() == [int(row["examples"]) for row in rows]
    assert sorted(partition["validation"]) == examples["example"][examples["split"] == "validation"].tolist()


def test_pictures_of_the_partition_are_there_after_a_short_run_and_after_one_that_was_stopped(root, tmp_path):
    plan = a_plan(root, tmp_path, rounds=2, checkpoint={"every_s": 0})
    stopped_after(0, plan)
    quietly(plan)
    names = {path.name for path in (tmp_path / "a").glob("*.png")}
    assert names == {"partition.png", "validation.png", "confusion.png"}


def test_bytes_are_those_of_the_tensors_sent(root):
    plan = plan_of(root, ["scaffold"])
    server = run(plan, root, rounds=0)
    record = server.run_round(0)
    size = 4 * plan.layout.num_params
    assert record.metrics["comm/down_mb"] * 1e6 == pytest.approx(7 * 2 * size)
    assert record.metrics["comm/up_mb"] * 1e6 == pytest.approx(7 * 2 * size)


def test_finished_run_is_never_overwritten(root, tmp_path):
    plan = a_plan(root, tmp_path)
    quietly(plan)
    before = (tmp_path / "a" / "summary.json").read_bytes()
    assert quietly(plan) == json.loads(before)
    with pytest.raises(RunExists, match="choose another name"):
        quietly(a_plan(root, tmp_path, rounds=1))
    assert (tmp_path / "a" / "summary.json").read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["serial", "ray"])
def test_client_that_raises_ends_the_run_with_its_facts(backend, root, tmp_path, ray_cluster):
    plan = a_plan(
        root,
        tmp_path,
        [{"tests.support.toys:raises": {"client": 4, "round_index": 1}}],
        cohort={"size": 12},
        resources={"backend": backend, "trainers": 2},
    )
    began = time.monotonic()
    with pytest.raises(ClientError) as caught:
        quietly(plan)
    assert (caught.value.client, caught.value.round_index) == (4, 1)
    assert "ZeroDivisionError: the toy divides by zero" in str(caught.value)
    assert "client 4 failed in round 2" in str(caught.value)
    assert time.monotonic() - began < 60
    assert "ZeroDivisionError" in (tmp_path / "a" / "FAILED").read_text()
    assert ray_cluster.is_initialized()  # a Ray that the run did not start is left alone


@pytest.mark.slow
def test_nonfinite_update_stops_or_is_skipped(root, tmp_path):
    poison = [{"tests.support.toys:poison": {"client": 5}}]
    groups = {"cohort": {"size": 12}}
    with pytest.raises(RaysimError, match=r"non-finite update of client 5 in round 1.*on_nonfinite"):
        quietly(a_plan(root, tmp_path, poison, **groups))
    for methods in (poison, [*poison, "fedvg"]):
        plan = plan_of(
            root, methods, on_nonfinite="skip", name="b" + str(len(methods)), storage=str(tmp_path), **groups
        )
        quietly(plan)
        clients = pq.read_table(tmp_path / plan.config.name / "clients.parquet").to_pandas()
        assert clients[clients.is_dropped].client.tolist() == [5, 5, 5]
        assert (clients[clients.client == 5].weight == 0).all()
        rest = clients[clients.client != 5]
        assert np.allclose(rest.groupby("round").weight.sum(), 1)


@pytest.mark.parametrize("methods", [["fedvg"], ["elastic"], ["ccvr"]])
def test_a_whole_cohort_that_diverged_is_an_error_and_no_round(methods, root, tmp_path):
    poison = {"tests.support.toys:poison": {"client": 0}}
    plan = a_plan(
        root, tmp_path, [poison, *methods], on_nonfinite="skip", partition={"num_clients": 1}, cohort={"size": 1}
    )
    with pytest.raises(
        RaysimError,
        match=r"non-finite updates of all 1 clients in round 1\. The first number of client 0 .* at the gradients of the methods",
    ):
        quietly(plan)


def test_a_global_model_that_is_not_finite_ends_the_run_and_names_the_method(root, tmp_path):
    plan = a_plan(root, tmp_path, ["fedprox", "tests.support.toys:spoils"])
    with pytest.raises(RaysimError, match=r"the new global model is not finite \(server methods: spoils\) in round 1"):
        quietly(plan)


def test_dropped_client_keeps_the_memory_it_had(root):
    plan = plan_of(
        root,
        [{"tests.support.toys:stumbles": {"client": 5, "round_index": 1}}],
        on_nonfinite="skip",
        cohort={"size": 12},
    )
    server = run(plan, root, rounds=0)
    dropped = [server.run_round(index).metrics["clients/dropped"] for index in range(3)]
    assert dropped == [0, 1, 0]
    assert server.client_memory(5)["stumbles"]["count"].tolist() == [2]
    assert server.client_memory(6)["stumbles"]["count"].tolist() == [3]


def test_a_second_gradient_does_not_disturb_the_first(root):
    expected = run(plan_of(root), root)
    server = run(plan_of(root, ["tests.support.toys:asks_twice"]), root)
    assert server.params_sha256() == expected.params_sha256()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("writes_to_start", r"method writes_to_start: its grads wrote to client\.start in .*toys\.py, line \d+"),
        ("writes_to_start_in_a_backward_pass", r"a hook of writes_late wrote to client\.start in a backward pass"),
    ],
)
def test_writing_to_the_shared_start_is_an_error(root, tmp_path, name, words):
    with pytest.raises(RaysimError, match=words):
        quietly(a_plan(root, tmp_path, [f"tests.support.toys:{name}"]))


@pytest.mark.slow
def test_serial_trains_with_the_threads_it_was_given(root, tmp_path):
    before, seen = torch.get_num_threads(), []
    plan = a_plan(root, tmp_path, rounds=1, resources={"backend": "serial", "cpus_per_trainer": 2})
    execute(plan, on_round=lambda _: seen.append(torch.get_num_threads()))
    assert (seen, torch.get_num_threads()) == ([2], before)


@pytest.mark.slow
def test_hyperparameter_view_has_settings_labels_and_results(root, tmp_path):
    summary = quietly(plan_of(root, rounds=1, name="a", storage=str(tmp_path), labels={"alpha": 1}))
    board = EventAccumulator(str(tmp_path / "a")).Reload()
    content = board.SummaryMetadata("_hparams_/experiment").plugin_data.content
    experiment = HParamsPluginData.FromString(content).experiment
    assert {"methods", "seed", "local.lr", "labels.alpha"} <= {info.name for info in experiment.hparam_infos}
    assert {info.name for info in experiment.hparam_infos if info.differs} == {"labels.alpha"}
    for info in experiment.metric_infos:
        (event,) = board.Scalars(info.name.tag)
        assert event.value == pytest.approx(summary[info.name.tag.removeprefix("hparam/")])


@pytest.mark.slow
def test_three_hundred_clients_on_shapes(tmp_path):
    prepare("shapes", tmp_path, options=ReaderOptions(count=6000, size=16, domains=2))
    plan = plan_of(
        tmp_path,
        ["fedprox"],
        name="many",
        storage=str(tmp_path),
        data={"name": "shapes"},
        partition={"num_clients": 300, "alpha": 1.0, "min_samples": 1},
        cohort={"size": 30},
    )
    summary = quietly(plan)
    assert summary["num_clients"] == 300
    assert len(pq.read_table(tmp_path / "many" / "clients.parquet")) == 3 * 30
