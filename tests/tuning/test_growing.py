"""A sweep on a cluster that its autoscaler lets grow and shrink."""

from __future__ import annotations

import pytest
import yaml

import raysim
from tests.support.federations import raw_config
from tests.support.nodes import Cluster, wait_for
from tests.support.sweeps import digest_of_run

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

SPACE = {
    "seed": {"grid_search": [0, 1, 2]},
    "local.lr": {"grid_search": [0.1, 0.2]},
    "local.momentum": {"grid_search": [0.0, 0.5]},
}


def test_sweep_of_12_trials_grows_to_4_nodes_loses_one_and_ends_with_the_hashes_of_one_machine(root, tmp_path):
    """It begins without a node that has a CPU, and at its end none is left."""
    raw = raw_config(root, rounds=3)
    waits = {"tests.support.toys:waits": {"folder": str(tmp_path), "training": [], "weighing": [1]}}
    whole = {**raw, "storage": str(tmp_path / "runs"), "name": "s", "methods": [waits], "tune": {"param_space": SPACE}}
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(whole))
    with Cluster(types={"small": ({"CPU": 1}, 4)}) as cluster:
        driver = cluster.run(tmp_path / "s.yaml", verb="tune")
        runs = tmp_path / "runs"
        driver.wait_for(lambda: len(list(runs.rglob("progress.csv"))) == 4)  # one on each node, and they wait
        assert cluster.num_nodes() == 5
        cluster.lose_one()
        (tmp_path / "go-1").touch()
        driver.finish()
        said = driver.output
        wait_for(lambda: cluster.num_nodes() == 1)
    assert "lost the process or the node" in said
    trials = raysim.load(str(runs / "s"))
    assert len(trials) == 12
    for run in trials:
        bare = {key: value for key, value in run.config.items() if key != "tune"} | {"methods": []}
        assert run.summary["params_sha256"] == digest_of_run(bare, tmp_path, run.folder.name), run.folder.name
