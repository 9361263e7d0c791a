"""Facts about published sets, and the comparison of a reader's result with the facts.

A tree from a mirror, the folder above the right one, or half a download are read without a fault: they are only another set.
So a named set is compared with what its publisher says of it, also where `folder` or `npz` made it under that name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from raysim.base.errors import DataError
from raysim.data.reader_api import PARTS, Contents
from raysim.data.rows import SPLITS, SetRows

#: Folders between --root and the set's own: the wrapper of a download, and one more.
DEPTH = 2


@dataclass(frozen=True)
class Facts:
    """A published set in numbers.

    Attributes:
      examples: by official split ("train", "validation", "test"), or by domain, or {"": all} where there is neither.
      classes: their names in the order of their labels, or how many there are where names differ between releases.
      shape: (height, width, channels); None where images have several sizes, and for inputs that are no images.
      domains: in their order.
      source: where these numbers stand.
    """

    examples: Mapping[str, int]
    classes: tuple[str, ...] | int
    shape: tuple[int, int, int] | None = None
    domains: tuple[str, ...] = ()
    source: str = ""


def own_folder(root: Path, facts: Facts) -> Path:
    """The folder of a tree that has the set's own folders (domains, splits or classes), at most DEPTH below `root`.

    What lies beside it (a README, scripts) is passed over. `root` itself where no folder below, or more than one, has them.
    """
    level = [root] if root.is_dir() else []
    for _ in range(DEPTH + 1):
        fitting = [folder for folder in level if _has_own_folders(folder, facts)]
        if len(fitting) == 1:
            return fitting[0]
        level = [folder / name for folder in level for name in _subfolders(folder)]
    return root


def _subfolders(folder: Path) -> list[str]:
    """Return names of subfolders; none for an unreadable folder, such as lost+found."""
    try:
        return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    except PermissionError:
        return []


def _has_own_folders(folder: Path, facts: Facts) -> bool:
    names = set(_subfolders(folder))
    if facts.domains:
        return set(facts.domains) <= names
    if isinstance(facts.classes, tuple) and set(facts.classes) <= names:
        return True
    if "train" not in names or not set(PARTS) & names - {"train"}:
        return False
    if isinstance(facts.classes, int):
        return True
    # Another set beside it has parts as well, and other classes; half a download of this one may lack some.
    return 2 * len(set(facts.classes) & set(_subfolders(folder / "train"))) >= len(facts.classes)


def checked(contents: Contents, facts: Facts, name: str, root: Path | None, *, is_resized: bool) -> Contents:
    """The contents, compared with the facts: names at once, counts and pixels when the last batch has passed.

    Raises:
      DataError: what differs, with what was expected, what was found, and the likely cause. From the batches, for counts.
    """
    where = str(root) if root is not None else name
    if fault := _name_fault(contents, facts):
        difference, cause = fault
        raise DataError(f"not the published {name}: {difference}", where, cause)

    def batches() -> Iterator[SetRows]:
        counts: Counter[str] = Counter()
        for batch in contents.batches:
            batch = SetRows(*batch)
            counts.update(_counts(batch, contents.domains, facts))
            shape = batch.inputs.shape[1:]
            if facts.shape and not is_resized and shape != facts.shape:
                what = f"not the published {name}: images of {_by(shape)}, {_by(facts.shape)} expected"
                raise DataError(what, where, "another release; keep it apart with --as NAME")
            yield batch
        if dict(counts) != dict(facts.examples):
            what = f"{_numbers(counts)}; {_numbers(facts.examples)} expected"
            raise DataError(f"not the published {name}: {what}", where, _cause_of_counts(counts, facts))

    return replace(contents, batches=batches())


def _counts(batch: SetRows, domains: Sequence[str], facts: Facts) -> dict[str, int]:
    """Examples of a batch under the keys of `facts.examples`."""
    if set(facts.examples) & set(SPLITS) and batch.splits is not None:
        return {SPLITS[code]: int((batch.splits == code).sum()) for code in np.unique(batch.splits)}
    if set(facts.examples) & set(domains) and batch.domains is not None:
        return {domains[code]: int((batch.domains == code).sum()) for code in np.unique(batch.domains)}
    return {"": len(batch.targets)}


def _name_fault(contents: Contents, facts: Facts) -> tuple[str, str] | None:
    """(what differs in classes or domains, the likely cause)."""
    classes, expected = contents.classes, facts.classes
    below = f"give the folder that holds {_some(facts.domains or (expected if isinstance(expected, tuple) else ('train',)))}"
    if set(classes) & set(facts.domains):
        what = f"its domains, {_some(classes)}, were read as classes"
        return what, "`prepare domains` reads a tree DOMAIN/CLASS/image"
    if isinstance(expected, int):
        if len(classes) != expected:
            return f"{len(classes)} classes, {expected} expected", _cause_of_classes(len(classes), expected, below)
    elif tuple(classes) != expected:
        if missing := [name for name in expected if name not in classes]:
            counts = f"{len(classes)} classes, {_some(classes)}; {len(expected)} expected"
            return f"{counts}, and {_some(missing)} is not there", _cause_of_classes(len(classes), len(expected), below)
        if more := [name for name in classes if name not in expected]:
            return f"{_some(more)} is no class of it", "a folder or label that is not the set's; remove it"
        what = f"classes in the order {_some(classes)}, {_some(expected)} expected"
        return what, "the labels have another order; sort them"
    if facts.domains and contents.domains and contents.domains != facts.domains:
        return f"domains {_some(contents.domains)}, {_some(facts.domains)} expected", below
    return None


def _cause_of_classes(count: int, expected: int, below: str) -> str:
    if count < expected / 2:
        return f"another folder, or the layout of a mirror; {below}"
    return "half a download; fetch it again" if count < expected else f"folders that are no classes; {below}"


def _cause_of_counts(counts: Mapping[str, int], facts: Facts) -> str:
    total, expected = sum(counts.values()), sum(facts.examples.values())
    if total == expected:
        return "the layout of a mirror: the splits are not where the publisher has them"
    if set(counts) - set(facts.examples):
        return "the layout of a mirror: give the folder with the publisher's train and test, or use --as NAME"
    if total < expected:
        return "half a download, or a part of the set; fetch it again, or keep the part apart with --as NAME"
    return "images that are not the set's; remove them, or keep it apart with --as NAME"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _by(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _numbers(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}".rstrip() for name, count in counts.items()) + " examples"


_DIGITS = tuple("0123456789")
_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CIFAR100 = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish
forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle
mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale
willow_tree wolf woman worm
"""
_PACS = {"art_painting": 2048, "cartoon": 2344, "photo": 1670, "sketch": 3929}
_PACS_CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
_WINES = {"red": 1599, "white": 4898}
_HALVES = {"train": 50_000, "test": 10_000}
_XIAO, _COHEN = "Xiao et al. 2017, arXiv:1708.07747", "Cohen et al. 2017, arXiv:1702.05373"
_KRIZHEVSKY = "Krizhevsky 2009, Learning Multiple Layers of Features from Tiny Images"

#: Sets whose numbers their publishers give. MedMNIST's files have published checksums instead. `covid19` has no line, since its
#: number is not sure: FedVG, section 4.1, counts 9,523 images and cites version 1, the set's page counts 9,208 of version 4.
FACTS: dict[str, Facts] = {
    "cifar10": Facts(_HALVES, _CIFAR10, (32, 32, 3), source=_KRIZHEVSKY),
    "cifar100": Facts(_HALVES, tuple(_CIFAR100.split()), (32, 32, 3), source=_KRIZHEVSKY),
    "cifar10_1_v4": Facts({"test": 2021}, _CIFAR10, (32, 32, 3), source="Recht et al. 2018, arXiv:1806.00451"),
    "cifar10_1_v6": Facts({"test": 2000}, _CIFAR10, (32, 32, 3), source="Recht et al. 2018, arXiv:1806.00451"),
    "mnist": Facts({"train": 60_000, "test": 10_000}, _DIGITS, (28, 28, 1), source="LeCun, Cortes and Burges 1998"),
    "fashion_mnist": Facts({"train": 60_000, "test": 10_000}, 10, (28, 28, 1), source=_XIAO),
    "emnist_balanced": Facts({"train": 112_800, "test": 18_800}, 47, (28, 28, 1), source=_COHEN),
    "emnist_byclass": Facts({"train": 697_932, "test": 116_323}, 62, (28, 28, 1), source=_COHEN),
    "emnist_digits": Facts({"train": 240_000, "test": 40_000}, 10, (28, 28, 1), source=_COHEN),
    "emnist_letters": Facts({"train": 124_800, "test": 20_800}, 26, (28, 28, 1), source=_COHEN),
    "stl10": Facts({"train": 5000, "test": 8000}, 10, (96, 96, 3), source="Coates, Lee and Ng 2011"),
    "tiny_imagenet": Facts({"train": 100_000, "test": 10_000}, 200, (64, 64, 3), source="Stanford CS231n"),
    "pacs": Facts(_PACS, _PACS_CLASSES, (227, 227, 3), tuple(_PACS), "Li et al. 2017, arXiv:1710.03077"),
    "cub200": Facts({"train": 5994, "test": 5794}, 200, source="Wah et al. 2011, CNS-TR-2011-001"),
    "adult": Facts(
        {"train": 32_561, "test": 16_281}, ("<=50K", ">50K"), source="Becker and Kohavi 1996, doi:10.24432/C5XW20"
    ),
    "wine_quality": Facts(
        _WINES, ("quality",), None, tuple(_WINES), "Cortez et al. 2009, doi:10.1016/j.dss.2009.05.016"
    ),
    "imagenet_r": Facts({"": 30_000}, 200, source="Hendrycks et al. 2021, arXiv:2006.16241"),
    "ham10000": Facts({"": 10_015}, 7, source="Tschandl et al. 2018, doi:10.1038/sdata.2018.161"),
}
