"""The local loop: batches, steps, optimisers, and the short way for plain SGD."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from torch import nn

from raysim.config import parse_config
from raysim.core.layout import layout_of
from raysim.core.method import Batch
from raysim.core.seeding import torch_generator
from raysim.plan.build import local_settings
from raysim.training import local
from raysim.training.evaluate import evaluate, joined_slices
from raysim.training.inputs import Examples, InputTransform, passes
from raysim.training.local import LocalSettings, batch_bounds, num_local_steps, train_locally, training_batches
from raysim.training.model import BoundModel
from raysim.training.tasks import CLASSES, cross_entropy
from tests.support.federations import plan_of


def examples(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (count, 6, 6, 1), generator=generator, dtype=torch.uint8)
    images[:, 0, 0, 0] = torch.arange(count)  # tells them apart
    return Examples(images, torch.randint(3, (count,), generator=generator))


def bound(norm=True):
    torch.manual_seed(1)
    middle = [nn.BatchNorm2d(3)] if norm else []
    module = nn.Sequential(nn.Conv2d(1, 3, 3), *middle, nn.ReLU(), nn.Flatten(), nn.Linear(48, 3))
    head = str(len(module) - 1)
    return BoundModel(module, layout_of(module, head=head, channels_last=True), head=head)


def test_local_settings_cannot_be_changed_by_who_is_shown_them():
    """All clients of a trainer share them: what one changed would depend on who was trained before."""
    with pytest.raises(FrozenInstanceError):
        LocalSettings(lr=0.1).lr = 1.0


def test_last_short_batch_is_kept_and_one_example_is_skipped_under_batch_norm():
    assert batch_bounds(9, 4, skip_single=False) == [(0, 4), (4, 8), (8, 9)]
    assert batch_bounds(9, 4, skip_single=True) == [(0, 4), (4, 8)]
    assert batch_bounds(10, 4, skip_single=True) == [(0, 4), (4, 8), (8, 10)]
    assert batch_bounds(1, 4, skip_single=True) == []


@pytest.mark.parametrize(
    ("options", "count", "steps"),
    [
        ({"epochs": 2}, 9, 6),
        ({"epochs": 0.5}, 16, 2),
        ({"epochs": 0.01}, 16, 1),
        ({"epochs": 1.25}, 16, 5),
        ({"steps": 7}, 9, 7),
        ({"steps": 0}, 9, 0),
    ],
)
def test_number_of_steps_and_what_is_drawn(options, count, steps):
    settings = LocalSettings(lr=0.1, batch_size=4, **options)
    assert num_local_steps(count, settings, skip_single=False) == steps
    batches = training_batches(
        examples(count), InputTransform(), settings, num_steps=steps, generator=torch_generator(5), skip_single=False
    )
    drawn = [(batch.inputs[:, 0, 0, 0] * 255).round().int().tolist() for batch in batches]
    assert len(drawn) == steps
    per_epoch = math.ceil(count / 4)
    for first in range(0, steps, per_epoch):
        epoch = drawn[first : first + per_epoch]
        seen = [i for batch in epoch for i in batch]
        assert len(seen) == len(set(seen))
        if len(epoch) == per_epoch:
            assert sorted(seen) == list(range(count))


def test_one_client_under_batch_norm_takes_no_step_on_one_example():
    assert num_local_steps(1, LocalSettings(lr=0.1), skip_single=True) == 0
    model = bound()
    before = model.state.clone()
    steps, loss = run(model, LocalSettings(lr=0.1), examples(1))
    assert (steps, torch.equal(model.state, before)) == (0, True)
    assert math.isnan(loss)


def run(model, settings, data, gradient=None, seed=3):
    return train_locally(
        model,
        cross_entropy,
        gradient,
        data,
        InputTransform(channels_last=True),
        settings,
        lr=settings.lr,
        generator=torch_generator(seed),
    )


def test_gathering_several_batches_at_once_changes_no_bit(monkeypatch):
    digests = []
    for entries in (1, 100, 10**6):
        monkeypatch.setattr(local, "GATHER_ENTRIES", entries)
        model = bound()
        run(model, LocalSettings(lr=0.1, epochs=2, batch_size=5), examples(23))
        digests.append(model.state.clone())
    assert all(torch.equal(digests[0], other) for other in digests)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("channels", [1, 3])
def test_batches_of_several_epochs_are_those_of_a_naive_loop_bit_for_bit(channels, channels_last):
    data, settings = examples(23), LocalSettings(lr=0.1, epochs=2.5, batch_size=5)
    data = Examples(data.inputs.repeat(1, 1, 1, channels), data.targets)
    transform = InputTransform((0.3,), (0.2,), channels_last=channels_last, crop=(5, 4))
    options = {"num_steps": 13, "skip_single": False}
    got = list(training_batches(data, transform, settings, generator=torch_generator(5), **options))
    generator = torch_generator(5)
    orders = [torch.randperm(23, generator=generator).split(5) for _ in range(3)]
    for batch, rows in zip(got, [rows for order in orders for rows in order][:13], strict=True):
        want = transform(data.inputs[rows])
        assert torch.equal(batch.inputs, want)
        assert batch.inputs.stride() == want.stride()  # kernels choose by it, and so bits do
        assert torch.equal(batch.targets, data.targets[rows])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"weight_decay": 0.1},
        {"momentum": 0.5, "weight_decay": 0.1},
        {"optimizer": "adamw", "weight_decay": 0.1},
    ],
)
@pytest.mark.parametrize("hooked", [False, True])
def test_steps_equal_torchs_optimizer_bit_for_bit(options, hooked):
    settings = LocalSettings(lr=0.05, epochs=2, batch_size=5, **options)
    data = examples(23)
    model = bound()
    gradient = model.gradient_function(cross_entropy) if hooked else None
    steps, loss = run(model, settings, data, gradient)

    plain = bound().module
    kind = torch.optim.AdamW if settings.optimizer == "adamw" else torch.optim.SGD
    extra = {k: v for k, v in options.items() if k != "optimizer"}
    optimizer = kind(plain.parameters(), lr=0.05, **extra)
    losses = []
    batches = training_batches(
        data,
        InputTransform(channels_last=True),
        settings,
        num_steps=steps,
        generator=torch_generator(3),
        skip_single=True,
    )
    for batch in batches:
        optimizer.zero_grad()
        value = nn.functional.cross_entropy(plain(batch.inputs), batch.targets)
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    for name, want in plain.state_dict().items():
        assert torch.equal(model.module.state_dict()[name], want), name
    assert loss == pytest.approx(sum(losses) / steps, rel=1e-6)
    assert all(p.grad is not None and p.grad._base is not None for p in model.module.parameters())


def test_learning_rate_decays_by_round():
    assert LocalSettings(lr=0.5, lr_decay=0.9).lr_of(3) == pytest.approx(0.5 * 0.9**3)


def test_learning_rate_follows_its_schedule():
    constant, cosine = (LocalSettings(lr=0.5, schedule=name, num_rounds=8) for name in ("constant", "cosine"))
    assert [constant.lr_of(t) for t in range(8)] == [0.5] * 8
    want = [0.25 * (1 + math.cos(math.pi * t / 8)) for t in range(8)]
    assert [cosine.lr_of(t) for t in range(8)] == pytest.approx(want)
    assert cosine.lr_of(0) == 0.5
    assert cosine.lr_of(4) == pytest.approx(0.25)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
    for t in range(8):
        assert cosine.lr_of(t) == pytest.approx(theirs.get_last_lr()[0], rel=1e-6)
        optimizer.step()
        theirs.step()
    assert 0 < cosine.lr_of(8) < 1e-12  # a phase after the last round: methods may divide by it


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_schedule_without_decay_refuses_one(schedule):
    _, faults = parse_config({"local": {"schedule": schedule, "lr_decay": 0.9}})
    assert [fault.key for fault in faults] == ["local.lr_decay"]
    assert "applies with local.schedule exponential" in faults[0].message
    assert not parse_config({"local": {"schedule": schedule}})[1]


def test_a_runs_cosine_ends_with_its_rounds(root):
    settings = local_settings(plan_of(root, rounds=4, local={"schedule": "cosine", "lr": 0.2}).config)
    assert settings.lr_of(2) == pytest.approx(0.1)


def test_gradient_at_another_point_leaves_the_model_alone():
    model = bound()
    data = examples(8)
    batch = Batch(InputTransform()(data.inputs), data.targets)
    before, other = model.state.clone(), torch.randn_like(model.params)
    far = model.gradient(cross_entropy, other, batch)
    assert torch.equal(model.state, before)
    inner = model.gradient_function(cross_entropy)
    assert torch.equal(inner(other, batch), far)
    assert torch.equal(model.params, before[: model.params.numel()])
    outputs = model.apply(other, batch.inputs)
    assert outputs.logits.shape == (8, 3)
    assert torch.equal(model.params, before[: model.params.numel()])


def test_a_gradient_elsewhere_is_a_copy_and_leaves_the_own_one():
    model = bound()
    data = examples(8)
    batch = Batch(InputTransform()(data.inputs), data.targets)
    model.module.eval()
    own = model.gradient_function(cross_entropy)(model.params, batch).clone()
    far = model.gradient(cross_entropy, model.params + torch.randn_like(model.params), batch)
    assert torch.equal(model.grad, own)
    assert far.data_ptr() != model.grad.data_ptr()
    assert not torch.equal(far, own)


def test_counters_that_are_not_given_begin_at_zero():
    model = bound()
    (name,) = model.counters
    for given, count in (({name: 3}, 3), (None, 0), ({name: 2}, 2), ({}, 0)):
        model.load(model.state.clone(), given)
        assert int(model.counters[name]) == count


def test_statistics_follow_the_trained_path_only():
    model = bound()
    data = examples(8)
    batch = Batch(InputTransform()(data.inputs), data.targets)
    model.module.train()
    before = model.buffers.clone()
    inner = model.gradient_function(cross_entropy)
    inner(model.params.clone(), batch)
    assert torch.equal(model.buffers, before)
    assert [int(counter) for counter in model.counters.values()] == [0]
    model.gradient(cross_entropy, model.params, batch)
    model.apply(model.state, batch.inputs)
    assert torch.equal(model.buffers, before)
    model.gradient(cross_entropy, model.params, batch, moves_buffers=True)
    moved = model.buffers.clone()
    assert not torch.equal(moved, before)
    assert [int(counter) for counter in model.counters.values()] == [1]
    model.buffers.copy_(before)
    inner(model.params, batch)
    assert torch.equal(model.buffers, moved)


@pytest.mark.parametrize("hooked", [False, True])
def test_a_loss_may_ask_for_another_gradient(hooked):
    data, settings = examples(23), LocalSettings(lr=0.05, batch_size=5)
    plain, model = bound(norm=False), bound(norm=False)
    far = torch.randn_like(model.params)

    def loss(outputs, batch):
        model.gradient(cross_entropy, far, batch)
        return cross_entropy(outputs, batch)

    step = local.local_step(model, loss, model.gradient_function(loss) if hooked else None, settings, settings.lr)
    plain_step = local.local_step(plain, cross_entropy, None, settings, settings.lr)
    for _ in range(2):
        step(Batch(InputTransform()(data.inputs), data.targets))
        plain_step(Batch(InputTransform()(data.inputs), data.targets))
    assert torch.equal(model.params, plain.params)


def test_a_loss_may_run_the_model_elsewhere_before_the_backward_pass():
    model = bound()
    data = examples(8)
    batch = Batch(InputTransform()(data.inputs), data.targets)
    other = torch.randn_like(model.state).abs()
    model.module.train()
    want = model.gradient_function(cross_entropy)(model.params, batch).clone()
    moved = model.buffers.clone()
    found = []

    def loss(outputs, batch):
        found.append(model.apply(other, batch.inputs).logits)
        return cross_entropy(outputs, batch)

    model = bound()
    model.module.train()
    assert torch.equal(model.gradient_function(loss)(model.params, batch), want)
    assert torch.equal(model.buffers, moved)
    assert model.module.training
    model.load(other)
    model.module.eval()
    with torch.no_grad():
        assert torch.equal(found[0], model.forward(batch.inputs).logits)


def test_overrides_hold_inside_the_block_only():
    model = bound(norm=False)
    x = InputTransform()(examples(4).inputs)
    want = model.forward(x).logits
    with model.overridden({"0": lambda layer, x: type(layer).forward(layer, x) * 0}):
        assert not torch.equal(model.forward(x).logits, want)
    assert torch.equal(model.forward(x).logits, want)


def test_passes_cover_everything_and_never_end_with_one_example():
    data = examples(9)
    sizes = [len(batch.targets) for batch in passes(data, InputTransform(), 4)]
    assert sizes == [4, 5]
    assert [len(batch.targets) for batch in passes(examples(1), InputTransform(), 4)] == [1]


def test_slices_of_an_evaluation_join():
    model, data = bound(), examples(50)
    whole = evaluate(model, data, InputTransform(), keeps_logits=True)
    parts = [
        evaluate(model, Examples(data.inputs[a:b], data.targets[a:b]), InputTransform(), keeps_logits=True)
        for a, b in ((0, 20), (20, 50))
    ]
    total = joined_slices(parts)
    assert (total.columns["predictions"] == whole.columns["predictions"]).all()
    assert (total.labels == data.targets.numpy()).all()
    assert np.allclose(total.logits, whole.logits, rtol=1e-4, atol=1e-6)
    assert np.allclose(total.columns["confidences"], torch.from_numpy(whole.logits).softmax(1).amax(1), rtol=1e-4)
    assert total.mean_loss == pytest.approx(whole.mean_loss, rel=1e-5)
    assert evaluate(model, data, InputTransform()).logits is None
    model.module.eval()
    with torch.no_grad():
        predicted = model.module(InputTransform()(data.inputs)).argmax(1)
    assert CLASSES.values(whole.columns).mean() == int((predicted == data.targets).sum()) / 50
