"""Descriptions of models: `Architecture` for each kind of model, `ModelSpec` for the model of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from raysim.models.lora import LoraSpec

#: Options of a model in the configuration; the signature of the model's `build` has their names and types.
Options = Mapping[str, Any]

#: Shape of an input: (height, width, channels) for images, (length,) for tokens, any shape for other numbers.
Shape = tuple[int, ...]

#: Kind of inputs of a model: only images (B, channels, height, width); numbers (B, *shape), including images; tokens
#: (B, length), int64.
Inputs = Literal["images", "numbers", "tokens"]


@dataclass(frozen=True)
class Architecture:
    """One kind of model.

    Attributes:
      build: build(shape, classes, **options) -> module. Its keyword parameters are the options in the configuration. A
        model for tokens also gets `vocabulary`, the number of different tokens.
      head: path of the classifier, an nn.Linear with one output per class; empty: see `last_linear`.
      published: published(shape, classes, **options) -> state dict of the library's pretrained weights. On the meta
        device, tensors have names and shapes only, and nothing is downloaded. None: no pretrained weights.
      prefers_channels_last: whether the model was measured to train faster with channels-last convolutions.
      size: height and width of images, or length of sequences, for which the model was designed.
      needs_trial: whether unfit inputs are detected only by a forward pass, not when the model is built.
      inputs: kind of inputs that the model reads.
    """

    build: Callable[..., nn.Module]
    head: str
    published: Callable[..., Mapping[str, Tensor]] | None = None
    prefers_channels_last: bool = False
    size: int = 32
    needs_trial: bool = False
    inputs: Inputs = "images"


@dataclass(frozen=True)
class ModelSpec:
    """Specification of a model and its initial values, without the seed.

    Attributes:
      num_classes: number of outputs for an example or a token: classes, labels, regression targets, or next tokens.
      input_shape: (height, width, channels) of images, (length,) of tokens, any shape of other numbers.
      pretrained: None, "default" (the weights that the library downloads) or the path of a file of weights.
      lora: adapters for some layers; only adapters and the classifier are then trained. None: no adapters.
      head: path of the classifier of a user's model; None: the last linear layer.
      vocabulary: number of different tokens; 0: the inputs are not tokens.
    """

    name: str
    num_classes: int
    input_shape: Shape
    options: Options = field(default_factory=dict)
    pretrained: str | None = None
    lora: LoraSpec | None = None
    head: str | None = None
    vocabulary: int = 0
