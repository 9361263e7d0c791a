"""LIVAR's importances and their coefficients by hand, and their property checks and degenerate cases."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from methods.livar.importance import (
    TABLES,
    ImportanceCount,
    layer_coefficients,
    raw_coefficients,
    step_importance,
    table_of,
)
from tests.support.federations import lora_plan
from tests.twins.livar import ROWS

RELEASED = table_of("released")


def some_importance(clients=5, layers=8, seed=0):
    return torch.rand(clients, layers, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def coefficients(importance, active=None, table="released"):
    active = torch.ones(len(importance), dtype=torch.bool) if active is None else torch.tensor(active)
    shares = active.double() / active.sum().clamp_min(1)
    return layer_coefficients(importance, active, shares, table_of(table))


def test_tables_are_the_published_ones():
    assert {name: [list(row) for row in table] for name, table in TABLES.items()} == ROWS


def test_raw_coefficients_by_hand():
    importance = torch.tensor([[[0.0, 5.0]], [[1.0, 0.0]], [[2.0, 4.0]], [[3.0, 1.0]], [[4.0, 2.0]]])
    # I_A quantiles 1 and 2, I_B quantiles 2.8 (0.60) and 4.2 (0.80) with linear interpolation.
    assert raw_coefficients(importance.double(), RELEASED)[:, 0].tolist() == [
        0.19313978,  # low, high
        0.03813978,  # mid (equal to the threshold), low
        0.08813978,  # mid, mid
        0.03813978,  # high, low
        0.03813978,
    ]


def test_coefficients_sum_to_one_within_the_tables_ratio():
    for seed in range(5):
        table = coefficients(some_importance(seed=seed))
        assert (table.sum(0) - 1).abs().max() < 1e-12
        assert table.min() > 0
        assert (table.amax(0) / table.amin(0)).max() <= 0.19313978 / 0.03813978 + 1e-12


def test_coefficients_depend_on_the_order_of_importances_only():
    importance = some_importance()
    want = coefficients(importance)
    assert torch.equal(coefficients(importance * torch.tensor([3.0, 0.01], dtype=torch.float64)), want)
    # Interpolated thresholds move with the transform, but stay between the same two values.
    assert torch.equal(coefficients(importance.exp()), want)
    swapped = coefficients(importance[[1, 0, 2, 3, 4]])
    assert torch.allclose(swapped[[1, 0, 2, 3, 4]], want, atol=1e-15)


def test_raw_coefficients_are_monotone_in_both_bins():
    for table in TABLES.values():
        values = torch.tensor(table)
        assert (values.diff(dim=1) >= 0).all()
        assert (values.diff(dim=0) <= 0).all()


def test_equal_importances_and_one_participant():
    for value in (0.0, 7.0):
        equal = torch.full((4, 3, 2), value, dtype=torch.float64)
        assert (raw_coefficients(equal, RELEASED) == 0.08813978).all()
        assert torch.allclose(coefficients(equal), torch.full((4, 3), 0.25, dtype=torch.float64), atol=1e-15)
    assert torch.equal(coefficients(some_importance(1)), torch.ones(1, 8, dtype=torch.float64))


def test_identical_clients_get_uniform_coefficients():
    table = coefficients(some_importance(1).expand(4, -1, -1))
    assert torch.allclose(table, torch.full((4, 8), 0.25, dtype=torch.float64), atol=1e-15)


def test_mostly_zero_importances_leave_nothing_low():
    importance = some_importance()
    importance[:4, :, 1] = 0.0
    assert (raw_coefficients(importance, RELEASED)[:4] > 0.04).all()


def test_idle_clients_count_neither_in_quantiles_nor_in_weights():
    importance = some_importance()
    table = coefficients(importance, [True, False, True, True, True])
    assert torch.equal(table[1], torch.zeros(8, dtype=torch.float64))
    assert torch.equal(table[[0, 2, 3, 4]], coefficients(importance[[0, 2, 3, 4]]))
    assert torch.equal(coefficients(importance, [False] * 5), torch.zeros(5, 8, dtype=torch.float64))


def test_non_finite_importance_gives_shares_for_that_layer():
    importance = some_importance()
    importance[2, 3, 0] = math.inf
    shares = torch.tensor([0.1, 0.2, 0.3, 0.2, 0.2], dtype=torch.float64)
    table = layer_coefficients(importance, torch.ones(5, dtype=torch.bool), shares, RELEASED)
    assert torch.equal(table[:, 3], shares)
    others = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(table[:, others], coefficients(importance[:, others]))


def released_raw(importance, table):
    """The rule of the released code with loops: quantiles over all values, strict comparisons; before it normalises."""
    cuts = [
        torch.quantile(importance[..., f].flatten(), torch.tensor(q).double())
        for f, q in ((0, [0.25, 0.5]), (1, [0.6, 0.8]))
    ]
    rows = torch.zeros(importance.shape[:2], dtype=torch.float64)
    for client in range(len(importance)):
        for layer, values in enumerate(importance[client]):
            (row, column) = (
                0 if v < low else 2 if v > high else 1 for v, (low, high) in zip(values, cuts, strict=True)
            )
            rows[client, layer] = table[row][column]
    return rows


def test_non_finite_importances_are_handled_otherwise_than_in_the_released_code():
    """There infinity is high, and one NaN makes every quantile NaN and so every bin the middle; here the layer has shares."""
    importance, shares = some_importance(), torch.tensor([0.1, 0.2, 0.3, 0.2, 0.2], dtype=torch.float64)
    everyone = torch.ones(5, dtype=torch.bool)
    assert torch.equal(released_raw(importance, ROWS["released"]), raw_coefficients(importance, RELEASED))
    for value in (math.inf, math.nan):
        broken = importance.clone()
        broken[2, 3] = value
        assert torch.equal(layer_coefficients(broken, everyone, shares, RELEASED)[:, 3], shares)
        theirs = released_raw(broken, ROWS["released"])
        assert (theirs == 0.08813978).all() if math.isnan(value) else theirs[2, 3] == 0.09313978


def test_the_importance_of_a_step_by_hand():
    grad, moved = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([0.5, 1.0, 0.25])
    assert float(step_importance(grad, moved)) == 0.75


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_step_on_a_gradient_that_is_not_finite_counts_nothing(root, value):
    layout = lora_plan(root).layout
    start = torch.zeros(layout.num_params)
    count = ImportanceCount(SimpleNamespace(layout=layout, start=start, params=start))
    count.open_step(torch.full_like(start, value))
    count.close_step(start + 1)
    assert not count.sums.any()
