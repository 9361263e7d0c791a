"""`python -m tests.bench large`: ViT-B/16 on emulated nodes with small object stores.

Each node is a `ray start` on this machine with an object store of its own; the head has no trainer and drives them. Clients
take one step on two small images, so that what is measured is what travels and what is held, not training: bytes that each
node receives in a round, what its store holds at most, what is spilled, private memory of its processes.
Without words it takes 16 GB; `python -m tests.bench.large --models LoRA --nodes 8 --trainers 2` is more of it.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from raysim.data.arrow import write_set
from raysim.data.rows import in_batches
from raysim.data.sources import set_path
from raysim.plan.check import check
from tests.bench.emulated import NodeLoad, Sampler, settle, transfers
from tests.bench.workloads import images_of
from tests.support.nodes import Cluster

#: What is trained: 86 million parameters in full, or adapters of rank 16 and the head; half or a quarter of the blocks, for
#: machines with less memory: a trainer of the whole model has 2.4 GB.
MODELS: dict[str, dict[str, Any]] = {
    "full": {"name": "vit_b16"},
    "LoRA": {"name": "vit_b16", "lora": {"rank": 16}},
    "half": {"name": "vit", "dim": 768, "depth": 6, "heads": 12, "patch": 16},
    "quarter": {"name": "vit", "dim": 768, "depth": 3, "heads": 12, "patch": 16},
    "tiny": {"name": "mlp", "hidden": 100},
}

#: Seconds for a run on a machine that does other work, too.
PATIENCE_S = 1_200

#: Height and width of the images: one patch, so that a step costs little. With so many test rows eight trainers evaluate.
SIDE, TEST_ROWS = 16, 512


def configuration(root: Path, model: str, num_trainers: int, rounds: int) -> dict[str, Any]:
    """A run in which every trainer has one client of two images a round."""
    test = TEST_ROWS / (2 * num_trainers + TEST_ROWS)
    return {
        "name": "large",
        "storage": str(root / "runs"),
        "rounds": rounds,
        "data": {"name": "bench", "root": str(root / "data"), "test": test, "validation": 0.0},
        "partition": {"scheme": "iid", "num_clients": num_trainers},
        "model": MODELS[model],
        "local": {"steps": 1, "batch_size": 2, "lr": 0.01},
        "cohort": {"size": num_trainers},
        "checkpoint": {"every_s": 3600.0},
        "resources": {"backend": "ray", "trainers": num_trainers, "cpus_per_trainer": 1, "client_timeout_s": 600.0},
    }


class Carried(NamedTuple):
    """What the nodes of a run carried, and the seconds of its fastest round.

    Attributes:
      size_mb: of the model that is sent. sum_s: the part of the round from the last report to the new model.
    """

    size_mb: float
    server: NodeLoad
    others: list[NodeLoad]
    sum_s: float
    round_s: float


def carried(model: str, num_nodes: int, trainers_each: int, store_mb: int, rounds: int = 3) -> Carried:
    """Measure one run."""
    num_trainers = num_nodes * trainers_each
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, Cluster(store_mb=store_mb) as cluster:
        root = Path(folder)
        images = images_of(2 * num_trainers + TEST_ROWS, side=SIDE)
        write_set(set_path(root / "data", "bench"), "bench", map(str, range(10)), in_batches(*images))
        raw = configuration(root, model, num_trainers, rounds)
        (root / "run.yaml").write_text(yaml.safe_dump(raw))
        size_mb = check(raw | {"resources": {"backend": "serial"}}, "the bench").layout.num_state * 4 / 1e6
        names = [f"n{index}" for index in range(num_nodes)]
        for name in names:
            cluster.add(name, cpus=trainers_each)
        sampler = Sampler(cluster)
        cluster.run(root / "run.yaml").finish(PATIENCE_S)
        held = sampler.stop()
        settle()
        loads = {name: transfers(cluster, name) for name in ["head", *names]}
        with open(root / "runs" / "large" / "progress.csv") as file:
            rows = list(csv.DictReader(file))
    for name, load in loads.items():
        load.store, load.private = held[name].store, held[name].private
    sum_s, round_s = (min(float(row[f"system/{part}_s"]) for row in rows) for part in ("aggregate", "round"))
    return Carried(size_mb, loads["head"], [loads[name] for name in names], sum_s, round_s)


def measure(model: str, num_nodes: int, trainers_each: int, store_mb: int, rounds: int = 3) -> list[str]:
    """Lines of a table: one for the server's node, one for the others, of which the most is told."""
    run = carried(model, num_nodes, trainers_each, store_mb, rounds)
    about = f"{model}, {run.size_mb:.1f} MB, {num_nodes} nodes of {trainers_each}"
    return [
        line(f"{about}: server", [run.server], rounds, store_mb, f"{run.sum_s:.1f} of {run.round_s:.1f}"),
        line(f"{about}: others", run.others, rounds, store_mb, ""),
    ]


def line(about: str, loads: list[NodeLoad], rounds: int, store_mb: int, time_s: str) -> str:
    received = [load.received / 1e6 / rounds for load in loads]
    spilled, store, private = (
        max(getattr(load, name) for load in loads) / 1e6 for name in ("spilled", "store", "private")
    )
    span = (
        f"{min(received):.1f}"
        if max(received) - min(received) < 0.05
        else f"{min(received):.1f} to {max(received):.1f}"
    )
    return f"| {about} | {span} | {store:.0f} of {store_mb} | {spilled:.0f} | {private:.0f} | {time_s} |"


HEADER = [
    "| what | received a round, MB | object store at most, MB | spilled, MB | private memory, MB | sum of round, s |",
    "|---|---|---|---|---|---|",
]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["LoRA", "full"], choices=[*MODELS])
    parser.add_argument("--nodes", nargs="+", type=int, default=[4])
    parser.add_argument("--trainers", nargs="+", type=int, default=[1], help="on each node")
    parser.add_argument("--store-mb", type=int, default=1_000, help="object store of each node")
    given = parser.parse_args(words)
    print("\n".join(HEADER), flush=True)
    for model in given.models:
        for num_nodes in given.nodes:
            for trainers_each in given.trainers:
                print("\n".join(measure(model, num_nodes, trainers_each, given.store_mb)), flush=True)


if __name__ == "__main__":
    main()
