"""A round in numbers: what goes into progress.csv, the clients' rows, and the picture of the weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from raysim.core.layout import Layout
from raysim.core.weights import RightMap, Weights
from raysim.engine.cohort import Cohort
from raysim.engine.messages import RoundMessage
from raysim.engine.scores import FederationSizes, personal_metrics
from raysim.engine.transport import num_bytes


@dataclass(frozen=True)
class RoundRecord:
    """What a round leaves behind.

    Attributes:
      metrics: tag -> number.
      clients: a column per fact about the cohort, (K,) each.
      weights: (K kept, num_blocks) float64, mean weight of each client in each layer block.
      arrays: what methods logged: `method.name`, and `:columns`, `:clients` that name its axes.
      confusion: (classes, classes) int64, test examples by true class (row) and predicted class; None where not scored.
    """

    round_index: int
    metrics: dict[str, float]
    clients: dict[str, np.ndarray]
    weights: np.ndarray
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    confusion: np.ndarray | None = None


def cohort_metrics(cohort: Cohort, message: RoundMessage, layout: Layout, sizes: FederationSizes) -> dict[str, float]:
    """Training loss, bytes up and down, dropped clients and, where layers are personal, accuracy of the cohort's own models."""
    reports, count = cohort.reports, len(cohort.clients)
    up = num_bytes(reports.methods) + sum(
        count * (layout.shared_bytes if vector == "update" else 4 * layout.num_params) for vector in reports.peaks
    )
    down = count * (layout.shared_bytes + num_bytes(message.fields))
    steps, losses = reports.num_steps[cohort.is_kept], reports.train_loss[cohort.is_kept]
    metrics = {
        "train/loss": float(np.nansum(losses * steps) / steps.sum()) if steps.sum() else math.nan,
        "comm/up_mb": up / 1e6,
        "comm/down_mb": down / 1e6,
        "clients/dropped": float((~cohort.is_kept).sum()),
    }
    if reports.personal is not None and sizes.num_test:
        metrics |= personal_metrics(reports.personal, cohort.clients, sizes)
    return metrics


def client_columns(cohort: Cohort, weights: Weights, layout: Layout) -> dict[str, np.ndarray]:
    """Columns of the clients' rows; weight: mean over the shared leaves, by their sizes."""
    weight = np.zeros(len(cohort.clients))
    leaves = [leaf for leaf in layout.shared if leaf.name in weights]
    if leaves:
        shares = np.array([leaf.size for leaf in leaves], float)
        weight[cohort.is_kept] = np.stack([_per_client(weights[leaf.name]) for leaf in leaves], 1) @ (
            shares / shares.sum()
        )
    names = ("client", "block", "num_examples", "num_steps", "seconds", "train_loss")
    columns = {name: getattr(cohort.reports, name) for name in names}
    return {**columns, "weight": weight, "is_dropped": ~cohort.is_kept}


def block_weights(cohort: Cohort, weights: Weights, layout: Layout) -> np.ndarray:
    """(K kept, num_blocks): mean weight of each client over the leaves of each layer block; NaN where there is none."""
    count, columns = int(cohort.is_kept.sum()), []
    for block in layout.blocks:
        leaves = [leaf for leaf in layout.params if leaf.block == block and leaf.name in weights]
        inside = [_per_client(weights[leaf.name]) for leaf in leaves]
        columns.append(np.mean(inside, axis=0) if inside else np.full(count, math.nan))
    return np.stack(columns, axis=1) if columns else np.zeros((count, 0))


def _per_client(weight: Tensor | RightMap) -> np.ndarray:
    """(K,): a client's weight on a leaf as one number (mean over rows; the mean diagonal of a map)."""
    if isinstance(weight, RightMap):
        return weight.maps.diagonal(dim1=1, dim2=2).mean(1).numpy()
    return weight.flatten(1).mean(1).numpy() if weight.dim() > 1 else weight.numpy()
