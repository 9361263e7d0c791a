"""Stacked clients: each is trained as it would be alone, but for rounding."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from methods import METHODS
from raysim.config import parse_config
from raysim.core.layout import layout_of
from raysim.core.method import Batch, Outputs
from raysim.core.seeding import torch_generator
from raysim.data.sources import prepare
from raysim.training.augment import AUGMENTATIONS
from raysim.training.inputs import Examples, InputTransform
from raysim.training.local import LocalSettings, num_local_steps, train_locally
from raysim.training.model import BoundModel, state_of
from raysim.training.stacked import CALL_BOUND, LEAST_CLIENTS, Stacker, dense_layers, most_clients
from raysim.training.tasks import CLASSES, TASKS, cross_entropy
from tests.support.federations import plan_of, run, server_on

SIZES = (17, 20, 3, 19)
SETTINGS = LocalSettings(lr=0.3, epochs=1.5, batch_size=5)
PLAIN = InputTransform()


def dense(*further: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    relu = nn.ReLU()
    layers = [nn.Flatten(), nn.Linear(36, 8), relu, nn.Linear(8, 7), nn.Linear(7, 6), relu, *further]
    return nn.Sequential(OrderedDict((f"layer{i}", layer) for i, layer in enumerate([*layers, nn.Linear(6, 3)])))


def stacker(module: nn.Module, settings=SETTINGS, transform=PLAIN, **options) -> Stacker:
    head = list(dict(module.named_children()))[-1]
    return Stacker(module, layout_of(module, head=head, **options), transform, settings, CLASSES)


def examples(count: int) -> Examples:
    generator = torch.Generator().manual_seed(count)
    images = torch.randint(256, (count, 6, 6, 1), generator=generator, dtype=torch.uint8)
    return Examples(images, torch.randint(3, (count,), generator=generator))


@pytest.mark.parametrize("augment", ["none", "cifar"])
def test_each_client_of_a_stack_is_trained_as_if_alone(augment):
    transform = InputTransform(augmentation=AUGMENTATIONS[augment])
    settings = LocalSettings(lr=0.3, steps=9, batch_size=5)  # several epochs of the smallest client
    module = dense()
    one = stacker(module, settings, transform)
    start = state_of(module, one.layout)
    members = [(examples(count), torch_generator(7 + count)) for count in SIZES]
    began = time.perf_counter()
    done = one.train(range(4), [9] * 4, members, start, lr=0.3)
    assert list(done) == [0, 1, 2, 3]
    assert sum(client.seconds for client in done.values()) <= time.perf_counter() - began  # its share, not the stack's
    model = BoundModel(module, one.layout, head="layer6")
    for client, count in enumerate(SIZES):
        model.load(start)
        order = torch_generator(7 + count)
        steps, loss = train_locally(
            model, cross_entropy, None, examples(count), transform, settings, lr=0.3, generator=order
        )
        assert done[client].num_steps == steps == 9
        assert done[client].mean_loss == pytest.approx(loss, rel=1e-5)
        assert torch.allclose(torch.cat(done[client].leaves), model.state, atol=1e-6), client
        assert not torch.allclose(model.state, start, atol=1e-2)


def test_a_client_with_fewer_steps_leaves_the_stack_and_is_trained_as_if_alone():
    module = dense()
    one = stacker(module)
    start, sizes = state_of(module, one.layout), (33, 20, 19, 4, 1, 17, 3, 8, 9, 30, 5)  # more than a stack holds
    work = {count: num_local_steps(count, SETTINGS, skip_single=False) for count in sizes}
    sizes = sorted(sizes, key=lambda count: -work[count])
    members = [(examples(count), torch_generator(count)) for count in sizes]
    done = one.train(sizes, [work[count] for count in sizes], members, start, lr=0.3)
    model = BoundModel(module, one.layout, head="layer6")
    for count in sizes:
        model.load(start)
        order = torch_generator(count)
        steps, loss = train_locally(
            model, cross_entropy, None, examples(count), PLAIN, SETTINGS, lr=0.3, generator=order
        )
        assert done[count].num_steps == steps == work[count]
        assert done[count].mean_loss == pytest.approx(loss, rel=1e-5)
        assert torch.allclose(torch.cat(done[count].leaves), model.state, atol=1e-6), count
    assert len(set(work.values())) > 4
    assert one.train([7, 3], [3, 0], members[:2], start, lr=0.3).keys() == {7}  # without steps
    assert one.train([7, 3], [0, 0], members[:2], start, lr=0.3) == {}


def test_stacks_are_as_wide_as_a_cache_on_a_cpu_and_as_64_mib_of_parameters_elsewhere():
    cpu, card = torch.device("cpu"), torch.device("cuda")
    assert [most_clients(cpu, size) for size in (100, 2**18, 2**20, 2**24)] == [8, 8, 2, 1]
    assert [most_clients(card, size) for size in (2**14, 2**18)] == [1024, 64]


@pytest.mark.parametrize(
    "other",
    [
        {"stack": "off"},
        {"compile": True},
        {"momentum": 0.5},
        {"weight_decay": 0.1},
        {"optimizer": "adamw"},
        {"max_grad_norm": 1.0},
        {"precision": "bfloat16"},
    ],
)
def test_other_local_work_is_not_stacked(other):
    assert stacker(dense()).fits([])
    assert not stacker(dense(), replace(SETTINGS, **other)).fits([])


def test_blocks_hold_several_clients_where_calls_take_the_time():
    assert stacker(dense()).least_clients([]) == LEAST_CLIENTS
    assert stacker(dense()).least_clients([METHODS["fedprox"]()]) == 1  # not stacked
    assert stacker(nn.Sequential(nn.Flatten(), nn.Linear(CALL_BOUND, 1))).least_clients([]) == 1  # bound by arithmetic


@pytest.mark.parametrize("further", [nn.Dropout(0.5), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6, bias=False)])
def test_other_networks_are_not_stacked(further):
    assert not stacker(dense(further)).fits([])
    assert not stacker(nn.Sequential(nn.Flatten(2), nn.Linear(36, 3))).fits([])
    assert not stacker(nn.Sequential(nn.Linear(6, 3))).fits([])


def test_only_methods_without_a_say_in_the_steps_are_stacked():
    assert stacker(dense()).fits([METHODS["fedvg"](), METHODS["fedavgm"]()])
    for name in ("fedprox", "moon", "flfa"):
        options = {"candidates": ["layer1", "layer3"]} if name == "flfa" else {}
        assert not stacker(dense()).fits([METHODS[name](**options)]), name
    module = dense()
    names = [name for name, _ in module.named_parameters()]
    assert not stacker(module, trained=names[2:]).fits([])  # frozen
    assert not stacker(module, shared=names[2:]).fits([])  # personal
    assert not stacker(dense(), transform=InputTransform(function=lambda images, generator: images)).fits([])


def test_yaml_reads_off_as_false():
    for value in (False, "off"):
        config, faults = parse_config({"local": {"stack": value}})
        assert not faults
        assert config.local.stack == "off"
    assert parse_config({"local": {"stack": True}})[1]


#: A cohort of which blocks of several clients are cut; sizes differ.
MANY = {
    "model": {"name": "mlp", "hidden": 8},
    "partition": {"alpha": 5.0, "num_clients": 80, "min_samples": 2},
    "cohort": {"size": 80, "stragglers": 0.3, "straggler_work": 0.4},
    "rounds": 2,
}
LOCAL = {"lr": 0.1, "batch_size": 4, "epochs": 1.5}


@pytest.mark.parametrize("methods", [[], ["fedavgm", {"fedvg": {"norm": "update"}}]])
def test_a_run_with_stacks_is_the_run_without_but_for_rounding(methods, root):
    servers = [
        server_on(plan_of(root, methods, **MANY, local={**LOCAL, "stack": stack}), root) for stack in ("auto", "off")
    ]
    assert [server.phases[0].least_clients for server in servers] == [LEAST_CLIENTS, 1]
    for index in range(2):
        stacked, alone = (server.run_round(index).clients for server in servers)
        assert len(set(alone["num_examples"].tolist())) > 5
        for name in ("client", "num_examples", "num_steps"):
            assert (stacked[name] == alone[name]).all(), name
        assert np.allclose(stacked["train_loss"], alone["train_loss"], rtol=1e-4)
    states = [server.state for server in servers]
    assert torch.allclose(*states, atol=1e-5)
    assert not torch.equal(*states)  # some were stacked


def test_another_task_is_not_stacked_for_its_loss_is_another(root):
    for task in TASKS.values():
        assert replace(stacker(dense()), task=task).fits([]) == (task is CLASSES)
    assert not replace(
        stacker(dense()), task=replace(CLASSES, mean=lambda outputs, batch: outputs.logits.sum() * 0)
    ).fits([])


def test_a_task_made_of_classes_is_trained_with_its_own_loss():
    task = replace(CLASSES, name="zero", total=lambda logits, targets: logits.sum() * 0)
    logits, targets = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    batch = Batch(torch.zeros(4, 1), targets)
    assert float(task.criterion(Outputs(logits, None), batch)) == 0
    assert torch.equal(CLASSES.criterion(Outputs(logits, None), batch), F.cross_entropy(logits, targets))


def test_many_clients_learn_a_number_with_its_own_loss(tmp_path):
    prepare("diabetes", tmp_path)
    more = {"partition": {"scheme": "quantity", "form": "dirichlet", "alpha": 1.0, "num_clients": 80, "min_samples": 2}}
    data = {"name": "diabetes", "root": str(tmp_path), "test": 0.2, "normalise": "standard"}
    plans = [
        plan_of(tmp_path, data=data, **{**MANY, **more}, local={**LOCAL, "lr": 0.01, "stack": stack})
        for stack in ("auto", "off")
    ]
    assert len({run(plan, tmp_path, rounds=1).params_sha256() for plan in plans}) == 1


def test_a_run_that_cannot_be_stacked_keeps_its_bits(root):
    local = {**LOCAL, "momentum": 0.9}
    digests = [
        run(plan_of(root, **MANY, local={**local, "stack": s}), root, rounds=1).params_sha256() for s in ("auto", "off")
    ]
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("parts", "layers"),
    [
        ([nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)], [("1", True), ("3", False)]),
        ([nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2), nn.ReLU()], []),  # logits are what a layer gives
        ([nn.Flatten()], []),
        ([], []),
    ],
)
def test_a_dense_network_ends_with_a_linear_layer(parts, layers):
    assert dense_layers(nn.Sequential(*parts)) == layers
