"""Pictures of a run: what lies in their cells, names that do not touch, and no matplotlib."""

from __future__ import annotations

import io
from itertools import pairwise

import numpy as np
import pytest
from PIL import Image, ImageColor

from raysim import pictures
from raysim.pictures import bars, class_picture, confusion_picture, heat_map, png

WHITE = (255, 255, 255)


def area(picture):
    """(h, w, 3): what is inside of the frame, whose lines are the longest of all."""
    pixels = np.asarray(picture)
    is_black = (pixels == 0).all(-1)
    left, right, *_ = np.flatnonzero(is_black.sum(0) > 0.9 * is_black.sum(0).max())
    top, bottom = np.flatnonzero(is_black.sum(1) > 0.9 * is_black.sum(1).max())
    return pixels[top + 1 : bottom, left + 1 : right]


def cell(picture, shape, row, column):
    """(h, w, 3) of one of (rows, columns) cells, without its rim."""
    inside = area(picture)
    height, width = inside.shape[0] / shape[0], inside.shape[1] / shape[1]
    rows, columns = (np.array([0.1, 0.9]) + at for at in (row, column))
    (top, bottom), (left, right) = (rows * height).round().astype(int), (columns * width).round().astype(int)
    return inside[top : max(bottom, top + 1), left : max(right, left + 1)]


@pytest.mark.parametrize(("clients", "classes"), [(100, 10), (20, 200), (3, 2), (400, 30)])
def test_class_picture_has_dots_in_their_cells(clients, classes):
    counts = np.random.default_rng(0).integers(0, 50, (clients, classes))
    counts[0, 0], counts[1, 0], counts[2, 0], counts[2, 1] = 50, 0, 0, 0
    picture = class_picture(counts, [f"class {i}" for i in range(classes)])
    shape = (classes, clients)
    dot = cell(picture, shape, classes - 1, 0)  # the first class is below
    assert np.abs(dot[dot.shape[0] // 2, dot.shape[1] // 2].astype(int) - ImageColor.getrgb(pictures.BLUE)).max() < 40
    for empty in ((classes - 1, 1), (classes - 1, 2), (classes - 2, 2)):
        assert (cell(picture, shape, *empty) == WHITE).mean() > 0.9
    assert max(picture.size) <= 2000


def test_class_picture_of_more_clients_than_pixels_is_a_shade_and_quick():
    counts = np.zeros((50_000, 2), int)
    counts[25_000:, 1] = 8
    inside = area(class_picture(counts, ["a", "b"]))
    half, middle = inside.shape[0] // 2, inside.shape[1] // 2
    assert (inside[half + 1 :] == WHITE).all()
    assert (inside[: half - 1, : middle - 1] == WHITE).all()
    assert (inside[: half - 1, middle + 1 :] == ImageColor.getrgb(pictures.BLUE)).all()


def test_heat_map_has_its_values_in_their_cells():
    values = np.array([[0.0, 1.0, np.nan], [0.5, np.inf, 1.0]])
    picture = heat_map(values, [3, 8], ["a", "b", "c"], title="a title that is longer than the picture is wide, by far")
    low, middle, high = (ImageColor.getrgb(f"#{pictures.VIRIDIS.split()[at]}") for at in (0, 8, -1))
    expected = {(0, 0): low, (0, 1): high, (0, 2): WHITE, (1, 0): middle, (1, 1): WHITE, (1, 2): high}
    for place, color in expected.items():
        assert (cell(picture, (2, 3), *place) == color).all(), place
    logarithmic = heat_map(np.array([[1e-4, 1e-2, 1.0]]), [0], ["a", "b", "c"], title="", is_log=True)
    for column, color in enumerate((low, middle, high)):
        assert (cell(logarithmic, (1, 3), 0, column) == color).all()


def test_no_array_and_no_name_is_an_error():
    rows = [[np.nan, np.inf], [0.0, 0.0], [7.0, 7.0], [1e308, -1e308], [5e-324, 0.0], [1e-300, 1e300], [-2.0, np.nan]]
    arrays = [np.array([row]) for row in rows] + [
        np.full((3000, 300), -1.0),
        np.array([[True, False]]),
        np.array([[3]]),
    ]
    for values in arrays:
        names = ["two\nlines", "", *map(str, range(values.shape[1]))][: values.shape[1]]
        for is_log in (False, True):
            assert max(heat_map(values, range(len(values)), names, title="a\nb", is_log=is_log).size) <= 2000
        assert max(bars(values[0], names, "t").size) <= 2000


def test_bars_stand_on_zero():
    inside = area(bars(np.array([4.0, -2.0, 0.0]), ["a", "b", "c"], "t"))
    is_blue = (inside == ImageColor.getrgb(pictures.BLUE)).all(-1)
    heights = is_blue.sum(0)[[inside.shape[1] // 6, inside.shape[1] // 2]]
    assert heights[0] == pytest.approx(2 * heights[1], abs=2)
    assert is_blue[:, inside.shape[1] // 6].argmax() < is_blue[:, inside.shape[1] // 2].argmax()


def test_confusion_picture_shows_shares_of_the_true_class():
    matrix = np.diag([5, 70] + [9] * 28)
    matrix[0, 1] = 5
    picture = confusion_picture(matrix, [f"class {i}" for i in range(30)], "t")
    light, middle, dark = (ImageColor.getrgb(f"#{pictures.BLUES.split()[at]}") for at in (0, 4, -1))
    for place, color in {(0, 0): middle, (0, 1): middle, (1, 1): dark, (1, 0): light}.items():
        assert (cell(picture, (30, 30), *place) == color).all(), place
    assert Image.open(io.BytesIO(png(picture))).size == picture.size


def test_names_do_not_touch():
    for count, length in ((10, 165), (200, 1700), (7, 20), (1000, 1000), (1, 100)):
        ticks = pictures._centres(range(count), length)
        assert ticks[0].name == "0"
        assert all(b.at - a.at >= pictures.NAME + 2 for a, b in pairwise(ticks))
        assert len(ticks) <= pictures.MOST_NAMES


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 0.0177), (-0.3, 0.7), (0, 499), (0, 0), (-5e-9, 3e-9), (3, 3.5)])
def test_round_numbers_lie_between_the_ends(low, high):
    numbers = pictures._round_numbers(low, high)
    assert 1 <= len(numbers) <= 7
    assert all(low - 1e-12 <= number <= high + 1e-12 for number in numbers)
    assert len(numbers) > 2 or low == high
