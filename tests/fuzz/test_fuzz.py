"""A few seeds of every generator; `make fuzz` runs thousands."""

from __future__ import annotations

import time

import pytest

from tests.fuzz import verdicts
from tests.fuzz.cases import CASES, Ground
from tests.fuzz.verdicts import Hangs, Table, limited, verdict_of


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    return Ground(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("right configurations", 6),
        ("wrong configurations", 40),
        ("damaged files", 12),
        ("damaged configuration files", 30),
        ("damaged results", 6),
        ("hostile files", 25),
        ("hostile own code", 8),
        ("calls of Python", 20),
        ("names of sets", 4),
        ("what would be silently wrong", 8),
        ("kills, serial", 1),
    ],
)
def test_nothing_is_silently_wrong_a_traceback_or_a_hang(kind, count, ground):
    table, (case, _) = Table(), CASES[kind]
    for seed in range(count):
        table.add(kind, case(ground, seed), seed)
    assert not table.bad, str(table)
    assert sum(table.counts[kind].values()) == count


def test_a_verdict_tells_a_sentence_from_a_traceback():
    def slip():
        raise KeyError("a")

    assert verdict_of(slip).startswith("traceback: KeyError")
    assert verdict_of(lambda: 1, right=lambda value: value == 2) == "silent wrong result"
    assert verdict_of(lambda: 1) == "right"


def test_a_case_hangs_by_its_own_time_and_not_by_what_others_take(monkeypatch):
    with pytest.raises(Hangs), limited(0.1):
        time.sleep(5)
    began = time.monotonic()
    monkeypatch.setattr(verdicts, "queued_s", lambda: 0.75 * (time.monotonic() - began))
    with limited(0.1):  # three quarters of which it waits for a CPU
        time.sleep(0.3)
    with pytest.raises(Hangs), limited(0.1):
        time.sleep(5)
    assert time.monotonic() - began < 4
