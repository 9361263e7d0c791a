"""The bare loop: what a careful person writes in one file. Plain modules, torch.optim, float images in memory.

`Bare(..., processes=1, threads=2)` trains in one process, `processes=2, threads=1` in two, with parameters and partial sums
in shared memory. Same clients, same batch orders, same number of steps as raysim.
"""

from __future__ import annotations

import time

import numpy as np
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F

from raysim.core.seeding import derive_seed, torch_generator
from raysim.models import ModelSpec, build_model


def images_of(num_examples: int, num_classes: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """Random 32 x 32 x 3 images with labels: speed does not depend on what they show."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (num_examples, 32, 32, 3), dtype=np.uint8)
    return images, np.arange(num_examples, dtype=np.int64) % num_classes


def train_share(model, images, labels, clients, rows, start, out, lr, batch_size, seed, round_index):
    """Train some clients one after the other from `start`; out = their weighted sum (float32)."""
    params = list(model.parameters())
    total = sum(len(rows[c]) for c in clients[1])
    sums = [torch.zeros_like(p) for p in params]
    for client in clients[0]:
        offset = 0
        with torch.no_grad():
            for p in params:
                p.copy_(start[offset : offset + p.numel()].view_as(p))
                offset += p.numel()
        optimizer = torch.optim.SGD(params, lr=lr)
        mine = torch.from_numpy(rows[client])
        x, y = images[mine], labels[mine]
        order = torch.randperm(len(mine), generator=torch_generator(derive_seed(seed, "batches", round_index, client)))
        for begin in range(0, len(mine), batch_size):
            index = order[begin : begin + batch_size]
            optimizer.zero_grad()
            F.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
        with torch.no_grad():
            for total_, p in zip(sums, params, strict=True):
                total_.add_(p, alpha=len(mine) / total)
    out.copy_(torch.cat([s.reshape(-1) for s in sums]))


def worker(pipe, spec, num_examples, rows, start, out, settings, threads):
    torch.set_num_threads(threads)
    images, labels = images_of(num_examples)
    images = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous().float().div_(255)
    labels = torch.from_numpy(labels)
    model = build_model(spec, seed=settings["seed"])
    pipe.send("ready")
    while (work := pipe.recv()) is not None:
        mine, everybody, round_index = work
        train_share(
            model,
            images,
            labels,
            (mine, everybody),
            rows,
            start,
            out,
            settings["lr"],
            settings["batch_size"],
            settings["seed"],
            round_index,
        )
        pipe.send("done")


class Bare:
    """Worker processes with the model, fed by shared memory."""

    def __init__(self, spec: ModelSpec, num_examples: int, rows, settings, *, processes: int, threads: int):
        context = mp.get_context("spawn")
        model = build_model(spec, seed=settings["seed"])
        self.state = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).share_memory_()
        self.rows = rows
        self.outs = [torch.zeros_like(self.state).share_memory_() for _ in range(processes)]
        self.pipes, self.processes = [], []
        for out in self.outs:
            here, there = context.Pipe()
            arguments = (there, spec, num_examples, rows, self.state, out, settings, threads)
            process = context.Process(target=worker, args=arguments, daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)
        for pipe in self.pipes:
            pipe.recv()

    def round(self, round_index: int, clients: list[int]) -> float:
        """Seconds of one round."""
        began = time.perf_counter()
        shares = [[] for _ in self.pipes]
        loads = [0] * len(self.pipes)
        for client in sorted(clients, key=lambda c: -len(self.rows[c])):
            index = loads.index(min(loads))
            shares[index].append(client)
            loads[index] += len(self.rows[client])
        for pipe, share in zip(self.pipes, shares, strict=True):
            pipe.send((share, clients, round_index))
        for pipe in self.pipes:
            pipe.recv()
        torch.sum(torch.stack(self.outs), 0, out=self.state)
        return time.perf_counter() - began

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send(None)
            process.join(10)
