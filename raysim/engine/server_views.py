"""Views of a round for the server's hooks; each view belongs to one method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from raysim.core.method import Batch, Model, ServerView, Value
from raysim.core.seeding import derive_seed, torch_generator
from raysim.core.stack import Stack
from raysim.core.weights import Weights, normalised
from raysim.engine.cohort import Cohort, counters_of
from raysim.engine.messages import Packed, pack, packed_copy
from raysim.engine.scorer import map_features, map_test, validation_gradient, validation_update
from raysim.training.evaluate import Score

if TYPE_CHECKING:
    from raysim.engine.server import Server


@dataclass
class ServerViews:
    """Builds the views of one round at the server.

    A view has the parameters, buffers and counters that the server has when the view is made: before the server step
    the values at the beginning of the round, after the server step the new values.

    Attributes:
      start: [num_params], the broadcast point.
      base: [num_params], the vector to which the round's update is added.
      numbers: numbers that methods logged, by "method/name".
      arrays: arrays that methods logged, by "method.name"; names of the axes are under "method.name:columns" and
        "method.name:clients".
      buffer_change: [num_state - num_params], the methods' changes of the buffers, in addition to the weighted sum.
      best: of the models whose validation loss a method computed, the one with the lowest loss: [num_state] and score.
      gradients: mode -> computed gradient, see `ServerView.validation_gradient`.
    """

    server: Server
    cohort: Cohort
    round_index: int
    start: Tensor
    base: Tensor
    numbers: dict[str, float] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    best: tuple[Tensor, Score] | None = None
    gradients: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.buffer_change = torch.zeros_like(self.server.buffers)
        self._begun = self.server.buffers, self.server.counters  # the server step replaces both

    def base_weights(self, stack: Stack) -> Weights:
        """Return the weights before any `weigh` hook: shares of the examples, or equal shares of the clients."""
        view = self.of("", {})
        # The update of a client without a step is 0: with a weight it would shrink the sum.
        scores = view.is_active.double() * (1 if stack.base_weights == "uniform" else view.num_examples)
        return dict.fromkeys((leaf.name for leaf in self.server.layout.shared), normalised(scores))

    def of(self, method: str, weights: Weights) -> ServerView:
        """Return a method's view of the round. weights: aggregation weights computed so far."""
        server, cohort = self.server, self.cohort
        clients, (_, phase) = cohort.kept(cohort.clients), server.phase_of(self.round_index)

        def total(vector: str, weights: Weights) -> Tensor:
            return cohort.total("update" if vector == "update" else f"{method}/{vector}", weights)

        def on_test(
            call: Callable[..., list[Packed]], function: Callable[..., Value], shared: Value = None
        ) -> list[Value]:
            asked = partial(call, function=function, shared=pack(shared))
            return server.scorer.on_test(asked, server.state, server.counters)

        def on_batches(function: Callable[[Model, Batch, Value], Value], shared: Value = None) -> list[Value]:
            return [*chain(*on_test(map_test, function, shared))]

        return ServerView(
            round_index=self.round_index,
            population=len(server.federation.sizes),
            layout=server.layout,
            clients=clients,
            num_examples=cohort.kept(cohort.reports.num_examples),
            num_steps=cohort.kept(cohort.reports.num_steps),
            class_counts=torch.from_numpy(server.federation.class_counts[clients.numpy()]),
            start=self.start,
            params=server.params,
            report={key: cohort.kept(values) for key, values in cohort.reports.methods.get(method, {}).items()},
            weights=weights,
            total=total,
            map_updates=cohort.map_updates,
            map_columns=cohort.map_columns,
            map_test=on_batches,
            map_features=partial(on_test, map_features),
            validation_loss=self._validation_loss,
            validation_gradient=self._validation_gradient,
            validation_update=self._validation_update,
            move_buffers=self._move_buffers,
            log=partial(self._log, method, clients),
            generator=torch_generator(derive_seed(server.seed, f"server/{method}", self.round_index)),
            staleness=torch.tensor([self.round_index - self._begun_in(client) for client in clients.tolist()]).long(),
            began_at=self._began_at,
            crowd=server.crowd(method),
            cohort_size=phase.cohort_size,
            sampling=phase.sampling,
            num_rounds=server.num_rounds,
        )

    def _log(self, method: str, clients: Tensor, name: str, value: float | Tensor, columns: Sequence[str] = ()) -> None:
        """See `ServerView.log`."""
        if not isinstance(value, Tensor) or not value.dim():
            self.numbers[f"{method}/{name}"] = float(value)
            return
        key = f"{method}.{name}"
        self.arrays[key] = packed_copy(value)
        if columns:
            self.arrays[f"{key}:columns"] = np.array(columns)
        if value.dim() > 1:
            self.arrays[f"{key}:clients"] = clients.numpy()

    def _begun_in(self, client: int) -> int:
        return self.server.turns.begun.get(client, self.round_index)

    def _began_at(self, client: int) -> Tensor:
        """See `ServerView.began_at`."""
        begun = self._begun_in(client)
        if begun == self.round_index:
            return self.start
        return torch.from_numpy(self.server.turns.sent[begun].state[: len(self.start)].copy())

    def _move_buffers(self, change: Tensor) -> None:
        self.buffer_change += change.float()

    def _validation_loss(self, weights: Weights) -> float:
        server, total = self.server, self.cohort.total("update", weights).float()
        size = server.layout.num_params
        state = torch.cat([self.base + total[:size], server.buffers + total[size:]])
        counters = counters_of(self.cohort, server.layout, server.counters)
        score = server.scorer.scores(state, counters, names=["validation"])["validation"]
        if self.best is None or score.loss < self.best[1].loss:
            self.best = state, score
        return score.mean_loss

    def _validation_gradient(self, mode: str) -> Tensor:
        """See `ServerView.validation_gradient`; computed once a round."""
        if mode not in self.gradients:
            batch_size = self.server.phase_of(self.round_index)[1].settings.batch_size
            self.gradients[mode] = self._on_validation(validation_gradient, batch_size=batch_size, mode=mode)
        return self.gradients[mode].clone()

    def _validation_update(self) -> Tensor:
        """See `ServerView.validation_update`."""
        phase_index, phase = self.server.phase_of(self.round_index)
        lr = phase.settings.lr_of(self.round_index)
        return self._on_validation(validation_update, phase_index=phase_index, lr=lr)

    def _on_validation(self, call: Callable[..., list[Packed]], **how: object) -> Tensor:
        """Return [num_params]: the result of `call` at the broadcast point, on the validation set."""
        buffers, counters = self._begun
        seed = derive_seed(self.server.seed, "server/validation", self.round_index)
        asked = partial(call, seed=seed, **how)
        return self.server.scorer.on_validation(asked, torch.cat([self.start, buffers]), counters)

    def validated(self, state: Tensor) -> dict[str, Score]:
        """Return {"validation": score} if the round has computed the score of this model, else an empty dict.

        FedVG's `auto` computes validation losses, and the round ends with the model that has the lowest loss.
        """
        return {"validation": self.best[1]} if self.best and torch.equal(self.best[0], state) else {}
