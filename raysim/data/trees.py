"""Readers of image files: trees of folders, and HAM10000 with its table.

Every reader lists its images in sorted order first; batches of them are then decoded in parallel, in that order.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from raysim.core.errors import DataError
from raysim.data.arrow import Batch, batch_rows
from raysim.data.reader_api import PARTS, Contents, Request, damaged, need, split_codes

MODES = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr"}  # of 8 bits: others would be clipped


@dataclass(frozen=True)
class Images:
    """The images of a tree in order; domains and splits as in Batch."""

    paths: list[Path]
    labels: list[int]
    domains: list[int] | None = None
    splits: list[int] | None = None


def read_folder(request: Request, *, inner: Sequence[str] = (), leaf: str = "") -> Contents:
    """A tree class/.../image. With train, val or test on top (train/class/.../image), these are the official splits.

    Args:
      inner: published names of the folder that holds the classes, so that --root may be the folder above it.
      leaf: the folder inside each class that has the images, where others have masks.
    """
    root = _inside(request.root, inner)
    parts = [part for part in PARTS if (root / part).is_dir()]
    folders = [root / part for part in parts] or [root]
    classes = sorted({name for folder in folders for name in _folders(folder)})
    images = Images([], [], None, [] if parts else None)
    for folder, code in zip(folders, split_codes(parts) if parts else [0], strict=True):
        paths, labels = _class_images(folder, classes, leaf)
        images.paths.extend(paths)
        images.labels.extend(labels)
        if images.splits is not None:
            images.splits.extend([int(code)] * len(paths))
    return _contents(request, classes, images)


def read_cub200(request: Request) -> Contents:
    """CUB-200-2011 with its official split (images.txt, train_test_split.txt)."""
    root = _inside(request.root, ["CUB_200_2011"])
    table = {}
    for name in ("images.txt", "train_test_split.txt"):
        with damaged(need(root / name, request.origin)):
            table[name] = dict(line.split() for line in (root / name).read_text().splitlines())
    codes = {path: table["train_test_split.txt"].get(number) for number, path in table["images.txt"].items()}
    classes = _folders(root / "images")
    paths, labels = _class_images(root / "images", classes)
    splits = []
    for path in paths:
        code = codes.get(path.relative_to(root / "images").as_posix())
        if code not in ("0", "1"):
            raise DataError("an image without an official split", str(path), "see images.txt and train_test_split.txt")
        splits.append(0 if code == "1" else 2)
    return _contents(request, classes, Images(paths, labels, None, splits), [root / name for name in table])


def read_eurosat(request: Request) -> Contents:
    """EuroSAT, a tree class/image; with the published split file beside it or in it, that is the official split.

    The file (split_zhou_EuroSAT.json, or split.json as LIVAR's code names it) lists [class/image, label, name] under
    train, val and test: 13,500, 5,400 and 8,100 rows.
    """
    root = _inside(request.root, ("2750", "EuroSAT_RGB"))
    classes = _folders(root)
    paths, labels = _class_images(root, classes)
    names = ("split_zhou_EuroSAT.json", "split.json")
    table = next(
        (folder / name for folder in (root, request.root) for name in names if (folder / name).is_file()), None
    )
    if table is None:
        return _contents(request, classes, Images(paths, labels))
    with damaged(table):
        parts = json.loads(table.read_text())
        parts = {part: [str(row[0]) for row in parts[part]] for part in ("train", "val", "test")}
    codes = {path: code for code, rows in enumerate(parts.values()) for path in rows}
    found = [path.relative_to(root).as_posix() for path in paths]
    for path in (*found, *codes):
        if path not in codes:
            raise DataError("an image without an official split", str(root / path), f"see {table}")
        need(root / path, request.origin)
    return _contents(request, classes, Images(paths, labels, None, [codes[path] for path in found]), [table])


def read_domains(request: Request, *, inner: Sequence[str] = ()) -> Contents:
    """A tree domain/class/.../image; the folders on top become the domains."""
    root = _inside(request.root, inner)
    names = _folders(root)
    classes = sorted({label for name in names for label in _folders(root / name)})
    images = Images([], [], [])
    assert images.domains is not None
    for number, name in enumerate(names):
        paths, labels = _class_images(root / name, classes)
        images.paths.extend(paths)
        images.labels.extend(labels)
        images.domains.extend([number] * len(paths))
    return _contents(request, classes, images, (), tuple(names))


def read_tiny_imagenet(request: Request) -> Contents:
    """Tiny-ImageNet-200: train/WNID/images, and as the test split val/images with val_annotations.txt.

    The labels of its test images were never published; they are not read.
    """
    root = _inside(request.root, ["tiny-imagenet-200"])
    tables = [root / "wnids.txt", root / "words.txt", root / "val" / "val_annotations.txt"]
    lines = []
    for path in tables:
        with damaged(need(path, request.origin)):
            lines.append(path.read_text().splitlines())
    ids = sorted(line.strip() for line in lines[0] if line.strip())
    words = dict(line.split("\t", 1) for line in lines[1] if "\t" in line)
    paths, labels = _class_images(root / "train", ids, "images")
    splits = [0] * len(paths)
    for row, line in sorted(enumerate(lines[2], 1), key=lambda item: item[1]):
        name, _, wnid = line.partition("\t")
        wnid = wnid.split("\t")[0]
        if wnid not in ids:
            raise DataError(f"unknown class {wnid!r}", f"{tables[2]}, row {row}", "it must be one of wnids.txt")
        paths.append(need(root / "val" / "images" / name, request.origin))
        labels.append(ids.index(wnid))
        splits.append(2)
    classes = [words.get(wnid, wnid) for wnid in ids]
    if len(set(classes)) < len(ids):  # a few words name two classes, such as two kinds of crane
        classes = [f"{wnid} {name}" for wnid, name in zip(ids, classes, strict=True)]
    return _contents(request, classes, Images(paths, labels, None, splits), tables)


def read_ham10000(request: Request) -> Contents:
    """HAM10000: HAM10000_metadata(.csv) and the images below --root; its column `dataset` gives the domains."""
    names = ("HAM10000_metadata.csv", "HAM10000_metadata", "HAM10000_metadata.tab")
    table = next((request.root / name for name in names if (request.root / name).is_file()), request.root / names[0])
    with damaged(need(table, request.origin)), open(table, newline="") as file:
        delimiter = "\t" if table.suffix == ".tab" else ","
        rows = sorted(csv.DictReader(file, delimiter=delimiter), key=lambda row: row["image_id"])
        classes = sorted({row["dx"] for row in rows})
        has_domains = bool(rows) and "dataset" in rows[0]
        domains = sorted({row["dataset"] for row in rows}) if has_domains else []
    found = {path.stem: path for path in sorted(request.root.rglob("*.jpg"))}
    for row in rows:
        if row["image_id"] not in found:
            raise DataError(f"no image {row['image_id']}.jpg", f"{table}", f"get it from {request.origin}")
    images = Images(
        [found[row["image_id"]] for row in rows],
        [classes.index(row["dx"]) for row in rows],
        [domains.index(row["dataset"]) for row in rows] if has_domains else None,
    )
    return _contents(request, classes, images, [table], tuple(domains))


def _inside(root: Path, inner: Sequence[str]) -> Path:
    return next((root / name for name in inner if (root / name).is_dir()), root)


def _folders(root: Path) -> list[str]:
    from torchvision.datasets.folder import find_classes

    with damaged(root):
        return [name for name in find_classes(root)[0] if not name.startswith((".", "__"))]


def _class_images(root: Path, classes: Sequence[str], leaf: str = "") -> tuple[list[Path], list[int]]:
    """The images below root/CLASS/leaf."""
    from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

    paths, labels = [], []
    for label, name in enumerate(classes):
        if not (root / name).is_dir():
            continue  # a domain or a split need not have every class
        folder = root / name / leaf
        found = make_dataset(str(folder.parent), {folder.name: label}, IMG_EXTENSIONS, allow_empty=True)
        if not found:
            raise DataError("empty class folder: no image file", str(folder), "add images, or remove the folder")
        paths += [Path(path) for path, _ in found]
        labels += [label] * len(found)
    return paths, labels


def _contents(
    request: Request, classes: Sequence[str], images: Images, tables: Sequence[Path] = (), domains: tuple[str, ...] = ()
) -> Contents:
    if not images.paths:
        raise DataError("no image files", str(request.root), f"get them from {request.origin}")
    return Contents(tuple(classes), _decoded(request, images), [*tables, *images.paths], len(images.paths), domains)


def _decoded(request: Request, images: Images) -> Iterator[Batch]:
    size = request.options.size
    shape = (size, size, 3) if size else decode([str(images.paths[0])]).shape[1:]
    rows = batch_rows(shape)
    starts = range(0, len(images.paths), rows)
    work = [[str(path) for path in images.paths[start : start + rows]] for start in starts]
    decoding = request.parallel_map(partial(decode, size=size, shape=shape), work)
    for start, pixels in zip(starts, decoding, strict=True):
        part = slice(start, start + rows)
        yield Batch(
            pixels,
            np.array(images.labels[part], np.int64),
            None if images.domains is None else np.array(images.domains[part], np.int64),
            None if images.splits is None else np.array(images.splits[part], np.int8),
        )


def decode(
    sources: Sequence[str | bytes], *, names: Sequence[str] = (), size: int | None = None, shape: tuple[int, ...] = ()
) -> np.ndarray:
    """(n, height, width, 3) uint8 of image files, or of encoded images, as RGB.

    Args:
      names: what to call encoded images in errors.
      size: resize the shorter side to this many pixels and crop the middle: the usual preparation of test images.
      shape: what all must have; by default that of the first.
    Raises:
      DataError: an unreadable image, more than 8 bits a channel, or another shape; it names the file.
    """
    from PIL import Image, ImageOps

    pixels = []
    for source, name in zip(sources, names or sources, strict=True):
        try:
            with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
                if image.mode not in MODES:
                    raise DataError(f"an image of mode {image.mode}", str(name), "convert it to 8 bits a channel")
                rgb = image.convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise DataError(f"unreadable image ({error})", str(name), "fetch it again, or remove it") from error
        if size:
            rgb = ImageOps.fit(rgb, (size, size), Image.Resampling.BILINEAR)
        pixels.append(np.asarray(rgb))
        shape = shape or pixels[0].shape
        if pixels[-1].shape != shape:
            found, wanted = (f"{s[0]} x {s[1]}" for s in (pixels[-1].shape, shape))
            raise DataError(
                f"an image of {found} pixels among images of {wanted}", str(name), "give --size to resize them all"
            )
    return np.stack(pixels)
