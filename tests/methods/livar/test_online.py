"""LIVAR's table online: against dense products and every active set, its properties, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from methods.livar.merging import adapters_of, factors_of
from methods.livar.online import online_coefficients
from raysim.base.errors import ConfigError
from raysim.tuning.calibrate import plan_calibration
from tests.methods.livar.test_calibration import naive_minimum
from tests.support.federations import lora_plan, raw_config, run, server_on
from tests.twins.livar import FEW

ONLINE = {"livar": {"table": "online"}}


@pytest.fixture(scope="module")
def layout(root):
    return lora_plan(root).layout


def round_of(layout, updates, gradient, start=None, active=None):
    """A round at the server with these updates (K, num_params) and this validation gradient."""
    start = torch.zeros(layout.num_params) if start is None else start
    active = torch.ones(len(updates), dtype=torch.bool) if active is None else active
    logged = {}
    return SimpleNamespace(
        layout=layout, start=start, is_active=active, logged=logged, num_examples=torch.arange(1, len(updates) + 1),
        map_updates=lambda f, shared: [f(update, shared) for update in updates], gradient=gradient,
        log=lambda name, value, *_: logged.update({name: value}),
    )  # fmt: skip


def coefficients(server):
    shares = server.num_examples.double() * server.is_active
    shares = shares / shares.sum().clamp_min(1)
    return online_coefficients(factors_of(server), server, server.gradient, shares), shares


def draws(layout, count=4, seed=0, scale=0.1):
    generator = torch.Generator().manual_seed(seed)
    start, gradient = (torch.randn(layout.num_params, generator=generator) for _ in range(2))
    updates = scale * torch.randn(count, layout.num_params, generator=generator)
    # Towards the descent: in the space of so many numbers random directions are orthogonal.
    return start, updates - 0.05 * torch.rand(count, 1, generator=generator) * gradient, gradient


@pytest.mark.parametrize("seed", range(3))
def test_matches_dense_products_and_every_active_set(layout, seed):
    start, updates, gradient = draws(layout, seed=seed)
    got, shares = coefficients(round_of(layout, updates, gradient, start))
    for index, pair in enumerate(adapters_of(layout)):
        a, b, ga, gb = (layout.view(v, leaf).double() for v in (start, gradient) for leaf in (pair.a, pair.b))
        ends = [start.double() + update.double() for update in updates]
        products = [(layout.view(e, pair.b) @ layout.view(e, pair.a) - b @ a).numpy() for e in ends]
        down = -(gb @ a + b @ ga).numpy()
        target = down * np.sqrt(sum((p**2).sum() for p in products) / 4 / (down**2).sum())
        want = naive_minimum(products, target, 1e-6)
        want = shares.numpy() if max((p * down).sum() for p in products) <= 0 else want / want.sum()
        assert np.allclose(got[:, index].numpy(), want, atol=1e-6), pair.layer
    assert (got > 1e-3).sum(0).max() > 1  # not one client alone everywhere


def test_the_scale_of_the_loss_and_the_order_of_the_clients_do_not_count(layout):
    start, updates, gradient = draws(layout)
    first, _ = coefficients(round_of(layout, updates, gradient, start))
    for scale in (1e-6, 1e4):
        again, _ = coefficients(round_of(layout, updates, scale * gradient, start))
        assert torch.allclose(first, again, atol=1e-6)
    order = torch.tensor([2, 0, 3, 1])
    server = round_of(layout, updates[order], gradient, start)
    server.num_examples = server.num_examples[order]
    assert torch.allclose(coefficients(server)[0], first[order], atol=1e-9)


def test_like_clients_share_and_the_one_that_descends_has_all(layout):
    start, updates, gradient = draws(layout)
    same, _ = coefficients(round_of(layout, updates[:1].expand(3, -1), gradient, start))
    assert torch.allclose(same, torch.full_like(same, 1 / 3), atol=1e-6)
    steps = torch.stack([gradient, -gradient, gradient]) * 1e-4  # up, down, up
    alone, _ = coefficients(round_of(layout, steps, gradient, start))
    assert torch.allclose(alone, torch.tensor([0.0, 1.0, 0.0]).double()[:, None].expand_as(alone), atol=1e-5)


def test_without_a_descent_or_a_step_the_shares_hold(layout):
    start, updates, gradient = draws(layout, count=3)
    up = 1e-4 * torch.stack([gradient, 2 * gradient, 3 * gradient])
    for moved, direction in ((up, gradient), (updates, 0 * gradient), (updates, gradient * torch.nan)):
        server = round_of(layout, moved, direction, start)
        found, shares = coefficients(server)
        assert torch.equal(found, shares[:, None].expand_as(found))
        assert server.logged["regressed"] == 0
    active = torch.tensor([True, False, True])
    updates[1] = 0
    found, _ = coefficients(round_of(layout, updates, gradient, start, active))
    assert not found[1].any()
    assert torch.allclose(found.sum(0), torch.ones(found.shape[1]).double())
    nobody, _ = coefficients(round_of(layout, 0 * updates, gradient, start, torch.zeros(3, dtype=torch.bool)))
    assert not nobody.any()


@pytest.mark.slow
def test_a_run_merges_with_them_in_every_round(root):
    """The gradient is the one of a plain module; sums, logs and the head are LIVAR's."""
    plan = lora_plan(root, [ONLINE], cohort={"size": 4}, data={**FEW, "validation": 0.1})
    server = server_on(plan, root)
    for index in range(2):
        record = server.run_round(index)
        found = record.arrays["livar.coefficients"]
        assert np.allclose(found.sum(0), 1)
        assert (found >= 0).all()
        assert record.metrics["livar/regressed"] > 0
        assert "livar.importance_a" not in record.arrays
        assert np.isfinite(record.metrics["server/loss"])
    assert not np.allclose(found, found[:, :1])  # layer by layer
    table = run(lora_plan(root, ["livar"], cohort={"size": 4}, data={**FEW, "validation": 0.1}), root, rounds=1)
    assert not torch.equal(run(plan, root, rounds=1).state, table.state)


def test_what_cannot_work_is_refused(root):
    with pytest.raises(ConfigError, match="validation-set"):
        lora_plan(root, [ONLINE], data={**FEW, "validation": 0})
    with pytest.raises(ConfigError, match="taken at the global model"):
        lora_plan(root, [{"personal": {"layers": "head"}}, {"livar": {"table": "online", "components": "lora"}}])
    raw = raw_config(root, [ONLINE], rounds=1, model={"name": "vit", "dim": 16, "depth": 1, "heads": 2, "lora": {}})
    with pytest.raises(ConfigError, match="must begin with livar, which counts the importances"):
        plan_calibration(raw, "a test")
