"""CCVR: pooled moments, drawing, training the head, and what it leaves alone."""

from __future__ import annotations

import math
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from methods.ccvr import ccvr, cosine_rates, draw_features, pooled_moments, train_head
from methods.moments import class_covariances, class_means, linear_head, pack_symmetric, unpack_symmetric
from raysim.base.errors import ConfigError
from raysim.core.layout import layout_of
from raysim.core.seeding import torch_generator
from tests.support.federations import lora_plan, plan_of, run, server_on
from tests.twins.federation import assert_close

FEW = {"test": 0.6}
D = 5


def clients(sizes=((4, 1, 0), (9, 1, 1), (1, 3, 0))):
    """[(features, labels)] of three clients, with counts per class; one-sample and absent classes included."""
    generator = torch_generator(0)
    sets = []
    for counts in sizes:
        labels = torch.cat([torch.full((n,), c) for c, n in enumerate(counts)])
        shift = 10 * torch.randn(1, D, generator=generator)  # far from zero: what cancels badly
        sets.append((torch.randn(len(labels), D, generator=generator) + labels[:, None] + shift, labels))
    return sets


def statistics(sets, correction=1):
    counts = torch.stack([torch.bincount(y, minlength=3) for _, y in sets])
    means = torch.stack([class_means(z, y, 3) for z, y in sets]).nan_to_num(0.0)
    covariances = torch.stack([unpack_symmetric(class_covariances(z, y, 3), D) for z, y in sets])
    if correction == 0:
        covariances = covariances * ((counts - 1).clamp_min(0) / counts.clamp_min(1))[..., None, None]
    return counts, means, covariances


def test_pooled_moments_are_those_of_all_features_together():
    sets = clients()
    total, mean, covariance = pooled_moments(*statistics(sets))
    values, labels = torch.cat([z for z, _ in sets]).double(), torch.cat([y for _, y in sets])
    for label in range(2):
        own = values[labels == label]
        assert int(total[label]) == len(own)
        assert torch.allclose(mean[label], own.mean(0), atol=1e-12)
        assert torch.allclose(covariance[label], torch.cov(own.T), atol=1e-11)
    assert torch.allclose(mean[2], values[labels == 2][0], atol=1e-12)
    assert not covariance[2].any()  # one sample
    assert bool(torch.isfinite(covariance).all())


def test_biased_local_covariances_do_not_pool():
    sets = clients()
    values, labels = torch.cat([z for z, _ in sets]).double(), torch.cat([y for _, y in sets])
    own = torch.cov(values[labels == 0].T)
    assert not torch.allclose(pooled_moments(*statistics(sets, correction=0))[2][0], own, atol=1e-2)


def test_one_client_with_everything_keeps_its_covariance():
    counts, means, covariances = statistics(clients()[1:2])
    _, mean, covariance = pooled_moments(counts, means, covariances)
    assert torch.allclose(covariance, covariances[0], atol=1e-12)
    assert torch.equal(mean, means[0])


def test_what_a_client_says_of_the_spread_of_at_most_one_example_does_not_count():
    counts, means, covariances = statistics(clients())
    expected = pooled_moments(counts, means, covariances)
    means[counts == 0], covariances[counts <= 1] = 7.0, 9.0
    for got, want in zip(pooled_moments(counts, means, covariances), expected, strict=True):
        assert torch.allclose(got, want, atol=1e-12)


def test_symmetric_matrices_pack_and_unpack():
    matrix = torch.randn(2, 3, 4, 4)
    matrix = matrix + matrix.mT
    assert pack_symmetric(matrix).shape == (2, 3, 10)
    assert torch.equal(unpack_symmetric(pack_symmetric(matrix), 4), matrix)


def test_drawn_features_have_the_moments_even_of_deficient_rank():
    direction = torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64)
    covariance = torch.outer(direction, direction)[None, None]
    mean = torch.tensor([[[1.0, 0.0, -3.0]]], dtype=torch.float64)
    values, labels = draw_features(torch.tensor([[7]]), mean, covariance, torch.tensor([20_000]), torch_generator(1))
    assert values.shape == (20_000, 3)
    assert not labels.any()
    assert torch.allclose(values.mean(0), mean[0, 0].float(), atol=0.05)
    assert torch.allclose(torch.cov(values.T), covariance[0, 0].float(), atol=0.1)
    assert torch.allclose(values[:, 2], torch.tensor(-3.0), atol=1e-5)


def test_single_examples_are_drawn_as_they_are_and_absent_classes_not_at_all():
    counts, means, covariances = pooled_moments(*statistics(clients()))
    counts[0] = 0
    values, labels = draw_features(
        counts[None], means[None], covariances[None], torch.full((3,), 6), torch_generator(0)
    )
    assert torch.bincount(labels, minlength=3).tolist() == [0, 6, 6]
    assert torch.equal(values[labels == 2], means[2].float().expand(6, -1))
    nobody, none = draw_features(
        0 * counts[None], means[None], covariances[None], torch.full((3,), 6), torch_generator(0)
    )
    assert len(nobody) == len(none) == 0


def test_a_mixture_draws_each_client_in_proportion_to_its_counts():
    means = torch.tensor([[[0.0]], [[100.0]]], dtype=torch.float64)
    variances = torch.ones(2, 1, 1, dtype=torch.float64)
    values, _ = draw_features(torch.tensor([[30], [10]]), means, variances, torch.tensor([8000]), torch_generator(2))
    assert float((values < 50).double().mean()) == pytest.approx(0.75, abs=0.02)
    assert float(values[values < 50].std()) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("is_normalised", [False, True])
def test_head_is_trained_as_torch_would(is_normalised):
    generator = torch_generator(3)
    values, labels = torch.randn(20, D, generator=generator), torch.randint(3, (20,), generator=generator)
    torch.manual_seed(3)
    head = nn.Linear(D, 3)
    got = train_head(
        list(head.parameters()), [(values, labels)] * 3, rates=cosine_rates(0.1, 3), momentum=0.9, batch_size=8,
        is_normalised=is_normalised, generator=torch_generator(4),
    )  # fmt: skip
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
    annealing = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
    order = torch_generator(4)
    for _ in range(3):
        for rows in torch.randperm(20, generator=order).split(8):
            logits = head(values[rows])
            logits = F.normalize(logits) / 0.1 if is_normalised else logits
            optimizer.zero_grad()
            F.cross_entropy(logits, labels[rows]).backward()
            optimizer.step()
        annealing.step()
    for value, parameter in zip(got, head.parameters(), strict=True):
        assert_close(value, parameter, 1e-4)  # logits of norm 1 over 0.1 magnify rounding


# --- the loop of fed-mammoth ------------------------------------------------------------------------------------------


def mammoth_head(weight, bias, counts, means, variances, *, num_samples, epochs, lr, momentum, generator):
    """What LIVAR's framework does to the averaged head after a round, in float64, example by example where it draws.

    counts: [client][class]; means, variances: [client][class] vectors of length d.
    """
    weight, bias = weight.double().clone(), bias.double().clone()
    velocity = [torch.zeros_like(weight), torch.zeros_like(bias)]
    classes = len(bias)
    for epoch in range(epochs):
        rate = lr * 0.5 * (1 + math.cos(math.pi * epoch / epochs))
        sizes = [0] * classes
        equal = torch.ones(classes)
        for drawn in torch.multinomial(equal, num_samples * classes, replacement=True, generator=generator).tolist():
            sizes[drawn] += 1
        data, targets = [], []
        for label in range(classes):
            holders = [k for k in range(len(counts)) if counts[k][label] > 1]  # one example has no variance
            if not holders or not sizes[label]:
                continue
            share = torch.zeros(len(counts), dtype=torch.float64)
            for k in holders:
                share[k] = counts[k][label]
            chosen = torch.multinomial(share, sizes[label], replacement=True, generator=generator)
            noise = torch.randn(sizes[label], weight.shape[1], dtype=torch.float64, generator=generator)
            for k in holders:
                factor = torch.linalg.cholesky(torch.diag(variances[k][label].double() + 1e-8))
                for row in noise[chosen == k]:
                    data.append(means[k][label].double() + factor @ row)
                    targets.append(label)
        order = torch.randperm(len(data), generator=generator).tolist()
        data, targets = [data[i] for i in order], [targets[i] for i in order]
        for step in range(classes):
            batch = range(step * num_samples, min((step + 1) * num_samples, len(data)))
            grads = [torch.zeros_like(weight), torch.zeros_like(bias)]
            for i in batch:
                logits = weight @ data[i] + bias
                length = logits.norm()
                wrong = (logits / length / 0.1).softmax(0)
                wrong[targets[i]] -= 1
                # Through the division by the length: only what is across the logits changes their direction.
                wrong = (wrong - logits * (wrong @ logits) / length**2) / length / 0.1
                grads[0] += torch.outer(wrong, data[i]) / len(batch)
                grads[1] += wrong / len(batch)
            for parameter, v, g in zip((weight, bias), velocity, grads, strict=True):
                v.mul_(momentum).add_(g)
                parameter -= rate * v
    return weight, bias


@pytest.mark.parametrize("missing", [0, 2])
def test_calibration_as_in_fed_mammoth_is_its_loop(missing):
    """Classes that nobody has two examples of leave short and empty batches at the end of an epoch."""
    generator = torch_generator(6)
    counts = torch.randint(2, 9, (3, 5), generator=generator)
    counts[0, 1], counts[2, 3] = 1, 0
    counts[:, :missing] = 1
    means = torch.randn(3, 5, D, dtype=torch.float64, generator=generator)
    variances = torch.rand(3, 5, D, generator=generator)
    head = nn.Linear(D, 5)
    layout = layout_of(nn.Sequential(OrderedDict(body=nn.Linear(2, D), head=head)), head="head")
    start = torch.randn(layout.num_params, generator=generator)
    server = SimpleNamespace(
        layout=layout, start=start, generator=torch_generator(7),
        report={"counts": counts, "means": means, "covariances": variances},
    )  # fmt: skip
    options = {"num_samples": 16, "epochs": 4, "lr": 0.05, "momentum": 0.8}
    update = torch.randn(layout.num_params, generator=generator)
    changed, _ = ccvr(as_in="fed-mammoth", **options).server_update(update, {}, server)
    before, after = layout.views(start + update), layout.views(start + changed)
    want = mammoth_head(
        before["head.weight"], before["head.bias"], counts.tolist(), means, variances, generator=torch_generator(7),
        **options,
    )  # fmt: skip
    for name, value in zip(("head.weight", "head.bias"), want, strict=True):
        moved = (value - before[name]).abs().max()
        assert moved > 0.1
        assert (after[name] - value).abs().max() < 1e-4 * moved, name  # float32 beside float64, 20 steps
    assert torch.equal(update[: layout.by_name["head.weight"].offset], changed[: layout.by_name["head.weight"].offset])


def test_nothing_to_draw_leaves_the_head():
    for num_batches in (None, 3):
        head = [torch.ones(3, D)]
        nothing = [(torch.zeros(0, D), torch.zeros(0, dtype=torch.int64))] * 2
        (got,) = train_head(
            head, nothing, rates=[1.0, 1.0], momentum=0.9, batch_size=4, num_batches=num_batches,
            is_normalised=True, generator=torch_generator(0),
        )  # fmt: skip
        assert torch.equal(got, head[0])


def test_an_epoch_in_which_nothing_was_drawn_is_passed_over():
    nothing = (torch.zeros(0, D), torch.zeros(0, dtype=torch.int64))
    drawn = (torch.randn(6, D, generator=torch_generator(0)), torch.tensor([0, 1, 2, 0, 1, 2]))
    got, want = (
        train_head(
            [torch.ones(3, D)],
            sets,
            rates=[0.1] * len(sets),
            momentum=0.9,
            batch_size=4,
            is_normalised=False,
            generator=torch_generator(1),
        )
        for sets in ([nothing, drawn, nothing, drawn], [drawn, drawn])
    )
    assert torch.equal(got[0], want[0])
    assert not torch.equal(got[0], torch.ones(3, D))


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_the_phase_changes_the_head_only_and_helps(norm, root):
    groups = {"model": {"norm": norm}, "data": FEW}
    before = run(plan_of(root, **groups), root)
    after = run(plan_of(root, ["ccvr"], **groups), root)
    mine, theirs = (server.layout.views(server.state) for server in (after, before))
    assert {name for name in mine if not torch.equal(mine[name], theirs[name])} == {"fc2.weight", "fc2.bias"}
    assert after.evaluate()["server/loss"] < before.evaluate()["server/loss"] - 0.005


@pytest.mark.parametrize("as_in", [None, "fed-mammoth"])
def test_no_epoch_is_no_calibration(as_in, root):
    plan = plan_of(root, [{"ccvr": {"epochs": 0, "as_in": as_in}}], data=FEW)
    got, want = (server.layout.views(server.state) for server in (run(plan, root), run(plan_of(root, data=FEW), root)))
    for name, value in got.items():
        assert torch.allclose(value, want[name], atol=1e-6), name  # start + (new - start) rounds


def test_reported_statistics_pool_to_those_of_the_final_model(root):
    plan = plan_of(root, ["ccvr", "tests.support.toys:spy"], data=FEW)
    server = run(plan, root, rounds=3)
    images, found = server.pool._trainer, []
    model = images.model
    model.load(server.state)
    for client in range(12):
        pixels, labels = images.data.federation.client(client)
        examples = images.data._examples(pixels, labels)
        found.append((model.apply(model.params, images.transform(examples.inputs)).features, examples.targets))
    record = server.run_round(3)
    assert record.metrics["comm/up_mb"] * 1e6 == pytest.approx(
        12 * (plan.layout.shared_bytes + 10 * (8 + 16 * 8 + 16 * 17 // 2 * 4))
    )
    values, labels = torch.cat([z for z, _ in found]).double(), torch.cat([y for _, y in found])
    counts = torch.stack([torch.bincount(y, minlength=10) for _, y in found])
    means = torch.stack([class_means(z, y, 10) for z, y in found]).nan_to_num(0.0)
    packed = torch.stack([class_covariances(z, y, 10) for z, y in found]).float().double()
    _, mean, covariance = pooled_moments(counts, means, unpack_symmetric(packed, 16))
    for label in range(10):
        own = values[labels == label]
        assert torch.allclose(mean[label], own.mean(0), atol=1e-10)
        assert torch.allclose(covariance[label], torch.cov(own.T), rtol=1e-6, atol=1e-6)


def test_calibration_in_every_round_is_broadcast(root):
    groups = {"data": FEW, "cohort": {"size": 4}}
    plan = lora_plan(root, ["livar", {"ccvr": {"as_in": "fed-mammoth", "epochs": 1}}], **groups)
    plain = lora_plan(root, ["livar"], **groups)
    assert plan.num_rounds == plain.num_rounds == 3
    first, second = server_on(plan, root), server_on(plain, root)
    for server in (first, second):
        server.run_round(0)
    mine, theirs = (server.layout.views(server.state) for server in (first, second))
    assert {name for name in mine if not torch.equal(mine[name], theirs[name])} == {"head.weight", "head.bias"}


def test_a_head_that_is_not_shared_is_refused(root):
    for methods, words in (
        (["tests.support.toys:personal_head", "ccvr"], "ccvr claims weights:fc2"),
        (["tests.support.toys:personal_head", {"ccvr": {"as_in": "fed-mammoth"}}], "trained and shared"),
    ):
        with pytest.raises(ConfigError, match=words):
            plan_of(root, methods)


def test_a_batch_may_be_one_drawn_feature():
    assert ccvr(batch_size=1).name == "ccvr"


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_head_may_have_no_bias(bias):
    layout = layout_of(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=bias)), head="1")
    assert [leaf.name for leaf in linear_head(layout, "ccvr")] == ["1.weight", "1.bias"][: 1 + bias]
