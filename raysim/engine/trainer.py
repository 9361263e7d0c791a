"""The trainer: one model for its whole life, which trains client after client.

A trainer is a plain class. With Ray it lives in an actor.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from raysim.base.errors import MethodError
from raysim.core.layout import Layout
from raysim.core.method import Batch, ClientView, State, Value
from raysim.core.seeding import derive_seed, torch_generator
from raysim.core.stack import ClientStep
from raysim.data.federation import Federation
from raysim.engine.client_results import ENGINE, RoundVectors, named_errors, take_memory, take_reports, take_update
from raysim.engine.client_views import Round, client_views
from raysim.engine.device import DeviceData, keep_freed_memory, limit_memory, settle_arithmetic
from raysim.engine.messages import (
    Columns,
    EvaluationPoint,
    Packed,
    Reports,
    RoundMessage,
    Slice,
    TaskClients,
    pack,
    unpack,
)
from raysim.engine.schedule import ClientBlock, Phase
from raysim.training.aggregate import fold
from raysim.training.evaluate import Score, evaluate
from raysim.training.inputs import Examples, Transform, passes
from raysim.training.local import train_locally
from raysim.training.metrics import cell_means, client_means
from raysim.training.model import BoundModel, seed_global_stream, state_of
from raysim.training.nonfinite import first_nonfinite
from raysim.training.shift import Shift
from raysim.training.stacked import Stacker, Trained
from raysim.training.tasks import CLASSES, Task

T = TypeVar("T")


@dataclass
class Trainer:
    """Trains client blocks, keeps their updates, sums updates, and evaluates slices.

    Between calls, a trainer keeps the vectors of the round's clients, and no other state that affects results. Another
    trainer that trains the same blocks has the same vectors.

    Attributes:
      module: the network; its initial values have no effect, since every client starts from the message.
      head: path of the classifier layer.
      num_threads: PyTorch's threads in this process; results may depend on the number.
      build: build(seed=...) -> module with the initial values of a seed, for `ClientView.initial_state`.
      keeps_logits: whether the score of the test set includes the logits.
    """

    module: nn.Module
    layout: Layout
    head: str
    phases: Sequence[Phase]
    federation: Federation
    transform: Transform
    build: Callable[..., nn.Module]
    seed: int
    device: str = "cpu"
    num_threads: int = 1
    evaluation_batch: int = 256
    keeps_logits: bool = False
    shift: Shift | None = None
    task: Task = CLASSES
    _round: Round | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        settle_arithmetic(self.num_threads, self.device)
        keep_freed_memory()
        settings = self.phases[0].settings
        self.model = BoundModel(
            self.module,
            self.layout,
            head=self.head,
            device=self.device,
            features=any("features" in phase.stack.needs for phase in self.phases),
            precision=settings.precision,
            task=self.task,
            backend=settings.compile,
            batch_size=settings.batch_size,
        )
        self.data = DeviceData(self.federation, self.transform, self.model.device, self.shift)
        self._vectors = RoundVectors(self.layout)

    def train(
        self, message: RoundMessage, blocks: Sequence[ClientBlock], memories: Sequence[Packed]
    ) -> tuple[Reports, list[Packed]]:
        """Train the clients of some blocks in order; keep their updates and reported vectors until the next round.

        Args:
          memories: packed client memory of each client of all blocks; None for a client without memory.
        Returns:
          (reports, new memories) of the k clients.
        Raises:
          ClientError: a client failed; the error names the client.
          OutOfMemory: the device has not enough memory for a client.
        """
        if self._round is None or not self._round.is_of(message):
            if self._round is None or self._round.message.sum_index != message.sum_index:
                self._vectors.begin_round()
            self._round = Round(message, self.phases[message.phase_index], self.model.device)
        current = self._round
        clients = [(block, client) for block in blocks for client in block.clients]
        stacked: dict[int, Trained] = {}
        reports, kept = [], []
        for (block, client), before in zip(clients, memories, strict=True):
            with named_errors(client, block.index, message.round_index):
                if client == block.clients[0]:
                    stacked = self._train_stacks(current, block.clients)
                report, after = self._train_client(current, client, block.index, before, stacked.get(client))
            reports.append(report)
            kept.append(after)
        return Reports.joined(reports), kept

    def _train_stacks(self, current: Round, clients: Sequence[int]) -> dict[int, Trained]:
        """Train the clients of a block that can be stacked, see `training.stacked`; return client -> result."""
        phase, index, sizes = current.phase, current.index, self.federation.sizes
        stacker = Stacker(self.module, self.layout, self.transform, phase.settings, self.task)
        if not stacker.fits(phase.methods):
            return {}
        steps = [phase.num_steps(client, int(sizes[client]), False, self.seed, index) for client in clients]
        members = [(self.data.client(client), self._order(current, client)) for client in clients]
        return stacker.train(clients, steps, members, current.state, phase.settings.lr_of(index))

    def _order(self, current: Round, client: int) -> torch.Generator:
        """Return the generator of a client's batch order."""
        return torch_generator(derive_seed(self.seed, "batches", current.index, client))

    def _train_client(
        self, current: Round, client: int, block: int, packed: Packed, done: Trained | None
    ) -> tuple[Reports, Packed]:
        """Train one client, and return its reports and memory. done: result if the client was trained in a stack."""
        began = time.perf_counter()
        model, phase = self.model, current.phase
        examples = self.data.client(client)
        start, views = _begun(self, current, client, examples, packed)
        version = start._version
        step = phase.stack.client_step(views, model.criterion, model.gradient_function)
        num_steps, mean_loss = _take_steps(self, current, client, examples, step, done)
        began -= done.seconds if done is not None else 0.0
        # `report` hooks may read num_steps; it was 0 in all earlier hooks.
        for view in views.values():
            view.num_steps = num_steps
        is_scored = current.message.is_scored
        own_model = phase.stack.own_model(views, is_scored=is_scored)
        peak, sent_bytes, trained = take_update(phase, views, self._vectors, client, model, start)
        methods, more = take_reports(phase, views, self._vectors, client, self.layout)
        # `raysim.core.hooks.called` checks each call of a hook; the backward pass of a hook's loss is outside the call.
        if start._version != version:
            names = ", ".join(method.name for method in phase.methods)
            remedy = "work on a copy: all clients start from the same vector"
            raise MethodError(f"a hook of {names} wrote to client.start", "a backward pass", remedy)
        kept = take_memory(phase, views, self.layout, trained)
        own_model = trained if own_model is None and self.layout.personal else own_model
        report = Reports(
            client=np.array([client]),
            block=np.array([block]),
            num_examples=np.array([len(examples)]),
            num_steps=np.array([num_steps]),
            train_loss=np.array([mean_loss]),
            seconds=np.zeros(1),
            sent_bytes=np.array([sent_bytes]),
            peaks={"update": peak} | more,
            counters={name: np.array([count]) for name, count in model.counts().items()},
            methods=methods,
            personal=self._personal_score(client, own_model)[None] if own_model is not None and is_scored else None,
        )
        # Last, so that the time of reports and memory is included.
        seconds, origin = np.array([time.perf_counter() - began]), ""
        if not np.isfinite(peak).all():
            _, views = _begun(self, current, client, examples, packed)
            origin = first_nonfinite(model, phase.stack, views, partial(_take_steps, self, current, client, examples))
        return replace(report, seconds=seconds, origin=np.array([origin])), kept

    def _load(self, current: Round, memory: Mapping[str, State]) -> Tensor:
        """Load a client's starting point into the model, and return the starting point [num_state], read-only."""
        self.model.load(current.state, current.message.counters)
        if not self.layout.personal:  # all clients have the same starting point
            return current.state
        for name, value in memory.get(ENGINE, {}).items():
            self.layout.view(self.model.state, name).copy_(value)
        # With personal leaves, each client has a starting point of its own, which is subtracted for the update.
        return self.model.state.clone()

    def _personal_score(self, client: int, own_model: Tensor) -> np.ndarray:
        """Return the mean test value, see `Task`, of a client's personal model.

        (domains, classes) float64, by domain and class; (1, 1), on the client's test rows, if clients have test rows.
        NaN without an example.

        Args:
          own_model: [num_state], the personal model, which replaces the loaded state.
        """
        federation = self.federation
        start, end = federation.test_range(client)
        self.model.state.copy_(own_model)
        score = self._score(Slice("test", start, end))
        values = self.task.values(score.columns) if len(score) else np.zeros(0)
        if federation.test_sizes is not None:
            return client_means(values, np.array([end - start]))[:, None]
        shape = (max(1, len(federation.domains)), federation.class_counts.shape[1])
        return cell_means(values, score.labels, federation.test_domains, shape)

    def batches_of(self, examples: Examples, *, is_normalised: bool = True) -> Iterable[Batch]:
        """Return the batches of one pass in stored order, without augmentation."""
        transform = self.transform if is_normalised else self.transform.plain
        return passes(examples, transform, self.evaluation_batch)

    def initial_state(self, client: int) -> Tensor:
        """See `ClientView.initial_state`."""
        module = self.build(seed=derive_seed(self.seed, "initial", 0, client))
        return state_of(module, self.layout).to(self.model.device)

    def on_validation(self, measure: Callable[..., T], batch_size: int, seed: int, mode: str) -> T:
        """Return measure(batches) of the current model on the validation set; see `ClientView.validation_gradient`.

        Args:
          measure: `BoundModel.mean_gradient` or `BoundModel.mean_loss`.
          batch_size: batch size of local training.
          seed: seed of dropout.
        """
        if mode not in ("train", "eval"):
            raise ValueError(f"validation: mode must be 'train' or 'eval', got {mode!r}")
        return measure(
            # In batches of the clients' size, as in FedVG's code, if the size affects the result by more than rounding.
            self.data.validation_batches(batch_size, is_exact=mode == "train" and self.model.depends_on_batches),
            num_examples=len(self.data.held_out("validation")),
            train=mode == "train",
            seed=seed,
        )

    def accuracy_on(self, held_out: str) -> float:
        """Return the metric `Task.of_part` of the current model on a held-out set; see `ClientView.accuracy`."""
        with self.model.at(self.model.state, train=False):
            score = self._score(Slice(held_out, 0, len(self.data.held_out(held_out))))
        return float(self.task.finish(self.task.values(score.columns).mean()))

    def fold(
        self, parts: Sequence[TaskClients], *, vector: str, constants: np.ndarray, first: int, last: int
    ) -> np.ndarray:
        """Return (entries of the leaves,) float64: exact partial sum of a vector over clients.

        Args:
          parts: clients of each task, with their weights.
          constants: (last - first,) float64, rounding constants of the whole cohort for the leaves first..last.
        """
        total: Tensor | None = None
        leaves = self.layout.leaves[first:last]
        layout, start, end = self.layout.part(first, last), leaves[0].offset, leaves[-1].end
        grid = torch.from_numpy(constants.copy())
        for part in parts:
            rows = [row[start:end] for row in self._vectors.of(vector, part.clients.tolist())]
            total = fold(layout, rows, unpack(part.weights), grid, total)
        assert total is not None
        return total.numpy()

    def columns(self, parts: Sequence[TaskClients], shares: Sequence[Sequence[Columns]]) -> list[np.ndarray]:
        """Return (k, columns) float32 for each share of columns: entries of the updates of all parts' k clients."""
        clients = [client for part in parts for client in part.clients.tolist()]
        rows = [row.numpy() for row in self._vectors.of("update", clients)]
        return [np.stack([np.concatenate([row[start:end] for start, end in cuts]) for row in rows]) for cuts in shares]

    def evaluate(self, slices: Sequence[Slice]) -> list[Score]:
        """Return the scores of the current model on slices of held-out sets."""
        return [self._score(part, keeps_logits=self.keeps_logits and part.held_out == "test") for part in slices]

    def _score(self, part: Slice, *, keeps_logits: bool = False) -> Score:
        examples, batch_size = self.data.slice(part), self.evaluation_batch
        return evaluate(self.model, examples, self.transform, batch_size=batch_size, keeps_logits=keeps_logits)

    @contextlib.contextmanager
    def global_model(self, point: EvaluationPoint) -> Iterator[None]:
        """Load a global model for the block; leaves in `point.override` are replaced."""
        self.model.load(unpack(point.state), point.counters)
        # An override may have another shape than the leaf (LIVAR's merged adapters), so it cannot be part of the state.
        with self.model.replaced(unpack(dict(point.override))):
            yield

    def limit_memory(self, share: float) -> None:
        """Limit this process to a share of the device's memory; no-op on a CPU."""
        limit_memory(self.device, share)


def mapped_updates(
    trainer: Trainer, parts: Sequence[TaskClients], *, function: Callable[..., Value], shared: Packed
) -> list[Packed]:
    """Return function(update [num_params], shared) for each client of all parts."""
    shared, size = unpack(shared), trainer.layout.num_params
    updates = [update for part in parts for update in trainer._vectors.of("update", part.clients.tolist())]
    # A copy: a function may write to its argument, or return it, and the update is used again.
    return [pack(function(update[:size].clone(), shared)) for update in updates]


def mapped_columns(
    _: Trainer,
    cuts: Sequence[Columns],
    clients: Sequence[np.ndarray],
    *rows: np.ndarray,
    function: Callable[..., Value],
    shared: Packed,
    extra: np.ndarray,
) -> list[Packed]:
    """Return function(block, extra, shared) for each block of columns, see `ServerView.map_columns`.

    Args:
      clients: ids of the clients of all `rows`, one array for each part.
      rows: (k, columns of all cuts) from each trainer.
      extra: (m, num_params) float32, further rows beside the clients' rows; m may be 0.
    """
    order, answers, place = np.argsort(np.concatenate(clients)), [], 0  # by id
    for start, end in cuts:
        block = np.concatenate([some[:, place : place + end - start] for some in rows])[order]
        further = torch.from_numpy(extra[:, start:end].copy())
        answers.append(pack(function(torch.from_numpy(block), further, unpack(shared))))
        place += end - start
    return answers


def _begun(
    trainer: Trainer, current: Round, client: int, examples: Examples, packed: Packed
) -> tuple[Tensor, dict[str, ClientView]]:
    """Load a client's starting point and run the `begin` hooks; return (starting point [num_state], method -> view)."""
    memory: dict[str, State] = unpack(packed, trainer.model.device) if packed is not None else {}
    start = trainer._load(current, memory)
    views = client_views(trainer, current, client, examples, start, memory)
    own_start = current.phase.stack.begin(views)
    if own_start is not None:
        trainer.model.state.copy_(own_start)
    return start, views


def _take_steps(
    trainer: Trainer, current: Round, client: int, examples: Examples, step: ClientStep, done: Trained | None = None
) -> tuple[int, float]:
    """Run a client's local steps from the current model, see `train_locally`. done: result of the steps in a stack."""
    phase, model = current.phase, trainer.model
    # Dropout draws from the global stream, which is seeded per client: draws must not depend on earlier clients.
    seed_global_stream(derive_seed(trainer.seed, "dropout", current.index, client), model.device)
    if done is not None:
        torch.cat(done.leaves, out=model.state)
        return done.num_steps, done.mean_loss
    with model.overridden(step.ops):
        return train_locally(
            model,
            step.loss,
            step.gradient,
            examples,
            trainer.transform,
            phase.settings,
            lr=phase.settings.lr_of(current.index),
            generator=trainer._order(current, client),
            share=phase.share_of(client, trainer.seed, current.index),
        )
