"""Tasks with a main metric of their own, drawn: the best round is the best by the declared direction, or the task is refused."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

import raysim
from methods import METHODS
from raysim.base.direction import OF_RAYSIM, direction_of
from raysim.data.sources import prepare
from raysim.plan.check import check
from raysim.running.runner import execute
from raysim.training.tasks import CLASSES, REGRESSION, Columns, Task
from tests.fuzz.combinations import drawn_options

#: Names of main metrics: of raysim, beginning like one of raysim, and others.
MAINS = (
    "accuracy",
    "rmse",
    "loss",
    "accuracy_gap",
    "loss_ratio",
    "mse",
    "brier",
    "best",
    "validation",
    "success",
    "r2",
)


def drawn_task(
    *,
    base: Literal["classes", "regression"],
    main: str,
    direction: str | None = None,
    period: int = 0,
    low: float = 0.0,
) -> Task:
    """A task whose main metric is a score of the predictions, and NaN for every `period`-th value of it."""

    def metrics(columns: Columns, num_outputs: int) -> dict[str, float]:
        predicted = columns["predictions"]
        score = float(np.asarray(predicted, np.float64).mean()) + low
        return {main: math.nan if period and int(1e6 * abs(score)) % period == 0 else score}

    task = CLASSES if base == "classes" else REGRESSION
    return replace(task, name="drawn", main=main, direction=direction, metrics=metrics)


def best_of_a_drawn_task(rng: random.Random, raw: dict[str, Any], here: Path, root: Path) -> bool:
    """Equal hashes in two runs; best value and round as a naive loop over the records finds them."""
    name, base = rng.choice((("digits", "classes"), ("breast_cancer", "classes"), ("diabetes", "regression")))
    prepare(name, root)
    main, direction = rng.choice(MAINS), rng.choice(("max", "min", "min", None))
    options = {"base": base, "main": main, "direction": direction}
    options |= {"period": rng.choice((0, 1, 2, 3)), "low": rng.choice((0.0, -5.0))}
    methods = rng.sample(list(METHODS), rng.choice((0, 1, 2)))
    raw = raw | {
        "rounds": 4,
        "data": {"root": str(root), "name": name, "validation": 0.1},
        "task": {f"{__name__}:drawn_task": options},
        "model": {"name": "mlp", "hidden": 4},
        "methods": [{each: drawn_options(rng, each)} for each in methods],
    }
    first = execute(check(raw, "a case"))
    again = execute(check(raw | {"name": "again"}, "a case"))
    scores = raysim.load(here / "runs" / raw["name"]).history[f"server/{main}"].tolist()
    better = direction or direction_of(main)
    best = None
    for number, score in enumerate(scores):
        if not math.isnan(score) and (
            best is None or ((score > scores[best]) == (better == "max") and score != scores[best])
        ):
            best = number
    is_known = direction is not None or main in OF_RAYSIM
    is_best = first["best_round"] == best and first[f"best_{main}"] == (None if best is None else scores[best])
    return is_known and is_best and first["params_sha256"] == again["params_sha256"]
