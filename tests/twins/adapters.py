"""A naive federation of adapters: peft modules, deepcopy, torch.optim.AdamW, loops over clients and layers."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F

from raysim.core.seeding import derive_seed, torch_generator
from raysim.engine.schedule import choose_cohort
from tests.twins.federation import Naive


class NaiveAdapters(Naive):
    """FedAvg of everything that is trained, factor by factor; `merge` is what a method changes.

    Args:
      frozen: part of the names of parameters that are not trained.
    """

    def __init__(self, plan, *, frozen="nothing"):
        super().__init__(plan, channels_last=False)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and frozen not in name)
        names = [name for name, _ in self.model.named_parameters()]
        self.layers = [name[: -len(".base_layer.weight")] for name in names if name.endswith("base_layer.weight")]

    @staticmethod
    def factor(model, layer, which):
        return model.get_parameter(f"{layer}.lora_{which}.default.weight").detach()

    def base(self, model, layer):
        return model.get_parameter(f"{layer}.base_layer.weight").detach()

    def local(self, client, round_index):
        local = self.config.local
        model = copy.deepcopy(self.model).train()
        rows = self.plan.manifest.clients[client]
        values = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(values, lr=local.lr, weight_decay=local.weight_decay)
        generator = torch_generator(derive_seed(self.config.seed, "batches", round_index, client))
        order = torch.randperm(len(rows), generator=generator).numpy()
        for start in range(0, len(rows), local.batch_size):
            x, y = self.batch(rows[order[start : start + local.batch_size]])
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            torch.nn.utils.clip_grad_norm_(values, local.max_grad_norm)
            optimizer.step()
        return model

    def round(self, round_index):
        config = self.config
        chosen = choose_cohort(
            config.partition.num_clients, config.cohort_size, seed=config.seed, round_index=round_index
        )
        sizes = [len(self.plan.manifest.clients[c]) for c in chosen]
        self.shares = [n / sum(sizes) for n in sizes]
        self.models = [self.local(int(c), round_index) for c in chosen]
        for name, value in self.model.named_parameters():
            if value.requires_grad:
                value.data = self.mean([m.get_parameter(name).detach() for m in self.models]).float()
        self.merge()

    def mean(self, values):
        """Weighted mean over the clients of the round, in float64."""
        return sum(share * value.double() for share, value in zip(self.shares, values, strict=True))

    def mean_product(self, layer):
        """Weighted mean of B_k A_k."""
        return self.mean(
            [self.factor(m, layer, "B").double() @ self.factor(m, layer, "A").double() for m in self.models]
        )

    def merge(self):
        """What a method does beside the average."""

    @torch.no_grad()
    def loss(self):
        x, y = self.batch(self.plan.manifest.test)
        return float(F.cross_entropy(self.model.eval()(x), y))
