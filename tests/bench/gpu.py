"""`python -m tests.bench.gpu`: whole rounds on a GPU against bare CUDA loops, interleaved.

A round is everything that users wait for: local training, weighing, sum, evaluation on the test set and the records of
the run directory. The bare loops train the same clients on the same batches, average, and evaluate; they keep float
images on the card. One steps with torch.optim.SGD, the other replays a CUDA graph of forward, backward and step.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import torch.nn.functional as F

from raysim.core.seeding import derive_seed, torch_generator
from raysim.data.arrow import write_set
from raysim.data.rows import in_batches
from raysim.data.sources import set_path
from raysim.engine.device import accelerator
from raysim.engine.pool import SerialPool
from raysim.engine.ray.server import RayServer, TrainerStarter
from raysim.engine.schedule import choose_cohort
from raysim.folders.run_folder import RunFolder
from raysim.models import ModelSpec, build_model
from raysim.plan.build import Made, make_server, make_trainer
from raysim.plan.check import check
from raysim.running.record import Recorder
from tests.bench.workloads import images_of
from tests.support.federations import build_shards

WARM = 3

DEVICE = accelerator()


def settle() -> None:
    """Wait until the device has done all of its work."""
    if DEVICE != "cpu":
        torch.accelerator.synchronize()


CNN = {
    "partition": {"scheme": "dirichlet", "alpha": 0.1, "num_clients": 100, "min_samples": 10},
    "model": {"name": "cnn"},
    "local": {"lr": 0.01, "batch_size": 32},
    "cohort": {"size": 10},
}
#: name -> (what, images, test share, validation share, rounds, configuration)
CASES: dict[str, tuple[str, int, float, float, int, dict[str, Any]]] = {
    "W1": ("100 clients, 10 a round, CNN of 2.2 M, batch 32", 44_000, 1 / 11, 0, 12, CNN),
    "W2": (
        "ResNet-18, 4 clients of 100 images, batch 32, 200 test images",
        600,
        1 / 3,
        0,
        12,
        {
            "partition": {"scheme": "iid", "num_clients": 4},
            "model": {"name": "resnet18", "stem": "small"},
            "local": {"lr": 0.01, "batch_size": 32},
            "cohort": {"size": 4},
        },
    ),
    "W3": (
        "500 clients of 50 images, 100 a round, MLP 3072-64-10, batch 10",
        27_500,
        1 / 11,
        0,
        12,
        {
            "partition": {"scheme": "iid", "num_clients": 500},
            "model": {"name": "mlp"},
            "local": {"lr": 0.01, "batch_size": 10},
            "cohort": {"size": 100},
        },
    ),
    "W4": (
        "FedVG (block), 100 clients of 390 images x 5 epochs, 10 a round, CNN of W1, 6,000 validation images",
        49_000,
        4 / 49,
        6 / 49,
        3,
        CNN
        | {
            "partition": {"scheme": "iid", "num_clients": 100},
            "local": {"lr": 0.01, "batch_size": 32, "epochs": 5},
            "methods": [{"fedvg": {"granularity": "block"}}],
        },
    ),
}


@dataclass
class Timed:
    """A system with its rounds' seconds."""

    run: Any
    seconds: list[float] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)


class Recorded:
    """raysim: a round with its records."""

    def __init__(self, server, folder: Path, rounds: int, blocks):
        folder.mkdir(parents=True)
        self.server = server
        self.recorder = Recorder(RunFolder(folder), first_round=0, blocks=blocks)

    def round(self, index: int) -> dict[str, float]:
        began = time.perf_counter()
        record = self.server.run_round(index)
        done = time.perf_counter()
        self.recorder.write(record)
        return {**record.metrics, "records_s": time.perf_counter() - done, "call_s": done - began}


class BareCuda:
    """What a careful person writes in one file for one GPU."""

    def __init__(self, spec: ModelSpec, images, labels, plan, *, is_graph: bool):
        torch.backends.cudnn.benchmark = False
        self.plan, self.config, self.is_graph = plan, plan.config, is_graph
        self.rows = [torch.from_numpy(rows).to(DEVICE) for rows in plan.manifest.clients]
        self.x = (torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255).to(DEVICE)
        if self.x.shape[2] > 1 and spec.name != "mlp":
            self.x = self.x.contiguous(memory_format=torch.channels_last)
        self.y = torch.from_numpy(labels).to(DEVICE)
        self.model = build_model(spec, seed=0).to(DEVICE)
        if spec.name != "mlp":
            self.model = self.model.to(memory_format=torch.channels_last)
        self.params = list(self.model.parameters())
        self.buffers = [b for b in self.model.buffers() if b.is_floating_point()]
        self.tensors = [*self.params, *self.buffers]
        self.start = [t.detach().clone() for t in self.tensors]
        self.test, self.validation = (
            torch.from_numpy(r).to(DEVICE) for r in (plan.manifest.test, plan.manifest.validation)
        )
        size = self.config.local.batch_size
        self.batch_x, self.batch_y = self.x[:size].clone(), self.y[:size].clone()
        self.lr = self.config.local.lr
        if is_graph:
            self.capture()

    def step(self, x, y):
        for p in self.params:
            p.grad = None
        F.cross_entropy(self.model(x), y).backward()
        with torch.no_grad():
            torch._foreach_add_(self.params, [p.grad for p in self.params], alpha=-self.lr)

    def capture(self):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step(self.batch_x, self.batch_y)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step(self.batch_x, self.batch_y)
        self.load(self.start)

    def load(self, tensors):
        with torch.no_grad():
            torch._foreach_copy_(self.tensors, tensors)

    def score(self):
        """L2 norm of the validation gradient of each parameter, summed."""
        total = [torch.zeros_like(p) for p in self.params]
        for begin in range(0, len(self.validation), self.config.local.batch_size):
            part = self.validation[begin : begin + self.config.local.batch_size]
            for p in self.params:
                p.grad = None
            F.cross_entropy(self.model(self.x[part]), self.y[part], reduction="sum").backward()
            torch._foreach_add_(total, [p.grad for p in self.params])
        return torch.stack(torch._foreach_norm(total)).sum()

    def round(self, index: int) -> dict[str, float]:
        began = time.perf_counter()
        clients = choose_cohort(len(self.rows), self.config.cohort_size, seed=0, round_index=index).tolist()
        total = sum(len(self.rows[c]) for c in clients)
        sums = [torch.zeros_like(t) for t in self.tensors]
        size, epochs = self.config.local.batch_size, int(self.config.local.epochs)
        self.model.train()
        for client in clients:
            self.load(self.start)
            rows = self.rows[client]
            generator = torch_generator(derive_seed(0, "batches", index, client))
            for _ in range(epochs):
                order = rows[torch.randperm(len(rows), generator=generator).to(DEVICE)]
                for begin in range(0, len(rows), size):
                    part = order[begin : begin + size]
                    if self.is_graph and len(part) == size:
                        torch.index_select(self.x, 0, part, out=self.batch_x)
                        torch.index_select(self.y, 0, part, out=self.batch_y)
                        self.graph.replay()
                    elif len(part) > 1:
                        self.step(self.x[part], self.y[part])
            weight = len(rows) / total if not len(self.validation) else 1 / (1e-9 + float(self.score()))
            with torch.no_grad():
                torch._foreach_add_(sums, self.tensors, alpha=weight)
        self.start = sums
        self.load(self.start)
        self.model.eval()
        with torch.no_grad():
            correct = sum((self.model(self.x[part]).argmax(1) == self.y[part]).sum() for part in self.test.split(1024))
        return {"accuracy": float(correct) / max(1, len(self.test)), "call_s": time.perf_counter() - began}


def measure(name: str, root: Path, systems: tuple[str, ...]) -> None:
    what, count, test, validation, rounds, config = CASES[name]
    images, labels = images_of(count)
    set_name = f"gpu{count}"
    write_set(set_path(root, set_name), set_name, map(str, range(10)), in_batches(images, labels))
    raw = {
        **config,
        "rounds": rounds + WARM,
        "data": {"name": set_name, "root": str(root), "test": test, "validation": validation},
        "resources": {"backend": "serial"},
    }
    plan = check(raw, name)
    shards = build_shards(plan.manifest, root / "shards")
    recipe = plan.recipe(Made(str(shards)), wants_gpu=True)
    options = {key: value for key, value in config["model"].items() if key != "name"}
    spec = ModelSpec(plan.config.model.name, 10, plan.info.shape, options)
    made: dict[str, Timed] = {}
    closing = []
    for system in systems:
        if system.startswith("bare"):
            made[system] = Timed(BareCuda(spec, images, labels, plan, is_graph=system == "bare graph"))
            continue
        if system == "serial":
            server = make_server(recipe, SerialPool(partial(make_trainer, recipe), plan.keeps_memory))
        else:
            number = int(system.split()[1])
            share = {"CPU": 1} | ({} if DEVICE == "cpu" else {"GPU": 0.2})
            starter = TrainerStarter(partial(make_trainer, recipe), share, number)
            server = RayServer(partial(make_server, recipe), starter, keeps_memory=plan.keeps_memory)
            server.wait_until_ready()
            closing.append(server)
        folder = root / f"{name}-{system.replace(' ', '')}"
        made[system] = Timed(Recorded(server, folder, rounds + WARM, plan.layout.blocks))
    for index in range(rounds + WARM):
        for timed in made.values():
            settle()
            began = time.perf_counter()
            parts = timed.run.round(index)
            settle()
            if index >= WARM:
                timed.seconds.append(time.perf_counter() - began)
                timed.parts.append(parts)
    for server in closing:
        server.close()
    print(f"({name}) {what}; {rounds} rounds interleaved", flush=True)
    floor = {key: sum(made[key].seconds) for key in made if key.startswith("bare")}
    for system, timed in made.items():
        total = sum(timed.seconds)
        ratios = "  ".join(f"/ {key} {total / value:6.2f}" for key, value in floor.items())
        where = "  ".join(
            f"{key.removeprefix('system/').removesuffix('_s')} {1000 * np.mean([p[key] for p in timed.parts]):.1f}"
            for key in ("system/train_s", "system/aggregate_s", "system/evaluate_s", "records_s")
            if key in timed.parts[0]
        )
        print(
            f"    {system:12} median {1000 * np.median(timed.seconds):8.1f} ms, "
            f"mean {1000 * total / rounds:8.1f} ms  {ratios}  {where}",
            flush=True,
        )
    if "serial" in made and DEVICE != "cpu":
        profile(made["serial"].run, rounds + WARM, plan)


def profile(system: Recorded, index: int, plan) -> None:
    """Share of a round in which the card computes, and kernels a local step."""
    from torch.profiler import ProfilerActivity

    server = system.server
    server.phases = [replace(server.phases[0], rounds=index + 5), *server.phases[1:]]
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as recorded:
        began = time.perf_counter()
        record = server.run_round(index)
        settle()
        spent = time.perf_counter() - began
    events = [e for e in recorded.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    busy = sum(event.device_time for event in events) / 1e6
    steps = int(record.clients["num_steps"].sum())
    print(
        f"    one round of serial: {steps} steps, {len(events) / steps:.1f} kernels and copies a step, "
        f"card busy {busy / spent:.0%}"
    )


def main() -> None:
    names = [a for a in sys.argv[1:] if a in CASES] or list(CASES)
    systems = tuple(a.replace("_", " ") for a in sys.argv[1:] if a not in CASES) or (
        "serial",
        "ray 1",
        "ray 4",
        "bare eager",
        "bare graph",
    )

    card = torch.cuda.get_device_name() if DEVICE == "cuda" else f"no CUDA, {DEVICE}"
    print(f"{card}; PyTorch {torch.__version__}", flush=True)
    with tempfile.TemporaryDirectory() as folder, ray.init(num_cpus=12, include_dashboard=False, log_to_driver=False):
        for name in names:
            measure(name, Path(folder), systems)


if __name__ == "__main__":
    main()
