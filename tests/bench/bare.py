"""The bare loop: what a careful person writes in one file, as fast as plain PyTorch allows.

    python -m tests.bench.bare JOB --processes 2 --threads 1 [--tuned]

It trains the clients of a job folder (see `workloads.write_job`) in the same batches as raysim, averages, and evaluates on
the test set in every round. Nothing of raysim runs in it but the seeds of the batch orders. All images are floats in
memory that the processes share; each process trains some clients and evaluates its part of the test set. It keeps no
records. FedVG's scores are taken as plainly: a validation gradient of each client's model, straight after its training.

`--tuned` adds what takes knowledge of the machine: channels-last convolutions, an SGD step of one call, memory that
stays in the process, and dense networks with one hidden layer trained eight clients at a time, as batched matrix
products. All four are in raysim; the tuned loop says what is left of its gain without them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F

from raysim.core.seeding import derive_seed, torch_generator
from raysim.engine.device import keep_freed_memory

EPS = 1e-8

#: Clients of a stack in the tuned loop.
STACK = 8


class Job:
    """The arrays of a job folder as tensors: images (n, channels, height, width) float32 in [0, 1]."""

    def __init__(self, folder: Path, *, is_tuned: bool = False):
        self.is_tuned = is_tuned
        self.facts = json.loads((folder / "job.json").read_text())
        self.cohorts, self.starts = np.load(folder / "cohorts.npy"), np.load(folder / "starts.npy").tolist()
        self.model = torch.load(folder / "model.pt", weights_only=False)
        parts = [type(part) for part in self.model.modules() if not isinstance(part, torch.nn.Sequential)]
        Flatten, Linear, ReLU = torch.nn.Flatten, torch.nn.Linear, torch.nn.ReLU
        self.is_stacked = is_tuned and parts == [Flatten, Linear, ReLU, Linear]
        order = torch.channels_last if is_tuned and not self.is_stacked else torch.contiguous_format
        self.model = self.model.to(memory_format=order)
        self.train, self.test, self.validation = (_set(folder, name, order) for name in ("train", "test", "validation"))

    def size(self, client: int) -> int:
        return self.starts[client + 1] - self.starts[client]


def _set(folder: Path, name: str, order: torch.memory_format) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = np.load(folder / f"{name}_images.npy"), np.load(folder / f"{name}_labels.npy")
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(memory_format=order).float().div_(
        255
    ), torch.from_numpy(labels)


class Worker:
    """One process of the loop: `round` trains clients, `evaluate` scores a slice of the test set."""

    def __init__(self, job: Job, start: list[torch.Tensor], out: list[torch.Tensor], totals: torch.Tensor):
        self.job, self.facts, self.model = job, job.facts, job.model
        self.start, self.out, self.totals = start, out, totals
        self.params = list(self.model.parameters())
        self.tensors = tensors_of(self.model)
        self.optimizer = torch.optim.SGD(self.params, lr=self.facts["lr"])
        self.has_norm = any(isinstance(m, torch.nn.BatchNorm2d) for m in self.model.modules())

    def load(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self.tensors, self.start)

    def train(self, round_index: int, clients: list[int]) -> None:
        """out = sum of weight * model over the clients, totals = sum of the weights, tensor by tensor."""
        self.model.train()
        torch._foreach_zero_(self.out)
        self.totals.zero_()
        if self.job.is_stacked:
            for size, some in groupby(clients, self.job.size):  # clients come sorted by size
                some = list(some)
                for first in range(0, len(some), STACK):
                    self.descend_stacked(round_index, some[first : first + STACK], size)
            return
        for client in clients:
            self.load()
            self.descend(round_index, client)
            weights = self.inverse_norms() if self.facts["is_scored"] else [self.job.size(client)] * len(self.out)
            with torch.no_grad():
                for total, tensor, weight in zip(self.out, self.tensors, weights, strict=True):
                    total.add_(tensor, alpha=weight)
            self.totals.add_(torch.tensor(weights, dtype=torch.float64))

    def descend(self, round_index: int, client: int) -> None:
        rows = slice(self.job.starts[client], self.job.starts[client + 1])
        x, y = (part[rows] for part in self.job.train)
        generator = torch_generator(derive_seed(self.facts["seed"], "batches", round_index, client))
        for _ in range(self.facts["epochs"]):
            for index in torch.randperm(len(y), generator=generator).split(self.facts["batch_size"]):
                if self.has_norm and len(index) == 1:
                    continue
                self.optimizer.zero_grad()
                F.cross_entropy(self.model(x[index]), y[index]).backward()
                if self.job.is_tuned:
                    with torch.no_grad():
                        torch._foreach_add_(self.params, [p.grad for p in self.params], alpha=-self.facts["lr"])
                else:
                    self.optimizer.step()

    @torch.no_grad()
    def descend_stacked(self, round_index: int, clients: Sequence[int], size: int) -> None:
        """`train` for clients of one size, whose parameters have the client as their first dimension."""
        images, labels = self.job.train
        seeds = [derive_seed(self.facts["seed"], "batches", round_index, client) for client in clients]
        generators, starts = [torch_generator(seed) for seed in seeds], [self.job.starts[client] for client in clients]
        layers = [tensor.expand(len(clients), *tensor.shape).clone() for tensor in self.start]
        weights, biases, lr = layers[::2], [bias.unsqueeze(1) for bias in layers[1::2]], self.facts["lr"]
        for _ in range(self.facts["epochs"]):
            orders = [
                torch.randperm(size, generator=each) + start for each, start in zip(generators, starts, strict=True)
            ]
            for index in torch.stack(orders).split(self.facts["batch_size"], dim=1):
                x, target = images[index].flatten(2), labels[index].unsqueeze(2)
                hidden = torch.baddbmm(biases[0], x, weights[0].mT).relu_()
                grad = torch.baddbmm(biases[1], hidden, weights[1].mT).softmax(2)
                grad.scatter_add_(2, target, grad.new_full((1, 1, 1), -1.0).expand_as(target)).div_(index.shape[1])
                below = torch.bmm(grad, weights[1]).mul_(hidden > 0)
                for weight, bias, g, inputs in zip(weights, biases, (below, grad), (x, hidden), strict=True):
                    weight.baddbmm_(g.mT, inputs, alpha=-lr)
                    bias.sub_(g.sum(1, keepdim=True), alpha=lr)
        for total, layer in zip(self.out, layers, strict=True):
            total.add_(layer.sum(0), alpha=size)
        self.totals.add_(size * len(clients))

    def inverse_norms(self) -> list[float]:
        """FedVG by layer block: 1 over the mean L1 norm of a block's validation gradients, for each tensor.

        For networks without BatchNorm: in train mode it would move its statistics here.
        """
        self.optimizer.zero_grad()
        images, labels = self.job.validation
        size = self.facts["batch_size"]
        for x, y in zip(images.split(size), labels.split(size), strict=True):
            (F.cross_entropy(self.model(x), y, reduction="sum") / len(labels)).backward()
        norms: dict[str, list[float]] = {}
        block_of = self.facts["block_of"]
        for name, parameter in self.model.named_parameters():
            norms.setdefault(block_of[name], []).append(float(parameter.grad.norm(1)))
        return [1 / (float(np.mean(norms[block_of[name]])) + EPS) for name in names_of(self.model)]

    @torch.no_grad()
    def evaluate(self, rows: slice) -> tuple[int, float]:
        """(hits, summed loss) on some rows of the test set."""
        self.load()
        self.model.eval()
        hits, loss = 0, 0.0
        images, labels = (part[rows] for part in self.job.test)
        for x, y in zip(images.split(256), labels.split(256), strict=True):
            logits = self.model(x)
            loss += float(F.cross_entropy(logits, y, reduction="sum"))
            hits += int((logits.argmax(1) == y).sum())
        return hits, loss


def names_of(model: torch.nn.Module) -> list[str]:
    """Parameters, then buffers that are floats."""
    buffers = [name for name, buffer in model.named_buffers() if buffer.is_floating_point()]
    return [*dict(model.named_parameters()), *buffers]


def tensors_of(model: torch.nn.Module) -> list[torch.Tensor]:
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return [state[name] for name in names_of(model)]


def average(start: list[torch.Tensor], outs: list[list[torch.Tensor]], totals: list[torch.Tensor]) -> None:
    """start = the workers' sums over the sums of their weights, tensor by tensor."""
    for tensor, total, *parts in zip(start, torch.stack(totals).sum(0).tolist(), *outs, strict=True):
        torch.sum(torch.stack(parts), 0, out=tensor).div_(total)


def serve(pipe, job: Job, threads: int, *shared) -> None:
    torch.set_num_threads(threads)
    if job.is_tuned:
        keep_freed_memory()
    worker = Worker(job, *shared)
    while (call := pipe.recv()) is not None:
        name, *values = call
        pipe.send(getattr(worker, name)(*values))


class Loop:
    """Worker processes with the model, fed by shared memory."""

    def __init__(self, job: Job, *, processes: int, threads: int):
        context = mp.get_context("fork")  # images and libraries are there once
        self.job = job
        self.start = [tensor.detach().clone().share_memory_() for tensor in tensors_of(job.model)]
        self.outs = [[torch.zeros_like(tensor).share_memory_() for tensor in self.start] for _ in range(processes)]
        self.totals = [torch.zeros(len(self.start), dtype=torch.float64).share_memory_() for _ in range(processes)]
        self.pipes, self.processes = [], []
        for out, totals in zip(self.outs, self.totals, strict=True):
            here, there = context.Pipe()
            arguments = (there, job, threads, self.start, out, totals)
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)

    def everywhere(self, calls: list[tuple]) -> list:
        for pipe, call in zip(self.pipes, calls, strict=True):
            pipe.send(call)
        return [pipe.recv() for pipe in self.pipes]

    def round(self, round_index: int) -> tuple[float, float, list[float]]:
        """Train a cohort, average, evaluate: (accuracy, loss) of the test set, and the seconds of these three parts."""
        times = [time.perf_counter()]
        shares: list[list[int]] = [[] for _ in self.pipes]
        loads = [0] * len(self.pipes)
        for client in sorted(self.job.cohorts[round_index].tolist(), key=lambda c: -self.job.size(c)):
            index = loads.index(min(loads))
            shares[index].append(client)
            loads[index] += self.job.size(client)
        self.everywhere([("train", round_index, share) for share in shares])
        times.append(time.perf_counter())
        average(self.start, self.outs, self.totals)
        times.append(time.perf_counter())
        count = len(self.job.test[1])
        bounds = [count * index // len(self.pipes) for index in range(len(self.pipes) + 1)]
        slices = [slice(a, b) for a, b in pairwise(bounds)]
        answers = self.everywhere([("evaluate", rows) for rows in slices])
        times.append(time.perf_counter())
        parts = [end - start for start, end in pairwise(times)]
        return sum(hits for hits, _ in answers) / count, sum(loss for _, loss in answers) / count, parts

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send(None)
            process.join(10)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("job", type=Path)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tuned", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)  # before anything computes: threads do not survive a fork
    torch.optim.SGD([torch.zeros(1)], lr=1.0)  # imports what optimisers need once, not in each process
    job = Job(given.job, is_tuned=given.tuned)
    loop = Loop(job, processes=given.processes, threads=given.threads)
    rounds = job.facts["rounds"]
    print(f"running {rounds} rounds", flush=True)
    for index in range(rounds):
        accuracy, loss, parts = loop.round(index)
        seconds = " ".join(f"{part:.6f}" for part in parts)
        print(f"round {index + 1}/{rounds}  accuracy {accuracy:.4f}  loss {loss:.6f}  seconds {seconds}", flush=True)
    loop.close()


if __name__ == "__main__":
    main()
