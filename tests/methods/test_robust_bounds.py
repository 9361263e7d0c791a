"""Robust rules by their hooks alone: what they promise against any attackers, limit cases, and what they refuse."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sklearn.cluster import MeanShift, estimate_bandwidth
from torch import nn

from methods import METHODS
from raysim.base.errors import MethodError
from raysim.core.layout import layout_of
from raysim.core.weights import RightMap, normalised

#: All but FLTrust, which the engine's test has.
ALL = [
    *("coordinate_median", "geometric_median", "centered_clipping", "clustering", "clipped_clustering", "sign_guard"),
    *(
        {"trimmed_mean": {"trim": 2}},
        {"bulyan": {"attackers": 1}},
        {"krum": {"attackers": 1}},
        {"dnc": {"attackers": 1}},
    ),
    "norm_bounding",
]


def name_of(method):
    return method if isinstance(method, str) else next(iter(method))


def moved_by(method, updates, *, steps=None, sizes=None, state=None, layout=None):
    """What a method's hooks make of updates (K, P), in float64: columns come two at a time."""
    count, size = updates.shape
    layout = layout or layout_of(nn.Linear(size, 1, bias=False), head="none")
    steps = torch.ones(count, dtype=torch.int64) if steps is None else torch.tensor(steps)
    sizes = torch.ones(count, dtype=torch.int64) if sizes is None else torch.tensor(sizes)

    def map_columns(function, shared=None, rows=None):
        rows = torch.zeros(0, size) if rows is None else rows
        cuts = [slice(start, start + 2) for start in range(0, size, 2)]
        return [function(updates[:, cut].clone(), rows[:, cut].clone(), shared) for cut in cuts]

    def total(name, weights):
        (weight,) = {tuple(weight.tolist()) for weight in weights.values()}
        return torch.tensor(weight, dtype=torch.float64) @ updates.double()

    is_active = steps > 0
    scores = is_active if method.base_weights == "uniform" else sizes * is_active
    server = SimpleNamespace(
        round_index=4,
        clients=torch.arange(count),
        num_steps=steps,
        num_examples=sizes,
        is_active=is_active,
        layout=layout,
        start=torch.zeros(size),
        report={"norm": updates.double().norm(dim=1)},
        map_columns=map_columns,
        total=total,
        logged=(logged := {}),
        log=logged.__setitem__,
        generator=torch.Generator().manual_seed(0),
    )
    server.weights = {leaf.name: normalised(scores.double()) for leaf in layout.leaves}
    if method.weigh:
        server.weights = method.weigh(server.weights, server)
    update = total("update", {leaf.name: server.weights[leaf.name] for leaf in layout.params}).float()
    if method.server_update:
        update, _ = method.server_update(update, state or {}, server)
    return update.double(), server


def made(method):
    return METHODS[name_of(method)](**({} if isinstance(method, str) else method[name_of(method)]))


values = st.floats(-4, 4, width=32)
outlying = st.one_of(values, st.floats(-(2.0**100), 2.0**100, width=32))


def rows_of(entries, count):
    return st.lists(st.lists(entries, min_size=3, max_size=3), min_size=count, max_size=count)


@st.composite
def attacked(draw, most):
    """(honest updates, attackers' updates): at most `most(number of all)` attackers, of any size and at any place."""
    num = draw(st.integers(3, 11))
    bad = draw(st.integers(0, most(num)))
    return draw(rows_of(values, num - bad)), draw(rows_of(outlying, bad)), draw(st.randoms(use_true_random=False))


def mixed(case):
    """(honest (n, 3), all (K, 3) in a random order)."""
    honest, bad, random = case
    everybody = honest + bad
    random.shuffle(everybody)
    return torch.tensor(honest, dtype=torch.float64), torch.tensor(everybody, dtype=torch.float32)


@settings(max_examples=80, deadline=None)
@given(attacked(lambda num: (num - 1) // 2))
def test_coordinate_median_stays_among_the_honest_below_one_half(case):
    honest, updates = mixed(case)
    update, _ = moved_by(METHODS["coordinate_median"](), updates)
    assert (update >= honest.amin(0)).all()
    assert (update <= honest.amax(0)).all()


@settings(max_examples=80, deadline=None)
@given(attacked(lambda num: (num - 1) // 3))
def test_trimmed_mean_stays_among_the_honest_while_it_cuts_off_enough(case):
    honest, updates = mixed(case)
    update, _ = moved_by(METHODS["trimmed_mean"](trim=len(updates) - len(honest)), updates)
    slack = 1e-6 * honest.abs().amax()
    assert (update >= honest.amin(0) - slack).all()
    assert (update <= honest.amax(0) + slack).all()


@settings(max_examples=80, deadline=None)
@given(attacked(lambda num: max(0, (num - 3) // 4)))
@example(([[0.0, 0.0, third] for third in (0.0, 2.0, 1.0, 2.0, 0.0, 0.0)], [[0.0, 0.0, -1.0]], Random(0)))
def test_bulyan_leaves_the_honest_by_no_more_than_their_own_spread(case):
    """An attacker's value that is taken is no further from the median, an honest place, than an honest one that is not."""
    honest, updates = mixed(case)
    update, _ = moved_by(METHODS["bulyan"](attackers=len(updates) - len(honest)), updates)
    low, high = honest.amin(0), honest.amax(0)
    slack = 1e-6 * honest.abs().amax()
    assert (update >= low - (high - low) - slack).all()
    assert (update <= high + (high - low) + slack).all()


@settings(max_examples=80, deadline=None)
@given(attacked(lambda num: (num - 3) // 2))
def test_krum_is_as_near_to_the_honest_as_they_are_to_each_other(case):
    """n > 2f + 2. Whom Krum takes has an honest one among its n - f - 2 nearest, and scores no more than an honest one can."""
    honest, updates = mixed(case)
    bad = len(updates) - len(honest)
    update, _ = moved_by(METHODS["krum"](attackers=bad), updates)
    widest = torch.cdist(honest, honest).max()
    nearest = (honest - update).norm(dim=1).min()
    assert nearest <= (len(updates) - bad - 2) ** 0.5 * widest * (1 + 1e-6)


@settings(max_examples=40, deadline=None)
@given(rows_of(st.floats(-1, 1, width=32), 7), rows_of(st.floats(100, 2.0**100, width=32), 2))
def test_krum_never_takes_a_far_attacker(honest, bad):
    bad = [[value * (-1) ** place for value in row] for place, row in enumerate(bad)]
    _, server = moved_by(METHODS["krum"](attackers=2, select=3), torch.tensor(bad + honest, dtype=torch.float32))
    (weight,) = server.weights.values()
    assert weight[:2].tolist() == [0, 0]
    assert sorted(weight[2:].tolist(), reverse=True) == pytest.approx([1 / 3] * 3 + [0] * 4)


@settings(max_examples=40, deadline=None)
@given(attacked(lambda num: (num - 1) // 2))
def test_geometric_median_stays_within_the_bound_of_its_breakdown(case):
    """Within 2 (1 - a) / (1 - 2a) times the largest honest distance from any point, here from 0; a is the attackers' share."""
    honest, updates = mixed(case)
    share = 1 - len(honest) / len(updates)
    update, _ = moved_by(METHODS["geometric_median"](iterations=800), updates)
    radius = honest.norm(dim=1).max()
    assert update.norm() <= 2 * (1 - share) / (1 - 2 * share) * radius * (1 + 1e-3) + 1e-3


@settings(max_examples=80, deadline=None)
@given(rows_of(outlying, 6), st.floats(0.01, 5), st.integers(1, 4))
def test_centered_clipping_moves_by_tau_at_most_in_an_iteration(updates, tau, iterations):
    method = METHODS["centered_clipping"](tau=tau, iterations=iterations)
    center = torch.tensor([1.0, -2.0, 0.5])
    update, _ = moved_by(method, torch.tensor(updates, dtype=torch.float32), state={"center": center})
    assert (update - center).norm() <= iterations * tau * (1 + 1e-5) + 1e-5


@settings(max_examples=80, deadline=None)
@given(
    rows_of(outlying, 5), rows_of(outlying, 1), st.floats(0.01, 5), st.lists(st.integers(1, 50), min_size=5, max_size=5)
)
def test_no_client_moves_a_norm_bounded_sum_by_more_than_its_weight_times_the_bound(updates, other, bound, sizes):
    method = METHODS["norm_bounding"](bound=bound)
    rows = torch.tensor(updates, dtype=torch.float32)
    without = rows.clone()
    without[2] = 0
    parts = [moved_by(method, each, sizes=sizes)[0] for each in (rows, without)]
    assert (parts[0] - parts[1]).norm() <= sizes[2] / sum(sizes) * bound * (1 + 1e-5) + 1e-5


# --- limit cases ----------------------------------------------------------------------------------------------------------

ROWS = torch.tensor([[1.0, 0.0, 2.0], [3.0, 1.0, 2.0], [2.0, -1.0, 2.0], [8.0, 0.5, 2.0], [2.5, 0.25, 2.0]])


@pytest.mark.parametrize(
    ("name", "options", "state"),
    [
        ("trimmed_mean", {"trim": 0}, None),
        ("krum", {"attackers": 0, "select": 5}, None),
        ("bulyan", {"attackers": 0}, None),
        ("centered_clipping", {"tau": 1e6}, {"center": torch.tensor([5.0, 5.0, 5.0])}),
        ("norm_bounding", {"bound": 1e6}, None),
        ("dnc", {"attackers": 0}, None),
    ],
)
def test_a_rule_that_leaves_nobody_out_is_the_mean(name, options, state):
    update, _ = moved_by(METHODS[name](**options), ROWS, state=state)
    torch.testing.assert_close(update, ROWS.double().mean(0), atol=1e-6, rtol=0)


def test_medians_by_hand():
    assert moved_by(METHODS["coordinate_median"](), ROWS)[0].tolist() == [2.5, 0.25, 2.0]
    assert moved_by(METHODS["coordinate_median"](), ROWS[:4])[0].tolist() == [2.5, 0.25, 2.0]
    largest = torch.full((4, 3), 3e38)
    assert moved_by(METHODS["coordinate_median"](), largest)[0].tolist() == largest[0].double().tolist()
    assert moved_by(METHODS["trimmed_mean"](trim=0.25), ROWS[:4])[0].tolist() == [2.5, 0.25, 2.0]
    line = torch.tensor([[0.0], [1.0], [5.0]])
    middle, _ = moved_by(METHODS["geometric_median"](), line)
    assert middle.tolist() == pytest.approx([1.0], abs=1e-5)
    # With two thirds of the examples the client of 5 is its own median.
    middle, _ = moved_by(METHODS["geometric_median"](), line, sizes=[1, 1, 4])
    assert middle.tolist() == pytest.approx([5.0], abs=1e-5)


@pytest.mark.parametrize("method", ALL, ids=name_of)
def test_who_took_no_step_has_no_vote_and_a_round_without_steps_moves_nothing(method):
    method = made(method)
    rows = torch.randn(9, 3, generator=torch.Generator().manual_seed(1)) * 0.1 + 1
    state = method.init(torch.zeros(3), None) if method.init else {}
    still = [1, 0, 1, 1, 1, 0, 1, 1, 1]
    rows[[1, 5]] = 0
    alone, _ = moved_by(method, rows[torch.tensor(still) > 0], state=state)
    update, server = moved_by(method, rows, steps=still, state=state)
    torch.testing.assert_close(update, alone)
    (weight,) = server.weights.values()
    assert weight[[1, 5]].tolist() == [0, 0]
    for updates in (torch.zeros(3, 3), torch.zeros(0, 3)):
        update, _ = moved_by(method, updates, steps=[0] * len(updates), state=state)
        assert update.tolist() == [0, 0, 0]


def test_norm_bounding_scales_weights_of_any_form():
    layout = layout_of(nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2, affine=False)), head="none")
    server = SimpleNamespace(
        is_active=torch.tensor([True, True]),
        report={"norm": torch.tensor([4.0, 1.0]).double()},
        layout=layout,
        log=print,
    )
    weights = {
        "0.weight": RightMap(torch.eye(2).double().repeat(2, 1, 1)),
        "1.running_mean": torch.tensor([0.5, 0.5]).double(),
    }
    bounded = METHODS["norm_bounding"](bound=2.0).weigh(weights, server)
    assert bounded["0.weight"].maps.diagonal(dim1=1, dim2=2).tolist() == [[0.5, 0.5], [1, 1]]
    assert bounded["1.running_mean"] is weights["1.running_mean"]
    rows = METHODS["norm_bounding"](bound=2.0).weigh({"0.weight": torch.tensor([[0.5, 0.25], [0.5, 0.75]])}, server)
    assert rows["0.weight"].tolist() == [[0.25, 0.125], [0.5, 0.75]]


def test_sign_guard_and_clustering_leave_out_those_that_turn_around():
    rows = torch.rand(9, 40, generator=torch.Generator().manual_seed(2)) + 0.1
    rows[3], rows[7] = -rows[3], -rows[7]
    for name, options in (("sign_guard", {"share": 1.0}), ("clustering", {}), ("clipped_clustering", {})):
        method = METHODS[name](**options)
        _, server = moved_by(method, rows, state={"norms": torch.zeros(0).double()})
        (weight,) = server.weights.values()
        assert (weight > 0).tolist() == [k not in (3, 7) for k in range(9)], name


def test_bulyan_takes_just_as_many_values_as_the_paper_where_several_are_equally_near():
    """Of 0, 0, 1, 2, 2, which Krum selects, the three nearest to the median are 1 and two of those at distance 1."""
    rows = torch.tensor([[0.0], [0.0], [1.0], [2.0], [2.0], [50.0], [-50.0]])
    update, _ = moved_by(METHODS["bulyan"](attackers=1), rows)
    assert update.tolist() == pytest.approx([1 / 3])


def test_sign_guard_chooses_as_its_authors_code():
    """MeanShift with seeds on a grid, in which not every client has a cluster, of features over their maximum."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        rows = torch.randn(12, 30, generator=generator) + torch.rand(12, 1, generator=generator)
        shares = torch.stack([(rows.sign() == sign).double().mean(1) for sign in (1, 0, -1)], dim=1)
        features = (shares / (shares.amax(0) + 1e-8)).numpy()
        shift = MeanShift(
            bandwidth=estimate_bandwidth(features, quantile=0.5, n_samples=50), bin_seeding=True, cluster_all=False
        )
        labels = shift.fit(features).labels_
        is_wanted = labels == np.argmax([np.sum(labels == label) for label in range(labels.max() + 1)])
        _, server = moved_by(METHODS["sign_guard"](share=1.0, lower=1e-6, upper=1e6), rows)
        (weight,) = server.weights.values()
        assert (weight > 0).tolist() == is_wanted.tolist()


def test_dnc_leaves_out_who_stands_out_where_all_differ_most():
    rows = torch.tensor([[0.0, 2.0, 0.0], [0.0, -2.0, 0.0], [0.0, 1.0, 0.1], [0.0, -1.0, 0.0], [9.0, 0.0, 0.0]])
    _, server = moved_by(METHODS["dnc"](attackers=1), rows)
    (weight,) = server.weights.values()
    assert weight.tolist() == [0.25] * 4 + [0.0]


# --- what is refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "count", "words"),
    [
        ({"krum": {"attackers": 1}}, 4, "krum with f = 1 needs the updates of 5 clients at least, got 4 in round 5"),
        ({"krum": {"attackers": 0, "select": 5}}, 4, "Raise cohort.size, or lower attackers or select"),
        ({"bulyan": {"attackers": 1}}, 6, "bulyan with f = 1 needs the updates of 7 clients"),
        ("trimmed_mean", 2, "cuts off 1 at each end, needs the updates of 3 clients at least, got 2"),
        ("clustering", 2, "clustering needs the updates of 3 clients"),
        ({"dnc": {"attackers": 4}}, 4, "dnc, which leaves out 4, needs the updates of 5 clients"),
    ],
)
def test_a_round_of_too_few_clients_is_told(method, count, words):
    with pytest.raises(MethodError, match=words):
        moved_by(made(method), ROWS[:4].repeat(2, 1)[:count])


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("trimmed_mean", {"trim": 0.5}, r"share in \[0, 0.5\), got 0.5"),
        ("krum", {"attackers": 1.5}, "attackers must be a whole number or a share"),
        ("bulyan", {"attackers": -1}, "got -1"),
        ("dnc", {"attackers": 2.5}, "got 2.5"),
        ("sign_guard", {"lower": 4.0}, "lower must be <= upper, 3.0, got 4.0"),
    ],
)
def test_an_option_out_of_range_is_told(name, options, words):
    with pytest.raises(ValueError, match=words):
        METHODS[name](**options)


def test_counts_of_shares_are_rounded_up_but_not_by_rounding():
    krum = METHODS["krum"](attackers=0.07)  # 0.07 * 100 is above 7 in floating point
    rows = torch.randn(100, 2, generator=torch.Generator().manual_seed(0))
    moved_by(krum, rows[:17])  # 2f + 3 <= 17: f is 2
    with pytest.raises(MethodError, match="select"):
        moved_by(METHODS["krum"](attackers=0.07, select=94), rows)
    moved_by(METHODS["krum"](attackers=0.07, select=93), rows)


def test_centered_clipping_says_how_many_it_clipped():
    rows = torch.tensor([[1.0, 0.0], [0.0, 2.0], [9.0, 0.0]])
    _, server = moved_by(METHODS["centered_clipping"](tau=3.0), rows, state={"center": torch.zeros(2)})
    assert server.logged["clipped"] == 1
