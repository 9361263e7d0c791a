"""Every tree of image files, written small as it is published, is read back as it was; bad images are named."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
from PIL import Image

from raysim.base.errors import DataError
from raysim.data import reader_api
from raysim.data.arrow import describe
from raysim.data.readers import trees
from raysim.data.readers.reader_options import ReaderOptions
from raysim.data.sources import prepare
from tests.support.image_sets import class_tree, pixels, prepared, same, save_png


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
    _, images, _ = prepared("folder", tmp_path / "files", tmp_path / "out", options=ReaderOptions(size=20))
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
    with pytest.raises(DataError, match=r"no folder of a class or a domain in .*none. Correct --root"):
        prepare("folder", tmp_path / "out", tmp_path / "none")
    with pytest.raises(DataError, match=r"no such file or folder in .*nowhere. Correct --root"):
        prepare("folder", tmp_path / "out", tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"folder needs the source files. Give --root FOLDER$"):
        prepare("folder", tmp_path / "out")
    with pytest.raises(
        DataError, match=r"pacs needs the source files. Give --root FOLDER; the files are from the PACS project"
    ):
        prepare("pacs", tmp_path / "out")


def test_decoding_in_threads_gives_the_bytes_of_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.setattr("raysim.data.rows.BATCH_BYTES", 10 * 12 * 3 * 4)  # 4 images a batch
    images, labels = class_tree(tmp_path / "files", [f"class {i}" for i in range(5)], each=5)
    written = []
    for out, how in (("serial", map), ("threads", reader_api.map_in_threads)):
        monkeypatch.setattr(trees, "map_in_threads", how)
        source, _, _ = prepared("folder", tmp_path / "files", tmp_path / out)
        same(source, images, labels)
        written.append([source.path.read_bytes(), describe(source.path).read_bytes()])
    assert written[0] == written[1]
    (tmp_path / "files" / "class 3" / "img_2.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"^unreadable image .*class 3/img_2.png"):
        prepare("folder", tmp_path / "threads", tmp_path / "files", again=True)


@pytest.mark.parametrize("place", ["ant/again", "bee/twin"])
def test_a_link_to_a_folder_that_is_read_already_is_refused(tmp_path, place):
    files = tmp_path / "files"
    class_tree(files, ["ant", "bee"])
    (files / "bee" / "inside").mkdir()
    target = files / ("ant" if place.startswith("ant") else "bee/inside")
    (files / place).symlink_to(target, target_is_directory=True)
    with pytest.raises(DataError, match="a link to a folder that is read already"):
        prepare("folder", tmp_path / "out", files)


def test_a_link_to_images_elsewhere_is_followed(tmp_path):
    images, labels = class_tree(tmp_path / "elsewhere", ["ant", "bee"])
    (tmp_path / "files").mkdir()
    for name in ("ant", "bee"):
        (tmp_path / "files" / name).symlink_to(tmp_path / "elsewhere" / name, target_is_directory=True)
    same(prepared("folder", tmp_path / "files", tmp_path / "out")[0], images, labels)


def test_images_are_cut_or_squashed_to_a_square_bilinearly_or_bicubically(tmp_path):
    wide = np.linspace(0, 255, 40 * 60 * 3).reshape(40, 60, 3).astype(np.uint8)
    save_png(tmp_path / "files" / "a" / "1.png", wide)
    whole, middle = Image.fromarray(wide), (10, 0, 50, 40)
    ways = {
        ("crop", "bilinear", "20 x 20, shorter side, the middle cut out, bilinear"): whole.resize((20, 20), 2, middle),
        ("crop", "bicubic", "20 x 20, shorter side, the middle cut out, bicubic"): whole.resize((20, 20), 3, middle),
        ("squash", "bilinear", "20 x 20, squashed, bilinear"): whole.resize((20, 20), 2),
        ("squash", "bicubic", "20 x 20, squashed, bicubic"): whole.resize((20, 20), 3),
    }
    made = {}
    for (way, interpolation, words), want in ways.items():
        options = ReaderOptions(size=20, resize=way, interpolation=interpolation)
        source, images, _ = prepared("folder", tmp_path / "files", tmp_path / "out", options=options)
        assert (images[0] == np.asarray(want)).all()
        assert source.info.resize == words
        made[words] = images.tobytes()
    assert len(set(made.values())) == 4


def test_the_resize_that_livars_code_does_is_that_of_torchvision(tmp_path):
    transforms = pytest.importorskip("torchvision.transforms")
    image = pixels(40, 60, 3)
    save_png(tmp_path / "files" / "a" / "1.png", image)
    options = ReaderOptions(size=24, resize="squash", interpolation="bicubic")
    _, images, _ = prepared("folder", tmp_path / "files", tmp_path / "out", options=options)
    theirs = transforms.Resize((24, 24), interpolation=transforms.InterpolationMode.BICUBIC)(Image.fromarray(image))
    assert (images[0] == np.asarray(theirs)).all()
