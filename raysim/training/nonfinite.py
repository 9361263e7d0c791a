"""Diagnosis of a client's first non-finite number: the local steps are repeated under observation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

import torch
from torch import Tensor

from raysim.core.method import Batch, ClientView
from raysim.core.stack import ClientStep, Stack
from raysim.training.model import BoundModel

#: Part of a local step that may be non-finite, in the order of computation -> remedy.
REMEDIES = {
    "inputs": "look at the augmentation, or at the images",
    "loss": "look at the model, at the size of the inputs, and at the losses of the methods",
    "gradient": "look for a non-finite derivative in the model, and at the gradients of the methods",
    "parameters": "lower local.lr",
}


def first_nonfinite(
    model: BoundModel, stack: Stack, views: Mapping[str, ClientView], steps: Callable[[ClientStep], object]
) -> str:
    """Return a sentence with the place of a client's first non-finite number and the remedy; empty if none is found.

    Args:
      model: the model at the client's starting point.
      views: new views of the client, not used before.
      steps: steps(client step) takes the client's local steps again.
    """
    sentences: list[str] = []
    batches: list[Batch] = []

    def look(part: str, value: Tensor) -> None:
        is_bad = ~torch.isfinite(value.detach())
        if not sentences and bool(is_bad.any()):
            sentences.append(_sentence(model, part, len(batches), is_bad))

    def gradient(params: Tensor, batch: Batch) -> Tensor:
        if not batches or batch is not batches[-1]:
            look("parameters", model.state)  # after the previous step
            batches.append(batch)
            look("inputs", batch.inputs)
        grad = inner(params, batch)
        look("loss", model.loss)
        look("gradient", grad)
        return grad

    # User code may fail when called again; the caller already knows that the update is non-finite.
    with suppress(Exception):
        step = stack.client_step(views, model.criterion, model.gradient_function)
        inner = step.gradient or model.gradient_function(step.loss)
        steps(step._replace(gradient=gradient))
        look("parameters", model.state)
    return sentences[0] if sentences else ""


def _sentence(model: BoundModel, part: str, step: int, is_bad: Tensor) -> str:
    """Return a sentence with place and remedy. step: from 1; 0 before the first step. is_bad: non-finite entries."""
    if step == 0:
        return "the server's message: check the methods that change the message"
    mend, leaf = REMEDIES[part], ""
    if step > 1 and part in ("loss", "gradient"):
        mend = f"lower local.lr; if NaN remains, {mend}"
    if part in ("gradient", "parameters"):
        place = int(is_bad.nonzero()[0])
        leaf = next(f" of {leaf.name}" for leaf in model.layout.leaves if place < leaf.end)
    return f"its {part}{leaf}, at local step {step}: {mend}"
