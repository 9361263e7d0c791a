"""A naive federation: plain modules, deepcopy, torch.optim, loops over tensors; nothing of the engine's numerics.

It shares with the engine only what defines a run: the partition, the seeds (cohort, batch order, initial parameters).
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import torch.nn.functional as F

from raysim.core.cohorts import choose_cohort
from raysim.core.seeding import derive_seed, torch_generator
from raysim.data.arrow import PreparedSet
from raysim.models import build_model
from raysim.plan.build import Plan, model_spec

#: How far an engine and its twin may part, as a share of how far the run moved the tensor (or the mean tensor, where that
#: is farther: a bias before BatchNorm moves by rounding alone). Both compute in float32, where noise of some units in the
#: last place in every product and sum of a smooth network came to 5e-6 of the movement at most (tests/support/rounding.py); a
#: wrong term, factor or weight changes it by 1e-2 and more.
SHARE = 1e-4


def assert_close(got, want, share=SHARE, name=""):
    """Largest difference as a share of the largest value: for movements, products, weights."""
    got, want = torch.as_tensor(got).detach().double(), torch.as_tensor(want).detach().double()
    apart, size = float((got - want).abs().max()), float(want.abs().max())
    assert apart <= share * size, (name, apart, size)


def assert_same_state(server, naive, share=SHARE):
    """The engine's global model is the twin's."""
    values = server.layout.views(server.state)
    wanted = {name: want for name, want in naive.model.state_dict().items() if want.is_floating_point()}
    moved = {name: float((want - naive.begun[name]).abs().max()) for name, want in wanted.items()}
    mean = sum(moved.values()) / len(moved)
    for name, want in wanted.items():
        if name in values:
            apart = float((values[name] - want).abs().max())
            assert apart <= share * max(moved[name], mean), (name, apart, moved[name], mean)


class Naive:
    """Rounds of FedAvg with optional prox, server momentum, and FedVG weights, tensor by tensor.

    tests/twins/baselines.py fills in `penalty`, `correct`, `finish`, `reweigh` and `server_step`.
    """

    base = "examples"

    def __init__(self, plan: Plan, *, mu=0.0, momentum=None, weights="examples", channels_last=True):
        self.plan, self.config = plan, plan.config
        self.inputs = images = PreparedSet(Path(plan.manifest.set_path))
        spec = model_spec(self.config, images.info)
        self.model = build_model(spec, seed=self.config.seed)
        if channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)
        self.begun = copy.deepcopy(self.model.state_dict())
        self.channels_last = channels_last
        self.mu, self.momentum, self.weights = mu, momentum, weights
        self.velocity = None
        self.seen_weights: list = []

    def penalty(self, client, model, anchor):
        """What is added to the loss of every step."""
        return sum(0.5 * self.mu * (p - a).pow(2).sum() for p, a in zip(model.parameters(), anchor, strict=True))

    def correct(self, client, model, anchor):
        """Changes the gradients of a step, before the optimiser."""

    def finish(self, client, round_index, model, anchor, steps, lr):
        """Runs when a client has taken its steps."""

    def reweigh(self, table, clients, steps, lr):
        """The parameters' weights, from those that everything else keeps."""
        return table

    def server_step(self, update, names, clients, table):
        """Changes the update (name -> float64 tensor) of the parameters in place."""
        if self.momentum is not None:
            self.apply_momentum(update, names)

    def lr(self, round_index):
        return self.config.local.lr * self.config.local.lr_decay**round_index

    def pass_rows(self, client):
        """The client's rows in the order of a pass that measures."""
        rows = self.plan.manifest.clients[client]
        generator = torch_generator(derive_seed(self.config.seed, "pass", client=client))
        return rows[torch.randperm(len(rows), generator=generator).numpy()]

    def batch(self, rows):
        images, labels = self.inputs.take(rows)
        x = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
        x = x.contiguous(memory_format=torch.channels_last if self.channels_last else torch.contiguous_format)
        return x, torch.from_numpy(labels)

    def local(self, client, round_index):
        local = self.config.local
        model = copy.deepcopy(self.model)
        model.train()
        rows = self.plan.manifest.clients[client]
        optimizer = torch.optim.SGD(
            model.parameters(), lr=self.lr(round_index), momentum=local.momentum, weight_decay=local.weight_decay
        )
        generator = torch_generator(derive_seed(self.config.seed, "batches", round_index, client))
        anchor = [p.detach().clone() for p in model.parameters()]
        has_norm = any(isinstance(m, torch.nn.BatchNorm2d) for m in model.modules())
        steps = 0
        for _ in range(int(local.epochs)):
            order = torch.randperm(len(rows), generator=generator).numpy()
            for start in range(0, len(rows), local.batch_size):
                chosen = rows[order[start : start + local.batch_size]]
                if has_norm and len(chosen) == 1:
                    continue
                x, y = self.batch(chosen)
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                (loss + self.penalty(client, model, anchor)).backward()
                self.correct(client, model, anchor)
                optimizer.step()
                steps += 1
        self.finish(client, round_index, model, anchor, steps, self.lr(round_index))
        return model, steps

    def round(self, round_index):
        clients = choose_cohort(
            self.config.partition.num_clients, self.config.cohort_size, seed=self.config.seed, round_index=round_index
        )
        trained = [self.local(int(c), round_index) for c in clients]
        models, steps = [m for m, _ in trained], [s for _, s in trained]
        sizes = [len(self.plan.manifest.clients[c]) if s else 0 for c, s in zip(clients, steps, strict=True)]
        if self.base == "uniform":
            sizes = [float(s > 0) for s in steps]
        shares = [n / sum(sizes) for n in sizes]
        names = [name for name, _ in self.model.named_parameters()]
        if self.weights == "examples":
            table = {name: shares for name in names}
        elif self.weights == "uniform":
            table = {name: [1 / sum(s > 0 for s in steps)] * len(steps) for name in names}
        else:
            table = self.weights(self, models, shares)
        self.seen_weights.append(table)
        reweighed = self.reweigh(table, clients, steps, self.lr(round_index))
        update = {}
        for name, value in self.model.state_dict().items():
            if not value.is_floating_point():
                continue
            owner = name.replace("running_mean", "weight").replace("running_var", "weight")
            weights = reweighed[name] if name in reweighed else table[owner]
            total = torch.zeros_like(value, dtype=torch.float64)
            for weight, model in zip(weights, models, strict=True):
                total += weight * (model.state_dict()[name].double() - value.double())
            update[name] = total
        self.server_step(update, names, [int(c) for c in clients], reweighed)
        state = self.model.state_dict()
        for name, step in update.items():
            state[name].copy_((state[name].double() + step).float())

    def apply_momentum(self, update, names):
        beta, form = self.momentum
        self.velocity = self.velocity or {name: torch.zeros_like(update[name]) for name in names}
        for name in names:
            if form == "damped":
                self.velocity[name] = beta * self.velocity[name] + (1 - beta) * update[name]
                update[name] = self.velocity[name]
            else:
                self.velocity[name] = beta * self.velocity[name] + update[name]
                update[name] = update[name] + beta * self.velocity[name] if form == "nesterov" else self.velocity[name]


def fedvg_weights(granularity, norm, mode, mix="replace", eps=1e-8):
    """FedVG's equations 4 and 5 with plain loops; blocks as the small models here define them (a layer each)."""

    def weights(naive: Naive, models, shares):
        rows = naive.plan.manifest.validation
        batch = naive.config.local.batch_size
        starts = list(range(0, len(rows), batch))
        if len(rows) - starts[-1] == 1:
            starts.pop()
        ends = [*starts[1:], len(rows)]
        sizes = []
        for model in models:
            if norm == "update":
                old = dict(naive.model.named_parameters())
                sizes.append(
                    {
                        n: float((p.detach().double() - old[n].detach().double()).norm())
                        for n, p in model.named_parameters()
                    }
                )
                continue
            scratch = copy.deepcopy(model)
            scratch.train(mode == "train")
            loss = 0.0
            for start, end in zip(starts, ends, strict=True):
                x, y = naive.batch(rows[start:end])
                loss = loss + F.cross_entropy(scratch(x), y, reduction="sum") / len(rows)
            names = [name for name, _ in scratch.named_parameters()]
            grads = torch.autograd.grad(loss, list(scratch.parameters()))
            sizes.append({n: size_of(g.double(), norm) for n, g in zip(names, grads, strict=True)})
        names = list(sizes[0])
        group_of = {"model": lambda n: "all", "layer": lambda n: n, "block": lambda n: n.rpartition(".")[0]}[
            granularity
        ]
        table = {}
        for name in names:
            members = [n for n in names if group_of(n) == group_of(name) and sizes[0][n] is not None]
            if not members:  # a bias by itself has no spectral norm: its block's weight
                members = [
                    n for n in names if n.rpartition(".")[0] == name.rpartition(".")[0] and sizes[0][n] is not None
                ]
            means = [sum(s[n] for n in members) / len(members) for s in sizes] if members else [1.0] * len(sizes)
            inverse = [1 / (mean + eps) for mean in means]
            table[name] = [value / sum(inverse) for value in inverse]
        if mix == "average":
            table = {n: [(w + s) / 2 for w, s in zip(shares, table[n], strict=True)] for n in names}
        return table

    return weights


def size_of(grad, norm):
    if norm == "l1":
        return float(grad.abs().sum())
    if norm == "l2":
        return float(grad.pow(2).sum().sqrt())
    return float(torch.linalg.svdvals(grad.reshape(grad.shape[0], -1))[0]) if grad.dim() >= 2 else None
