"""From stored pixels to model inputs, on the device that trains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from raysim.core.method import Batch


@dataclass(frozen=True)
class Examples:
    """A set of examples on a device. images: (n, height, width, channels) uint8; labels: (n,) int64."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class InputTransform:
    """Pixels to floats: divide by 255, then (x - mean) / std per channel if given.

    FedVG's papers scale to [0, 1] and do nothing else, which is the default. With `channels_last` the result keeps the
    stored order (height, width, channels) in memory, so no copy is needed for channels-last convolutions.
    """

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    channels_last: bool = False

    def __call__(self, images: Tensor) -> Tensor:
        """(B, height, width, channels) uint8 -> (B, channels, height, width) float32."""
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        x = images.permute(0, 3, 1, 2).to(torch.float32, memory_format=layout).div_(255.0)
        if self.mean:
            x.sub_(torch.tensor(self.mean, device=x.device).view(1, -1, 1, 1))
            x.div_(torch.tensor(self.std, device=x.device).view(1, -1, 1, 1))
        return x


def passes(examples: Examples, transform: InputTransform, batch_size: int) -> Iterator[Batch]:
    """One pass in stored order. A last batch of one example joins the batch before it (BatchNorm cannot take it)."""
    starts = list(range(0, len(examples), batch_size))
    if len(starts) > 1 and len(examples) - starts[-1] == 1:
        starts.pop()
    for start, end in zip(starts, [*starts[1:], len(examples)], strict=True):
        yield Batch(transform(examples.images[start:end]), examples.labels[start:end])
