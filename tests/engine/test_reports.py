"""What a client's hooks report, and how its errors are placed."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from raysim.core.layout import layout_of
from raysim.core.method import Vector
from raysim.engine import client_results

LAYOUT = layout_of(nn.Sequential(nn.Linear(2, 1)), head="0")


def test_small_reports_and_vectors_may_come_in_any_order():
    kept = {}
    vectors = SimpleNamespace(write=lambda key, client, value: kept.setdefault(key, (client, value.tolist())))
    small, vector = torch.tensor([1.0, 2.0]), Vector(torch.tensor([3.0, 4.0, 5.0]))
    reported = {"a": {"first": small, "far": vector, "last": small}, "b": {"far": vector}}
    phase = SimpleNamespace(stack=SimpleNamespace(report=lambda views: reported))
    got, peaks = client_results.take_reports(phase, {}, vectors, 7, LAYOUT)
    assert {name: {key: value.tolist() for key, value in values.items()} for name, values in got.items()} == {
        "a": {"first": [[1.0, 2.0]], "last": [[1.0, 2.0]]},
        "b": {},
    }
    assert kept == {"a/far": (7, [3.0, 4.0, 5.0]), "b/far": (7, [3.0, 4.0, 5.0])}
    assert peaks == kept
    small.add_(1)
    assert np.array_equal(got["a"]["first"], [[1.0, 2.0]])  # a copy


def test_an_error_without_own_code_is_placed_where_it_was_raised():
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads("{")
    assert client_results._innermost(caught.value).rpartition("/")[2].startswith("decoder.py, line ")
    assert not client_results._innermost(caught.value).startswith(__file__)
