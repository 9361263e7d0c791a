"""Names that papers print for data sets and networks, and the configurations that bear them out, exactly."""

from __future__ import annotations

from collections.abc import Mapping

from raysim.reporting.published import is_same

#: MedMNIST comes in four sizes; each of them is the set.
SIZES = ("", "_64", "_128", "_224")

#: Printed name -> names of the prepared sets that are it.
SETS: dict[str, tuple[str, ...]] = {
    **{
        name: tuple(name.casefold() + size for size in SIZES)
        for name in ("BloodMNIST", "DermaMNIST", "OrganAMNIST", "OrganCMNIST", "OrganSMNIST", "PathMNIST")
    },
    "FMNIST": ("fashion_mnist",),
    "CIFAR-10": ("cifar10",),
    "CIFAR-10.1": ("cifar10", "cifar10_test_cifar10_1_v4", "cifar10_test_cifar10_1_v6"),  # trained on CIFAR-10
    "CIFAR-100": ("cifar100",),
    "CUB-200": ("cub200",),
    "COVID19": ("covid19",),
    "EuroSAT": ("eurosat",),
    "HAM10000": ("ham10000",),
    "ImageNet-100": ("imagenet100",),
    "ImageNet-R": ("imagenet_r",),
    "PACS": ("pacs",),
    "STL-10": ("stl10",),
    "TinyImageNet": ("tiny_imagenet",),
}

#: Weights at the start: any that are given (`...`), where the printed name has them in it.
GIVEN = ...
_SMALL = {"name": "univarfl_cnn"}
_RESNET18 = {"name": "resnet18"}

#: Printed name -> settings of `model`, one of which has to hold; `name` alone where the paper's words say no more. What a
#: recipe sets beyond them is compared where a published number stands beside a run, see `raysim.reporting.recipes`.
NETWORKS: dict[str, tuple[Mapping[str, object], ...]] = {
    "MobileNetV2": ({"name": "mobilenetv2"},),
    "ResNet-18": (_RESNET18,),
    "simple-cnn": ({"name": "lenet"},),
    "ResNet-50": ({"name": "resnet50"},),
    "small CNN": (_SMALL,),
    "small CNN or ResNet-18 (text names both)": (_SMALL, _RESNET18),
    "not stated": ({},),
    "ViT-S/16": ({"name": "vit_s16"},),
    "ViT-B/16": ({"name": "vit_b16"}, {"name": "torchvision:vit_b_16"}),
    "ViT-B/16 (IN-21k)": ({"name": "timm:vit_base_patch16_224.augreg_in21k", "pretrained": GIVEN},),
}


def is_set(printed: object, name: object) -> bool:
    """Whether a prepared set is the one that a paper prints. Names that no paper prints are their user's own: true."""
    known = next((names for other, names in SETS.items() if is_same(other, printed)), None)
    return known is None or name in known


def is_network(printed: object, model: Mapping[str, object]) -> bool:
    """Whether the settings of a model are those of the network that a paper prints; true for a name that none prints."""
    known = next((choices for other, choices in NETWORKS.items() if is_same(other, printed)), None)
    return known is None or any(_holds(choice, model) for choice in known)


def _holds(choice: Mapping[str, object], model: Mapping[str, object]) -> bool:
    return all(
        model.get(key) is not None if value is GIVEN else model.get(key) == value for key, value in choice.items()
    )
