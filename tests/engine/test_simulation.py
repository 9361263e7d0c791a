"""How signals end the loop over rounds."""

from __future__ import annotations

import signal
import time

import pytest

from raysim.engine import simulation
from raysim.engine.simulation import Interrupted, collected_signals
from raysim.runner import execute
from tests.support.runs import a_plan


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_round_that_outlasts_a_signal_is_left(number, root, tmp_path, monkeypatch):
    monkeypatch.setattr(simulation, "GRACE_S", 0.2)
    plan = a_plan(root, tmp_path, rounds=5, checkpoint={"every_s": 0})

    def on_round(record):
        if record.round_index == 1:
            signal.raise_signal(number)
            time.sleep(30)

    began = time.monotonic()
    with pytest.raises(Interrupted) as caught:
        execute(plan, on_round=on_round)
    assert time.monotonic() - began < 25
    assert (caught.value.signal_number, caught.value.next_round) == (number, 2)
    assert not (tmp_path / "a" / "FAILED").exists()
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_a_signal_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with collected_signals() as received:
            signal.raise_signal(signal.SIGHUP)
            assert received == []
            signal.raise_signal(signal.SIGTERM)
            assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, before)
