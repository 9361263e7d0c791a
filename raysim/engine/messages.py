"""What crosses between server and trainers: frozen records of NumPy arrays, the same with and without Ray.

k clients of a task, K of a cohort, N of the population. Arrays that arrive may be read-only: they lie in a store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from raysim.core.errors import MethodError

#: What `transport.pack` makes of a method's value: arrays in dicts, lists and tuples.
Packed = Any

#: Name of a vector -> (k, its size) float32: "update" (num_state), or "method/name" of a reported `Vector` (num_params).
Vectors = dict[str, np.ndarray]

#: Method name -> name -> (k, ...): what methods reported.
MethodReports = Mapping[str, Mapping[str, np.ndarray]]


@dataclass(frozen=True)
class RoundMessage:
    """What the server sends once a round to all trainers.

    Attributes:
      phase_index: which phase's methods and settings hold.
      state: (num_state,) float32, what clients start from: the broadcast point, then the buffers.
      counters: integer buffers, such as BatchNorm's number of batches.
      fields: method name -> its message fields.
      is_scored: whether the round is evaluated, so that personal models are scored, too.
    """

    round_index: int
    phase_index: int
    state: np.ndarray
    counters: Mapping[str, int]
    fields: Mapping[str, Packed]
    is_scored: bool


@dataclass(frozen=True)
class ClientReport:
    """One client after its local work.

    Attributes:
      block: index of its client block.
      train_loss: mean over its steps, NaN without any.
      peaks: vector name -> (leaves,) float64, largest absolute entry of each leaf.
      personal: (domains, classes) float64, test accuracy of its own model by domain and class, or (1, 1) on its own
        test rows; None unless layers are personal.
    """

    client: int
    block: int
    num_examples: int
    num_steps: int
    train_loss: float
    seconds: float
    peaks: Mapping[str, np.ndarray]
    counters: Mapping[str, int]
    methods: Mapping[str, Mapping[str, np.ndarray]]
    personal: np.ndarray | None = None


@dataclass(frozen=True)
class Reports:
    """Reports of k clients: every attribute of `ClientReport` with a leading axis of clients."""

    client: np.ndarray
    block: np.ndarray
    num_examples: np.ndarray
    num_steps: np.ndarray
    train_loss: np.ndarray
    seconds: np.ndarray
    peaks: Mapping[str, np.ndarray]
    counters: Mapping[str, np.ndarray]
    methods: MethodReports
    personal: np.ndarray | None = None

    @classmethod
    def of(cls, rows: Sequence[ClientReport]) -> Reports:
        """Stack the reports of single clients.

        Raises:
          MethodError: clients reported different names or shapes.
        """
        return cls(**{name: _stacked(name, [getattr(row, name) for row in rows]) for name in cls.__dataclass_fields__})

    @classmethod
    def joined(cls, parts: Sequence[Reports], order: np.ndarray) -> Reports:
        """Several reports as one, with the axis of clients in the given order ((K,) int64)."""
        return cls(**{name: _joined([getattr(p, name) for p in parts], order) for name in cls.__dataclass_fields__})


@dataclass(frozen=True)
class TaskResult:
    """A finished task: its reports are here; handles say where its vectors and the clients' new memories lie."""

    reports: Reports
    vectors: Any
    memories: tuple[Any, ...]


@dataclass(frozen=True)
class Share:
    """Some clients of a task: their rows (k,) int64 in its vectors and, where a sum is asked for, their weights."""

    rows: np.ndarray
    weights: Packed = None


class Slice(NamedTuple):
    """Examples start..end of a held-out set: "test", "validation" or "test-NAME"."""

    held_out: str
    start: int
    end: int


@dataclass(frozen=True)
class FoldRequest:
    """Which vector to sum, and the rounding constants (leaves,) float64 of the whole cohort."""

    vector: str
    constants: np.ndarray


@dataclass(frozen=True)
class MapRequest:
    """function(what it is given, shared), to be called where that lies."""

    function: Callable[..., Any]
    shared: Packed


@dataclass(frozen=True)
class EvaluationPoint:
    """A global model to be scored: (num_state,) float32, counters, and arrays that stand in the place of leaves."""

    state: np.ndarray
    counters: Mapping[str, int]
    override: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Snapshot:
    """All of the server that a later round depends on, but client memory: (num_state,) float32, counters, server states."""

    state: np.ndarray
    counters: Mapping[str, int]
    methods: Mapping[str, Packed]


@dataclass(frozen=True)
class PoolCounts:
    """What a round took in machines.

    Attributes:
      sum_mb: partial sums that came from other nodes; redone_blocks: trained again after a loss.
    """

    trainers: int
    nodes: int
    sum_mb: float = 0.0
    redone_blocks: int = 0


def _stacked(name: str, column: list[Any]) -> Any:
    """One attribute of several clients -> an array, or a dict of arrays, with a leading axis of clients."""
    first = column[0]
    if first is None:
        return None
    if isinstance(first, Mapping):
        if any(item.keys() != first.keys() for item in column):
            raise MethodError(
                "clients reported different names",
                f"report {name!r}",
                "report the same names for every client; use NaN where one has no value",
            )
        return {key: _stacked(key, [item[key] for item in column]) for key in first}
    try:
        return np.stack([np.asarray(item) for item in column])
    except ValueError as error:
        raise MethodError(
            f"clients reported different shapes ({error})", f"report {name!r}", "report one shape for every client"
        ) from error


def _joined(parts: list[Any], order: np.ndarray) -> Any:
    if parts[0] is None:
        return None
    if isinstance(parts[0], Mapping):
        return {key: _joined([part[key] for part in parts], order) for key in parts[0]}
    return np.concatenate(parts)[order]
