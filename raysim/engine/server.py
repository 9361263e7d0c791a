"""The server: one round of federated learning, from the cohort to the new global parameters.

A plain class; with Ray it lives in an actor. It sees reports, never all models: sums and maps of updates run where the
updates lie, so its memory does not grow with the cohort.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from raysim.base.direction import is_due
from raysim.base.errors import RaysimError
from raysim.base.texts import round_name
from raysim.base.user_places import user_errors
from raysim.core.layout import Layout
from raysim.core.method import Crowd, State, Value
from raysim.core.stack import Stack
from raysim.core.timetable import Timetable, Turn
from raysim.core.weights import Weights
from raysim.data.federation import Federation
from raysim.engine.cohort import Cohort, counters_of
from raysim.engine.messages import (
    Handle,
    Packed,
    RoundMessage,
    Snapshot,
    TaskResult,
    bytes_down,
    bytes_up,
    pack,
    unpack,
)
from raysim.engine.pool import Pool
from raysim.engine.round_metrics import (
    Evaluation,
    RoundRecord,
    client_columns,
    cohort_metrics,
    evaluation,
    layer_block_weights,
)
from raysim.engine.schedule import Phase, Queues, Turns, assign_blocks, crowd_of, cut_blocks
from raysim.engine.scorer import Scorer
from raysim.engine.server_views import ServerViews
from raysim.training.evaluate import Score
from raysim.training.metrics import Metric
from raysim.training.tasks import CLASSES, Task


@dataclass
class Server:
    """The server: the global state, and the steps of a round.

    Attributes:
      state: [num_state] float32, parameters then buffers.
      phases: phases in order; round indices continue from one phase to the next.
      num_outputs: number of outputs of the model.
      skips_single: whether batches of one example are skipped, as for models with BatchNorm.
      on_nonfinite: "error" ends the run, "skip" drops the client from the round.
      evaluate_every: rounds between evaluations; 0: only after the last round.
      metrics: further metrics of the test set, by name.
      clock: returns seconds, for the metrics system/..._s.
      timetable: simulated time; None: rounds take no simulated time.
    """

    pool: Pool
    layout: Layout
    state: Tensor
    phases: Sequence[Phase]
    federation: Federation
    num_outputs: int
    seed: int
    skips_single: bool
    on_nonfinite: str = "error"
    evaluate_every: int = 1
    evaluation_batch: int = 256
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    task: Task = CLASSES
    clock: Callable[[], float] = time.perf_counter
    timetable: Timetable | None = None
    counters: dict[str, int] = field(default_factory=dict)
    method_state: dict[str, State] = field(default_factory=dict)
    _memories: dict[int, Handle] = field(default_factory=dict)
    _changed: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        counts = {"validation": self.federation.num_validation, "test": self.federation.num_test}
        counts |= {f"test-{name}": count for name, count in self.federation.test_sets.items()}
        if self.federation.unseen_sizes is not None:
            counts["unseen"] = int(self.federation.unseen_sizes.sum())
        self.scorer = Scorer(self.pool, counts, self.evaluation_batch)
        self.turns = Turns(self.seed, len(self.federation.sizes), self.timetable)
        for phase in self.phases:
            self.method_state |= phase.stack.init(self.params, self.layout)

    @property
    def params(self) -> Tensor:
        """Return the global parameters [num_params]."""
        return self.state[: self.layout.num_params]

    @property
    def buffers(self) -> Tensor:
        """Return the global float buffers [num_state - num_params]."""
        return self.state[self.layout.num_params :]

    @property
    def num_rounds(self) -> int:
        return sum(phase.rounds for phase in self.phases)

    @user_errors()
    def run_round(self, round_index: int) -> RoundRecord:
        """Run a round: broadcast, local training of a cohort, weights, exact sum, server step, evaluation.

        Raises:
          ClientError: a client failed. UserCodeError: the user's own code failed at the server. RaysimError: a
            non-finite update with on_nonfinite="error".
        """
        began = self.clock()
        phase_index, phase = self.phase_of(round_index)
        message, start = self._broadcast(round_index, phase_index)
        turn = self.turns.next(
            phase,
            message,
            steps_of=partial(self._num_steps, phase, round_index),
            down=partial(bytes_down, message, self.layout),
            up=partial(self._measured_bytes, phase, message),
        )
        cohort = self._trained(phase, message, start, turn)
        self._commit_memories(cohort)
        trained = self.clock()
        # The update is added to the broadcast point, which a method may have moved (FedACG). If the broadcast was only
        # encoded for the downlink, the update is added to the global model.
        base = start if message.params_bytes is None else self.params
        views = ServerViews(self, cohort, round_index, start, base)
        weights = phase.stack.weigh(views.base_weights(phase.stack), views.of)
        self._apply_weights(phase.stack, views, weights)
        aggregated = self.clock()
        scores, confusion = self._evaluate(phase.stack, views, weights) if self._is_due(round_index) else ({}, None)
        ended = self.clock()
        metrics = cohort_metrics(cohort, message, self.layout, self.federation, self.task, num_late=turn.num_late)
        metrics |= scores | cohort.logged | views.numbers
        metrics |= self.turns.metrics(turn, round_index)
        metrics |= {
            "system/round_s": ended - began,
            "system/train_s": trained - began,
            "system/aggregate_s": aggregated - trained,
            "system/evaluate_s": ended - aggregated,
            **{f"system/{name}": count for name, count in self.pool.take_counts().items()},
        }
        columns = client_columns(cohort, weights, self.layout)
        picture = layer_block_weights(cohort, weights, self.layout)
        return RoundRecord(round_index, metrics, columns, picture, views.arrays, confusion, self.pool.take_notes())

    def phase_of(self, round_index: int) -> tuple[int, Phase]:
        """Return (index of a round's phase, phase)."""
        for index, phase in enumerate(self.phases):
            if round_index < phase.rounds:
                return index, phase
            round_index -= phase.rounds
        raise IndexError("round beyond the last phase")

    def _broadcast(self, round_index: int, phase_index: int) -> tuple[RoundMessage, Tensor]:
        """Return (message to the clients, broadcast point [num_params])."""
        # A copy, so that a hook that writes to its message does not change the global model.
        start, fields, num_bytes = self.phases[phase_index].stack.broadcast(self.params.clone(), self.method_state)
        state = torch.cat([start, self.buffers])
        message = RoundMessage(
            round_index=round_index,
            phase_index=phase_index,
            state=pack(state),
            counters=dict(self.counters),
            fields=pack(fields),
            is_scored=self.federation.num_test > 0 and self._is_due(round_index),
            params_bytes=num_bytes,
        )
        return message, state[: self.layout.num_params]

    def _measured_bytes(self, phase: Phase, message: RoundMessage) -> int:
        """Return the bytes that a client sends in a phase, measured by training client 0, whose results are dropped."""
        queues = self._queues(phase, message.round_index, np.zeros(1, np.int64))
        (result,) = self.pool.train(replace(message, is_scored=False), queues, self._memories)
        return bytes_up(result.reports, self.layout)

    def _trained(self, phase: Phase, message: RoundMessage, start: Tensor, turn: Turn) -> Cohort:
        """Train the clients, each from the model that the client received; latecomers train after the other clients."""
        round_index, clients = message.round_index, turn.clients
        is_nobody = not len(clients)
        if is_nobody:  # the round has a server step all the same: client 0 trains and is dropped
            clients = np.zeros(1, np.int64)
        begun = np.array([self.turns.begun.get(client, round_index) for client in clients.tolist()])
        late = phase.stack.latecomers(torch.from_numpy(clients), self.crowd).numpy()
        results: list[TaskResult] = []
        logged: dict[str, float] = {}
        for index in np.unique(begun[~late]).tolist():
            some = clients[~late & (begun == index)]
            queues = self._queues(phase, index, some, first=sum(len(one.reports.client) for one in results))
            results += self.pool.train(self.turns.message_for(message, index), queues, self._memories)
        if late.any():
            overheard: dict[str, Mapping[str, Value]] = {}
            if results:
                others = self._sound(results, round_index)
                views = ServerViews(self, others, round_index, start, start)
                weights = views.base_weights(phase.stack)
                overheard = phase.stack.overhear(lambda method: views.of(method, weights))
                logged = views.numbers
            message = replace(message, overheard=pack(overheard))
            queues = self._queues(phase, round_index, clients[late], first=len(clients))
            results += self.pool.train(message, queues, self._memories)
        cohort = self._sound(results, round_index)
        cohort.logged = logged
        if is_nobody:
            cohort.drop(np.ones(1, bool))
        return cohort

    def crowd(self, method: str) -> Crowd:
        """Return all clients, for a method that draws a fixed subset."""
        return crowd_of(method, len(self.federation.sizes), self.seed)

    def _sound(self, results: Sequence[TaskResult], round_index: int) -> Cohort:
        """Return the cohort of some results, without clients with non-finite updates."""
        cohort = Cohort(results, self.pool, self.layout)
        # Before weights are computed: one NaN in a report would make every weight NaN.
        cohort.drop_nonfinite(round_index, skips=self.on_nonfinite == "skip")
        return cohort

    def _queues(self, phase: Phase, round_index: int, clients: np.ndarray, first: int = 0) -> Queues:
        """Cut clients into client blocks, numbered from `first`, and assign tasks to trainers."""
        # One more than the steps: a client without steps is also loaded and reports.
        work = [1 + self._num_steps(phase, round_index, client) for client in clients.tolist()]
        # The number of trainers is used only here, after the blocks are cut: no result may depend on it.
        blocks = cut_blocks(clients.tolist(), work, first, least_clients=phase.least_clients)
        return assign_blocks(blocks, self.pool.begin_round())

    def _num_steps(self, phase: Phase, round_index: int, client: int) -> int:
        return phase.num_steps(client, int(self.federation.sizes[client]), self.skips_single, self.seed, round_index)

    def _commit_memories(self, cohort: Cohort) -> None:
        """Store the clients' new memories once all results have arrived; a dropped client keeps the old memory."""
        for client, memory in cohort.memories():
            self._memories[client] = memory
            self._changed.add(client)

    def _apply_weights(self, stack: Stack, views: ServerViews, weights: Weights) -> None:
        """Apply the aggregation weights: exact weighted sum, server updates of the methods, new global state."""
        cohort, size = views.cohort, self.layout.num_params
        # sum_k weights[k] * update_k, by `training.aggregate.fold`; the sum in float64 is freed at once.
        total = cohort.total("update", weights).float()
        update, self.method_state = stack.server_update(
            total[:size], self.method_state, lambda method: views.of(method, weights)
        )
        state = torch.cat([views.base, self.buffers])
        state[:size] += update
        state[size:] += total[size:]
        state[size:] += views.buffer_change
        _check_finite(state, stack, views.round_index)
        self.state = state
        self.counters = counters_of(cohort, self.layout, self.counters)

    def _evaluate(self, stack: Stack, views: ServerViews, weights: Weights) -> Evaluation:
        """Score the new global model, with the methods' `evaluation_override`, on all held-out sets."""
        override = stack.evaluation_override(self.method_state, lambda method: views.of(method, weights))
        return self._scored(override, {} if override else views.validated(self.state))

    def evaluate(self) -> dict[str, float]:
        """Return the metrics of the global model on the held-out sets."""
        return self._scored({}, {})[0]

    def _scored(self, override: Mapping[str, Tensor], computed: Mapping[str, Score]) -> Evaluation:
        scores = self.scorer.scores(self.state, self.counters, override, computed)
        return evaluation(scores, self.federation, self.num_outputs, self.metrics, self.task)

    def _is_due(self, round_index: int) -> bool:
        """Return whether a round is evaluated: every `evaluate_every`-th round, and the last."""
        return is_due(round_index + 1, self.evaluate_every, self.num_rounds)

    def snapshot(self) -> Snapshot:
        """Return everything of the server that later rounds depend on, without client memory."""
        return Snapshot(pack(self.state), dict(self.counters), pack(self.method_state), self.turns.state())

    def restore(self, snapshot: Snapshot) -> None:
        """Restore a snapshot; client memories are restored by `restore_memory`."""
        self.state = unpack(snapshot.state)
        self.counters = dict(snapshot.counters)
        self.method_state = unpack(dict(snapshot.methods))
        self.turns.restore(snapshot.turns)

    def restore_memory(self, client: int, memory: Packed) -> None:
        """Restore the packed memory of one client."""
        # Trainers fetch the memory from the pool; the server never reads it.
        self._memories[client] = self.pool.put(memory)

    def changed_clients(self) -> list[int]:
        """Return the clients whose memory changed since the last call."""
        # The set is emptied, so that a memory is written once for each change, not in every checkpoint.
        changed, self._changed = sorted(self._changed), set()
        return changed

    def client_memory(self, client: int) -> Packed:
        """Return the packed memory of one client."""
        return self.pool.get(self._memories[client])

    def ready(self) -> bool:
        """Wait for the trainers; return True."""
        return self.pool.begin_round() > 0

    def params_sha256(self) -> str:
        """Return the SHA-256 of names, shapes and values of all leaves. Equal digests mean the same result."""
        digest = hashlib.sha256()
        for name, value in self.layout.views(self.state).items():
            digest.update(f"{name}{tuple(value.shape)}".encode())
            # Contiguous: the order of values in the vector (channels-last) may differ between machines.
            digest.update(value.contiguous().numpy().tobytes())
        return digest.hexdigest()


def _check_finite(state: Tensor, stack: Stack, round_index: int) -> None:
    """Raise RaysimError if a global state [num_state] has an infinite entry or NaN."""
    if all(math.isfinite(extreme) for extreme in state.aminmax()):  # `isfinite` would need the memory of two states
        return
    names = [method.name for method in stack.methods if method.server_update or method.weigh]
    text = f"the new global model is not finite (server methods: {', '.join(names) or 'none'})"
    raise RaysimError(text, round_name(round_index), "lower the method's server_lr, or local.lr")
