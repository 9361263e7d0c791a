"""The node of a run's server, which is the head of its cluster, is lost in the middle of the run, and comes back."""

from __future__ import annotations

import json

import pytest
import yaml

from tests.support.federations import plan_of, raw_config, run
from tests.support.nodes import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


def test_a_run_whose_head_is_lost_twice_goes_on_by_itself_to_the_same_bits(root, tmp_path):
    """With the head go the server, and what the cluster knew; a worker joins the new one some time after it."""
    methods, rounds = ["scaffold", "fedavgm"], 5
    waits = {"tests.support.toys:waits": {"folder": str(tmp_path), "training": [], "weighing": [1, 3]}}
    groups = {"resources": {"backend": "ray"}, "checkpoint": {"every_s": 0}, "storage": str(tmp_path / "runs")}
    raw = raw_config(root, [*methods, waits], name="a", rounds=rounds, **groups)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(raw))
    with Cluster() as cluster:
        cluster.add("worker-0")
        driver = cluster.run(tmp_path / "run.yaml")
        for number, lost in enumerate((1, 3)):
            driver.wait_for((tmp_path / f"here-{lost}").exists)
            cluster.kill("head")
            cluster.kill(f"worker-{number}")
            (tmp_path / f"go-{lost}").touch()
            cluster.start_head()
            driver.wait_for(lambda: "need more than" in driver.output.rpartition("attempt")[2])  # nobody can train yet
            cluster.add(f"worker-{number + 1}")
        driver.finish()
        output = driver.output
    summary = json.loads((tmp_path / "runs" / "a" / "summary.json").read_text())
    assert summary["params_sha256"] == run(plan_of(root, methods, rounds=rounds), root).params_sha256()
    attempts = [line.partition("; ")[2] for line in output.splitlines() if "; attempt" in line]
    assert attempts == [
        "attempt 2 of 4, from the checkpoint of round 1",
        "attempt 3 of 4, from the checkpoint of round 3",
    ]
    assert "resuming at round 2 of 5" in output
    assert "resuming at round 4 of 5" in output
