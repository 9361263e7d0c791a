"""Accuracy and loss of a model on a slice of a set; slices add up exactly whatever worker computed them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from raysim.training.inputs import Examples, InputTransform, passes
from raysim.training.model import BoundModel


@dataclass(frozen=True)
class Score:
    """correct, count: (classes,) int64 per true class; loss: summed cross-entropy."""

    correct: torch.Tensor
    count: torch.Tensor
    loss: float

    def __add__(self, other: Score) -> Score:
        return Score(self.correct + other.correct, self.count + other.count, self.loss + other.loss)

    @property
    def accuracy(self) -> float:
        return float(self.correct.sum()) / max(1, int(self.count.sum()))

    @property
    def mean_loss(self) -> float:
        return self.loss / max(1, int(self.count.sum()))


@torch.no_grad()
def evaluate(
    model: BoundModel, examples: Examples, transform: InputTransform, *, num_classes: int, batch_size: int = 256
) -> Score:
    """Score of the model's current point, in eval mode, over all examples."""
    model.module.eval()
    correct = torch.zeros(num_classes, dtype=torch.int64)
    count = torch.zeros(num_classes, dtype=torch.int64)
    loss = 0.0
    for batch in passes(examples, transform, batch_size):
        logits = model.forward(batch.images).logits
        hits = logits.argmax(1) == batch.labels
        loss += float(F.cross_entropy(logits, batch.labels, reduction="sum"))
        correct += torch.bincount(batch.labels[hits], minlength=num_classes).cpu()
        count += torch.bincount(batch.labels, minlength=num_classes).cpu()
    return Score(correct, count, loss)
