"""Cohorts, client blocks and tasks."""

from __future__ import annotations

import numpy as np
import pytest

from raysim.core.cohorts import choose_cohort
from raysim.engine.schedule import assign_blocks, cut_blocks


def test_blocks_depend_on_sizes_alone_and_cover_the_cohort():
    rng = np.random.default_rng(0)
    clients = choose_cohort(1000, 100, seed=1, round_index=2)
    assert len(set(clients.tolist())) == 100
    work = rng.integers(1, 500, 100).tolist()
    blocks = cut_blocks(clients.tolist(), work)
    assert sorted(c for block in blocks for c in block.clients) == clients.tolist()
    assert 16 <= len(blocks) <= 32
    shuffled = rng.permutation(100)
    assert cut_blocks(clients[shuffled].tolist(), [work[i] for i in shuffled]) == blocks
    for count in (1, 2, 7):
        queues = assign_blocks(blocks, count)
        assert sorted(b.index for tasks in queues for task in tasks for b in task) == list(range(len(blocks)))
        loads = [sum(b.work for task in tasks for b in task) for tasks in queues]
        assert max(loads) - min(loads) <= max(b.work for b in blocks)
        assert all(len(tasks) <= 3 for tasks in queues)


@pytest.mark.parametrize(
    ("cohort", "count"), [(1, 1), (3, 2), (8, 2), (10, 2), (16, 4), (50, 8), (100, 16), (128, 32), (1000, 32)]
)
def test_a_cohort_has_two_blocks_or_more_with_four_clients_each(cohort, count):
    blocks = cut_blocks(range(cohort), [5] * cohort, least_clients=4)
    assert len(blocks) == count
    assert sorted(c for block in blocks for c in block.clients) == list(range(cohort))
    assert cohort < 8 or min(len(block.clients) for block in blocks) >= 4
