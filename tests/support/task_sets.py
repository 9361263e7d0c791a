"""A tiny set for each task, and a tiny run on it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from raysim.api import arrays
from raysim.training.tasks import TASKS

#: Rows of each set; numbers in a row, tokens in a sequence.
ROWS, WIDTH, LENGTH, VOCABULARY = 60, 4, 7, 5

#: Task -> the toy model for its inputs.
NETS = {
    "classes": "tests.support.toy_data:rows_net",
    "labels": "tests.support.toy_data:rows_net",
    "regression": "tests.support.toy_data:rows_net",
    "tokens": "tests.support.toy_data:tokens_net",
}


def contents(task: str, rows: int = ROWS, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(inputs, targets) of a task, which can be learned from each other."""
    rng = np.random.default_rng(seed)
    if task == "tokens":
        text = np.cumsum(1 + (rng.random((rows, LENGTH + 1)) < 0.2), axis=1) % VOCABULARY
        text[0, :VOCABULARY] = np.arange(VOCABULARY)  # each of them occurs
        return text[:, :-1].astype(np.int32), text[:, 1:].astype(np.int32)
    inputs = rng.normal(size=(rows, WIDTH)).astype(np.float32)
    values = inputs @ rng.normal(size=(WIDTH, 3)) + 0.3 * rng.normal(size=(rows, 3))
    if task == "classes":
        return inputs, values.argmax(1)
    return inputs, (values > 0).astype(np.uint8) if task == "labels" else values[:, :1].astype(np.float32)


def write_task_set(root: Path, task: str, **how: object) -> str:
    """Prepare the set of a task, and say its name."""
    inputs, targets = contents(task)
    more = {"vocabulary": VOCABULARY} if task == "tokens" else {}
    classes = {"classes": 3, "labels": 3, "regression": 1, "tokens": VOCABULARY}[task]
    names = [f"{task} {number}" for number in range(classes)]
    arrays(inputs, targets, name=f"tiny_{task}", classes=names, root=root, **more, **how)
    return f"tiny_{task}"


def write_task_sets(folder: Path) -> Path:
    """The folder, with the set of every task."""
    for task in TASKS:
        write_task_set(folder, task)
    return folder


def task_config(root: Path, task: str, methods=(), **groups: object) -> dict[str, object]:
    """One round of two clients on the set of a task, which `write_task_set` has made."""
    raw: dict[str, object] = {
        "seed": 3,
        "rounds": 1,
        "data": {"name": f"tiny_{task}", "root": str(root), "test": 0.2, "validation": 0.2},
        "partition": {"scheme": "iid", "num_clients": 2},
        "model": {"name": NETS[task]},
        "methods": list(methods),
        "local": {"lr": 0.1, "epochs": 1, "batch_size": 8},
        "cohort": {"size": 2},
        "resources": {"backend": "serial"},
    }
    for key, value in groups.items():
        raw[key] = {**raw.get(key, {}), **value} if isinstance(value, dict) else value
    return raw
