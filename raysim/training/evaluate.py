"""Scores of a model on a slice of a set, example by example; slices join to the same scores, whoever computed them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from raysim.core.errors import MethodError
from raysim.training.inputs import Examples, InputTransform, passes
from raysim.training.model import BoundModel


@dataclass(frozen=True)
class Score:
    """Results of examples in their order.

    Attributes:
      labels, predictions: (n,) int32.
      confidences: (n,) float32, probability of the predicted class.
      loss: summed cross-entropy.
      logits: (n, classes) float32 where they were asked for, else None.
    """

    labels: np.ndarray
    predictions: np.ndarray
    confidences: np.ndarray
    loss: float
    logits: np.ndarray | None = None

    @property
    def hits(self) -> np.ndarray:
        """(n,) bool: whether the predicted class is the true one."""
        hits: np.ndarray = self.predictions == self.labels
        return hits

    @property
    def accuracy(self) -> float:
        return float(self.hits.sum()) / max(1, len(self.labels))

    @property
    def mean_loss(self) -> float:
        return self.loss / max(1, len(self.labels))


def joined(parts: list[Score]) -> Score:
    """The score of slices that follow each other, in their order; at least one."""
    logits = [part.logits for part in parts if part.logits is not None]
    return Score(
        np.concatenate([part.labels for part in parts]),
        np.concatenate([part.predictions for part in parts]),
        np.concatenate([part.confidences for part in parts]),
        sum(part.loss for part in parts),
        np.concatenate(logits) if logits else None,
    )


@torch.no_grad()
def evaluate(
    model: BoundModel,
    examples: Examples,
    transform: InputTransform,
    *,
    batch_size: int = 256,
    keeps_logits: bool = False,
) -> Score:
    """Score of the model's current point, in eval mode, over all examples."""
    model.module.eval()
    losses, confidences, predictions, kept = [], [], [], []
    for batch in passes(examples, transform, batch_size):
        logits = model.forward(batch.images).logits.float()
        losses.append(F.cross_entropy(logits, batch.labels, reduction="sum"))
        predictions.append(logits.argmax(1))
        confidences.append(logits.softmax(1).amax(1))
        if keeps_logits:
            kept.append(logits)
    return Score(
        examples.labels.int().cpu().numpy(),
        _numpy(predictions, torch.int32),
        _numpy(confidences, torch.float32),
        sum(torch.stack(losses).tolist()) if losses else 0.0,  # one copy from the device, added in float64
        _numpy(kept, torch.float32) if keeps_logits else None,
    )


@torch.no_grad()
def features_of(model: BoundModel, examples: Examples, transform: InputTransform, *, batch_size: int) -> torch.Tensor:
    """(n, width): the head's input at the model's current point, in eval mode.

    Raises:
      MethodError: no method declared that it needs features.
    """
    model.module.eval()
    parts = []
    for batch in passes(examples, transform, batch_size):
        features = model.forward(batch.images).features
        if features is None:
            raise MethodError("map_features found no features", "its hooks", 'declare needs={"features"}')
        parts.append(features.flatten(1))
    return torch.cat(parts)


def _numpy(parts: list[torch.Tensor], dtype: torch.dtype) -> np.ndarray:
    array: np.ndarray = (torch.cat(parts) if parts else torch.empty(0)).to("cpu", dtype).numpy()
    return array
