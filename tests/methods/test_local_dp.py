"""Local differential privacy: the sent vector, the epsilon, and what may run beside it."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant

from methods.local_dp import local_dp
from raysim.base.errors import ConfigError
from raysim.core.method import Update
from raysim.core.seeding import torch_generator
from tests.support.federations import plan_of, run, server_on

LAYOUT = SimpleNamespace(zero_personal_=lambda vector: vector)


def sent(values, seed=0, memory=None, **options):
    client = SimpleNamespace(layout=LAYOUT, generator=torch_generator(seed), memory={} if memory is None else memory)
    return local_dp(**options).outgoing(Update(values, 4 * len(values)), client)


def test_without_noise_the_update_is_clipped():
    update = torch.tensor([3.0, 0.0, -4.0])
    assert sent(update, clip=1.0, noise=0).values.tolist() == pytest.approx([0.6, 0, -0.8])
    assert sent(update, clip=10.0, noise=0).values.tolist() == [3, 0, -4]
    assert sent(torch.zeros(3), noise=0).values.tolist() == [0, 0, 0]
    assert update.tolist() == [3, 0, -4]


def test_the_noise_has_the_length_that_the_options_say():
    noise = sent(torch.zeros(200_000), clip=0.5, noise=3.0).values
    assert float(noise.std()) == pytest.approx(1.5, rel=0.01)
    assert float(noise.mean()) == pytest.approx(0, abs=0.02)
    assert not torch.equal(noise, sent(torch.zeros(200_000), seed=1, clip=0.5, noise=3.0).values)


@pytest.mark.parametrize(("noise", "rounds"), [(2.0, 1), (5.0, 3), (20.0, 40)])
def test_epsilon_is_that_of_a_gaussian_mechanism_of_sensitivity_2_clips(noise, rounds):
    """By the privacy loss distribution, composed round by round."""
    accountant = PLDAccountant()
    accountant.compose(SelfComposedDpEvent(GaussianDpEvent(noise / 2), rounds))
    logged = {}
    server = SimpleNamespace(clients=[3, 7], report={"num_rounds": torch.tensor([1, rounds])}, log=logged.__setitem__)
    local_dp(noise=noise, delta=1e-5).server_update(torch.zeros(1), {}, server)
    assert logged["epsilon"] == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-4)


def test_epsilon_follows_the_client_that_took_part_most_often(root):
    server = server_on(plan_of(root, ["local_dp"], cohort={"size": 5}), root)
    epsilons = [server.run_round(index).metrics["local_dp/epsilon"] for index in range(3)]
    times = [server.client_memory(client)["local_dp"]["num_rounds"] for client in server._memories]
    assert max(times) > 1
    assert epsilons == sorted(epsilons)
    assert epsilons[0] < epsilons[-1]
    silent = run(plan_of(root, [{"local_dp": {"noise": 0}}]), root, rounds=0)
    assert math.isinf(silent.run_round(0).metrics["local_dp/epsilon"])


def test_fedvg_scores_what_was_sent(root):
    """Clients train alike with and without noise; the logged gradient norms are those of the noised models."""
    norms, noise = [], {"clip": 1e6, "noise": 1e-9}
    for methods in (["fedvg"], [{"local_dp": noise}, "fedvg"], [{"local_dp": {**noise, "noise": 1e-8}}, "fedvg"]):
        norms.append(server_on(plan_of(root, methods), root).run_round(0).arrays["fedvg.norms"])
    apart = [abs(other - norms[0]).mean() for other in norms[1:]]
    assert 0 < apart[0] < apart[1]


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        (["local_dp", "scaffold"], "scaffold cannot be combined with local_dp because of its `report`"),
        (["local_dp", "dp"], "cannot be combined with"),
    ],
)
def test_reports_without_noise_are_refused(methods, words, root):
    with pytest.raises(ConfigError, match=words):
        plan_of(root, methods)


def test_robust_rules_and_compression_may_run_beside_it(root):
    for methods in (["local_dp", "krum"], ["local_dp", "top_k"], ["local_dp", "fedvg"], ["local_dp", "fedavgm"]):
        assert plan_of(root, methods).methods


def test_shared_buffers_are_refused(root):
    with pytest.raises(ConfigError, match="would be averaged without noise"):
        plan_of(root, ["local_dp"], model={"norm": "batch"})
