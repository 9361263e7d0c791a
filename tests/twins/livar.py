"""LIVAR, naive: plain modules, dense products, loops over clients, layers and classes."""

from __future__ import annotations

import copy

import numpy as np
import torch
import torch.nn.functional as F

from raysim.core.cohorts import choose_cohort
from raysim.core.seeding import derive_seed, torch_generator
from raysim.models import build_model
from raysim.plan.build import model_spec
from tests.twins.federation import Naive

LAYERS = [f"blocks.{i}.{name}" for i in (0, 1) for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]


FEW = {"test": 0.7}


COLUMNS = {"released": [0.03813978, 0.09813978, 0.19313978], "paper": [0.038, 0.100, 0.193]}


ROWS = {
    "released": [COLUMNS["released"], [0.03813978, 0.08813978, 0.11813978], [0.03813978, 0.07813978, 0.09313978]],
    "paper": [COLUMNS["paper"], [0.038, 0.089, 0.118], [0.038, 0.078, 0.093]],
}


class NaiveLivar(Naive):
    """LIVAR with plain modules, dense products and loops over clients, layers and classes."""

    def __init__(self, plan, **options):
        super().__init__(plan, channels_last=False)
        self.options = {
            "components": "both", "table": "released", "variance": "correct", "evaluate": "merged",
            "layers": "importance", **options,
        }  # fmt: skip
        self.kept = {}
        self.layers = [
            name[: -len(".base_layer.weight")] for name in self.values() if name.endswith("base_layer.weight")
        ]

    def values(self):
        return {name: value.detach() for name, value in self.model.named_parameters()}

    def follow(self, server):
        """Go on from exactly where the server is: what rounding did in one round does not grow in the next."""
        for name, value in server.layout.views(server.state).items():
            self.model.get_parameter(name).data.copy_(value)

    @staticmethod
    def factor(model, layer, which):
        return model.get_parameter(f"{layer}.lora_{which}.default.weight").detach()

    def train(self, client, round_index):
        local = self.config.local
        model = copy.deepcopy(self.model).train()
        rows = self.plan.manifest.clients[client]
        values = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(values, lr=local.lr, weight_decay=local.weight_decay)
        generator = torch_generator(derive_seed(self.config.seed, "batches", round_index, client))
        sums = {layer: [0.0, 0.0] for layer in self.layers}
        order = torch.randperm(len(rows), generator=generator).numpy()
        for start in range(0, len(rows), local.batch_size):
            x, y = self.batch(rows[order[start : start + local.batch_size]])
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            keys = [(layer, which) for layer in self.layers for which in "AB"]
            factors = {(k, w): model.get_parameter(f"{k}.lora_{w}.default.weight") for k, w in keys}
            grads = {key: p.grad.double().clone() for key, p in factors.items()}
            before = {key: p.detach().double().clone() for key, p in factors.items()}
            torch.nn.utils.clip_grad_norm_(values, local.max_grad_norm)
            optimizer.step()
            for layer in self.layers:
                for index, which in enumerate("AB"):
                    g, d = grads[layer, which], before[layer, which] - factors[layer, which].detach().double()
                    sums[layer][index] += abs(float((g * d).sum()))
        return model, sums

    @torch.no_grad()
    def features(self, model, rows):
        x, y = self.batch(rows)
        model.eval()
        z = model.forward_head(model.forward_features(x), pre_logits=True)
        return z, y, model(x).argmax(1)

    @torch.no_grad()
    def released_features(self, model, rows):
        """Of the pre-trained model: what is not an adapter never moves. Pixels as they are, 0 to 1."""
        bare = build_model(model_spec(self.config, self.inputs.info), seed=self.config.seed).eval()
        for layer in self.layers:
            assert not self.factor(bare, layer, "B").any()
        pixels, y = self.inputs.take(rows)
        x = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
        return bare.forward_head(bare.forward_features(x), pre_logits=True), torch.from_numpy(y), None

    def batch(self, rows):
        x, y = super().batch(rows)
        return ((x - 0.5) / 0.5 if self.config.data.normalise == "half" else x), y

    def variances(self, model, client, is_all):
        take = self.released_features if self.options["variance"] == "released" else self.features
        z, y, guess = take(model, self.plan.manifest.clients[client])
        found = []
        for label in range(10):
            use = (y == label) if is_all else (y == label) & (guess == label)
            found.append(float(z[use].double().var(0, unbiased=True).mean()) if int(use.sum()) >= 2 else None)
        return found

    def round(self, round_index):
        opt = self.options
        clients = [
            int(c)
            for c in choose_cohort(
                self.config.partition.num_clients, self.config.cohort_size, seed=self.config.seed,
                round_index=round_index,
            )
        ]  # fmt: skip
        sizes = [len(self.plan.manifest.clients[c]) for c in clients]
        shares = [n / sum(sizes) for n in sizes]
        trained = [self.train(c, round_index) for c in clients]
        models = [model for model, _ in trained]
        for client, (_, sums) in zip(clients, trained, strict=True):
            old = self.kept.get(client) or {layer: [0.0, 0.0] for layer in self.layers}
            self.kept[client] = {k: [old[k][0] + sums[k][0], old[k][1] + sums[k][1]] for k in self.layers}
        self.importance = np.array([[self.kept[c][layer] for layer in self.layers] for c in clients])
        self.coefficients = self.table(self.importance, opt["table"])
        if opt["components"] == "head" or opt["layers"] == "examples":
            self.coefficients = {layer: shares for layer in self.layers}
        self.heads = self.head_weights(models, clients, shares)
        self.merge(models, shares)

    def table(self, importance, name):
        a1, a2 = np.quantile(importance[:, :, 0], [0.25, 0.50])
        b1, b2 = np.quantile(importance[:, :, 1], [0.60, 0.80])
        coefficients = {}
        for index, layer in enumerate(self.layers):
            raw = []
            for ia, ib in importance[:, index]:
                row = "low" if ia < a1 else "high" if ia > a2 else "mid"
                column = "low" if ib < b1 else "high" if ib > b2 else "mid"
                raw.append(ROWS[name][["low", "mid", "high"].index(row)][["low", "mid", "high"].index(column)])
            coefficients[layer] = [value / sum(raw) for value in raw]
        return coefficients

    def head_weights(self, models, clients, shares):
        if self.options["components"] == "lora":
            return [shares] * 10
        is_all = self.options["variance"] != "correct"
        own = [self.variances(m, c, is_all) for m, c in zip(models, clients, strict=True)]
        every = [self.variances(m, c, True) for m, c in zip(models, clients, strict=True)]
        counts = [np.bincount(self.batch(self.plan.manifest.clients[c])[1], minlength=10) for c in clients]
        weights = []
        for label in range(10):
            found = [v[label] for v in own], [v[label] for v in every], [int(n[label]) for n in counts]
            for scores in {"released": found[:2], "counts": found[2:]}.get(self.options["variance"], found):
                total = sum(s or 0.0 for s in scores)
                if total > 0:
                    weights.append([(s or 0.0) / total for s in scores])
                    break
            else:
                weights.append(None)
        return weights

    def merge(self, models, shares):
        opt, old = self.options, copy.deepcopy(self.model)
        for label, weights in enumerate(self.heads):
            if weights is not None:
                for part in ("weight", "bias"):
                    rows = [
                        w * m.head.get_parameter(part).detach()[label] for w, m in zip(weights, models, strict=True)
                    ]
                    self.model.head.get_parameter(part).data[label] = sum(rows)
        self.scored = copy.deepcopy(self.model)
        self.updates = {}
        for layer in self.layers:
            c = self.coefficients[layer]
            a, b = ([self.factor(m, layer, w) for m in models] for w in "AB")
            dense = sum(w * bk.double() @ ak.double() for w, ak, bk in zip(c, a, b, strict=True))
            self.updates[layer] = dense
            new_a, new_b = (sum(w * f for w, f in zip(c, part, strict=True)) for part in (a, b))
            for which, value in (("A", new_a), ("B", new_b)):
                self.model.get_parameter(f"{layer}.lora_{which}.default.weight").data = value.float().contiguous()
            if opt["evaluate"] == "code":
                dense = sum(w * bk.double() @ ak.double() for w, ak, bk in zip(shares, a, b, strict=True))
            if opt["evaluate"] == "factors":
                dense = new_b.double() @ new_a.double()
            base = old.get_parameter(f"{layer}.base_layer.weight").data
            self.scored.get_parameter(f"{layer}.base_layer.weight").data = base + dense.float()
            self.scored.get_parameter(f"{layer}.lora_B.default.weight").data.zero_()

    @torch.no_grad()
    def loss(self):
        x, y = self.batch(self.plan.manifest.test)
        return float(F.cross_entropy(self.scored.eval()(x), y))
