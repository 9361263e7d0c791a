"""Mixing before robust rules: naive twins through the engine, and what it does for a rule."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from methods.fedavgm import fedavgm
from methods.mixing import RULES, nnm
from methods.robust_means import coordinate_median
from raysim.base.errors import ConfigError
from raysim.core.method import Method
from raysim.core.seeding import derive_seed, torch_generator
from raysim.core.stack import Stack
from tests.methods.test_robust import TWINS
from tests.support.federations import plan_of, probe, server_with, updates_of
from tests.twins import robust

SIZE = 9
OPTIONS = {**TWINS, "trimmed_mean": {"trim": 1}, "krum": {"attackers": 1, "select": 2}, "bulyan": {"attackers": 0}}


def nearest_means(rows, attackers):
    """NNM with loops: Allouah et al. 2023, algorithm 2."""
    means = []
    for row in rows:
        order = sorted(range(len(rows)), key=lambda k: (np.sum((rows[k] - row) ** 2), k))
        means.append(np.mean([rows[k] for k in order[: len(rows) - attackers]], axis=0))
    return np.array(means)


def bucket_means(rows, order, size):
    """Karimireddy et al. 2022, algorithm 1, the buckets one after the other."""
    buckets = [order[start : start + size] for start in range(0, len(order), size)]
    return np.array([np.mean([rows[k] for k in bucket], axis=0) for bucket in buckets])


def expected(rule, rows, masks):
    equal = [1] * len(rows)
    return {
        "coordinate_median": lambda: robust.coordinate_median(rows),
        "trimmed_mean": lambda: robust.trimmed_mean(rows, 1),
        "bulyan": lambda: robust.bulyan(rows, 0),
        "krum": lambda: robust.krum(rows, 1, 2),
        "geometric_median": lambda: robust.geometric_median(rows, equal, 4, 1e-6),
        "centered_clipping": lambda: robust.centered_clipping(rows, np.zeros(rows.shape[1]), 0.05, 3),
        "clustering": lambda: robust.clustering(rows),
        "dnc": lambda: robust.dnc(rows, masks, 2),
    }[rule]()


def attacked(root, methods):
    """A server after a round in which three of nine clients sent the tenfold, turned around, and its move and updates."""

    def outgoing(update, client):
        return update._replace(values=-10 * update.values) if client.id % 3 == 2 else update

    groups = {"partition": {"scheme": "iid", "num_clients": SIZE}, "cohort": {"size": SIZE}, "model": {"norm": "batch"}}
    server = server_with(root, probe(outgoing=outgoing), methods, **groups)
    before, size = server.state.clone(), server.layout.num_params
    server.run_round(0)
    rows = torch.stack([*updates_of(server).values()]).double().numpy()
    return server, (server.state - before).numpy(), rows[:, :size], rows[:, size:]


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize("mix", ["nnm", "bucketing"])
def test_rule_behind_a_mixing_is_the_naive_rule_of_naive_mixtures(root, mix, rule):
    server, moved, rows, buffers = attacked(root, [{mix: {}}, {rule: OPTIONS[rule]}])
    generator = torch_generator(derive_seed(server.seed, f"server/{rule}", 0))
    if mix == "nnm":
        mixed, mixed_buffers = nearest_means(rows, 2), None  # a fifth of nine, rounded up
    else:
        order = torch.randperm(SIZE, generator=generator).tolist()
        mixed, mixed_buffers = bucket_means(rows, order, 2), bucket_means(buffers, order, 2)
        assert len(mixed) == 5
    masks = [(torch.rand(rows.shape[1], generator=generator) < 500 / rows.shape[1]).numpy() for _ in range(2)]
    update, weights = expected(rule, mixed, masks)
    np.testing.assert_allclose(moved[: rows.shape[1]], update, atol=3e-7, rtol=1e-4)
    if mixed_buffers is not None and server.phases[0].stack.methods[-1].weigh is not None:
        np.testing.assert_allclose(moved[rows.shape[1] :], weights @ mixed_buffers, atol=1e-6, rtol=1e-4)
    if (mix, rule) != ("bucketing", "clustering"):  # three buckets of two honest clients have the mean of the six
        assert np.abs(update - expected(rule, rows, masks)[0]).max() > 1e-5, "mixing must matter here"


def test_nearest_neighbour_mixing_brings_skewed_honest_updates_together(root):
    """Allouah et al. 2023: the honest mixtures lie within 8 f / (n - f) of the honest variance of the honest mean."""
    seen = []

    def weigh(weights, server):
        seen.append(torch.cat(server.map_columns(_block), dim=1).double().numpy())
        return weights

    rule = replace(probe(weigh=weigh), name="krum")
    outgoing = {"tests.methods.test_mixing:far": {}}
    groups = {"partition": {"scheme": "iid", "num_clients": 20}, "cohort": {"size": 20}}
    server = server_with(root, rule, [outgoing, {"nnm": {"attackers": 2}}, "coordinate_median"], **groups)
    server.run_round(0)
    rows = torch.stack([*updates_of(server).values()])[:, : server.layout.num_params].double().numpy()
    honest, mixed = rows[:18], seen[0][:18]
    np.testing.assert_allclose(seen[0], nearest_means(rows, 2), atol=1e-5)
    mean, variance = honest.mean(axis=0), honest.var(axis=0).sum()
    error = np.sum((mixed.mean(axis=0) - mean) ** 2) + mixed.var(axis=0).sum()
    assert error <= 8 * 2 / (20 - 2) * variance
    assert error < variance / 5


def _block(block, extra, shared):
    return block


def far():
    """Clients 18 and 19 send one vector, far from the other clients' draws."""

    def outgoing(update, client):
        draws = torch.randn(len(update.values), generator=torch_generator(client.id))
        return update._replace(values=torch.full_like(draws, 30.0) if client.id >= 18 else draws)

    return Method("far", outgoing=outgoing)


def test_mixing_leaves_methods_alone_that_are_no_rules_or_stand_before_it():
    rule, step = coordinate_median(), fedavgm()
    assert Stack([rule, nnm(), step]).methods[0] is rule
    assert Stack([nnm(), step]).methods[1] is step
    assert Stack([nnm(), rule]).methods[1] is not rule


def test_mixing_of_one_client_each_is_the_rule_itself(root):
    plain, alone = (attacked(root, [*before, "coordinate_median"])[1] for before in ([], [{"bucketing": {"size": 1}}]))
    np.testing.assert_array_equal(plain[:-10], alone[:-10])


@pytest.mark.parametrize("mix", ["nnm", "bucketing"])
@pytest.mark.parametrize("rule", ["krum", "coordinate_median"])
def test_mixing_in_a_round_of_nobody_leaves_the_model(root, nobody_comes, mix, rule):
    server = server_with(
        root, probe(), [mix, {rule: {"attackers": 0} if rule == "krum" else {}}], cohort={"sampling": "poisson"}
    )
    before = server.state.clone()
    server.run_round(0)
    assert torch.equal(server.state, before)


@pytest.mark.parametrize(
    ("methods", "text"),
    [
        (["nnm"], "nnm: has no rule to mix for; list one of bulyan"),
        (["krum", "nnm"], "nnm: has no rule to mix for"),
        (["bucketing", "norm_bounding"], "bucketing: has no rule to mix for"),
        (["bucketing", {"krum": {"attackers": 1}}], "krum: needs the updates of 5 clients at least, and a round has 4"),
        ([{"nnm": {"attackers": 1.5}}, "krum"], "attackers must be a whole number or a share"),
    ],
)
def test_mixing_is_refused_where_it_cannot_work(root, methods, text):
    with pytest.raises(ConfigError, match=text):
        plan_of(root, methods, cohort={"size": 7})
