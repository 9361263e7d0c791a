"""Readers of image files: trees of folders, HAM10000 with its table, Arrow and Parquet files with encoded images.

Readers of trees first list the images in a fixed order; batches are then decoded in parallel and returned in this
order.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raysim.base.errors import DataError, explained
from raysim.base.untrusted import read_json, regular_file
from raysim.data.reader_api import PARTS, Contents, Request, map_in_threads, need, numbered, split_codes
from raysim.data.readers.reader_options import DEFAULTS, ReaderOptions
from raysim.data.rows import SetRows, batch_rows, check_range, damaged

if TYPE_CHECKING:
    from pyarrow.dataset import Dataset


MODES = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr"}  # at most 8 bits; other modes would be clipped


class ImageFile(NamedTuple):
    """An image file. domain, split: as in `SetRows`, given for all images of a set or for none."""

    path: Path
    label: int
    domain: int | None = None
    split: int | None = None


def read_folder(request: Request, *, inner: Sequence[str] = (), leaf: str = "") -> Contents:
    """Read a tree class/.../image, or train/class/.../image with train, val and test as official splits.

    Args:
      inner: published names of the folder with the classes, so that --root may be its parent.
      leaf: name of the folder of images inside each class folder, next to folders of masks; empty for the class folder.
    """
    root = _inside(request.root, inner)
    parts = [part for part in PARTS if (root / part).is_dir()]
    splits = dict(zip(parts, split_codes(parts).tolist(), strict=True)) if parts else {"": None}
    classes = sorted({name for part in splits for name in _folders(root / part)})
    lists = [_class_images(root / part, classes, leaf, split=split) for part, split in splits.items()]
    return _contents(request, classes, list(chain.from_iterable(lists)))


def read_cub200(request: Request) -> Contents:
    """Read CUB-200-2011 with its official split (images.txt, train_test_split.txt)."""
    root = _inside(request.root, ["CUB_200_2011"])
    tables = [root / "images.txt", root / "train_test_split.txt"]
    paths, is_training = (_pairs(path, request.origin) for path in tables)
    codes = {"1": 0, "0": 2}
    splits = {path: codes[is_training[number]] for number, path in paths.items() if is_training.get(number) in codes}
    classes = _folders(root / "images")
    pictures = _class_images(root / "images", classes)
    pictures = _with_splits(pictures, splits, root / "images", "images.txt and train_test_split.txt")
    return _contents(request, classes, pictures, tables)


def read_eurosat(request: Request) -> Contents:
    """Read EuroSAT, a tree class/image; a published split file, if present, gives the official split.

    The file (split_zhou_EuroSAT.json, or split.json as LIVAR's code names it) lists [class/image, label, name] under
    train, val and test: 13,500, 5,400 and 8,100 rows.
    """
    root = _inside(request.root, ("2750", "EuroSAT_RGB"))
    classes = _folders(root)
    pictures = _class_images(root, classes)
    places = [folder / name for folder in (root, request.root) for name in ("split_zhou_EuroSAT.json", "split.json")]
    table = next((path for path in places if path.is_file()), None)
    if table is None:
        return _contents(request, classes, pictures)
    with damaged(table):
        parts = read_json(table)
        if not isinstance(parts, dict):
            raise ValueError(f"it holds {type(parts).__name__}")
        splits = {str(row[0]): code for code, part in enumerate(("train", "val", "test")) for row in parts[part]}
    pictures = _with_splits(pictures, splits, root, str(table))
    for name in splits:
        need(root / name, request.origin)
    return _contents(request, classes, pictures, [table])


def read_domains(request: Request, *, inner: Sequence[str] = ()) -> Contents:
    """Read a tree domain/class/.../image; the top folders are the domains."""
    root = _inside(request.root, inner)
    domains = _folders(root)
    classes = sorted({label for name in domains for label in _folders(root / name)})
    lists = [_class_images(root / name, classes, domain=number) for number, name in enumerate(domains)]
    return _contents(request, classes, list(chain.from_iterable(lists)), domains=domains)


def read_tiny_imagenet(request: Request) -> Contents:
    """Read Tiny-ImageNet-200: train/WNID/images, and val/images with val_annotations.txt as the test split.

    The set's test images are not read, since their labels were never published.
    """
    root = _inside(request.root, ["tiny-imagenet-200"])
    tables = [root / "wnids.txt", root / "words.txt", root / "val" / "val_annotations.txt"]
    wnids, meanings, annotations = (_lines(path, request.origin) for path in tables)
    ids = sorted(line.strip() for line in wnids if line.strip())
    words = dict(line.split("\t", 1) for line in meanings if "\t" in line)
    pictures = _class_images(root / "train", ids, "images", split=0)
    for row, line in sorted(enumerate(annotations, 1), key=lambda item: item[1]):
        name, _, wnid = line.partition("\t")
        wnid = wnid.split("\t")[0]
        if wnid not in ids:
            raise DataError(f"unknown class {wnid!r}", f"{tables[2]}, row {row}", "wnids.txt must list the class")
        path = need(root / "val" / "images" / name, request.origin)
        pictures.append(ImageFile(path, ids.index(wnid), split=2))
    classes = [words.get(wnid, wnid) for wnid in ids]
    if len(set(classes)) < len(ids):  # two classes may have the same words, such as the two kinds of crane
        classes = [f"{wnid} {name}" for wnid, name in zip(ids, classes, strict=True)]
    return _contents(request, classes, pictures, tables)


def read_ham10000(request: Request) -> Contents:
    """Read HAM10000: HAM10000_metadata(.csv, .tab) and images below --root; the column `dataset` gives the domains."""
    names = ("HAM10000_metadata.csv", "HAM10000_metadata", "HAM10000_metadata.tab")
    table = next((path for name in names if (path := request.root / name).is_file()), request.root / names[0])
    with damaged(need(table, request.origin)), open(table, newline="") as file:
        delimiter = "\t" if table.suffix == ".tab" else ","
        rows = sorted(csv.DictReader(file, delimiter=delimiter), key=lambda row: row["image_id"])
        classes = sorted({row["dx"] for row in rows})
        domains = sorted({row["dataset"] for row in rows if "dataset" in row})
    files = {path.stem: path for path in sorted(request.root.rglob("*.jpg"))}
    pictures = []
    for row in rows:
        if row["image_id"] not in files:
            raise DataError(f"no image {row['image_id']}.jpg", f"{table}", f"get it from {request.origin}")
        domain = domains.index(row["dataset"]) if domains else None
        pictures.append(ImageFile(files[row["image_id"]], classes.index(row["dx"]), domain))
    return _contents(request, classes, pictures, [table], domains)


def _inside(root: Path, inner: Sequence[str]) -> Path:
    return next((root / name for name in inner if (root / name).is_dir()), root)


def _lines(path: Path, origin: str) -> list[str]:
    with damaged(need(path, origin)):
        return path.read_text().splitlines()


def _pairs(path: Path, origin: str) -> dict[str, str]:
    with damaged(path):
        return dict(line.split() for line in _lines(path, origin))


def _folders(root: Path) -> list[str]:
    with damaged(root):
        names = sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith((".", "__")))
    if not names:
        raise DataError("no folder of a class or a domain", str(root), "correct --root")
    return names


def _class_images(root: Path, classes: Sequence[str], leaf: str = "", **codes: int | None) -> list[ImageFile]:
    """Return the images below root/CLASS/leaf. codes: the domain or split of all images."""
    pictures = []
    for label, name in enumerate(classes):
        if not (root / name).is_dir():
            continue  # a domain or a split need not have every class
        folder = root / name / leaf
        if not (files := _image_files(folder)):
            raise DataError("empty class folder: no image file", str(folder), "add images, or remove the folder")
        pictures += [ImageFile(path, label, **codes) for path in files]
    return pictures


def _image_files(root: Path) -> list[Path]:
    """Return the images at any depth below a folder, following links, in the order of torchvision's `make_dataset`.

    Raises:
      DataError: a link to a folder already visited, whose images would be read again.
    """
    from torchvision.datasets.folder import IMG_EXTENSIONS

    seen, places = set(), []
    for folder, _, names in os.walk(root, followlinks=True):
        if (real := os.path.realpath(folder)) in seen:
            raise DataError("a link to a folder that is read already", folder, "remove the link")
        seen.add(real)
        places += [(folder, name) for name in names if name.lower().endswith(IMG_EXTENSIONS)]
    return [Path(*place) for place in sorted(places)]


def _with_splits(pictures: Sequence[ImageFile], splits: Mapping[str, int], root: Path, table: str) -> list[ImageFile]:
    """Return the pictures with official splits; raise DataError for a picture without a split.

    Args:
      splits: path below `root` -> split code.
    """
    codes = [splits.get(picture.path.relative_to(root).as_posix()) for picture in pictures]
    if None in codes:
        raise DataError("an image without an official split", str(pictures[codes.index(None)].path), f"see {table}")
    return [picture._replace(split=code) for picture, code in zip(pictures, codes, strict=True)]


def _contents(
    request: Request,
    classes: Sequence[str],
    pictures: Sequence[ImageFile],
    tables: Sequence[Path] = (),
    domains: Sequence[str] = (),
) -> Contents:
    if not pictures:
        raise DataError("no image files", str(request.root), "correct --root")
    files = [*tables, *(picture.path for picture in pictures)]
    return Contents(tuple(classes), _decoded(request, pictures), files, len(pictures), tuple(domains))


def _decoded(request: Request, pictures: Sequence[ImageFile]) -> Iterator[SetRows]:
    size, mode = request.options.size, request.mode
    shape = (size, size, len(mode)) if size is not None else decode([str(pictures[0].path)], mode=mode).shape[1:]
    rows = batch_rows(shape)
    parts = [pictures[start : start + rows] for start in range(0, len(pictures), rows)]
    work = [[str(picture.path) for picture in part] for part in parts]
    decoding = map_in_threads(partial(decode, options=request.options, shape=shape, mode=mode), work)
    for part, pixels in zip(parts, decoding, strict=True):
        _, *columns = zip(ImageFile._fields, zip(*part, strict=True), strict=True)
        arrays = {f"{name}s": np.array(values) for name, values in columns if None not in values}
        yield SetRows(pixels, arrays.pop("labels"), **arrays)


def decode(
    sources: Sequence[str | bytes],
    *,
    names: Sequence[str] = (),
    options: ReaderOptions = DEFAULTS,
    shape: tuple[int, ...] = (),
    mode: str = "RGB",
) -> np.ndarray:
    """Decode image files or encoded images to (n, height, width, channels) uint8.

    Args:
      sources: paths, or encoded images as bytes.
      names: names of encoded images in error messages.
      shape: required shape of all images; by default the shape of the first image.
      mode: "RGB", or "L" for one grey channel.
    Raises:
      DataError: an unreadable image, more than 8 bits a channel, or another shape; the message names the file.
    """
    from PIL import Image, ImageOps

    pixels = []
    for source, name in zip(sources, names or sources, strict=True):
        kinds = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)
        readable = explained("unreadable image", str(name), "fetch the file again, or delete the file", *kinds)
        with (
            readable,
            Image.open(io.BytesIO(source) if isinstance(source, bytes) else regular_file(Path(source))) as image,
        ):
            if image.mode not in MODES:
                raise DataError(f"an image of mode {image.mode}", str(name), "convert the image to 8 bits a channel")
            converted = image.convert(mode)
        if options.size is not None:
            square = (options.size, options.size)
            filtered = Image.Resampling[(options.interpolation or "bilinear").upper()]
            is_cut = options.resize != "squash"
            converted = ImageOps.fit(converted, square, filtered) if is_cut else converted.resize(square, filtered)
        pixels.append(np.asarray(converted).reshape(converted.height, converted.width, -1))
        shape = shape or pixels[0].shape
        if pixels[-1].shape != shape:
            size_here, size_before = (f"{s[0]} x {s[1]}" for s in (pixels[-1].shape, shape))
            what = f"an image of {size_here} pixels among images of {size_before}"
            raise DataError(what, str(name), "give --size to resize all images")
    return np.stack(pixels)


def read_table(request: Request) -> Contents:
    """Read Arrow IPC or Parquet files with columns `image` and `label`, and optionally `domain` and `split`.

    Images are encoded: bytes, or the {bytes, path} of the Hugging Face hub. Several files are read in the order of
    their names. If the names of all files begin with a name of PARTS, such as train or test, the names give the splits.
    """
    from pyarrow.dataset import dataset  # 0.2 s

    kind = request.name
    files = [request.root] if request.root.is_file() else sorted(request.root.rglob(f"*.{kind}"))
    if not files:
        raise DataError(f"no .{kind} file", str(request.root), "give a file, or the folder of the files")
    parts = [next((part for part in PARTS if path.name.startswith(part)), "") for path in files]
    codes = split_codes(parts).tolist() if all(parts) else [None] * len(files)
    tables = []
    for path in files:
        with damaged(path):
            tables.append(dataset(regular_file(path), format="ipc" if kind == "arrow" else "parquet"))
        if missing := {"image", "label"} - set(tables[-1].schema.names):
            raise DataError(f"no column {sorted(missing)[0]!r}", str(path), "name the columns `image` and `label`")
        _check_types(tables[-1].schema, path)
    classes, domains = _names(tables, files[0])
    numbered_files = zip(files, tables, codes, strict=True)
    batches = (_table_batches(request, path, table, len(classes), code) for path, table, code in numbered_files)
    return Contents(classes, chain.from_iterable(batches), files, sum(each.count_rows() for each in tables), domains)


def _check_types(schema: pa.Schema, path: Path) -> None:
    """Raise DataError for columns of unsupported types."""
    for name in sorted({"label", "domain", "split"} & set(schema.names)):
        kind = schema.field(name).type
        if not pa.types.is_integer(kind):
            mend = "give whole numbers: positions in the sorted class names, from 0"
            raise DataError(f"a column {name!r} of type {kind}", str(path), mend)
    kind = schema.field("image").type
    cell = kind.field("bytes").type if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0 else kind
    if not pa.types.is_binary(cell) and not pa.types.is_large_binary(cell):
        mend = "give encoded images as bytes, or the hub's {bytes, path}; for paths, use `folder`"
        raise DataError(f"a column 'image' of type {kind}", str(path), mend)


def _names(tables: Sequence[Dataset], first: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (class names, domain names): classes from the hub's metadata if present; otherwise numbers."""
    hub = json.loads((tables[0].schema.metadata or {}).get(b"huggingface", b"{}"))
    names = hub.get("info", {}).get("features", {}).get("label", {}).get("names")
    with damaged(first):
        return tuple(names or _numbers(tables, "label", first)), _numbers(tables, "domain", first)


def _numbers(tables: Sequence[Dataset], column: str, path: Path) -> tuple[str, ...]:
    """Return "0" to the largest value of a column as text; empty without the column."""
    if column not in tables[0].schema.names:
        return ()
    largest = [pc.max(table.to_table([column])[column]).as_py() for table in tables]
    return numbered(max((value for value in largest if value is not None), default=-1), path, column)


def _table_batches(
    request: Request, path: Path, table: Dataset, num_classes: int, split: int | None
) -> Iterator[SetRows]:
    names = [name for name in ("label", "domain", "split") if name in table.schema.names]
    size = request.options.size
    first, shape = 0, (size, size, 3) if size is not None else ()
    # Few encoded images are read at a time, since decoded images take much more memory.
    rows = batch_rows(shape) if shape else 128
    with damaged(path):
        for record in table.to_batches(columns=["image", *names], batch_size=rows):
            if not len(record):
                continue
            cells = record["image"]
            cells = cells.field("bytes") if pa.types.is_struct(cells.type) else cells
            encoded = [cell or b"" for cell in cells.to_pylist()]
            places = [f"{path}, row {first + i}" for i in range(len(record))]
            pixels = decode(encoded, names=places, options=request.options, shape=shape)
            shape = pixels.shape[1:]
            for name in names:
                if record[name].null_count:
                    row = first + record[name].is_null().index(True).as_py()
                    raise DataError(f"no {name} (null)", f"{path}, row {row}", f"give every row a {name}")
            columns = {name: record[name].to_numpy(zero_copy_only=False) for name in names}
            if split is not None:
                columns.setdefault("split", np.full(len(record), split, np.int8))
            check_range(columns["label"], num_classes, f"{path}, row", first=first)
            yield SetRows.of({"input": pixels, "target": columns.pop("label"), **columns})
            first += len(record)
