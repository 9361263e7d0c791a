"""Transformation of stored inputs into model inputs, on the training device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from raysim.base.errors import UserCodeError
from raysim.base.user_places import place_of
from raysim.core.method import Batch
from raysim.training.augment import Augmentation, Draws, Interpolation, crop_and_flip, resized_crop

#: name -> (mean, standard deviation) per channel of pixels in [0, 1]; one value serves all channels.
NORMALISATIONS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "none": ((), ()),
    "half": ((0.5,), (0.5,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "fashion-mnist": ((0.2860,), (0.3530,)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "tiny-imagenet": ((0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)),
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
}

#: Transformation of stored inputs into model inputs.
Transform: TypeAlias = "ArrayTransform | InputTransform"

#: `normalise: standard` uses the mean and deviation of the set's training rows.
STANDARD = "standard"


@dataclass(frozen=True)
class Examples:
    """A set of examples on a device.

    Attributes:
      inputs: images (n, height, width, channels), uint8 or float32 from 0 to 255; other inputs as stored.
      targets: see `Batch`.
      shift: shift(images, generator) -> images, applied to the images of every training batch; None: no shift.
    """

    inputs: Tensor
    targets: Tensor
    shift: Callable[[Tensor, torch.Generator], Tensor] | None = None

    def __len__(self) -> int:
        return len(self.targets)

    def part(self, start: int, end: int) -> Examples:
        """Return the examples start..end, without copying."""
        return Examples(self.inputs[start:end], self.targets[start:end])


@dataclass(frozen=True)
class ArrayTransform:
    """Transform of inputs that are not images: numbers become (x - mean) / std or stay as stored; tokens become int64.

    Attributes:
      mean, std: numbers for each entry of the last axis; empty: numbers stay as stored.
    """

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    augmentation: Augmentation | None = None
    function: Callable[..., object] | None = None

    @property
    def plain(self) -> ArrayTransform:
        """Return the transform without scaling."""
        return ArrayTransform()

    def __call__(self, inputs: Tensor) -> Tensor:
        """Transform (B, ...) float32 or int32 to (B, ...) float32 or int64."""
        if not inputs.is_floating_point():
            return inputs.long()
        if not self.mean:
            return inputs.clone()  # a copy: a model may work in place
        mean, std = (constants(each, torch.float64, inputs.device) for each in (self.mean, self.std))
        return ((inputs.double() - mean) / std).float()

    def rows(self, inputs: Tensor, chosen: Tensor) -> Tensor:
        """Select from inputs that `__call__` returned. chosen: (B,) int64."""
        return inputs.index_select(0, chosen)

    def entries(self, shape: Sequence[int]) -> int:
        """Return the number of entries of the model input made from a stored input of a shape."""
        return math.prod(shape)


@dataclass(frozen=True)
class InputTransform:
    """Transform of pixels to floats: optional resize and crop, division by 255, optional (x - mean) / std per channel.

    The default only scales to [0, 1], as FedVG's papers do. With `channels_last` the result keeps the stored order
    (height, width, channels) in memory, so that channels-last convolutions need no copy.

    Attributes:
      resize: (height, width), with antialiasing as in Pillow, but without rounding to bytes; None: size as stored.
      crop: (height, width) of a crop after resizing, central or drawn by the augmentation; None: no crop.
      channels: 3 repeats the channel of grey images; None: as stored.
      augmentation: augmentation of training batches; None: none.
      interpolation: interpolation for resized images, and for an augmentation's resized boxes.
      function: the user's augmentation: function(images=, generator=) gets and returns a training batch, (B, channels,
        height, width) float32 in [0, 1], resized and cropped, not yet normalised. Random numbers come from the
        generator, or from the global stream, which is seeded for each client and round.
    """

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    channels_last: bool = False
    resize: tuple[int, int] | None = None
    crop: tuple[int, int] | None = None
    channels: int | None = None
    augmentation: Augmentation | None = None
    interpolation: Interpolation = "bilinear"
    function: Callable[..., object] | None = None

    def __call__(self, inputs: Tensor) -> Tensor:
        """Transform (B, height, width, channels) uint8 to (B, channels, height, width) float32; never augments."""
        return self._finish(self._central(inputs))

    def rows(self, inputs: Tensor, chosen: Tensor) -> Tensor:
        """Select from inputs that `__call__` returned, in the same memory order. chosen: (B,) int64."""
        if not self.channels_last:
            return inputs.index_select(0, chosen)
        return inputs.permute(0, 2, 3, 1).index_select(0, chosen).permute(0, 3, 1, 2)

    def by_function(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Transform as `__call__` does, with the user's augmentation.

        Raises:
          UserCodeError: the function returns a batch of another shape or type.
        """
        assert self.function is not None
        x = self._to_unit(self._central(images))
        augmented = same_form(self.function(images=x, generator=generator), x, "an augmentation", self.function)
        return self._normalised(augmented)

    def _central(self, images: Tensor) -> Tensor:
        if self.resize is not None:
            images = resized(images, self.resize, self.interpolation)
        if self.crop is not None:
            top, left = (images.shape[1] - self.crop[0]) // 2, (images.shape[2] - self.crop[1]) // 2
            images = images[:, top : top + self.crop[0], left : left + self.crop[1]]
        return images

    @property
    def plain(self) -> InputTransform:
        """Return the transform to whole images of the input's size, in [0, 1]: neither normalised nor cropped."""
        size = self.crop or self.resize
        return replace(self, mean=(), std=(), resize=size, crop=None, augmentation=None, function=None)

    def augmented(self, images: Tensor, draws: Draws) -> Tensor:
        """Transform as `__call__` does, with the augmentation drawn for each of the B images."""
        assert self.augmentation is not None
        target = self.output_size(images.shape[1], images.shape[2])
        if draws.boxes is not None:
            images = resized_crop(images, draws, target, self.interpolation)
        else:
            if self.resize is not None:
                images = resized(images, self.resize, self.interpolation)
            drawn = self.augmentation
            images = crop_and_flip(images, draws, target, padding=drawn.padding, reflects=drawn.reflects)
        return self._finish(images)

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """Return (height, width) of the model inputs made from stored images of a size."""
        return self.crop or self.resize or (height, width)

    def entries(self, shape: Sequence[int]) -> int:
        """Return the number of entries of the model input made from a stored image (height, width, channels)."""
        height, width, channels = shape
        rows, columns = self.output_size(height, width)
        return rows * columns * (self.channels or channels)

    def draw(self, count: int, height: int, width: int, generator: torch.Generator) -> Draws:
        """Draw the random numbers for `count` stored images of a size."""
        assert self.augmentation is not None
        target = self.output_size(height, width)
        before = (height, width) if self.augmentation.scale or self.resize is None else self.resize
        return self.augmentation.draw(count, before, target, generator)

    def _finish(self, images: Tensor) -> Tensor:
        return self._normalised(self._to_unit(images))

    def _to_unit(self, images: Tensor) -> Tensor:
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        # A copy: images from `data.shift` are float32 already, and the next operations work in place.
        x = images.permute(0, 3, 1, 2).to(torch.float32, memory_format=layout, copy=True).div_(255.0)
        if self.channels is not None and x.shape[1] < self.channels:
            x = x.expand(-1, self.channels, -1, -1).contiguous(memory_format=layout)
        return x

    def _normalised(self, x: Tensor) -> Tensor:
        """Return (x - mean) / std, computed in place."""
        if not self.mean:
            return x
        numbers = [constants(each, torch.float32, x.device).expand(x.shape[1]) for each in (self.mean, self.std)]
        if self.channels_last and x.is_contiguous(memory_format=torch.channels_last):
            # Numbers for a whole row of pixels: the channels of one pixel are too few for vector instructions.
            mean, std = (each.repeat(x.shape[3]) for each in numbers)
            x.permute(0, 2, 3, 1).flatten(2).sub_(mean).div_(std)
        else:
            mean, std = (each.view(-1, 1, 1) for each in numbers)
            x.sub_(mean).div_(std)
        return x


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on the device; the copy from pinned memory is asynchronous."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


@cache
def constants(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers as a tensor on a device. The tensor is cached: never write to it."""
    return torch.tensor(numbers, dtype=dtype).to(device)


def same_form(result: object, given: Tensor, kind: str, function: Callable[..., object]) -> Tensor:
    """Return the images made by a user's function, after a check of shape and type.

    Args:
      kind: name of the kind of function, for the message.
    Raises:
      UserCodeError: the result has another shape or type than the given images.
    """
    if isinstance(result, Tensor) and result.shape == given.shape and result.dtype == given.dtype:
        return result
    form = f"{tuple(result.shape)} {result.dtype}" if isinstance(result, Tensor) else type(result).__name__
    what = f"{kind} returned {form} for images {tuple(given.shape)} {given.dtype}"
    raise UserCodeError(what, place_of(function), "return a batch of the same shape and type")


def resized(images: Tensor, size: tuple[int, int], interpolation: Interpolation = "bilinear") -> Tensor:
    """Resize (B, h, w, C) to (B, *size, C) float32 in the same units; images of this size are returned unchanged."""
    if images.shape[1:3] == size:
        return images
    x = images.permute(0, 3, 1, 2).float()
    x = F.interpolate(x, size=size, mode=interpolation, antialias=True, align_corners=False).permute(0, 2, 3, 1)
    return x.clamp(0, 255) if interpolation == "bicubic" else x  # bicubic overshoots; Pillow's bytes are clamped too


def passes(examples: Examples, transform: Transform, batch_size: int) -> Iterator[Batch]:
    """Return the batches of one pass in stored order, see `bounds_of`."""
    for start, end in bounds_of(len(examples), batch_size):
        yield Batch(transform(examples.inputs[start:end]), examples.targets[start:end])


def bounds_of(count: int, size: int) -> list[tuple[int, int]]:
    """Return (start, end) of the batches of a pass. A last batch of one example joins the batch before (BatchNorm
    needs two).
    """
    starts = list(range(0, count, size))
    if len(starts) > 1 and count - starts[-1] == 1:
        starts.pop()
    return list(zip(starts, [*starts[1:], count], strict=False))  # without examples the lists have lengths 0 and 1
