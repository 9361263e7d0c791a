"""Calibration's numbers: Gram form against dense least squares, planted coefficients, forest, SHAP, the table."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pytest
import torch

from methods.livar import livar
from methods.livar.calibration import SMALLEST, Explanation, curve, explain, quantile_ranks, rows_of_run, table_from
from methods.livar.importance import CUTS, TABLES, plain_table, raw_coefficients, table_of
from methods.livar.regression import gram, target_coefficients


def factors(count, rank=3, d_in=7, d_out=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(count, *shape, generator=generator) for shape in ((rank, d_in), (d_out, rank))]
    return draw[0], draw[1]


def dense(a, b):
    return np.stack([(one_b.double() @ one_a.double()).numpy() for one_a, one_b in zip(a, b, strict=True)])


def dense_objective(products, joint, shares, ridge):
    """Eq. 4 as it is written, with every product formed."""
    count = len(products)
    tau = ridge * sum((p**2).sum() for p in products) / count
    gap = joint - sum(share * product for share, product in zip(shares, products, strict=True))
    return (gap**2).sum() + tau * ((shares - 1 / count) ** 2).sum()


def naive_minimum(products, joint, ridge):
    """Every choice of which coefficients are 0, the rest by dense least squares; the best that is allowed."""
    count = len(products)
    tau = ridge * sum((p**2).sum() for p in products) / count
    matrix = np.vstack([np.stack([p.ravel() for p in products], axis=1), np.sqrt(tau) * np.eye(count)])
    wanted = np.concatenate([joint.ravel(), np.full(count, np.sqrt(tau) / count)])
    best, least = None, np.inf
    for state in itertools.product([True, False], repeat=count):
        shares = np.zeros(count)
        free = [index for index, is_free in enumerate(state) if is_free]
        if free:
            shares[free] = np.linalg.lstsq(matrix[:, free], wanted, rcond=None)[0]
        if shares.min() < -1e-12:
            continue
        value = dense_objective(products, joint, shares, ridge)
        if value < least:
            best, least = shares, value
    return best


@pytest.mark.parametrize("ridge", [0.0, 1e-6, 0.1])
@pytest.mark.parametrize("seed", range(4))
def test_gram_form_is_the_dense_least_squares(ridge, seed):
    a, b = factors(5, seed=seed)
    products = dense(a, b)
    inner = gram(a, b)
    assert np.allclose(inner, np.einsum("iab,jab->ij", products, products), rtol=1e-12)
    got = target_coefficients(inner[:4, :4], inner[:4, 4], ridge=ridge)
    assert np.allclose(got, naive_minimum(products[:4], products[4], ridge), atol=1e-8)


def test_the_constraint_binds_somewhere():
    """Else the test above would say nothing of the constraint."""
    for seed in range(4):
        a, b = factors(5, seed=seed)
        b[4] = -3 * b[0]
        a[4] = a[0]
        inner = gram(a, b)
        assert target_coefficients(inner[:4, :4], inner[:4, 4])[0] == 0


def test_planted_coefficients_are_recovered():
    a, b = factors(4, seed=9)
    planted = np.array([0.4, 0.0, 0.35, 0.25])
    products = dense(a, b)
    joint = np.einsum("k,kab->ab", planted, products)
    target = np.einsum("kab,ab->k", products, joint)
    assert np.allclose(target_coefficients(gram(a, b), target, ridge=1e-12), planted, atol=1e-7)


def test_identical_clients_get_the_same_by_the_ridge():
    a, b = (part[:1].expand(4, -1, -1) for part in factors(1))
    inner = gram(a, b)
    assert np.allclose(target_coefficients(inner, inner[0]), 0.25, atol=1e-6)
    assert (target_coefficients(np.zeros((4, 4)), np.zeros(4)) == 0.25).all()


def test_ranks_are_positions_between_the_smallest_and_the_largest():
    assert quantile_ranks(np.array([3.0, 1.0, 2.0, 9.0, 9.0])).tolist() == [0.5, 0.0, 0.25, 0.875, 0.875]
    assert quantile_ranks(np.array([7.0])).tolist() == [0.5]


def made_rows(seed=0, clients=6, layers=12):
    rng = np.random.default_rng(seed)
    parts = []
    for run in range(2):
        importance = rng.gamma(1.0, size=(clients, layers, 2)) * (1 + 2 * run)  # runs of different size
        places = np.stack([quantile_ranks(importance[..., f].ravel()).reshape(clients, layers) for f in (0, 1)], axis=2)
        coefficients = 0.05 + 0.1 * (places[..., 1] > 0.8) - 0.03 * (places[..., 0] > 0.5)
        names = [f"layer{index}" for index in range(layers)]
        parts.append(
            rows_of_run(str(run), np.arange(clients), names, importance, rng.integers(5, 50, clients), coefficients)
        )
    return pd.concat(parts, ignore_index=True)


@pytest.mark.parametrize("count_feature", [False, True])
def test_base_and_contributions_are_the_prediction(count_feature):
    rows = made_rows()
    found = explain(rows, count_feature=count_feature, trees=8)
    assert found.contributions.shape == (len(rows), 3 if count_feature else 2)
    assert np.allclose(found.base + found.contributions.sum(1), found.predictions, atol=1e-10)
    assert found.base == pytest.approx(rows.coefficient.mean(), rel=0.1)


def test_table_is_base_and_mean_contributions_of_each_cell():
    bins = np.array([[0, 0], [0, 0], [0, 2], [2, 1]])
    parts = np.array([[0.01, 0.02], [0.03, 0.04], [-0.02, 0.1], [-0.5, 0.05]])
    found = Explanation(0.2, np.column_stack([parts, np.full(4, 9.0)]), np.zeros(4), 0.0)
    table, counts = table_from(found, bins)
    assert counts.tolist() == [[2, 0, 1], [0, 0, 0], [0, 1, 0]]
    low_a, b = 0.02 / 3, [0.03, 0.05, 0.1]  # means of the bins by themselves
    want = [
        [0.2 + 0.05, 0.2 + low_a + b[1], 0.2 + 0.08],
        [0.2 + b[0], 0.2 + b[1], 0.2 + b[2]],  # no I_A is in the middle
        [SMALLEST, SMALLEST, SMALLEST],  # 0.2 - 0.5 + b < 0
    ]
    assert np.allclose(table, want)


def test_planted_table_comes_back():
    rows = made_rows(clients=10, layers=24)
    bins = rows[["bin_a", "bin_b"]].to_numpy()
    table, counts = table_from(explain(rows, count_feature=False, trees=30), bins)
    assert counts.sum() == len(rows)
    want = 0.05 + 0.1 * np.array([0, 0, 1])[None] - 0.03 * np.array([0, 0, 1])[:, None]
    assert np.abs(table - want).max() < 0.01
    first = rows[rows.run == "0"]
    importance = torch.from_numpy(first[["importance_a", "importance_b"]].to_numpy().reshape(10, 24, 2))
    assert torch.equal(
        raw_coefficients(importance, table_of(table.tolist())).flatten(), torch.from_numpy(table[tuple(bins[:240].T)])
    )


def test_curve_is_the_mean_in_each_stretch_of_the_quantile():
    found = curve(np.array([0.0, 0.05, 0.6, 1.0]), np.array([1.0, 3.0, 5.0, -1.0]), num_bins=10)
    assert found["quantile"] == pytest.approx([0.05, 0.65, 0.95])
    assert found["mean"] == [2.0, 5.0, -1.0]
    assert found["std"] == [1.0, 0.0, 0.0]
    assert found["count"] == [2, 1, 1]


def test_tables_of_ones_own_and_their_cuts():
    rows = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    importance = torch.arange(24, dtype=torch.float64).reshape(3, 4, 2)
    assert torch.equal(
        raw_coefficients(importance, table_of("paper")),
        raw_coefficients(importance, table_of({"table": TABLES["paper"]})),
    )
    own = raw_coefficients(importance, table_of({"table": rows, "cuts": [[0, 1], [0, 1]]}))
    assert (own == 5).all()  # nothing is strictly outside the smallest and the largest
    assert plain_table({"table": rows, "base": 3}) == {"table": rows, "cuts": [list(pair) for pair in CUTS]}


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ([[1, 2, 3], [4, 5, 6]], "3 rows of 3 numbers"),
        ([[1, 2, 3], [4, 5, 6], [7, 8, "x"]], "3 rows of 3 numbers"),
        ([[1, 2, 3], [4, 0, 6], [7, 8, 9]], "must be > 0"),
        ({"tables": 3}, "3 rows of 3 numbers"),
        ({"table": [[1] * 3] * 3, "cuts": [[0.5, 0.2], [0, 1]]}, "rising quantiles"),
        ("papers", "unknown table 'papers'"),
    ],
)
def test_malformed_tables_are_refused(table, words):
    with pytest.raises(ValueError, match=words):
        livar(table=table)
