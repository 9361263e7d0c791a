"""The lines of a sweep about how far it is, and how long it still takes."""

from __future__ import annotations

import time

import pytest

from raysim.base.progress import Listener, clock
from raysim.folders.run_folder import RunFolder
from raysim.tuning.driver import MOST_LINES, _Watch
from tests.support.sweeps import a_sweep

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
    assert lines[0].startswith("  3/4 trials done, 75 % of all images, starting")
    (sweep.folder / "seed=3").mkdir(parents=True)
    watch._ended("seed=3", "FAILED", "it is lost")
    assert lines[1] == "4/4  seed=3  failed: it is lost"


def test_rounds_that_a_resumed_trial_reports_again_are_no_pace(root, tmp_path, monkeypatch):
    sweep = a_sweep(root, tmp_path, {"seed": {"grid_search": [0, 1]}}, rounds=10)
    folder = RunFolder(sweep.folder / "seed=0")
    folder.path.mkdir(parents=True)
    rows = [{"round": str(index), "system/round_s": "1.0"} for index in range(6)]
    folder.write_progress(rows, list(rows[0]))
    lines, now = [], [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    watch = _Watch(sweep, sweep.trials, Listener(lines.append))
    for second, rounds in ((100.0, 3), (200.0, 6), (300.0, 7), (400.0, 8)):
        now[0] = second
        watch.on_trial_result(0, [], "seed=0", {"training_iteration": rounds})
        watch.on_step_end(0, [])
    assert [" left" in line for line in lines] == [False, False, False, True], lines
    one, other = (trial.cost.total.images + trial.cost.scored for trial in sweep.trials)
    left = 100 / (one / 10) * (2 * one / 10 + other)  # two rounds, and a whole trial
    assert f" % of all images, {clock(left)} left, " in lines[-1]


def test_the_time_left_is_that_of_the_images_left(root, tmp_path, monkeypatch):
    """A trial of eight epochs weighs more than one of one, and what was done before the first look is no pace."""
    sweep = a_sweep(root, tmp_path, {"local.epochs": {"grid_search": [1, 8]}}, rounds=10)
    short, long = (trial.cost.total.images + trial.cost.scored for trial in sweep.trials)
    assert long > 2 * short
    lines, now = [], [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    watch = _Watch(sweep, sweep.trials, Listener(lines.append))
    for second, rounds in ((100.0, 2), (200.0, 6), (500.0, 10)):
        now[0] = second
        watch.on_trial_result(0, [], sweep.trials[0].name, {"training_iteration": rounds})
        watch.on_step_end(0, [])
    assert " left" not in lines[0]
    for line, spent, done, done_before in ((lines[1], 100, 0.6, 0.2), (lines[2], 400, 1.0, 0.2)):
        left = spent / (short * (done - done_before)) * (short * (1 - done) + long)
        assert f"{100 * short * done / (short + long):.0f} % of all images, {clock(left)} left, " in line
