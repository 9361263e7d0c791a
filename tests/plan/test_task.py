"""The task of a run: the set's, another by name, or one of the user's own; and what goes by its main metric."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import raysim
from raysim.base.errors import ConfigError
from raysim.plan.build import Made
from raysim.plan.check import check
from tests.support.task_sets import task_config, write_task_set

TOYS = "tests.support.toy_data"


@pytest.fixture
def regression(tmp_path):
    write_task_set(tmp_path, "regression")
    return task_config(tmp_path, "regression", storage=str(tmp_path / "runs"))


def test_the_set_names_its_task_and_the_configuration_another_one(regression):
    assert check(regression, "a test").task.name == "regression"
    plan = check({**regression, "task": {f"{TOYS}:median_task": {"scale": 2.0}}}, "a test")
    outputs, targets = torch.tensor([[1.0], [4.0]]), torch.tensor([[3.0], [4.5]])
    assert plan.task.total(outputs, targets[:, 0]) == 5.0
    assert plan.config.task == {f"{TOYS}:median_task": {"scale": 2.0}}


def costs(tmp_path, targets):
    """Settings of a run on these targets, whose inputs are in the order of the rows."""
    rows = np.linspace(-1, 1, len(targets), dtype=np.float32)[:, None]
    raysim.arrays(rows, targets, name="costs", root=tmp_path)
    return {
        "data": {"name": "costs", "root": str(tmp_path), "test": 0.25, "validation": 0.1},
        "partition": {"scheme": "iid", "num_clients": 3},
        "model": {"name": "mlp"},
        "local": {"lr": 0.1, "epochs": 1, "batch_size": 8},
        "rounds": 3,
        "resources": {"backend": "serial"},
        "storage": str(tmp_path / "runs"),
    }


def test_targets_are_scaled_by_the_training_rows_and_measured_in_their_units(tmp_path):
    targets = np.random.default_rng(0).normal([1e4, -3.0], [5e3, 0.0], (80, 2)).astype(np.float32)
    plan = check(costs(tmp_path, targets), "a test")
    trained = targets[np.concatenate(plan.manifest.clients)].astype(np.float64)
    mean, deviation = plan.target_scale
    np.testing.assert_allclose(mean, trained.mean(0))
    np.testing.assert_allclose(deviation, [trained[:, 0].std(), 1.0])  # of a constant: 1
    task = plan.task
    assert plan.recipe(Made("")).target_scale == plan.target_scale
    outputs, few = torch.tensor([[0.5, 0.0], [-1.0, 0.2]]), torch.from_numpy(targets[:2])
    scaled = (few.double() - torch.tensor(mean)) / torch.tensor(deviation)
    torch.testing.assert_close(
        task.total(outputs, few).double(), (outputs - scaled).square().sum() / 2, rtol=1e-5, atol=0
    )
    kept = task.measure(outputs, few)
    expected = outputs.double() * torch.tensor(deviation) + torch.tensor(mean)
    torch.testing.assert_close(kept["predictions"].double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(kept["targets"], few)


def test_costs_are_learned_in_euros_and_a_model_predicts_them(tmp_path):
    slope = np.linspace(0, 60_000, 80, dtype=np.float32)
    raw = costs(tmp_path, slope)
    run = raysim.run(raw, rounds=20, name="scaled", quiet=True)
    assert run.history["server/rmse"].iloc[-1] < 6_000
    assert run.summary["target_scale"][1][0] > 10_000
    inputs = torch.tensor([[-0.5], [0.5]])
    np.testing.assert_allclose(run.model()(inputs).detach()[:, 0], [15_000, 45_000], atol=6_000)
    last, raw_last = (
        each.history.iloc[-1] for each in (run, raysim.run(raw, data__scale_targets=False, name="raw", quiet=True))
    )
    deviation = run.summary["target_scale"][1][0]
    np.testing.assert_allclose(last["server/loss"] * deviation**2, last["server/rmse"] ** 2, rtol=1e-4)
    np.testing.assert_allclose(raw_last["server/loss"], raw_last["server/rmse"] ** 2, rtol=1e-4)


def test_a_scale_of_targets_is_for_a_regression(tmp_path):
    raw = costs(tmp_path, np.arange(80) % 3)
    assert check(raw, "a test").target_scale is None
    with pytest.raises(ConfigError, match=r"data\.scale_targets: has no effect: the task is classes; remove the key"):
        check({**raw, "data": {**raw["data"], "scale_targets": False}}, "a test")


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("classes", "classes needs int64 targets, and tiny_regression, prepared for regression, has float32"),
        ("regresion", "unknown task 'regresion'.*regression"),
        (f"{TOYS}:no_task", "task's function returned str.*return a raysim.Task"),
        (f"{TOYS}:nowhere", "nowhere"),
        ({f"{TOYS}:median_task": {"scales": 1}}, "scales"),
    ],
)
def test_a_task_that_cannot_be_used_is_one_sentence(regression, task, words):
    with pytest.raises(ConfigError, match=rf"(?is){words}"):
        check({**regression, "task": task}, "a test")


def test_a_run_with_a_task_of_ones_own_stops_at_its_main_metric_and_lists_its_scores(regression):
    own = {**regression, "task": f"{TOYS}:median_task", "rounds": 30, "stop": {"score": 1e6}, "name": "own"}
    run = raysim.run(own, quiet=True)
    assert len(run.history) == 1  # the first error is below the limit already
    assert run.main_metric == "rmse"
    assert run.accuracy is None
    assert run.score == run.summary["rmse"] == run.summary["best_rmse"] == run.history["server/rmse"].iloc[-1]
    assert "rmse" in run.summary["stopped_by"]


def test_the_lowest_error_is_the_best_one(regression):
    run = raysim.run({**regression, "rounds": 4, "local": {"lr": 2.5, "epochs": 1}, "name": "up"}, quiet=True)
    errors = run.history["server/rmse"]
    assert errors.iloc[-1] > errors.min()  # the rate is too high: it gets worse
    assert run.summary["best_rmse"] == errors.min()
    assert run.summary["best_round"] == errors.idxmin()
