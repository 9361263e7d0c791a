"""Models of torchvision: ResNets and MobileNetV2, also with GroupNorm and stems for small images, and ViT-B/16."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from torch import Tensor, nn

from raysim.base.options import Bounds
from raysim.models.architecture import Architecture, Shape
from raysim.models.parts import Groups, Norm, Rate, library, norm_layer, projector

if TYPE_CHECKING:
    from torchvision.models import ResNet

Stem = Literal["imagenet", "small"]

#: Stages of MobileNetV2 for 28 and 32 pixels: expansion, channels, blocks, stride (from older code of FLFA's authors).
SMALL_STAGES = [
    [1, 16, 1, 1],
    [6, 24, 2, 1],
    [6, 32, 3, 1],
    [6, 64, 4, 2],
    [6, 96, 3, 1],
    [6, 160, 3, 2],
    [6, 320, 1, 1],
]


def resnet(
    network: str,
    shape: Shape,
    classes: int,
    *,
    stem: Stem = "imagenet",
    first_stride: Literal[1, 2] = 1,
    norm: Norm = "batch",
    groups: Groups = 2,
    projector_width: Annotated[int, Bounds(ge=0)] = 0,
) -> nn.Module:
    """A ResNet of torchvision.

    UniVarFL's ResNet-18 has stem small, first_stride 2, projector_width 512.

    Args:
      stem: "imagenet": 7x7 convolution with stride 2 and max pooling; "small": 3x3 with stride 1, no pooling.
      first_stride: stride of the first stage. 2 adds a down-sampling convolution to the first block of the stage.
      norm: "batch" or "group", for all layers.
      groups: groups of GroupNorm: 2 is usual in federated learning, 32 is the choice of GroupNorm's paper.
      projector_width: width of a two-layer projector in front of the classifier, the layer block `avgpool.2`; 0: none.
    """
    module = getattr(library("torchvision.models"), network)(num_classes=classes, norm_layer=norm_layer(norm, groups))
    if stem == "small":
        module.conv1 = _conv(shape[2], 64, kernel=3, stride=1)
        module.maxpool = nn.Identity()
    elif shape[2] != 3:
        module.conv1 = _conv(shape[2], 64, kernel=7, stride=2)
    if first_stride == 2:
        _halve(module)
    if projector_width:
        layers = projector(module.fc.in_features, projector_width, norm_layer(norm, groups, dims=1))
        # Inside `avgpool`, so that the projector is a layer block; the path of the classifier stays `fc`.
        module.avgpool = nn.Sequential(module.avgpool, nn.Flatten(), layers)
        module.fc = nn.Linear(projector_width, classes)
    return module


def _conv(channels: int, width: int, *, kernel: int, stride: int) -> nn.Conv2d:
    """Return a convolution with torchvision's initial values."""
    conv = nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


def _halve(module: ResNet) -> None:
    """Set the stride of a ResNet's first stage to 2, as in torchvision's other stages."""
    first = module.layer1[0]
    strided = first.conv1 if not hasattr(first, "conv3") else first.conv2
    strided.stride = (2, 2)
    width = 64 * first.expansion
    if first.downsample is None:
        first.downsample = nn.Sequential(_conv(64, width, kernel=1, stride=2), module._norm_layer(width))
    else:
        first.downsample[0].stride = (2, 2)
    first.stride = 2


def mobilenetv2(
    shape: Shape,
    classes: int,
    *,
    stem: Stem = "imagenet",
    width: Annotated[float, Bounds(gt=0)] = 1.0,
    dropout: Rate = 0.2,
    norm: Norm = "batch",
    groups: Groups = 2,
) -> nn.Module:
    """MobileNetV2 of torchvision.

    Layer blocks: the first convolution (stem), each inverted residual, the last 1x1 convolution (`features.18`), the
    classifier.

    Args:
      stem: "imagenet": five strides of 2; "small": for 28 and 32 pixels, strides of 2 only at 64 and 160 channels.
      width: factor on all widths.
      dropout: dropout in front of the classifier.
      norm: "batch" or "group", for all layers.
      groups: groups of GroupNorm; all widths are multiples of 8.
    """
    is_small = stem == "small"
    module = library("torchvision.models").mobilenet_v2(
        num_classes=classes,
        width_mult=width,
        dropout=dropout,
        norm_layer=norm_layer(norm, groups),
        inverted_residual_setting=SMALL_STAGES if is_small else None,
    )
    if is_small or shape[2] != 3:
        first = module.features[0][0].out_channels
        module.features[0][0] = _conv(shape[2], first, kernel=3, stride=1 if is_small else 2)
    return module


def vit_b_16(shape: Shape, classes: int, *, dropout: Rate = 0.0) -> nn.Module:
    """ViT-B/16 of torchvision; FedVG's code starts from its ImageNet-1k weights. `vit_b16` is timm's ViT-B/16.

    Layer blocks: each encoder block (`encoder.layers.0` ...), the classifier, and the stem with all other layers.

    Args:
      dropout: dropout after the embeddings, and in every encoder block.
    """
    height, width, channels = shape
    if height != width or height % 16:
        raise ValueError(f"{height} x {width} images are not square, or not divisible into 16 x 16 patches")
    module = library("torchvision.models").vit_b_16(num_classes=classes, image_size=height, dropout=dropout)
    module.encoder.layers = nn.Sequential(*module.encoder.layers)  # numbered, as layer blocks are
    if channels != 3:
        module.conv_proj = nn.Conv2d(channels, module.hidden_dim, kernel_size=16, stride=16)
    return module


def _published_vit(shape: Shape, classes: int, **options: object) -> Mapping[str, Tensor]:
    """Return torchvision's weights of vit_b_16 (IMAGENET1K_V1, for 224 pixels), named as in raysim's `vit_b_16`."""
    weights = _published("vit_b_16", shape, classes)
    return {name.replace(".encoder_layer_", "."): value for name, value in weights.items()}


def _published(network: str, shape: Shape, classes: int, **options: object) -> Mapping[str, Tensor]:
    """Return torchvision's newest ImageNet weights, with the original classifier and first convolution."""
    models = library("torchvision.models")
    if torch.empty(0).is_meta:
        return models.get_model(network).state_dict()
    return models.get_model_weights(network).DEFAULT.get_state_dict(progress=False, check_hash=True)


TORCHVISION = {
    name: Architecture(partial(resnet, name), "fc", partial(_published, name), prefers_channels_last=True, size=224)
    for name in ("resnet18", "resnet34", "resnet50")
} | {
    "mobilenetv2": Architecture(
        mobilenetv2, "classifier.1", partial(_published, "mobilenet_v2"), prefers_channels_last=True, size=224
    ),
    "torchvision:vit_b_16": Architecture(vit_b_16, "heads.head", _published_vit, size=224),
}
