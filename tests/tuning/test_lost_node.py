"""A sweep on nodes that share no data: shards and weights reach them, and a lost node costs no result."""

from __future__ import annotations

import pytest
import yaml
from safetensors.torch import save_file

import raysim
from raysim.data.arrow import PreparedSet, write_set
from raysim.data.sources import set_path
from raysim.models import build_model
from raysim.plan.check import check
from tests.support.federations import raw_config
from tests.support.nodes import Cluster, can_hide_folders
from tests.support.s3 import KEYS, s3_server
from tests.support.sweeps import digest_of_run

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

SPACE = {
    "partition.seed": {"grid_search": [0, 1, 2]},
    "local.lr": {"grid_search": [0.1, 0.2]},
    "local.momentum": {"grid_search": [0.0, 0.5]},
}


@pytest.mark.skipif(not can_hide_folders(), reason="this user may not hide a folder from a node")
def test_sweep_of_12_trials_over_3_partitions_loses_a_node_and_ends_with_the_hashes_of_one_machine(
    root, tmp_path, monkeypatch
):
    """The set and the weights are on the head alone, each node has a folder of its own, and results go to S3."""
    hidden = tmp_path / "hidden"  # no bundled set: a node that looked for it there would not make it anew
    digits = PreparedSet(set_path(root, "digits"))
    write_set(set_path(hidden, "mine"), "mine", digits.info.classes, digits.batches)
    raw = raw_config(hidden, data={"root": str(hidden), "name": "mine", "stored_size": 10}, rounds=3)
    save_file(build_model(check(raw, "a test").spec, seed=77).state_dict(), hidden / "start.safetensors")
    raw["model"] = {**raw["model"], "pretrained": str(hidden / "start.safetensors")}
    slow = {"tests.support.toys:lingers": {"seconds": 0.7}}
    place = "s3://bucket/runs"
    whole = {**raw, "storage": place, "name": "s", "methods": [slow], "tune": {"param_space": SPACE}}
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(whole))

    with s3_server() as endpoint:
        for name, value in {**KEYS, "AWS_ENDPOINT_URL": endpoint, "RAYSIM_CACHE": str(tmp_path / "driver")}.items():
            monkeypatch.setenv(name, value)
        with Cluster(hidden=hidden) as cluster:
            cluster.add("one")
            cluster.add("two")
            driver = cluster.run(tmp_path / "s.yaml", verb="tune")
            # One trial at a time fits on each node: where two are in their rounds, both nodes have one.
            driver.wait_for(lambda: all(list((cluster.folder / name).rglob("progress.csv")) for name in ("one", "two")))
            built = {path: path.stat().st_mtime_ns for path in (hidden / "shards").glob("*/*")}
            cluster.kill("two")
            driver.finish()
            output = driver.output
        monkeypatch.setenv("RAYSIM_CACHE", str(tmp_path / "reader"))
        runs = raysim.load(f"{place}/s")

    assert "lost the process or the node" in output
    folders = {path.parent for path in built}
    assert len(folders) == 3
    assert {path: path.stat().st_mtime_ns for path in (hidden / "shards").glob("*/*")} == built
    assert len(runs) == 12
    for run in runs:
        bare = {key: value for key, value in run.config.items() if key != "tune"} | {"methods": []}
        assert run.summary["params_sha256"] == digest_of_run(bare, tmp_path, run.folder.name), run.folder.name
