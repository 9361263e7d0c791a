"""Readers of arrays: MedMNIST and other .npz files, CIFAR, Fashion-MNIST, STL-10. They stream what is stored unpickled."""

from __future__ import annotations

import gzip
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np

from raysim.core.errors import DataError
from raysim.data.arrow import Batch, batch_rows, check_range, in_batches
from raysim.data.reader_api import PARTS, Contents, Request, damaged, need, split_codes

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def read_digits(request: Request) -> Contents:
    """scikit-learn's handwritten digits: 1,797 real 8 x 8 images in 17 grey levels, bundled with the library."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = np.rint(digits.images * (255.0 / 16.0)).astype(np.uint8)[..., None]
    names = tuple(str(name) for name in digits.target_names)
    return Contents(names, in_batches(pixels, digits.target.astype(np.int64)), num_examples=len(pixels))


def read_medmnist(request: Request) -> Contents:
    """A 2-D MedMNIST set with its official splits. The name is medmnist's, with _64, _128 or _224 for larger images."""
    import medmnist

    flag, _, size = request.name.partition("_")
    about = medmnist.INFO[flag]
    if "multi-label" in about["task"]:
        raise DataError(
            f"{flag} has {len(about['label'])} labels an image",
            "",
            "a set has one label an image; choose one, and give it with the images as an .npz to `npz`",
        )
    if request.options.download:
        with _downloading(request):
            getattr(medmnist, about["python_class"])("train", root=request.root, size=int(size or 28), download=True)
    path = request.root if request.root.is_file() else request.root / f"{request.name}.npz"
    need(path, request.origin, about["MD5" + (f"_{size}" if size else "")])
    names = tuple(about["label"][str(i)] for i in range(len(about["label"])))
    return _from_npz(path, names)


def read_npz(request: Request) -> Contents:
    """An .npz: `images` (n, height, width[, channels]) uint8 and `labels` (n,), or MedMNIST's train_/val_/test_ keys.

    An array `classes` of names is used if there is one; else classes are called by their numbers.
    """
    path = request.root
    if path.is_dir():
        found = sorted(path.glob("*.npz"))
        if len(found) != 1:
            raise DataError(f"{len(found)} .npz files", str(path), "give the file itself as --root")
        path = found[0]
    return _from_npz(path)


def _from_npz(path: Path, classes: tuple[str, ...] = ()) -> Contents:
    with damaged(path), np.load(path, allow_pickle=False) as archive:
        keys = set(archive.files)
        parts = [part for part in PARTS if f"{part}_images" in keys]
        prefixes = [f"{part}_" for part in parts] or [""]
        labels = [_single(archive[f"{prefix}labels"], path) for prefix in prefixes]
        if not classes and "classes" in keys:
            classes = tuple(str(name) for name in archive["classes"])
    every = np.concatenate(labels)
    classes = classes or tuple(str(i) for i in range(int(every.max(initial=-1)) + 1))
    for prefix, mine in zip(prefixes, labels, strict=True):
        check_range(mine, len(classes), f"{path}, {prefix}labels, row")
    codes = split_codes(parts) if parts else [None]
    batches = (
        batch
        for prefix, mine, code in zip(prefixes, labels, codes, strict=True)
        for batch in _stream(path, f"{prefix}images.npy", mine, code)
    )
    return Contents(classes, batches, [path], len(every))


def _single(labels: np.ndarray, path: Path) -> np.ndarray:
    """(n,) int64 of labels stored as (n,) or, as in MedMNIST, (n, 1)."""
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise DataError(
            f"labels of shape {labels.shape} and type {labels.dtype}", str(path), "give one integer an image"
        )
    return labels.astype(np.int64)


def _stream(path: Path, member: str, labels: np.ndarray, split: int | None) -> Iterator[Batch]:
    """Batches of an image array inside a zip, which np.load could only read whole."""
    with damaged(path), zipfile.ZipFile(path) as archive, archive.open(member) as file:
        shape, is_fortran, dtype = _npy_header(file)
        if len(shape) not in (3, 4) or dtype != np.uint8 or is_fortran:
            raise DataError(
                f"{member} of shape {shape} and type {dtype}", str(path), "store (n, height, width[, channels]) uint8"
            )
        if shape[0] != len(labels):
            raise DataError(
                f"{shape[0]} images and {len(labels)} labels", f"{path}, {member}", "give one label an image"
            )
        image = (*shape[1:], 1)[:3]
        rows, size_bytes = batch_rows(image), int(np.prod(image))
        for start in range(0, shape[0], rows):
            count = min(rows, shape[0] - start)
            data = file.read(count * size_bytes)
            if len(data) < count * size_bytes:
                raise DataError(
                    f"{member} ends early, at row {start + len(data) // size_bytes}", str(path), "fetch it again"
                )
            pixels = np.frombuffer(data, np.uint8).reshape(count, *image)
            splits = None if split is None else np.full(count, split, np.int8)
            yield Batch(pixels, labels[start : start + count], None, splits)


def _npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(file)
    return np.lib.format.read_array_header_2_0(file)


def read_cifar(request: Request, *, kind: str) -> Contents:
    """CIFAR-10 or CIFAR-100 (fine labels) from the Python version: cifar-10-batches-py, cifar-100-python."""
    from torchvision import datasets

    reader = getattr(datasets, kind)
    root = request.root.parent if request.root.name == reader.base_folder else request.root
    if request.options.download:
        with _downloading(request):
            reader(root, download=True)
    folder = root / reader.base_folder
    wanted = [*reader.train_list, *reader.test_list, [reader.meta["filename"], reader.meta["md5"]]]
    # Checked before torchvision unpickles them: a pickle from elsewhere could run code.
    files = [need(folder / name, f"{request.origin}, {reader.filename}", md5) for name, md5 in wanted]
    with damaged(folder):
        parts = [reader(root, train=is_train) for is_train in (True, False)]
    count = sum(len(part.targets) for part in parts)
    batches = (
        batch
        for code, part in zip((0, 2), parts, strict=True)
        for batch in _whole(part.data, np.array(part.targets, np.int64), code)
    )
    return Contents(tuple(parts[0].classes), batches, files, count)


def read_cifar10_1(request: Request, *, version: str) -> Contents:
    """CIFAR-10.1, about 2,000 new test images in CIFAR-10's classes: cifar10.1_v4_data.npy, cifar10.1_v4_labels.npy."""
    names = [f"cifar10.1_{version}_{part}.npy" for part in ("data", "labels")]
    files = [need(request.root / name, request.origin) for name in names]
    loaded = []
    for path in files:
        with damaged(path):
            loaded.append(np.load(path, mmap_mode="r", allow_pickle=False))
    images, labels = loaded[0], _single(loaded[1], files[1])
    if len(images) != len(labels):
        raise DataError(f"{len(images)} images and {len(labels)} labels", str(files[0]), "fetch both files again")
    check_range(labels, 10, f"{files[1]}, row")
    return Contents(CIFAR10_CLASSES, _whole(images, labels, 2), files, len(labels))


def read_fashion_mnist(request: Request) -> Contents:
    """Fashion-MNIST from its four idx files, as published (.gz) or unpacked, below --root or FashionMNIST/raw there."""
    from torchvision.datasets import FashionMNIST

    if request.options.download:
        with _downloading(request):
            FashionMNIST(request.root, download=True)
    raw = request.root / "FashionMNIST" / "raw"
    folder = raw if raw.is_dir() else request.root
    files, arrays = [], []
    for name, md5 in FashionMNIST.resources:
        plain = folder / name.removesuffix(".gz")
        files.append(plain if plain.is_file() else need(folder / name, request.origin, md5))
        arrays.append(_read_idx(files[-1]))
    for images, labels, path in ((arrays[0], arrays[1], files[0]), (arrays[2], arrays[3], files[2])):
        if images.ndim != 3 or labels.shape != (len(images),):
            raise DataError(f"images {images.shape} and labels {labels.shape}", str(path), "fetch the files again")
        check_range(labels, 10, f"labels of {path}, row")
    batches = (
        batch
        for code, i in ((0, 0), (2, 2))
        for batch in _whole(arrays[i][..., None], arrays[i + 1].astype(np.int64), code)
    )
    return Contents(tuple(FashionMNIST.classes), batches, files, len(arrays[0]) + len(arrays[2]))


def _read_idx(path: Path) -> np.ndarray:
    """An idx file of bytes: two zeros, type 8, number of dimensions, big-endian dimensions, data."""
    with damaged(path):
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if data[:3] != b"\0\0\x08":
            raise ValueError("not an idx file of bytes")
        header = 4 + 4 * data[3]
        shape = tuple(np.frombuffer(data[4:header], ">i4"))
        return np.frombuffer(data[header:], np.uint8).reshape(shape)


def read_stl10(request: Request) -> Contents:
    """The labelled images of STL-10, 96 x 96, from stl10_binary; the unlabelled ones are neither needed nor read."""
    from torchvision.datasets import STL10

    root = request.root.parent if request.root.name == STL10.base_folder else request.root
    if request.options.download:
        with _downloading(request):
            STL10(root, download=True)
    folder = root / STL10.base_folder
    published = dict([*STL10.train_list, *STL10.test_list])
    names = [(0, "train_X.bin", "train_y.bin"), (2, "test_X.bin", "test_y.bin")]
    origin = f"{request.origin}, {STL10.filename}"
    files = [need(folder / name, origin, published[name]) for _, *pair in names for name in pair]
    files.append(need(folder / STL10.class_names_file, origin))
    parts = []
    for code, images_name, labels_name in names:
        labels = np.fromfile(folder / labels_name, np.uint8).astype(np.int64) - 1  # stored from 1
        check_range(labels, 10, f"{folder / labels_name}, row")
        with damaged(folder / images_name):
            # Stored as channel, column, row.
            stored = np.memmap(folder / images_name, np.uint8, "r").reshape(len(labels), 3, 96, 96)
        parts.append(partial(_whole, stored.transpose(0, 3, 2, 1), labels, code))
    classes = tuple((folder / STL10.class_names_file).read_text().split())
    count = sum(len(part.args[1]) for part in parts)
    return Contents(classes, (batch for part in parts for batch in part()), files, count)


def _whole(images: np.ndarray, labels: np.ndarray, split: int) -> Iterator[Batch]:
    return in_batches(images, labels, splits=np.full(len(labels), split, np.int8))


@contextmanager
def _downloading(request: Request) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"the download of {request.name} failed ({error})", str(request.root), f"fetch it from {request.origin}"
        ) from error
