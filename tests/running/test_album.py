"""The account of pictures: no more than their share at any time, in order, the last round's whatever they cost."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from raysim.running.pictures import SHARE, Album, Picture


class Watch:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def drawing():
    """(pictures, clock, what was drawn as (tag, round)); add(round, seconds) makes a picture due."""
    clock, drawn = Watch(), []
    album = Album(lambda picture, _: drawn.append((picture.tag, picture.round_index)), clock=clock)

    def add(round_index: int, seconds: float, tag: str = "a") -> None:
        def draw() -> Figure:
            clock.now += seconds
            return Figure()

        album.add([Picture(tag, round_index, draw)])

    return album, clock, drawn, add


def test_account_is_never_overdrawn_and_long_runs_draw_everything(drawing):
    album, clock, drawn, add = drawing
    add(0, 0.4)
    album.draw_all(0)  # at the start, whatever it costs
    spent = 0.4
    for index in range(1, 90):
        clock.now += 2.0
        if index % 11 == 0:
            add(index, 0.3)
        before = len(drawn)
        album.draw_affordable()
        spent += 0.3 * (len(drawn) - before)
        assert len(drawn) == before or spent <= SHARE * (clock.now - 100) + 1e-9
    assert drawn == [("a", index) for index in (0, 11, 22, 33, 44, 55, 66, 77, 88)]


def test_short_run_draws_its_last_round_and_nothing_else(drawing):
    album, clock, drawn, add = drawing
    add(0, 0.5)
    album.draw_all(0)
    for index in range(1, 9):
        clock.now += 0.5
        add(index, 0.1, "a")
        add(index, 0.1, "b")
        album.draw_affordable()
    assert drawn == [("a", 0)]
    album.draw_all(8)
    assert drawn == [("a", 0), ("a", 8), ("b", 8)]
    clock.now += 1e6
    album.draw_affordable()
    assert len(drawn) == 3  # what was left out is not made up for


def test_pictures_that_wait_are_drawn_in_the_order_of_rounds(drawing):
    album, clock, drawn, add = drawing
    add(0, 1.0)
    album.draw_all(0)
    for index in range(1, 4):
        clock.now += 1.0
        add(index, 1.0)
        album.draw_affordable()
    clock.now += 200
    album.draw_affordable()
    assert drawn == [("a", index) for index in range(4)]
