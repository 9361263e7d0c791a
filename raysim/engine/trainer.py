"""The trainer: one long-lived model, client after client. A plain class; with Ray it lives in an actor."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from raysim.core.errors import ClientError, MethodError, OutOfMemory
from raysim.core.layout import Layout
from raysim.core.method import Batch, ClientView
from raysim.core.seeding import derive_seed, torch_generator
from raysim.data.federation import Federation
from raysim.engine.device_data import DeviceData
from raysim.engine.messages import (
    ClientReport,
    EvaluationPoint,
    FoldRequest,
    MapRequest,
    Packed,
    Reports,
    RoundMessage,
    Share,
    Slice,
    Vectors,
)
from raysim.engine.plan import ClientBlock, Phase
from raysim.engine.results import ENGINE, fold_vectors, map_updates, take_memory, take_reports, take_update
from raysim.engine.transport import pack, unpack
from raysim.engine.views import client_view
from raysim.training.evaluate import Score, evaluate
from raysim.training.inputs import Examples, InputTransform, passes
from raysim.training.local import train_locally
from raysim.training.metrics import cell_accuracy, own_accuracy
from raysim.training.model import BoundModel, cross_entropy, seed_global_stream, state_of

T = TypeVar("T")

#: Parameters of glibc's mallopt(3).
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


class Round:
    """A round's message as this process uses it: copied to the device once, however many tasks arrive."""

    def __init__(self, message: RoundMessage, phase: Phase, device: torch.device):
        self.message, self.phase = message, phase
        self.state = torch.from_numpy(message.state.copy()).to(device)
        self.fields = {name: _to(unpack(fields), device) for name, fields in message.fields.items()}

    def is_of(self, message: RoundMessage) -> bool:
        return (self.message.round_index, self.message.phase_index) == (message.round_index, message.phase_index)


class Trainer:
    """Trains client blocks, scores them, folds updates and evaluates slices; keeps nothing between calls that matters.

    Args:
      module: built with any initial values; every client starts from the message.
      num_threads: of PyTorch in this process; part of what results may depend on.
      build: build(seed=...) makes such a module with the initial values of a seed; for `ClientView.initial_state`.
      keeps_logits: the score of the test set has the logits with it.
    """

    def __init__(
        self,
        *,
        module: nn.Module,
        layout: Layout,
        head: str,
        phases: Sequence[Phase],
        federation: Federation,
        transform: InputTransform,
        num_classes: int,
        seed: int,
        device: str = "cpu",
        num_threads: int = 1,
        evaluation_batch: int = 256,
        build: Callable[..., nn.Module] | None = None,
        keeps_logits: bool = False,
    ):
        torch.set_num_threads(num_threads)
        keep_freed_memory()
        if device != "cpu":
            torch.backends.cudnn.deterministic = True
            torch.backends.cudnn.benchmark = False
        self.model = BoundModel(
            module,
            layout,
            head=head,
            device=device,
            features=any("features" in phase.stack.needs for phase in phases),
            precision=phases[0].settings.precision,
        )
        self.layout, self.phases, self.transform = layout, phases, transform
        self.num_classes, self.seed, self.head, self.device = num_classes, seed, head, torch.device(device)
        self.evaluation_batch, self._build, self._keeps_logits = evaluation_batch, build, keeps_logits
        self.data = DeviceData(federation, transform, self.device)
        self._round: Round | None = None
        self._personal = layout.personal

    # --- training ---------------------------------------------------------------------------------------------------

    def train(
        self, message: RoundMessage, blocks: Sequence[ClientBlock], memories: Sequence[Packed]
    ) -> tuple[Reports, Vectors, list[Packed]]:
        """Train the clients of some blocks, in order.

        Args:
          memories: packed client memory, one per client of all blocks (None: none yet).
        Returns:
          (reports, vectors, new memories) of the k clients.
        Raises:
          ClientError: a client failed; names it. OutOfMemory: the device has no room for a client.
        """
        if self._round is None or not self._round.is_of(message):
            self._round = Round(message, self.phases[message.phase_index], self.device)
        clients = [(block.index, client) for block in blocks for client in block.clients]
        vectors = {"update": np.empty((len(clients), self.layout.num_state), np.float32)}
        rows, kept = [], []
        for row, (block, client) in enumerate(clients):
            with _named(client, block, message.round_index):
                report, memory = self._train_client(client, block, memories[row], vectors, row)
            rows.append(report)
            kept.append(memory)
        return Reports.of(rows), vectors, kept

    def _train_client(
        self, client: int, block: int, packed: Packed, vectors: Vectors, row: int
    ) -> tuple[ClientReport, Packed]:
        """Load, build the views, compose the methods, train, report, remember."""
        began = time.perf_counter()
        current, model = self._current(), self.model
        message, phase, round_index = current.message, current.phase, current.message.round_index
        examples = self.data.client(client)
        memory: dict[str, dict[str, Any]] = _to(unpack(packed), self.device) if packed is not None else {}
        start = self._load(memory)
        version = start._version
        views = self._views(client, examples, start, memory)

        step = phase.stack.client_step(views, cross_entropy, model.gradient_function)
        seed_global_stream(derive_seed(self.seed, "dropout", round_index, client), self.device)
        with model.overridden(step.ops):
            num_steps, mean_loss = train_locally(
                model,
                step.loss,
                step.gradient,
                examples,
                self.transform,
                phase.settings,
                lr=phase.settings.lr_of(round_index),
                generator=torch_generator(derive_seed(self.seed, "batches", round_index, client)),
                share=phase.share_of(client, self.seed, round_index),
            )
        for view in views.values():
            view.num_steps = num_steps
        peaks = {"update": take_update(vectors["update"][row], model.state, start, self.layout)}
        methods, more = take_reports(phase, views, vectors, row, self.layout)
        if start._version != version:
            raise MethodError(
                "a hook wrote to client.start", "its hooks", "work on a copy: other clients start from it too"
            )
        kept = take_memory(phase, views, self.layout, model.state)
        report = ClientReport(
            client=client,
            block=block,
            num_examples=len(examples),
            num_steps=num_steps,
            train_loss=mean_loss,
            seconds=0.0,
            peaks=peaks | more,
            counters={name: int(buffer) for name, buffer in model.counters.items()},
            methods=methods,
            personal=self._personal_accuracy(client) if self._personal and message.is_scored else None,
        )
        return replace(report, seconds=time.perf_counter() - began), kept

    def _current(self) -> Round:
        assert self._round is not None
        return self._round

    def _load(self, memory: Mapping[str, Mapping[str, Any]]) -> Tensor:
        """Bring the model to a client's starting point and return it, [num_state], read-only."""
        current = self._current()
        self.model.load(current.state, current.message.counters)
        if not self._personal:  # what was sent serves every client
            return current.state
        for name, value in memory.get(ENGINE, {}).items():
            self.layout.view(self.model.state, name).copy_(value)
        return self.model.state.clone()

    def _views(
        self, client: int, examples: Examples, start: Tensor, memory: dict[str, dict[str, Any]]
    ) -> dict[str, ClientView]:
        """Method name -> the client as that method sees it."""
        current = self._current()
        round_index = current.message.round_index
        view = partial(
            client_view,
            client=client,
            round_index=round_index,
            seed=self.seed,
            num_classes=self.num_classes,
            settings=current.phase.settings,
            model=self.model,
            head=self.head,
            examples=examples,
            start_state=start,
            batches=partial(self._batches, examples),
            validation_gradient=partial(self._on_validation, self.model.mean_gradient, client),
            validation_loss=partial(self._on_validation, self.model.mean_loss, client),
            initial_state=partial(self._initial_state, client),
        )
        return {
            method.name: view(
                method.name,
                message=current.fields.get(method.name, {}),
                memory=memory.get(method.name, {}),
            )
            for method in current.phase.methods
        }

    def _personal_accuracy(self, client: int) -> np.ndarray:
        """(domains, classes) float64: test accuracy of the client's own model, as it is now, by domain and class.

        (1, 1), on its own test rows, where clients have some. NaN where there is no example.
        """
        federation = self.data.federation
        start, end = federation.test_range(client)
        score = self._evaluate(Slice("test", start, end))
        if federation.test_sizes is not None:
            return own_accuracy(score.hits, np.array([end - start]))[:, None]
        shape = (max(1, len(federation.domains)), self.num_classes)
        return cell_accuracy(score.hits, score.labels, federation.test_domains, shape)

    def _batches(self, examples: Examples, *, is_normalised: bool = True) -> Iterable[Batch]:
        """See `ClientView.batches`."""
        transform = self.transform if is_normalised else self.transform.pixels
        return passes(examples, transform, self.evaluation_batch)

    def _initial_state(self, client: int) -> Tensor:
        """See `ClientView.initial_state`."""
        assert self._build is not None  # only trainers that were made for other purposes have none
        module = self._build(seed=derive_seed(self.seed, "initial", 0, client))
        return state_of(module, self.layout).to(self.device)

    def _on_validation(self, measure: Callable[..., T], client: int, mode: str) -> T:
        """A measure of the model as it is now, on the validation set; see `ClientView.validation_gradient`."""
        if mode not in ("train", "eval"):
            raise ValueError(f"validation: mode must be 'train' or 'eval', got {mode!r}")
        current = self._current()
        return measure(
            self.data.validation_batches(current.phase.settings.batch_size),
            num_examples=len(self.data.held_out("validation")),
            train=mode == "train",
            seed=derive_seed(self.seed, "validation", current.message.round_index, client),
        )

    # --- what else runs where models and updates lie ------------------------------------------------------------------

    def fold(self, request: FoldRequest, shares: Sequence[Share], *tasks: Vectors) -> np.ndarray:
        """See `fold_vectors`."""
        return fold_vectors(self.layout, request, shares, tasks)

    def map_updates(self, request: MapRequest, shares: Sequence[Share], *tasks: Vectors) -> list[Packed]:
        """See `results.map_updates`."""
        return map_updates(self.layout, request, shares, tasks)

    def evaluate(self, point: EvaluationPoint, request: None, part: Slice) -> Score:
        """Score of a global model on a slice of a held-out set."""
        with self._global_model(point):
            return self._evaluate(part, keeps_logits=self._keeps_logits and part.held_out == "test")

    def _evaluate(self, part: Slice, *, keeps_logits: bool = False) -> Score:
        examples = self.data.slice(part)
        return evaluate(
            self.model, examples, self.transform, batch_size=self.evaluation_batch, keeps_logits=keeps_logits
        )

    @torch.no_grad()
    def map_features(self, point: EvaluationPoint, request: MapRequest, part: Slice) -> Packed:
        """function(features, labels, shared) of a slice of n examples.

        features: (n, width), the head's input at a global model in eval mode.
        Raises:
          MethodError: no method declared that it needs features.
        """
        examples, parts = self.data.slice(part), []
        with self._global_model(point):
            self.model.module.eval()
            for batch in passes(examples, self.transform, self.evaluation_batch):
                features = self.model.forward(batch.images).features
                if features is None:
                    raise MethodError("map_features found no features", "its hooks", 'declare needs={"features"}')
                parts.append(features.flatten(1))
        return pack(request.function(torch.cat(parts), examples.labels, _to(unpack(request.shared), self.device)))

    @contextlib.contextmanager
    def _global_model(self, point: EvaluationPoint) -> Iterator[None]:
        self.model.load(unpack(point.state), point.counters)
        with self.model.replaced(unpack(dict(point.override))):
            yield

    def limit_memory(self, share: float) -> None:
        """Keep this process to a share of its GPU's memory, so that it cannot take its neighbours'; no-op on a CPU."""
        if self.device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(min(1.0, share))

    def ping(self) -> int:
        """This process's id: answers once the trainer is ready."""
        return os.getpid()


@contextlib.contextmanager
def _named(client: int, block: int, round_index: int) -> Iterator[None]:
    """What a client raises, with its name: the device's lack of memory, which another trainer may mend, and all else."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"no memory left on the device for client {client} ({error})",
            f"round {round_index}",
            "lower local.batch_size, or take a smaller model or a larger device",
        ) from error
    except Exception as error:
        cause, worker = f"{type(error).__name__}: {error}", f"worker {os.getpid()}"
        raise ClientError(client, round_index, block, worker, cause, traceback.format_exc()) from error


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory in the process instead of returning it to the system.

    A step allocates the same activations as the one before; returned and fetched again they cost 2,000 to 3,000 page
    faults a step for the two-convolution CNN, a tenth of its time. Elsewhere than on glibc this does nothing.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_MMAP_THRESHOLD, 2**30)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _to(item, device) for key, item in value.items()}
    return value
