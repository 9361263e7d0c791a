"""Preprocessing of images when shards are written: resizing, grey to colour, and a user's function.

    def flatten_light(images, *, strength=1.0):    # images: (n, height, width, channels) uint8, not to be changed in place
        ...
        return images                              # (n, ...) uint8 of any one height, width and number of channels

The function may return (n, ...) float32 instead, such as the features of a frozen network, which become the inputs.
Each result must depend on its own image only, since images are passed in batches of any length.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import MappingProxyType

import numpy as np

from raysim.base.digest import file_digest_of
from raysim.base.errors import DataError
from raysim.base.own import place_of
from raysim.base.own_code import own_function, with_given
from raysim.base.ram import memory_fault
from raysim.base.settings import Raw
from raysim.data.arrow import PreparedSet

#: Number of images on which a user's function is tried before anything is written.
NUM_TRIED = 3

#: Allowed results of a user's function: (type, whether the array has four axes).
FORMS = {("uint8", True), ("float32", True), ("float32", False)}

NO_OPTIONS: Raw = MappingProxyType({})


@dataclass(frozen=True)
class Preprocess:
    """Preprocessing of images, the same for all rows of a federation from any set.

    Attributes:
      original: (height, width, channels) of the partitioned set; fitted: shape that images of every set are first
        fitted to, see `fit_to`; shape: shape of a result.
      own: `module:function` that gets the fitted images, or empty; options: its options, as JSON; made_by: digest of
        its file.
      input_type: type of a result.
    """

    original: tuple[int, ...]
    fitted: tuple[int, ...]
    shape: tuple[int, ...]
    own: str = ""
    options: str = "{}"
    made_by: str = ""
    input_type: str = "uint8"

    @property
    def is_any(self) -> bool:
        """Whether the preprocessing changes images of the partitioned set."""
        return bool(self.own) or self.fitted != self.original

    def to_json(self) -> dict[str, object]:
        """Return the fields; `input_type` is left out for uint8."""
        return {name: value for name, value in asdict(self).items() if (name, value) != ("input_type", "uint8")}

    def work(self, images: np.ndarray) -> np.ndarray:
        """Return (n, *shape) results of (n, ...) inputs of the partitioned set or of another set of the federation.

        Raises:
          DataError, OwnCodeError: the user's function fails, or returns another shape or type.
        """
        images = fit_to(images, self.fitted)
        if not self.own or not len(images):
            return np.empty((0, *self.shape), self.input_type) if not len(images) else images
        found = _call(self.own, json.loads(self.options), images)
        if (found.shape[1:], str(found.dtype)) != (self.shape, self.input_type):
            what = f"{found.dtype} of shape {found.shape[1:]} where the first had {self.input_type} {self.shape}"
            raise DataError(what, _where(self.own), "return arrays of one shape and type")
        return found


def find_preprocess(name: str) -> Callable[..., object]:
    """Return the function of `module:function`, with its options as signature; raises LookupError."""
    return with_given(own_function(name, "preprocess"), ("images",))


def make_preprocess(
    images: PreparedSet, size: int | None = None, own: str = "", options: Raw = NO_OPTIONS
) -> Preprocess:
    """Return the preprocessing of a set, after trying a user's function on the first images.

    Args:
      size: new height and width; None keeps them.
      own: `module:function` of the user, or empty.
    Raises:
      DataError, OwnCodeError: the function fails, returns another type or shape, or returns a different result for a
        single image than in a batch; or the set has no images.
    """
    if not images.info.is_images:
        if size or own:
            what = f"{images.info.name} holds {images.info.input_type} inputs of shape {images.info.shape}, no images"
            raise DataError(what, "data.preprocess", "remove the key, which applies to images only")
        return Preprocess(images.info.shape, images.info.shape, images.info.shape, input_type=images.info.input_type)
    original = height, width, channels = images.info.shape
    fitted = (size or height, size or width, channels)
    if text := memory_fault(5 * math.prod(fitted)):  # an image in bytes and in floats
        raise DataError(f"an image of shape {fitted} {text}", "data.preprocess", "lower data.preprocess.resize")
    if not own:
        return Preprocess(original, fitted, fitted)
    few = fit_to(images.take(np.arange(min(NUM_TRIED, len(images))))[0], fitted)
    found = _call(own, options, few)
    if not (_call(own, options, few[-1:]) == found[-1:]).all():
        what = "an image has another result alone than in a batch"
        raise DataError(what, _where(own), "let each result depend on a single image")
    text, made_by = json.dumps(options, sort_keys=True, default=str), file_digest_of(own_function(own, "preprocess"))
    return Preprocess(original, fitted, found.shape[1:], own, text, made_by, str(found.dtype))


def _call(name: str, options: Raw, images: np.ndarray) -> np.ndarray:
    images = images.view()
    images.flags.writeable = False  # always, since views of the mapped file are read-only
    found = find_preprocess(name)(images=images, **options)
    mend = "return (n, height, width, channels) uint8, or (n, ...) float32"
    if not isinstance(found, np.ndarray):
        raise DataError(f"got {type(found).__name__} for {len(images)} images", _where(name), mend)
    is_form = (str(found.dtype), found.ndim == 4) in FORMS and found.ndim > 1 and all(found.shape[1:])
    if not is_form or len(found) != len(images):
        got = f"an array of shape {found.shape} and type {found.dtype}"
        raise DataError(f"got {got} for {len(images)} images", _where(name), mend)
    if found.dtype == np.float32 and not np.isfinite(found).all():
        raise DataError("got numbers that are not finite", _where(name), "return finite numbers")
    return found


def _where(name: str) -> str:
    return f"data.preprocess, {place_of(own_function(name, 'preprocess'))}"


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
