"""Vision transformers, and all other classifiers of timm by name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from raysim.models.architecture import Architecture, Options, Shape
from raysim.models.parts import Depth, Rate, Width, library

if TYPE_CHECKING:
    from timm.models import PretrainedCfg


def vit(
    shape: Shape,
    classes: int,
    *,
    dim: Width = 64,
    depth: Depth = 4,
    heads: Width = 4,
    patch: Width = 4,
    mlp_ratio: float = 4.0,
    dropout: Rate = 0.0,
    drop_path: Rate = 0.0,
) -> nn.Module:
    """A vision transformer of any size, built by timm like `vit_s16` and `vit_b16`.

    Args:
      dim: width of the tokens, a multiple of `heads`.
      depth: number of encoder blocks.
      heads: heads of each attention layer.
      patch: height and width of a patch; must divide the height and width of the images.
      mlp_ratio: width of the hidden layer of a block, as a multiple of `dim`.
      dropout: dropout in front of the classifier.
      drop_path: chance that a residual branch is skipped in training, growing over the depth up to this.
    """
    sizes = {"embed_dim": dim, "depth": depth, "num_heads": heads, "patch_size": patch, "mlp_ratio": mlp_ratio}
    rates = {"drop_rate": dropout, "drop_path_rate": drop_path}
    return _create("vit_tiny_patch16_224", shape, classes, sizes | rates)


def timm_model(
    network: str, shape: Shape, classes: int, *, dropout: Rate = 0.0, arguments: dict[str, object] | None = None
) -> nn.Module:
    """A model of timm by name, with a tag if timm has several sets of weights for the model.

    Args:
      dropout: dropout in front of the classifier.
      arguments: further arguments of timm.create_model, such as {drop_path_rate: 0.1}, or {patch_size: 8} for a vision
        transformer. With pretrained: default, {pretrained_cfg_overlay: {file: PATH}} lets timm fit a local file made for
        another image size.
    """
    return _create(network, shape, classes, {"drop_rate": dropout, **(arguments or {})})


def _create(network: str, shape: Shape, classes: int, arguments: Options, *, pretrained: bool = False) -> nn.Module:
    fitted: Options = {"in_chans": shape[2], "num_classes": classes}
    if _config_of(network).fixed_input_size:
        fitted = {**fitted, "img_size": shape[:2]}
    module = library("timm").create_model(network, pretrained=pretrained, **{**fitted, **arguments})
    patches = getattr(module, "patch_embed", None)
    # timm would ignore the pixels that the patches do not cover.
    if isinstance(patches, library("timm.layers").PatchEmbed) and not patches.dynamic_img_pad:
        rows, columns = patches.patch_size
        if shape[0] % rows or shape[1] % columns:
            raise ValueError(f"{shape[0]} x {shape[1]} images are not divisible into {rows} x {columns} patches")
    return module


def _config_of(network: str) -> PretrainedCfg:
    """Return timm's description of a network and its weights."""
    config = library("timm").get_pretrained_cfg(network)
    assert config is not None
    return config


def _published(
    network: str, shape: Shape, classes: int, *, arguments: Options | None = None, **options: object
) -> Mapping[str, Tensor]:
    """Return timm's weights, fitted by timm to the input size, patch size, number of channels and number of classes.

    A classifier for another number of classes is random, drawn from the global random stream.
    """
    if not _config_of(network).has_weights:
        raise LookupError(f"timm has no weights for {network}")
    on_meta = torch.empty(0).is_meta
    return _create(network, shape, classes, arguments or {}, pretrained=not on_meta).state_dict()


def knows(network: str) -> bool:
    """Return whether timm has a model of this name, with or without a tag."""
    timm = library("timm")
    return timm.is_model(network) and timm.get_pretrained_cfg(network) is not None


def timm_architecture(network: str) -> Architecture:
    """Return the architecture of a model of timm.

    Raises:
      LookupError: the model has no classifier, or several.
    """
    config = _config_of(network)
    head = config.classifier
    if not isinstance(head, str):
        number = f"{len(head)} classifiers" if head else "no classifier"
        raise LookupError(f"timm's {network} has {number}; raysim needs models with a single linear classifier")
    build, published = partial(timm_model, network), partial(_published, network)
    return Architecture(build, head, published, size=config.input_size[-1], needs_trial=True)


def _vit(network: str) -> Architecture:
    return Architecture(partial(timm_model, network), "head", partial(_published, network), size=224)


TRANSFORMERS = {
    "vit": Architecture(vit, "head"),
    "vit_s16": _vit("vit_small_patch16_224"),
    "vit_b16": _vit("vit_base_patch16_224"),
}
