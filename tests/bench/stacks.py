"""`python -m tests.bench stacks`: CPU seconds of a serial round with and without stacked clients, for small dense networks."""

from __future__ import annotations

import tempfile
import time
from itertools import pairwise
from statistics import median

import raysim

MODELS = {"16": 16, "64, 32": [64, 32], "200": 200}
CONFIG = {
    "data": {"name": "digits"},
    "partition": {"scheme": "iid", "num_clients": 100},
    "cohort": {"size": 100},
    "local": {"epochs": 5, "batch_size": 10},
    "rounds": 6,
    "evaluation": {"every": 6},
    "resources": {"backend": "serial"},
}


def main(repeats: int = 5) -> None:
    for name, hidden in MODELS.items():
        runs = {stack: [cpu_ms(hidden, stack) for _ in range(repeats)] for stack in ("off", "auto")}
        times = {stack: f"{median(ms):.0f} ({min(ms):.0f} to {max(ms):.0f})" for stack, ms in runs.items()}
        gain = median(runs["off"]) / median(runs["auto"])
        print(f"mlp {name}: off {times['off']}, auto {times['auto']} ms of CPU a round; {gain:.1f} times faster")


def cpu_ms(hidden: int | list[int], stack: str) -> float:
    ends: list[float] = []
    with tempfile.TemporaryDirectory() as storage:
        model, local = {"name": "mlp", "hidden": hidden}, {"stack": stack}
        raysim.run(
            CONFIG,
            on_round=lambda _: ends.append(time.process_time()),
            model=model,
            local=local,
            storage=storage,
            quiet=True,
        )
    return 1000 * median(end - begin for begin, end in pairwise(ends))
