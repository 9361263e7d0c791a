"""Simulated time: arrivals in order, deadlines, over-selection, availability; against an event loop."""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from raysim.core.cohorts import choose_cohort
from raysim.core.seeding import derive_seed
from raysim.core.timetable import Speeds, Timetable


def speeds(step_s, down_mbps=None, up_mbps=None, latency_s=None) -> Speeds:
    count = len(step_s)
    columns = (step_s, down_mbps or [np.inf] * count, up_mbps or [np.inf] * count, latency_s or [0.0] * count)
    return Speeds(*(np.array(column, float) for column in columns))


def table(step_s, **options) -> Timetable:
    return Timetable(speeds(step_s), seed=1, **options)


def one_step(of: Timetable):
    return lambda clients: of.speeds.seconds(clients, np.ones(len(clients)), 0, 0)


def test_seconds_are_two_latencies_two_transfers_and_the_steps():
    some = speeds([0.5, 2.0], down_mbps=[8.0, 16.0], up_mbps=[4.0, 8.0], latency_s=[0.1, 0.0])
    # 1 MB down at 8 Mbit/s is a second, 2 MB up at 4 Mbit/s are four.
    assert some.seconds(np.array([0, 1]), np.array([3, 1]), 1e6, 2e6) == pytest.approx(
        [0.2 + 1 + 4 + 1.5, 0.5 + 2 + 2.0]
    )


def test_a_round_without_rules_waits_for_all_of_fedavgs_cohort():
    of = table([1.0, 5.0, 2.0, 3.0, 4.0])
    for index in range(3):
        before, cohort = of.now_s, choose_cohort(5, 3, seed=1, round_index=index)
        turn = of.turn(index, 3, one_step(of))
        assert turn.clients.tolist() == cohort.tolist()
        assert turn.begun.tolist() == [index] * 3
        assert (of.now_s - before, turn.num_late) == (max(of.speeds.step_s[cohort]), 0)


def test_a_deadline_ends_the_round_and_drops_the_late():
    of = table([1.0, 5.0, 2.0, 3.0, 4.0], deadline_s=3.0)
    turn = of.turn(0, 5, one_step(of))
    assert (turn.clients.tolist(), turn.num_late, of.now_s) == ([0, 2, 3], 2, 3.0)
    nobody = table([1.0, 5.0], deadline_s=0.5)
    assert (nobody.turn(0, 2, one_step(nobody)).clients.tolist(), nobody.now_s) == ([], 0.5)
    early = table([1.0, 2.0], deadline_s=7.0)
    early.turn(0, 2, one_step(early))
    assert early.now_s == 2.0  # all are there: nobody waits for the deadline


def test_over_selection_ends_with_the_first_updates():
    of = table([1.0, 5.0, 2.0, 3.0, 4.0], over_selection=1.6)  # 3 * 1.6 = 4.8: five begin
    turn = of.turn(0, 3, one_step(of))
    assert (turn.clients.tolist(), turn.num_late, of.now_s) == ([0, 2, 3], 2, 3.0)
    tied = table([2.0] * 5, over_selection=1.6)
    assert tied.turn(0, 3, one_step(tied)).clients.tolist() == [0, 1, 2]  # equal times: by client


def test_clients_begin_in_the_hours_in_which_they_are_available():
    of = table([1800.0] * 200, available=[0.0, 0.5, *[0.0] * 21, 1.0])
    first = of.turn(0, 200, one_step(of))
    assert of.now_s == 3600 + 1800  # nobody in hour 0; half in hour 1
    assert 60 < len(first.clients) < 140
    again = of.turn(1, 200, one_step(of))  # the same clients within an hour of a day
    assert of.now_s == 2 * 3600
    assert again.clients.tolist() == first.clients.tolist()
    assert len(of.turn(2, 200, one_step(of)).clients) == 200
    assert of.now_s == 23 * 3600 + 1800


def event_loop(step_s, num_rounds, at_work, arrivals, seed):
    """(clients and the rounds in which they began, time) of each round: a heap of single events."""
    heap, now, done = [], 0.0, []
    for index in range(num_rounds):
        arrived = []
        while True:
            free = [c for c in range(len(step_s)) if c not in {e[1] for e in heap} | {c for c, _ in arrived}]
            count = min(at_work - len(heap), len(free))
            if count > 0:
                own = derive_seed(seed, "begin", index, len(arrived)) if arrived else seed
                for place in choose_cohort(len(free), count, seed=own, round_index=index):
                    heapq.heappush(heap, (now + step_s[free[place]], free[place], index))
            now, client, begun = heapq.heappop(heap)
            arrived.append((client, begun))
            while heap and heap[0][0] == now and len(arrived) < arrivals:
                _, client, begun = heapq.heappop(heap)
                arrived.append((client, begun))
            if len(arrived) == arrivals:
                break
        done.append((sorted(arrived), now))
    return done


@pytest.mark.parametrize(("at_work", "arrivals"), [(6, 2), (6, 6), (4, 1), (15, 3)])
@pytest.mark.parametrize("is_tied", [False, True])
def test_asynchronous_rounds_are_those_of_an_event_loop(at_work, arrivals, is_tied):
    rng = np.random.default_rng(at_work)
    step_s = (rng.integers(1, 4, 15) if is_tied else rng.lognormal(size=15)).astype(float)
    of = table(step_s)
    turns = []
    for index in range(12):
        turn = of.turn(index, at_work, one_step(of), arrivals=arrivals)
        turns.append(([*zip(turn.clients.tolist(), turn.begun.tolist(), strict=True)], of.now_s))
        assert len(of.flights) == at_work - arrivals or at_work - arrivals <= len(of.flights) < at_work
    assert turns == event_loop(step_s.tolist(), 12, at_work, arrivals, 1)
    assert at_work == arrivals or any(begun < index for index, (some, _) in enumerate(turns) for _, begun in some)
