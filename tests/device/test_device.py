"""Trainers on a device that is not the CPU: the CPU's bits, no tensor of the wrong device, no wait inside the local loop."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from raysim.base.errors import RaysimError
from raysim.core.method import Method
from raysim.engine.simulation import Stopped
from raysim.engine.trainer import Trainer
from raysim.plan.check import check
from raysim.running.runner import execute
from raysim.training import local
from raysim.training.model import BoundModel
from raysim.training.stacked import Stacker
from raysim.training.tasks import TASKS
from tests.device.other import Module, OtherDevice
from tests.support.federations import lora_plan, plan_of, server_with
from tests.support.method_cases import ADAPTER_CASES, CNN_CASES
from tests.support.task_sets import task_config, write_task_set


def outcome(rounds_on, device, plan):
    """(hash of the model, metrics that do not measure time) after the rounds."""
    server, records = rounds_on(device, plan)
    metrics = [
        {name: value for name, value in record.metrics.items() if not name.startswith("system/")} for record in records
    ]
    return server.params_sha256(), repr(metrics)


@pytest.mark.parametrize("name", CNN_CASES)
def test_a_method_has_the_cpus_bits(name, root, rounds_on):
    plan = plan_of(root, CNN_CASES[name], model={"norm": "batch"}, rounds=2)
    assert outcome(rounds_on, "other", plan) == outcome(rounds_on, "cpu", plan)


@pytest.mark.parametrize("name", ADAPTER_CASES)
def test_a_method_on_adapters_has_the_cpus_bits(name, root, rounds_on):
    plan = lora_plan(root, ADAPTER_CASES[name], data={"test": 0.7}, rounds=2, cohort={"size": 5})
    assert outcome(rounds_on, "other", plan) == outcome(rounds_on, "cpu", plan)


def noisier(*, images, generator):
    """An augmentation as a user writes it: the generator is one of the CPU."""
    return images + 0.1 * torch.randn(images.shape, generator=generator).to(images.device)


GROUPS = {
    "augmentation": {"data": {"augment": "cifar"}},
    "bfloat16": {"local": {"precision": "bfloat16"}},
    "momentum, decay and clipping": {"local": {"momentum": 0.9, "weight_decay": 1e-3, "max_grad_norm": 0.5}},
    "adamw": {"local": {"optimizer": "adamw", "lr": 0.005}},
    "stacked clients": {
        "model": {"name": "mlp", "hidden": 8},
        "partition": {"alpha": 5.0, "num_clients": 40, "min_samples": 2},
        "cohort": {"size": 40},
        "local": {"batch_size": 4, "stack": "auto"},
    },
    "noise between clients": {"data": {"shift": {"noise": {"std": 0.1}}}},
    "metrics": {"evaluation": {"metrics": ["auroc"]}},
    "normalisation and resizing": {"data": {"normalise": "imagenet", "channels": 3, "resize": 12}},
    "an augmentation of resized boxes": {"data": {"resize": 12, "crop": 8, "augment": "livar-vit"}},
    "bfloat16 and BatchNorm": {"local": {"precision": "bfloat16"}, "model": {"norm": "batch"}},
    "own code": {
        "data": {"augment": "tests.device.test_device:noisier"},
        "evaluation": {"metrics": ["tests.fuzz.own_code:plain_metric"]},
        "methods": ["tests.support.toys:criterion"],
    },
    "stragglers": {"cohort": {"size": 5, "dropout": 0.3, "stragglers": 0.5}},
}


@pytest.mark.parametrize("name", GROUPS)
def test_local_work_and_evaluation_have_the_cpus_bits(name, root, rounds_on):
    plan = plan_of(root, **{"rounds": 2, **GROUPS[name]})
    assert outcome(rounds_on, "other", plan) == outcome(rounds_on, "cpu", plan)


def test_wider_stacks_have_the_cpus_bits(root, rounds_on, monkeypatch):
    widths, train = {"cpu": set(), "other": set()}, Stacker._train_stack

    def noted(stacker, members, num_steps, start, lr):
        widths[start.device.type].add(len(members))
        return train(stacker, members, num_steps, start, lr)

    monkeypatch.setattr(Stacker, "_train_stack", noted)
    many = {"partition": {"scheme": "iid", "num_clients": 400}, "data": {"test": 0.2}, "cohort": {"size": 400}}
    plan = plan_of(root, model={"name": "mlp", "hidden": 8}, local={"batch_size": 2}, rounds=1, **many)
    assert outcome(rounds_on, "other", plan) == outcome(rounds_on, "cpu", plan)
    assert max(widths["other"]) > max(widths["cpu"]) == 8


@pytest.mark.parametrize("task", TASKS)
def test_every_task_has_the_cpus_bits(task, tmp_path, rounds_on):
    write_task_set(tmp_path, task)
    plan = check(task_config(tmp_path, task, rounds=2), "a test")
    assert outcome(rounds_on, "other", plan) == outcome(rounds_on, "cpu", plan)


def test_a_resumed_run_has_the_bits_of_one_run_through(root, tmp_path, on_device):
    """The whole run, with records and checkpoints; it stops after the second round of four."""

    def executed(name, stop_after=0):
        groups = {"rounds": 4, "name": name, "storage": str(tmp_path), "checkpoint": {"every_s": 0}}
        plan = plan_of(root, ["scaffold", {"fedvg": {"granularity": "block"}}], **groups)

        def on_round(record):
            if record.round_index + 1 == stop_after:
                raise Stopped

        return execute(plan, on_round=on_round)["params_sha256"]

    with on_device("cpu"):
        expected = executed("cpu")
    with on_device("other"):
        assert executed("whole") == expected
        with pytest.raises(Stopped):
            executed("halves", stop_after=2)
        assert executed("halves") == expected
    environment = json.loads((tmp_path / "whole" / "env.json").read_text())
    assert environment["resources"]["gpus_per_trainer"] == 1.0
    assert environment["resources"]["device"] == "other"
    assert environment["machine"]["gpus"] == ["a device of the tests"]


#: Groups beside which no method waits.
LOOPS = {
    "plain": {},
    "augmentation": {"data": {"augment": "cifar", "normalise": "half"}},
    "resizing and bfloat16": {"data": {"resize": 12}, "local": {"precision": "bfloat16"}},
    "momentum and clipping": {"local": {"momentum": 0.9, "weight_decay": 1e-3, "max_grad_norm": 0.5}},
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", ["fedavg", "fedprox", "scaffold", "flfa", "univarfl", "moon", "fedsol"])
def test_nothing_waits_for_the_device_between_the_first_and_the_last_step(name, loop, root, rounds_on, monkeypatch):
    waits, local_step = [], local.local_step

    def counted(*given):
        step, counts = local_step(*given), []
        waits.append(counts)

        def call(batch):
            counts.append(OtherDevice.waits)
            step(batch)
            counts.append(OtherDevice.waits)

        return call

    monkeypatch.setattr(local, "local_step", counted)
    groups = {**LOOPS[loop], "local": {"epochs": 2, **LOOPS[loop].get("local", {})}}
    rounds_on("other", plan_of(root, CNN_CASES[name], **groups, rounds=2))
    assert sum(map(len, waits)) > 2 * len(waits) > 0  # some clients take several steps
    assert {counts[-1] - counts[0] for counts in waits} == {0}


def test_a_client_waits_three_times_and_sends_its_images_once(root, rounds_on, monkeypatch):
    """For its loss, its update and the largest entries of the update; BatchNorm's counters are a fourth."""
    clients, train = [], Trainer._train_client

    def counted(trainer, *given):
        waits, sent = OtherDevice.waits, len(OtherDevice.sent)
        report, kept = train(trainer, *given)
        images = [shape[0] for dtype, shape, _ in OtherDevice.sent[sent:] if dtype == torch.uint8]
        clients.append((OtherDevice.waits - waits, images == report.num_examples.tolist()))
        return report, kept

    monkeypatch.setattr(Trainer, "_train_client", counted)
    for norm, waits in {"none": 3, "batch": 4}.items():
        clients.clear()
        rounds_on("other", plan_of(root, model={"norm": norm}, local={"epochs": 2}, rounds=2))
        assert set(clients) == {(waits, True)}


SLIPS = {
    "a tensor of the CPU": lambda gradient: gradient + torch.zeros(len(gradient)),
    "a generator of the CPU": lambda gradient: gradient.clone().normal_(generator=torch.Generator()),
    "an array of numpy": lambda gradient: gradient * float(np.isfinite(gradient.detach().numpy()).all()),
}


@pytest.mark.parametrize("name", SLIPS)
def test_a_slip_in_a_step_is_noticed(name, root, on_device):
    method = Method("probe", grads=lambda inner, _: lambda params, batch: SLIPS[name](inner(params, batch)))
    with on_device("cpu"):
        server_with(root, method).run_round(0)
    with on_device("other"), pytest.raises(RaysimError, match=r"one device|generator of the device|no numpy array"):
        server_with(root, method).run_round(0)


def test_a_buffer_that_is_left_behind_is_noticed(root, rounds_on, monkeypatch):
    bind = BoundModel._bind

    def left_behind(model):
        bind(model)
        for leaf in model.layout.buffers:
            owner = model.module.get_submodule(leaf.layer)
            name = leaf.name.rpartition(".")[2]
            owner._buffers[name] = owner._buffers[name].cpu()

    monkeypatch.setattr(BoundModel, "_bind", left_behind)
    plan = plan_of(root, model={"norm": "batch"}, rounds=1)
    with pytest.raises(RaysimError, match="expected all tensors on one device"):
        rounds_on("other", plan)


def test_a_stale_copy_is_noticed(root, rounds_on, monkeypatch):
    """The start of a client is copied to the device once and kept: a result, but not the CPU's."""
    load, first = BoundModel.load, {}

    def stale(model, state, counters=None):
        kept = first.setdefault(model.device.type, state.clone())
        load(model, state if model.device.type == "cpu" else kept, counters)

    monkeypatch.setattr(BoundModel, "load", stale)
    plan = plan_of(root, rounds=2)
    assert outcome(rounds_on, "other", plan) != outcome(rounds_on, "cpu", plan)


def test_a_stream_of_the_device_that_is_not_seeded_is_noticed(root, rounds_on, monkeypatch):
    plan = plan_of(root, model={"name": "vit", "dim": 16, "depth": 1, "heads": 2, "patch": 4, "dropout": 0.5}, rounds=1)
    expected = outcome(rounds_on, "cpu", plan)
    assert outcome(rounds_on, "other", plan) == expected
    monkeypatch.setattr(Module, "manual_seed", lambda *_: None)
    assert outcome(rounds_on, "other", plan) != expected


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("name", ["cnn", "lenet"])
def test_a_step_takes_hardly_more_operations_than_a_bare_loop(name, momentum, root, rounds_on, on_device, monkeypatch):
    """Operations are launches of kernels on a card, which bound a small network's step."""
    counts, local_step = [], local.local_step

    def counted(*given):
        step, each = local_step(*given), []
        counts.append(each)

        def call(batch):
            each.append(OtherDevice.num_operations)
            step(batch)

        return call

    monkeypatch.setattr(local, "local_step", counted)
    network = {"model": {"name": "lenet"}, "data": {"resize": 32}} if name == "lenet" else {}
    plan = plan_of(root, local={"epochs": 3, "momentum": momentum}, rounds=1, **network)
    server, _ = rounds_on("other", plan)
    steps = [(each[-1] - each[0]) / (len(each) - 1) for each in counts if len(each) > 2]
    trainer = server.pool._trainer
    with on_device("other"):
        examples = max((trainer.data.client(client) for client in range(12)), key=len)
        pixels = trainer.transform(examples.inputs)  # as large as the network's, resized once
        bare = operations_of_a_bare_step(trainer.build(seed=0), pixels, examples.targets, momentum=momentum)
    assert sum(steps) / len(steps) <= 1.2 * bare


def operations_of_a_bare_step(module, inputs, targets, *, momentum, batch_size=16, epochs=3):
    """Operations a step of the loop that everybody writes: an epoch's order, a batch, forward, backward, SGD."""
    module.to("other").train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=momentum, foreach=True)
    steps, total, began = 0, torch.zeros((), device="other"), OtherDevice.num_operations
    for _ in range(epochs):
        order = torch.randperm(len(targets)).to("other")
        for rows in order.split(batch_size):
            loss = torch.nn.functional.cross_entropy(module(inputs[rows]), targets[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
            steps += 1
    return (OtherDevice.num_operations - began) / steps
