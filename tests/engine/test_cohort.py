"""The cohort by hand: whose update is not finite, and the sum over what several trainers hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from raysim.core.layout import layout_of
from raysim.engine import cohort as cohort_module
from raysim.engine.cohort import Cohort
from raysim.engine.messages import Reports, TaskResult, pack, unpack
from raysim.training.aggregate import fold

LAYOUT = layout_of(nn.Sequential(nn.Linear(2, 1)), head="0")  # two leaves: 0.weight (1, 2) and 0.bias (1,)


def result(clients, peaks) -> TaskResult:
    """What a task of these clients leaves at the server. peaks: vector name -> (k, leaves)."""
    count, whole = len(clients), np.ones(len(clients), np.int64)
    reports = Reports(
        client=np.array(clients),
        block=whole,
        num_examples=whole,
        num_steps=whole,
        train_loss=np.zeros(count),
        seconds=np.zeros(count),
        sent_bytes=np.zeros(count, np.int64),
        peaks={name: np.array(values, np.float64) for name, values in peaks.items()},
        counters={},
        methods={},
    )
    return TaskResult(reports, None, ())


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_one_leaf_that_is_not_finite_is_enough(value):
    whole, half, vector = [1.0, 2.0], [1.0, value], [value, 3.0]
    peaks = {"update": [whole, half, whole], "m/v": [whole, whole, vector]}
    assert Cohort([result([0, 1, 2], peaks)], None, LAYOUT).has_nonfinite_update().tolist() == [False, True, True]
    text = Cohort([result([0, 1], {"update": [whole, half]})], None, LAYOUT).first_nonfinite()
    assert text.startswith(
        "the mean loss of client 1 was 0: "
    )  # a second look found nothing: all that is likely is named
    assert "local.lr" in text
    assert "augmentation" in text
    assert not Cohort([result([0], {"update": [whole]})], None, LAYOUT).has_nonfinite_update().any()


class Holders:
    """A pool with a trainer for each task, each of which adds up what it holds."""

    def __init__(self, updates):
        self.updates, self.asked = updates, []

    def at_results(self, call, parts, *, adds):
        assert adds
        first, last, constants = (call.keywords[name] for name in ("first", "last", "constants"))
        leaves = LAYOUT.leaves[first:last]
        self.asked.append([leaf.name for leaf in leaves])
        layout, columns = LAYOUT.part(first, last), slice(leaves[0].offset, leaves[-1].end)
        return [
            pack(fold(layout, self.updates[asked.clients, columns], unpack(asked.weights), unpack(constants)))
            for _, asked in parts
        ]


@pytest.mark.parametrize(
    ("entries", "asked"),
    [(1, [["0.weight"], ["0.bias"]]), (3, [["0.weight", "0.bias"]]), (9, [["0.weight", "0.bias"]])],
)
def test_the_sum_counts_what_every_trainer_holds_in_as_many_parts_as_there_are(entries, asked, monkeypatch):
    monkeypatch.setattr(cohort_module, "SUM_ENTRIES", entries)
    updates = torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0], [100.0, 200.0, 300.0], [1000.0, 2000.0, 3000.0]])
    groups = [[3], [0], [2, 1]]  # tasks end in any order
    peaks = [[[float(updates[client, :2].max()), float(updates[client, 2])] for client in group] for group in groups]
    results = [result(group, {"update": each}) for group, each in zip(groups, peaks, strict=True)]
    cohort = Cohort(results, pool := Holders(updates), LAYOUT)
    share = torch.tensor([0.5, 0.25, 0.125, 2.0], dtype=torch.float64)
    total = cohort.total("update", {"0.weight": share, "0.bias": share})
    assert total.tolist() == (share @ updates.double()).tolist() == [2015.5, 4031.0, 6046.5]
    assert pool.asked == asked
    cohort.drop(np.array([False, False, True, False]))
    kept = torch.tensor([0.5, 0.25, 2.0], dtype=torch.float64)
    assert cohort.total("update", {"0.weight": kept, "0.bias": kept})[0] == 2003.0
