"""Clients that never train: left out of every cohort, and scored."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from raysim.base.direction import direction_of
from raysim.base.errors import ConfigError
from raysim.data.arrow import PreparedSet
from raysim.data.sources import set_path
from raysim.models import build_model
from raysim.plan.check import check
from raysim.plan.splitting import rows_line
from raysim.training.tasks import TASKS
from tests.support.federations import raw_config, server_on
from tests.support.task_sets import task_config, write_task_set


def unseen_config(folder, task, share=0.34, **groups):
    write_task_set(folder, task)
    raw = task_config(folder, task, partition={"num_clients": 6}, **{"cohort": {"size": 4}, "rounds": 3, **groups})
    raw["data"]["unseen_clients"] = share
    return raw


@pytest.mark.parametrize("task", TASKS)
def test_unseen_clients_never_train_and_are_scored_on_their_rows(task, tmp_path):
    plan = check(unseen_config(tmp_path, task), "a test")
    assert (plan.config.num_clients, plan.config.num_unseen) == (4, 2)
    assert "are of 2 unseen clients" in rows_line(plan.config, plan.manifest)
    server = server_on(plan, tmp_path)
    records = [server.run_round(index) for index in range(3)]
    assert {client for record in records for client in record.clients["client"]} == {0, 1, 2, 3}
    model, task_of = build_model(plan.spec, seed=0), plan.task
    model.load_state_dict({name: value.clone() for name, value in server.layout.views(server.state).items()})
    prepared, scores = PreparedSet(set_path(tmp_path, f"tiny_{task}")), []
    for rows in np.split(plan.manifest.unseen, np.cumsum(plan.manifest.unseen_sizes)[:-1]):
        inputs, targets = map(torch.from_numpy, prepared.take(rows))
        with torch.no_grad():
            logits = model(inputs.long() if inputs.dtype == torch.int32 else inputs)
        columns = {name: value.numpy() for name, value in task_of.measure(logits, targets).items()}
        scores.append(float(task_of.finish(task_of.values(columns).mean())))
    metrics, name = records[-1].metrics, f"clients/unseen_{task_of.of_part}"
    assert metrics[f"{name}_mean"] == pytest.approx(np.mean(scores), rel=1e-5)
    worst = min(scores) if direction_of(name) == "max" else max(scores)
    assert metrics[f"{name}_worst"] == pytest.approx(worst, rel=1e-5)
    assert metrics["server/unseen_loss"] > 0
    assert f"server/unseen_{task_of.main}" in metrics


def test_there_is_at_least_one_and_somebody_trains(tmp_path):
    plan = check(unseen_config(tmp_path, "regression", 0.001), "a test")
    assert len(plan.manifest.unseen_sizes) == 1
    with pytest.raises(ConfigError, match=r"data\.unseen_clients: leaves no client that trains"):
        check(unseen_config(tmp_path, "regression", 0.5) | {"partition": {"scheme": "iid", "num_clients": 1}}, "a test")
    with pytest.raises(ConfigError, match="4 clients a round of a population of 3"):
        check(unseen_config(tmp_path, "regression", 0.5), "a test")


def test_a_choice_without_unseen_clients_is_refused(tmp_path):
    raw = unseen_config(tmp_path, "regression")
    raw["data"]["unseen_choice"] = "first"
    assert check(raw, "a test").manifest.spec.unseen_choice == "first"
    raw["data"]["unseen_clients"] = 0
    with pytest.raises(ConfigError, match=r"data\.unseen_choice: has no effect with data\.unseen_clients 0"):
        check(raw, "a test")


def test_joint_training_has_no_unseen_clients(tmp_path):
    raw = unseen_config(tmp_path, "regression") | {"partition": {"scheme": "joint"}}
    raw.pop("cohort")
    with pytest.raises(ConfigError, match=r"data\.unseen_clients: has no effect with partition\.scheme joint"):
        check(raw, "a test")


def test_unseen_clients_images_are_shifted_as_theirs(root):
    groups = {"partition": {"num_clients": 5}, "cohort": {"size": 3}, "model": {"name": "mlp"}}
    raw = raw_config(root, **groups)
    raw["data"] |= {"unseen_clients": 0.2, "split_within_clients": True, "shift": {"noise": {"std": 0.5}}}
    server = server_on(check(raw, "a test"), root)
    trainer = server.pool._trainer
    stored, _ = trainer.federation.held_out("unseen")
    noise = trainer.data.held_out("unseen").inputs - torch.from_numpy(stored.copy()).float()
    assert float(noise.std()) / 255 == pytest.approx(0.5, rel=0.05)  # the last of five clients has all of it
    assert "clients/unseen_accuracy_mean" in server.run_round(0).metrics
