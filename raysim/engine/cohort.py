"""The clients of one round after local training: the server holds their reports; trainers hold their updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from raysim.base.errors import RaysimError
from raysim.base.texts import round_name
from raysim.core.layout import Layout, Leaf
from raysim.core.method import Value
from raysim.core.weights import Weights, take
from raysim.engine.messages import Columns, Handle, Reports, TaskClients, TaskResult, pack, readonly_tensor, unpack
from raysim.engine.pool import Pool
from raysim.engine.trainer import Trainer, mapped_columns, mapped_updates
from raysim.training.aggregate import rounding_constants

#: A sum is computed in parts of whole leaves, each with at least this many entries (32 MiB in float64). A sum of all
#: leaves would take twice the model's bytes, in every process and, from all nodes at once, in the object store.
SUM_ENTRIES = 2**22

#: Columns are cut into about BLOCKS blocks, each with at least FEWEST_COLUMNS columns and at most MOST_ENTRIES entries
#: (64 MiB).
BLOCKS, FEWEST_COLUMNS, MOST_ENTRIES = 32, 2**12, 2**24


def leaf_cuts(leaves: Sequence[Leaf]) -> list[tuple[int, int]]:
    """Return (first, last) of consecutive ranges of leaves; each range is summed separately.

    Example:
      >>> layout = Layout(tuple(Leaf(str(i), (2**21,), i * 2**21, "", "") for i in range(5)))
      >>> leaf_cuts(layout.leaves)
      [(0, 2), (2, 4), (4, 5)]
    """
    cuts, first, entries = [], 0, 0
    for index, leaf in enumerate(leaves, 1):
        entries += leaf.size
        if entries >= SUM_ENTRIES or index == len(leaves):
            cuts.append((first, index))
            first, entries = index, 0
    return cuts


def column_cuts(num_params: int, num_clients: int) -> list[Columns]:
    """Return blocks of columns for `num_clients` updates; the blocks do not depend on the number of trainers."""
    width = max(FEWEST_COLUMNS, math.ceil(num_params / BLOCKS))
    width = max(1, min(width, MOST_ENTRIES // max(1, num_clients)))
    return [Columns(start, min(num_params, start + width)) for start in range(0, num_params, width)]


class Cohort:
    """The task results of one round as K clients in ascending order of their ids.

    Attributes:
      reports: reports of all K clients.
      clients: (K,) int64 ids.
      is_kept: (K,) bool; False for dropped clients, which are left out of sums and maps.
      logged: numbers that methods logged before the latecomers trained, by "method/name".
    """

    def __init__(self, results: Sequence[TaskResult], pool: Pool, layout: Layout):
        self._results, self._pool, self._layout = tuple(results), pool, layout
        reports = Reports.joined([result.reports for result in results])
        # Tasks end in any order; sorted by client, results do not depend on that order.
        self.reports = reports.ordered(np.argsort(reports.client))
        self.clients = self.reports.client
        self.is_kept = np.ones(len(self.clients), bool)
        self.logged: dict[str, float] = {}

    def drop(self, is_bad: np.ndarray) -> None:
        """Drop clients from all later sums, maps and kept rows. is_bad: (K,) bool."""
        self.is_kept &= ~is_bad

    def kept(self, array: np.ndarray) -> Tensor:
        """Return the rows of the kept clients. array: (K, ...)."""
        return torch.from_numpy(np.ascontiguousarray(array[self.is_kept]))

    def has_nonfinite_update(self) -> np.ndarray:
        """Return (K,) bool: whether a client's update or a reported Vector holds an infinity or NaN."""
        is_bad: np.ndarray = np.any([~np.isfinite(peaks).all(1) for peaks in self.reports.peaks.values()], axis=0)
        return is_bad

    def drop_nonfinite(self, round_index: int, *, skips: bool) -> None:
        """Drop clients with non-finite updates.

        Raises:
          RaysimError: an update is not finite and `skips` is False, or all updates are not finite.
        """
        is_bad = self.has_nonfinite_update()
        if is_bad.any() and (not skips or is_bad.all()):
            bad = self.clients[is_bad].tolist()
            named = f"client {', '.join(map(str, bad[:5]))}{' ...' if len(bad) > 5 else ''}"
            skip = "" if is_bad.all() else ", or set on_nonfinite to skip to continue the round without the clients"
            raise RaysimError(
                f"non-finite updates of all {len(bad)} clients" if is_bad.all() else f"non-finite update of {named}",
                round_name(round_index),
                f"{self.first_nonfinite()}{skip}",
            )
        self.drop(is_bad)

    def first_nonfinite(self) -> str:
        """Return a sentence with the origin and the remedy for the first client with a non-finite update."""
        reports, row = self.reports, int(np.flatnonzero(self.has_nonfinite_update())[0])
        client = f"client {self.clients[row]}"
        if np.isfinite(reports.peaks["update"][row]).all():
            name = next(name for name, peaks in reports.peaks.items() if not np.isfinite(peaks[row]).all())
            return f"the update of {client} is finite, but its report {name} is not: look at the method's report"
        if reports.origin is None or not reports.origin[row]:
            mend = "lower local.lr; if NaN remains, check model, loss, augmentation and images"
            return f"the mean loss of {client} was {reports.train_loss[row]:g}: {mend}"
        return f"the first number of {client} that was not finite was in {reports.origin[row]}"

    def memories(self) -> Iterator[tuple[int, Handle]]:
        """Return (client, handle of the new memory) of each kept client with memory."""
        kept = set(self.clients[self.is_kept].tolist())
        for result in self._results:
            for client, memory in zip(result.reports.client.tolist(), result.memories, strict=False):
                if memory is not None and client in kept:
                    yield client, memory

    def total(self, vector: str, weights: Weights) -> Tensor:
        """Return the exact weighted sum over the kept clients, computed by the trainers that hold the vectors.

        Args:
          vector: "update", or "method/name" of a reported Vector.
          weights: weights of the kept clients.
        Returns:
          float64: [num_state] for "update", else [num_params].
        """
        leaves = self._layout.leaves if vector == "update" else self._layout.params
        total = torch.zeros(leaves[-1].end, dtype=torch.float64)
        if not self.is_kept.any():
            return total
        # One grid for the whole cohort, computed before the first addition, makes the partial sums exact.
        constants = rounding_constants(self._layout, weights, self.kept(self.reports.peaks[vector]))
        for first, last in leaf_cuts(leaves):
            call = partial(Trainer.fold, vector=vector, constants=pack(constants[first:last]), first=first, last=last)
            some = {leaf.name: weights[leaf.name] for leaf in leaves[first:last] if leaf.name in weights}
            into = total[leaves[first].offset : leaves[last - 1].end]
            for part in self._pool.at_results(call, self._parts(some), adds=True):
                into += readonly_tensor(part)
            del part  # frees room in the object store for the next parts
        return total

    def map_updates(self, function: Callable[[Tensor, Value], Value], shared: Value = None) -> list[Value]:
        """Return function(update [num_params], shared) for every kept client in ascending order; trainers call it."""
        parts = self._parts()
        answers: dict[int, Value] = {}
        call = partial(mapped_updates, function=function, shared=pack(shared))
        for (_, part), values in zip(parts, self._pool.at_results(call, parts, adds=False), strict=True):
            answers |= dict(zip(part.clients.tolist(), values, strict=True))
        return [unpack(answers[client]) for client in self.clients[self.is_kept].tolist()]

    def map_columns(
        self, function: Callable[[Tensor, Tensor, Value], Value], shared: Value = None, rows: Tensor | None = None
    ) -> list[Value]:
        """Return function(block, extra, shared) for each block of columns of the kept updates; see `ServerView`."""
        size = self._layout.num_params
        extra = torch.zeros(0, size) if rows is None else rows.float()
        cuts = column_cuts(size, int(self.is_kept.sum()))
        if not self.is_kept.any():  # no trainer holds a row
            return [function(torch.zeros(0, end - start), extra[:, start:end], shared) for start, end in cuts]
        call = partial(mapped_columns, function=function, shared=pack(shared), extra=pack(extra))
        return [unpack(answer) for answer in self._pool.on_columns(call, self._parts(), cuts)]

    def _parts(self, weights: Weights | None = None) -> list[tuple[TaskResult, TaskClients]]:
        """Return (result, kept clients with their weights) for each task result with kept clients.

        weights: weights of all kept clients.
        """
        kept, parts = self.clients[self.is_kept], []
        for result in self._results:
            ids = result.reports.client
            clients = ids[self.is_kept[np.searchsorted(self.clients, ids)]]
            if len(clients):
                places = torch.from_numpy(np.searchsorted(kept, clients))
                parts.append((result, TaskClients(clients, pack(take(weights or {}, places)))))
        return parts


def counters_of(cohort: Cohort, layout: Layout, before: Mapping[str, int]) -> dict[str, int]:
    """Return the integer buffers of the new global model: the largest value of the cohort for each buffer.

    A weighted mean would not be an integer. Buffers of personal layers keep the value in `before`.
    """
    if not cohort.is_kept.any():
        return dict(before)
    shared, personal = ({leaf.layer for leaf in leaves} for leaves in (layout.shared, layout.personal))
    unshared = personal - shared
    return {
        name: before.get(name, 0) if name.rpartition(".")[0] in unshared else int(cohort.kept(values).max())
        for name, values in cohort.reports.counters.items()
    }
