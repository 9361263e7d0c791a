"""Diagnosis of a client's first non-finite number: the local steps are repeated under observation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

import torch
from torch import Tensor

from raysim.core.method import Batch, ClientView
from raysim.core.stack import ClientStep, Stack
from raysim.training.model import BoundModel

#: What may be not finite, in the order in which a local step makes it, and how to mend it.
REMEDIES = {
    "inputs": "look at the augmentation, or at the images",
    "loss": "look at the model, at the size of the inputs, and at the losses of the methods",
    "gradient": "look for a non-finite derivative in the model, and at the gradients of the methods",
    "parameters": "lower local.lr",
}


def first_nonfinite(
    model: BoundModel, stack: Stack, views: Mapping[str, ClientView], steps: Callable[[ClientStep], object]
) -> str:
    """Where a client's numbers are first not finite, and how to mend it; empty if all are finite the second time.

    Args:
      model: where the client starts.
      views: of that client, none of them used before.
      steps: takes the client's local steps.
    """
    found: list[str] = []
    batches: list[Batch] = []

    def look(part: str, value: Tensor) -> None:
        is_bad = ~torch.isfinite(value.detach())
        if not found and bool(is_bad.any()):
            found.append(_sentence(model, part, len(batches), is_bad))

    def gradient(params: Tensor, batch: Batch) -> Tensor:
        if not batches or batch is not batches[-1]:
            look("parameters", model.state)  # after the step before
            batches.append(batch)
            look("inputs", batch.inputs)
        grad = inner(params, batch)
        look("loss", model.loss)
        look("gradient", grad)
        return grad

    # Own code may not bear a second call; that the update is not finite is known without it.
    with suppress(Exception):
        step = stack.client_step(views, model.criterion, model.gradient_function)
        inner = step.gradient or model.gradient_function(step.loss)
        steps(step._replace(gradient=gradient))
        look("parameters", model.state)
    return found[0] if found else ""


def _sentence(model: BoundModel, part: str, step: int, is_bad: Tensor) -> str:
    """What is not finite, and the remedy. step: from 1; 0 before the first. is_bad: which of the part's entries are not."""
    if step == 0:
        return "the server's message: check the methods that change the message"
    mend, leaf = REMEDIES[part], ""
    if step > 1 and part in ("loss", "gradient"):
        mend = f"lower local.lr; if NaN remains, {mend}"
    if part in ("gradient", "parameters"):
        place = int(is_bad.nonzero()[0])
        leaf = next(f" of {leaf.name}" for leaf in model.layout.leaves if place < leaf.end)
    return f"its {part}{leaf}, at local step {step}: {mend}"
