"""The readers on the real downloads: `RAYSIM_REAL_DATA=DIR python -m pytest tests/real`; skipped without the variable.

DIR holds a folder a set, with its files as published or as a tree: cifar10, cifar100, pacs, mnist, tiny_imagenet, adult,
wine_quality, shakespeare.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from raysim.data.arrow import PreparedSet
from raysim.data.facts import FACTS
from raysim.data.sources import prepare, set_path

ROOT = Path(os.environ.get("RAYSIM_REAL_DATA", "/nonexistent"))

#: Set -> its reader where the files are a tree, and sums that tell its pixels: (mean of all values in 0 to 1, by channel),
#: as papers print them for the training images.
SETS = {
    "cifar10": ("folder", (0.4914, 0.4822, 0.4465)),
    "cifar100": ("folder", (0.5071, 0.4865, 0.4409)),
    "mnist": ("mnist", (0.1307,)),
    "tiny_imagenet": ("tiny_imagenet", (0.4802, 0.4481, 0.3975)),
    "pacs": ("pacs", None),
}


@pytest.mark.parametrize("name", SETS)
def test_real_set_is_what_its_publisher_says(name, tmp_path):
    if not (ROOT / name).is_dir():
        pytest.skip(f"needs {name} in the folder RAYSIM_REAL_DATA")
    reader, means = SETS[name]
    info = prepare(reader, tmp_path, ROOT / name, save_as=name)  # compares it with FACTS
    facts = FACTS[name]
    assert info.num_examples == sum(facts.examples.values())
    images = PreparedSet(set_path(tmp_path, name))
    counts = np.bincount(images.labels)
    assert len(counts) == len(info.classes)
    if means is None:
        assert [int(count) for count in np.bincount(images.domains)] == list(facts.examples.values())
        return
    if name != "mnist":
        assert len(set(counts)) == 1  # as many examples of each class
    sums, rows = np.zeros(info.shape[2]), 0
    for batch in images.batches:
        training = batch.inputs[batch.splits == 0]
        sums, rows = sums + training.sum((0, 1, 2), dtype=np.int64), rows + training[..., 0].size
    np.testing.assert_allclose(sums / rows / 255, means, atol=5e-4)


def test_real_adult_has_its_classes_and_missing_words(tmp_path):
    source, inputs, targets = _rows("adult", tmp_path)
    info = source.info
    assert (info.num_examples, info.shape, len(info.domains)) == (48_842, (108,), 15)
    assert [np.bincount(targets[source.splits == code]).tolist() for code in (0, 2)] == [[24_720, 7841], [12_435, 3846]]
    # Training and test rows whose occupation is unknown.
    assert int((source.domains == info.domains.index("?")).sum()) == 1843 + 966
    column = inputs[source.splits == 0, info.columns.index("age")]
    np.testing.assert_allclose(
        (column.mean(dtype=np.float64), column.min(), column.max()), (38.5816, 17, 90), atol=1e-4
    )


def test_real_wine_quality_is_red_and_white(tmp_path):
    source, inputs, targets = _rows("wine_quality", tmp_path)
    assert np.bincount(source.domains).tolist() == [1599, 4898]
    assert inputs.shape == (6497, 11)
    # The published counts of each grade, from 3 to 9.
    assert np.bincount(targets[source.domains == 0].astype(int), minlength=10)[3:].tolist() == [
        10,
        53,
        681,
        638,
        199,
        18,
        0,
    ]
    assert np.bincount(targets[source.domains == 1].astype(int))[3:].tolist() == [20, 163, 1457, 2198, 880, 175, 5]


def test_real_shakespeare_has_its_characters_and_speakers(tmp_path):
    source, inputs, targets = _rows("shakespeare", tmp_path)
    info = source.info
    assert (info.vocabulary, len(info.domains), info.left_out) == (65, 256, "43 speakers with fewer than 81 characters")
    np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])
    first = np.flatnonzero(source.domains == info.domains.index("First Citizen"))[0]
    text = "Before we proceed any further, hear me speak."
    assert "".join(info.classes[code] for code in inputs[first])[: len(text)] == text


def _rows(name, folder):
    """(the prepared set, inputs, targets) of a table or a text, or the test is skipped."""
    if not (ROOT / name).is_dir():
        pytest.skip(f"needs {name} in the folder RAYSIM_REAL_DATA")
    prepare(name, folder, ROOT / name)
    source = PreparedSet(set_path(folder, name))
    return source, *source.take(np.arange(len(source)))
