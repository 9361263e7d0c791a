"""Faults of training and stopping that neither the configuration nor the model has by itself."""

from __future__ import annotations

from collections.abc import Sequence

from raysim.config import Config
from raysim.core.errors import Fault
from raysim.core.memory import memory_fault
from raysim.core.method import Method
from raysim.data.manifest import Manifest
from raysim.models import ModelSpec
from raysim.plan.build import cached_skeleton
from raysim.training.local import needs_two_examples


def training_faults(config: Config, spec: ModelSpec) -> list[Fault]:
    """What would let every client end as it began."""
    if config.local.batch_size > 1 or not needs_two_examples(cached_skeleton(spec)):
        return []
    text = f"1 trains nothing: {spec.name} has BatchNorm, which needs 2 examples; raise it, or take another norm"
    return [Fault("local.batch_size", text)]


def stop_faults(config: Config, methods: Sequence[Method], *, num_test: int) -> list[Fault]:
    """Conditions that could never be met, or that would leave out a method that works after the last round."""
    faults = []
    conditions = config.stop.model_dump(exclude_none=True)
    for name in conditions:
        if name != "seconds" and not config.evaluation.every:
            text = "looks at evaluations, and evaluation.every 0 has none before the last round; raise that, or drop it"
            faults.append(Fault(f"stop.{name}", text))
        elif name != "seconds" and not num_test:
            faults.append(Fault(f"stop.{name}", "needs test examples, and there are none; raise data.test, or drop it"))
    phase = next((method.name for method in methods if method.is_phase), "")
    if conditions and phase:
        text = f"{phase} works after the last round, which has to be known before; drop one of the two"
        faults.append(Fault("stop", text))
    return faults


def memory_faults(config: Config, shape: tuple[int, int, int], manifest: Manifest | None = None) -> list[Fault]:
    """Batches of inputs that this machine cannot hold, by a lower bound: float32 of the images as they are resized.

    Args:
      shape: (height, width, channels) of the stored images.
      manifest: None: it is not known yet, and a batch has one image at least.
    """
    data = config.data
    height, width = (data.resize, data.resize) if data.resize else shape[:2]
    pixels = height * width * (data.channels or shape[2])
    training, tested = (1, 1) if manifest is None else (int(manifest.sizes.max()), len(manifest.test))
    batches = {
        "local.batch_size": min(config.local.batch_size, training),
        "evaluation.batch_size": min(config.evaluation.batch_size, tested),
    }
    key = "data.resize" if manifest is None else ""
    texts = {name: memory_fault(4 * count * pixels) for name, count in batches.items()}
    return [
        Fault(key or name, f"a batch of {batches[name]} images of {height} x {width} {text}; lower it, or data.resize")
        for name, text in texts.items()
        if text
    ][: 1 if key else None]
