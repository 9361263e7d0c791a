"""Diagnosis of a client's first non-finite number: the local steps are repeated under observation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from raysim.core.layout import Layout
from raysim.core.method import Batch, ClientView, LossFn, Outputs
from raysim.core.stack import ClientStep, Stack
from raysim.training.model import BoundModel

#: What may be not finite, in the order in which a local step makes it, and how to mend it in the first step.
PARTS = {
    "inputs": "look at the augmentation, or at the images",
    "loss": "look at the model, at the size of its inputs, and at the loss of {methods}",
    "gradient": "look for a derivative that is not finite in the model, and at the gradient of {methods}",
    "parameters": "lower local.lr",
}


class Origin(NamedTuple):
    """The first number that was not finite.

    Attributes:
      part: index in `PARTS`; -1: nothing was, the second time. step: the local step, from 1; 0: what the client got.
      leaf: index in the layout, of a gradient and of parameters; else -1.
    """

    part: float = -1
    step: float = 0
    leaf: float = -1

    def sentence(self, layout: Layout, methods: str) -> tuple[str, str]:
        """Return (first non-finite quantity, remedy) in words. methods: names of methods with a loss or gradient
        hook.
        """
        if self.step == 0:
            return "what the server sent to it", "look at the methods that change what is sent"
        part = list(PARTS)[int(self.part)]
        mend = PARTS[part].format(methods=methods) if methods else PARTS[part].partition(", and")[0]
        if self.step > 1 and part in ("loss", "gradient"):
            mend = f"lower local.lr; if that does not help, {mend}"
        leaf = f" of {layout.leaves[int(self.leaf)].name}" if self.leaf >= 0 else ""
        return f"its {part}{leaf}, at local step {int(self.step)}", mend


def first_nonfinite(
    model: BoundModel, stack: Stack, views: Mapping[str, ClientView], steps: Callable[[ClientStep], object]
) -> Origin:
    """Where a client's numbers are first not finite.

    Args:
      model: where the client starts.
      views: of that client, none of them used before.
      steps: takes the client's local steps.
    """
    found: list[Origin] = []
    batches: list[Batch] = []

    def look(part: str, value: Tensor) -> None:
        is_bad = ~torch.isfinite(value.detach())
        if not found and bool(is_bad.any()):
            place = int(is_bad.flatten().nonzero()[0]) if part in ("gradient", "parameters") else -1
            leaf = sum(leaf.offset <= place for leaf in model.layout.leaves) - 1
            found.append(Origin(list(PARTS).index(part), len(batches), leaf))

    def watched(loss: LossFn) -> LossFn:
        def value_of(outputs: Outputs, batch: Batch) -> Tensor:
            value = loss(outputs, batch)
            look("loss", value)
            return value

        return value_of

    def gradient(params: Tensor, batch: Batch) -> Tensor:
        if not batches or batch is not batches[-1]:
            look("parameters", model.state)  # after the step before
            batches.append(batch)
            look("inputs", batch.inputs)
        grad = inner(params, batch)
        look("gradient", grad)
        return grad

    # Own code may not bear a second call; that the update is not finite is known without it.
    with suppress(Exception):
        step = stack.client_step(views, model.criterion, lambda loss: model.gradient_function(watched(loss)))
        inner = step.gradient or model.gradient_function(watched(step.loss))
        steps(step._replace(gradient=gradient))
        look("parameters", model.state)
    return found[0] if found else Origin()
