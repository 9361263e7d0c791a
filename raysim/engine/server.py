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
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raysim.core import method as core
from raysim.core.errors import RaysimError
from raysim.core.layout import Layout
from raysim.core.method import Message
from raysim.core.seeding import derive_seed, torch_generator
from raysim.core.weights import RightMap, Weights, normalised, take
from raysim.engine.plan import assign, choose_cohort, cut_blocks, reporting
from raysim.engine.pool import Pool, TaskResult
from raysim.engine.scores import Facts, asked_metrics, confusion_of, metrics_of, personal_metrics
from raysim.engine.trainer import Phase
from raysim.engine.transport import num_bytes, pack, readonly_tensor, unpack
from raysim.training.aggregate import rounding_constants
from raysim.training.evaluate import Score, joined
from raysim.training.local import num_local_steps
from raysim.training.metrics import Metric

EVALUATION_SLICE = 2048


@dataclass(frozen=True)
class RoundRecord:
    """What a round leaves behind: metrics (tag -> number), a column per client fact, and the weights as a picture."""

    round_index: int
    metrics: dict[str, float]
    clients: dict[str, np.ndarray]
    weights: np.ndarray
    """(K, num_blocks) float64: mean weight of each client in each layer block."""
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    """What methods logged: `method.name`, and `:columns`, `:clients` that name its axes."""
    confusion: np.ndarray | None = None
    """(classes, classes) int64: test examples by true class (row) and predicted class, in rounds that are evaluated."""


class Cohort:
    """The task results of one round, seen as K clients in ascending order, without those that were dropped."""

    def __init__(self, results: Sequence[TaskResult]):
        self.results = tuple(results)
        ids = np.concatenate([result.report["client"] for result in results])
        owner = np.concatenate([np.full(len(r.report["client"]), i) for i, r in enumerate(results)])
        row = np.concatenate([np.arange(len(r.report["client"])) for r in results])
        order = np.argsort(ids)
        self.clients, self._owner, self._row = ids[order], owner[order], row[order]
        self.report: dict[str, Any] = _merge([result.report for result in results], order)
        self.is_kept = np.ones(len(ids), bool)

    def drop(self, is_bad: np.ndarray) -> None:
        """Leave clients out of everything that follows."""
        self.is_kept &= ~is_bad

    def kept(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array[self.is_kept]))

    def parts(self) -> list[tuple[TaskResult, np.ndarray, Tensor]]:
        """(result, kept rows in it, their positions among the K kept clients) for each task result."""
        position = np.cumsum(self.is_kept) - 1
        parts = []
        for index, result in enumerate(self.results):
            mine = np.flatnonzero((self._owner == index) & self.is_kept)
            if len(mine):
                mine = mine[np.argsort(self._row[mine])]
                parts.append((result, self._row[mine], torch.from_numpy(position[mine])))
        return parts


@dataclass
class Server:
    """Global state and the round.

    Attributes:
      state: [num_state] float32, parameters then buffers.
      phases: run one after the other; their rounds are numbered through.
      on_nonfinite: "error" stops the run, "skip" drops the client from the round.
      metrics: further metrics of the test set, by name.
      frozen: parameter name -> by how much a frozen parameter was moved since it was built (LIVAR's fold).
    """

    pool: Pool
    layout: Layout
    state: Tensor
    phases: Sequence[Phase]
    facts: Facts
    seed: int
    skips_single: bool
    on_nonfinite: str = "error"
    evaluate_every: int = 1
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    method_state: dict[str, core.State] = field(default_factory=dict)
    frozen: dict[str, Tensor] = field(default_factory=dict)
    _memories: dict[int, Any] = field(default_factory=dict)
    _changed: set[int] = field(default_factory=set)
    _numbers: dict[str, float] = field(default_factory=dict)
    _arrays: dict[str, np.ndarray] = field(default_factory=dict)
    _confusion: np.ndarray | None = None

    def __post_init__(self) -> None:
        for phase in self.phases:
            for method in phase.methods:
                if method.init is not None:
                    self.method_state[method.name] = method.init(self.params.clone(), self.layout)

    @property
    def params(self) -> Tensor:
        """[num_params]: the global parameters."""
        return self.state[: self.layout.num_params]

    @property
    def num_rounds(self) -> int:
        return sum(phase.rounds for phase in self.phases)

    def run_round(self, round_index: int) -> RoundRecord:
        """Cohort, broadcast, local training, weighing, exact sum, server update, evaluation.

        Raises:
          ClientError: a client failed. RaysimError: a non-finite update with on_nonfinite="error".
        """
        began = time.perf_counter()
        phase_index, phase = self._phase_of(round_index)
        clients = choose_cohort(len(self.facts.sizes), phase.cohort_size, seed=self.seed, round_index=round_index)
        clients = reporting(clients, phase.dropout, seed=self.seed, round_index=round_index)
        work = [1 + self._num_steps(client, phase, round_index) for client in clients.tolist()]
        queues = assign(cut_blocks(clients.tolist(), work), self.pool.begin_round())
        self._numbers, self._arrays, self._confusion = {}, {}, None
        message, start = self._message(round_index, phase_index)
        results = list(self.pool.train(message, queues, self._memories))
        trained = time.perf_counter()
        cohort = Cohort(results)
        self._drop_nonfinite(cohort, round_index)
        self._commit_memories(cohort)
        weights = self._aggregate(cohort, phase, round_index, start)
        aggregated = time.perf_counter()
        metrics = self._metrics(cohort, message)
        if self._is_due(round_index):
            metrics |= self.evaluate(self._evaluated(cohort, phase, round_index, start, weights))
        metrics |= self._numbers
        ended = time.perf_counter()
        metrics |= {
            "system/round_s": ended - began,
            "system/train_s": trained - began,
            "system/aggregate_s": aggregated - trained,
            "system/evaluate_s": ended - aggregated,
            **{f"system/{name}": float(count) for name, count in self.pool.take_counts().items()},
        }
        columns, picture = self._client_columns(cohort, weights), self._picture(cohort, weights)
        return RoundRecord(round_index, metrics, columns, picture, self._arrays, self._confusion)

    # --- the parts of a round -----------------------------------------------------------------------------------------

    def _num_steps(self, client: int, phase: Phase, round_index: int) -> int:
        share = phase.share_of(client, self.seed, round_index)
        size = int(self.facts.sizes[client])
        return num_local_steps(size, phase.settings, skip_single=self.skips_single, share=share)

    def _phase_of(self, round_index: int) -> tuple[int, Phase]:
        for index, phase in enumerate(self.phases):
            if round_index < phase.rounds:
                return index, phase
            round_index -= phase.rounds
        raise IndexError("round beyond the last phase")

    def _message(self, round_index: int, phase_index: int) -> tuple[dict[str, Any], Tensor]:
        """The downlink, packed, and the broadcast point [num_params]."""
        params, fields = self.params.clone(), {}
        for method in self.phases[phase_index].methods:
            if method.broadcast is not None:
                message = method.broadcast(Message(params, {}), self.method_state.get(method.name, {}))
                params, fields[method.name] = message.params, pack(dict(message.fields))
        state = torch.cat([params, self.state[self.layout.num_params :]])
        packed = {
            "round": round_index,
            "phase": phase_index,
            "state": pack(state),
            "counters": dict(self.counters),
            "fields": fields,
            "frozen": pack(self.frozen),
            "is_scored": self.facts.num_test > 0 and self._is_due(round_index),
        }
        return packed, params

    def _commit_memories(self, cohort: Cohort) -> None:
        """Keep what clients want to remember; a dropped client keeps what it had before."""
        kept = set(cohort.clients[cohort.is_kept].tolist())
        for result in cohort.results:
            if not result.memories:
                continue
            for client, memory in zip(result.report["client"].tolist(), result.memories, strict=True):
                if client in kept and memory is not None:
                    self._memories[client] = memory
                    self._changed.add(client)

    def _drop_nonfinite(self, cohort: Cohort, round_index: int) -> None:
        is_bad = np.zeros(len(cohort.clients), bool)
        for peaks in cohort.report["peaks"].values():
            is_bad |= ~np.isfinite(peaks).all(axis=1)
        if is_bad.any() and self.on_nonfinite == "error":
            bad = cohort.clients[is_bad].tolist()
            raise RaysimError(
                f"non-finite update of client {', '.join(map(str, bad[:5]))}{' ...' if len(bad) > 5 else ''}",
                f"round {round_index}",
                "lower local.lr, or set on_nonfinite to skip to leave such clients out of the round",
            )
        cohort.drop(is_bad)

    def _aggregate(self, cohort: Cohort, phase: Phase, round_index: int, start: Tensor) -> Weights:
        """Weights, the exact sum, and the server update; moves the global state and returns the weights."""
        view = self._view(cohort, round_index, start)
        is_uniform = any(method.base_weights == "uniform" for method in phase.methods)
        active = view.is_active.double() if is_uniform else view.num_examples.double() * view.is_active
        weights: Weights = dict.fromkeys((leaf.name for leaf in self.layout.shared), normalised(active))
        for method in phase.methods:
            if method.weigh is not None:
                weights = method.weigh(weights, self._view_for(view, method.name, cohort, weights))
        _check_weights(weights, self.layout, len(view.clients))
        total = self._total(cohort, "update", weights)
        self._buffer_change = torch.zeros(self.layout.num_state - self.layout.num_params)
        update = total[: self.layout.num_params].float()
        for method in phase.methods:
            if method.server_update is not None:
                state = self.method_state.get(method.name, {})
                own = self._view_for(view, method.name, cohort, weights)
                update, self.method_state[method.name] = method.server_update(update, state, own)
        # Δ is added to the broadcast point, which only a "broadcast-point" method moves away from w.
        self.state = torch.cat([start + update, self._moved_buffers(total) + self._buffer_change])
        counters = cohort.report["counters"]
        if cohort.is_kept.any():
            self.counters = {name: int(cohort.kept(values).max()) for name, values in counters.items()}
        return weights

    def _evaluated(
        self, cohort: Cohort, phase: Phase, round_index: int, start: Tensor, weights: Weights
    ) -> dict[str, Tensor]:
        """What the methods put in the place of leaves while the model of this round is scored."""
        view = self._view(cohort, round_index, start)
        tensors: dict[str, Tensor] = {}
        for method in phase.methods:
            if method.evaluated is not None:
                own = self._view_for(view, method.name, cohort, weights)
                tensors |= method.evaluated(self.method_state.get(method.name, {}), own)
        return tensors

    def _move_buffers(self, change: Tensor) -> None:
        self._buffer_change += change.float()

    def _move_frozen(self, name: str, change: Tensor) -> None:
        moved = change.float()
        self.frozen = {**self.frozen, name: self.frozen[name] + moved if name in self.frozen else moved}

    def _moved_buffers(self, total: Tensor) -> Tensor:
        return self.state[self.layout.num_params :] + total[self.layout.num_params :].float()

    def _validation_loss(self, cohort: Cohort, start: Tensor, weights: Weights) -> float:
        """Loss on the validation set of the model that these weights alone would give."""
        total = self._total(cohort, "update", weights)
        state = torch.cat([start + total[: self.layout.num_params].float(), self._moved_buffers(total)])
        return self._scores({"validation": self.facts.num_validation}, self._point(state))["validation"].mean_loss

    def _view(self, cohort: Cohort, round_index: int, start: Tensor) -> core.Server:
        clients = cohort.kept(cohort.clients)

        def map_updates(function: Callable[[Tensor, Any], Any], shared: Any = None) -> list[Any]:
            parts = cohort.parts()
            answers = self.pool.map_updates(function, pack(shared), [(result, rows) for result, rows, _ in parts])
            ordered: list[Any] = [None] * len(clients)
            for (_, _, positions), values in zip(parts, answers, strict=True):
                for position, value in zip(positions.tolist(), values, strict=True):
                    ordered[position] = unpack(value)
            return ordered

        return core.Server(
            round_index=round_index,
            population=len(self.facts.sizes),
            layout=self.layout,
            clients=clients,
            num_examples=cohort.kept(cohort.report["num_examples"]),
            num_steps=cohort.kept(cohort.report["num_steps"]),
            class_counts=torch.from_numpy(self.facts.class_counts[clients.numpy()]),
            start=start,
            params=self.params,
            report={},
            weights={},
            total=lambda name, weights: self._total(cohort, name, weights),
            map_updates=map_updates,
            map_features=self._map_features,
            validation_loss=lambda weights: self._validation_loss(cohort, start, weights),
            move_buffers=self._move_buffers,
            move_frozen=self._move_frozen,
            log=_log_nothing,
            generator=torch_generator(0),
        )

    def _view_for(self, view: core.Server, name: str, cohort: Cohort, weights: Weights) -> core.Server:
        """The same round as one method sees it: its own reports and Vectors, the weights so far."""

        def total(vector: str, weights: Weights) -> Tensor:
            return view.total("update" if vector == "update" else f"{name}/{vector}", weights)

        def log(what: str, value: float | Tensor, columns: Sequence[str] = ()) -> None:
            if isinstance(value, Tensor) and value.dim():
                key = f"{name}.{what}"
                self._arrays[key] = value.detach().cpu().numpy()
                if columns:
                    self._arrays[f"{key}:columns"] = np.array(columns)
                if value.dim() > 1:
                    self._arrays[f"{key}:clients"] = view.clients.numpy()
            else:
                self._numbers[f"{name}/{what}"] = float(value)

        report = cohort.report["methods"].get(name, {})
        kept = {key: cohort.kept(values) for key, values in report.items()}
        generator = torch_generator(derive_seed(self.seed, f"server/{name}", view.round_index))
        return replace(view, report=kept, weights=weights, total=total, log=log, generator=generator)

    def _total(self, cohort: Cohort, name: str, weights: Weights) -> Tensor:
        """Exact weighted sum of a vector over the cohort: [num_state] for the update, else [num_params], float64."""
        peaks = cohort.kept(cohort.report["peaks"][name]) if name in cohort.report["peaks"] else torch.zeros(0, 0)
        size = self.layout.num_state if name == "update" else self.layout.num_params
        total = torch.zeros(size, dtype=torch.float64)
        parts = cohort.parts()
        if not parts:
            return total
        constants = rounding_constants(self.layout, weights, peaks)
        asked = [(result, pack(take(weights, positions)), rows) for result, rows, positions in parts]
        for partial in self.pool.fold(name, asked, pack(constants)):
            total += readonly_tensor(partial)
        return total

    # --- what is reported ---------------------------------------------------------------------------------------------

    def _metrics(self, cohort: Cohort, message: dict[str, Any]) -> dict[str, float]:
        report = cohort.report
        count = len(cohort.clients)
        up = num_bytes(report["methods"]) + sum(
            count * (self.layout.shared_bytes if name == "update" else 4 * self.layout.num_params)
            for name in report["peaks"]
        )
        down = count * (self.layout.shared_bytes + num_bytes(message["fields"]) + num_bytes(message["frozen"]))
        steps = report["num_steps"][cohort.is_kept]
        losses = report["train_loss"][cohort.is_kept]
        personal: dict[str, float] = {}
        if "personal" in report and self.facts.num_test:
            personal = personal_metrics(report["personal"], cohort.clients, self.facts)
        return {
            **personal,
            "train/loss": float(np.nansum(losses * steps) / steps.sum()) if steps.sum() else math.nan,
            "comm/up_mb": up / 1e6,
            "comm/down_mb": down / 1e6,
            "clients/dropped": float((~cohort.is_kept).sum()),
        }

    def _is_due(self, round_index: int) -> bool:
        """Whether this round is one to evaluate: every so many, and the last."""
        is_due = self.evaluate_every > 0 and (round_index + 1) % self.evaluate_every == 0
        return is_due or round_index + 1 == self.num_rounds

    def evaluate(self, evaluated: Mapping[str, Tensor] | None = None) -> dict[str, float]:
        """Metrics of the global model on the validation set, the test set and every further test set."""
        facts = self.facts
        counts = {"validation": facts.num_validation, "test": facts.num_test}
        counts |= {f"test-{name}": count for name, count in facts.test_sets.items()}
        scores = self._scores(counts, self._point(self.state, evaluated))
        found: dict[str, float] = {}
        if "validation" in scores:
            score = scores["validation"]
            found |= {"server/validation_accuracy": score.accuracy, "server/validation_loss": score.mean_loss}
        if "test" in scores:
            self._confusion = confusion_of(scores["test"], facts)
            found |= metrics_of(scores["test"], facts) | asked_metrics(scores["test"], self.metrics)
        return found | {f"server/accuracy_{name}": scores[f"test-{name}"].accuracy for name in facts.test_sets}

    def _scores(self, counts: Mapping[str, int], point: dict[str, Any]) -> dict[str, Score]:
        """Scores of a packed model on the held-out sets that have examples, in slices on the trainers."""
        slices = [(name, start, end) for name, count in counts.items() for start, end in _slices(count)]
        parts = list(zip(slices, self.pool.evaluate(point, slices), strict=True)) if slices else []
        own = {name: [score for part, score in parts if part[0] == name] for name in counts}
        return {name: joined(scores) for name, scores in own.items() if scores}

    def _map_features(self, function: Callable[[Tensor, Tensor, Any], Any], shared: Any = None) -> list[Any]:
        """function(features, labels, shared) of each slice of the test set, at the global model."""
        slices = _slices(self.facts.num_test)
        return [unpack(v) for v in self.pool.map_features(function, pack(shared), self._point(self.state), slices)]

    def _point(self, state: Tensor, evaluated: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
        """A global model, packed: see `Trainer.evaluate`."""
        point = {"state": state, "counters": dict(self.counters), "frozen": self.frozen, "evaluated": evaluated or {}}
        return pack(point)

    def _client_columns(self, cohort: Cohort, weights: Weights) -> dict[str, np.ndarray]:
        report = cohort.report
        weight = np.zeros(len(cohort.clients))
        if self.layout.shared:
            sizes = np.array([leaf.size for leaf in self.layout.shared if leaf.name in weights], float)
            table = [_per_client(weights[leaf.name]) for leaf in self.layout.shared if leaf.name in weights]
            if table:
                weight[cohort.is_kept] = np.stack(table, 1) @ (sizes / sizes.sum())
        names = {
            "client": "client",
            "block": "block",
            "num_examples": "num_examples",
            "num_steps": "num_steps",
            "seconds": "seconds",
            "train_loss": "train_loss",
        }
        return {**{new: report[old] for old, new in names.items()}, "weight": weight, "is_dropped": ~cohort.is_kept}

    def _picture(self, cohort: Cohort, weights: Weights) -> np.ndarray:
        """(K, num_blocks): mean weight of each client over the leaves of each layer block."""
        count, columns = int(cohort.is_kept.sum()), []
        for block in self.layout.blocks:
            inside = [
                _per_client(weights[leaf.name])
                for leaf in self.layout.params
                if leaf.block == block and leaf.name in weights
            ]
            columns.append(np.mean(inside, axis=0) if inside else np.full(count, math.nan))
        return np.stack(columns, axis=1) if columns else np.zeros((count, 0))

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Everything of the server that a later round depends on, packed, without client memory."""
        return {
            "state": pack(self.state),
            "counters": dict(self.counters),
            "methods": pack(self.method_state),
            "frozen": pack(self.frozen),
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Continue from a snapshot; client memories follow one by one."""
        self.state = unpack(snapshot["state"])
        self.counters = dict(snapshot["counters"])
        self.method_state = unpack(snapshot["methods"])
        self.frozen = unpack(snapshot["frozen"])

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
        return state_sha256(self.layout, self.state, self.frozen)


def state_sha256(layout: Layout, state: Tensor, frozen: Mapping[str, Tensor] | None = None) -> str:
    """Digest of a state vector, and of how frozen parameters were moved, whatever the order of leaves in memory."""
    digest = hashlib.sha256()
    for name, value in (layout.views(state) | dict(frozen or {})).items():
        digest.update(f"{name}{tuple(value.shape)}".encode())
        digest.update(value.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _slices(count: int) -> list[tuple[int, int]]:
    """(start, end) of the pieces in which a held-out set is scored, whatever the number of trainers."""
    return [(start, min(count, start + EVALUATION_SLICE)) for start in range(0, count, EVALUATION_SLICE)]


def _log_nothing(name: str, value: float | Tensor, columns: Sequence[str] = ()) -> None:
    """What `log` is before the view is one method's own."""


def _check_weights(weights: Weights, layout: Layout, count: int) -> None:
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


def _per_client(weight: Tensor | RightMap) -> np.ndarray:
    """(K,): a client's weight on a leaf as one number (mean over rows; the mean diagonal of a map)."""
    if isinstance(weight, RightMap):
        return weight.maps.diagonal(dim1=1, dim2=2).mean(1).numpy()
    return weight.flatten(1).mean(1).numpy() if weight.dim() > 1 else weight.numpy()


def _merge(reports: Sequence[dict[str, Any]], order: np.ndarray) -> dict[str, Any]:
    """Reports of tasks -> one, with the client axis in the given order."""
    merged: dict[str, Any] = {}
    for key, value in reports[0].items():
        if isinstance(value, dict):
            merged[key] = _merge([report[key] for report in reports], order)
        else:
            merged[key] = np.concatenate([report[key] for report in reports])[order]
    return merged
