"""`python -m tests.bench many`: what the engine itself costs a round, on 1 to 16 emulated nodes.

Each node is a `ray start` on this machine with as many logical CPUs as trainers. Clients train nothing: each has one image,
and a network with BatchNorm takes no step on one. What is left is messages, reports, the exact sum, evaluation of 64 images
and records. The server's time is the CPU time of its process between two rounds, Ray's threads in it included; calls are
those that it makes of trainers. `python -m tests.bench.many --picture FILE` draws a figure, too.
"""

from __future__ import annotations

import argparse
import csv
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from ray.actor import ActorMethod

from raysim.core.method import Method
from raysim.data.arrow import write_set
from raysim.data.rows import in_batches
from raysim.data.sources import set_path
from raysim.reporting.panels import panel_grid, styles_of
from tests.bench.workloads import images_of
from tests.support.nodes import Cluster

POPULATION, TEST_ROWS = 10_000, 64

#: The first round is left out: caches fill, and shards are mapped.
ROUNDS, WARM = 5, 1

#: Seconds for a run on a machine that does other work, too.
PATIENCE_S = 1_200


def counted() -> Method:
    """Logs, in every round, the CPU time of the server's process so far, and the calls that it has made of actors."""
    calls = 0
    remote = ActorMethod._remote

    def counting(*values: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        return remote(*values, **named)

    def weigh(weights: Any, server: Any) -> Any:
        ActorMethod._remote = counting  # in the server's process alone
        server.log("cpu_s", time.process_time())
        server.log("calls", float(calls))
        return weights

    return Method("counted", weigh=weigh)


class Cost(NamedTuple):
    """Medians over rounds, in seconds, and the seconds from the command to the first round.

    Attributes:
      server_s: CPU time of the server's process. aggregate_s: from the last report to the new model, on the clock.
    """

    nodes: int
    clients: int
    calls: float
    server_s: float
    round_s: float
    aggregate_s: float
    start_s: float

    def line(self) -> str:
        times = " | ".join(f"{1000 * value:.0f}" for value in (self.server_s, self.aggregate_s, self.round_s))
        return f"| {self.nodes} | {self.clients} | {self.calls:.0f} | {times} | {self.start_s:.0f} |"


HEADER = [
    "| nodes | clients a round | calls a round | server's CPU, ms | sum, ms | round, ms | to the first round, s |",
    "|---|---|---|---|---|---|---|",
]


def prepared(root: Path, population: int) -> None:
    images = images_of(population + TEST_ROWS, side=8)
    write_set(set_path(root / "data", "bench"), "bench", map(str, range(10)), in_batches(*images))


def measure(
    cluster: Cluster, root: Path, num_nodes: int, clients: int, trainers_each: int, population: int = POPULATION
) -> Cost:
    """One run on a cluster that has these nodes."""
    test = (TEST_ROWS + 0.5) / (population + TEST_ROWS)
    num_trainers, name = num_nodes * trainers_each, f"n{num_nodes}-{clients}"
    raw = {
        "name": name,
        "storage": str(root / "runs"),
        "rounds": ROUNDS,
        "data": {"name": "bench", "root": str(root / "data"), "test": test, "validation": 0.0},
        "partition": {"scheme": "iid", "num_clients": population},
        "model": {"name": "cnn", "width": 2, "hidden": 4, "norm": "batch"},
        "methods": ["tests.bench.many:counted"],
        "cohort": {"size": clients},
        "resources": {"backend": "ray", "trainers": num_trainers, "cpus_per_trainer": 1},
    }
    (root / f"{name}.yaml").write_text(yaml.safe_dump(raw))
    driver = cluster.run(root / f"{name}.yaml")
    driver.finish(PATIENCE_S)
    (start_s,) = map(float, re.findall(r"\((\d+\.\d) s to start", driver.output))
    with open(root / "runs" / name / "progress.csv") as file:
        rows = [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]

    def median(key: str) -> float:
        return float(np.median([row[key] for row in rows[WARM:]]))

    def median_step(key: str) -> float:
        return float(np.median(np.diff([row[key] for row in rows[WARM:]])))

    return Cost(
        num_nodes,
        clients,
        median_step("counted/calls"),
        median_step("counted/cpu_s"),
        median("system/round_s"),
        median("system/aggregate_s"),
        start_s,
    )


def measured(nodes: Sequence[int], clients: Sequence[int], trainers_each: int, population: int) -> list[Cost]:
    """The fewest and the most nodes with every number of clients, the others with the middle one."""
    costs: list[Cost] = []
    middle, have = sorted(clients)[len(clients) // 2], 0
    print("\n".join(HEADER), flush=True)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, Cluster(idle_workers=0, store_mb=100) as cluster:
        root = Path(folder)
        prepared(root, population)
        for num_nodes in sorted(nodes):
            for index in range(have, num_nodes):
                cluster.add(f"n{index}", cpus=trainers_each)
            have = num_nodes
            for count in sorted(clients) if num_nodes in (min(nodes), max(nodes)) else [middle]:
                costs.append(measure(cluster, root, num_nodes, count, trainers_each, population))
                print(costs[-1].line(), flush=True)
    return costs


def draw(costs: Sequence[Cost], path: Path) -> None:
    """The server's CPU time against nodes, and against clients on the fewest and on the most nodes."""
    counts = sorted({cost.clients for cost in costs})
    fewest, most = min(cost.nodes for cost in costs), max(cost.nodes for cost in costs)
    middle = counts[len(counts) // 2]
    figure, panels = panel_grid(2)
    lines = [
        (panels[0], "nodes", f"{middle:,} clients", [cost for cost in costs if cost.clients == middle]),
        (panels[1], "clients", f"{fewest} node", [cost for cost in costs if cost.nodes == fewest]),
        (panels[1], "clients", f"{most} nodes", [cost for cost in costs if cost.nodes == most]),
    ]
    styles = styles_of([label for _, _, label, _ in lines])
    for axes, key, label, some in lines:
        x, y = [getattr(cost, key) for cost in some], [1000 * cost.server_s for cost in some]
        style = styles[label]
        axes.plot(x, y, style.dash, color=style.colour, marker=style.marker, label=label)
        axes.set(xlabel=f"{key} a round" if key == "clients" else key, ylabel="server's CPU, ms a round", xscale="log")
        axes.set_xticks(x, [f"{value:,}" for value in x])
        axes.minorticks_off()
        axes.set_ylim(0, None)
        axes.legend(frameon=False)
    figure.savefig(path, dpi=144)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--clients", nargs="+", type=int, default=[100, 1_000, 10_000])
    parser.add_argument("--trainers", type=int, default=2, help="on each node; one has 0.4 GB")
    parser.add_argument("--population", type=int, default=POPULATION)
    parser.add_argument("--picture", type=Path, help="where the figure goes")
    given = parser.parse_args(words)
    costs = measured(given.nodes, given.clients, given.trainers, given.population)
    if given.picture:
        draw(costs, given.picture)


if __name__ == "__main__":
    main()
