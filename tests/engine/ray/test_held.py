"""Trainers that hold the updates of a round: nothing of these travels, and who is killed costs its blocks only."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import ray

from tests.support.federations import plan_of, run, server_on
from tests.support.runs import a_plan, quietly, rows_of

pytestmark = pytest.mark.ray


@pytest.mark.slow
def test_trainer_killed_with_finished_updates_changes_no_bit_and_costs_its_blocks_only(root, tmp_path, ray_cluster):
    """Before the sum in round 1, in a map in round 2."""
    methods = ["scaffold", "fedavgm"]
    expected = run(plan_of(root, methods), root).params_sha256()
    killer = {"tests.support.toys:kills_holder": {"folder": str(tmp_path), "weighing": 1, "mapping": 2}}
    resources = {"backend": "ray", "trainers": 2, "cpus_per_trainer": 0.5}
    summary = quietly(a_plan(root, tmp_path, [*methods, killer], resources=resources))
    assert len(list(tmp_path.glob("killed-*"))) == 2
    assert summary["params_sha256"] == expected
    redone = [float(row["system/redone_blocks"]) for row in rows_of(tmp_path / "a")]
    assert redone[0] == 0 < redone[1] < 7
    assert redone[2] > 0  # of all seven clients, if the other trainer is not back yet


def test_a_trainer_killed_at_work_on_columns_or_before_attackers_train_changes_no_bit(root, tmp_path, ray_cluster):
    toys = ["tests.support.toys:copies_the_others", "tests.support.toys:middle_of_all"]
    expected = run(plan_of(root, toys), root).params_sha256()
    methods = [toys[0], {toys[1]: {"ends": str(tmp_path / "ended")}}]
    resources = {"backend": "ray", "trainers": 2, "cpus_per_trainer": 0.5}
    summary = quietly(a_plan(root, tmp_path, methods, resources=resources))
    assert (tmp_path / "ended").exists()
    assert summary["params_sha256"] == expected
    redone = [float(row["system/redone_blocks"]) for row in rows_of(tmp_path / "a")]
    assert redone[0] == 0 < redone[1]


def test_no_update_leaves_its_trainer(root, ray_pools):
    plan = plan_of(root, ["scaffold"])
    server = server_on(plan, root, ray_pools(plan)[1])
    message, _ = server._broadcast(0, 0)
    queues = server._queues(server.phases[0], 0, np.arange(7))
    results = list(server.pool.train(message, queues, {}))
    assert sum(len(result.reports.client) for result in results) == 7
    for result in results:
        clients = len(result.reports.client)
        reports, *memories = ray.get(result.place.refs)
        assert len(memories) == clients
        assert len(pickle.dumps(reports)) < 4 * plan.layout.num_params
