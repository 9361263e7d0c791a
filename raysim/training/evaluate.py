"""Scores of a model, example by example; joined slices have the same scores on any number of trainers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from raysim.base.errors import MethodError
from raysim.training.inputs import Examples, Transform, passes
from raysim.training.model import BoundModel


@dataclass(frozen=True)
class Score:
    """Results of n scored examples, in order.

    Attributes:
      columns: name -> (n, ...) measurements of each example, see `Task.measure`.
      loss: sum of the losses of the examples.
      logits: (n, ...) float32 if requested, else None.
    """

    columns: Mapping[str, np.ndarray]
    loss: float
    logits: np.ndarray | None = None

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    @property
    def labels(self) -> np.ndarray:
        """Return (n,) int: the group of each example, the class or 0; see `SetInfo.groups`."""
        return self.columns["labels"] if "labels" in self.columns else np.zeros(len(self), np.int32)

    @property
    def mean_loss(self) -> float:
        return self.loss / max(1, len(self))


def joined_slices(parts: list[Score]) -> Score:
    """Return the joined score of one or more consecutive slices."""
    logits = [part.logits for part in parts if part.logits is not None]
    return Score(
        {name: np.concatenate([part.columns[name] for part in parts]) for name in parts[0].columns},
        sum(part.loss for part in parts),
        np.concatenate(logits) if logits else None,
    )


@torch.no_grad()
def evaluate(
    model: BoundModel, examples: Examples, transform: Transform, *, batch_size: int = 256, keeps_logits: bool = False
) -> Score:
    """Return the score of the model's current state on all examples, in eval mode."""
    model.module.eval()
    losses, kept = [], []
    columns: dict[str, list[torch.Tensor]] = {}
    for batch in passes(examples, transform, batch_size):
        logits = model.forward(batch.inputs).logits.float()
        losses.append(model.task.total(logits, batch.targets))
        for name, values in model.task.measure(logits, batch.targets).items():
            columns.setdefault(name, []).append(values)
        if keeps_logits:
            kept.append(logits)
    return Score(
        {name: torch.cat(parts).cpu().numpy() for name, parts in columns.items()},
        sum(torch.stack(losses).tolist()) if losses else 0.0,  # one copy from the device, added in float64
        torch.cat(kept).cpu().numpy() if kept else None,
    )


@torch.no_grad()
def features_of(model: BoundModel, examples: Examples, transform: Transform, *, batch_size: int) -> torch.Tensor:
    """Return (n, width): the head's input at the model's current state, in eval mode.

    Raises:
      MethodError: no method declared that it needs features.
    """
    model.module.eval()
    parts = []
    for batch in passes(examples, transform, batch_size):
        features = model.forward(batch.inputs).features
        if features is None:
            raise MethodError("map_features found no features", "its hooks", 'declare needs={"features"}')
        parts.append(features.flatten(1))
    return torch.cat(parts)
