"""FedProto against a naive reference, and its property checks."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from methods.fedproto import batch_mean_distance, fedproto, merged_prototypes, prototype_distance
from raysim.base.errors import ConfigError
from raysim.core.seeding import derive_seed, torch_generator
from raysim.models import build_model
from raysim.plan.build import open_federation
from tests.support.federations import plan_of, recipe_of, run, server_on
from tests.twins.federation import Naive

FEW = {"test": 0.6}


class NaiveProto(Naive):
    """FedAvg with the prototype term, class by class."""

    def __init__(self, plan, *, strength, mode, **options):
        super().__init__(plan, **options)
        self.strength, self.mode = strength, mode
        self.prototypes: dict[int, torch.Tensor] = {}
        self.seen: dict = {}

    @staticmethod
    def features(model, x):
        kept = []
        handle = model.fc2.register_forward_pre_hook(lambda layer, inputs: kept.append(inputs[0]))
        logits = model(x)
        handle.remove()
        return logits, kept[0]

    def local(self, client, round_index):
        local = self.config.local
        model = copy.deepcopy(self.model).train()
        rows = self.plan.manifest.clients[client]
        optimizer = torch.optim.SGD(model.parameters(), lr=local.lr)
        generator = torch_generator(derive_seed(self.config.seed, "batches", round_index, client))
        order = torch.randperm(len(rows), generator=generator).numpy()
        for start in range(0, len(rows), local.batch_size):
            x, y = self.batch(rows[order[start : start + local.batch_size]])
            logits, z = self.features(model, x)
            term = torch.zeros(())
            if self.mode == "fed-mammoth":
                for label in y.unique().tolist():
                    if label in self.prototypes:
                        term = term + F.mse_loss(z[y == label].mean(0), self.prototypes[label])
            else:
                for row, label in zip(z, y.tolist(), strict=True):
                    if label in self.prototypes:
                        term = term + (row - self.prototypes[label]).square().mean() / len(y)
            optimizer.zero_grad()
            (F.cross_entropy(logits, y) + self.strength * term).backward()
            optimizer.step()
        with torch.no_grad():
            x, y = self.batch(rows)
            _, z = self.features(model.eval(), x)
            self.seen[client] = {c: (int((y == c).sum()), z[y == c].mean(0)) for c in y.unique().tolist()}
        return model.train(), 1

    def round(self, round_index):
        self.seen = {}
        super().round(round_index)
        for label in range(10):
            held = [means[label] for means in self.seen.values() if label in means]
            counts = [n if self.mode != "clients" else 1 for n, _ in held]
            if held:
                self.prototypes[label] = sum(n * z for n, (_, z) in zip(counts, held, strict=True)) / sum(counts)


@pytest.mark.parametrize(
    ("mode", "options", "weights"),
    [
        ("clients", {}, "examples"),
        ("examples", {"prototypes": "examples"}, "examples"),
        ("fed-mammoth", {"as_in": "fed-mammoth"}, "uniform"),
    ],
)
def test_fedproto_matches_reference_after_3_rounds(mode, options, weights, root):
    plan = plan_of(root, [{"fedproto": {"strength": 0.5, **options}}], cohort={"size": 4}, data=FEW)
    server, naive = server_on(plan, root), NaiveProto(plan, strength=0.5, mode=mode, weights=weights)
    for index in range(3):
        server.run_round(index)
        naive.round(index)
    values = server.layout.views(server.state)
    for name, want in naive.model.named_parameters():
        assert torch.allclose(values[name], want, atol=2e-6), name
    table = server.method_state["fedproto"]["prototypes"]
    for label in range(10):
        if label in naive.prototypes:
            assert torch.allclose(table[label], naive.prototypes[label], atol=2e-6)
        else:
            assert table[label].isnan().all()


def test_fedproto_matches_reference_when_a_class_is_absent_from_a_round(root):
    """Two clients a round with few classes each: what a class had before is what its examples are pulled to again."""
    skewed = {"alpha": 0.05, "num_clients": 6, "min_samples": 5}
    plan = plan_of(root, [{"fedproto": {"strength": 0.5}}], rounds=4, cohort={"size": 2}, data=FEW, partition=skewed)
    server, naive = server_on(plan, root), NaiveProto(plan, strength=0.5, mode="clients")
    absent = set()
    for index in range(4):
        before = set(naive.prototypes)
        server.run_round(index)
        naive.round(index)
        absent |= before - {label for means in naive.seen.values() for label in means}
    assert absent, "choose another seed: no class was absent that had a prototype"
    table = server.method_state["fedproto"]["prototypes"]
    for label, prototype in naive.prototypes.items():
        assert torch.allclose(table[label], prototype, atol=2e-6), label
    values = server.layout.views(server.state)
    for name, want in naive.model.named_parameters():
        assert torch.allclose(values[name], want, atol=2e-6), name


def test_clients_without_a_step_do_not_count_in_prototypes():
    means = torch.tensor([[[1.0], [1.0]], [[3.0], [3.0]], [[9.0], [9.0]]])
    report = {"means": means, "counts": torch.tensor([[2, 0], [1, 0], [4, 4]])}
    view = SimpleNamespace(report=report, is_active=torch.tensor([True, True, False]))
    before = {"prototypes": torch.tensor([[0.0], [7.0]])}
    for options, expected in (({}, 2.0), ({"prototypes": "examples"}, 5 / 3)):
        _, after = fedproto(**options).server_update(torch.zeros(1), before, view)
        assert after["prototypes"].flatten().tolist() == pytest.approx([expected, 7.0])


def test_strength_0_and_the_first_round_are_fedavg(root):
    fedavg = [run(plan_of(root, data=FEW), root, rounds=n).params_sha256() for n in (1, 3)]
    assert run(plan_of(root, [{"fedproto": {"strength": 0}}], data=FEW), root).params_sha256() == fedavg[1]
    assert run(plan_of(root, ["fedproto"], data=FEW), root, rounds=1).params_sha256() == fedavg[0]


@pytest.mark.parametrize("distance", [prototype_distance, batch_mean_distance])
def test_a_class_without_prototype_has_no_loss_and_no_gradient(distance):
    z = torch.randn(5, 3, requires_grad=True)
    labels = torch.tensor([0, 1, 1, 2, 0])
    known = torch.tensor([True, False, True])
    value = distance(z, labels, torch.randn(3, 3), known)
    value.backward()
    assert not z.grad[1:3].any()
    assert z.grad[[0, 3, 4]].any(1).all()
    nothing = distance(z, labels, torch.randn(3, 3), torch.zeros(3, dtype=torch.bool))
    assert nothing.detach() == 0


def test_distances_by_hand():
    z = torch.tensor([[1.0, 3.0], [3.0, 5.0], [0.0, 0.0]])
    labels, table, known = torch.tensor([0, 0, 1]), torch.tensor([[1.0, 1.0], [2.0, 0.0]]), torch.tensor([True, True])
    assert float(prototype_distance(z, labels, table, known)) == pytest.approx((4 + 4 + 16 + 4) / 6)
    assert float(batch_mean_distance(z, labels, table, known)) == pytest.approx((1 + 9) / 2 + 4 / 2)


def test_prototypes_over_examples_are_pooled_class_means_and_over_clients_are_not():
    sets = [torch.randn(n, 4, dtype=torch.float64) + n for n in (1, 5, 3)]
    means = torch.stack([z.mean(0) for z in sets])[:, None].expand(-1, 2, -1)
    counts = torch.tensor([[1, 0], [5, 0], [3, 0]])
    pooled = torch.cat(sets).mean(0).float()
    over_examples = merged_prototypes(means, counts, over_examples=True)
    over_clients = merged_prototypes(means, counts, over_examples=False)
    assert torch.allclose(over_examples[0], pooled, atol=1e-6)
    assert torch.allclose(over_clients[0], means[:, 0].mean(0).float(), atol=1e-6)
    assert not torch.allclose(over_clients[0], pooled, atol=1e-3)
    assert over_examples[1].isnan().all()
    equal = torch.tensor([[2, 0], [2, 0], [2, 0]])
    assert torch.equal(*(merged_prototypes(means, equal, over_examples=flag).nan_to_num(0) for flag in (True, False)))


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_nothing_shared_leaves_the_global_weights_and_keeps_personal_ones(norm, root):
    methods = [{"fedproto": {"share": "nothing"}}]
    plan = plan_of(root, methods, data=FEW, cohort={"size": 12}, model={"norm": norm})
    server = server_on(plan, root)
    start = server.params_sha256()
    memories = []
    for index in range(2):
        server.run_round(index)
        name = "norm2.running_mean" if norm == "batch" else "fc2.weight"
        memories.append({c: server.client_memory(c)["raysim"][name].copy() for c in range(12)})
    assert server.params_sha256() == start
    assert not server.method_state["fedproto"]["prototypes"].isnan().any()
    for client in range(12):
        assert not np.array_equal(memories[0][client], memories[1][client])
    assert not np.array_equal(memories[1][0], memories[1][1])


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_personal_models_are_scored_on_each_clients_own_classes(norm, root):
    plan = plan_of(root, [{"fedproto": {"share": "nothing"}}], data=FEW, cohort={"size": 5}, model={"norm": norm})
    server = server_on(plan, root)
    server.run_round(0)
    record = server.run_round(1)
    federation = open_federation(recipe_of(plan, root))
    images, labels = federation.held_out("test")
    inputs = torch.from_numpy(images.copy()).permute(0, 3, 1, 2).float() / 255
    model = build_model(plan.spec, seed=0).eval()
    expected = []
    for client in record.clients["client"]:
        memory = server.client_memory(int(client))["raysim"]
        model.load_state_dict({n: torch.from_numpy(value.copy()) for n, value in memory.items()}, strict=False)
        is_right = (model(inputs).argmax(1).numpy() == labels).astype(float)
        counts = plan.manifest.class_counts[client]
        by_class = [counts[c] / counts.sum() * is_right[labels == c].mean() for c in range(10) if counts[c]]
        expected.append(sum(by_class))
    assert record.metrics["clients/expected_personal_accuracy_mean"] == pytest.approx(np.mean(expected), abs=1e-12)
    assert record.metrics["clients/expected_personal_accuracy_worst"] == pytest.approx(min(expected), abs=1e-12)
    assert record.metrics["clients/expected_personal_accuracy_mean"] > record.metrics["clients/expected_accuracy_mean"]


def test_what_cannot_run_is_refused(root):
    for methods, groups, words in (
        ([{"fedproto": {"share": "nothing"}}, "fedvg"], {}, "fedvg claims weights"),
        ([{"fedproto": {"share": "nothing", "as_in": "fed-mammoth"}}], {}, "share: has no effect with as_in"),
    ):
        with pytest.raises(ConfigError, match=words):
            plan_of(root, methods, **groups)
    plan_of(root, ["fedvg", "fedproto"])
