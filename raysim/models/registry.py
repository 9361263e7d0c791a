"""Names of models: raysim's own, and all of timm's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysim.core.errors import did_you_mean
from raysim.models.from_timm import TRANSFORMERS, knows, names, timm_architecture
from raysim.models.from_torchvision import TORCHVISION
from raysim.models.own import own_architecture
from raysim.models.small import SMALL

if TYPE_CHECKING:
    from raysim.models.architecture import Architecture, ModelSpec

MODELS: dict[str, Architecture] = {**SMALL, **TORCHVISION, **TRANSFORMERS}


def find_architecture(name: str) -> Architecture:
    """The architecture behind a name of raysim's or, with or without `timm:` in front, of timm's, or `module:function`.

    Raises:
      LookupError: there is none (says what is near), its classifier is not one layer, or the function cannot be used.
    """
    if name in MODELS:
        return MODELS[name]
    prefix, _, network = name.rpartition(":")
    if prefix in ("", "timm") and knows(network):
        return timm_architecture(network)
    if prefix not in ("", "timm", "torchvision"):
        return own_architecture(name)
    hint = did_you_mean(network, [*MODELS, *names()], most=3)
    known = f"{', '.join(sorted(MODELS))}, and every model of timm; or module:function for your own"
    raise LookupError(f"unknown model {name!r}. {hint}Known: {known}")


def prefers_channels_last(spec: ModelSpec) -> bool:
    """Whether this model was measured to train faster with channels-last convolutions."""
    return find_architecture(spec.name).prefers_channels_last
