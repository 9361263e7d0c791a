"""Attacks by poisoned data: flipped labels and backdoors."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from methods.attack import attacked
from raysim.core.method import Batch, Count, Fraction, Method, Model, Positive, RunSizes, ServerView, Share, Whole


def label_flip(
    *, share: Share = 0.2, from_round: Whole = 0, source: Whole | None = None, target: Whole | None = None
) -> Method:
    """Attackers train on label C - 1 - y of C classes in place of y, or on `target` (Fang et al. 2020,
    arXiv:1911.11815).

    With `source` only one class is flipped (Tolpegin et al. 2020, arXiv:2007.08432).

    Args:
      share: share of all clients that attack, drawn once from the seed, rounded to whole clients.
      from_round: first round with attackers; all clients are honest before.
      source: the class that is flipped; null: every class.
      target: the class of flipped examples; null: class y becomes class C - 1 - y.
    """

    def fits(sizes: RunSizes) -> str:
        return missing_class(target or 0, sizes) or missing_class(source or 0, sizes, "source")

    spoil = partial(flipped, source=source, target=target)
    return attacked(share, from_round, spoil=spoil, fits=fits, needs=["classes"])


def backdoor(
    *,
    share: Share = 0.2,
    from_round: Whole = 0,
    scale: Positive = 1.0,
    target: Whole = 0,
    poison: Fraction = 0.5,
    trigger: Count = 3,
    value: float = 1.0,
) -> Method:
    """Attackers put a patch on some images of each batch, which become `target`, and send `scale` times their update.

    Gu et al. 2017 (arXiv:1708.06733); a scale of clients / attackers replaces the model (Bagdasaryan et al., AISTATS 2020,
    arXiv:1807.00459). In evaluated rounds `success` logs the share of the test rows of other classes that become `target`
    with the patch.

    Args:
      share: share of all clients that attack, drawn once from the seed, rounded to whole clients.
      from_round: first round with attackers; all clients are honest before.
      scale: factor of the update, > 0.
      target: class of the patched images.
      poison: share of each batch that gets the patch, in (0, 1], rounded up.
      trigger: side of the patch in the lower right corner, in pixels of the model's input.
      value: value of the patch in all channels, in the units of the model's input, after normalisation.
    """
    stamp = partial(stamped, size=trigger, value=value)

    def look(server: ServerView) -> None:
        fooled, rows = map(sum, zip(*server.map_test(partial(_fooled, stamp=stamp), target), strict=True))
        server.log("success", fooled / max(1, rows))

    def fits(sizes: RunSizes) -> str:
        if len(sizes.input_shape) != 3 or trigger > min(sizes.input_shape[:2]):
            return f"a patch of {trigger} x {trigger} does not fit inputs of shape {sizes.input_shape}; lower trigger"
        return missing_class(target, sizes)

    return attacked(
        share,
        from_round,
        spoil=partial(with_backdoor, stamp=stamp, target=target, poison=poison),
        send=lambda update, client: scale * update,
        look=look,
        fits=fits,
        needs=["classes", "test-set"],
    )


def missing_class(label: int, sizes: RunSizes, option: str = "target") -> str:
    """Return the reason why a label is not a class of the run; empty for a class."""
    if label < sizes.num_classes:
        return ""
    return f"{option} {label} is none of the {sizes.num_classes} classes, which count from 0"


def flipped(batch: Batch, num_classes: int, *, source: int | None, target: int | None) -> Batch:
    """Return the batch with labels y, all or `source` alone, replaced by num_classes - 1 - y or by `target`."""
    labels = batch.targets
    others = num_classes - 1 - labels if target is None else torch.full_like(labels, target)
    return batch._replace(targets=others if source is None else torch.where(labels == source, others, labels))


def with_backdoor(
    batch: Batch, num_classes: int, *, stamp: Callable[[Tensor], Tensor], target: int, poison: float
) -> Batch:
    """Return the batch with the patch and class `target` in its first rows, a share `poison` of the shuffled batch."""
    count, targets = math.ceil(poison * len(batch.targets)), batch.targets.clone()
    targets[:count] = target
    return Batch(torch.cat([stamp(batch.inputs[:count]), batch.inputs[count:]]), targets)


def stamped(images: Tensor, *, size: int, value: float) -> Tensor:
    """A copy of (B, channels, height, width) with a square in the lower right corner."""
    images = images.clone()
    images[..., -size:, -size:] = value
    return images


def _fooled(model: Model, batch: Batch, target: int, *, stamp: Callable[[Tensor], Tensor]) -> tuple[int, int]:
    """Return (number of images that the patch turns into class `target`, number of images), both without images of `target`."""
    images = batch.inputs[batch.targets != target]
    is_fooled = model.module(stamp(images)).argmax(1) == target if len(images) else torch.zeros(0)
    return int(is_fooled.sum()), len(images)
