"""Pretrained weights as a file on the driver's machine, fetched by the other nodes."""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from filelock import FileLock
from safetensors.torch import save_file

from raysim.base.errors import ModelError
from raysim.folders.files import replaced_file
from raysim.models import ModelSpec, find_architecture
from raysim.models.pretrained import pretrained_weights, read_weights, weights_sha256


@dataclass(frozen=True)
class HeldWeights:
    """A file of weights on the driver's machine; both fields are empty for a model without a file."""

    path: str = ""
    sha256: str = ""


def holds_adapters(pretrained: str | None) -> bool:
    """Whether a file holds weights with adapters; other faults of the file are found by the runs' own check."""
    if pretrained in (None, "default"):
        return False
    with contextlib.suppress(ModelError), torch.device("meta"):
        return any(".lora_" in name for name in read_weights(Path(pretrained).expanduser()))
    return False


def held_weights(spec: ModelSpec, cache: Path) -> HeldWeights:
    """The weights that a specification asks for: the user's own file, or the library's, fetched once into the cache.

    Raises:
      ModelError: the weights cannot be read or fetched.
    """
    if spec.pretrained is None:
        return HeldWeights()
    path = _published(spec, cache) if spec.pretrained == "default" else Path(spec.pretrained).expanduser().absolute()
    return HeldWeights(str(path), weights_sha256(str(path)))


def _published(spec: ModelSpec, cache: Path) -> Path:
    made_for = [spec.name, spec.num_classes, spec.input_shape, spec.options]
    versions = [metadata.version(library) for library in ("torch", "torchvision", "timm")]
    digest = hashlib.sha256(json.dumps([made_for, versions], sort_keys=True, default=str).encode()).hexdigest()
    path = cache / f"{spec.name.replace(':', '-').replace('/', '-')}-{digest[:16]}.safetensors"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f".{path.name}.lock"):
        if not path.is_file():
            weights = pretrained_weights(find_architecture(spec.name), spec)
            assert weights is not None
            tensors = {name: value.detach().clone().contiguous() for name, value in weights[0].items()}
            with replaced_file(path) as temporary:
                save_file(tensors, temporary)
    return path
