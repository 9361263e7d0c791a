"""Whether local training does anything: faults that neither the configuration nor the model has by itself."""

from __future__ import annotations

from raysim.build import cached_skeleton
from raysim.config import Config
from raysim.core.errors import Fault
from raysim.models import ModelSpec
from raysim.training.local import needs_two_examples


def training_faults(config: Config, spec: ModelSpec) -> list[Fault]:
    """What would let every client end as it began."""
    if config.local.batch_size > 1 or not needs_two_examples(cached_skeleton(spec)):
        return []
    text = f"1 trains nothing: {spec.name} has BatchNorm, which needs 2 examples; raise it, or take another norm"
    return [Fault("local.batch_size", text)]
