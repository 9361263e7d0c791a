"""Run directories as `raysim run` leaves them, made up in milliseconds, for tests of the report."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import yaml

from raysim.config import Config
from raysim.folders.run_folder import RunFolder
from raysim.reporting.drawing import draw_figures
from raysim.reporting.gather import make_report

#: Configurations that bear out the labels of made-up runs.
TRUE = {
    "CIFAR-10": {"data": {"name": "cifar10"}},
    "ResNet-18": {"model": {"name": "resnet18"}},
    "MobileNetV2": {"model": {"name": "mobilenetv2"}},
}


def fabricate(
    folder: Path,
    best: float,
    *,
    labels=None,
    status="COMPLETED",
    rounds=10,
    clients=0,
    norms=(),
    progress=None,
    summary=None,
    **config,
) -> Path:
    """A run whose best accuracy (a fraction) is `best`; its data set and model are those of the labels.

    Args:
      progress: column of progress.csv -> values, a list or one for all rounds; summary: further keys of summary.json.
      status: COMPLETED, FAILED or "" (unfinished, half of the rounds done).
      clients: so many clients in clients.parquet, client 1 with a growing weight; 0 for no file.
      norms: rounds with an array `fedvg.norms` of 8 clients by 12 layers.
      config: keys of the configuration.
    """
    folder.mkdir(parents=True)
    for label in (labels or {}).values():
        config = {**TRUE.get(label, {}), **config}
    full = Config.model_validate({"rounds": rounds, "labels": labels or {}, **config}).model_dump(mode="json")
    (folder / "config.yaml").write_text(yaml.safe_dump(full, sort_keys=False))
    (folder / "env.json").write_text(
        json.dumps({"python": "3.11.9", "packages": {"torch": "2.14.1"}, "git_commit": "abc"})
    )
    done = rounds if status == "COMPLETED" else rounds // 2
    scores = [best * (1 - 0.6 * np.exp(-3 * index / rounds)) for index in range(done - 1)] + [best]
    with open(folder / "progress.csv", "w", newline="") as file:
        writer = csv.writer(file)
        more = {
            key: values if isinstance(values, list) else [values] * rounds for key, values in (progress or {}).items()
        }
        writer.writerow(["round", "server/accuracy", "system/round_s", *more])
        for index, score in enumerate(scores):
            writer.writerow([index, repr(float(score)), 1.0, *(values[index] for values in more.values())])
    if status == "COMPLETED":
        facts = {"methods": full["methods"], "accuracy": best, "best_accuracy": best, "best_round": rounds - 1}
        facts |= {"mean_last_10pct_accuracy": best - 0.01, **(summary or {})}
        (folder / "summary.json").write_text(json.dumps(facts))
    if status:
        text = "client 3 failed in round 4 (block 0, trainer 1): boom\n\nTraceback" if status == "FAILED" else ""
        (folder / status).write_text(text)
    rng = np.random.default_rng(full["seed"])
    if clients:
        RunFolder(folder).append_clients(_clients(clients, rounds, rng))
    for round_index in norms:
        _write_norms(folder / "arrays", round_index, rng)
    return folder


def labels_of(method, alpha, seed=0, **more):
    return {"dataset": "CIFAR-10", "model": "ResNet-18", "method": method, "alpha": alpha, "seed": seed, **more}


def sweep(root, scores, group=None, **config):
    """A sweep directory with a run for each (method, alpha) -> accuracies by seed."""
    config = {"data": {"name": "cifar10"}, "model": {"name": "resnet18"}, **config}
    root.mkdir(parents=True)
    (root / "sweep.yaml").write_text(yaml.safe_dump({"rounds": 10, "tune": {}, "report": group or {}}))
    for (method, alpha), values in scores.items():
        for seed, value in enumerate(values):
            name = f"{method}-{alpha}-{seed}".replace(" ", "")
            fabricate(root / name, value, labels=labels_of(method, alpha, seed), seed=seed, **config)
    return root


def drawn(paths, given):
    """(report, file name -> figure, kind -> why it is missing)."""
    missing = {}
    report = make_report(paths, given)
    return report, draw_figures(report, on_missing=missing.__setitem__), missing


SCORES = {
    ("FedAvg", 0.1): [0.50, 0.54, 0.58],
    ("FedAvg", 0.05): [0.40, 0.42],
    ("FedProx", 0.1): [0.53, 0.55, 0.54],
    ("FedVG", 0.1): [0.60, 0.62, 0.61],
    ("FedVG", 0.05): [0.45],
}


def _clients(count: int, rounds: int, rng: np.random.Generator) -> pa.Table:
    weight = rng.dirichlet(np.full(count, 30.0), rounds)
    weight[:, 1] += 0.1 * np.arange(rounds) / rounds
    weight /= weight.sum(1, keepdims=True)
    round_index, client = np.divmod(np.arange(rounds * count), count)
    dropped = np.zeros(rounds * count, bool)
    return pa.table({"round": round_index, "client": client, "weight": weight.ravel(), "is_dropped": dropped})


def _write_norms(folder: Path, round_index: int, rng: np.random.Generator) -> None:
    folder.mkdir(exist_ok=True)
    layers = np.array([f"layer{1 + i // 4}.{i % 4}.conv.weight" for i in range(12)])
    norms = 10 ** (rng.normal(0, 0.2, (8, 12)) + np.linspace(0, 2, 12) - round_index / 100)
    arrays = {"fedvg.norms": norms, "fedvg.norms:columns": layers, "fedvg.norms:clients": np.arange(8) * 3}
    np.savez(folder / f"round_{round_index:05}.npz", **arrays)
