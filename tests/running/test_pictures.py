"""Pictures of a run: they show the numbers, and any numbers."""

from __future__ import annotations

import io
from itertools import pairwise

import numpy as np
import pytest
from PIL import Image

from raysim.running.pictures import bar_chart, class_picture, confusion_picture, heat_map, png


@pytest.mark.parametrize(("clients", "classes"), [(100, 10), (20, 200), (3, 2)])
def test_class_picture_has_dots_by_the_number_of_examples_that_fit_their_cells(clients, classes):
    counts = np.random.default_rng(0).integers(0, 50, (clients, classes))
    figure = class_picture(counts, [f"class {i}" for i in range(classes)])
    axes = figure.axes[0]
    dots, sizes = axes.collections[0].get_offsets(), axes.collections[0].get_sizes()
    given = counts[counts > 0]
    assert (dots == np.argwhere(counts)).all()
    large = sizes > 0.3
    assert np.allclose(sizes[large] / given[large], sizes.max() / given.max())
    width, height = figure.get_size_inches() - (2, 1)
    assert np.sqrt(sizes.max()) <= 72 * min(width / clients, height / classes) + 1e-9
    figure.canvas.draw()
    boxes = [label.get_window_extent() for label in axes.get_yticklabels()]
    assert all(a.y1 <= b.y0 + 1 for a, b in pairwise(boxes))


def test_of_a_large_population_some_clients_are_drawn_where_they_are():
    counts = np.random.default_rng(0).integers(0, 3, (5_003, 4))
    axes = class_picture(counts, list("abcd")).axes[0]
    dots = axes.collections[0].get_offsets().astype(int)
    assert {client for client, _ in dots} == {client for client in range(0, 5_003, 3) if counts[client].any()}
    assert all(counts[client, cls] for client, cls in dots)
    assert axes.get_title().endswith("(largest: 2), one client in 3")


def test_heat_map_shows_its_values_and_colours_by_the_logarithm_where_all_are_above_zero():
    values = np.array([[1e-4, 1e-2, 1.0], [0.5, np.nan, 1.0]])
    for is_log in (False, True):
        image = heat_map(values, [3, 8], ["a", "b", "c"], title="t", is_log=is_log).axes[0].images[0]
        assert np.ma.allequal(image.get_array(), np.ma.masked_invalid(values))
        assert type(image.norm).__name__ == ("LogNorm" if is_log else "Normalize")


def test_bars_have_the_height_of_their_numbers():
    axes = bar_chart(np.array([4.0, -2.0, 0.0]), ["a", "b", "c"], "t").axes[0]
    assert [patch.get_height() for patch in axes.patches] == [4.0, -2.0, 0.0]


def test_confusion_picture_has_shares_of_the_true_class_and_counts():
    axes = confusion_picture(np.array([[3, 1], [0, 5]]), ["a", "b"], "t").axes[0]
    assert np.allclose(axes.images[0].get_array(), [[0.75, 0.25], [0, 1]])
    assert sorted(text.get_text() for text in axes.texts) == ["1", "3", "5"]


@pytest.mark.parametrize("row", [[np.nan, np.inf], [0.0, 0.0], [7.0, 7.0], [-2.0, np.nan]])
def test_no_array_is_an_error(row):
    values = np.array([row])
    for figure in (heat_map(values, [0], ["a", "b"], title="t", is_log=True), bar_chart(values[0], ["a", "b"], "t")):
        content, size = png(figure)
        assert Image.open(io.BytesIO(content)).size == size
