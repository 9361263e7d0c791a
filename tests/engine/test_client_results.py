"""The vectors that a round's clients leave with their trainer."""

from __future__ import annotations

import math

import pytest
import torch

from raysim.engine.client_results import RoundVectors
from tests.support.federations import plan_of, server_on
from tests.training.test_aggregate import LAYOUT


@pytest.mark.parametrize("size", [LAYOUT.num_params, LAYOUT.num_state])
def test_written_rows_and_peaks_are_those_of_the_difference(size):
    held = RoundVectors(LAYOUT)
    value, start = torch.randn(2, size)
    value[[3, -1]] = torch.tensor([math.nan, -math.inf])
    for client, minus in ((7, start), (8, None)):
        expected = value if minus is None else value - minus
        peaks = torch.from_numpy(held.write("update", client, value, minus))
        assert torch.equal(held.of("update", [client])[0].view(torch.int32), expected.view(torch.int32))
        reference = [expected[leaf.offset : leaf.end].abs().max() for leaf in LAYOUT.leaves if leaf.end <= size]
        assert torch.equal(peaks.nan_to_num(-1)[0], torch.stack(reference).double().nan_to_num(-1))
    assert len(held.of("update", [8, 7, 8])) == 3


def test_rows_are_taken_over_and_given_up_when_not_needed():
    held = RoundVectors(LAYOUT)

    def pointers(count):
        held.begin_round()
        for client in range(count):
            held.write("update", 10 * count + client, torch.zeros(LAYOUT.num_state))
        return {row.data_ptr() for row in held._rows["update"].values()}

    first = pointers(3)
    assert pointers(3) == first
    assert pointers(1) < first
    assert sum(len(rows) for rows in held._spare.values()) == 2
    assert len(pointers(2)) == 2
    assert not held._spare["update"]
    held.write("update", 20, torch.ones(LAYOUT.num_state))  # done once more
    assert len(held._rows["update"]) == 2


def test_a_run_writes_its_updates_to_the_same_memory_in_every_round(root):
    server = server_on(plan_of(root, ["scaffold"]), root)
    held = server.pool._trainer._vectors
    seen = []
    for index in range(3):
        server.run_round(index)
        seen.append({name: {row.data_ptr() for row in rows.values()} for name, rows in held._rows.items()})
    assert seen[0] == seen[1] == seen[2]
    assert [len(rows) for rows in seen[0].values()] == [7, 7]
