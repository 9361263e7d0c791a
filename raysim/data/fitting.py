"""Images of one size: resizing and grey to colour, once, when shards are written."""

from __future__ import annotations

import numpy as np

from raysim.base.errors import DataError


def fit_to(images: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Resize (n, H, W, C) uint8 images: bilinear with antialiasing as in Pillow; grey is repeated for colour channels.

    Raises:
      DataError: colour images for a grey set.
    """
    if images.shape[1:] == shape:
        return images
    height, width, channels = shape
    if images.shape[3] not in (1, channels):
        what = f"images with {images.shape[3]} channels for a set with {channels}"
        raise DataError(what, "data.validation_set.external", "choose a set with as many channels, or a grey set")
    result = np.empty((len(images), *shape), np.uint8)
    if images.shape[1:3] == shape[:2]:
        result[...] = images
        return result
    import torch  # imported here, since workers that only move data do not need torch
    import torch.nn.functional as F

    for start in range(0, len(images), 256):  # floats of a part at a time
        part = torch.from_numpy(images[start : start + 256].astype(np.float32)).permute(0, 3, 1, 2)
        part = F.interpolate(part, size=(height, width), mode="bilinear", antialias=True, align_corners=False)
        result[start : start + 256] = part.round().clamp(0, 255).byte().permute(0, 2, 3, 1).numpy()
    return result
