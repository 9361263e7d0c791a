"""The readers on the real downloads: `RAYSIM_REAL_DATA=DIR python -m pytest tests/real`; skipped without the variable.

DIR holds a folder a set, with its files as published or as a tree: cifar10, cifar100, pacs, mnist, tiny_imagenet.
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
