"""The drawn shapes: a pure function of seed and index, every class in every style."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from raysim.base.errors import DataError
from raysim.data.readers.reader_options import ReaderOptions
from raysim.data.readers.shapes import PIXEL_BYTES, SHAPES, STYLES, _coordinates, draw, shape_batches
from raysim.data.sources import prepare
from tests.support.image_sets import prepared


def test_shapes_are_a_pure_function_of_seed_and_index():
    how = {"size": 16, "seed": 3, "num_domains": 4}
    whole = draw(np.arange(60), **how)
    for rows in (1, 7, 60):
        parts = list(shape_batches(60, rows=rows, **how))
        for column in range(3):
            assert (np.concatenate([part[column] for part in parts]) == whole[column]).all()
    some = np.array([59, 3, 17])
    assert (draw(some, **how).inputs == whole.inputs[some]).all()
    assert (draw(some, **(how | {"seed": 4})).inputs != whole.inputs[some]).mean() > 0.5


def test_what_a_drawing_takes_is_no_less_than_what_is_asked_for_beforehand():
    for index in range(0, 60, 13):
        tracemalloc.start()
        draw(np.array([index]), size=300, seed=0, num_domains=6)
        peak = tracemalloc.get_traced_memory()[1] / 300**2
        tracemalloc.stop()
        assert PIXEL_BYTES <= peak <= 1.3 * PIXEL_BYTES


def test_shapes_have_every_class_in_every_domain(tmp_path):
    options = ReaderOptions(count=240, size=12, seed=1, domains=6)
    source, images, labels = prepared("shapes", None, tmp_path, options=options)
    assert images.shape == (240, 12, 12, 3)
    assert (source.info.classes, source.info.domains) == (tuple(SHAPES), STYLES)
    assert (np.bincount(labels * 6 + source.domains, minlength=60) == 4).all()
    assert "SYNTHETIC" in source.info.source
    again, _, _ = prepared("shapes", None, tmp_path, options=options)
    assert again.info == source.info
    for wrong in ({"size": 4}, {"domains": 7}, {"domains": "two"}):
        with pytest.raises(DataError, match=f"--{next(iter(wrong))} must be"):
            prepare("shapes", tmp_path, again=True, options=ReaderOptions(**wrong))


@pytest.mark.slow
def test_shapes_can_be_learned_from_pixels_and_styles_differ():
    from sklearn.neural_network import MLPClassifier

    train, test = (draw(np.arange(a, b), size=16, seed=0, num_domains=1) for a, b in ((0, 4000), (4000, 5000)))
    flat = [batch.inputs.mean(-1).reshape(len(batch.targets), -1) / 255 - 0.4 for batch in (train, test)]
    model = MLPClassifier((128,), tol=0.02, n_iter_no_change=3, random_state=0).fit(flat[0], train.targets)
    assert model.score(flat[1], test.targets) > 0.6  # chance: 0.1
    every = draw(np.arange(600), size=16, seed=0, num_domains=6)
    spread = [every.inputs[every.domains == d].astype(float).std(axis=(1, 2)).mean() for d in range(6)]
    means = [every.inputs[every.domains == d].mean() for d in range(6)]
    assert len({(round(a), round(b)) for a, b in zip(spread, means, strict=True)}) == 6


def test_draws_of_a_half_lie_in_the_middle_upright():
    u, v, pixel = _coordinates(np.full((1, 4), 0.5, np.float32), 8)
    scale = 0.5 + 0.25 * 0.5
    middles = (np.arange(8) - 3.5) / 4 / scale
    assert np.allclose(u[0], middles)
    assert np.allclose(v[0], -middles[:, None])
    assert np.allclose(pixel, 2 / 8 / scale)


def test_shapes_have_seed_0_unless_another_is_given(tmp_path):
    images = prepared("shapes", None, tmp_path, options=ReaderOptions(count=20, size=8, domains=1))[1]
    assert (images == draw(np.arange(20), size=8, seed=0, num_domains=1).inputs).all()
