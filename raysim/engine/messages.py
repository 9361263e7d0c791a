"""Data sent between server and trainers: frozen records of NumPy arrays in plain containers, with and without Ray.

Shapes: k clients of a task, K clients of a cohort, N clients of the population. Received arrays may be read-only, since
they lie in Ray's object store.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from raysim.base.errors import MethodError
from raysim.core.layout import Layout
from raysim.core.method import Value
from raysim.core.weights import RightMap


def map_leaves(function: Callable[[Value], Value], value: Value) -> Value:
    """Return a copy of a nest of dicts, lists, tuples and RightMaps with function(item) in place of each leaf."""
    if isinstance(value, RightMap):
        return RightMap(map_leaves(function, value.maps))
    if isinstance(value, dict):
        return {key: map_leaves(function, item) for key, item in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(map_leaves(function, item) for item in value)
    return function(value)


def pack(value: Value) -> Value:
    """Replace tensors by NumPy arrays, which Ray stores without copying and returns as read-only arrays."""
    return map_leaves(lambda x: x.detach().cpu().contiguous().numpy() if isinstance(x, Tensor) else x, value)


def packed_copy(value: Value) -> Value:
    """Return `pack(value)` without shared memory, so that later changes of the value have no effect."""

    def copied(leaf: Value) -> Value:
        if isinstance(leaf, Tensor):
            return leaf.detach().to("cpu", copy=True, memory_format=torch.contiguous_format).numpy()
        return leaf.copy() if isinstance(leaf, np.ndarray) else leaf

    return map_leaves(copied, value)


def unpack(value: Value, device: torch.device | str = "cpu") -> Value:
    """Replace NumPy arrays by tensors on the device; arrays are copied, since the object store is read-only."""
    return map_leaves(lambda x: torch.from_numpy(x.copy()).to(device) if isinstance(x, np.ndarray) else x, value)


def readonly_tensor(array: np.ndarray) -> Tensor:
    """Return a tensor over a possibly read-only array (memory-mapped or from the object store). Never write to it."""
    _hear_warning()
    return torch.from_numpy(array)


@cache
def _hear_warning() -> None:
    """Trigger and suppress PyTorch's warning about read-only arrays, which PyTorch reports once per process.

    A filter around each `torch.from_numpy` would cost 8 times the call.
    """
    array = np.empty(0)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        torch.from_numpy(array)


def message_bytes(value: Value) -> int:
    """Return the bytes of all arrays and tensors inside a value, plus 8 for each Python number."""
    sizes: list[int] = []

    def measure(leaf: Value) -> None:
        sizes.append(leaf.nbytes if isinstance(leaf, np.ndarray | Tensor) else 8 * isinstance(leaf, int | float))

    map_leaves(measure, value)
    return sum(sizes)


#: Result of `pack`: a value with arrays in place of tensors.
Packed = Value

#: Reference to a value, opaque outside the pool that returned it (with Ray, an object reference). None stands for None.
Handle = object


@dataclass(frozen=True)
class RoundMessage:
    """Message that the server sends to all trainers once a round.

    Attributes:
      phase_index: index of the phase whose methods and settings apply.
      state: (num_state,) float32, the starting point of clients: the broadcast point, then the buffers.
      counters: integer buffers, such as BatchNorm's number of batches.
      fields: method name -> message fields of the method.
      is_scored: whether personal models are scored in this round: the round is evaluated, and there is a test set.
      overheard: method name -> data about the earlier clients, for latecomers; None in the earlier clients' message.
      params_bytes: size of the encoded parameters; None: 4 bytes for each shared parameter.
      staleness: rounds from `round_index` to the round that sums the updates.
    """

    round_index: int
    phase_index: int
    state: np.ndarray
    counters: Mapping[str, int]
    fields: Mapping[str, Packed]
    is_scored: bool
    overheard: Mapping[str, Packed] | None = None
    staleness: int = 0
    params_bytes: int | None = None

    @property
    def sum_index(self) -> int:
        """Index of the round that sums the updates."""
        return self.round_index + self.staleness


#: An attribute of `Reports`: an array, or arrays by name; the first axis is the clients.
Column = np.ndarray | Mapping[str, "Column"] | None


@dataclass(frozen=True)
class Reports:
    """Reports of k clients after local training.

    Attributes:
      client, block, num_examples, num_steps: (k,) int64; `block` is the index of the client block.
      train_loss: (k,) float64, mean over a client's steps; NaN without a step.
      seconds: (k,) float64, time from loading a client to the end of its reports.
      sent_bytes: (k,) int64, size of the update as sent, see `Update`, including buffers.
      peaks: vector name -> (k, leaves) float64, largest absolute entry of each leaf.
      counters: integer buffer -> (k,) int64.
      methods: method name -> name of a small report -> (k, ...) values.
      personal: (k, domains, classes) float64, test score of each client's personal model by domain and class, or
        (k, 1, 1) on the client's test rows; None without personal models or layers, and in rounds without evaluation.
      origin: (k,) texts, origin of a non-finite update, see `first_nonfinite`; empty for finite updates.
    """

    client: np.ndarray
    block: np.ndarray
    num_examples: np.ndarray
    num_steps: np.ndarray
    train_loss: np.ndarray
    seconds: np.ndarray
    sent_bytes: np.ndarray
    peaks: Mapping[str, np.ndarray]
    counters: Mapping[str, np.ndarray]
    methods: Mapping[str, Mapping[str, np.ndarray]]
    personal: np.ndarray | None = None
    origin: np.ndarray | None = None

    @classmethod
    def joined(cls, parts: Sequence[Reports]) -> Reports:
        """Return the concatenated reports of several groups of clients.

        Raises:
          MethodError: clients reported different names or shapes.
        """
        names = cls.__dataclass_fields__
        columns = {name: _joined(name, [getattr(part, name) for part in parts]) for name in names}
        return cls(**columns)  # type: ignore[arg-type]  # each column has the type of those it was joined from

    def ordered(self, order: np.ndarray) -> Reports:
        """Return the reports with the clients in another order. order: (k,) int64."""

        def taken(column: np.ndarray | None) -> np.ndarray | None:
            return None if column is None else column[order]

        columns = {name: map_leaves(taken, getattr(self, name)) for name in self.__dataclass_fields__}
        return Reports(**columns)


def bytes_up(reports: Reports, layout: Layout) -> int:
    """Return the bytes that clients sent: updates, reports and reported vectors."""
    vectors = 4 * layout.num_params * len(reports.client) * (len(reports.peaks) - 1)
    return message_bytes(reports.methods) + int(reports.sent_bytes.sum()) + vectors


def bytes_down(message: RoundMessage, layout: Layout) -> int:
    """Return the bytes that a client receives; `overheard` is not counted."""
    params = 4 * sum(leaf.size for leaf in layout.params if leaf.is_shared)
    encoded = params if message.params_bytes is None else message.params_bytes
    return layout.shared_bytes - params + encoded + message_bytes(message.fields)


@dataclass(frozen=True)
class TaskResult:
    """Result of a finished task: the reports, and handles of the trainer's vectors and of the new client memories."""

    reports: Reports
    place: Handle
    memories: tuple[Handle, ...]


@dataclass(frozen=True)
class TaskClients:
    """Clients (k,) int64 of a task; for a sum, also their weights."""

    clients: np.ndarray
    weights: Packed = None


class Slice(NamedTuple):
    """Examples start..end of a held-out set: "test", "validation" or "test-NAME"."""

    held_out: str
    start: int
    end: int


class Columns(NamedTuple):
    """Entries start..end of updates."""

    start: int
    end: int


@dataclass(frozen=True)
class EvaluationPoint:
    """A global model to score: (num_state,) float32, counters, and arrays that replace leaves, by name."""

    state: np.ndarray
    counters: Mapping[str, int]
    override: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Snapshot:
    """State of the server, without client memory: (num_state,) float32, counters, and server states of methods.

    turns: simulated time, clients at work, and the messages that these received; None without simulated time.
    """

    state: np.ndarray
    counters: Mapping[str, int]
    methods: Mapping[str, Packed]
    turns: Packed = None


def _joined(name: str, parts: list[Column]) -> Column:
    first = parts[0]
    if isinstance(first, Mapping):
        mappings = [part for part in parts if isinstance(part, Mapping)]
        if any(part.keys() != first.keys() for part in mappings):
            raise MethodError(
                "clients reported different names",
                f"report {name!r}",
                "report the same names for every client; use NaN where a client has no value",
            )
        return {key: _joined(key, [part[key] for part in mappings]) for key in first}
    try:
        return None if first is None else np.concatenate([part for part in parts if isinstance(part, np.ndarray)])
    except ValueError as error:
        raise MethodError(
            f"clients reported different shapes ({error})", f"report {name!r}", "report one shape for every client"
        ) from error
