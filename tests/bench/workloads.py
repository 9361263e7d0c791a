"""What is measured: federations, each as a configuration for raysim and as a folder of plain arrays for everybody else."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from raysim.data.arrow import PreparedSet, write_set
from raysim.data.rows import in_batches
from raysim.data.sources import set_path
from raysim.engine.schedule import choose_cohort
from raysim.models import build_model
from raysim.plan.build import Plan
from raysim.plan.check import check

CNN = {
    "partition": {"scheme": "dirichlet", "alpha": 0.1, "num_clients": 100, "min_samples": 10},
    "model": {"name": "cnn"},
    "local": {"lr": 0.01, "batch_size": 32},
    "cohort": {"size": 10},
}

MLP = {"model": {"name": "mlp"}, "local": {"lr": 0.01, "batch_size": 10}, "cohort": {"size": 100}}


@dataclass(frozen=True)
class Workload:
    """A federation of random images with 3 channels. train, test, validation: images; rounds: of a measured run.

    W1, W3 and W5 have a tenth as many test images as training images, evaluated after every round.

    Attributes:
      domains: of these in a column, in equal parts; 0: no such column.
    """

    name: str
    about: str
    train: int
    test: int
    rounds: int
    config: dict[str, Any]
    validation: int = 0
    side: int = 32
    domains: int = 0

    @property
    def images(self) -> int:
        return self.train + self.test + self.validation


WORKLOADS = {
    load.name: load
    for load in (
        Workload(
            "W1",
            "100 clients, 10 a round, CNN of 2.2 M parameters on 3x32x32, batch 32, Dirichlet 0.1 of 40,000 images, "
            "4,000 test images",
            *(40_000, 4_000, 10),
            CNN,
        ),
        Workload(
            "W2",
            "ResNet-18 on 3x32x32, 4 clients of 100 images, batch 32, 200 test images",
            *(400, 200, 10),
            {
                "partition": {"scheme": "iid", "num_clients": 4},
                "model": {"name": "resnet18", "stem": "small"},
                "local": {"lr": 0.01, "batch_size": 32},
                "cohort": {"size": 4},
            },
        ),
        Workload(
            "W3",
            "500 clients of 50 images, 100 a round, MLP 3072-64-10, batch 10, 2,500 test images",
            *(25_000, 2_500, 60),
            {"partition": {"scheme": "iid", "num_clients": 500}, **MLP},
        ),
        Workload(
            "W4",
            "FedVG (block), 20 clients of 390 images x 5 epochs, 4 a round, CNN of W1, 6,000 validation images, "
            "780 test images",
            *(7_800, 780, 3),
            CNN
            | {
                "partition": {"scheme": "iid", "num_clients": 20},
                "local": {"lr": 0.01, "batch_size": 32, "epochs": 5},
                "cohort": {"size": 4},
                "methods": [{"fedvg": {"granularity": "block"}}],
            },
            validation=6_000,
        ),
        Workload(
            "W3-domains",
            "W3 with 500 natural clients: each a domain, with accuracies of all domains in every round",
            *(25_000, 2_500, 60),
            {"partition": {"scheme": "natural", "num_clients": 500}, **MLP},
            domains=500,
        ),
        Workload(
            "W5",
            "LeNet (62,006 parameters), 10 clients of 1,000 images, all of them in every round, batch 64, 1,000 test images",
            *(10_000, 1_000, 20),
            {
                "partition": {"scheme": "iid", "num_clients": 10},
                "model": {"name": "lenet"},
                "local": {"lr": 0.01, "batch_size": 64},
                "cohort": {"size": 10},
            },
        ),
        Workload(
            "tiny",
            "for the bench's own test",
            *(240, 40, 4),
            {
                "partition": {"scheme": "iid", "num_clients": 8},
                "model": {"name": "cnn", "width": 4, "hidden": 8},
                "local": {"lr": 0.1, "batch_size": 8},
                "cohort": {"size": 4},
                "methods": [{"fedvg": {"granularity": "block"}}],
            },
            validation=60,
            side=12,
        ),
    )
}


def images_of(count: int, num_classes: int = 10, side: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Random images (count, side, side, 3) uint8 with labels: speed does not depend on what they show."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (count, side, side, 3), dtype=np.uint8)
    return images, np.arange(count, dtype=np.int64) % num_classes


@dataclass(frozen=True)
class Prepared:
    """A workload on disk. config: YAML for `raysim run`; job: folder of arrays for the bare loop and for other tools."""

    load: Workload
    root: Path
    config: Path
    job: Path


def prepared(load: Workload, root: Path, rounds: int | None = None) -> Prepared:
    """Write a workload's set, configuration and arrays below `root`, if they are not there; no shards yet."""
    load = replace(load, rounds=rounds or load.rounds)
    root = root / load.name
    config, job = root / "config.yaml", root / "job"
    if (job / "job.json").exists():
        return Prepared(load, root, config, job)
    set_name = f"bench{load.images}"
    images, labels = images_of(load.images, side=load.side)
    domains = np.arange(load.images) % load.domains if load.domains else None
    names = {"domains": [f"writer{number}" for number in range(load.domains)]} if load.domains else {}
    batches = in_batches(images, labels, domains=domains)
    write_set(set_path(root / "data", set_name), set_name, map(str, range(10)), batches, **names)
    shares = {name: (count + 0.5) / load.images for name, count in (("test", load.test), ("val", load.validation))}
    raw = {
        **load.config,
        "rounds": load.rounds,
        "storage": str(root / "runs"),
        "data": {
            "name": set_name,
            "root": str(root / "data"),
            "test": shares["test"] if load.test else 0,
            "validation": shares["val"] if load.validation else 0,
        },
    }
    config.write_text(yaml.safe_dump(raw))
    write_job(check(raw, load.name), load, job)
    return Prepared(load, root, config, job)


def write_job(plan: Plan, load: Workload, job: Path) -> None:
    """The same federation without raysim: arrays by client, cohorts of all rounds, the initial module, settings."""
    job.mkdir(parents=True, exist_ok=True)
    manifest, config, source = plan.manifest, plan.config, PreparedSet(Path(plan.manifest.set_path))
    parts = {"train": np.concatenate(manifest.clients), "test": manifest.test, "validation": manifest.validation}
    for name, rows in parts.items():
        images, labels = source.take(rows)
        np.save(job / f"{name}_images.npy", images)
        np.save(job / f"{name}_labels.npy", labels)
    population = len(manifest.clients)
    cohorts = [
        choose_cohort(population, config.cohort_size, seed=config.seed, round_index=index)
        for index in range(load.rounds)
    ]
    np.save(job / "cohorts.npy", np.stack(cohorts))
    np.save(job / "starts.npy", np.cumsum([0, *map(len, manifest.clients)]))
    torch.save(build_model(plan.spec, seed=config.seed), job / "model.pt")
    facts = {
        "seed": config.seed,
        "rounds": load.rounds,
        "lr": config.local.lr,
        "epochs": int(config.local.epochs),
        "batch_size": config.local.batch_size,
        "block_of": {leaf.name: leaf.block for leaf in plan.layout.leaves},
        "is_scored": bool(config.methods),
    }
    (job / "job.json").write_text(json.dumps(facts))
