"""Attacks: each against a naive twin through the engine, their properties, and what is refused."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from methods import METHODS
from methods.attack_omniscient import krum_step, largest_gamma, largest_z
from raysim.base.errors import ConfigError
from raysim.base.options import options_of
from raysim.core.layout import Layout
from raysim.core.method import Crowd
from raysim.core.stack import Stack
from tests.support.federations import plan_of, server_on, updates_of
from tests.support.method_cases import ATTACKS
from tests.twins import attacks as twins
from tests.twins.federation import assert_close

#: Share of the attackers in the rounds below, and those of them that are in the cohort.
SHARE, BAD = 0.25, [5, 8]
STEADY = {"partition": {"scheme": "iid", "num_clients": 6}, "cohort": {"size": 6}, "local": {"epochs": 3, "lr": 0.3}}
DIRECTIONS = ("std", "unit", "sign")


class Outcome:
    """One round: what honest clients and attackers sent, client -> [num_params] float64."""

    def __init__(self, root, methods=(), **groups):
        self.server = server_on(plan_of(root, methods, **groups), root)
        self.record = self.server.run_round(0)
        size = self.server.layout.num_params
        self.sent = {client: row[:size].clone() for client, row in updates_of(self.server).items()}
        bad = BAD
        self.attackers = [client for client in self.sent if client in bad]
        self.honest = [self.sent[client].double().numpy() for client in self.sent if client not in bad]


@pytest.fixture(scope="module")
def plain(root):
    """A round without attackers; five of its seven clients are honest in the others."""
    outcome = Outcome(root)
    assert (len(outcome.honest), len(outcome.attackers)) == (5, 2)
    return outcome


def attacked(root, name, **options):
    return Outcome(root, [{name: {"share": SHARE, **options}}])


# --- who attacks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gaussian", "alie", "label_flip"])
def test_honest_clients_send_what_they_send_without_attackers(root, plain, name):
    found = attacked(root, name)
    assert list(found.sent) == list(plain.sent)
    for client, update in plain.sent.items():
        assert torch.equal(found.sent[client], update) == (client not in found.attackers)
    assert found.record.metrics["attack/attackers"] == 2


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 1.0])
def test_the_share_of_attackers_is_exact(share):
    late = Stack([METHODS["alie"](share=share)]).latecomers(torch.arange(200), lambda name: Crowd(200, 7))
    assert int(late.sum()) == 200 * share


def test_drawn_clients_attack_and_nobody_else(root, plain):
    found = attacked(root, "sign_flip")
    changed = [client for client in plain.sent if not torch.equal(found.sent[client], plain.sent[client])]
    assert changed == BAD


@pytest.mark.parametrize("kind", ["sign_flip", "label_flip", "alie"])
def test_before_its_round_everybody_is_honest(root, kind):
    without = server_on(plan_of(root), root)
    later = server_on(plan_of(root, [{kind: {"share": 0.4, "from_round": 1}}]), root)
    first = without.run_round(0), later.run_round(0)
    torch.testing.assert_close(later.params, without.params, atol=1e-6, rtol=0)
    assert first[1].metrics["attack/attackers"] == 0
    without.run_round(1)
    assert later.run_round(1).metrics["attack/attackers"] > 0
    assert not torch.allclose(later.params, without.params, atol=1e-3)


@pytest.mark.parametrize("kind", ["alie", "ipm", "min_max", "min_sum", "fang"])
def test_without_an_honest_client_attackers_send_what_they_trained(root, plain, kind):
    found = Outcome(root, [{kind: {"share": 1.0}}])
    assert all(torch.equal(found.sent[client], plain.sent[client]) for client in plain.sent)


# --- what they send -----------------------------------------------------------------------------------------------------


def test_turned_around_and_noise(root, plain):
    turned, noises = attacked(root, "sign_flip", scale=3.0), []
    drawn, added = (attacked(root, name, sigma=0.5) for name in ("gaussian", "additive_noise"))
    for client in turned.attackers:
        torch.testing.assert_close(turned.sent[client], -3 * plain.sent[client], atol=0, rtol=1e-6)
        noises += [drawn.sent[client], added.sent[client] - plain.sent[client]]
        # Mean and deviation of n draws, within five standard errors.
        n = len(noises[-1])
        torch.testing.assert_close(noises[-1], noises[-2], atol=1e-6, rtol=0)
        assert abs(float(noises[-2].mean())) < 5 * 0.5 / math.sqrt(n)
        assert abs(float(noises[-2].std()) - 0.5) < 5 * 0.5 / math.sqrt(2 * n)
    assert not torch.allclose(noises[0], noises[2], atol=0.1)


def _options_alone(value):
    """An id that is the same in every process: a function's name has its address."""
    return str(value) if isinstance(value, dict | str) else "twin"


@pytest.mark.parametrize(
    ("name", "options", "wanted"),
    [
        ("alie", {}, lambda honest: twins.alie(honest, 2)),
        ("alie", {"z": 1.5}, lambda honest: twins.alie(honest, 2, 1.5)),
        ("ipm", {"scale": 0.3}, lambda honest: twins.ipm(honest, 0.3)),
        *(
            (kind, {"direction": p}, lambda honest, kind=kind, p=p: twins.largest_hidden(honest, kind, p)[0])
            for kind in ("min_max", "min_sum")
            for p in DIRECTIONS
        ),
        ("fang", {"against": "krum"}, lambda honest: twins.against_krum(honest, 2)[0]),
    ],
    ids=_options_alone,
)
def test_what_is_crafted_is_the_twins(root, plain, name, options, wanted):
    found = attacked(root, name, **options)
    want = wanted(plain.honest)
    for client in found.attackers:
        assert_close(found.sent[client], want, 1e-5)


def test_values_against_the_trimmed_mean_lie_beyond_the_honest_ones(root, plain):
    found = attacked(root, "fang")
    low, high = twins.beyond(plain.honest)
    first, second = (found.sent[client].double().numpy() for client in found.attackers)
    assert not np.allclose(first, second, atol=1e-4)
    places = []
    for values in (first, second):
        assert (values >= low - 1e-7).all()
        assert (values <= high + 1e-7).all()
        moved = high - low > 1e-6
        places.append(((values - low) / (high - low))[moved])
    # Uniform between the two ends: the mean of n places is 1/2 within five standard errors.
    assert abs(np.concatenate(places).mean() - 0.5) < 5 / math.sqrt(12 * 2 * len(places[0]))


@pytest.mark.parametrize(
    ("name", "options", "wanted"),
    [
        ("min_max", {"direction": "unit"}, lambda honest: twins.largest_hidden(honest, "min_max", "unit")[0]),
        ("fang", {"against": "krum"}, lambda honest: twins.against_krum(honest, 2)[0]),
    ],
    ids=_options_alone,
)
def test_nobody_knows_what_stays_at_the_clients(root, name, options, wanted):
    found = Outcome(root, [{"personal": {"layers": ["fc1"]}}, {name: {"share": SHARE, **options}}])
    layout = found.server.layout
    is_sent = layout.zero_personal_(torch.ones(layout.num_params)).bool()
    assert 0 < int(is_sent.sum()) < len(is_sent)
    want = wanted([update[is_sent.numpy()] for update in found.honest])
    for client in found.attackers:
        assert_close(found.sent[client][is_sent], want, 1e-5)


def gram_of(*rows):
    rows = np.stack(rows)
    return torch.from_numpy(rows @ rows.T)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("kind", ["min_max", "min_sum"])
def test_gamma_is_the_largest_that_hides(kind, direction, seed):
    rng = np.random.default_rng(seed)
    honest = list(rng.normal(0.5, 1, (6, 30)) * rng.uniform(0.1, 3, 30))
    mean, p = np.mean(honest, axis=0), twins.perturbation(honest, direction)
    gamma = largest_gamma(gram_of(*honest, mean, p), "sum" if kind == "min_sum" else "max")
    assert gamma > 0
    assert twins.is_hidden(mean + gamma * (1 - 1e-9) * p, honest, kind)
    assert not twins.is_hidden(mean + gamma * (1 + 1e-6) * p, honest, kind)
    assert gamma == pytest.approx(twins.largest_hidden(honest, kind, direction)[1], abs=1e-4)


def test_one_honest_client_is_sent_as_it_is():
    one = np.array([1.0, -2.0, 3.0])
    for kind in ("min_max", "min_sum"):
        assert largest_gamma(gram_of(one, one, 0 * one), "sum" if kind == "min_sum" else "max") == 0
    assert largest_z(1, 5) == 0


@pytest.mark.parametrize("seed", range(5))
def test_krum_chooses_what_was_made_for_it(seed):
    rng = np.random.default_rng(seed)
    honest = list(rng.normal(0.2, 1, (9, 40)))
    s = np.sign(np.mean(honest, axis=0))
    step = krum_step(gram_of(*honest, s), 3)
    assert step == pytest.approx(twins.against_krum(honest, 3)[1])
    assert twins.krum([*honest, *[-step * s] * 3], 3) >= 9
    assert twins.krum([*honest, *[-2 * step * s] * 3], 3) < 9  # twice as far, it does not


def test_alie_needs_as_many_supporters_as_the_paper_says():
    """Its example: of 50 workers 24 are corrupted, so two more are needed, and z is 1.43."""
    assert largest_z(26, 24) == pytest.approx(1.43, abs=0.005)
    assert largest_z(9, 1) == 0  # the formula gives -0.14
    assert largest_z(3, 7) == pytest.approx(0.4307, abs=1e-4)  # no supporter is needed; one is taken


def test_the_number_of_attackers_is_expected_where_the_cohort_has_no_size():
    """Of 100 clients 20 attack; 8 honest ones of a cohort stand for 2 attackers: z of 10 and 2, not of the size 40."""
    hook = METHODS["alie"](share=0.2).overhear
    parts = torch.tensor([[0.0], [-1.0], [0.0], [0.0]])
    crowd = Crowd(100, 3)

    def z(sampling):
        view = SimpleNamespace(
            round_index=0, clients=torch.arange(8), cohort_size=40, sampling=sampling, population=100, crowd=crowd
        )
        view.layout, view.is_active = Layout(()), torch.ones(8, dtype=torch.bool)
        view.map_columns, view.log = lambda *_: [parts], lambda *_: None
        return float(hook(view)["vector"])

    assert z("poisson") == pytest.approx(largest_z(8, 2))
    assert z("fixed") == pytest.approx(largest_z(8, 32))


# --- beside other methods -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fedvg_scores_what_attackers_send(root):
    """A model that was turned away from the descent gets less of FedVG's weight than of FedAvg's."""
    groups = {"partition": {"scheme": "iid", "num_clients": 10}, "cohort": {"size": 10}}
    turned = {"sign_flip": {"share": 0.2, "scale": 4.0}}
    server = server_on(plan_of(root, [turned, "fedvg"], **groups), root)
    bad = server.crowd("attack").drawn(0.2)
    assert len(bad) == 2
    for index in range(3):
        columns = server.run_round(index).clients
        is_bad = np.isin(columns["client"], bad.numpy())
        weights, sizes = columns["weight"], columns["num_examples"]
        assert weights[is_bad].sum() / weights.sum() < 0.9 * sizes[is_bad].sum() / sizes.sum()


def test_krum_takes_what_was_made_for_it(root):
    plan = plan_of(root, [{"fang": {"against": "krum", "share": SHARE}}, {"krum": {"attackers": 2}}])
    server = server_on(plan, root)
    before, size = server.params.clone(), server.layout.num_params
    server.run_round(0)
    crafted = updates_of(server)[8][:size]
    torch.testing.assert_close(server.params - before, crafted, atol=1e-6, rtol=0)


def test_what_attackers_send_is_compressed_behind_them(root, plain):
    found = Outcome(root, [{"sign_flip": {"share": SHARE}}, {"top_k": {"share": 0.1}}])
    for client, update in found.sent.items():
        is_sent = update != 0
        assert int(is_sent.sum()) == round(0.1 * len(update))
        sign = -1 if client in found.attackers else 1
        torch.testing.assert_close(update[is_sent], sign * plain.sent[client][is_sent], atol=0, rtol=1e-6)


# --- what is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_has_no_option_that_hangs_on_another(name):
    assert not [option.name for option in options_of(METHODS[name]) if "applies with" in option.meaning]


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("label_flip", {"target": 10, "share": 1.0}, "target 10 is none of the 10 classes"),
        ("label_flip", {"source": 10, "share": 1.0}, "source 10 is none of the 10 classes"),
        ("backdoor", {"trigger": 9, "share": 1.0}, r"a patch of 9 x 9 does not fit inputs of shape \(8, 8, 1\)"),
        ("sign_flip", {"share": 0.01}, "0.01 of 12 clients is no client; raise share"),
        ("sign_flip", {"from_round": 3}, "from_round 3 is behind the last round, 2: no client would attack"),
    ],
    ids=str,
)
def test_what_the_sizes_of_the_run_rule_out_is_known_before_it_starts(root, name, options, words):
    with pytest.raises(ConfigError, match=words):
        plan_of(root, [{name: options}])


def test_a_backdoor_needs_test_rows(root):
    with pytest.raises(ConfigError, match="attack needs test-set"):
        plan_of(root, ["backdoor"], data={"test": 0.0})


def test_what_an_attacker_sends_behind_a_compressor_is_whole(root):
    attack = {"gaussian": {"share": 0.5}}
    groups = {"partition": {"num_clients": 6, "alpha": 10.0}, "cohort": {"size": 6}, "rounds": 1}
    few, whole, some = (
        server_on(plan_of(root, methods, **groups), root).run_round(0).metrics["comm/up_mb"]
        for methods in (["top_k"], [], ["top_k", attack])
    )
    assert some == pytest.approx((few + whole) / 2)


def test_alie_says_its_z_and_warns_where_it_is_an_honest_mean(root):
    groups = {"partition": {"num_clients": 10, "alpha": 10.0}, "cohort": {"size": 10}, "rounds": 1}
    few, many = ({"alie": {"share": share}} for share in (0.1, 0.4))
    with pytest.warns(UserWarning, match="alie sends the honest mean, since its z is 0"):
        assert server_on(plan_of(root, [few], **groups), root).run_round(0).metrics["attack/z"] == 0
    metrics = server_on(plan_of(root, [many], **groups), root).run_round(0).metrics
    assert (metrics["attack/z"], metrics["attack/attackers"]) == (pytest.approx(largest_z(6, 4)), 4)
    assert metrics["attack/z"] > 0
