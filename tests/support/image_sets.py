"""Image sets for the tests of readers: random pixels, and preparing a set and reading it back."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path

import numpy as np
from PIL import Image

from raysim.data.arrow import SEAL, PreparedSet, describe, write_set
from raysim.data.rows import in_batches
from raysim.data.sources import prepare, set_path

RNG = np.random.default_rng(0)


def pixels(*shape):
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def prepared(name, files, out, **how):
    """Prepare and read back: (PreparedSet, images, labels)."""
    info = prepare(name, out, files, again=True, **how)
    source = PreparedSet(set_path(out, how.get("save_as") or name))
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


CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
STL10 = ("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck")


def small_set(folder, name="mine", classes=CIFAR10, per_class=50, shape=(4, 4, 3), domains=None, splits=None):
    """`per_class` random images of each class, with columns that not every set has."""
    labels = np.arange(per_class * len(classes), dtype=np.int64) % len(classes)
    images = np.random.default_rng(1).integers(0, 256, (len(labels), *shape), dtype=np.uint8)
    path, names = set_path(folder, name), () if domains is None else [f"domain {d}" for d in range(domains.max() + 1)]
    write_set(path, name, classes, in_batches(images, labels, domains=domains, splits=splits), domains=names)
    return PreparedSet(path)


def redescribe(path: Path, **change: object) -> None:
    """Change fields of a set's description, with a checksum that fits."""
    fields = json.loads(describe(path).read_text()) | change
    del fields[SEAL]
    seal = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    describe(path).write_text(json.dumps(fields | {SEAL: seal}))
