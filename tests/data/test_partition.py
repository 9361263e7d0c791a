"""Partition schemes: complete, disjoint, of the stated sizes and skew, and bounded in time."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import get_args

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from scipy.stats import chi2, chi2_contingency

from raysim.base.errors import DataError
from raysim.config.schema_data import FORMS, Scheme
from raysim.core.seeding import derive_seed, numpy_generator
from raysim.data import dirichlet, partition
from raysim.data.dirichlet import cut_capped
from raysim.data.division import label_entropy, partition_table, table_file
from raysim.data.partition import SCHEMES

ALL = [(scheme, form) for scheme, forms in SCHEMES.items() if scheme != "file" for form in forms]
DIRICHLET = sorted(SCHEMES["dirichlet"])


def divide(scheme, labels, clients, form=None, seed=0, **options):
    """The parts of a scheme."""
    known = {
        "alpha": 0.5,
        "min_samples": 1,
        "shards_per_client": 2,
        "labels_per_client": 2,
        "domains": None,
        "targets": labels.astype(np.float32),
        "domains_per_client": 1,
        "samples_per_client": None,
        **options,
    }
    return partition.divide(
        labels, scheme, form or "", {**known, "num_clients": clients, "rng": np.random.default_rng(seed)}
    )


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    """A tenth of the draws that may fail."""
    monkeypatch.setattr(dirichlet, "MAX_NUMBERS", dirichlet.MAX_NUMBERS // 10)
    monkeypatch.setattr(dirichlet, "MAX_SINGLE_DRAWS", dirichlet.MAX_SINGLE_DRAWS // 10)


def class_counts(labels, parts, classes=10):
    return np.stack([np.bincount(labels[part], minlength=classes) for part in parts])


@settings(deadline=None, max_examples=150)
@given(data=st.data(), scheme=st.sampled_from(ALL))
def test_every_example_goes_to_exactly_one_client(data, scheme):
    count = data.draw(st.integers(50, 300))
    labels = np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, data.draw(st.integers(1, 6)), count)
    options = {
        "alpha": data.draw(st.sampled_from([0.01, 0.3, 100.0])),
        "min_samples": data.draw(st.integers(1, 3)),
        "domains": np.random.default_rng(1).integers(0, 4, count),
        "domains_per_client": data.draw(st.integers(1, 4)),
        "shards_per_client": data.draw(st.integers(1, 4)),
        "labels_per_client": data.draw(st.integers(1, 4)),
        "seed": data.draw(st.integers(0, 99)),
    }
    clients = {"natural": 4, "joint": 1}.get(scheme[0]) or data.draw(st.integers(1, 8))
    try:
        parts = divide(scheme[0], labels, clients, scheme[1], **options)
    except DataError:
        event("refused")
        return
    event("done")
    assert len(parts) == clients
    together = np.concatenate(parts)
    assert len(np.unique(together)) == len(together)
    if scheme[0] == "nine_plus_one":
        assert len({len(part) for part in parts}) == 1
    else:
        assert len(together) == count
        assert min(len(part) for part in parts) >= options["min_samples"]
    assert all((np.diff(part) > 0).all() for part in parts)
    again = divide(scheme[0], labels, clients, scheme[1], **options)
    assert all((a == b).all() for a, b in zip(parts, again, strict=True))


@pytest.mark.parametrize("form", DIRICHLET)
def test_dirichlet_is_near_uniform_at_alpha_100_and_near_one_class_at_001(form):
    labels = np.arange(20_000) % 10
    even = class_counts(labels, divide("dirichlet", labels, 10, form, alpha=100.0))
    # Cells are shares of Dir(100), with a relative variance of 1/100: chi-square is near N/100 plus sampling noise.
    assert chi2_contingency(even)[0] < 2 * (len(labels) / 100 + chi2.ppf(0.999, 81))
    # Cramer's V^2: 0 if classes and clients are independent, 1 if each class has its own clients or the reverse.
    strengths = []
    for seed in range(20):
        counts = class_counts(labels, divide("dirichlet", labels, 10, form, seed, alpha=0.01, min_samples=0))
        held = counts[counts.sum(axis=1) > 0]
        strengths.append(chi2_contingency(held)[0] / len(labels) / (min(held.shape) - 1))
    assert np.mean(strengths) > 0.5  # at alpha 1 it would be near 0.1


def test_cut_and_multinomial_have_the_moments_of_the_dirichlet():
    # A client's share of a class has mean 1/n and variance (1/n)(1 - 1/n)/(n alpha + 1).
    totals, rng = np.full(4000, 10_000), np.random.default_rng(0)
    for draw in (partition.cut, partition.multinomial):
        shares = draw(totals, 5, 0.4, rng) / 10_000
        assert np.abs(shares.mean(axis=0) - 0.2).max() < 0.02
        assert np.abs(shares.var(axis=0) / (0.2 * 0.8 / 3.0) - 1).max() < 0.1


def test_multinomial_differs_from_cut_by_sampling_noise_only():
    # Every example draws its client: at alpha -> infinity counts vary as Binomial(n, 1/k), where `cut` is fixed.
    totals, rng = np.full(3000, 400), np.random.default_rng(0)
    assert partition.cut(totals, 4, 1e9, rng).std() < 1
    assert abs(partition.multinomial(totals, 4, 1e9, rng).var() / (400 * 0.25 * 0.75) - 1) < 0.1


@pytest.mark.parametrize("form", DIRICHLET)
def test_1000_clients_at_alpha_001_meet_the_minimum_or_refuse_within_5_s(form):
    labels = np.arange(50_000) % 10
    began = time.perf_counter()
    if form == "balanced":
        assert {len(part) for part in divide("dirichlet", labels, 1000, form, alpha=0.01, min_samples=10)} == {50}
    else:
        with pytest.raises(DataError, match=r"no draw of \d+ gave every client 10 examples") as caught:
            divide("dirichlet", labels, 1000, form, alpha=0.01, min_samples=10)
        assert "Raise partition.alpha, or lower" in str(caught.value)
    assert time.perf_counter() - began < 5


def test_draws_at_once_are_the_draws_one_by_one():
    # 13 clients of at least 30 at alpha 0.1: some hundred draws, in batches of 1, 2, 4 ...
    labels = np.repeat(np.arange(6), [300, 200, 250, 310, 90, 150])
    totals = np.bincount(labels)
    for seed in range(3):
        slow, fast, numbers = np.random.default_rng(seed), np.random.default_rng(seed), []
        count = 1
        while (wanted := partition.cut(totals, 13, 0.1, slow)).sum(axis=0).min() < 30:
            count += 1
        found = dirichlet.redraw(
            dirichlet.cut, labels, 13, rng=fast, alpha=0.1, min_samples=30, on_drawn=numbers.append
        )
        assert (found == wanted).all()
        assert numbers == [count]
        assert count > 10
        assert slow.random() == fast.random()  # who gets which comes next


@pytest.mark.slow
def test_fedvgs_most_heterogeneous_partition_is_found_and_keeps_its_number(monkeypatch):
    # CIFAR-10, 100 clients, alpha 0.05, at least 10 each, all 60,000 rows (split inside the clients), seed 0 of the recipe.
    monkeypatch.undo()
    labels = np.repeat(np.arange(10), 6000)
    numbers = []
    rng = numpy_generator(derive_seed(0, "partition"))
    parts = partition.dirichlet(labels, 100, rng=rng, alpha=0.05, min_samples=10, on_drawn=numbers.append)
    assert numbers == [27601]
    assert min(map(len, parts)) >= 10
    assert sum(map(len, parts)) == 60_000


@pytest.mark.parametrize("draw", [partition.cut, partition.multinomial])
def test_redraws_end_after_a_number_of_draws_on_every_machine(draw, monkeypatch):
    labels, numbers = np.arange(600) % 6, []
    options = {"alpha": 0.1, "min_samples": 10}

    def drawn():
        counts = dirichlet.redraw(draw, labels, 13, rng=np.random.default_rng(0), on_drawn=numbers.append, **options)
        return counts.sum(axis=0).min()

    assert drawn() >= 10
    (needed,) = numbers
    assert needed > 3
    for limit, most in (("MAX_NUMBERS", 6 * 13 * needed), ("MAX_SINGLE_DRAWS", needed)):
        monkeypatch.setattr(dirichlet, limit, most)
        assert drawn() >= 10  # the last draw of all counts
    rng = np.random.default_rng(0)
    best = max(int(draw(np.full(6, 100), 13, 0.1, rng).sum(axis=0).min()) for _ in range(needed - 1))
    is_single = draw is not partition.cut
    for limit, most in [("MAX_SINGLE_DRAWS", needed - 1)] * is_single + [("MAX_NUMBERS", 6 * 13 * needed - 1)]:
        monkeypatch.setattr(dirichlet, limit, most)
        with pytest.raises(DataError, match=f"no draw of {needed - 1} .* 10 examples; the best left one with {best} "):
            drawn()


def test_most_draws_of_one_by_one_forms_are_fewer():
    most = dirichlet._most_draws
    assert most(partition.cut, 1000) == 10 * most(partition.multinomial, 1000) == 10_000
    assert most(partition.cut, 10**9) == 1


def test_hopeless_draws_are_given_up_early():
    labels = np.arange(5000) % 10
    with pytest.raises(DataError, match="no draw of") as caught:
        divide("dirichlet", labels, 200, alpha=0.001, min_samples=10)
    tried = int(str(caught.value).split("no draw of ")[1].split()[0])
    assert dirichlet.TRIAL_DRAWS <= tried < dirichlet.MAX_NUMBERS // 2000 // 2


def test_too_many_clients_is_answered_with_how_many_there_can_be():
    for scheme in ("iid", "dirichlet", "shards", "quantity"):
        with pytest.raises(DataError, match=r"partition\.num_clients to 25"):
            divide(scheme, np.arange(100) % 3, 60, min_samples=4)
        divide(scheme, np.arange(100) % 3, 25, alpha=1e6, min_samples=1)


def test_the_numbers_that_are_advised_are_whole():
    with pytest.raises(DataError, match=r"num_clients to 25, or partition\.min_samples to 1$"):
        divide("iid", np.arange(100) % 3, 60, min_samples=4)


def test_balanced_clients_have_equal_sizes_and_capped_ones_no_more_than_a_class_above_their_share():
    labels = np.repeat(np.arange(5), [10, 200, 300, 91, 402])
    assert {len(part) for part in divide("dirichlet", labels, 9, "balanced", alpha=0.1)} == {111, 112}
    counts = class_counts(labels, divide("dirichlet", labels, 9, "capped", alpha=0.3), 5)
    sizes = np.cumsum(counts, axis=1)
    was_full = sizes[:, :-1] >= len(labels) / 9
    assert was_full.any()
    assert (counts[:, 1:][was_full] <= 1).all()  # a single example may be left over by the truncated cuts


def capped_by_hand(totals, clients, alpha, rng):
    """(classes, clients) as MOON's and FedUV's code cuts: `np.random.dirichlet`, masked, divided by the sum, truncated."""
    sizes, counts = [0] * clients, []
    for total in totals:
        shares = rng.dirichlet(np.repeat(alpha, clients))
        shares = np.array([p * (size < sum(totals) / clients) for p, size in zip(shares, sizes, strict=True)])
        cuts = [0, *(np.cumsum(shares / shares.sum()) * total).astype(int)[:-1].tolist(), total]
        counts.append([end - start for start, end in pairwise(cuts)])
        sizes = [size + count for size, count in zip(sizes, counts[-1], strict=True)]
    return counts


@pytest.mark.parametrize("alpha", [0.01, 0.3])
def test_capped_cuts_are_those_of_the_code_it_comes_from(alpha):
    """To the example: at alpha 0.01 the last client's classes are made by rounding; without the first division 47, not 40."""
    totals = [450] * 100
    held = []
    for seed in range(60):
        got = cut_capped(np.array(totals), 10, alpha, np.random.RandomState(seed))  # the generator of that code
        assert got.tolist() == capped_by_hand(totals, 10, alpha, np.random.RandomState(seed))
        assert (got >= 0).all()
        held.append((got[:, -1] > 0).sum())
    assert alpha != 0.01 or np.mean(held) == pytest.approx(40.5, abs=2.5)  # three standard errors of 60 draws


def test_capped_shares_a_class_evenly_where_all_shares_vanish():
    class Vanishing:
        def standard_gamma(self, alpha, size):
            return np.zeros(size)

    assert cut_capped(np.array([12, 12]), 4, 0.01, Vanishing()).tolist() == [[3] * 4] * 2


def test_shards_give_a_client_few_classes():
    labels = np.random.default_rng(0).permutation(np.arange(1000) % 10)
    parts = divide("shards", labels, 50, shards_per_client=2)
    assert {len(part) for part in parts} == {20}
    present = (class_counts(labels, parts) > 0).sum(axis=1)
    assert set(present) == {1, 2}


def test_labels_gives_each_client_so_many_classes_and_cuts_a_class_evenly():
    labels = np.random.default_rng(0).permutation(np.arange(1000) % 10)
    for count, clients in ((2, 10), (3, 25), (10, 12)):
        counts = class_counts(labels, divide("labels", labels, clients, labels_per_client=count))
        assert ((counts > 0).sum(axis=1) == count).all()
        assert all(counts[client, client % 10] for client in range(clients))  # every class is somebody's
        for of_class in counts.T:
            assert np.ptp(of_class[of_class > 0]) <= 1
    owners = [tuple(np.flatnonzero(row)) for row in counts]
    assert len(set(owners)) == 1
    drawn = {seed: class_counts(labels, divide("labels", labels, 10, seed=seed)).tolist() for seed in range(5)}
    assert drawn[0] == class_counts(labels, divide("labels", labels, 10, seed=0)).tolist()
    assert drawn[0] != drawn[1]
    for clients, options, words in (
        (10, {"labels_per_client": 11}, "partition.labels_per_client to 10 or less"),
        (4, {"labels_per_client": 2}, "partition.num_clients to 10 or more"),
    ):
        with pytest.raises(DataError, match=words):
            divide("labels", labels, clients, **options)


def test_quantity_skews_sizes_and_not_classes():
    labels = np.arange(100_000) % 10
    for form, alpha in (("dirichlet", 0.3), ("power", 1.0)):
        counts = class_counts(labels, divide("quantity", labels, 8, form, alpha=alpha, min_samples=500))
        assert counts.sum(axis=1).min() >= 500
        assert counts.sum(axis=1).max() > 4 * counts.sum(axis=1).min()
        assert chi2_contingency(counts)[1] > 1e-4  # sizes are no evidence about classes
    sizes = np.sort([len(p) for p in divide("quantity", labels, 8, "power", alpha=1.0, min_samples=1)])[::-1] - 1
    expected = (1 / np.arange(1, 9)) / (1 / np.arange(1, 9)).sum() * (100_000 - 8)
    assert np.abs(sizes - expected).max() <= 8


def test_domain_and_natural_follow_the_column():
    domains = np.random.default_rng(0).integers(0, 4, 400)
    labels = np.zeros(400, np.int64)
    for scheme in ("domain", "natural"):
        for client, part in enumerate(divide(scheme, labels, 4, domains=domains)):
            assert (part == np.flatnonzero(domains == client)).all()
    parts = divide("domain", labels, 10, domains=domains, domains_per_client=2)
    owners = [set(domains[part]) for part in parts]
    assert all(len(owned) == 2 for owned in owners)
    assert all(sum(d in owned for owned in owners) == 5 for d in range(4))
    for bad, clients, words in (
        ({"domains": None}, 4, "no domain column"),
        ({"domains": domains}, 3, "partition.num_clients to 4"),
        ({"domains": domains, "domains_per_client": 5}, 4, "partition.domains_per_client to 4"),
    ):
        with pytest.raises(DataError, match=words):
            divide("domain", labels, clients, **bad)
    with pytest.raises(DataError, match=r"partition\.num_clients to 4"):
        divide("natural", labels, 5, domains=domains)


def test_nine_plus_one_has_one_balanced_client_of_the_same_size():
    labels = np.arange(39_000) % 10  # CIFAR-10's training share
    counts = class_counts(labels, divide("nine_plus_one", labels, 10, alpha=0.05))
    assert (counts.sum(axis=1) == 3900).all()
    assert (counts[1] == 390).all()
    others = np.delete(counts, 1, axis=0)
    assert np.median(label_entropy(others)) < 1.5 < label_entropy(counts)[1] == pytest.approx(np.log2(10))
    counts = class_counts(labels, divide("nine_plus_one", labels, 10, alpha=0.05, samples_per_client=500))
    assert (counts.sum(axis=1) == 500).all()
    for size in (3910, 501):
        with pytest.raises(DataError, match=r"partition\.samples_per_client to 3900 or a smaller multiple of 10"):
            divide("nine_plus_one", labels, 10, alpha=0.05, samples_per_client=size)


@pytest.mark.parametrize(("scheme", "clients", "most"), [("nine_plus_one", 10, 100), ("joint", 1, 1000)])
def test_a_minimum_above_what_clients_get_is_refused(scheme, clients, most):
    labels = np.arange(1000) % 10
    assert len(divide(scheme, labels, clients, alpha=0.05, min_samples=most)) == clients
    with pytest.raises(
        DataError, match=rf"cannot give .* {most + 1} each in partition {scheme}.*min_samples to {most}"
    ):
        divide(scheme, labels, clients, alpha=0.05, min_samples=most + 1)


def test_configuration_offers_every_scheme_and_form():
    assert set(get_args(Scheme)) == set(SCHEMES)
    assert {scheme: tuple(forms) for scheme, forms in SCHEMES.items() if len(forms) > 1} == FORMS


def test_partition_table_by_hand():
    suffix, content = table_file(partition_table(np.array([[4, 4, 0], [0, 3, 0], [1, 2, 1]])))
    assert suffix == ".csv"
    assert content.decode().splitlines() == [
        "client,examples,classes,label_entropy_bits,largest_class,largest_share",
        *("0,8,2,1.0,0,0.5", "1,3,1,0.0,1,1.0", "2,4,3,1.5,1,0.5"),
    ]


def halves_and_nobody(*, labels, num_clients):
    """An empty client, as a list, beside arrays."""
    return [np.arange(0, len(labels), 2), [], np.arange(1, len(labels), 2)]


def shares_of_positions(*, labels, num_clients):
    return [np.arange(3) + 0.5] * num_clients


def test_positions_of_ones_own_scheme_are_whole_numbers_and_a_client_may_have_none():
    labels = np.zeros(6, np.int64)
    known = dict.fromkeys(partition.OFFERED) | {"num_clients": 3, "min_samples": 0}
    parts = partition.user_parts("tests.data.test_partition:halves_and_nobody", labels, known, {})
    assert [part.tolist() for part in parts] == [[0, 2, 4], [], [1, 3, 5]]
    with pytest.raises(DataError, match=r"client 0 got an array of shape \(3,\) and type float64"):
        partition.user_parts("tests.data.test_partition:shares_of_positions", labels, known, {})
