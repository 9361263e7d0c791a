"""Every format of arrays, written small in its real form on disk, is read back as it was; bad input is one clear error."""

from __future__ import annotations

import gzip
import hashlib
import pickle
from pathlib import Path

import numpy as np
import pytest

from raysim.base.errors import DataError
from raysim.data.reader_api import array_contents
from raysim.data.readers.arrays import Part, _contents
from raysim.data.sources import SOURCES, prepare
from tests.support.image_sets import pixels, prepared, same


def medmnist_file(folder, name, shape, num_classes, compressed=False):
    parts = {}
    for part, count in (("train", 7), ("val", 3), ("test", 4)):
        parts[f"{part}_images"] = pixels(count, *shape)
        parts[f"{part}_labels"] = (np.arange(count) % num_classes).astype(np.uint8)[:, None]
    (np.savez_compressed if compressed else np.savez)(folder / f"{name}.npz", **parts)
    return parts


@pytest.mark.parametrize(
    ("name", "shape", "num_classes"),
    [("pathmnist", (28, 28, 3), 9), ("organamnist_64", (64, 64), 11), ("dermamnist_224", (224, 224, 3), 7)],
)
def test_medmnist_is_read_with_its_official_splits(name, shape, num_classes, tmp_path, monkeypatch):
    import medmnist

    stored = medmnist_file(tmp_path, name, shape, num_classes, compressed=name == "pathmnist")
    flag, _, size = name.partition("_")
    digest = hashlib.md5((tmp_path / f"{name}.npz").read_bytes()).hexdigest()
    monkeypatch.setitem(medmnist.INFO[flag], "MD5" + (f"_{size}" if size else ""), digest)
    source, _, _ = prepared(name, tmp_path, tmp_path / "out")
    images = np.concatenate([stored[f"{part}_images"] for part in ("train", "val", "test")])
    labels = np.concatenate([stored[f"{part}_labels"][:, 0] for part in ("train", "val", "test")])
    same(source, images.reshape(14, *(*shape, 1)[:3]), labels, np.repeat([0, 1, 2], [7, 3, 4]))
    assert len(source.info.classes) == num_classes
    assert source.info.classes[0] == medmnist.INFO[flag]["label"]["0"]


def test_chestmnist_has_14_labels_an_image(tmp_path, monkeypatch):
    import medmnist

    def written(labels):
        parts = {f"{part}_images": pixels(4, 28, 28) for part in ("train", "val", "test")}
        np.savez(
            tmp_path / "chestmnist.npz", **parts, **{f"{part}_labels": labels for part in ("train", "val", "test")}
        )
        digest = hashlib.md5((tmp_path / "chestmnist.npz").read_bytes()).hexdigest()
        monkeypatch.setitem(medmnist.INFO["chestmnist"], "MD5", digest)

    labels = np.random.default_rng(3).integers(0, 2, (4, 14), np.uint8)
    written(labels)
    source, _, stored = prepared("chestmnist", tmp_path, tmp_path / "out")
    np.testing.assert_array_equal(stored, np.tile(labels, (3, 1)))
    assert (source.info.task, source.info.target_type, source.info.target_shape) == ("labels", "uint8", (14,))
    assert source.info.classes[:2] == ("atelectasis", "cardiomegaly")
    for wrong, words in (
        (labels[:, 0], r"targets of shape \(12,\) and type uint8 for the task labels"),
        (labels + (labels > 0), "labels besides 0 and 1"),
        (labels.astype(np.float32), "type float32"),
    ):
        written(wrong)
        with pytest.raises(DataError, match=words):
            prepare("chestmnist", tmp_path / "other", tmp_path)


def test_three_labels_are_refused_where_one_class_is_expected(tmp_path, monkeypatch):
    import medmnist

    images = {f"{part}_images": pixels(4, 28, 28) for part in ("train", "val", "test")}
    labels = {f"{part}_labels": np.eye(4, 3, dtype=np.uint8) for part in ("train", "val", "test")}
    np.savez(tmp_path / "organamnist.npz", **images, **labels)
    digest = hashlib.md5((tmp_path / "organamnist.npz").read_bytes()).hexdigest()
    monkeypatch.setitem(medmnist.INFO["organamnist"], "MD5", digest)
    with pytest.raises(DataError, match=r"targets of shape \(12, 3\) and type uint8 for the task classes"):
        prepare("organamnist", tmp_path / "out", tmp_path)


#: Arrays of an .npz -> the task of the set.
OF_TASKS = {
    "labels": (pixels(6, 4, 4, 3), np.eye(6, 3, dtype=np.int64)),
    "regression": (pixels(6, 4, 4, 1), np.linspace(0, 1, 6)),
    "classes": (np.linspace(0, 1, 30).reshape(6, 5), np.arange(6)[:, None] % 2),
    "tokens": (np.arange(24).reshape(6, 4), np.arange(24).reshape(6, 4)[:, ::-1]),
}


@pytest.mark.parametrize("task", OF_TASKS)
@pytest.mark.parametrize("is_split", [False, True])
def test_an_npz_of_any_task_is_read_as_it_is(task, is_split, tmp_path):
    inputs, targets = OF_TASKS[task]
    parts = {"train": slice(4), "test": slice(4, 6)} if is_split else {"": slice(6)}
    pairs = {"x": inputs, "y": targets}
    np.savez(
        tmp_path / "a.npz", **{f"{k}_{p}".rstrip("_"): v[rows] for p, rows in parts.items() for k, v in pairs.items()}
    )
    source, found, answers = prepared("npz", tmp_path / "a.npz", tmp_path / "out")
    assert source.info.task == task
    assert np.array_equal(found, inputs.astype(found.dtype))
    assert np.array_equal(
        answers, (targets[:, 0] if task == "classes" else targets).reshape(answers.shape).astype(answers.dtype)
    )
    assert (None if source.splits is None else source.splits.tolist()) == ([0, 0, 0, 0, 2, 2] if is_split else None)


@pytest.mark.parametrize("kind", ["streamed images", "regression"])
@pytest.mark.parametrize("is_split", [False, True])
def test_an_npz_keeps_its_domains(kind, is_split, tmp_path):
    inputs, targets = (pixels(6, 4, 4, 3), np.arange(6) % 3) if kind == "streamed images" else OF_TASKS["regression"]
    owners = np.array(["Ulm", "Bonn", "Ulm", "Ulm", "Bonn", "Aachen"])
    parts = {"train_": slice(4), "test_": slice(4, 6)} if is_split else {"": slice(6)}
    columns = {"images": inputs, "labels": targets, ("clients" if is_split else "domains"): owners}
    np.savez(
        tmp_path / "a.npz", **{f"{part}{name}": v[rows] for part, rows in parts.items() for name, v in columns.items()}
    )
    source, found, _ = prepared("npz", tmp_path / "a.npz", tmp_path / "out")
    assert (source.info.domains, source.domains.tolist()) == (("Aachen", "Bonn", "Ulm"), [2, 1, 2, 2, 1, 0])
    assert np.array_equal(found, inputs)
    assert (None if source.splits is None else source.splits.tolist()) == ([0, 0, 0, 0, 2, 2] if is_split else None)


def test_every_2d_medmnist_set_is_known_in_every_size():
    import medmnist

    flags = [flag for flag, about in medmnist.INFO.items() if not about["python_class"].endswith("3D")]
    assert len(flags) == 12
    assert {flag + size for flag in flags for size in ("", "_64", "_128", "_224")} <= set(SOURCES)


def test_medmnist_with_another_checksum_or_none_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"missing file bloodmnist.npz \(MD5 \w{32}\).*medmnist.com"):
        prepare("bloodmnist", tmp_path / "out", tmp_path)
    medmnist_file(tmp_path, "bloodmnist", (28, 28, 3), 8)
    with pytest.raises(DataError, match=r"checksum is \w{32}, and \w{32} is published in .*bloodmnist.npz"):
        prepare("bloodmnist", tmp_path / "out", tmp_path)
    assert not list((tmp_path / "out").rglob("[!.]*"))


def write_cifar(folder, train, test, meta, key):
    folder.mkdir()
    for name, images, labels in (*train, *test):
        flat = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
        (folder / name).write_bytes(pickle.dumps({"data": flat, key: [int(label) for label in labels]}))
    (folder / meta[0]).write_bytes(pickle.dumps({meta[1]: meta[2]}))


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_is_read_from_its_pickles(name, tmp_path, monkeypatch):
    from torchvision import datasets

    reader = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[name]
    count, num_classes = (3, 10) if name == "cifar10" else (8, 100)
    train = [(file, pixels(count, 32, 32, 3), np.arange(count) % num_classes) for file, _ in reader.train_list]
    test = [(file, pixels(4, 32, 32, 3), np.arange(4)) for file, _ in reader.test_list]
    names = [f"class {i}" for i in range(num_classes)]
    meta = (reader.meta["filename"], reader.meta["key"], names)
    write_cifar(tmp_path / reader.base_folder, train, test, meta, "labels" if name == "cifar10" else "fine_labels")
    with pytest.raises(DataError, match=rf"MD5 .* is published in .*{train[0][0]}"):
        prepare(name, tmp_path / "out", tmp_path)
    monkeypatch.setattr(reader, "train_list", [[file, None] for file, _ in reader.train_list])
    monkeypatch.setattr(reader, "test_list", [[file, None] for file, _ in reader.test_list])
    monkeypatch.setattr(reader, "meta", reader.meta | {"md5": None})
    every = [*train, *test]
    for root in (tmp_path, tmp_path / reader.base_folder):
        source, _, _ = prepared(name, root, tmp_path / "out")
        splits = np.repeat([0, 2], [len(source) - 4, 4])
        same(source, np.concatenate([e[1] for e in every]), np.concatenate([e[2] for e in every]), splits)
        assert source.info.classes == tuple(names)
    (tmp_path / reader.base_folder / test[0][0]).unlink()
    with pytest.raises(DataError, match=rf"missing file {test[0][0]}.*kriz"):
        prepare(name, tmp_path / "out", tmp_path, again=True)


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "stl10", "fashion_mnist"])
def test_without_the_archives_the_reader_of_trees_is_named(name, tmp_path):
    (tmp_path / "apple").mkdir()
    with pytest.raises(DataError, match="or by --download; `raysim prepare folder` reads images in a tree CLASS/image"):
        prepare(name, tmp_path / "out", tmp_path)


@pytest.mark.parametrize("version", ["v4", "v6"])
def test_cifar10_1_is_a_test_set_in_cifar10s_classes(version, tmp_path):
    images, labels = pixels(20, 32, 32, 3), np.arange(20) % 10
    np.save(tmp_path / f"cifar10.1_{version}_data.npy", images)
    np.save(tmp_path / f"cifar10.1_{version}_labels.npy", labels.astype(np.int32))
    source, _, _ = prepared(f"cifar10_1_{version}", tmp_path, tmp_path / "out")
    same(source, images, labels, np.full(20, 2))
    assert source.info.classes[:2] == ("airplane", "automobile")


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes() + array.tobytes()


@pytest.mark.parametrize("packed", [True, False])
def test_fashion_mnist_is_read_from_idx_files(packed, tmp_path, monkeypatch):
    from torchvision.datasets import FashionMNIST

    arrays = [pixels(9, 28, 28), np.arange(9, dtype=np.uint8), pixels(5, 28, 28), np.arange(5, dtype=np.uint8)]
    raw = tmp_path if packed else tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    resources = []
    for (name, _), array in zip(FashionMNIST.resources, arrays, strict=True):
        data = gzip.compress(idx(array)) if packed else idx(array)
        (raw / (name if packed else name.removesuffix(".gz"))).write_bytes(data)
        resources.append((name, hashlib.md5(data).hexdigest()))
    if packed:
        with pytest.raises(DataError, match=r"is published in .*train-images"):
            prepare("fashion_mnist", tmp_path / "out", tmp_path)
    monkeypatch.setattr(FashionMNIST, "resources", resources)
    source, _, _ = prepared("fashion_mnist", tmp_path, tmp_path / "out")
    images, labels = np.concatenate(arrays[::2])[..., None], np.concatenate(arrays[1::2])
    same(source, images, labels, np.repeat([0, 2], [9, 5]))
    assert source.info.classes[9] == "Ankle boot"
    if not packed:
        (raw / "t10k-images-idx3-ubyte").write_bytes(idx(arrays[2])[:-100])
        with pytest.raises(DataError, match=r"not readable .*t10k-images-idx3-ubyte"):
            prepare("fashion_mnist", tmp_path / "out", tmp_path, again=True)


def test_stl10_is_read_from_its_binary_files(tmp_path, monkeypatch):
    from torchvision.datasets import STL10

    folder = tmp_path / "stl10_binary"
    folder.mkdir()
    images, labels = pixels(10, 96, 96, 3), np.array([0, 9, 3, 4, 5, 6, 7, 8, 1, 2])
    for part, rows in (("train", slice(0, 6)), ("test", slice(6, 10))):
        images[rows].transpose(0, 3, 2, 1).tofile(folder / f"{part}_X.bin")  # channel, column, row
        (labels[rows] + 1).astype(np.uint8).tofile(folder / f"{part}_y.bin")
    names = ["airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck"]
    (folder / "class_names.txt").write_text("\n".join(names) + "\n")
    for attribute in ("train_list", "test_list"):
        monkeypatch.setattr(STL10, attribute, [[name, None] for name, _ in getattr(STL10, attribute)])
    source, _, _ = prepared("stl10", tmp_path, tmp_path / "out")
    same(source, images, labels, np.repeat([0, 2], [6, 4]))
    assert source.info.classes == tuple(names)
    # torchvision's own reader sees the same pictures.
    monkeypatch.setattr(STL10, "_check_integrity", lambda self: True)
    assert (np.asarray(STL10(tmp_path, "test")[1][0]) == images[7]).all()
    with open(folder / "test_X.bin", "r+b") as file:
        file.truncate(1000)
    with pytest.raises(DataError, match=r"not readable .*test_X.bin"):
        prepare("stl10", tmp_path / "out", tmp_path, again=True)


def test_npz_with_and_without_splits_and_names(tmp_path, monkeypatch):
    monkeypatch.setattr("raysim.data.rows.BATCH_BYTES", 6 * 5 * 3 * 4)  # so that 10 images are 3 batches
    images, labels = pixels(10, 6, 5, 3), np.arange(10) % 3
    np.savez(tmp_path / "mine.npz", images=images, labels=labels, classes=np.array(["a", "b", "c"]))
    source, _, _ = prepared("npz", tmp_path, tmp_path / "out", save_as="mine")
    same(source, images, labels)
    assert (source.info.name, source.info.classes, len(source.batches)) == ("mine", ("a", "b", "c"), 3)
    np.savez_compressed(tmp_path / "mine.npz", train_images=images[..., 0], train_labels=labels[:, None])
    source, _, _ = prepared("npz", tmp_path / "mine.npz", tmp_path / "out")
    same(source, images[..., :1], labels, np.zeros(10))
    assert source.info.classes == ("0", "1", "2")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"images": np.zeros(3), "labels": np.arange(3)},
            r"inputs of shape \(3,\) in npz, row 0\. Give \(n, \.\.\.\) numbers",
        ),
        (
            {"x_train": np.zeros((3, 4)), "y_train": np.zeros(3), "x_test": np.zeros((3, 5)), "y_test": np.zeros(3)},
            "parts of diff",
        ),
        ({"images": np.zeros((3, 4, 4), np.uint8), "labels": np.arange(4)}, "3 images and 4 labels"),
        ({"images": np.zeros((3, 4, 4), np.uint8), "labels": np.full((3, 2), 2)}, "labels besides 0 and 1"),
        ({"images": np.zeros((3, 4, 4), np.uint8)}, r"not among the keys \['images'\]"),
        (
            {"images": np.zeros((3, 4, 4), np.uint8), "labels": np.arange(3), "hospital": np.arange(3)},
            r"the array 'hospital' would not be read in .*mine.npz.*domains or clients",
        ),
        (
            {"images": np.zeros((3, 4, 4), np.uint8), "labels": np.arange(3), "domains": np.arange(4)},
            r"domains of shape \(4,\) and type int64 for 3 rows",
        ),
        (
            {
                "x_train": np.zeros((2, 3)),
                "y_train": np.zeros(2),
                "x_test": np.zeros((2, 3)),
                "y_test": np.zeros(2),
                "domains_test": np.arange(2),
            },
            r"\['domains_test'\] are not one array of domains for each part",
        ),
        ({"faces": np.zeros(3), "who": np.zeros(3)}, r"not among the keys \['faces', 'who'\] in .*mine.npz. Name them"),
        ({"x": np.zeros((3, 4, 4), np.uint8), "y": np.arange(3), "labels": np.arange(3)}, "not among the keys"),
        (
            {"x": np.zeros((3, 4, 4), np.uint8), "y": np.arange(3), "x_test": np.zeros((3, 4, 4), np.uint8)},
            "not among the keys",
        ),
        (
            {"images": np.zeros((3, 4, 4), np.uint8), "labels": np.array([0, -1, 1])},
            r"label -1 outside 0\.\.1 in .*mine.npz, labels, row 1",
        ),
        (
            {"images": np.zeros((3, 4, 4), np.uint8), "labels": np.array([0, 1, 2]), "classes": np.array(["a", "b"])},
            r"label 2 outside 0\.\.1 in .*mine.npz, labels, row 2",
        ),
    ],
)
def test_npz_with_bad_arrays_is_refused(arrays, message, tmp_path):
    np.savez(tmp_path / "mine.npz", **arrays)
    with pytest.raises(DataError, match=message):
        prepare("npz", tmp_path / "out", tmp_path)
    assert not list((tmp_path / "out").rglob("[!.]*.*"))


@pytest.mark.parametrize(
    "keys", [("x", "y"), ("X", "y"), ("data", "targets"), ("images", "labels"), ("data", "labels")]
)
@pytest.mark.parametrize("form", ["{name}", "{part}_{name}", "{name}_{part}"])
def test_npz_is_read_under_the_usual_keys(keys, form, tmp_path):
    images, labels = pixels(6, 4, 4, 1), np.arange(6) % 3
    parts = {"train": slice(4), "test": slice(4, 6)} if "part" in form else {"": slice(6)}
    arrays = {
        form.format(name=name, part=part): array[rows]
        for name, array in zip(keys, (images, labels), strict=True)
        for part, rows in parts.items()
    }
    np.savez(tmp_path / "mine.npz", **arrays)
    source, _, _ = prepared("npz", tmp_path, tmp_path / "out")
    same(source, images, labels, np.array([0, 0, 0, 0, 2, 2]) if "part" in form else None)


def test_truncated_npz_is_refused(tmp_path):
    np.savez(tmp_path / "mine.npz", images=pixels(50, 20, 20), labels=np.arange(50) % 3)
    with open(tmp_path / "mine.npz", "r+b") as file:
        file.truncate(5000)
    with pytest.raises(DataError, match=r"not readable .*mine.npz"):
        prepare("npz", tmp_path / "out", tmp_path)


@pytest.mark.parametrize("name", ["notes.npz", "notes.txt", "one.npy"])
def test_a_file_that_is_no_npz_is_named_as_such(name, tmp_path):
    (tmp_path / name).write_bytes(b"\x93NUMPY" if name == "one.npy" else b"a line of text")
    with pytest.raises(DataError, match=rf"not an .npz file, a zip of arrays in .*{name}. Store the arrays by numpy"):
        prepare("npz", tmp_path / "out", tmp_path / name)


def test_images_with_a_label_missing_are_refused():
    part = Part(pixels(3, 4, 4, 1), np.zeros(2, np.int64), 0, Path("labels"))
    with pytest.raises(DataError, match=r"images \(3, 4, 4, 1\) and labels \(2,\) in labels"):
        _contents(("a", "b"), [part], [])


def test_targets_without_a_column_are_refused():
    with pytest.raises(DataError, match=r"targets of shape \(4, 0\)"):
        array_contents(np.zeros((4, 3)), np.zeros((4, 0)), where="mine")
