"""TensorBoard's files of a run that goes on."""

from __future__ import annotations

import time

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from raysim.running.board import Board


def test_a_run_that_goes_on_in_the_same_second_keeps_its_first_points(tmp_path):
    """By a process with a smaller number, whose file's name would sort in front."""
    first = Board(tmp_path, 0)
    for number in range(4):
        first.points(number, {"server/accuracy": 0.1 * number})
    first.close()
    time.sleep(1 - time.time() % 1)  # a second begins
    (written,) = tmp_path.glob("events*")
    written.rename(tmp_path / f"events.out.tfevents.{int(time.time()):010d}.zzz.99999999.0")
    second = Board(tmp_path, 3)
    for number in range(3, 6):
        second.points(number, {"server/accuracy": 0.2 * number})
    second.close()
    points = EventAccumulator(str(tmp_path)).Reload().Scalars("server/accuracy")
    assert [point.step for point in points] == list(range(6))


def test_points_with_simulated_time_lie_at_that_time(tmp_path):
    board = Board(tmp_path, 0)
    for number, time_s in enumerate((5.0, 7.5)):
        board.points(number, {"server/accuracy": 0.5, "time/simulated_s": time_s})
    board.close()
    points = EventAccumulator(str(tmp_path)).Reload().Scalars("server/accuracy")
    assert [(point.step, point.wall_time) for point in points] == [(0, 5.0), (1, 7.5)]
