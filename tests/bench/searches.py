"""`python -m tests.bench searches`: the learning rate of a small federation, chosen by Optuna and at random.

The range is what somebody gives who knows nothing of its scale. Both get the same number of trials for each seed. A search
hits if its best loss is within 0.1 of the lowest loss that any trial of any search reached.
"""

from __future__ import annotations

import math
import tempfile
import time
from functools import cache

import numpy as np

import raysim
from raysim.base.errors import RaysimError
from raysim.core.seeding import derive_seed, numpy_generator
from raysim.tuning.ranges import Tried, draws, suggest

BUDGET, SEEDS = 30, range(5)
RATE = draws("loguniform", [1e-8, 1e4])
CONFIG = {
    "data": {"name": "digits"},
    "partition": {"alpha": 100.0, "num_clients": 10},
    "model": {"name": "mlp"},
    "local": {"epochs": 1, "batch_size": 16},
    "cohort": {"size": 10},
    "rounds": 4,
    "resources": {"backend": "serial"},
}


def main() -> None:
    began = time.perf_counter()
    searches = {"optuna": by_optuna, "random": at_random}
    lowest = {name: [search(seed) for seed in SEEDS] for name, search in searches.items()}
    best = min(map(min, lowest.values()))
    print(
        f"digits' lr in [1e-8, 1e4], {BUDGET} trials a search, {time.perf_counter() - began:.0f} s; lowest loss {best:.4f}"
    )
    for name, losses in lowest.items():
        hits = sum(value <= best + 0.1 for value in losses)
        print(
            f"    {name}: {hits} of {len(losses)} within 0.1; by seed {', '.join(f'{value:.4f}' for value in losses)}"
        )


def by_optuna(seed: int) -> float:
    tried: list[Tried] = []
    for number in range(BUDGET):
        values = suggest({"lr": RATE}, tried, mode="min", seed=derive_seed(seed, "tune.optuna", number))
        tried.append(Tried(values, loss(float(str(values["lr"])))))
    return min(each.score for each in tried if each.score is not None and math.isfinite(each.score))


def at_random(seed: int) -> float:
    generator = numpy_generator(derive_seed(seed, "tune.local.lr"))
    return float(np.nanmin([loss(float(str(RATE.at(generator.random())))) for _ in range(BUDGET)]))


@cache
def loss(lr: float) -> float:
    """The test loss at the end; NaN if training diverged."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            run = raysim.run(CONFIG, {"local.lr": lr}, storage=folder, quiet=True)
        except RaysimError:
            return math.nan
        return float(run.history["server/loss"].iloc[-1])
