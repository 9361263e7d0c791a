"""What is done to every image once, when its shard is written: a size, colours, a function of the user's own.

    def flatten_light(images, *, strength=1.0):    # images: (n, height, width, channels) uint8, not to be changed in place
        ...
        return images                              # (n, ...) uint8 of any one height, width and number of channels

A result may depend on its own image alone: images come in parts of any length. Shards hold pixels of 8 bits, so features
of a frozen network, which are real numbers, have no place in them.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np

from raysim.core.digest import source_digest
from raysim.core.errors import DataError
from raysim.core.memory import memory_fault
from raysim.core.own import place_of
from raysim.core.own_code import own_function, with_given
from raysim.core.settings import Raw
from raysim.data.arrow import ImageSet
from raysim.folders.files import file_digest

#: Images that a function of the user's own is tried on before anything is written.
NUM_TRIED = 3

NO_OPTIONS: Raw = MappingProxyType({})


@dataclass(frozen=True)
class Preprocess:
    """Work on images, the same for all rows of a federation, whichever set they are from.

    Attributes:
      original: (height, width, channels) of the set that the federation is made of; fitted: what images of every set are
        fitted to first, see `fit_to`; shape: what comes out.
      own: `module:function` that gets the fitted images, or empty; options: its options, as JSON; made_by: digest of its file.
    """

    original: tuple[int, int, int]
    fitted: tuple[int, int, int]
    shape: tuple[int, int, int]
    own: str = ""
    options: str = "{}"
    made_by: str = ""

    @property
    def is_any(self) -> bool:
        """Whether it does anything to the set that it was made for."""
        return bool(self.own) or self.fitted != self.original

    def work(self, images: np.ndarray) -> np.ndarray:
        """(n, *shape) uint8 of (n, height, width, channels) uint8.

        Raises:
          DataError, OwnCodeError: the function fails, or returns anything else.
        """
        images = fit_to(images, self.fitted)
        if not self.own or not len(images):
            return np.empty((0, *self.shape), np.uint8) if not len(images) else images
        found = _call(self.own, json.loads(self.options), images)
        if found.shape[1:] != self.shape:
            what = f"images of shape {found.shape[1:]} where its first ones were of shape {self.shape}"
            raise DataError(what, _where(self.own), "return images of one shape")
        return found


def find_preprocess(name: str) -> Callable[..., object]:
    """The function behind `module:function`, with its own options as its signature; raises LookupError."""
    return with_given(own_function(name, "preprocess"), ("images",))


def make_preprocess(
    images: ImageSet, size: int | None = None, is_rgb: bool = False, own: str = "", options: Raw = NO_OPTIONS
) -> Preprocess:
    """The work on a set, tried on its first images.

    Args:
      size: height and width, None: as they are; is_rgb: whether grey images get three channels.
    Raises:
      DataError, OwnCodeError: the function fails, returns no such images, or another image where it gets one alone.
    """
    original = height, width, channels = images.info.shape
    fitted = (size or height, size or width, 3 if is_rgb and channels == 1 else channels)
    if text := memory_fault(5 * math.prod(fitted)):  # an image in bytes and in floats
        raise DataError(f"an image of shape {fitted} {text}", "data.preprocess", "lower data.preprocess.resize")
    if not own:
        return Preprocess(original, fitted, fitted)
    few = fit_to(images.take(np.arange(min(NUM_TRIED, len(images))))[0], fitted)
    found = _call(own, options, few)
    if not (_call(own, options, few[-1:]) == found[-1:]).all():
        what = "an image has another result alone than in a batch"
        raise DataError(what, _where(own), "let each result depend on its own image alone")
    height, width, channels = found.shape[1:]
    text = json.dumps(options, sort_keys=True, default=str)
    return Preprocess(original, fitted, (height, width, channels), own, text, _digest(own_function(own, "preprocess")))


def _call(name: str, options: Raw, images: np.ndarray) -> np.ndarray:
    images = images.view()
    images.flags.writeable = False  # they may be the mapped file; then nothing could be written to them either
    found = find_preprocess(name)(images=images, **options)
    mend = "return (n, height, width, channels) uint8: shards hold pixels of 8 bits, no features"
    if not isinstance(found, np.ndarray):
        raise DataError(f"got {type(found).__name__} for {len(images)} images", _where(name), mend)
    if found.dtype != np.uint8 or found.ndim != 4 or len(found) != len(images):
        got = f"an array of shape {found.shape} and type {found.dtype}"
        raise DataError(f"got {got} for {len(images)} images", _where(name), mend)
    if not found.size and len(images):
        raise DataError(f"got images of shape {found.shape[1:]}, without a pixel", _where(name), mend)
    return found


def _where(name: str) -> str:
    return f"data.preprocess, {place_of(own_function(name, 'preprocess'))}"


def _digest(function: Callable[..., object]) -> str:
    """Of the file that holds a function: what it calls there counts, too."""
    try:
        return file_digest(Path(inspect.getfile(inspect.unwrap(function))))
    except (OSError, TypeError):  # written in a notebook
        return source_digest(function)


def fit_to(images: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
    """(n, H, W, C) uint8 in another shape: bilinear with antialiasing, as Pillow resizes; grey repeats to colours.

    Raises:
      DataError: colour images for a grey set.
    """
    if images.shape[1:] == shape:
        return images
    height, width, channels = shape
    if images.shape[3] not in (1, channels):
        what = f"images with {images.shape[3]} channels for a set with {channels}"
        raise DataError(what, "data.validation_set.external", "choose a set with as many channels, or a grey one")
    result = np.empty((len(images), *shape), np.uint8)
    if images.shape[1:3] == shape[:2]:
        result[...] = images
        return result
    import torch  # here: workers that only move data need none of it
    import torch.nn.functional as F

    for start in range(0, len(images), 256):  # floats of a part at a time
        part = torch.from_numpy(images[start : start + 256].astype(np.float32)).permute(0, 3, 1, 2)
        part = F.interpolate(part, size=(height, width), mode="bilinear", antialias=True, align_corners=False)
        result[start : start + 256] = part.round().clamp(0, 255).byte().permute(0, 2, 3, 1).numpy()
    return result
