"""Facts of a model beside its code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from raysim.models.lora import LoraSpec

#: Options of a model as the configuration has them; each model's own signature says what they may be.
Options = Mapping[str, Any]

#: Of one input: (height, width, channels) of images, (length,) of tokens, any shape of other numbers.
Shape = tuple[int, ...]

#: What a model reads: images (B, channels, height, width) and nothing else; numbers (B, *shape), images among them; tokens
#: (B, length), int64.
Inputs = Literal["images", "numbers", "tokens"]


@dataclass(frozen=True)
class Architecture:
    """One kind of model.

    Attributes:
      build: build(shape, classes, **options) -> module. Its keyword parameters are the options of the config. One for tokens
        gets `vocabulary` as well, how many different tokens there are.
      head: path of the classifier: one nn.Linear with a row for every class; empty: see `last_linear`.
      published: published(shape, classes, **options) -> state dict of the library's own pretrained weights. On the meta
        device: only their names and shapes, without a download. None: there are none.
      prefers_channels_last: whether it was measured to train faster with channels-last convolutions.
      size: height and width of the images, or length of the sequences, that the model was made for.
      needs_trial: whether unfit inputs show only when the model runs, not when it is built.
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
      num_classes: outputs for an example, or for a token: classes, labels, regression targets, next tokens.
      input_shape: (height, width, channels) of images, (length,) of tokens, any shape of other numbers.
      pretrained: None, "default" (the library's own download) or the path of a file of weights.
      lora: adapters beside some layers; only they and the classifier are then trained. None: all is trained.
      head: path of the classifier of a model of the user's own; None: its last linear layer.
      vocabulary: how many different tokens an input may hold; 0: the inputs are no tokens.
    """

    name: str
    num_classes: int
    input_shape: Shape
    options: Options = field(default_factory=dict)
    pretrained: str | None = None
    lora: LoraSpec | None = None
    head: str | None = None
    vocabulary: int = 0
