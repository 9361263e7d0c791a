"""Naive twins of the methods that change local training: plain modules, deepcopy, autograd, loops."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F

from raysim.core.seeding import derive_seed, torch_generator
from raysim.engine.schedule import choose_cohort
from tests.twins.federation import Naive

LAYERS = ("conv1", "conv2", "fc1", "fc2")


def features_and_logits(model, x):
    """The classifier's input and output."""
    kept = []
    handle = model.fc2.register_forward_pre_hook(lambda module, inputs: kept.append(inputs[0]))
    logits = model(x)
    handle.remove()
    return kept[0], logits


class NaiveLocal(Naive):
    """Rounds of FedAvg whose local training subclasses change."""

    def local(self, client, round_index):
        local = self.config.local
        model = copy.deepcopy(self.model)
        model.train()
        self.start, self.client, self.round_index = copy.deepcopy(self.model), client, round_index
        rows = self.plan.manifest.clients[client]
        labels = self.batch(rows)[1]
        self.counts = [int((labels == c).sum()) for c in range(len(self.plan.info.classes))]
        self.begin(model)
        optimizer = torch.optim.SGD(
            [p for p in model.parameters() if p.requires_grad],
            lr=local.lr * local.lr_decay**round_index,
            momentum=local.momentum,
            weight_decay=local.weight_decay,
        )
        generator = torch_generator(derive_seed(self.config.seed, "batches", round_index, client))
        has_norm = any(isinstance(m, torch.nn.BatchNorm2d) for m in model.modules())
        steps = 0
        for _ in range(int(local.epochs)):
            order = torch.randperm(len(rows), generator=generator).numpy()
            for begin in range(0, len(rows), local.batch_size):
                chosen = rows[order[begin : begin + local.batch_size]]
                if has_norm and len(chosen) == 1:
                    continue
                x, y = self.batch(chosen)
                optimizer.zero_grad()
                self.differentiate(model, x, y)
                optimizer.step()
                steps += 1
        self.end(model, steps)
        return model, steps

    def begin(self, model):
        """Before the first step."""

    def end(self, model, steps):
        """After the last step."""

    def loss(self, model, x, y):
        return F.cross_entropy(model(x), y)

    def differentiate(self, model, x, y):
        self.loss(model, x, y).backward()


class UniVarFL(NaiveLocal):
    def __init__(self, plan, *, mu, lam, eps):
        super().__init__(plan)
        self.strengths = mu, lam, eps

    def loss(self, model, x, y):
        mu, lam, eps = self.strengths
        z, logits = features_and_logits(model, x)
        shares = logits.softmax(1)
        n, classes = shares.shape
        target = (classes - 1) / classes**2
        variance = ((shares - shares.mean(0)) ** 2).sum(0) / n
        energy = 0.0
        for i in range(n - 1):
            energy = energy + (2 / (1 - F.cosine_similarity(z[i][None], z[i + 1 :]) + eps)).sum()
        lack = torch.relu(target - variance).sum() / classes
        return F.cross_entropy(logits, y) + mu * energy / n**2 + lam * lack


class Moon(NaiveLocal):
    def __init__(self, plan, *, mu, temperature):
        super().__init__(plan)
        self.mu, self.temperature, self.previous = mu, temperature, {}

    def begin(self, model):
        self.start.eval()

    def end(self, model, steps):
        if steps:
            self.previous[self.client] = copy.deepcopy(model).eval()

    def loss(self, model, x, y):
        z, logits = features_and_logits(model, x)
        total = F.cross_entropy(logits, y)
        if self.client in self.previous:
            with torch.no_grad():
                near = features_and_logits(self.start, x)[0]
                far = features_and_logits(self.previous[self.client], x)[0]
            a = torch.exp(F.cosine_similarity(z, near) / self.temperature)
            b = torch.exp(F.cosine_similarity(z, far) / self.temperature)
            total = total + self.mu * (-torch.log(a / (a + b))).mean()
        return total


class FedAlign(NaiveLocal):
    """The block is conv2 or fc1; slim channels, matrices and power iterations image by image."""

    def __init__(self, plan, *, mu, width, block):
        super().__init__(plan)
        self.mu, self.width, self.block = mu, width, block

    def first(self, count):
        return max(1, round(count * self.width))

    def loss(self, model, x, y):
        layer, kept = model.get_submodule(self.block), {}
        handle = layer.register_forward_hook(lambda module, i, o: kept.update(x=i[0].detach(), y=o.detach().clone()))
        loss = F.cross_entropy(model(x), y)
        handle.remove()
        outs, ins = (self.first(n) for n in layer.weight.shape[:2])
        thin = kept["x"][:, :ins]
        if self.block == "fc1":
            small = thin @ layer.weight[:outs, :ins].T + layer.bias[:outs]
        else:
            small = F.conv2d(thin, layer.weight[:outs, :ins], layer.bias[:outs], layer.stride, layer.padding)
        gap = 0.0
        for i in range(len(x)):
            theirs = self.size(kept["x"][i], kept["y"][i])
            gap = gap + (self.size(thin[i], small[i]) - theirs) ** 2 / len(x)
        return loss + self.mu * (loss.item() / gap.item()) * gap

    def size(self, x, y):
        if x.dim() == 1:
            return x.norm() * y.norm()  # of an outer product
        matrix = torch.einsum("chw,dhw->cd", x, y) / (x.shape[1] * x.shape[2])
        gram = matrix @ matrix.T
        v = torch.ones(len(gram))
        for _ in range(10):
            v = gram @ v
            size = v.norm()
            v = v / size
        return size.sqrt()


class FedSol(NaiveLocal):
    def __init__(self, plan, *, rho, form="fixed", floor=1e-6):
        super().__init__(plan)
        self.rho, self.form, self.floor = rho, form, floor

    def begin(self, model):
        self.start.eval()

    def differentiate(self, model, x, y):
        with torch.no_grad():
            target = (self.start(x) / 3).softmax(1)
        found = (model(x) / 3).log_softmax(1)
        kl = (target * (target.log() - found)).sum() / len(x)
        uphill = torch.autograd.grad(kl, list(model.parameters()))
        size = math.sqrt(sum(float(u.pow(2).sum()) for u in uphill))
        other = copy.deepcopy(model)
        with torch.no_grad():
            for p, s, u in zip(other.parameters(), self.start.parameters(), uphill, strict=True):
                if size >= self.floor:
                    step = self.rho / size * u
                    if self.form == "adaptive":
                        far = (p - s).abs()
                        step = step * far / far.pow(2).sum(0, keepdim=True).sqrt().clamp_min(1e-12)
                    p.add_(step)
        for p, g in zip(
            model.parameters(), torch.autograd.grad(F.cross_entropy(other(x), y), list(other.parameters())), strict=True
        ):
            p.grad = g


class FedRs(NaiveLocal):
    def __init__(self, plan, *, alpha):
        super().__init__(plan)
        self.alpha = alpha

    def loss(self, model, x, y):
        z, _ = features_and_logits(model, x)
        columns = []
        for c, count in enumerate(self.counts):
            scale = 1.0 if count else self.alpha
            columns.append(scale * (z @ model.fc2.weight[c]) + model.fc2.bias[c])
        return F.cross_entropy(torch.stack(columns, 1), y)


class FedLc(NaiveLocal):
    def __init__(self, plan, *, tau):
        super().__init__(plan)
        self.tau = tau

    def loss(self, model, x, y):
        logits = model(x) - torch.tensor([self.tau * max(count, 1e-8) ** -0.25 for count in self.counts])
        total = 0.0
        for row, label in zip(logits, y.tolist(), strict=True):
            total = total - row[label] + torch.logsumexp(row, 0)
        return total / len(y)


class Freeze(NaiveLocal):
    def __init__(self, plan):
        super().__init__(plan)
        self.model.fc2.requires_grad_(False)


class FedAcg(NaiveLocal):
    """The mean of the clients' models; momentum moves where the next round starts."""

    def __init__(self, plan, *, lam, beta):
        super().__init__(plan)
        self.lam, self.beta = lam, beta
        self.momentum = {n: torch.zeros_like(p) for n, p in self.model.named_parameters()}

    def loss(self, model, x, y):
        pull = sum(
            (p - s.detach()).pow(2).sum() for p, s in zip(model.parameters(), self.start.parameters(), strict=True)
        )
        return F.cross_entropy(model(x), y) + self.beta / 2 * pull

    @torch.no_grad()
    def round(self, round_index):
        size = self.config.cohort_size
        count = self.config.partition.num_clients
        clients = choose_cohort(count, size, seed=self.config.seed, round_index=round_index)
        for name, p in self.model.named_parameters():
            p.add_(self.lam * self.momentum[name])
        with torch.enable_grad():
            models = [self.local(int(c), round_index)[0] for c in clients]
        for name, value in self.model.state_dict().items():
            if value.is_floating_point():
                mean = sum(m.state_dict()[name] for m in models) / len(models)
                if name in self.momentum:
                    self.momentum[name] = self.lam * self.momentum[name] + (mean - value)
                value.copy_(mean)


class Feedback(NaiveLocal):
    """Layers whose backward pass goes through another tensor, by the stop-gradient trick."""

    def __init__(self, plan, *, layers=(), scale="none", back=None):
        super().__init__(plan)
        self.layers, self.scale, self.back = layers, scale, back

    def back_of(self, name, weight):
        return self.back[name] if self.back else dict(self.start.named_parameters())[f"{name}.weight"].detach()

    def begin(self, model):
        for name in self.layers:
            self.override(model.get_submodule(name), name)

    def end(self, model, steps):
        for name in self.layers:
            del model.get_submodule(name).forward

    def override(self, layer, name):
        base = self.back_of(name, layer.weight)

        def forward(x):
            own = layer.weight.detach()
            factor = {"none": lambda: 1.0, "layer": lambda: own.pow(2).sum().sqrt() / base.pow(2).sum().sqrt()}[
                self.scale
            ]()
            return stop_gradient_feedback(layer, x, base * factor)

        layer.forward = forward


def stop_gradient_feedback(layer, x, back):
    """y = layer(stop(x)) + [layer_B(x) - stop(layer_B(x))]: forward through the weight, backward through `back`."""
    if isinstance(layer, torch.nn.Conv2d):
        geometry = (layer.stride, layer.padding, layer.dilation, layer.groups)
        probe = F.conv2d(x, back, None, *geometry)
        return F.conv2d(x.detach(), layer.weight, layer.bias, *geometry) + (probe - probe.detach())
    probe = F.linear(x, back)
    return F.linear(x.detach(), layer.weight, layer.bias) + (probe - probe.detach())


class Flfa(Feedback):
    """FLFA: the next round's layers from the mean cosine of the clients' updates to their mean."""

    def __init__(self, plan, *, candidates=LAYERS, num_layers=1, strategy="auto", scale="layer"):
        super().__init__(plan, scale=scale)
        self.candidates, self.num_layers, self.strategy = candidates, num_layers, strategy
        self.agreements, self.chosen = [], []

    def round(self, round_index):
        before = copy.deepcopy(self.model)
        self.trained = []
        self.chosen.append(self.layers)
        super().round(round_index)
        old = dict(before.named_parameters())
        scores = []
        for name in self.candidates:
            key = f"{name}.weight"
            moves = [(dict(m.named_parameters())[key] - old[key]).detach().double().flatten() for m in self.trained]
            mean = sum(moves) / len(moves)
            scores.append(sum(float(u @ mean / (u.norm() * mean.norm())) for u in moves) / len(moves))
        if self.strategy == "auto":
            mean = sum(scores) / len(scores)
            m2, m3 = (sum((s - mean) ** k for s in scores) / len(scores) for k in (2, 3))
            self.strategy = "lowest" if m3 / m2**1.5 > 0 else "highest"
        order = sorted(range(len(scores)), key=lambda i: scores[i] if self.strategy == "lowest" else -scores[i])
        self.layers = [self.candidates[i] for i in order[: self.num_layers]]
        self.agreements.append(scores)

    def end(self, model, steps):
        super().end(model, steps)
        if steps:
            self.trained.append(model)


class Dfa(NaiveLocal):
    """Every layer's input gets the output error through its own matrix; the graph is cut between layers."""

    def differentiate(self, model, x, y):
        first = F.avg_pool2d(torch.tanh(model.norm1(model.conv1(x))), 2)
        inputs, outputs = [], [first]
        for layer in (
            lambda h: F.avg_pool2d(torch.tanh(model.norm2(model.conv2(h))), 2).flatten(1),
            lambda h: torch.tanh(model.fc1(h)),
            model.fc2,
        ):
            inputs.append(outputs[-1].detach())
            outputs.append(layer(inputs[-1]))
        logits = outputs.pop()
        n, classes = logits.shape
        error = ((logits.softmax(1) - F.one_hot(y, classes)) / n).detach()
        logits.backward(error)
        for name, h, output in zip(("conv2", "fc1", "fc2"), inputs, outputs, strict=True):
            size = h[0].numel()
            generator = torch_generator(derive_seed(0, f"direct/{name}"))
            matrix = (2 * torch.rand(classes, size, generator=generator) - 1) / math.sqrt(size)
            output.backward((error @ matrix).view(h.shape))
