"""Vision transformers, and every other classifier that timm knows by name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from raysim.models.architecture import Architecture, Shape


def vit(
    shape: Shape,
    classes: int,
    *,
    dim: int = 64,
    depth: int = 4,
    heads: int = 4,
    patch: int = 4,
    mlp_ratio: float = 4.0,
    dropout: float = 0.0,
    drop_path: float = 0.0,
) -> nn.Module:
    """A vision transformer of any size: timm's, as `vit_s16` and `vit_b16` are.

    Args:
      dim: width of the tokens, a multiple of `heads`.
      patch: height and width of a patch; must divide those of the images.
      drop_path: chance that a residual branch is skipped in training, growing over the depth up to this.
    """
    from timm.models.vision_transformer import VisionTransformer

    if min(dim, depth, heads, patch) < 1 or dim % heads:
        raise ValueError(
            f"dim must be a multiple of heads and all >= 1, got dim {dim}, depth {depth}, heads {heads}, patch {patch}"
        )
    module = VisionTransformer(
        img_size=shape[:2],
        patch_size=patch,
        in_chans=shape[2],
        num_classes=classes,
        embed_dim=dim,
        depth=depth,
        num_heads=heads,
        mlp_ratio=mlp_ratio,
        drop_rate=dropout,
        drop_path_rate=drop_path,
    )
    return _fitting(module, shape)


def vit_16(
    network: str, shape: Shape, classes: int, *, patch: int = 16, dropout: float = 0.0, drop_path: float = 0.0
) -> nn.Module:
    """A standard vision transformer of timm, for any image size that the patch divides.

    Args:
      patch: height and width of a patch.
      drop_path: chance that a residual branch is skipped in training, growing over the depth up to this.
    """
    if patch < 1:
        raise ValueError(f"patch must be >= 1, got {patch}")
    arguments = {"patch_size": patch, "drop_path_rate": drop_path}
    return _create(network, shape, classes, dropout=dropout, arguments=arguments)


def timm_model(
    network: str, shape: Shape, classes: int, *, dropout: float = 0.0, arguments: dict[str, Any] | None = None
) -> nn.Module:
    """A model by timm's name, with tag if it has several sets of weights.

    Args:
      dropout: in front of the classifier.
      arguments: further arguments of timm.create_model, such as {drop_path_rate: 0.1}. With pretrained: default,
        {pretrained_cfg_overlay: {file: PATH}} lets timm fit a local file made for another image size.
    """
    return _create(network, shape, classes, dropout=dropout, arguments=arguments or {})


def _create(
    network: str, shape: Shape, classes: int, *, dropout: float, arguments: Mapping[str, Any], pretrained: bool = False
) -> nn.Module:
    import timm

    given = {"in_chans": shape[2], "num_classes": classes, "drop_rate": dropout, **arguments}
    if _facts(network).fixed_input_size:
        given.setdefault("img_size", shape[:2])
    return _fitting(timm.create_model(network, pretrained=pretrained, **given), shape)


def _facts(network: str) -> Any:
    """timm's description of a network and its weights."""
    import timm

    return timm.get_pretrained_cfg(network)


def _fitting(module: nn.Module, shape: Shape) -> nn.Module:
    """The module, if its patches cover the images: timm itself would leave the rest out silently."""
    from timm.layers import PatchEmbed

    patches = getattr(module, "patch_embed", None)
    if isinstance(patches, PatchEmbed) and not patches.dynamic_img_pad:
        rows, columns = patches.patch_size
        if shape[0] % rows or shape[1] % columns:
            raise ValueError(f"{shape[0]} x {shape[1]} images are not divisible into {rows} x {columns} patches")
    return module


def _published(network: str, shape: Shape, classes: int, **options: Any) -> Mapping[str, Tensor]:
    """timm's weights, fitted by timm to this input size, patch, number of channels and of classes.

    A classifier for another number of classes stays random, as do its draws: they come from the seed of the caller.
    """
    if not _facts(network).has_weights:
        raise LookupError(f"timm has no weights for {network}")
    arguments = dict(options.pop("arguments", None) or {})
    if "patch" in options:
        arguments["patch_size"] = options["patch"]
    on_meta = torch.get_default_device().type == "meta"
    made = _create(network, shape, classes, dropout=0.0, arguments=arguments, pretrained=not on_meta)
    return made.state_dict()


def knows(network: str) -> bool:
    """Whether timm has a model of this name (with or without a tag)."""
    import timm

    return timm.is_model(network) and _facts(network) is not None


def names() -> list[str]:
    """All of timm's names, without tags."""
    import timm

    return timm.list_models()


def timm_architecture(network: str) -> Architecture:
    """The architecture behind a name that timm knows.

    Raises:
      LookupError: its classifier is not one layer.
    """
    facts = _facts(network)
    if not isinstance(facts.classifier, str):
        found = f"{len(facts.classifier)} classifiers" if facts.classifier else "no classifier"
        raise LookupError(f"timm's {network} has {found}; raysim needs models with one linear classifier")
    return Architecture(
        partial(timm_model, network),
        facts.classifier,
        partial(_published, network),
        size=facts.input_size[-1],
        needs_trial=True,
    )


def _vit(network: str) -> Architecture:
    return Architecture(partial(vit_16, network), "head", partial(_published, network), size=224)


TRANSFORMERS = {
    "vit": Architecture(vit, "head"),
    "vit_s16": _vit("vit_small_patch16_224"),
    "vit_b16": _vit("vit_base_patch16_224"),
}
