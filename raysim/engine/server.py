"""The server: one round of federated learning, from the cohort to the new global parameters.

A plain class; with Ray it lives in an actor. It sees reports, never all models: sums and maps of updates run where the
updates lie, so its memory does not grow with the cohort.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raysim.core.errors import RaysimError
from raysim.core.layout import Layout
from raysim.core.method import State
from raysim.core.stack import Stack
from raysim.core.weights import RightMap, Weights, normalised
from raysim.engine.cohort import Cohort
from raysim.engine.messages import RoundMessage, Snapshot
from raysim.engine.metrics import RoundRecord, block_weights, client_columns, cohort_metrics
from raysim.engine.plan import Phase, assign, choose_cohort, cut_blocks, reporting
from raysim.engine.pool import Pool
from raysim.engine.scorer import Scorer
from raysim.engine.scores import FederationSizes, evaluation
from raysim.engine.transport import pack, unpack
from raysim.engine.views import RoundLog, ServerViews
from raysim.training.metrics import Metric


@dataclass
class Server:
    """Global state and the round.

    Attributes:
      state: [num_state] float32, parameters then buffers.
      phases: run one after the other; their rounds are numbered through.
      skips_single: BatchNorm cannot train on one example, so such batches are no steps.
      on_nonfinite: "error" stops the run, "skip" drops the client from the round.
      evaluate_every: rounds between evaluations; 0: only after the last.
      metrics: further metrics of the test set, by name.
    """

    pool: Pool
    layout: Layout
    state: Tensor
    phases: Sequence[Phase]
    sizes: FederationSizes
    seed: int
    skips_single: bool
    on_nonfinite: str = "error"
    evaluate_every: int = 1
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    method_state: dict[str, State] = field(default_factory=dict)
    _memories: dict[int, Any] = field(default_factory=dict)
    _changed: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        counts = {"validation": self.sizes.num_validation, "test": self.sizes.num_test}
        counts |= {f"test-{name}": count for name, count in self.sizes.test_sets.items()}
        self.scorer = Scorer(self.pool, counts)
        for phase in self.phases:
            self.method_state |= phase.stack.init(self.params, self.layout)

    @property
    def params(self) -> Tensor:
        """[num_params]: the global parameters."""
        return self.state[: self.layout.num_params]

    @property
    def buffers(self) -> Tensor:
        """[num_state - num_params]: the global float buffers."""
        return self.state[self.layout.num_params :]

    @property
    def num_rounds(self) -> int:
        return sum(phase.rounds for phase in self.phases)

    def run_round(self, round_index: int) -> RoundRecord:
        """Broadcast, local training of a cohort, weighing, exact sum, server update, evaluation.

        Raises:
          ClientError: a client failed. RaysimError: a non-finite update with on_nonfinite="error".
        """
        began = time.perf_counter()
        phase_index, phase = self._phase_of(round_index)
        message, start = self._broadcast(round_index, phase_index)
        cohort = self._train(message, phase)
        trained = time.perf_counter()
        views = self._views(cohort, round_index, start)
        weights = self._weigh(phase.stack, views)
        self._move(phase.stack, views, weights)
        aggregated = time.perf_counter()
        scores, confusion = self._evaluate(phase.stack, views, weights) if self._is_due(round_index) else ({}, None)
        ended = time.perf_counter()
        metrics = cohort_metrics(cohort, message, self.layout, self.sizes) | scores | views.log.numbers
        metrics |= {
            "system/round_s": ended - began,
            "system/train_s": trained - began,
            "system/aggregate_s": aggregated - trained,
            "system/evaluate_s": ended - aggregated,
            **{f"system/{name}": float(count) for name, count in asdict(self.pool.take_counts()).items()},
        }
        columns, picture = client_columns(cohort, weights, self.layout), block_weights(cohort, weights, self.layout)
        return RoundRecord(round_index, metrics, columns, picture, views.log.arrays, confusion)

    # --- the parts of a round -----------------------------------------------------------------------------------------

    def _phase_of(self, round_index: int) -> tuple[int, Phase]:
        for index, phase in enumerate(self.phases):
            if round_index < phase.rounds:
                return index, phase
            round_index -= phase.rounds
        raise IndexError("round beyond the last phase")

    def _broadcast(self, round_index: int, phase_index: int) -> tuple[RoundMessage, Tensor]:
        """The downlink, and the broadcast point [num_params]."""
        start, fields = self.phases[phase_index].stack.broadcast(self.params.clone(), self.method_state)
        message = RoundMessage(
            round_index=round_index,
            phase_index=phase_index,
            state=pack(torch.cat([start, self.buffers])),
            counters=dict(self.counters),
            fields=pack(fields),
            is_scored=self.sizes.num_test > 0 and self._is_due(round_index),
        )
        return message, start

    def _train(self, message: RoundMessage, phase: Phase) -> Cohort:
        """Choose a cohort, train it on the pool, and keep what its clients want to remember."""
        round_index = message.round_index
        clients = choose_cohort(len(self.sizes.examples), phase.cohort_size, seed=self.seed, round_index=round_index)
        clients = reporting(clients, phase.dropout, seed=self.seed, round_index=round_index)
        work = [
            1 + phase.num_steps(client, int(self.sizes.examples[client]), self.skips_single, self.seed, round_index)
            for client in clients.tolist()
        ]
        queues = assign(cut_blocks(clients.tolist(), work), self.pool.begin_round())
        cohort = Cohort(list(self.pool.train(message, queues, self._memories)), self.pool, self.layout)
        self._drop_nonfinite(cohort, round_index)
        self._commit_memories(cohort)
        return cohort

    def _drop_nonfinite(self, cohort: Cohort, round_index: int) -> None:
        is_bad = cohort.has_nonfinite_update()
        if is_bad.any() and self.on_nonfinite == "error":
            bad = cohort.clients[is_bad].tolist()
            raise RaysimError(
                f"non-finite update of client {', '.join(map(str, bad[:5]))}{' ...' if len(bad) > 5 else ''}",
                f"round {round_index}",
                "lower local.lr, or set on_nonfinite to skip to leave such clients out of the round",
            )
        cohort.drop(is_bad)

    def _commit_memories(self, cohort: Cohort) -> None:
        """Keep what clients want to remember; a dropped client keeps what it had before."""
        kept = set(cohort.clients[cohort.is_kept].tolist())
        for result in cohort.results:
            if not result.memories:
                continue
            for client, memory in zip(result.reports.client.tolist(), result.memories, strict=True):
                if client in kept and memory is not None:
                    self._memories[client] = memory
                    self._changed.add(client)

    def _views(self, cohort: Cohort, round_index: int, start: Tensor) -> ServerViews:
        return ServerViews(
            cohort=cohort,
            scorer=self.scorer,
            layout=self.layout,
            sizes=self.sizes,
            seed=self.seed,
            round_index=round_index,
            start=start,
            buffers=self.buffers,
            params=self.params,
            counters=self.counters,
            log=RoundLog(),
        )

    def _weigh(self, stack: Stack, views: ServerViews) -> Weights:
        """The final aggregation weights of every shared leaf."""
        view = views.of("", {})
        is_active = view.is_active
        scores = is_active.double() if stack.base_weights == "uniform" else view.num_examples.double() * is_active
        weights: Weights = dict.fromkeys((leaf.name for leaf in self.layout.shared), normalised(scores))
        weights = stack.weigh(weights, views.of)
        _check_weights(weights, self.layout, len(view.clients))
        return weights

    def _move(self, stack: Stack, views: ServerViews, weights: Weights) -> None:
        """The exact weighted sum, the methods' server updates, the new global state."""
        cohort, size = views.cohort, self.layout.num_params
        total = cohort.total("update", weights)
        update, self.method_state = stack.server_update(
            total[:size].float(), self.method_state, lambda method: views.of(method, weights)
        )
        # The update is added to the broadcast point, which only a "broadcast-point" method moves away from w.
        buffers = self.buffers + total[size:].float()
        self.state = torch.cat([views.start + update, buffers + views.buffer_change])
        if cohort.is_kept.any():
            counters = cohort.reports.counters
            self.counters = {name: int(cohort.kept(values).max()) for name, values in counters.items()}

    def _evaluate(
        self, stack: Stack, views: ServerViews, weights: Weights
    ) -> tuple[dict[str, float], np.ndarray | None]:
        """Score the new global model, as the methods want it scored, on all held-out sets."""
        views.params, views.buffers, views.counters = self.params, self.buffers, self.counters
        override = stack.evaluation_override(self.method_state, lambda method: views.of(method, weights))
        return evaluation(self.scorer.scores(self.state, self.counters, override), self.sizes, self.metrics)

    def evaluate(self) -> dict[str, float]:
        """Metrics of the global model on the held-out sets."""
        return evaluation(self.scorer.scores(self.state, self.counters), self.sizes, self.metrics)[0]

    def _is_due(self, round_index: int) -> bool:
        """Whether this round is one to evaluate: every so many, and the last."""
        is_due = self.evaluate_every > 0 and (round_index + 1) % self.evaluate_every == 0
        return is_due or round_index + 1 == self.num_rounds

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Everything of the server that a later round depends on, without client memory."""
        return Snapshot(pack(self.state), dict(self.counters), pack(self.method_state))

    def restore(self, snapshot: Snapshot) -> None:
        """Continue from a snapshot; client memories follow one by one."""
        self.state = unpack(snapshot.state)
        self.counters = dict(snapshot.counters)
        self.method_state = unpack(dict(snapshot.methods))

    def restore_memory(self, client: int, memory: Any) -> None:
        """Put back the packed memory of one client."""
        self._memories[client] = self.pool.put(memory)

    def changed_clients(self) -> list[int]:
        """Clients whose memory changed since this was last asked."""
        changed, self._changed = sorted(self._changed), set()
        return changed

    def client_memory(self, client: int) -> Any:
        """Packed memory of one client."""
        return self.pool.get(self._memories[client])

    def ready(self) -> bool:
        """True once the trainers are there."""
        return self.pool.begin_round() > 0

    def params_sha256(self) -> str:
        """SHA-256 over name, shape and values of every leaf: what "the same result" means."""
        return state_sha256(self.layout, self.state)


def state_sha256(layout: Layout, state: Tensor) -> str:
    """Digest of a state vector, whatever the order of leaves in memory."""
    digest = hashlib.sha256()
    for name, value in layout.views(state).items():
        digest.update(f"{name}{tuple(value.shape)}".encode())
        digest.update(value.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _check_weights(weights: Mapping[str, Tensor | RightMap], layout: Layout, count: int) -> None:
    """A hook's slip becomes an error that names the leaf, not a silent broadcast."""
    for name, weight in weights.items():
        if name not in layout.by_name:
            raise RaysimError(
                f"a weigh hook returned weights for {name!r}, which is no leaf",
                "weigh",
                f"leaves: {', '.join(list(layout.by_name)[:8])} ...",
            )
        values = weight.maps if isinstance(weight, RightMap) else weight
        if values.shape[:1] != (count,) or values.dtype != torch.float64:
            raise RaysimError(
                f"weights of {name} have shape {tuple(values.shape)} and {values.dtype}",
                "weigh",
                f"return float64 with {count} clients first",
            )
        if not bool(torch.isfinite(values).all()):
            raise RaysimError(f"weights of {name} are not finite", "weigh", "give such a client weight 0")
