"""The trainer: one long-lived model, client after client. A plain class; with Ray it lives in an actor."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from raysim.core.errors import ClientError, MethodError, OutOfMemory
from raysim.core.layout import Layout
from raysim.core.method import Batch, Client, GradFn, LayerOp, Method, Vector
from raysim.core.seeding import derive_seed, torch_generator
from raysim.core.weights import Weights
from raysim.data.federation import Federation
from raysim.engine.plan import ClientBlock, share_of_work
from raysim.engine.transport import pack, readonly_tensor, unpack
from raysim.training.aggregate import fold
from raysim.training.evaluate import Score, evaluate
from raysim.training.inputs import Examples, InputTransform, passes
from raysim.training.local import LocalSettings, train_locally
from raysim.training.metrics import cell_accuracy, own_accuracy
from raysim.training.model import BoundModel, cross_entropy, seed_global_stream, state_of

T = TypeVar("T")

#: The engine's own namespace in client memory: personal (trained but not shared) leaves.
ENGINE = "raysim"


@dataclass(frozen=True)
class Phase:
    """A stretch of rounds with one list of methods and one kind of local work.

    Attributes:
      dropout: chance that a chosen client never reports.
      stragglers: chance that a client does only a share of its work, uniform in [straggler_work, 1).
    """

    methods: tuple[Method, ...]
    settings: LocalSettings
    rounds: int
    cohort_size: int
    dropout: float = 0.0
    stragglers: float = 0.0
    straggler_work: float = 1.0

    def share_of(self, client: int, seed: int, round_index: int) -> float:
        return share_of_work(client, self.stragglers, self.straggler_work, seed=seed, round_index=round_index)


#: Validation inputs of up to 256 MiB stay in memory as floats, resized: every client of every round is scored on them.
KEPT_INPUT_BYTES = 2**28

#: Parameters of glibc's mallopt(3).
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


class Trainer:
    """Trains client blocks, scores them, folds updates and evaluates slices; keeps nothing between calls that matters.

    Args:
      module: built with any initial values; every client starts from the message.
      num_threads: of PyTorch in this process; part of what results may depend on.
      build: build(seed=...) makes such a module with the initial values of a seed; for `Client.initial_state`.
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
        needs = {need for phase in phases for method in phase.methods for need in method.needs}
        self.model = BoundModel(
            module,
            layout,
            head=head,
            device=device,
            features="features" in needs,
            precision=phases[0].settings.precision,
        )
        self.layout, self.phases, self.federation, self.transform = layout, phases, federation, transform
        self.num_classes, self.seed, self.head, self.device = num_classes, seed, head, torch.device(device)
        self.evaluation_batch, self._build, self.keeps_logits = evaluation_batch, build, keeps_logits
        self._held_out: dict[str, Examples] = {}
        self._ready: dict[int, list[Batch]] = {}
        self._round: dict[str, Any] = {}
        self._personal = layout.personal

    # --- training ---------------------------------------------------------------------------------------------------

    def train(
        self, message: dict[str, Any], blocks: Sequence[ClientBlock], memories: Sequence[Any]
    ) -> tuple[dict[str, Any], dict[str, np.ndarray], list[Any]]:
        """Train the clients of some blocks, in order.

        Args:
          message: see `Server._message`.
          memories: packed client memory, one per client of all blocks (None: none yet).
        Returns:
          (report, vectors, memories): report holds small arrays stacked over clients; vectors the updates
          ("update": (k, num_state) float32) and reported Vectors ("method/name": (k, num_params)).
        Raises:
          ClientError: a client failed; names it. OutOfMemory: the device has no room for a client.
        """
        self._begin(message)
        clients = [(block.index, client) for block in blocks for client in block.clients]
        vectors = {"update": np.empty((len(clients), self.layout.num_state), np.float32)}
        rows, kept = [], []
        for row, (block, client) in enumerate(clients):
            try:
                report, memory = self._train_client(client, memories[row], vectors, row, len(clients))
            except torch.OutOfMemoryError as error:
                raise OutOfMemory(
                    f"no memory left on the device for client {client} ({error})",
                    f"round {message['round']}",
                    "lower local.batch_size, or take a smaller model or a larger device",
                ) from error
            except Exception as error:
                cause = f"{type(error).__name__}: {error}"
                raise ClientError(
                    client, message["round"], block, f"worker {os.getpid()}", cause, traceback.format_exc()
                ) from error
            rows.append({"client": client, "block": block, **report})
            kept.append(memory)
        return _stack(rows), vectors, kept

    def _begin(self, message: dict[str, Any]) -> None:
        """Copy the round's message to the device once, however many tasks of the round arrive here."""
        key = (message["round"], message["phase"])
        if self._round.get("key") != key:
            self._round = {
                "key": key,
                "state": torch.from_numpy(message["state"].copy()).to(self.device),
                "fields": {name: _to(unpack(fields), self.device) for name, fields in message["fields"].items()},
            }
        self.model.move_frozen(unpack(message["frozen"]))
        self._round["message"] = message

    def _train_client(
        self, client: int, packed: Any, vectors: dict[str, np.ndarray], row: int, count: int
    ) -> tuple[dict[str, Any], Any]:
        began = time.perf_counter()
        message, sent = self._round["message"], self._round["state"]
        round_index, phase = message["round"], self.phases[message["phase"]]
        lr = phase.settings.lr_of(round_index)
        model = self.model
        examples = self._examples(*self.federation.client(client))
        memory: dict[str, dict[str, Any]] = _to(unpack(packed), self.device) if packed is not None else {}
        model.load(sent, message["counters"])
        self._load_personal(memory)
        # With personal leaves a client starts from its own; else what was sent serves every client, read-only.
        start = model.state.clone() if self._personal else sent
        version = start._version
        views = {
            m.name: self._view(m, client, round_index, examples, memory, start, phase.settings) for m in phase.methods
        }

        ops: dict[str, LayerOp] = {}
        loss = cross_entropy
        for method in phase.methods:
            if method.forward is not None:
                ops = method.forward(ops, views[method.name])
            if method.loss is not None:
                loss = method.loss(loss, views[method.name])
        gradient: GradFn | None = None  # nobody looks at gradients: the local loop may take the shortest way
        for method in phase.methods:
            if method.grads is not None:
                gradient = method.grads(gradient or model.gradient_function(loss), views[method.name])

        seed_global_stream(derive_seed(self.seed, "dropout", round_index, client), self.device)
        generator = torch_generator(derive_seed(self.seed, "batches", round_index, client))
        with model.overridden(ops):
            num_steps, mean_loss = train_locally(
                model,
                loss,
                gradient,
                examples,
                self.transform,
                phase.settings,
                lr=lr,
                generator=generator,
                share=phase.share_of(client, self.seed, round_index),
            )
        update = torch.from_numpy(vectors["update"])[row]
        if self.device.type == "cpu":
            torch.sub(model.state, start, out=update)
        else:
            update.copy_(torch.sub(model.state, start))
        report: dict[str, Any] = {
            "num_examples": len(examples),
            "num_steps": num_steps,
            "train_loss": mean_loss,
            "peaks": {"update": self.layout.norms(update, math.inf).numpy()},
            "counters": {name: int(buffer) for name, buffer in model.counters.items()},
            "methods": {},
        }
        for method in phase.methods:
            views[method.name].num_steps = num_steps
            if method.report is not None:
                report["methods"][method.name] = self._report(method, views[method.name], vectors, report, row, count)
        if start._version != version:
            raise MethodError(
                "a hook wrote to client.start", "its hooks", "work on a copy: other clients start from it too"
            )
        kept = self._memory(phase.methods, views)
        if self._personal and message["is_scored"]:
            report["personal"] = self._personal_accuracy(client)
        report["seconds"] = time.perf_counter() - began
        return report, kept

    def _view(
        self,
        method: Method,
        client: int,
        round_index: int,
        examples: Examples,
        memory: dict[str, Any],
        start: Tensor,
        settings: LocalSettings,
    ) -> Client:
        """The client as one method's hooks see it."""

        def validation_gradient(mode: str) -> Tensor:
            return self._on_validation(self.model.mean_gradient, mode, round_index, client)

        def validation_loss(mode: str) -> float:
            return self._on_validation(self.model.mean_loss, mode, round_index, client)

        def initial_state() -> Tensor:
            assert self._build is not None  # only trainers that were made for other purposes have none
            module = self._build(seed=derive_seed(self.seed, "initial", 0, client))
            return state_of(module, self.layout).to(self.device)

        def batches(*, is_normalised: bool = True) -> Iterable[Batch]:
            transform = self.transform if is_normalised else self.transform.pixels
            return passes(examples, transform, self.evaluation_batch)

        return Client(
            id=client,
            round_index=round_index,
            num_examples=len(examples),
            class_counts=torch.bincount(examples.labels, minlength=self.num_classes),
            lr=settings.lr_of(round_index),
            momentum=settings.momentum,
            batch_size=settings.batch_size,
            layout=self.layout,
            start=start[: self.layout.num_params],
            params=self.model.params,
            start_state=start,
            state=self.model.state,
            head=self.head,
            model=self.model,
            message=self._round["fields"].get(method.name, {}),
            memory=memory.get(method.name, {}),
            generator=torch_generator(derive_seed(self.seed, f"method/{method.name}", round_index, client)),
            batches=batches,
            validation_gradient=validation_gradient,
            validation_loss=validation_loss,
            initial_state=initial_state,
        )

    def _report(
        self, method: Method, view: Client, vectors: dict[str, np.ndarray], report: dict[str, Any], row: int, count: int
    ) -> dict[str, np.ndarray]:
        """Run the `report` hook; small values go up at once, Vectors beside the update."""
        assert method.report is not None
        small: dict[str, np.ndarray] = {}
        for name, value in method.report(view).items():
            if isinstance(value, Vector):
                key = f"{method.name}/{name}"
                if value.value.shape != (self.layout.num_params,):
                    raise MethodError(
                        f"Vector {name!r} has shape {tuple(value.value.shape)}",
                        f"report of {method.name}",
                        "a Vector is [num_params]",
                    )
                target = vectors.setdefault(key, np.empty((count, self.layout.num_params), np.float32))
                target[row] = value.value.detach().cpu().numpy()
                report["peaks"][key] = self.layout.norms(torch.from_numpy(target[row]), math.inf).numpy()
            else:
                small[name] = np.asarray(pack(value))
        return small

    def _memory(self, methods: Sequence[Method], views: dict[str, Client]) -> Any:
        """What the client keeps: packed; None where nothing is kept."""
        memory: dict[str, Any] = {}
        for method in methods:
            mine = views[method.name].memory
            if mine and "client-memory" not in method.needs:
                raise MethodError(f"{method.name} wrote client memory", "its hooks", 'declare needs={"client-memory"}')
            if mine:
                memory[method.name] = mine
        if self._personal:
            views_now = self.layout.views(self.model.state)
            memory[ENGINE] = {leaf.name: views_now[leaf.name].clone() for leaf in self._personal}
        return pack(memory) if memory else None

    def _load_personal(self, memory: dict[str, Any]) -> None:
        for name, value in memory.get(ENGINE, {}).items():
            self.layout.view(self.model.state, name).copy_(value)

    def _personal_accuracy(self, client: int) -> np.ndarray:
        """(domains, classes) float64: test accuracy of the client's own model, as it is now, by domain and class.

        (1, 1), on its own test rows, where clients have some. NaN where there is no example.
        """
        federation = self.federation
        start, end = federation.test_range(client)
        score = evaluate(self.model, self._slice("test", start, end), self.transform, batch_size=self.evaluation_batch)
        if federation.test_sizes is not None:
            return own_accuracy(score.hits, np.array([end - start]))[:, None]
        shape = (max(1, len(federation.domains)), self.num_classes)
        return cell_accuracy(score.hits, score.labels, federation.test_domains, shape)

    # --- what else runs where models and updates lie ------------------------------------------------------------------

    def fold(
        self,
        name: str,
        requests: Sequence[tuple[Weights, np.ndarray]],
        constants: np.ndarray,
        *vectors: dict[str, np.ndarray],
    ) -> np.ndarray:
        """Partial exact sum over the clients of some task results.

        Args:
          name: "update" or "method/vector".
          requests: for each of `vectors`, (packed weights of the kept clients, kept rows).
        Returns:
          (size,) float64.
        """
        total: Tensor | None = None
        grid = torch.from_numpy(constants.copy())
        for (weights, rows), arrays in zip(requests, vectors, strict=True):
            total = fold(self.layout, _rows(arrays[name], rows), unpack(weights), grid, total)
        assert total is not None
        return total.numpy()

    def map_updates(
        self,
        function: Callable[[Tensor, Any], Any],
        shared: Any,
        rows: Sequence[np.ndarray],
        *vectors: dict[str, np.ndarray],
    ) -> list[Any]:
        """function(update_k [num_params], shared) for every kept client of some task results."""
        shared = unpack(shared)
        updates = [
            update for arrays, kept in zip(vectors, rows, strict=True) for update in _rows(arrays["update"], kept)
        ]
        # A copy: a function that writes to its argument would otherwise crash on the store's read-only memory.
        return [pack(function(update[: self.layout.num_params].clone(), shared)) for update in updates]

    def evaluate(self, name: str, point: dict[str, Any], start: int, end: int) -> Score:
        """Score of a global model on examples start..end of a held-out set ("test", "validation" or "test-NAME").

        Args:
          point: packed "state" and "counters"; "frozen": see `Server.frozen`; "evaluated": tensors that stand in the
            place of leaves.
        """
        with self._global_model(point):
            return evaluate(
                self.model,
                self._slice(name, start, end),
                self.transform,
                batch_size=self.evaluation_batch,
                keeps_logits=self.keeps_logits and name == "test",
            )

    @torch.no_grad()
    def map_features(
        self, function: Callable[[Tensor, Tensor, Any], Any], shared: Any, point: dict[str, Any], start: int, end: int
    ) -> Any:
        """function(features, labels, shared) of examples start..end of the test set, packed.

        features: (end - start, width), the head's input at a global model (see `evaluate`) in eval mode.
        Raises:
          MethodError: no method declared that it needs features.
        """
        examples, parts = self._slice("test", start, end), []
        with self._global_model(point):
            self.model.module.eval()
            for batch in passes(examples, self.transform, self.evaluation_batch):
                features = self.model.forward(batch.images).features
                if features is None:
                    raise MethodError("map_features found no features", "its hooks", 'declare needs={"features"}')
                parts.append(features.flatten(1))
        return pack(function(torch.cat(parts), examples.labels, _to(unpack(shared), self.device)))

    @contextlib.contextmanager
    def _global_model(self, point: dict[str, Any]) -> Iterator[None]:
        self.model.load(unpack(point["state"]), point["counters"])
        self.model.move_frozen(unpack(point["frozen"]))
        with self.model.replaced(unpack(point["evaluated"])):
            yield

    def _slice(self, name: str, start: int, end: int) -> Examples:
        held_out = self._set(name)
        return Examples(held_out.images[start:end], held_out.labels[start:end])

    def limit_memory(self, share: float) -> None:
        """Keep this process to a share of its GPU's memory, so that it cannot take its neighbours'; no-op on a CPU."""
        if self.device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(min(1.0, share))

    def ping(self) -> int:
        """This process's id: answers once the trainer is ready."""
        return os.getpid()

    # --- data -----------------------------------------------------------------------------------------------------------

    def _examples(self, images: np.ndarray, labels: np.ndarray) -> Examples:
        return Examples(readonly_tensor(images).to(self.device), readonly_tensor(labels).to(self.device))

    def _set(self, name: str) -> Examples:
        """A held-out set, brought to the device once."""
        if name not in self._held_out:
            self._held_out[name] = self._examples(*self.federation.held_out(name))
        return self._held_out[name]

    def _on_validation(self, measure: Callable[..., T], mode: str, round_index: int, client: int) -> T:
        """A measure of the model as it is now, on the validation set."""
        if mode not in ("train", "eval"):
            raise ValueError(f"validation: mode must be 'train' or 'eval', got {mode!r}")
        examples = self._set("validation")
        phase = self.phases[self._round["message"]["phase"]]
        return measure(
            self._validation_batches(examples, phase.settings.batch_size),
            num_examples=len(examples),
            train=mode == "train",
            seed=derive_seed(self.seed, "validation", round_index, client),
        )

    def _validation_batches(self, examples: Examples, batch_size: int) -> Iterable[Batch]:
        """Passes over the validation set, ready for the model: made once where they take little room.

        In the clients' batch size, as in FedVG's code: in train mode BatchNorm makes the score depend on it.
        """
        height, width, channels = examples.images.shape[1:]
        rows, columns = self.transform.output_size(height, width)
        size_bytes = 4 * len(examples) * rows * columns * (self.transform.channels or channels)
        if size_bytes > KEPT_INPUT_BYTES:
            return passes(examples, self.transform, batch_size)
        if batch_size not in self._ready:
            self._ready[batch_size] = list(passes(examples, self.transform, batch_size))
        return self._ready[batch_size]


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory in the process instead of returning it to the system.

    A step allocates the same activations as the one before; returned and fetched again they cost 2,000 to 3,000 page
    faults a step for the two-convolution CNN, a tenth of its time. Elsewhere than on glibc this does nothing.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_MMAP_THRESHOLD, 2**30)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def _rows(array: np.ndarray, rows: np.ndarray) -> Tensor:
    tensor = readonly_tensor(array)
    return tensor if len(rows) == len(array) else tensor[torch.from_numpy(rows.copy())]


def _stack(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Dicts of equal structure, one a client -> one dict of arrays with a leading client axis."""
    first = rows[0]
    stacked: dict[str, Any] = {}
    for key, value in first.items():
        column = [row.get(key) for row in rows]
        if isinstance(value, dict):
            if any(not isinstance(item, dict) or item.keys() != value.keys() for item in column):
                raise MethodError(
                    "clients reported different names",
                    f"report {key!r}",
                    "report the same names for every client; use NaN where one has no value",
                )
            stacked[key] = _stack([item for item in column if isinstance(item, dict)]) if value else {}
        else:
            try:
                stacked[key] = np.stack([np.asarray(item) for item in column])
            except ValueError as error:
                raise MethodError(
                    f"clients reported different shapes ({error})",
                    f"report {key!r}",
                    "report one shape for every client",
                ) from error
    return stacked


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _to(item, device) for key, item in value.items()}
    return value
