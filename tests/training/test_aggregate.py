"""The exact fold against `math.fsum`, in any order and any grouping."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from raysim.core.layout import layout_of
from raysim.core.weights import RightMap, take
from raysim.training import aggregate
from raysim.training.aggregate import fold, rounding_constants

HOSTILE = [0.0, 1e-30, -1e-30, 1e30, -1e30, 1e-45, -1e-40, 1.0, -3.14159, 1e-7, 16777217.0]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.fc = nn.Linear(5, 3)


LAYOUT = layout_of(Net(), head="fc", channels_last=True)


def peaks_of(updates):
    return torch.stack([LAYOUT.norms(update, math.inf) for update in updates])


def hostile_updates(data, count):
    values = data.draw(
        st.lists(st.sampled_from(HOSTILE) | st.floats(-(2.0**100), 2.0**100, width=32), min_size=20, max_size=60)
    )
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    index = torch.randint(len(values), (count, LAYOUT.num_state), generator=generator)
    return torch.tensor(values, dtype=torch.float32)[index]


def some_weights(kind, count, generator):
    weights = {leaf.name: torch.rand(count, dtype=torch.float64, generator=generator) for leaf in LAYOUT.leaves}
    if kind == "uniform":
        same = torch.rand(count, dtype=torch.float64, generator=generator)
        weights = dict.fromkeys(weights, same)
    if kind == "negative":  # as SCAFFOLD's differences or a fitted mixture may have them
        weights = {name: torch.randn(count, dtype=torch.float64, generator=generator) for name in weights}
        weights["fc.weight"] = torch.randn(count, 3, dtype=torch.float64, generator=generator)
    if kind == "rows":
        weights["fc.weight"] = torch.rand(count, 3, dtype=torch.float64, generator=generator)
        weights["conv.weight"] = torch.rand(count, 4, dtype=torch.float64, generator=generator)
    if kind == "elements":
        weights["conv.weight"] = torch.rand(count, 4, 3, 3, 3, dtype=torch.float64, generator=generator)
        weights["conv.bias"] = torch.rand(count, 4, dtype=torch.float64, generator=generator)
    if kind == "leading":
        weights["conv.weight"] = torch.rand(count, 4, 3, dtype=torch.float64, generator=generator)
    if kind == "map":
        weights["fc.weight"] = RightMap(torch.randn(count, 5, 5, dtype=torch.float64, generator=generator))
    if kind == "missing":
        del weights["conv.weight"], weights["norm.running_mean"]
    return weights


def naive(updates, weights):
    """sum_k a_k u_k, exactly rounded, entry by entry, on the views."""
    total = torch.zeros(LAYOUT.num_state, dtype=torch.float64)
    for leaf in LAYOUT.leaves:
        if leaf.name not in weights:
            continue
        weight = weights[leaf.name]
        parts = []
        for k, update in enumerate(updates):
            value = LAYOUT.view(update, leaf).double()
            if isinstance(weight, RightMap):
                parts.append(value @ weight.maps[k])
            else:
                w = weight[k]
                parts.append(value * w.reshape(*w.shape, *[1] * (value.dim() - w.dim())))
        stacked = torch.stack(parts).flatten(1)
        exact = torch.tensor([math.fsum(column.tolist()) for column in stacked.T], dtype=torch.float64)
        LAYOUT.view(total, leaf).copy_(exact.view(leaf.shape))
    return total


KINDS = ["uniform", "scalars", "negative", "rows", "elements", "leading", "map", "missing"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_fold_is_the_same_in_every_order_and_grouping(kind, data, monkeypatch):
    monkeypatch.setattr(aggregate, "STRETCH", data.draw(st.sampled_from([64, 2**16])))
    count = data.draw(st.integers(2, 9))
    updates = hostile_updates(data, count)
    weights = some_weights(kind, count, torch.Generator().manual_seed(count))
    constants = rounding_constants(LAYOUT, weights, peaks_of(updates))
    whole = fold(LAYOUT, updates, weights, constants)
    order = torch.tensor(data.draw(st.permutations(range(count))))
    cuts = sorted(data.draw(st.sets(st.integers(1, count - 1))))
    parts = [
        fold(LAYOUT, updates[rows], take(weights, rows), constants)
        for rows in (order[a:b] for a, b in itertools.pairwise([0, *cuts, count]))
    ]
    for arrangement in (parts, parts[::-1]):
        total = torch.zeros_like(whole)
        for part in arrangement:
            total += part
        assert torch.equal(total, whole)
    reordered = rounding_constants(LAYOUT, take(weights, order), peaks_of(updates[order]))
    assert torch.equal(reordered, constants)


@pytest.mark.parametrize("kind", KINDS)
def test_fold_errs_less_than_a_float32_sum(kind):
    generator = torch.Generator().manual_seed(1)
    for scale in (1e-30, 1e-3, 1.0, 1e20):
        updates = torch.randn(40, LAYOUT.num_state, generator=generator) * scale
        weights = some_weights(kind, 40, generator)
        got = fold(LAYOUT, updates, weights, rounding_constants(LAYOUT, weights, peaks_of(updates)))
        want = naive(updates, weights)
        plain = torch.zeros(LAYOUT.num_state)
        for k in range(40):
            for leaf in LAYOUT.leaves:
                weight = weights.get(leaf.name)
                if isinstance(weight, torch.Tensor) and weight.dim() == 1:
                    LAYOUT.view(plain, leaf).add_(LAYOUT.view(updates[k], leaf), alpha=float(weight[k]))
        for leaf in LAYOUT.leaves:
            error = (LAYOUT.view(got, leaf) - LAYOUT.view(want, leaf)).abs().max()
            size = LAYOUT.view(want, leaf).abs().max()
            assert error <= 1e-12 * size
            weight = weights.get(leaf.name)
            if isinstance(weight, torch.Tensor) and weight.dim() == 1:
                other = (LAYOUT.view(plain, leaf).double() - LAYOUT.view(want, leaf)).abs().max()
                assert error < other / 1000


def test_fold_error_is_bounded_by_the_grid_for_hostile_magnitudes():
    updates = torch.tensor(HOSTILE)[
        torch.randint(len(HOSTILE), (9, LAYOUT.num_state), generator=torch.Generator().manual_seed(0))
    ]
    weights = some_weights("scalars", 9, torch.Generator().manual_seed(0))
    peaks = peaks_of(updates)
    got = fold(LAYOUT, updates, weights, rounding_constants(LAYOUT, weights, peaks))
    want = naive(updates, weights)
    for index, leaf in enumerate(LAYOUT.leaves):
        bound = float((weights[leaf.name] * peaks[:, index]).sum())
        assert (LAYOUT.view(got, leaf) - LAYOUT.view(want, leaf)).abs().max() <= bound * 9 * 2**-51


def test_fold_of_zeros_is_zero_and_nonfinite_is_refused():
    updates = torch.zeros(3, LAYOUT.num_state)
    weights = some_weights("scalars", 3, torch.Generator().manual_seed(0))
    constants = rounding_constants(LAYOUT, weights, peaks_of(updates))
    assert torch.equal(fold(LAYOUT, updates, weights, constants), torch.zeros(LAYOUT.num_state, dtype=torch.float64))
    updates[1, 0] = math.nan
    with pytest.raises(ValueError, match=r"conv\.weight"):
        rounding_constants(LAYOUT, weights, peaks_of(updates))


def test_the_grid_does_not_depend_on_the_signs_of_weights():
    generator = torch.Generator().manual_seed(0)
    weights, peaks = some_weights("negative", 4, generator), torch.rand(4, len(LAYOUT.leaves), dtype=torch.float64)
    positive = {name: weight.abs() for name, weight in weights.items()}
    assert torch.equal(rounding_constants(LAYOUT, weights, peaks), rounding_constants(LAYOUT, positive, peaks))


def constant_of(weight, peak=1.0):
    """The constant of fc.weight alone."""
    peaks = torch.full((len(peak) if isinstance(peak, list) else 1, len(LAYOUT.leaves)), 1.0, dtype=torch.float64)
    peaks *= torch.tensor(peak, dtype=torch.float64).view(-1, 1)
    index = list(LAYOUT.by_name).index("fc.weight")
    return float(rounding_constants(LAYOUT, {"fc.weight": weight}, peaks)[index])


def test_constants_by_hand():
    """1.5 * 2^p, p = ceil(log2 T) + 1, for the largest T that a sum can come to."""
    assert constant_of(torch.tensor([3.0], dtype=torch.float64)) == 1.5 * 2**3
    assert constant_of(torch.tensor([[1.0, -7.0, 2.0]], dtype=torch.float64)) == 1.5 * 2**4
    maps = torch.zeros(1, 5, 5, dtype=torch.float64)
    maps[0, :, 0] = 1  # an update of ones becomes 5 in the first column
    assert constant_of(RightMap(maps)) == 1.5 * 2**4


def test_the_grid_does_not_depend_on_the_order_of_clients():
    below_2 = math.nextafter(2.0, 0.0)
    peaks = [below_2, 2.0**-54, 2.0**-54]  # added from the small end they come to 2, from the large end they do not
    weight = torch.ones(3, dtype=torch.float64)
    assert constant_of(weight, peaks) == constant_of(weight, peaks[::-1])


def test_leaves_with_the_same_weight_for_one_client_only_are_not_taken_together():
    generator = torch.Generator().manual_seed(0)
    updates = torch.randn(2, LAYOUT.num_state, generator=generator)
    rising = torch.linspace(0.1, 0.9, len(LAYOUT.leaves), dtype=torch.float64)
    weights = {
        leaf.name: torch.stack([torch.tensor(0.5).double(), w]) for leaf, w in zip(LAYOUT.leaves, rising, strict=True)
    }
    total = fold(LAYOUT, updates, weights, rounding_constants(LAYOUT, weights, peaks_of(updates)))
    assert torch.allclose(total, naive(updates, weights), rtol=0, atol=1e-12)


def test_fold_wrong_weight_shape_names_the_leaf():
    updates = torch.ones(3, LAYOUT.num_state)
    weights = {"fc.weight": torch.ones(3, 4, dtype=torch.float64)}
    with pytest.raises(ValueError, match=r"fc\.weight"):
        fold(LAYOUT, updates, weights, rounding_constants(LAYOUT, weights, peaks_of(updates)))
