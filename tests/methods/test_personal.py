"""Personal layers against naive federations in which every client keeps some tensors, and their property checks."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from raysim.base.errors import ConfigError
from raysim.core.cohorts import choose_cohort
from raysim.core.layout import norm_names
from raysim.models import build_model
from raysim.plan.build import open_federation
from tests.support.federations import lora_plan, plan_of, recipe_of, run, server_on
from tests.twins.federation import Naive, assert_same_state

FEW = {"data": {"test": 0.6}}
MOMENTUM = {"momentum": 0.9, "weight_decay": 0.01, "lr": 0.05}


def own_values(server, client):
    """Name -> tensor of what a client keeps for itself."""
    return {name: torch.from_numpy(value.copy()) for name, value in server.client_memory(client)["raysim"].items()}


def cohorts(plan):
    config = plan.config
    return [
        choose_cohort(config.partition.num_clients, config.cohort_size, seed=config.seed, round_index=index).tolist()
        for index in range(config.rounds)
    ]


class NaivePersonal(Naive):
    """FedAvg in which the tensors whose names begin so are each client's own."""

    def __init__(self, plan, *starts):
        super().__init__(plan)
        self.starts, self.own = starts, {}

    def local(self, client, round_index):
        shared = self.model
        self.model = copy.deepcopy(shared)
        self.model.load_state_dict(self.own.get(client, {}), strict=False)
        model, steps = super().local(client, round_index)
        self.model = shared
        self.own[client] = self.personal(model)
        return model, steps

    def personal(self, model):
        values = model.state_dict().items()
        return {n: v.clone() for n, v in values if n.startswith(self.starts) and v.is_floating_point()}

    def round(self, round_index):
        kept = self.personal(self.model)
        super().round(round_index)
        self.model.load_state_dict(kept, strict=False)


def alone(plan):
    """Client -> its model, trained by itself in the rounds in which it is chosen: no server, no average."""
    naive = Naive(plan)
    begun, models = naive.model, {}
    for index, cohort in enumerate(cohorts(plan)):
        for client in cohort:
            naive.model = models.get(client, begun)
            models[client], _ = naive.local(client, index)
    return models


@pytest.mark.parametrize("size", [12, 5])
@pytest.mark.parametrize(("local", "norm"), [({}, "none"), (MOMENTUM, "none"), ({}, "batch")])
def test_all_layers_personal_is_training_alone_bit_for_bit(size, local, norm, root):
    """With and without rounds in which a client is not chosen."""
    methods = [{"personal": {"layers": "all"}}]
    plan = plan_of(root, methods, cohort={"size": size}, local=local, model={"norm": norm}, **FEW)
    server, models = run(plan, root), alone(plan)
    assert len(models) >= size
    for client, model in models.items():
        values = own_values(server, client)
        state = {name: value for name, value in model.state_dict().items() if value.is_floating_point()}
        assert set(values) == set(state)
        for name, want in state.items():
            assert torch.equal(values[name], want), (client, name)


CASES = [
    ("head", ["fc2."], "none"),
    (["conv1", "fc1.bias"], ["conv1.", "fc1.bias"], "none"),
    ("head", ["fc2."], "batch"),
    ("norm", ["norm"], "batch"),
    ("norm", ["norm"], "group"),
    (["conv1", "norm1"], ["conv1.", "norm1."], "batch"),
    (["norm*.running_*"], ["norm1.running", "norm2.running"], "batch"),  # SiloBN: the statistics alone
]


@pytest.mark.parametrize(("layers", "starts", "norm"), CASES)
def test_personal_matches_a_naive_federation_over_3_rounds(layers, starts, norm, root):
    plan = plan_of(root, [{"personal": {"layers": layers}}], model={"norm": norm}, cohort={"size": 6}, **FEW)
    server, naive = server_on(plan, root), NaivePersonal(plan, *starts)
    for index in range(3):
        server.run_round(index)
        naive.round(index)
    assert_same_state(server, naive)
    for client, values in naive.own.items():
        got = own_values(server, client)
        assert set(got) == set(values)
        moved = {name: float((want - naive.begun[name]).abs().max()) for name, want in values.items()}
        mean = sum(moved.values()) / len(moved)
        for name, want in values.items():  # a bias before BatchNorm moves by rounding alone
            assert float((got[name] - want).abs().max()) <= 1e-3 * max(moved[name], mean), (client, name)


@pytest.mark.parametrize(("layers", "starts", "norm"), [*CASES, ("all", [""], "none"), ("all", [""], "batch")])
def test_personal_layers_neither_travel_nor_move_in_the_global_model(layers, starts, norm, root):
    plan = plan_of(root, [{"personal": {"layers": layers}}], model={"norm": norm}, **FEW)
    server = server_on(plan, root)
    begun = server.state.clone()
    metrics = [server.run_round(index).metrics for index in range(2)][-1]
    size = 0
    for leaf in server.layout.leaves:
        is_own = leaf.name.startswith(tuple(starts))
        is_same = torch.equal(server.layout.view(server.state, leaf), server.layout.view(begun, leaf))
        assert is_same == is_own or (norm == "batch" and "bias" in leaf.name), leaf.name  # see above
        size += 0 if is_own else leaf.size
    assert metrics["comm/up_mb"] == metrics["comm/down_mb"] == pytest.approx(7 * 4 * size / 1e6)


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_the_score_of_a_personal_model_is_that_of_the_clients_own(norm, root):
    """`layers: all`: what a client keeps is its whole model, weighed here by its own mix of classes."""
    plan = plan_of(root, [{"personal": {"layers": "all"}}], model={"norm": norm}, cohort={"size": 5}, **FEW)
    server = server_on(plan, root)
    record = [server.run_round(index) for index in range(2)][-1]
    images, labels = open_federation(recipe_of(plan, root)).held_out("test")
    inputs = torch.from_numpy(images.copy()).permute(0, 3, 1, 2).float() / 255
    model, expected = build_model(plan.spec, seed=0).eval(), []
    for client in record.clients["client"].tolist():
        model.load_state_dict(own_values(server, client), strict=False)
        is_right = (model(inputs).argmax(1).numpy() == labels).astype(float)
        counts = plan.manifest.class_counts[client]
        expected.append(sum(counts[c] * is_right[labels == c].mean() for c in range(10) if counts[c]) / counts.sum())
    metrics = record.metrics
    assert metrics["clients/expected_personal_accuracy_mean"] == pytest.approx(np.mean(expected), abs=1e-12)
    assert metrics["clients/expected_personal_accuracy_worst"] == pytest.approx(min(expected), abs=1e-12)
    assert metrics["server/loss"] == pytest.approx(server_on(plan, root).evaluate()["server/loss"])  # as it began


@pytest.mark.parametrize(("layers", "norm"), [("all", "batch"), ("norm", "batch")])
def test_own_values_are_the_same_on_any_number_of_trainers(layers, norm, root, ray_pools):
    plan = plan_of(root, [{"personal": {"layers": layers}}], model={"norm": norm}, **FEW)
    expected = run(plan, root)
    clients = expected.changed_clients()
    for pool in ray_pools(plan)[1:]:
        server = run(plan, root, pool)
        assert server.changed_clients() == clients
        for client in clients:
            values, wanted = own_values(server, client), own_values(expected, client)
            assert all(torch.equal(values[name], wanted[name]) for name in wanted), client


def test_a_resumed_run_has_the_same_bits(root):
    plan = plan_of(root, ["personal"], **FEW)
    whole, begun, resumed = run(plan, root), run(plan, root, rounds=1), server_on(plan, root)
    resumed.restore(begun.snapshot())
    for client in begun.changed_clients():
        resumed.restore_memory(client, begun.client_memory(client))
    for index in (1, 2):
        resumed.run_round(index)
    assert resumed.params_sha256() == whole.params_sha256()
    for client in whole.changed_clients():
        values, wanted = own_values(resumed, client), own_values(whole, client)
        assert all(torch.equal(values[name], wanted[name]) for name in wanted)


def test_patterns_name_tensors_layers_and_blocks(root):
    def personal_leaves(layers):
        layout = lora_plan(root, [{"personal": {"layers": layers}}]).layout
        return {leaf.name for leaf in layout.personal}

    assert personal_leaves("head") == {"head.weight", "head.bias"}
    assert personal_leaves(["head.b*"]) == {"head.bias"}
    assert all(name.startswith("blocks.1.") for name in personal_leaves(["blocks.1"]))
    assert len(personal_leaves(["blocks.1"])) == 8
    only_b = personal_leaves(["*.lora_B"])
    assert len(only_b) == 8
    assert all(".lora_B." in name for name in only_b)


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        ([{"personal": {"layers": ["conv9"]}}], "personal: 'conv9' matches no trained layer; known: conv1"),
        ([{"personal": {"layers": ["conv1", "fc9"]}}], "'fc9' matches no trained layer"),
        ([{"personal": {"layers": "body"}}], "layers"),
        ([{"personal": {"layers": "norm"}}], "personal: the model has no normalisation layers; set model.norm"),
        (["freeze", "personal"], "personal: 'fc2' matches no trained layer"),
        ([{"personal": {"layers": "all"}}, "fedvg"], "fedvg claims weights"),
        (["personal", "ccvr"], "ccvr claims weights:fc2"),
    ],
)
def test_what_cannot_run_is_refused(methods, words, root):
    with pytest.raises(ConfigError, match=words):
        plan_of(root, methods, data={"validation": 0.1})


def test_adapters_of_which_one_factor_is_personal_are_not_merged_by_others(root):
    for other in ("livar", "flora", "keep_factors"):
        with pytest.raises(ConfigError, match=f"{other} needs lora-factors"):
            lora_plan(root, [{"personal": {"layers": ["*.lora_B"]}}, other])
    with pytest.raises(ConfigError, match=r"flora: personal models, here with head\.weight, head\.bias"):
        lora_plan(root, ["personal", "flora"])
    lora_plan(root, ["personal", {"livar": {"components": "lora"}}])
    lora_plan(root, ["personal", "ffa_lora"])


@pytest.mark.parametrize("other", ["scaffold", "feddyn", "fedavgm", "fedadam", "fedprox", "elastic", "fednova", "moon"])
def test_what_runs_with_personal_leaves_the_global_head_alone(other, root):
    server = run(plan_of(root, ["personal", other], **FEW), root, rounds=2)
    begun = server_on(plan_of(root, **FEW), root)
    values, first = server.layout.views(server.state), begun.layout.views(begun.state)
    assert torch.equal(values["fc2.weight"], first["fc2.weight"])
    assert not torch.equal(values["fc1.weight"], first["fc1.weight"])


@pytest.mark.parametrize("sends", ["top_k", "sign", {"sign_flip": {"share": 0.4}}])
def test_a_clients_own_model_is_what_its_steps_left_whatever_it_sends(sends, root):
    """In the first round both federations train the same."""
    groups = {"model": {"norm": "batch"}, **FEW}
    methods = ["personal"], ["personal", sends]
    servers = [server_on(plan_of(root, each, **groups), root) for each in methods]
    alone, encoded = (server.run_round(0) for server in servers)
    for name in ("mean", "worst"):
        key = f"clients/expected_personal_accuracy_{name}"
        assert alone.metrics[key] == encoded.metrics[key]
    for client in alone.clients["client"].tolist():
        first, second = (own_values(server, client) for server in servers)
        assert all(torch.equal(first[key], second[key]) for key in first)


def test_a_counter_of_layers_that_stay_at_the_clients_stays_there(root):
    for layers, moves in (("norm", False), ("head", True)):
        server = server_on(plan_of(root, [{"personal": {"layers": layers}}], model={"norm": "batch"}, **FEW), root)
        server.run_round(0)
        assert any(server.counters.values()) == moves


@pytest.mark.slow
def test_fedbn_keeps_every_clients_own_statistics(root):
    plan = plan_of(root, [{"personal": {"layers": "norm"}}], model={"norm": "batch"}, cohort={"size": 12}, **FEW)
    values = [own_values(run(plan, root, rounds=2), client) for client in range(12)]
    assert set(values[0]) == {
        f"norm{i}.{part}" for i in (1, 2) for part in ("weight", "bias", "running_mean", "running_var")
    }
    assert not torch.equal(values[0]["norm1.running_mean"], values[1]["norm1.running_mean"])


def test_norm_names_are_those_of_normalisation_layers_whatever_they_are_called():
    import timm
    import torchvision

    for module in (
        torchvision.models.resnet18(),
        timm.create_model("efficientnet_b0"),
        timm.create_model("vit_tiny_patch16_224"),
    ):
        kinds = (torch.nn.modules.batchnorm._BatchNorm, torch.nn.LayerNorm)
        want = {
            f"{path}.{name}"
            for path, layer in module.named_modules()
            if isinstance(layer, kinds)
            for name in layer.state_dict()
        }
        assert norm_names(module) == want
