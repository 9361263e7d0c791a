"""Parts that several models share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Annotated, Literal

import torch
from torch import nn

from raysim.base.conditions import applies_with
from raysim.base.errors import ConfigError, Fault
from raysim.base.options import Bounds

#: Kinds of normalisation. "group" keeps no statistics: it has no buffers and does not depend on the batch.
Norm = Literal["batch", "group"]

#: Types of options, checked by the configuration. Depth allows the deepest network of the ResNet paper, 1,202 layers.
Width = Annotated[int, Bounds(ge=1)]
Depth = Annotated[int, Bounds(ge=1, le=2000)]
Rate = Annotated[float, Bounds(ge=0, lt=1)]
#: Groups of GroupNorm.
Groups = Annotated[int, Bounds(ge=1), applies_with("norm", "group")]


def library(name: str) -> ModuleType:
    """Import a library on first use, with the CPU as default device.

    Models are checked on the meta device. timm and torchvision import the compiler of PyTorch 2.6, which reads tensors
    during its import; tensors on the meta device cannot be read.
    """
    with torch.device("cpu"):
        return import_module(name)


def unfit_option(text: str) -> ConfigError:
    """Return the error for an invalid option of a model, whatever the inputs."""
    return ConfigError([Fault("model", text)])


def norm_layer(norm: str, groups: int, *, dims: int = 2) -> Callable[[int], nn.Module]:
    """Return make(channels) -> normalisation of images (dims = 2) or feature vectors (dims = 1); identity for "none".

    Args:
      groups: groups of GroupNorm; must divide every width. 2 is usual in federated learning, 32 in GroupNorm's paper.
    """
    if norm == "group":
        return lambda channels: nn.GroupNorm(groups, channels)
    if norm == "batch":
        return nn.BatchNorm2d if dims == 2 else nn.BatchNorm1d
    return lambda channels: nn.Identity()


def projector(inputs: int, width: int, make_norm: Callable[[int], nn.Module]) -> nn.Sequential:
    """Return two layers between encoder and classifier, each Linear, normalisation, ReLU (UniVarFL; FedUV's code)."""
    first = (nn.Linear(inputs, width), make_norm(width), nn.ReLU())
    return nn.Sequential(*first, nn.Linear(width, width), make_norm(width), nn.ReLU())


def named_layers(**layers: nn.Module) -> nn.Sequential:
    """Return an nn.Sequential of named layers."""
    return nn.Sequential(OrderedDict(layers))
