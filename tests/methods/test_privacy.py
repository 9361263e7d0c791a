"""dp: what is clipped, what is added, and what is refused together with it."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import dp_accounting
import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import raysim
from methods.dp import COUNT_NOISE, clipping, dp, epsilon_after, noise_for, spending, split_noise
from raysim.base.errors import ConfigError
from raysim.core.layout import layout_of
from raysim.core.seeding import derive_seed, torch_generator
from tests.support.federations import plan_of, run, server_on, updates_of
from tests.twins.federation import Naive, assert_same_state

WIDE = layout_of(nn.Linear(10_000, 1, bias=False), head="none")


def round_of(layout=WIDE, *, scales=(), cohort_size=4, population=100, sampling="fixed", seed=0, **others):
    """A round at the server, as far as dp looks at it; `logged` keeps what it logs."""
    logged = {}
    return SimpleNamespace(
        layout=layout,
        report={"scale": torch.tensor(scales, dtype=torch.float64), "norm": torch.zeros(len(scales))},
        is_active=torch.ones(len(scales), dtype=torch.bool),
        cohort_size=cohort_size,
        population=population,
        sampling=sampling,
        round_index=0,
        generator=torch_generator(seed),
        log=logged.__setitem__,
        logged=logged,
        **others,
    )


# --- what is clipped and added ----------------------------------------------------------------------------------------------


def test_noise_is_gaussian_of_the_stated_size():
    method, update = dp(clip=0.6, noise=2.0), torch.linspace(-1, 1, 10_000)
    noised, _ = method.server_update(update, {"clip": 0.6}, round_of(cohort_size=4))
    draws, std = (noised - update).double().numpy(), 2.0 * 0.6 / 4
    assert stats.kstest(draws, stats.norm(0, std).cdf).pvalue > 1e-4
    assert abs(draws.std() / std - 1) < 5 / math.sqrt(2 * len(draws))
    assert abs(draws.mean()) < 5 * std / math.sqrt(len(draws))
    other, _ = method.server_update(update, {"clip": 0.6}, round_of(cohort_size=4, seed=1))
    assert abs(np.corrcoef(draws, (other - update).numpy())[0, 1]) < 5 / math.sqrt(len(draws))


def test_a_larger_cohort_that_is_simulated_scales_noise_and_price():
    server = round_of(cohort_size=4, population=100)
    noised, _ = dp(clip=0.6, noise=2.0, noise_cohort_size=40).server_update(torch.zeros(10_000), {"clip": 0.6}, server)
    assert abs(float(noised.std()) / (2.0 * 0.6 / 40) - 1) < 5 / math.sqrt(2 * 10_000)
    assert server.logged["epsilon"] == epsilon_after(1, spending(2.0, 40, 100, "fixed"), 1e-5)


def clipped_sum(naive, models, clip, size):
    """Algorithm 1 of McMahan et al. 2018 with loops: name -> (1/m) sum_k min(1, S / ||u_k||) u_k."""
    begun = {name: value.detach().double().numpy().copy() for name, value in naive.model.named_parameters()}
    total = {name: np.zeros_like(value) for name, value in begun.items()}
    for model in models:
        update = {name: p.detach().double().numpy() - begun[name] for name, p in model.named_parameters()}
        norm = math.sqrt(sum(float(entry) ** 2 for value in update.values() for entry in value.flat))
        for name, value in update.items():
            total[name] += value * (1 if norm <= clip else clip / norm) / size
    return total


@pytest.mark.parametrize("clip", [0.15, 1e3])
def test_clipped_sum_is_the_naive_one(root, clip):
    plan = plan_of(root, [{"dp": {"clip": clip, "noise": 0.0}}], cohort={"size": 5})
    server, naive = server_on(plan, root), Naive(plan)
    record = server.run_round(0)
    models = [naive.local(int(client), 0)[0] for client in record.clients["client"]]
    norms = [
        math.sqrt(
            sum(
                float((a - b).detach().pow(2).sum())
                for a, b in zip(m.parameters(), naive.model.parameters(), strict=True)
            )
        )
        for m in models
    ]
    np.testing.assert_allclose(record.arrays["dp.norms"], norms, rtol=1e-4)
    assert record.metrics["dp/num_clipped"] == sum(norm > clip for norm in norms)
    assert (record.metrics["dp/num_clipped"] > 0) == (clip < 1)
    steps = clipped_sum(naive, models, clip, 5)
    with torch.no_grad():
        for name, value in naive.model.named_parameters():
            value += torch.from_numpy(steps[name]).float()
    assert_same_state(server, naive)


def test_noise_comes_on_that_sum_and_personal_layers_have_none(root):
    layers = [{"personal": {"layers": ["fc1"]}}]
    silent, loud = (
        server_on(plan_of(root, [*layers, {"dp": {"clip": 0.2, "noise": noise}}]), root) for noise in (0.0, 3.0)
    )
    for server in (silent, loud):
        server.run_round(0)
    apart = loud.params - silent.params
    draws = torch.randn(len(apart), generator=torch_generator(derive_seed(loud.seed, "server/dp", 0)))
    for leaf in loud.layout.params:
        wanted = loud.layout.view(draws, leaf) * (3.0 * 0.2 / 7 if leaf.is_shared else 0.0)
        torch.testing.assert_close(loud.layout.view(apart, leaf), wanted, atol=1e-6, rtol=1e-4)


def test_one_client_moves_the_sum_by_no_more_than_the_accounting_says():
    generator = torch.Generator().manual_seed(0)
    layout, clip = layout_of(nn.Linear(6, 1, bias=False), head="none"), 0.7
    weigh = dp(clip=clip).weigh

    def total(updates):
        views = [
            SimpleNamespace(params=u, start=torch.zeros(6), layout=layout, message={"clip": clip}) for u in updates
        ]
        scales = [float(clipping(view)["scale"]) for view in views]
        weights = weigh({"weight": None}, round_of(layout, scales=scales, cohort_size=5))["weight"]
        return weights @ torch.stack(updates).double()

    farthest = 0.0
    for _ in range(200):
        sizes = torch.rand(6, 1, generator=generator) * 3
        *others, one, another = torch.unbind(sizes * torch.randn(6, 6, generator=generator))
        replaced = float((total([*others, one]) - total([*others, another])).norm())
        added = float((total([*others, one]) - total(others)).norm())
        assert added <= clip / 5 + 1e-9
        assert replaced <= 2 * clip / 5 + 1e-9
        farthest = max(farthest, replaced)
    assert farthest > 1.5 * clip / 5  # replacing does cost more than adding


def test_an_update_of_0_and_a_client_without_a_step_are_no_fault():
    client = SimpleNamespace(params=torch.zeros(10_000), start=torch.zeros(10_000), layout=WIDE, message={"clip": 1.0})
    assert float(clipping(client)["scale"]) == 1.0
    server = round_of(scales=[0.5, 1.0])
    server.is_active[1] = False
    assert dp().weigh({"weight": None}, server)["weight"].tolist() == [0.125, 0.0]


def test_what_stays_at_a_client_does_not_count_to_its_norm():
    network = nn.Sequential(nn.Linear(3, 1, bias=False), nn.Linear(1, 2, bias=False))
    layout = layout_of(network, head="1", shared=["0.weight"])
    client = SimpleNamespace(
        params=torch.tensor([3.0, 0.0, 4.0, 50.0, 60.0]), start=torch.zeros(5), layout=layout, message={"clip": 1.0}
    )
    assert float(clipping(client)["norm"]) == 5.0
    assert float(clipping(client)["scale"]) == pytest.approx(0.2)


def test_a_round_of_nobody_is_noise_alone(root, nobody_comes):
    plan = plan_of(root, [{"dp": {"clip": 0.5, "adaptive": 0.5}}], cohort={"sampling": "poisson"})
    server = server_on(plan, root)
    before = server.params.clone()
    spending.cache_clear()  # dp-accounting warns while it computes, and another test may have computed the same
    with pytest.warns(
        UserWarning, match=r"dp: dp-accounting says: .*failed to converge after \.\.\. iterations"
    ) as caught:
        record = server.run_round(0)
    assert len({str(each.message) for each in caught}) == 1  # Python shows a text once
    moved = (server.params - before).double()
    _, multiplier = split_noise(1.0, 7)
    assert abs(float(moved.std()) / (multiplier * 0.5 / 7) - 1) < 5 / math.sqrt(2 * len(moved))
    assert record.metrics["dp/num_clipped"] == 0
    assert record.metrics["dp/epsilon"] > 0


@pytest.mark.parametrize("optimiser", ["fedadam", "fedyogi", "fedadagrad"])
def test_a_step_behind_the_noise_does_not_look_at_who_came(optimiser, root, monkeypatch):
    """A round of nobody is scaled as any other is: its step would else be the raw noise, and say that nobody came."""
    plan = plan_of(root, [{"dp": {"clip": 0.5, "trust": [optimiser]}}, optimiser], cohort={"sampling": "poisson"})
    moved = []
    for comes in (True, False):
        with monkeypatch.context() as patch:
            if not comes:
                patch.setattr("raysim.engine.schedule.choose_cohort", lambda *_, **__: np.zeros(0, np.int64))
            server = server_on(plan, root)
            before = server.params.clone()
            server.run_round(0)
            moved.append(float((server.params - before).std()))
    assert moved[1] == pytest.approx(moved[0], rel=0.5)


def test_poisson_cohorts_are_divided_by_the_expected_size(root):
    groups = {"cohort": {"sampling": "poisson"}, "rounds": 1}
    server = server_on(plan_of(root, [{"dp": {"clip": 1e6, "noise": 0.0}}], **groups), root)
    before, size = server.params.clone(), server.layout.num_params
    record = server.run_round(0)
    assert len(record.clients["client"]) != 7
    wanted = sum(row[:size].double() for row in updates_of(server).values()) / 7
    torch.testing.assert_close((server.params - before).double(), wanted, atol=1e-6, rtol=1e-4)


# --- adaptive clipping --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantile", [0.3, 0.5])
def test_the_clip_settles_at_the_quantile_of_the_norms(quantile):
    """Norms exp(N(0, 1)). Near the quantile log S is pulled by 0.2 pdf and moved by 0.2 of the count's noise: std 0.04."""
    rng, method, state = np.random.default_rng(1), dp(clip=20.0, adaptive=quantile), {"clip": 20.0}
    layout, clips = layout_of(nn.Linear(1, 1, bias=False), head="none"), []
    for index in range(500):
        norms = np.exp(rng.standard_normal(100))
        scales = np.minimum(1, state["clip"] / norms)
        server = round_of(layout, scales=scales, cohort_size=100, population=1000, seed=index)
        _, state = method.server_update(torch.zeros(1), state, server)
        clips.append(math.log(state["clip"]))
    assert abs(np.mean(clips[200:]) - stats.norm.ppf(quantile)) < 0.08
    assert 0.01 < np.std(clips[200:]) < 0.08  # the count is noised


def test_one_step_of_the_clip_by_hand():
    server = round_of(scales=[1.0, 1.0, 0.4], cohort_size=4)
    _, state = dp(clip=2.0, adaptive=0.5, noise=1e-9).server_update(torch.zeros(10_000), {"clip": 2.0}, server)
    generator = torch_generator(0)
    torch.randn(10_000, generator=generator)
    draw = float(torch.randn((), dtype=torch.float64, generator=generator)) * COUNT_NOISE
    # two of three are within: (1/4)(1/2 + 1/2 - 1/2) + 1/2
    assert state["clip"] == pytest.approx(2.0 * math.exp(-0.2 * (0.625 + draw - 0.5)))


@pytest.mark.parametrize(("noise", "size"), [(1.0, 100), (1.0, 7), (0.3, 20), (5.0, 60)])
def test_sum_and_count_together_cost_what_the_noise_says(noise, size):
    sigma_count, multiplier = split_noise(noise, size)
    assert sigma_count == (size / 20 if size >= 20 * noise else noise)
    gaussian = dp_accounting.GaussianDpEvent
    both = dp_accounting.ComposedDpEvent([gaussian(multiplier), gaussian(2 * sigma_count)])
    accountants = [dp_accounting.rdp.RdpAccountant().compose(event) for event in (both, gaussian(noise))]
    np.testing.assert_allclose(accountants[0].rdp, accountants[1].rdp, rtol=1e-9)
    assert split_noise(0.0, size)[1] == 0


# --- what is refused ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        (["dp", "fedvg"], "fedvg cannot be combined with dp because of its .report."),
        (["dp", "fisher"], "fisher cannot be combined with dp because of its .report."),
        (["scaffold", "dp"], "scaffold cannot be combined with dp because of its `report`: clients' reports"),
        (["dp", "fednova"], "fednova cannot be combined with dp because of its `report`"),
        (["dp", "fedadam"], "fedadam cannot be combined with dp because of its `server_update`"),
        (["dp", "flfa"], "flfa cannot be combined with dp because of its `server_update`"),
        (
            ["tests.support.toys:copies_the_others", "dp"],
            "copies_the_others cannot be combined with dp because of its `overhear`",
        ),
        (["fedavgm", "dp"], "put dp before fedavgm"),
        ([{"dp": {"trust": ["scaffold"]}}, "scaffold", "feddyn"], "feddyn cannot be combined with dp"),
    ],
)
def test_what_would_see_clients_without_noise_is_refused(root, methods, words):
    with pytest.raises(ConfigError, match=words):
        plan_of(root, methods)


@pytest.mark.parametrize(
    "methods",
    [
        ["dp", "fedavgm"],
        ["fedprox", "dp", "fedacg"],
        ["top_k", "dp"],
        ["fedrs", "dp"],
        [{"dp": {"trust": ["scaffold"]}}, "scaffold"],
    ],
)
def test_what_sees_the_noised_sum_alone_or_is_trusted_runs(root, methods):
    metrics = run(plan_of(root, methods), root, rounds=1).run_round(1).metrics
    assert metrics["dp/epsilon"] > 0
    assert metrics.get("dp/num_trusted", 0.0) == float("scaffold" in methods)


def test_a_summary_says_that_something_was_trusted(settings):
    result = raysim.run({**settings, "rounds": 1, "methods": [{"dp": {"trust": ["scaffold"]}}, "scaffold"]})
    assert result.summary["metrics"]["dp/num_trusted"] == 1
    assert result.summary["methods"][0] == {"dp": {"trust": ["scaffold"]}}


def test_statistics_of_batches_are_refused_unless_they_are_personal(root):
    with pytest.raises(
        ConfigError, match=r"norm1\.running_mean and 3 more would be averaged without noise; set model\.norm"
    ):
        plan_of(root, ["dp"], model={"norm": "batch"})
    plan_of(root, ["dp"], model={"norm": "group"})
    plan_of(root, [{"personal": {"layers": "norm"}}, "dp"], model={"norm": "batch"})


def test_without_the_library_one_sentence_says_how_to_get_it(root, monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ConfigError, match=r"not installed: pip install 'raysim-fl\[privacy\]'"):
        plan_of(root, [{"dp": {"delta": 1.5e-5}}])  # a list of no other test: faults of a list are kept


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"trust": ["nosuch"]}, "trust names 'nosuch', which is not a method of the run"),
        ({"delta": 0.9}, "delta 0.9 is not below 1 / clients"),
        (
            {"noise_cohort_size": 3},
            r"noise_cohort_size must lie between 7 \(the cohort\) and 12 \(all clients\), got 3",
        ),
        ({"epsilon": 8.0, "noise": 0.5}, r"noise.*has no effect with epsilon 8"),
        ({"epsilon": 1e-9}, "epsilon 1e-09 in 3 rounds takes more noise than 10000; raise epsilon"),
    ],
)
def test_options_out_of_range_are_one_clear_error(root, options, words):
    with pytest.raises(ConfigError, match=words) as caught:
        plan_of(root, [{"dp": options}])
    assert len(caught.value.faults) == 1


def test_a_cohort_of_one_client_may_be_simulated():
    assert dp(noise_cohort_size=1).name == "dp"


def test_a_run_for_an_epsilon_is_the_run_with_its_noise_and_spends_no_more(root):
    sizes = plan_of(root).config
    noise = noise_for("rdp", 2.0, 1e-5, 3, sizes.cohort_size, sizes.num_clients, "fixed")
    aimed, given = (plan_of(root, [{"dp": options}], rounds=3) for options in ({"epsilon": 2.0}, {"noise": noise}))
    server = server_on(aimed, root)
    last = [server.run_round(index) for index in range(3)][-1].metrics
    assert last["dp/noise"] == noise
    assert 1.99 < last["dp/epsilon"] <= 2.0 < last["dp/next_epsilon"]
    assert (server.params == run(given, root).params).all()


def test_a_run_with_more_rounds_later_keeps_its_noise():
    server = round_of(num_rounds=7)
    _, state = dp(epsilon=8.0).server_update(torch.zeros(10_000), {"clip": 1.0}, server)
    assert state["noise"] == server.logged["noise"] == noise_for("rdp", 8.0, 1e-5, 7, 4, 100, "fixed")
    longer = round_of(num_rounds=70)
    assert dp(epsilon=8.0).server_update(torch.zeros(10_000), state, longer)[1] == state
    assert longer.logged["noise"] == state["noise"]


def test_an_epsilon_that_the_first_round_overspends_is_known_before_it(root):
    with pytest.raises(
        ConfigError, match=r"the first round spends epsilon \S+, and stop\.epsilon is 0\.01; raise noise"
    ):
        plan_of(root, [{"dp": {"noise": 1.0}}], stop={"epsilon": 0.01})


def test_dropout_is_no_poisson_sampling(root):
    with pytest.raises(ConfigError, match=r"a round is not a Poisson sample: set cohort\.dropout to 0"):
        plan_of(root, ["dp"], cohort={"sampling": "poisson", "dropout": 0.2})


# --- stop: {epsilon: ...} -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 3])
def test_a_run_ends_before_it_spends_more_than_is_allowed(settings, every):
    spent = spending(3.0, 3, 6, "fixed")
    allowed = epsilon_after(5, spent, 1e-5)
    changes = {"rounds": 9, "methods": [{"dp": {"noise": 3.0}}], "evaluation": {"every": every}}
    result = raysim.run({**settings, **changes, "stop": {"epsilon": allowed}})
    rounds = 5 if every == 1 else 3
    assert result.summary["rounds"] == rounds
    assert result.summary["metrics"]["dp/epsilon"] == epsilon_after(rounds, spent, 1e-5) <= allowed
    assert result.summary["stopped_by"].startswith(f"epsilon {epsilon_after(rounds, spent, 1e-5):.4g} is spent")
    enough = raysim.run({**settings, **changes, "stop": {"epsilon": 1e6}})
    assert enough.summary["rounds"] == 9


def test_a_run_ends_after_one_round_where_the_first_evaluation_would_come_too_late(settings):
    spent = spending(3.0, 3, 6, "fixed")
    changes = {"rounds": 9, "methods": [{"dp": {"noise": 3.0}}], "evaluation": {"every": 3}}
    result = raysim.run({**settings, **changes, "stop": {"epsilon": epsilon_after(2, spent, 1e-5)}})
    assert result.summary["rounds"] == 1
    assert result.summary["metrics"]["dp/epsilon"] == epsilon_after(1, spent, 1e-5)
    assert result.summary["accuracy"] is None


def test_stop_epsilon_counts_with_dp_alone(root):
    plan_of(root, ["dp"], stop={"epsilon": 30.0}, evaluation={"every": 0})
    with pytest.raises(ConfigError, match=r"stop.epsilon.*applies with methods that have dp"):
        plan_of(root, ["fedprox"], stop={"epsilon": 3.0})
