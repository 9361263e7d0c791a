"""dp: what rounds cost, against the library's own tests, formulas and integrals."""

from __future__ import annotations

import math

import dp_accounting
import dp_accounting.pld
import numpy as np
import pytest
from scipy import stats
from scipy.special import logsumexp

from methods.dp import epsilon_after, epsilon_by_pld, epsilon_by_rounds, noise_for, spending
from tests.support.federations import plan_of, server_on


def test_poisson_rounds_cost_what_the_librarys_own_test_says():
    """dp-accounting, test_compute_rdp_poisson_sampled_gaussian: q 0.01, noise 2.5, 50 rounds."""
    orders, divergences = spending(2.5, 10, 1000, "poisson")
    at = dict(zip(orders.tolist(), (50 * divergences).tolist(), strict=True))
    wanted = {1.5: 6.70579741e-04, 2.5: 1.08548710e-03, 5.0: 2.18075656e-03, 50.0: 2.38460375e-02}
    assert [at[order] for order in wanted] == [pytest.approx(value, rel=1e-4) for value in wanted.values()]


def epsilon_by_hand(divergence, rounds, delta, orders):
    """Canonne, Kamath, Steinke 2020 (arXiv:2004.00010), proposition 12: the least over the orders."""
    return min(
        rounds * divergence(a) + math.log((a - 1) / a) - (math.log(delta) + math.log(a)) / (a - 1) for a in orders
    )


def poisson_by_hand(q, sigma):
    """Mironov, Talwar, Zhang 2019 (arXiv:1908.10530), section 3.3: whole orders of the sampled Gaussian mechanism."""

    def divergence(order):
        terms = [
            math.comb(order, k) * (1 - q) ** (order - k) * q**k * math.exp((k * k - k) / (2 * sigma**2))
            for k in range(order + 1)
        ]
        return math.log(math.fsum(terms)) / (order - 1)

    return divergence


@pytest.mark.parametrize(
    ("noise", "size", "population", "rounds"), [(1.0, 10, 1000, 200), (2.0, 7, 12, 30), (4.0, 50, 50, 5)]
)
def test_epsilon_of_poisson_rounds_is_that_of_the_formula(noise, size, population, rounds):
    spent, whole = spending(noise, size, population, "poisson"), range(2, 33)
    divergence = poisson_by_hand(size / population, noise)
    at = dict(zip(spent[0].tolist(), spent[1].tolist(), strict=True))
    np.testing.assert_allclose([at[order] for order in whole], [divergence(order) for order in whole], rtol=1e-6)
    found, by_hand = epsilon_after(rounds, spent, 1e-5), epsilon_by_hand(divergence, rounds, 1e-5, whole)
    assert 0.95 * by_hand < found <= by_hand + 1e-9  # the library has orders between whole ones as well


def test_everybody_in_every_round_is_the_gaussian_mechanism():
    """Poisson: a client more or less moves the sum by S; fixed cohorts: one in another's place moves it by 2 S."""
    sigma = 4.530877117  # epsilon 1 at delta 1e-6 in the library's own test
    for sampling, noise in (("poisson", sigma), ("fixed", 2 * sigma)):
        assert epsilon_after(1, spending(noise, 50, 50, sampling), 1e-6) == pytest.approx(1.0, rel=2e-3)


def divergence_by_integral(order, q, sigma):
    """Renyi divergence of a client at S and one at -S among others at 0, cohorts of a share q, by a sum over a grid."""
    x = np.linspace(-60, 60, 200_001)
    with np.errstate(divide="ignore"):
        shares = np.log([1 - q, q])[:, None]

    def log_density(mean):
        return logsumexp(stats.norm.logpdf(x, [[0], [mean]], sigma) + shares, axis=0)

    exponents = order * log_density(1) + (1 - order) * log_density(-1)
    return (logsumexp(exponents) + math.log(x[1] - x[0])) / (order - 1)


@pytest.mark.parametrize("q", [0.1, 0.5, 1.0])
def test_fixed_cohorts_cost_no_less_than_two_such_populations_differ(q):
    orders, divergences = spending(2.0, int(100 * q), 100, "fixed")
    at = dict(zip(orders.tolist(), divergences.tolist(), strict=True))
    for order in (2, 4, 8):
        true = divergence_by_integral(order, q, 2.0)
        assert true <= at[float(order)] * (1 + 1e-6)
        assert q < 1 or at[float(order)] == pytest.approx(true)


def test_epsilon_grows_slower_and_slower_so_that_a_straight_line_is_above_it():
    for sampling, noise in (("poisson", 1.0), ("fixed", 2.0)):
        epsilons = np.array([epsilon_after(t, spending(noise, 20, 500, sampling), 1e-5) for t in range(1, 120)])
        assert (np.diff(epsilons) > 0).all()
        assert (np.diff(epsilons, 2) < 1e-9).all()


def test_epsilon_of_each_round_is_logged_and_the_next_ones_comes_true(root):
    server = server_on(plan_of(root, [{"dp": {"noise": 2.0}}]), root)
    first, second = (server.run_round(index).metrics for index in range(2))
    assert first["dp/epsilon"] == epsilon_after(1, spending(2.0, 7, 12, "fixed"), 1e-5)
    assert first["dp/next_epsilon"] == second["dp/epsilon"] > first["dp/epsilon"]
    assert "dp/num_trusted" not in first


def test_without_noise_epsilon_is_infinite(root):
    metrics = server_on(plan_of(root, [{"dp": {"noise": 0.0}}]), root).run_round(0).metrics
    assert metrics["dp/epsilon"] == math.inf


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
@pytest.mark.parametrize(("epsilon", "rounds"), [(8.0, 20), (1.0, 5)])
def test_noise_for_an_epsilon_is_the_least_that_keeps_it(epsilon, rounds, sampling):
    noise = noise_for("rdp", epsilon, 1e-5, rounds, 10, 200, sampling)
    assert epsilon_after(rounds, spending(noise, 10, 200, sampling), 1e-5) <= epsilon
    assert epsilon_after(rounds, spending(noise - 0.004, 10, 200, sampling), 1e-5) > epsilon


def test_noise_for_an_epsilon_of_one_gaussian_release_is_the_librarys():
    assert noise_for("rdp", 1.0, 1e-6, 1, 50, 50, "poisson") == pytest.approx(4.530877117, rel=2e-3)  # see above


@pytest.mark.parametrize(
    ("noise", "size", "population", "rounds"), [(1.0, 10, 200, 21), (0.8, 5, 100, 60), (4.0, 50, 50, 5)]
)
def test_epsilon_by_privacy_losses_is_the_librarys_accountants_at_a_tenth_of_the_bins(noise, size, population, rounds):
    accountant = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-4)
    event = dp_accounting.PoissonSampledDpEvent(size / population, dp_accounting.GaussianDpEvent(noise))
    accountant.compose(event, rounds)
    found = epsilon_by_rounds("pld", 1e-5, noise, size, population, "poisson")
    assert found(rounds) == pytest.approx(accountant.get_epsilon(1e-5), abs=2e-3)
    assert found(rounds) < epsilon_by_rounds("rdp", 1e-5, noise, size, population, "poisson")(rounds)
    one, *more = [found(count) for count in range(1, rounds + 1)]  # as asked for in a resumed run, out of order
    epsilon_by_pld.cache_clear()
    again = epsilon_by_rounds("pld", 1e-5, noise, size, population, "poisson")
    assert [again(count) for count in range(1, rounds + 1)] == [one, *more]


def test_noise_by_privacy_losses_is_the_least_that_keeps_an_epsilon_and_less_than_by_divergences():
    noise = noise_for("pld", 2.0, 1e-5, 20, 10, 200, "poisson")
    assert epsilon_by_rounds("pld", 1e-5, noise, 10, 200, "poisson")(20) <= 2.0 + 1e-6
    assert epsilon_by_rounds("pld", 1e-5, noise - 0.004, 10, 200, "poisson")(20) > 2.0
    assert noise < noise_for("rdp", 2.0, 1e-5, 20, 10, 200, "poisson") - 0.02
