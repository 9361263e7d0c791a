"""Every task through the real engine: a plain loop, any number of trainers, resuming, and scikit-learn's linear optima."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from sklearn.linear_model import LinearRegression, LogisticRegression

from raysim.api import arrays
from raysim.base.direction import DIRECTIONS
from raysim.base.errors import ConfigError
from raysim.core.seeding import derive_seed, torch_generator
from raysim.data.arrow import PreparedSet
from raysim.models import build_model
from raysim.plan.check import check
from raysim.running.runner import execute
from raysim.training.tasks import TASKS
from tests.support.federations import run, server_on
from tests.support.runs import quietly
from tests.support.task_sets import task_config, write_task_sets
from tests.twins.federation import assert_close

#: Task -> the mean loss of a batch, in PyTorch's own words.
LOSSES = {
    "classes": F.cross_entropy,
    "labels": lambda logits, targets: F.binary_cross_entropy_with_logits(logits, targets.float()),
    "regression": F.mse_loss,
    "tokens": lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.long().flatten()),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_task_sets(tmp_path_factory.mktemp("tasks"))


def tensors(plan, rows):
    """(inputs, targets) of some rows, as a model takes them."""
    inputs, targets = PreparedSet(Path(plan.manifest.set_path)).take(rows)
    return torch.from_numpy(inputs.astype(np.int64) if inputs.dtype == np.int32 else inputs), torch.from_numpy(targets)


def loss_of(plan, task):
    """The mean loss of a batch; that of a regression is on scaled targets."""
    if task != "regression":
        return LOSSES[task]
    mean, deviation = map(torch.tensor, plan.target_scale)
    return lambda outputs, targets: F.mse_loss(outputs, (targets - mean) / deviation)


# --- a plain loop ---------------------------------------------------------------------------------------------------------


def plain_round(plan, model, loss):
    """One round of FedAvg over all clients, without a word of the engine: the new state dict."""
    config, manifest, total = plan.config, plan.manifest, {}
    for client, rows in enumerate(manifest.clients):
        local = copy.deepcopy(model)
        optimizer = torch.optim.SGD(local.parameters(), lr=config.local.lr)
        order = torch.randperm(len(rows), generator=torch_generator(derive_seed(config.seed, "batches", 0, client)))
        for chosen in order.split(config.local.batch_size):
            inputs, targets = tensors(plan, rows[chosen.numpy()])
            optimizer.zero_grad()
            loss(local(inputs), targets).backward()
            optimizer.step()
        for name, value in local.state_dict().items():
            total[name] = total.get(name, 0) + value.double() * len(rows) / manifest.sizes.sum()
    return {name: value.float() for name, value in total.items()}


@pytest.mark.parametrize("task", TASKS)
def test_one_round_equals_a_plain_loop(task, folder):
    plan = check(task_config(folder, task), "a test")
    model, server = build_model(plan.spec, seed=plan.config.seed), server_on(plan, folder)
    begun = copy.deepcopy(model.state_dict())
    record = server.run_round(0)
    loss = loss_of(plan, task)
    wanted = plain_round(plan, model, loss)
    for name, value in server.layout.views(server.state).items():
        assert_close(value - begun[name], wanted[name] - begun[name], name=name)
    model.load_state_dict(wanted)
    for rows, name in ((plan.manifest.test, "server/loss"), (plan.manifest.validation, "server/validation_loss")):
        inputs, targets = tensors(plan, rows)
        with torch.no_grad():
            assert record.metrics[name] == pytest.approx(float(loss(model(inputs), targets)), rel=1e-5)
    assert record.metrics["train/loss"] > 0


# --- any number of trainers, and resuming ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_any_number_of_trainers_gives_the_same_bits_and_scores(task, folder, root, ray_pools):
    groups = {"partition": {"num_clients": 5}, "cohort": {"size": 4}, "rounds": 2}
    plan = check(task_config(folder, task, ["scaffold", "fedvg"], **groups), "a test")

    def outcome(pool=None):
        server = server_on(plan, root, pool)
        metrics = [server.run_round(index).metrics for index in range(2)]
        kept = [{name: value for name, value in each.items() if not name.startswith("system/")} for each in metrics]
        return server.params_sha256(), repr(kept)

    expected = outcome()
    assert [outcome(pool) for pool in ray_pools(plan)] == [expected] * 3


@pytest.mark.slow
def test_a_killed_run_of_tokens_resumes_to_the_same_bits(folder, tmp_path):
    kills = {"tests.support.toys:kills_worker": {"marker": str(tmp_path / "killed"), "round_index": 3}}
    raw = task_config(folder, "tokens", ["scaffold", kills], rounds=5, checkpoint={"every_s": 0})
    raw |= {"name": "killed", "storage": str(tmp_path / "runs")}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(raw))
    command = [sys.executable, "-m", "raysim", "run", str(tmp_path / "run.yaml")]
    where = {"cwd": Path(__file__).parents[2], "env": os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}}
    first = subprocess.run(command, **where, capture_output=True, text=True, timeout=120)
    assert first.returncode == -signal.SIGKILL, first.stdout + first.stderr
    again = subprocess.run(command, **where, capture_output=True, text=True, timeout=120)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "resuming at round" in again.stdout + again.stderr
    expected = quietly(check({**raw, "name": "whole"}, "a test"))  # the marker is there: nobody is killed
    summary = json.loads((tmp_path / "runs" / "killed" / "summary.json").read_text())
    assert summary["params_sha256"] == expected["params_sha256"]


# --- the linear cases -----------------------------------------------------------------------------------------------------


def linear_problem(folder, name, targets_of, outputs, rounds, lr_of):
    """(server, rows with a one behind them, their targets): full-batch rounds of one linear layer on IID clients.

    With one local step on all its rows a client returns its own gradient, and the average by examples is a step of gradient
    descent on all training rows. lr_of(rows) is one over the largest curvature.
    """
    rng = np.random.default_rng(5)
    inputs = (rng.normal(size=(200, 3)) * [1.0, 0.7, 1.4]).astype(np.float32)
    names = [f"output {number}" for number in range(outputs)]
    arrays(inputs, targets_of(inputs, rng), name=name, classes=names, root=folder)
    raw = task_config(folder, "regression", rounds=rounds, partition={"num_clients": 4}, cohort={"size": 4})
    raw["data"] = {"name": name, "root": str(folder), "test": 0.2}
    raw["model"] = {"name": "tests.support.toy_data:linear_rows"}
    raw["evaluation"] = {"every": 0}
    raw["local"] = {"lr": 1.0, "steps": 1, "batch_size": 200}
    plan = check(raw, "a test")
    inputs, targets = (part.double().numpy() for part in tensors(plan, np.concatenate(plan.manifest.clients)))
    if plan.target_scale is not None:
        mean, deviation = map(np.array, plan.target_scale)
        targets = (targets - mean) / deviation  # what the layer is trained on
    ones = np.concatenate([inputs, np.ones((len(inputs), 1))], axis=1)
    raw["local"]["lr"] = lr_of(ones)
    return run(check(raw, "a test"), folder), ones, targets


def largest(ones):
    """Largest eigenvalue of the second moments of the rows."""
    return float(np.linalg.eigvalsh(ones.T @ ones / len(ones))[-1])


def weights_of(server):
    """(outputs, numbers and the bias) float64."""
    values = server.layout.views(server.params)
    return torch.cat([values["1.weight"], values["1.bias"][:, None]], dim=1).double().numpy()


def test_linear_regression_reaches_scikit_learns_optimum(folder):
    def targets_of(inputs, rng):
        return (inputs @ [[0.5], [-1.0], [2.0]] + 0.7 + 0.3 * rng.normal(size=(len(inputs), 1))).astype(np.float32)

    server, ones, targets = linear_problem(folder, "line", targets_of, 1, 60, lambda ones: 0.5 / largest(ones))
    theirs = LinearRegression().fit(ones[:, :3], targets)
    want, got = np.append(theirs.coef_, theirs.intercept_), weights_of(server)[0]
    # The loss |Xw - y|^2 / n is a quadratic with Hessian H = 2 X'X / n: w - w* = H^-1 g, so |w - w*| <= |g| / lambda_min(H).
    gradient = 2 * ones.T @ (ones @ got - targets[:, 0]) / len(ones)
    bound = np.linalg.norm(gradient) / np.linalg.eigvalsh(2 * ones.T @ ones / len(ones))[0]
    assert bound < 1e-5  # else it would prove nothing
    assert np.linalg.norm(got - want) <= bound + 1e-12  # and the rounding of their solver


def logistic_radius(ones, signs, weights):
    """How far the optimum of logistic regression is at most, from the gradient g and the Hessian's least eigenvalue l here.

    Along a unit direction the curvature falls at most as e^(-R t), R the length of the longest row, since the slope of the
    sigmoid changes at most by e^|s| over a distance s. At the optimum the slope is 0, so |g| >= l (1 - e^(-R r)) / R for its
    distance r, hence r <= -log(1 - R |g| / l) / R.
    """
    chances = 1 / (1 + np.exp(signs * (ones @ weights)))  # of the wrong class
    gradient = -(ones * (signs * chances)[:, None]).mean(0)
    hessian = (ones * (chances * (1 - chances))[:, None]).T @ ones / len(ones)
    longest = np.linalg.norm(ones, axis=1).max()
    return -np.log(1 - longest * np.linalg.norm(gradient) / np.linalg.eigvalsh(hessian)[0]) / longest


def test_logistic_regression_reaches_scikit_learns_optimum(folder):
    def targets_of(inputs, rng):
        return (inputs @ [0.5, -1.0, 0.8] + 0.2 + rng.logistic(size=len(inputs)) > 0).astype(np.int64)

    # Two outputs differ by d = w_1 - w_0, which moves by twice the gradient; the curvature in d is at most a quarter of the
    # second moments.
    server, ones, targets = linear_problem(folder, "border", targets_of, 2, 400, lambda ones: 2 / largest(ones))
    theirs = LogisticRegression(penalty=None, solver="newton-cholesky", tol=1e-12).fit(ones[:, :3], targets)
    want, (first, second) = np.append(theirs.coef_, theirs.intercept_), weights_of(server)
    got, signs = second - first, 2 * targets - 1
    bound = logistic_radius(ones, signs, got) + logistic_radius(ones, signs, want)
    assert bound < 1e-4  # else it would prove nothing
    assert np.linalg.norm(got - want) <= bound


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"main": "brier", "direction": "min"},
            "the task odd is judged by 'brier', which is not among the metrics rmse, mae, r2",
        ),
        (
            {"metrics": lambda columns, _: {"rmse": columns["nosuch"]}},
            r"the task odd cannot score outputs of shape .* \(KeyError: 'nosuch'\)",
        ),
        ({"main": "brier"}, "the task odd: 'brier' does not declare a better direction"),
        ({"direction": "less"}, "the direction must be 'max' or 'min', got 'less'"),
    ],
)
def test_a_task_must_give_its_main_metric_and_say_which_values_are_better(changes, words, folder, monkeypatch):
    monkeypatch.setattr("tests.support.toy_data.CHANGES", changes)
    with pytest.raises(ConfigError, match=words):
        check(task_config(folder, "regression") | {"task": "tests.support.toy_data:odd_task"}, "a test")
    DIRECTIONS.pop("brier", None)


def test_a_task_with_a_metric_of_its_own_is_judged_by_it(folder, monkeypatch, tmp_path):
    changes = {"main": "mse", "direction": "min", "metrics": lambda columns, _: {"mse": 1.0}}
    monkeypatch.setattr("tests.support.toy_data.CHANGES", changes)
    given = {"task": "tests.support.toy_data:odd_task", "storage": str(tmp_path), "name": "own", "rounds": 2}
    summary = execute(check(task_config(folder, "regression") | given, "a test"))
    assert (summary["best_mse"], summary["directions"]["mse"]) == (1.0, "min")
    del DIRECTIONS["mse"]
