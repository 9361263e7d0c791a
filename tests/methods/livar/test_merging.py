"""LIVAR's merged update and its best approximation."""

from __future__ import annotations

import pytest
import torch

from methods.livar.merging import stacked, truncated


def factors(clients, rank, d_in, d_out, seed=0):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(clients, rank, d_in, dtype=torch.float64, generator=generator)
    b = torch.randn(clients, d_out, rank, dtype=torch.float64, generator=generator)
    weights = torch.rand(clients, dtype=torch.float64, generator=generator)
    return weights / weights.sum(), a, b


@pytest.mark.parametrize("shape", [(3, 2, 9, 7), (5, 4, 9, 7), (5, 4, 7, 9)])
def test_merged_product_and_its_best_approximation(shape):
    weights, a, b = factors(*shape)
    dense = sum(w * bk @ ak for w, ak, bk in zip(weights, a, b, strict=True))
    left, right = stacked(weights, a, b)
    assert left.shape[1] == min(shape[0] * shape[1], shape[2], shape[3])
    assert torch.allclose(left @ right, dense, atol=1e-12)
    gram = sum(
        weights[i] * weights[j] * ((b[i].T @ b[j]) * (a[i] @ a[j].T)).sum()
        for i in range(shape[0])
        for j in range(shape[0])
    )
    assert float(dense.square().sum()) == pytest.approx(float(gram))
    rank = shape[1]
    new_a, new_b = truncated(left, right, rank)
    tail = torch.linalg.svdvals(dense)[rank:]
    assert float((new_b @ new_a - dense).square().sum()) == pytest.approx(float(tail.square().sum()))
    assert torch.allclose(new_a @ new_a.T, new_b.T @ new_b, atol=1e-10)  # balanced: sqrt(S) on either side


def test_one_client_makes_all_ways_agree_and_identical_clients_are_any_of_them():
    _, a, b = factors(1, 4, 9, 7)
    product = b[0] @ a[0]
    new_a, new_b = truncated(*stacked(torch.ones(1, dtype=torch.float64), a, b), 4)
    assert torch.allclose(new_b @ new_a, product, atol=1e-12)
    same = torch.full((3,), 1 / 3, dtype=torch.float64)
    left, right = stacked(same, a.expand(3, -1, -1), b.expand(3, -1, -1))
    assert torch.allclose(left @ right, product, atol=1e-12)


def test_a_product_of_low_rank_is_padded_with_zeros():
    new_a, new_b = truncated(torch.ones(7, 1, dtype=torch.float64), torch.ones(1, 9, dtype=torch.float64), 4)
    assert torch.allclose(new_b @ new_a, torch.ones(7, 9, dtype=torch.float64))
    assert not new_a[1:].any()
