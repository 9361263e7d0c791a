"""Several nodes, as `ray start` processes on this machine: the same bits, lost and joining nodes, what travels."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import yaml

from raysim.data.sources import prepare
from tests.support.federations import plan_of, raw_config, run
from tests.support.nodes import Cluster, can_hide_folders

pytestmark = pytest.mark.slow

FEDERATION = {
    "partition": {"scheme": "iid", "num_clients": 200},
    "model": {"name": "cnn", "width": 16, "hidden": 128},
    "local": {"epochs": 2, "batch_size": 4},
    "cohort": {"size": 40},
}


def write_config(path: Path, root: Path, methods=(), **groups) -> Path:
    raw = raw_config(root, methods, storage=str(path.parent / "runs"), **{**FEDERATION, **groups})
    path.write_text(yaml.safe_dump(raw))
    return path


def outcome(config: Path, name: str) -> tuple[str, list[dict[str, float]]]:
    """(params_sha256, the system's columns of progress.csv) of a finished run."""
    folder = config.parent / "runs" / name
    with open(folder / "progress.csv") as file:
        rows = [{k: float(v) for k, v in row.items() if k.startswith("system/")} for row in csv.DictReader(file)]
    return json.loads((folder / "summary.json").read_text())["params_sha256"], rows


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory):
    """(cluster, data root): a head without CPUs, two workers with two CPUs each, one with a logical GPU.

    The workers do not see the data, if this user may mount something over the folder.
    """
    root = tmp_path_factory.mktemp("hidden")
    prepare("digits", root)
    with Cluster(hidden=root if can_hide_folders() else None) as cluster:
        cluster.add("one", cpus=2)
        cluster.add("two", cpus=2, gpus=1, mig=2)
        yield cluster, root


@pytest.mark.cluster
def test_trainers_on_every_cpu_and_a_few_on_one_node_give_the_serial_bits(two_workers, root, tmp_path):
    cluster, hidden = two_workers
    resources = {"backend": "ray", "gpus_per_trainer": 0}
    config = write_config(tmp_path / "run.yaml", hidden, rounds=2, resources=resources)
    cluster.run(config, "name=all").finish()
    cluster.run(config, "name=few", "resources.trainers=2", "cohort.size=20").finish()

    for name, trainers, nodes, size in (("all", 4, 2, 40), ("few", 2, 1, 20)):
        plan = plan_of(root, rounds=2, **{**FEDERATION, "cohort": {"size": size}})
        digest, rows = outcome(config, name)
        assert digest == run(plan, root).params_sha256(), name
        for row in rows:
            assert (row["system/trainers"], row["system/nodes"], row["system/redone_blocks"]) == (trainers, nodes, 0)
            assert row["system/sum_mb"] * 1e6 == pytest.approx(nodes * 8 * plan.layout.num_state), name


@pytest.mark.cluster
def test_head_without_cpus_or_gpus_drives_trainers_on_a_worker_with_one(two_workers, root, tmp_path):
    """`auto` puts trainers where GPUs are, or where a resource of the user's own is.

    They are on one node, so half as much travels as from two.
    """
    cluster, hidden = two_workers
    config = write_config(tmp_path / "run.yaml", hidden, rounds=2, resources={"backend": "ray"})
    cluster.run(config, "name=gpu").finish()
    cluster.run(config, "name=mig", "resources.gpus_per_trainer=0", "resources.custom={mig: 1}").finish()
    plan = plan_of(root, rounds=2, **FEDERATION)
    expected = run(plan, root).params_sha256()
    for name in ("gpu", "mig"):
        digest, rows = outcome(config, name)
        assert digest == expected, name
        for row in rows:
            assert (row["system/trainers"], row["system/nodes"]) == (2, 1)
            assert row["system/sum_mb"] * 1e6 == pytest.approx(8 * plan.layout.num_state)


@pytest.mark.essential
def test_two_nodes_give_the_serial_bits_only_sums_travel_and_a_killed_one_costs_its_blocks_only(
    two_workers, root, tmp_path
):
    """Nor does Ray look for a place for what was lost as fast as it can. The last test with these workers: it kills one."""
    cluster, hidden = two_workers
    waits = {"tests.support.toys:waits": {"folder": str(tmp_path), "training": [1], "weighing": [2]}}
    methods = ["scaffold", "fedavgm"]
    resources = {"backend": "ray", "gpus_per_trainer": 0}
    config = write_config(tmp_path / "run.yaml", hidden, [*methods, waits], name="a", rounds=3, resources=resources)
    driver = cluster.run(config)
    driver.wait_for((tmp_path / "here-1").exists)
    if cluster.hidden is not None:
        for node in ("one", "two"):
            assert list((cluster.folder / node / "tmp").rglob("clients-*.arrow")), "nothing was fetched"
    cluster.kill("two")
    (tmp_path / "go-1").touch()
    driver.wait_for((tmp_path / "here-2").exists)
    shares = cluster.control_shares(windows=8)
    (tmp_path / "go-2").touch()
    driver.finish()
    assert min(shares) < 0.1, f"it spins: {shares}"  # 0.25 while it looks for a place
    digest, rows = outcome(config, "a")
    plan = plan_of(root, methods, rounds=3, **FEDERATION)
    assert digest == run(plan, root).params_sha256()
    assert [row["system/trainers"] for row in rows] == [4, 4, 2]
    assert [row["system/nodes"] for row in rows] == [2, 2, 1]
    vectors = 2  # updates, and those of SCAFFOLD's variates
    assert rows[0]["system/sum_mb"] * 1e6 == pytest.approx(2 * 8 * vectors * plan.layout.num_state)
    blocks = 32
    assert [0 < row["system/redone_blocks"] <= 0.75 * blocks for row in rows] == [False, True, False]


@pytest.mark.cluster
def test_lost_nodes_cost_their_blocks_only_and_new_ones_are_used(root, tmp_path):
    """Nodes die while they train (round 1) and with finished updates (round 3); others join (rounds 2 and 3).

    New trainers are waited for while others train: a server that weighs does not look after them.
    """
    waits = {"tests.support.toys:waits": {"folder": str(tmp_path), "training": [1, 2, 4], "weighing": [3]}}
    methods = ["scaffold", "fedavgm"]
    config = write_config(
        tmp_path / "run.yaml", root, [*methods, waits], name="a", rounds=6, resources={"backend": "ray"}
    )

    def here(number):
        driver.wait_for((tmp_path / f"here-{number}").exists)

    def go(number):
        (tmp_path / f"go-{number}").touch()

    with Cluster() as cluster:
        cluster.add("one")
        cluster.add("two")
        driver = cluster.run(config)
        here(1)
        cluster.kill("two")
        go(1)
        here(2)  # the rest goes on alone
        cluster.add("three")
        driver.wait_for(lambda: cluster.trainers("three") == 1)  # in the lost one's place
        go(2)
        here(3)
        cluster.kill("three")
        cluster.add("four")
        cluster.add("five")
        go(3)
        here(4)
        driver.wait_for(lambda: cluster.trainers("four") == cluster.trainers("five") == 1)
        go(4)
        driver.finish()

    digest, rows = outcome(config, "a")
    assert digest == run(plan_of(root, methods, rounds=6, **FEDERATION), root).params_sha256()
    assert [row["system/trainers"] for row in rows[:4]] == [2, 2, 1, 2]
    assert rows[5]["system/trainers"] == rows[5]["system/nodes"] == 3
    blocks = 32
    redone = [row["system/redone_blocks"] for row in rows]
    assert [0 < count <= 0.75 * blocks for count in redone] == [False, True, False, True, False, False]
