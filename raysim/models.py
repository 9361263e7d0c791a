"""Models by name: built from numbers only, so that every process builds the same one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raysim.core.seeding import derive_seed
from raysim.lora import LoraSpec, add_lora


@dataclass(frozen=True)
class ModelSpec:
    """Everything that determines a model's structure. input_shape: (height, width, channels)."""

    name: str
    num_classes: int
    input_shape: tuple[int, int, int]
    options: dict[str, Any] = field(default_factory=dict)
    lora: LoraSpec | None = None


class Cnn(nn.Module):
    """Two 5x5 convolutions, each with 2x2 max pooling, and a hidden layer: LeNet's shape in modern width.

    On 3 x 32 x 32 input with the default widths: 2,156,490 parameters.
    """

    def __init__(
        self, shape: tuple[int, int, int], classes: int, *, width: int = 32, hidden: int = 512, norm: str = "none"
    ):
        super().__init__()
        if width < 1 or hidden < 1:
            raise ValueError(f"width and hidden must be >= 1, got {width} and {hidden}")
        height, breadth, channels = shape
        self.conv1 = nn.Conv2d(channels, width, 5, padding=2)
        self.norm1 = nn.BatchNorm2d(width) if norm == "batch" else nn.Identity()
        self.conv2 = nn.Conv2d(width, 2 * width, 5, padding=2)
        self.norm2 = nn.BatchNorm2d(2 * width) if norm == "batch" else nn.Identity()
        self.fc1 = nn.Linear(2 * width * (height // 4) * (breadth // 4), hidden)
        self.fc2 = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


class Mlp(nn.Module):
    """One hidden layer on the flattened pixels."""

    def __init__(self, shape: tuple[int, int, int], classes: int, *, hidden: int = 64):
        super().__init__()
        if hidden < 1:
            raise ValueError(f"hidden must be >= 1, got {hidden}")
        self.fc1 = nn.Linear(shape[0] * shape[1] * shape[2], hidden)
        self.fc2 = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def vit(
    shape: tuple[int, int, int], classes: int, *, dim: int = 64, depth: int = 4, heads: int = 4, patch: int = 4
) -> nn.Module:
    """A small vision transformer of timm's."""
    from timm.models.vision_transformer import VisionTransformer

    if shape[0] != shape[1]:
        raise ValueError(f"a vit needs square images, got {shape[0]} x {shape[1]}; set data.resize")
    return VisionTransformer(
        img_size=shape[0],
        patch_size=patch,
        in_chans=shape[2],
        num_classes=classes,
        embed_dim=dim,
        depth=depth,
        num_heads=heads,
    )


#: name -> (constructor, path of the classifier layer, whether channels-last convolutions are faster)
MODELS: dict[str, tuple[Callable[..., nn.Module], str, bool]] = {
    "cnn": (Cnn, "fc2", True),
    "mlp": (Mlp, "fc2", False),
    "vit": (vit, "head", False),
}


def head_of(spec: ModelSpec) -> str:
    """Path of the classifier layer."""
    return MODELS[spec.name][1]


def prefers_channels_last(spec: ModelSpec) -> bool:
    """Whether this model was measured to train faster with channels-last convolutions."""
    return MODELS[spec.name][2]


def build_model(spec: ModelSpec, *, seed: int) -> nn.Module:
    """The module with its initial parameters, drawn from the seed; the global random stream is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "init"))
        return _adapted(MODELS[spec.name][0](spec.input_shape, spec.num_classes, **spec.options), spec)


def build_skeleton(spec: ModelSpec) -> nn.Module:
    """The module's structure without memory (meta device), for checks."""
    with torch.device("meta"):
        return _adapted(MODELS[spec.name][0](spec.input_shape, spec.num_classes, **spec.options), spec)


def _adapted(module: nn.Module, spec: ModelSpec) -> nn.Module:
    return module if spec.lora is None else add_lora(module, spec.lora, head=head_of(spec))
