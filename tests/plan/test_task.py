"""The task of a run: the set's, another by name, or one of the user's own; and what goes by its main metric."""

from __future__ import annotations

import pytest
import torch

import raysim
from raysim.base.errors import ConfigError
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
