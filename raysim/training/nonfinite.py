"""The first number of a client that is not finite: its local steps are taken again and watched, and a sentence names it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import NamedTuple

import torch
from torch import Tensor

from raysim.core.method import Batch, ClientView, GradFn, LossFn, Outputs
from raysim.core.stack import ClientStep, Stack
from raysim.training.model import BoundModel

#: Numbers of which an overflow is no surprise: parameters this large, or so many times as large as the client got them.
#: Inputs this large: pixels are below 10, whatever the normalisation.
LARGE_PARAM, GROWTH, LARGE_INPUT = 1e3, 10.0, 1e4


class Suspect(IntEnum):
    """What may be not finite first, in the order in which a local step makes it; UNKNOWN: nothing was, the second time."""

    UNKNOWN = 0
    START = auto()
    INPUTS = auto()
    OUTPUTS = auto()
    CROSS_ENTROPY = auto()
    LOSS = auto()
    GRADIENT = auto()
    METHODS_GRADIENT = auto()
    PARAMS = auto()
    BUFFERS = auto()


class Origin(NamedTuple):
    """The first number that was not finite.

    Attributes:
      part: a `Suspect`. step: the local step, from 0.
      largest_input: the largest absolute entry of the inputs of that step.
      largest_param, largest_start: of the parameters before that step, and of those that the client got.
    """

    part: float = Suspect.UNKNOWN
    step: float = 0.0
    largest_input: float = 0.0
    largest_param: float = 0.0
    largest_start: float = 0.0

    def told(self, loss_methods: str, gradient_methods: str) -> tuple[str, str]:
        """(what was not finite first, how to mend it), in words.

        Args:
          loss_methods, gradient_methods: names of those with a hook `loss`, and with a hook `grads`.
        """
        params = f"its largest parameter was {self.largest_param:.2g}, and {self.largest_start:.2g} at the start"
        what, mend = {
            Suspect.START: ("what the server sent to it", "look at the methods that change what is sent"),
            Suspect.INPUTS: ("its inputs", "look at the augmentation, or at the images"),
            Suspect.OUTPUTS: (f"the outputs of the model: {params}", "look at the model"),
            Suspect.CROSS_ENTROPY: (
                f"the cross-entropy of finite outputs: {params}",
                "look at the outputs of the model",
            ),
            Suspect.LOSS: (f"the loss with what {loss_methods} adds to it", f"look at the loss of {loss_methods}"),
            Suspect.GRADIENT: (f"the gradient of a finite loss: {params}", "look for a derivative that is not finite"),
            Suspect.METHODS_GRADIENT: (
                f"the gradient as {gradient_methods} changed it",
                f"look at the gradient of {gradient_methods}",
            ),
            Suspect.PARAMS: (f"the parameters after a step with a finite gradient: {params}", "lower local.lr"),
            Suspect.BUFFERS: (f"the buffers of the model: {params}", "look at the model"),
        }[Suspect(int(self.part))]
        if self.part not in (Suspect.START, Suspect.INPUTS):
            if self.largest_input > LARGE_INPUT:
                size = f"inputs were as large as {self.largest_input:.2g}"
                mend = f"look at the augmentation or the normalisation: {size}"
            elif self.largest_param > min(LARGE_PARAM, GROWTH * max(1.0, self.largest_start)):
                mend = "lower local.lr"
        return f"{what}, at local step {int(self.step) + 1}", mend


@dataclass
class StepWatch:
    """Looks at the inputs, outputs, losses, gradients and parameters of local steps, and keeps the first that is not finite."""

    model: BoundModel

    def __post_init__(self) -> None:
        self.origin = Origin()
        self._step = -1
        self._batch: Batch | None = None
        self._largest_start = self._largest_param = _largest(self.model.params)
        self._largest_input = 0.0
        self._look(Suspect.START, self.model.state)

    def loss(self, inner: LossFn, part: Suspect) -> LossFn:
        """The same loss, watched."""

        def watched(outputs: Outputs, batch: Batch) -> Tensor:
            self._begin(batch)
            self._look(Suspect.INPUTS, batch.inputs)
            self._look(Suspect.OUTPUTS, outputs.logits)
            value = inner(outputs, batch)
            self._look(part, value)
            return value

        return watched

    def gradient(self, inner: GradFn, part: Suspect) -> GradFn:
        """The same gradient, watched."""

        def watched(params: Tensor, batch: Batch) -> Tensor:
            self._begin(batch)
            grad = inner(params, batch)
            self._look(part, grad)
            return grad

        return watched

    def end(self) -> None:
        """After the last local step."""
        self._look_at_state()

    def _begin(self, batch: Batch) -> None:
        """A batch that was not seen is the next step's."""
        if batch is self._batch:
            return
        self._look_at_state()
        self._batch, self._step = batch, self._step + 1
        self._largest_input, self._largest_param = _largest(batch.inputs), _largest(self.model.params)

    def _look_at_state(self) -> None:
        self._look(Suspect.PARAMS, self.model.params)
        self._look(Suspect.BUFFERS, self.model.buffers)

    def _look(self, part: Suspect, value: Tensor) -> None:
        if self.origin.part == Suspect.UNKNOWN and not bool(torch.isfinite(value.detach()).all()):
            step = max(0, self._step)
            self.origin = Origin(part, step, self._largest_input, self._largest_param, self._largest_start)


def first_nonfinite(
    model: BoundModel, stack: Stack, views: Mapping[str, ClientView], steps: Callable[[ClientStep], object]
) -> Origin:
    """Where a client's numbers are first not finite.

    Args:
      model: where the client starts.
      views: of that client, none of them used before.
      steps: takes the client's local steps.
    """
    watch = StepWatch(model)

    def gradient_of(loss: LossFn) -> GradFn:
        return watch.gradient(model.gradient_function(watch.loss(loss, Suspect.LOSS)), Suspect.GRADIENT)

    # Own code may not bear a second call; that the update is not finite is known without it.
    with suppress(Exception):
        step = stack.client_step(views, watch.loss(model.criterion, Suspect.CROSS_ENTROPY), gradient_of)
        gradient = watch.gradient(step.gradient or gradient_of(step.loss), Suspect.METHODS_GRADIENT)
        steps(step._replace(gradient=gradient))
        watch.end()
    return watch.origin


def _largest(values: Tensor) -> float:
    return float(values.detach().abs().max()) if values.numel() else 0.0
