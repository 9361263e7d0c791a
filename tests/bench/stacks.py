"""`python -m tests.bench stacks`: CPU seconds of a serial round with and without stacked clients, for small dense networks."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from itertools import pairwise
from statistics import median
from typing import Any

import raysim

ALL = {"partition": {"scheme": "iid", "num_clients": 100}, "local": {"epochs": 5, "batch_size": 10}}
FEW = {
    "partition": {"scheme": "dirichlet", "alpha": 0.5, "num_clients": 20},
    "cohort": {"size": 8},
    "local": {"epochs": 5, "batch_size": 16},
}
#: hidden layers of the network -> further settings
CASES = {
    "16, all 100 clients": {"model": {"name": "mlp", "hidden": 16}, **ALL},
    "64 and 32, all 100 clients": {"model": {"name": "mlp", "hidden": [64, 32]}, **ALL},
    "200, all 100 clients": {"model": {"name": "mlp", "hidden": 200}, **ALL},
    "128, 8 of 20 clients with alpha 0.5": {"model": {"name": "mlp", "hidden": 128}, **FEW},
    "2,000, 8 of 20 clients with alpha 0.5": {"model": {"name": "mlp", "hidden": 2000}, **FEW},
}


def main(repeats: int = 5) -> None:
    for name, case in CASES.items():
        runs = {stack: [cpu_ms(case, stack) for _ in range(repeats)] for stack in ("off", "auto")}
        times = {stack: f"{median(ms):.0f} ({min(ms):.0f} to {max(ms):.0f})" for stack, ms in runs.items()}
        gain = median(runs["off"]) / median(runs["auto"])
        print(f"{name}: off {times['off']}, auto {times['auto']} ms of CPU a round; {gain:.1f} times faster", flush=True)


def cpu_ms(case: Mapping[str, Any], stack: str) -> float:
    ends: list[float] = []
    with tempfile.TemporaryDirectory() as storage:
        raysim.run(
            case,
            data={"name": "digits"},
            local=case["local"] | {"stack": stack},
            rounds=6,
            evaluation={"every": 6},
            resources={"backend": "serial"},
            on_round=lambda _: ends.append(time.process_time()),
            storage=storage,
            quiet=True,
        )
    return 1000 * median(end - begin for begin, end in pairwise(ends))
