"""What hooks see of a round: each view is built whole, in one call, for one method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raysim.core.layout import Layout
from raysim.core.method import Batches, ClientView, ServerView
from raysim.core.seeding import derive_seed, torch_generator
from raysim.core.weights import Weights
from raysim.engine.cohort import Cohort
from raysim.engine.scorer import Scorer
from raysim.engine.scores import FederationSizes
from raysim.training.inputs import Examples
from raysim.training.local import LocalSettings
from raysim.training.model import BoundModel


@dataclass
class RoundLog:
    """What methods log in a round: numbers by "method/name", arrays by "method.name" with the names of their axes."""

    numbers: dict[str, float] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)

    def add(self, method: str, name: str, value: float | Tensor, columns: Sequence[str], clients: Tensor) -> None:
        """See `ServerView.log`."""
        if not isinstance(value, Tensor) or not value.dim():
            self.numbers[f"{method}/{name}"] = float(value)
            return
        key = f"{method}.{name}"
        self.arrays[key] = value.detach().cpu().numpy()
        if columns:
            self.arrays[f"{key}:columns"] = np.array(columns)
        if value.dim() > 1:
            self.arrays[f"{key}:clients"] = clients.numpy()


@dataclass
class ServerViews:
    """Builds the views of one round at the server.

    Attributes:
      start: [num_params], the broadcast point; buffers: [num_state - num_params], as the round began.
      params: [num_params], the global parameters; set anew when the server has moved.
      counters: the integer buffers to score with; set anew likewise.
    """

    cohort: Cohort
    scorer: Scorer
    layout: Layout
    sizes: FederationSizes
    seed: int
    round_index: int
    start: Tensor
    buffers: Tensor
    params: Tensor
    counters: Mapping[str, int]
    log: RoundLog

    def __post_init__(self) -> None:
        self.buffer_change = torch.zeros_like(self.buffers)  # by methods, beside the weighted sum

    def of(self, method: str, weights: Weights) -> ServerView:
        """The round as one method sees it. weights: so far."""
        cohort = self.cohort
        clients = cohort.kept(cohort.clients)

        def total(vector: str, weights: Weights) -> Tensor:
            return cohort.total("update" if vector == "update" else f"{method}/{vector}", weights)

        def map_features(function: Callable[[Tensor, Tensor, Any], Any], shared: Any = None) -> list[Any]:
            state = torch.cat([self.params, self.buffers])
            return self.scorer.map_features(function, shared, state, self.counters)

        def log(name: str, value: float | Tensor, columns: Sequence[str] = ()) -> None:
            self.log.add(method, name, value, columns, clients)

        return ServerView(
            round_index=self.round_index,
            population=len(self.sizes.examples),
            layout=self.layout,
            clients=clients,
            num_examples=cohort.kept(cohort.reports.num_examples),
            num_steps=cohort.kept(cohort.reports.num_steps),
            class_counts=torch.from_numpy(self.sizes.class_counts[clients.numpy()]),
            start=self.start,
            params=self.params,
            report={key: cohort.kept(values) for key, values in cohort.reports.methods.get(method, {}).items()},
            weights=weights,
            total=total,
            map_updates=cohort.map_updates,
            map_features=map_features,
            validation_loss=self._validation_loss,
            move_buffers=self._move_buffers,
            log=log,
            generator=torch_generator(derive_seed(self.seed, f"server/{method}", self.round_index)),
        )

    def _move_buffers(self, change: Tensor) -> None:
        self.buffer_change += change.float()

    def _validation_loss(self, weights: Weights) -> float:
        total = self.cohort.total("update", weights).float()
        size = self.layout.num_params
        state = torch.cat([self.start + total[:size], self.buffers + total[size:]])
        return self.scorer.scores(state, self.counters, names=["validation"])["validation"].mean_loss


def client_view(
    method: str,
    *,
    client: int,
    round_index: int,
    seed: int,
    num_classes: int,
    settings: LocalSettings,
    model: BoundModel,
    head: str,
    examples: Examples,
    start_state: Tensor,
    message: Mapping[str, Any],
    memory: dict[str, Any],
    batches: Batches,
    validation_gradient: Callable[[str], Tensor],
    validation_loss: Callable[[str], float],
    initial_state: Callable[[], Tensor],
) -> ClientView:
    """A client in a round as one method sees it.

    Args:
      start_state: [num_state], read-only.
      message, memory: that method's own.
      batches, validation_gradient, validation_loss, initial_state: see `ClientView`.
    """
    return ClientView(
        id=client,
        round_index=round_index,
        num_examples=len(examples),
        class_counts=torch.bincount(examples.labels, minlength=num_classes),
        lr=settings.lr_of(round_index),
        momentum=settings.momentum,
        batch_size=settings.batch_size,
        layout=model.layout,
        start=start_state[: model.layout.num_params],
        params=model.params,
        start_state=start_state,
        state=model.state,
        head=head,
        model=model,
        message=message,
        memory=memory,
        generator=torch_generator(derive_seed(seed, f"method/{method}", round_index, client)),
        batches=batches,
        validation_gradient=validation_gradient,
        validation_loss=validation_loss,
        initial_state=initial_state,
    )
