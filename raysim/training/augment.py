"""Augmentation of training batches: random numbers for every image, drawn on the CPU from the client's generator.

Drawing is separate from applying, so that the result depends neither on the device nor on the grouping of batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Interpolation = Literal["bilinear", "bicubic"]

#: Attempts to draw a box that fits; then the largest central box is used, as in torchvision.
ATTEMPTS = 10


@dataclass(frozen=True)
class Draws:
    """Random numbers for n images.

    Attributes:
      is_flipped: (n,) bool, whether the image is mirrored left to right after cropping.
      offsets: (n, 2) int64, top and left of a crop of the padded image.
      boxes: (n, 4) int64, top, left, height, width of a box that is resized; None: images are cropped by `offsets`.
    """

    is_flipped: Tensor
    offsets: Tensor
    boxes: Tensor | None = None

    def part(self, start: int, end: int) -> Draws:
        return self.mapped(lambda numbers: numbers[start:end])

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Draws:
        """Apply a function to each tensor."""
        boxes = None if self.boxes is None else function(self.boxes)
        return Draws(function(self.is_flipped), function(self.offsets), boxes)


@dataclass(frozen=True)
class Augmentation:
    """Random augmentation of each image: a crop of the padded image, or a resized box, and a flip.

    Attributes:
      padding: pixels added on each side before a random crop of the input's size.
      reflects: whether the padding mirrors the image at its border; otherwise the padding is black.
      flip: whether images are mirrored with probability one half.
      scale: range of a box's share of the image's area (Szegedy et al. 2015, drawn as in torchvision); None: crops.
      ratio: range of a box's width / height, log-uniform.
    """

    padding: int = 0
    reflects: bool = False
    flip: bool = False
    scale: tuple[float, float] | None = None
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    def draw(self, count: int, size: tuple[int, int], target: tuple[int, int], generator: torch.Generator) -> Draws:
        """Return draws for `count` images of `size` (height, width), from which inputs of size `target` are made."""
        chance = torch.rand(count, generator=generator)
        is_flipped = chance < 0.5 if self.flip else torch.zeros(count, dtype=torch.bool)
        if self.scale is not None:
            return Draws(is_flipped, torch.zeros(count, 2, dtype=torch.int64), self._boxes(count, size, generator))
        room = [side + 2 * self.padding - wanted + 1 for side, wanted in zip(size, target, strict=True)]
        return Draws(is_flipped, torch.stack([torch.randint(r, (count,), generator=generator) for r in room], dim=1))

    def _boxes(self, count: int, size: tuple[int, int], generator: torch.Generator) -> Tensor:
        assert self.scale is not None
        height, width = size
        area, ratio, down, right = torch.rand(4, count, ATTEMPTS, generator=generator, dtype=torch.float64)
        area = height * width * (self.scale[0] + (self.scale[1] - self.scale[0]) * area)
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        ratio = torch.exp(low + (high - low) * ratio)
        wide, tall = torch.sqrt(area * ratio).round().long(), torch.sqrt(area / ratio).round().long()
        top, left = (down * (height - tall + 1)).long(), (right * (width - wide + 1)).long()
        boxes = torch.stack([top, left, tall, wide], dim=2)
        fits = (wide > 0) & (wide <= width) & (tall > 0) & (tall <= height)
        first = fits.int().argmax(dim=1)
        chosen = boxes[torch.arange(count), first]
        return torch.where(fits.any(dim=1, keepdim=True), chosen, torch.tensor(self._central(height, width)))

    def _central(self, height: int, width: int) -> list[int]:
        """Return the largest central box within the range of ratios."""
        tall = min(height, round(width / self.ratio[0]))
        wide = min(width, round(height * self.ratio[1]))
        return [(height - tall) // 2, (width - wide) // 2, tall, wide]


#: Named recipes: the papers' settings. Sizes come from data.resize and data.crop, statistics from data.normalise.
AUGMENTATIONS: dict[str, Augmentation | None] = {
    "none": None,  # FedVG; FLFA on MedMNIST
    "flip": Augmentation(flip=True),
    "cifar": Augmentation(padding=4, flip=True),  # the usual one for 32 x 32
    "cifar-reflect": Augmentation(padding=4, reflects=True, flip=True),  # NIID-Bench
    "flfa": Augmentation(padding=4, flip=True),  # CIFAR and Fashion-MNIST, from the authors' older code
    "univarfl-stl10": Augmentation(padding=4, flip=True),  # 96 x 96; with normalise half
    "livar-vit": Augmentation(scale=(0.08, 1.0), flip=True),  # with resize 256, crop 224; normalise half
    "livar-cub": Augmentation(flip=True),  # a random 224 crop after resize 256; normalise imagenet
}


def crop_and_flip(
    images: Tensor, draws: Draws, size: tuple[int, int], *, padding: int, reflects: bool = False
) -> Tensor:
    """Crop each image at its offsets and mirror it if drawn: (B, H, W, C) -> (B, *size, C) of the same type.

    Mirrored copies are stored after the images, so that a row of any crop is contiguous in memory, and rows rather than
    pixels are gathered.
    """
    (height, width), (count, channels) = size, (len(images), images.shape[3])
    if padding:
        images = _mirrored_border(images, padding) if reflects else F.pad(images, (0, 0, *[padding] * 4))
    tall, wide = images.shape[1:3]
    both = torch.cat([images, images.flip(2)]).contiguous()
    top, left = draws.offsets.unbind(dim=1)
    left = torch.where(draws.is_flipped, wide - width - left, left)
    image = torch.arange(count, device=images.device) + count * draws.is_flipped
    rows = (image * tall + top)[:, None] + torch.arange(height, device=images.device)
    starts = (rows * wide + left[:, None]).flatten()
    stretches = both.as_strided((2 * count * tall * wide - width + 1, width * channels), (channels, 1))
    return stretches.index_select(0, starts).view(count, height, width, channels)


def _mirrored_border(images: Tensor, padding: int) -> Tensor:
    """Pad images (B, H, W, C) with their own pixels, mirrored at the edge; the edge is not repeated."""
    for axis in (1, 2):
        last = images.shape[axis] - 1 - padding
        before, after = images.narrow(axis, 1, padding), images.narrow(axis, last, padding)
        images = torch.cat([before.flip(axis), images, after.flip(axis)], dim=axis)
    return images


def resized_crop(
    images: Tensor, draws: Draws, size: tuple[int, int], interpolation: Interpolation = "bilinear"
) -> Tensor:
    """Resize each image's box with antialiasing and mirror it if drawn: (B, H, W, C) -> (B, *size, C) float32.

    Resampling is separable: one small matrix for the rows and one for the columns of each image.
    """
    assert draws.boxes is not None
    count, height, width, channels = images.shape
    top, left, tall, wide = draws.boxes.unbind(dim=1)
    down = _resampling(top, tall, height, size[0], interpolation)
    across = _resampling(left, wide, width, size[1], interpolation)
    across = torch.where(draws.is_flipped[:, None, None], across.flip(1), across)
    x = torch.bmm(down, images.float().reshape(count, height, width * channels))
    x = x.reshape(count, size[0], width, channels).permute(0, 2, 1, 3).reshape(count, width, size[0] * channels)
    x = torch.bmm(across, x).reshape(count, size[1], size[0], channels).permute(0, 2, 1, 3)
    return x.clamp(0, 255) if interpolation == "bicubic" else x  # bicubic overshoots; Pillow's bytes are clamped too


def _resampling(start: Tensor, length: Tensor, stored: int, wanted: int, interpolation: Interpolation) -> Tensor:
    """Return (B, wanted, stored) float32 weights of stored pixels: a kernel over the pixels start..start+length."""
    step = (length.double() / wanted)[:, None, None]
    where = torch.arange(stored, device=start.device)
    out = torch.arange(wanted, device=start.device)
    centre = start[:, None, None] + (out[None, :, None] + 0.5) * step
    away = (where + 0.5 - centre).abs() / step.clamp(min=1)
    weights = (1 - away).clamp(min=0) if interpolation == "bilinear" else _cubic(away)
    is_inside = (where >= start[:, None]) & (where < (start + length)[:, None])
    weights = weights * is_inside[:, None, :]
    return (weights / weights.sum(dim=2, keepdim=True)).float()


def _cubic(x: Tensor) -> Tensor:
    """Return Keys' cubic convolution kernel at distances x >= 0 with a = -0.5, as in Pillow; 0 for x >= 2."""
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))
