"""Naive twins of the baselines, tensor by tensor, from the equations of their papers (or of FL-bench's code)."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F

from raysim.core.seeding import derive_seed, torch_generator
from tests.twins.federation import Naive


def zeros(model):
    return {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}


def chunks(rows, size):
    """Lists of rows; a last one of a single row joins the one before it."""
    starts = list(range(0, len(rows), size))
    if len(starts) > 1 and len(rows) - starts[-1] == 1:
        starts.pop()
    return [rows[start:end] for start, end in zip(starts, [*starts[1:], len(rows)], strict=True)]


class NaiveScaffold(Naive):
    """y <- y - lr (g - c_i + c); c_i+ by option i or ii; w + server_lr mean; c + sum(c_i+ - c_i) / N."""

    base = "uniform"

    def __init__(self, plan, *, server_lr=1.0, option="ii", persists=True, **others):
        super().__init__(plan, **others)
        self.server_lr, self.option, self.persists = server_lr, option, persists
        self.control, self.controls, self.changes = zeros(self.model), {}, {}

    def correct(self, client, model, anchor):
        own = self.controls.get(client) or zeros(model)
        for name, p in model.named_parameters():
            p.grad += (self.control[name] - own[name]).float()

    def finish(self, client, round_index, model, anchor, steps, lr):
        if steps == 0:
            return
        old, new = self.controls.get(client) or zeros(model), {}
        if self.option == "i":
            at_start = copy.deepcopy(self.model).train()
            rows = self.plan.manifest.clients[client]
            for part in chunks(rows, self.config.evaluation.batch_size):
                x, y = self.batch(part)
                (F.cross_entropy(at_start(x), y, reduction="sum") / len(rows)).backward()
            new = {name: p.grad.double() for name, p in at_start.named_parameters()}
        else:
            for (name, p), a in zip(model.named_parameters(), anchor, strict=True):
                new[name] = old[name] - self.control[name] + (a.double() - p.detach().double()) / (steps * lr)
        self.changes[client] = {name: new[name] - old[name] for name in new}
        if self.persists:
            self.controls[client] = new

    def server_step(self, update, names, clients, table):
        for name in names:
            update[name] = self.server_lr * update[name]
            for change in self.changes.values():
                self.control[name] = self.control[name] + change[name] / self.config.partition.num_clients
        self.changes = {}


class NaiveFedDyn(Naive):
    """min f_k(y) + alpha <h_k, y> + (alpha/2) ||y - s||^2;  h_k += y_k - s;  w+ = mean_S y_k + mean_N h_k."""

    base = "uniform"

    def __init__(self, plan, *, alpha, max_grad_norm=None, quadratic=True, base="uniform", **others):
        super().__init__(plan, **others)
        self.alpha, self.max_grad_norm, self.quadratic, self.base = alpha, max_grad_norm, quadratic, base
        self.h = {}

    def penalty(self, client, model, anchor):
        value, h = 0.0, self.h.get(client) or zeros(model)
        for (name, p), a in zip(model.named_parameters(), anchor, strict=True):
            if self.max_grad_norm is None and self.quadratic:
                value = value + self.alpha * (h[name].float() * p).sum() + self.alpha / 2 * (p - a).pow(2).sum()
            else:  # the authors' split: <h_k - s, y> is part of the loss, ||y||^2 is weight decay
                value = value + self.alpha * ((h[name].float() - a) * p).sum()
        return value

    def correct(self, client, model, anchor):
        if self.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), self.max_grad_norm)
            if self.quadratic:
                for p in model.parameters():
                    p.grad += self.alpha * p.detach()

    def finish(self, client, round_index, model, anchor, steps, lr):
        h = self.h.setdefault(client, zeros(model))
        for (name, p), a in zip(model.named_parameters(), anchor, strict=True):
            h[name] = h[name] + (p.detach().double() - a.double())

    def server_step(self, update, names, clients, table):
        for name in names:
            update[name] = update[name] + sum(h[name] for h in self.h.values()) / self.config.partition.num_clients


class NaiveElastic(Naive):
    """Omega_k: moving average of |gradient of the output norm| at s; zeta = 1 + tau - Omega / max Omega."""

    def __init__(self, plan, *, tau=0.5, mu=0.95, ratio=0.3, form="element", **others):
        super().__init__(plan, **others)
        self.tau, self.mu_ema, self.ratio, self.form = tau, mu, ratio, form
        self.omegas = {}

    def sensitivity(self, grad):
        if self.form == "element":
            return grad.abs()
        return grad.norm() ** 2

    def finish(self, client, round_index, model, anchor, steps, lr):
        at_start = copy.deepcopy(self.model).train()
        rows = self.pass_rows(client)
        generator = torch_generator(derive_seed(self.config.seed, "method/elastic", round_index, client))
        count = max(min(2, len(rows)), int(self.ratio * len(rows)))
        chosen = sorted(torch.randperm(len(rows), generator=generator)[:count].tolist())
        omega = {name: 0.0 * self.sensitivity(p.detach().double()) for name, p in at_start.named_parameters()}
        for part in chunks(rows[chosen], self.config.local.batch_size) if steps else []:
            x, y = self.batch(part)
            out = at_start(x)
            signal = F.cross_entropy(out, y) if self.form == "fl-bench" else out.pow(2).sum(1).sqrt().mean()
            at_start.zero_grad()
            signal.backward()
            for name, p in at_start.named_parameters():
                omega[name] = self.mu_ema * omega[name] + (1 - self.mu_ema) * self.sensitivity(p.grad.double())
        self.omegas[client] = omega

    def server_step(self, update, names, clients, table):
        mean = {n: sum(w * self.omegas[c][n] for w, c in zip(table[n], clients, strict=True)) for n in names}
        highest = max(float(value.max()) for value in mean.values())
        for name in names:
            if self.form == "fl-bench":
                highest = max(float(self.omegas[c][name]) for c in clients)
            update[name] = (1 + self.tau - mean[name] / highest) * update[name]


class NaiveFedOpt(Naive):
    """Reddi et al., Algorithm 2, one tensor at a time."""

    def __init__(self, plan, *, kind, server_lr, beta1, beta2=0.99, tau=1e-3, init_v=0.0, **others):
        super().__init__(plan, **others)
        self.kind, self.server_lr, self.beta1, self.beta2, self.tau = kind, server_lr, beta1, beta2, tau
        self.m, self.v = zeros(self.model), {n: z + init_v for n, z in zeros(self.model).items()}

    def server_step(self, update, names, clients, table):
        for name in names:
            delta, v = update[name], self.v[name]
            self.m[name] = self.beta1 * self.m[name] + (1 - self.beta1) * delta
            if self.kind == "adagrad":
                v = v + delta**2
            elif self.kind == "adam":
                v = self.beta2 * v + (1 - self.beta2) * delta**2
            else:
                v = v - (1 - self.beta2) * delta**2 * torch.sign(v - delta**2)
            self.v[name] = v
            update[name] = self.server_lr * self.m[name] / (v.sqrt() + self.tau)


class NaiveFedNova(Naive):
    """w + tau_eff sum_k p_k Delta_k / ||a_k||_1, on parameters; other tensors keep p_k. `prox` is FedProx's mu."""

    def __init__(self, plan, *, prox=0.0, **others):
        super().__init__(plan, mu=prox, **others)

    def normaliser(self, steps, lr):
        rho = self.config.local.momentum
        if self.mu:
            assert rho == 0
            return sum((1 - lr * self.mu) ** j for j in range(steps))
        return sum((1 - rho**j) / (1 - rho) for j in range(1, steps + 1))

    def reweigh(self, table, clients, steps, lr):
        a = [self.normaliser(s, lr) for s in steps]
        counted = steps if self.mu else a
        new = {}
        for name, p in table.items():
            tau_eff = sum(pk * ck for pk, ck in zip(p, counted, strict=True))
            new[name] = [tau_eff * pk / ak if ak else 0.0 for pk, ak in zip(p, a, strict=True)]
        return new
