"""Aggregation weights as values."""

from __future__ import annotations

import torch

from raysim.core.weights import RightMap, normalised, take


def test_scores_are_normalised_over_the_clients_row_by_row():
    scores = torch.tensor([[1.0, 0.0, 0.0], [3.0, 2.0, 0.0]], dtype=torch.float64)
    assert normalised(scores).tolist() == [[0.25, 0, 0], [0.75, 1, 0]]
    assert normalised(scores[:, 0]).tolist() == [0.25, 0.75]


def test_some_clients_weights_are_taken_in_their_order():
    maps = torch.arange(12.0, dtype=torch.float64).view(3, 2, 2)
    weights = {"a": torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), "b": RightMap(maps)}
    some = take(weights, torch.tensor([2, 0]))
    assert some["a"].tolist() == [3, 1]
    assert torch.equal(some["b"].maps, maps[[2, 0]])
