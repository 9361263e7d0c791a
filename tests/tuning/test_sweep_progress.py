"""The lines of a sweep about how far it is."""

from __future__ import annotations

import time

import pytest

from raysim.base.progress import Listener
from raysim.tuning.driver import MOST_LINES, _Watch
from tests.support.sweeps import (
    a_sweep,
)

pytestmark = pytest.mark.ray


def test_progress_lines_are_few_however_long_a_sweep_takes(root, tmp_path, monkeypatch):
    sweep = a_sweep(root, tmp_path, {"seed": {"grid_search": [0]}})
    lines, now = [], [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    watch = _Watch(sweep, sweep.trials, Listener(lines.append))
    for _ in range(200_000):
        now[0] += 1.0
        watch.on_step_end(0, [])
    assert 10 < len(lines) <= MOST_LINES


def test_trials_that_were_finished_before_are_counted(root, tmp_path, monkeypatch):
    sweep = a_sweep(root, tmp_path, {"seed": {"grid_search": [0, 1, 2, 3]}})
    lines, now = [], [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    watch = _Watch(sweep, sweep.trials[3:], Listener(lines.append), num_done=3)
    now[0] += 100.0
    watch.on_step_end(0, [])
    assert lines[0].startswith("  3/4 trials done, starting")
    (sweep.folder / "seed=3").mkdir(parents=True)
    watch._ended("seed=3", "FAILED", "it is lost")
    assert lines[1] == "4/4  seed=3  failed: it is lost"
