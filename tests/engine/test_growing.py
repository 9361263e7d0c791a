"""Nodes that an autoscaler starts for a run, and nodes that had notice: the bits of one machine, and no round lost."""

from __future__ import annotations

import pytest

from tests.engine.test_nodes import FEDERATION, outcome, write_config
from tests.support.federations import plan_of, run
from tests.support.nodes import Cluster, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


def expected_digest(root, methods=(), **settings):
    return run(plan_of(root, methods, **{**FEDERATION, **settings}), root).params_sha256()


def test_run_asks_for_nodes_uses_them_and_lets_them_go(root, tmp_path):
    """From a head without CPUs to two nodes with a logical GPU, of which the autoscaler has no more, and back."""
    waits = {"tests.support.toys:waits": {"folder": str(tmp_path), "training": [], "weighing": [1]}}
    resources = {"backend": "ray", "trainers": {"min": 1, "max": 4}, "gpus_per_trainer": 0.5}
    config = write_config(tmp_path / "run.yaml", root, [waits], name="a", rounds=4, resources=resources)
    with Cluster(types={"small": ({"CPU": 1, "GPU": 1}, 2)}) as cluster:
        driver = cluster.run(config)
        driver.wait_for((tmp_path / "here-1").exists)
        driver.wait_for(lambda: cluster.trainers("head") == 2)
        (tmp_path / "go-1").touch()
        driver.finish()
        wait_for(lambda: cluster.num_nodes() == 1)
        refused = cluster.run(config, "name=b", "resources.trainers=3")
        assert refused.status() == 2
        assert "could ever have" in refused.output
        killed = cluster.run(config, "name=c", "resources.trainers=2")
        killed.wait_for(lambda: cluster.num_nodes() > 1)
        killed.kill()  # while it waits for the second one
        wait_for(lambda: cluster.num_nodes() == 1)
    digest, rows = outcome(config, "a")
    assert digest == expected_digest(root, rounds=4)
    assert [row["system/trainers"] for row in rows] == [1, 1, 2, 2]


@pytest.mark.parametrize("is_enough", [True, False])
def test_node_with_notice_gets_nothing_new_and_costs_no_round(root, tmp_path, is_enough):
    """Where the notice is shorter than a block, the node is lost like any other, with the blocks that it had."""
    waits = {"tests.support.toys:waits": {"folder": str(tmp_path), "training": [1], "weighing": [2]}}
    methods = ["scaffold", waits]
    config = write_config(tmp_path / "run.yaml", root, methods, name="a", rounds=4, resources={"backend": "ray"})
    with Cluster() as cluster:
        cluster.add("one")
        cluster.add("two", two=1)
        driver = cluster.run(config)
        driver.wait_for((tmp_path / "here-1").exists)
        cluster.drain("two", 300 if is_enough else 1)
        if not is_enough:
            cluster.kill("two")
        (tmp_path / "go-1").touch()
        driver.wait_for((tmp_path / "here-2").exists)
        if is_enough:
            wait_for(lambda: cluster.num_nodes() == 2)  # Ray ends a node that is going once nobody is there
        cluster.add("three")
        driver.wait_for(lambda: cluster.trainers("three") == 1)
        (tmp_path / "go-2").touch()
        driver.finish()
        said = driver.output
    digest, rows = outcome(config, "a")
    assert digest == expected_digest(root, ["scaffold"], rounds=4)
    assert [row["system/trainers"] for row in rows] == [2, 2, 1, 2]
    assert [row["system/redone_blocks"] > 0 for row in rows] == [False, not is_enough, False, False]
    assert ("is draining" in said) == is_enough
