"""Every source format, written small in its real form on disk, is read back as it was; bad input is one clear error."""

from __future__ import annotations

import csv
import errno
import gzip
import hashlib
import io
import json
import os
import pickle
import textwrap
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from typer.testing import CliRunner

from raysim.__main__ import app
from raysim.core.errors import DataError
from raysim.data import reader_api, sources
from raysim.data.arrow import Batch, ImageSet, describe, in_batches, write_set
from raysim.data.reader_api import Options
from raysim.data.shapes import SHAPES, STYLES, draw, shape_batches
from raysim.data.sources import SOURCES, prepare, set_path

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


# --- arrays


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


def test_every_2d_medmnist_set_is_known_in_every_size():
    import medmnist

    flags = [flag for flag, about in medmnist.INFO.items() if not about["python_class"].endswith("3D")]
    assert len(flags) == 12
    assert {flag + size for flag in flags for size in ("", "_64", "_128", "_224")} <= set(SOURCES)


def test_medmnist_with_another_checksum_or_none_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"missing file bloodmnist.npz \(MD5 \w{32}\).*medmnist.com"):
        prepare("bloodmnist", tmp_path / "out", tmp_path)
    medmnist_file(tmp_path, "bloodmnist", (28, 28, 3), 8)
    with pytest.raises(DataError, match=r"MD5 \w{32} where \w{32} is published in .*bloodmnist.npz"):
        prepare("bloodmnist", tmp_path / "out", tmp_path)
    with pytest.raises(DataError, match="14 labels an image"):
        prepare("chestmnist", tmp_path / "out", tmp_path)
    assert not (tmp_path / "out").exists()


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
    monkeypatch.setattr("raysim.data.arrow.BATCH_BYTES", 6 * 5 * 3 * 4)  # so that 10 images are 3 batches
    images, labels = pixels(10, 6, 5, 3), np.arange(10) % 3
    np.savez(tmp_path / "mine.npz", images=images, labels=labels, classes=np.array(["a", "b", "c"]))
    source, _, _ = prepared("npz", tmp_path, tmp_path / "out", save_as="mine")
    same(source, images, labels)
    assert (source.info.name, source.info.classes, len(list(source.batches()))) == ("mine", ("a", "b", "c"), 3)
    np.savez_compressed(tmp_path / "mine.npz", train_images=images[..., 0], train_labels=labels[:, None])
    source, _, _ = prepared("npz", tmp_path / "mine.npz", tmp_path / "out")
    same(source, images[..., :1], labels, np.zeros(10))
    assert source.info.classes == ("0", "1", "2")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": np.zeros((3, 4, 4)), "labels": np.arange(3)}, "images.npy of shape .* and type float64"),
        ({"images": np.zeros((3, 4, 4), np.uint8), "labels": np.arange(4)}, "3 images and 4 labels"),
        ({"images": np.zeros((3, 4, 4), np.uint8), "labels": np.zeros((3, 2), int)}, r"labels of shape \(3, 2\)"),
        ({"images": np.zeros((3, 4, 4), np.uint8)}, "not readable .*labels"),
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
    assert not list((tmp_path / "out").rglob("*.*"))


def test_truncated_npz_is_refused(tmp_path):
    np.savez(tmp_path / "mine.npz", images=pixels(50, 20, 20), labels=np.arange(50) % 3)
    with open(tmp_path / "mine.npz", "r+b") as file:
        file.truncate(5000)
    with pytest.raises(DataError, match=r"not readable .*mine.npz"):
        prepare("npz", tmp_path / "out", tmp_path)


# --- image files


def class_tree(root, classes, each=3, shape=(10, 12, 3), ending="png"):
    """Write a tree; (images, labels) in the order of sorted paths."""
    images, labels = [], []
    for label, name in enumerate(classes):
        for i in range(each):
            images.append(pixels(*shape))
            labels.append(label)
            save_png(root / name / f"img_{i}.{ending}", images[-1])
    return np.stack(images), np.array(labels)


@pytest.mark.parametrize(
    ("name", "inner"),
    [
        ("folder", ""),
        ("eurosat", "2750"),
        ("eurosat", "EuroSAT_RGB"),
        ("imagenet_r", "imagenet-r"),
        ("imagenet100", ""),
    ],
)
def test_folder_of_classes(name, inner, tmp_path):
    images, labels = class_tree(tmp_path / "files" / inner, ["ant", "bee", "cat"])
    (tmp_path / "files" / inner / "README.txt").write_text("not an image")
    source, _, _ = prepared(name, tmp_path / "files", tmp_path / "out")
    same(source, images, labels)
    assert source.info.classes == ("ant", "bee", "cat")


@pytest.mark.parametrize(
    ("parts", "codes"), [(("train", "val"), (0, 2)), (("train", "val", "test"), (0, 1, 2)), (("train", "test"), (0, 2))]
)
def test_folder_with_official_splits(parts, codes, tmp_path):
    trees = [class_tree(tmp_path / "files" / part, ["ant", "bee"], each=2) for part in parts]
    source, _, _ = prepared("imagenet100", tmp_path / "files", tmp_path / "out")
    images, labels = (np.concatenate(column) for column in zip(*trees, strict=True))
    same(source, images, labels, np.repeat(codes, 4))


@pytest.mark.parametrize(("inner", "name"), [("2750", "../split_zhou_EuroSAT.json"), ("EuroSAT_RGB", "split.json")])
def test_eurosat_has_the_split_of_the_published_file(inner, name, tmp_path):
    base = tmp_path / "files" / inner
    images, labels = class_tree(base, ["Forest", "River"])
    rows = {"train": [(0, 0), (1, 2)], "val": [(0, 1)], "test": [(1, 0), (0, 2), (1, 1)]}
    names = ("Forest", "River")
    split = {part: [[f"{names[c]}/img_{i}.png", c, names[c]] for c, i in found] for part, found in rows.items()}
    (base / name).write_text(json.dumps(split))
    source, _, _ = prepared("eurosat", tmp_path / "files", tmp_path / "out")
    same(source, images, labels, [0, 1, 2, 2, 2, 0])
    save_png(base / "River" / "new.png", images[0])
    with pytest.raises(DataError, match=r"without an official split in .*new.png"):
        prepare("eurosat", tmp_path / "out", tmp_path / "files", again=True)
    (base / "River" / "new.png").unlink()
    (base / "River" / "img_1.png").unlink()
    with pytest.raises(DataError, match=r"missing file img_1.png"):
        prepare("eurosat", tmp_path / "out", tmp_path / "files", again=True)
    (base / name).write_text(json.dumps({"train": []}))
    with pytest.raises(DataError, match=r"not readable .*split"):
        prepare("eurosat", tmp_path / "out", tmp_path / "files", again=True)


def test_covid19_is_a_class_per_folder(tmp_path):
    names = ("COVID-19", "Normal", "Pneumonia-Bacterial", "Pneumonia-Viral")
    images, labels = class_tree(tmp_path / "Curated X-Ray Dataset", names)
    source, _, _ = prepared("covid19", tmp_path, tmp_path / "out")
    same(source, images, labels)
    assert source.info.classes == names


def test_covid19_radiography_takes_images_and_not_masks(tmp_path):
    base, names = tmp_path / "COVID-19_Radiography_Dataset", ("COVID", "Lung_Opacity", "Normal", "Viral Pneumonia")
    grey = [pixels(9, 9) for _ in names]
    for name, image in zip(names, grey, strict=True):
        save_png(base / name / "images" / f"{name}-1.png", image)
        save_png(base / name / "masks" / f"{name}-1.png", pixels(5, 5))
    source, _, _ = prepared("covid19_radiography", tmp_path, tmp_path / "out")
    same(source, np.stack(grey)[..., None].repeat(3, -1), np.arange(4))


def test_cub200_has_its_official_split(tmp_path):
    base = tmp_path / "CUB_200_2011"
    images, labels = class_tree(base / "images", ["001.Albatross", "002.Auklet"])
    paths = [f"{name}/img_{i}.png" for name in ("001.Albatross", "002.Auklet") for i in range(3)]
    (base / "images.txt").write_text("".join(f"{i} {path}\n" for i, path in enumerate(paths, 1)))
    (base / "train_test_split.txt").write_text("1 1\n2 0\n3 1\n4 0\n5 0\n6 1\n")
    source, _, _ = prepared("cub200", tmp_path, tmp_path / "out")
    same(source, images, labels, [0, 2, 0, 2, 2, 0])
    save_png(base / "images" / "002.Auklet" / "new.png", images[0])
    with pytest.raises(DataError, match=r"without an official split in .*new.png"):
        prepare("cub200", tmp_path / "out", tmp_path, again=True)


def test_tiny_imagenet_tree(tmp_path):
    base, ids = tmp_path / "tiny-imagenet-200", ["n02", "n01"]
    train, train_labels = [], []
    for wnid in sorted(ids):
        for i in range(2):
            train.append(pixels(64, 64, 3))
            train_labels.append(sorted(ids).index(wnid))
            save_png(base / "train" / wnid / "images" / f"{wnid}_{i}.png", train[-1])
        (base / "train" / wnid / f"{wnid}_boxes.txt").write_text(f"{wnid}_0.png\t0\t0\t62\t62\n")
    held = [pixels(64, 64, 3) for _ in range(3)]
    for i, image in enumerate(held):
        save_png(base / "val" / "images" / f"val_{i}.png", image)
    save_png(base / "test" / "images" / "test_0.png", pixels(64, 64, 3))
    (base / "wnids.txt").write_text("\n".join(ids) + "\n")
    (base / "words.txt").write_text("n01\tgoldfish, Carassius\nn02\tbullfrog\nn03\tnewt\n")
    lines = ["val_1.png\tn01\t0\t0\t1\t1", "val_0.png\tn02\t0\t32\t44\t62", "val_2.png\tn02\t5\t0\t1\t1"]
    (base / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    source, _, _ = prepared("tiny_imagenet", tmp_path, tmp_path / "out")
    same(source, np.stack(train + held), [*train_labels, 1, 0, 1], [0] * 4 + [2] * 3)
    assert source.info.classes == ("goldfish, Carassius", "bullfrog")
    (base / "val" / "val_annotations.txt").write_text("val_0.png\tn02\nval_1.png\tn07\n")
    with pytest.raises(DataError, match=r"unknown class 'n07' in .*val_annotations.txt, row 2"):
        prepare("tiny_imagenet", tmp_path / "out", tmp_path, again=True)


@pytest.mark.parametrize("name", ["pacs", "domains"])
def test_domains_are_read_with_their_names(name, tmp_path):
    names, classes = ["art_painting", "cartoon", "photo", "sketch"], ["dog", "elephant"]
    trees = [class_tree(tmp_path / "files" / domain, classes, each=2) for domain in names]
    source, _, _ = prepared(name, tmp_path / "files", tmp_path / "out")
    images, labels = (np.concatenate(column) for column in zip(*trees, strict=True))
    same(source, images, labels, None, np.repeat(np.arange(4), 4))
    assert source.info.domains == tuple(names)


def test_ham10000_is_read_from_images_and_table(tmp_path):
    codes, domains = ["nv", "mel", "nv", "akiec"], ["vidir_modern", "rosendahl", "rosendahl", "vienna_dias"]
    with open(tmp_path / "HAM10000_metadata.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["lesion_id", "image_id", "dx", "dx_type", "age", "sex", "localization", "dataset"])
        for i in (2, 0, 3, 1):
            table.writerow([f"HAM_{i}", f"ISIC_{i}", codes[i], "histo", "", "male", "back", domains[i]])
    for i in range(4):
        grey = np.full((9, 12, 3), 60 * i, np.uint8)  # uniform, which JPEG keeps
        save_png(tmp_path / f"HAM10000_images_part_{1 + i // 2}" / f"ISIC_{i}.jpg", grey)
    source, images, _ = prepared("ham10000", tmp_path, tmp_path / "out")
    same(source, images, [2, 1, 2, 0], None, [1, 0, 0, 2])
    assert (images.mean(axis=(1, 2, 3)) == [0, 60, 120, 180]).all()
    assert source.info.classes == ("akiec", "mel", "nv")
    assert source.info.domains == ("rosendahl", "vidir_modern", "vienna_dias")
    (tmp_path / "HAM10000_images_part_1" / "ISIC_1.jpg").unlink()
    with pytest.raises(DataError, match=r"no image ISIC_1.jpg in .*HAM10000_metadata.csv"):
        prepare("ham10000", tmp_path / "out", tmp_path, again=True)


def test_jpeg_is_decoded_as_pillow_does_and_resized_on_request(tmp_path):
    smooth = np.linspace(0, 255, 40 * 60 * 3).reshape(40, 60, 3).astype(np.uint8)
    save_png(tmp_path / "files" / "a" / "1.JPEG", smooth)
    save_png(tmp_path / "files" / "b" / "1.png", smooth[:30, :30])
    with pytest.raises(
        DataError, match=r"an image of 30 x 30 pixels among images of 40 x 60 in .*b/1.png. Give --size"
    ):
        prepare("folder", tmp_path / "out", tmp_path / "files")
    _, images, _ = prepared("folder", tmp_path / "files", tmp_path / "out", options=Options(size=20))
    resized = Image.open(tmp_path / "files" / "a" / "1.JPEG").crop((10, 0, 50, 40)).resize((20, 20), Image.BILINEAR)
    assert images.shape == (2, 20, 20, 3)
    assert (images[0] == np.asarray(resized)).all()


@pytest.mark.parametrize("damage", ["text", "truncated", "deep"])
def test_unreadable_image_is_named(damage, tmp_path):
    class_tree(tmp_path / "files", ["a", "b"])
    path = tmp_path / "files" / "b" / "img_1.png"
    if damage == "deep":
        Image.fromarray(np.zeros((10, 12), np.uint16)).save(path)
    else:
        path.write_bytes(b"not an image" if damage == "text" else path.read_bytes()[:60])
    message = "mode I;16" if damage == "deep" else "unreadable image"
    with pytest.raises(DataError, match=rf"{message}.*b/img_1.png"):
        prepare("folder", tmp_path / "out", tmp_path / "files")
    assert not list((tmp_path / "out" / "folder").iterdir())


def test_empty_class_folder_and_empty_tree_are_named(tmp_path):
    class_tree(tmp_path / "files", ["a"])
    (tmp_path / "files" / "b").mkdir()
    with pytest.raises(DataError, match=r"empty class folder.*files/b"):
        prepare("folder", tmp_path / "out", tmp_path / "files")
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match=r"not readable .*none"):
        prepare("folder", tmp_path / "out", tmp_path / "none")
    with pytest.raises(DataError, match=r"no such file or folder in .*nowhere"):
        prepare("folder", tmp_path / "out", tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"folder needs its source files. Give --root"):
        prepare("folder", tmp_path / "out")


def test_decoding_in_parallel_or_on_ray_data_gives_the_same_bytes(tmp_path, monkeypatch, ray_cluster):
    from raysim.data.pipeline import map_with_ray_data

    monkeypatch.setattr("raysim.data.arrow.BATCH_BYTES", 10 * 12 * 3 * 4)  # 4 images a batch
    images, labels = class_tree(tmp_path / "files", [f"class {i}" for i in range(5)], each=5)
    written = []
    for out, how in (("serial", map), ("threads", reader_api.map_in_threads), ("ray", map_with_ray_data)):
        source, _, _ = prepared("folder", tmp_path / "files", tmp_path / out, parallel_map=how)
        same(source, images, labels)
        written.append([source.path.read_bytes(), describe(source.path).read_bytes()])
    assert written[0] == written[1] == written[2]
    (tmp_path / "files" / "class 3" / "img_2.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"^unreadable image .*class 3/img_2.png"):
        prepare("folder", tmp_path / "ray", tmp_path / "files", again=True, parallel_map=map_with_ray_data)


# --- Arrow and Parquet


def test_a_set_of_ours_is_copied_with_all_its_columns(tmp_path):
    images, labels = pixels(30, 4, 5, 1), np.arange(30) % 3
    domains, splits = np.arange(30) % 2, np.repeat([0, 1, 2], 10)
    path = tmp_path / "old.arrow"
    write_set(path, "old", "abc", in_batches(images, labels, 7, domains=domains, splits=splits), domains=["x", "y"])
    source, _, _ = prepared("arrow", path, tmp_path / "out", save_as="new")
    same(source, images, labels, splits, domains)
    assert (source.info.classes, source.info.domains) == (("a", "b", "c"), ("x", "y"))


@pytest.mark.parametrize("encoding", ["tensor", "bytes", "hub"])
def test_parquet_files_are_read_in_order_of_their_names(encoding, tmp_path):
    images, labels, files = pixels(9, 6, 7, 3), np.arange(9) % 4, tmp_path / "files"
    files.mkdir()
    for name, rows in (("train-00000-of-00002", [0, 1, 2]), ("train-00001-of-00002", [3, 4]), ("test-0", range(5, 9))):
        rows = list(rows)
        if encoding == "tensor":
            column = pa.FixedShapeTensorArray.from_numpy_ndarray(images[rows])
        elif encoding == "bytes":
            column = pa.array([png(images[i]) for i in rows])
        else:
            column = pa.array([{"bytes": png(images[i]), "path": f"{i}.png"} for i in rows])
        table = pa.table({"image": column, "label": pa.array(labels[rows])})
        if encoding == "hub":
            features = {"label": {"names": ["n", "e", "s", "w"], "_type": "ClassLabel"}}
            table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
        pq.write_table(table, files / f"{name}.parquet")
    source, _, _ = prepared("parquet", files, tmp_path / "out")
    order = [5, 6, 7, 8, 0, 1, 2, 3, 4]
    same(source, images[order], labels[order], [2] * 4 + [0] * 5)
    assert source.info.classes == (("n", "e", "s", "w") if encoding == "hub" else ("0", "1", "2", "3"))


def test_parquet_names_the_row_of_an_unreadable_image_and_a_missing_column(tmp_path):
    cells = [png(pixels(4, 4, 3)), b"", png(pixels(4, 4, 3))]
    pq.write_table(pa.table({"image": cells, "label": [0, 1, 0]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"unreadable image .*a.parquet, row 1"):
        prepare("parquet", tmp_path / "out", tmp_path)
    pq.write_table(pa.table({"image": cells}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"no column 'label' in .*a.parquet"):
        prepare("parquet", tmp_path / "out", tmp_path)
    write_set(tmp_path / "b.arrow", "b", "ab", [(pixels(3, 4, 4, 1), np.array([0, 1, 1]))])
    described = json.loads(describe(tmp_path / "b.arrow").read_text())
    describe(tmp_path / "b.arrow").write_text(json.dumps(described | {"classes": ["a"]}))
    with pytest.raises(DataError, match=r"label 1 outside 0\.\.0 in .*b.arrow, row 1"):
        prepare("arrow", tmp_path / "out", tmp_path / "b.arrow")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match=r"not readable .*a.parquet"):
        prepare("parquet", tmp_path / "out", tmp_path)


def test_set_without_optional_columns_is_as_before(tmp_path):
    path, images = tmp_path / "mine.arrow", pixels(10, 4, 4, 1)
    write_set(path, "mine", "ab", in_batches(images, np.arange(10) % 2))
    old = json.loads(describe(path).read_text())
    describe(path).write_text(json.dumps({key: old[key] for key in list(old)[:6]}))
    source = ImageSet(path)
    assert pa.ipc.open_file(str(path)).schema.names == ["image", "label"]
    assert (source.domains, source.splits, source.info.domains, source.info.source_checksum) == (None, None, (), "")
    source.verify()
    same(source, images, np.arange(10) % 2)


def test_domains_and_splits_are_checked(tmp_path):
    path, images, labels = tmp_path / "mine.arrow", pixels(4, 4, 4, 1), np.zeros(4, int)
    with pytest.raises(DataError, match=r"domain 2 outside 0\.\.1 in mine, row 3"):
        write_set(path, "mine", "a", [Batch(images, labels, np.array([0, 1, 0, 2]))], domains="xy")
    with pytest.raises(DataError, match=r"split 3 outside 0\.\.2 in mine, row 1"):
        write_set(path, "mine", "a", [Batch(images, labels, None, np.array([0, 3, 0, 2]))])
    with pytest.raises(DataError, match="some batches have a domain"):
        write_set(path, "mine", "a", [Batch(images, labels, labels), Batch(images, labels)], domains="x")
    with pytest.raises(DataError, match="pixels of type float64"):
        write_set(path, "mine", "a", [(images / 255, labels)])
    with pytest.raises(DataError, match=r"labels of shape \(3,\) for 4 images"):
        write_set(path, "mine", "a", [(images, labels[:3])])
    assert list(tmp_path.iterdir()) == []


def test_damaged_set_is_refused_and_kept_set_is_verified(tmp_path):
    info = prepare("digits", tmp_path)
    path = set_path(tmp_path, "digits")
    assert prepare("digits", tmp_path) == info
    data = bytearray(path.read_bytes())
    data[20_000] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"checksum \w+ where the description says \w+ in .*digits.arrow"):
        prepare("digits", tmp_path)
    assert prepare("digits", tmp_path, again=True) == info
    path.write_bytes(path.read_bytes()[:50_000])
    with pytest.raises(DataError, match="not a readable Arrow IPC file"):
        prepare("digits", tmp_path)
    describe(path).unlink()  # as if preparing had been cut off: it is done anew
    assert prepare("digits", tmp_path) == info


def test_full_disk_is_one_error_and_keeps_the_old_set(tmp_path):
    info = prepare("digits", tmp_path)
    path = set_path(tmp_path, "digits")
    before = path.read_bytes()
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.symlink_to("/dev/full")  # every write fails as on a full disk
    with pytest.raises(DataError, match=rf"no space left .* in {path.parent}"):
        prepare("digits", tmp_path, again=True)
    assert sorted(file.name for file in path.parent.iterdir()) == ["digits.arrow", "digits.json"]
    assert path.read_bytes() == before
    assert prepare("digits", tmp_path) == info


def test_full_disk_at_the_description_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(DataError, match="no space left"):
        prepare("digits", tmp_path)
    assert list((tmp_path / "digits").iterdir()) == []


# --- shapes


def test_shapes_are_a_pure_function_of_seed_and_index():
    how = {"size": 16, "seed": 3, "num_domains": 4}
    whole = draw(np.arange(60), **how)
    for rows in (1, 7, 60):
        parts = list(shape_batches(60, rows=rows, **how))
        for column in range(3):
            assert (np.concatenate([part[column] for part in parts]) == whole[column]).all()
    some = np.array([59, 3, 17])
    assert (draw(some, **how).images == whole.images[some]).all()
    assert (draw(some, **(how | {"seed": 4})).images != whole.images[some]).mean() > 0.5


def test_shapes_have_every_class_in_every_domain(tmp_path):
    options = Options(count=240, size=12, seed=1, domains=6)
    source, images, labels = prepared("shapes", None, tmp_path, options=options)
    assert images.shape == (240, 12, 12, 3)
    assert (source.info.classes, source.info.domains) == (tuple(SHAPES), STYLES)
    assert (np.bincount(labels * 6 + source.domains, minlength=60) == 4).all()
    assert "SYNTHETIC" in source.info.source
    again, _, _ = prepared("shapes", None, tmp_path, options=options)
    assert again.info == source.info
    for wrong in ({"count": 0}, {"size": 4}, {"domains": 7}):
        with pytest.raises(DataError, match=f"--{next(iter(wrong))} must be"):
            prepare("shapes", tmp_path, again=True, options=Options(**wrong))


def test_shapes_can_be_learned_from_pixels_and_styles_differ():
    from sklearn.neural_network import MLPClassifier

    train, test = (draw(np.arange(a, b), size=16, seed=0, num_domains=1) for a, b in ((0, 4000), (4000, 5000)))
    flat = [batch.images.mean(-1).reshape(len(batch.labels), -1) / 255 - 0.4 for batch in (train, test)]
    model = MLPClassifier((128,), tol=0.02, n_iter_no_change=3, random_state=0).fit(flat[0], train.labels)
    assert model.score(flat[1], test.labels) > 0.6  # chance: 0.1
    every = draw(np.arange(600), size=16, seed=0, num_domains=6)
    spread = [every.images[every.domains == d].astype(float).std(axis=(1, 2)).mean() for d in range(6)]
    means = [every.images[every.domains == d].mean() for d in range(6)]
    assert len({(round(a), round(b)) for a, b in zip(spread, means, strict=True)}) == 6


# --- the registry and the command


def test_the_example_of_adding_a_set_works(tmp_path, monkeypatch):
    text = sources.__doc__.split("official test images:\n")[1].split("Then `raysim")[0]
    monkeypatch.setattr(sources, "SOURCES", dict(SOURCES))
    exec(textwrap.dedent(text), vars(sources) | {"np": np, "need": reader_api.need, "in_batches": in_batches})
    images, labels = pixels(1200, 4, 5), np.arange(1200) % 2
    np.save(tmp_path / "scans.npy", images)
    np.save(tmp_path / "grades.npy", labels)
    source, _, _ = prepared("scans", tmp_path, tmp_path / "out")
    same(source, images[..., None], labels, np.repeat([0, 2], [200, 1000]))
    (tmp_path / "grades.npy").unlink()
    with pytest.raises(DataError, match=r"missing file grades.npy in .*Knee Project"):
        prepare("scans", tmp_path / "out", tmp_path, again=True)


def test_command_lists_all_sets_and_prepares_quietly(tmp_path):
    runner = CliRunner()
    listing = runner.invoke(app, ["prepare"]).stdout
    assert all(name in listing and source.description in listing for name, source in SOURCES.items())
    words = [
        "prepare",
        "shapes",
        "--count",
        "40",
        "--size",
        "8",
        "--seed",
        "5",
        "--domains",
        "2",
        "--out",
        str(tmp_path),
    ]
    result = runner.invoke(app, [*words, "--as", "toys"])
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[0].startswith("toys: 40 images (8, 8, 3), 10 classes, 2 domains")
    assert (
        ImageSet(set_path(tmp_path, "toys")).take(np.arange(40))[0]
        == draw(np.arange(40), size=8, seed=5, num_domains=2)[0]
    ).all()


def test_options_and_names_that_do_not_apply_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"digits has no option --size. Its options: none"):
        prepare("digits", tmp_path, options=Options(size=8))
    with pytest.raises(DataError, match=r"cifar10 has no option --count. Its options: --download"):
        prepare("cifar10", tmp_path, options=Options(count=8))
    with pytest.raises(DataError, match="cannot be called"):
        prepare("digits", tmp_path, save_as="../x")


def test_download_is_left_to_the_librarys_reader(tmp_path, monkeypatch):
    from torchvision.datasets import CIFAR10

    def no_network(self):
        raise RuntimeError("no route to host")

    monkeypatch.setattr(CIFAR10, "download", no_network)
    with pytest.raises(DataError, match=r"download of cifar10 failed \(no route to host\).*kriz"):
        prepare("cifar10", tmp_path / "out", tmp_path / "files", options=Options(download=True))


def test_progress_counts_examples(tmp_path):
    seen = []
    prepare("shapes", tmp_path, options=Options(count=1100, size=8), on_progress=lambda *now: seen.append(now))
    assert seen[-1] == (1100, 1100)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_source_checksum_follows_names_and_contents(tmp_path):
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "b").write_bytes(b"2")
    files = [tmp_path / "a", tmp_path / "b"]
    first = reader_api.files_checksum(files)
    assert first == reader_api.files_checksum(files) != reader_api.files_checksum(files[::-1])
    (tmp_path / "b").write_bytes(b"3")
    assert reader_api.files_checksum(files) != first
