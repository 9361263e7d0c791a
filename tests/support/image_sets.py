"""Image sets for the tests of readers: random pixels, and preparing a set and reading it back."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

from raysim.data.arrow import ImageSet
from raysim.data.sources import prepare, set_path

RNG = np.random.default_rng(0)


def pixels(*shape):
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def prepared(name, files, out, **how):
    """Prepare and read back: (ImageSet, images, labels)."""
    info = prepare(name, out, files, again=True, **how)
    source = ImageSet(set_path(out, how.get("save_as") or name))
    assert source.info == info
    source.verify()
    assert (len(info.source_checksum) == 64) == (files is not None)
    return source, *source.take(np.arange(len(source)))


def same(source, images, labels, splits=None, domains=None):
    found = source.take(np.arange(len(source)))
    assert found[0].shape == images.shape
    assert (found[0] == images).all()
    assert (found[1] == labels).all()
    for column, expected in ((source.splits, splits), (source.domains, domains)):
        assert (column is None) == (expected is None)
        if expected is not None:
            assert (column == expected).all()


def save_png(path: Path, image):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path)


def png(image):
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def class_tree(root, classes, each=3, shape=(10, 12, 3), ending="png"):
    """Write a tree; (images, labels) in the order of sorted paths."""
    images, labels = [], []
    for label, name in enumerate(classes):
        for i in range(each):
            images.append(pixels(*shape))
            labels.append(label)
            save_png(root / name / f"img_{i}.{ending}", images[-1])
    return np.stack(images), np.array(labels)
