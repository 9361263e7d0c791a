"""LIVAR's variances and row weights by hand."""

from __future__ import annotations

import math

import torch

from methods.livar.head import class_variances, row_weights


def test_class_variances_and_their_degenerate_cases():
    values = torch.tensor([[1.0, 2.0], [3.0, 2.0], [0.1, 0.7], [0.1, 0.7], [0.1, 0.7], [5.0, 5.0]])
    got = class_variances(values, torch.tensor([0, 0, 1, 1, 1, 2]), 4)
    assert got[0] == 1.0  # (2 + 0) / 2
    assert got[1] == 0.0  # identical features: exactly
    assert got[2].isnan()  # one example
    assert got[3].isnan()  # nobody's
    scaled = class_variances(values * 3, torch.tensor([0, 0, 1, 1, 1, 2]), 4)
    assert scaled[0] == 9.0


def test_row_weights_fall_back_class_by_class():
    nan = math.nan
    correct = torch.tensor([[2.0, nan, nan, 0.0, nan], [6.0, nan, nan, 0.0, nan], [nan, nan, nan, nan, nan]]).double()
    every = torch.tensor([[9.0, 1.0, nan, 0.0, nan], [9.0, nan, nan, nan, nan], [9.0, nan, nan, nan, nan]]).double()
    counts = torch.tensor([[5.0, 3.0, 1.0, 4.0, 0.0], [5.0, 0.0, 0.0, 1.0, 0.0], [5.0, 1.0, 1.0, 0.0, 0.0]]).double()
    active = torch.ones(3, dtype=torch.bool)
    assert row_weights([correct, every, counts], active).T.tolist() == [
        [0.25, 0.75, 0.0],  # the variances of the holders
        [1.0, 0.0, 0.0],  # nobody is right: all samples; one holder takes all
        [0.5, 0.0, 0.5],  # one sample each: counts
        [0.8, 0.2, 0.0],  # identical features: counts
        [0.0, 0.0, 0.0],  # nobody has it: the row stays
    ]
    idle = row_weights([correct, every, counts], torch.tensor([False, True, True]))
    assert idle.T.tolist()[0] == [0.0, 1.0, 0.0]
    assert idle.T.tolist()[2] == [0.0, 0.0, 1.0]
