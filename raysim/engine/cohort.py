"""The clients of one round after their local work: their reports are here, their updates stay where they were made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raysim.core.layout import Layout
from raysim.core.weights import Weights, take
from raysim.engine.messages import FoldRequest, MapRequest, Reports, Share, TaskResult
from raysim.engine.pool import Pool
from raysim.engine.transport import pack, readonly_tensor, unpack
from raysim.training.aggregate import rounding_constants


class Cohort:
    """The task results of one round, seen as K clients in ascending order.

    Attributes:
      clients: (K,) int64 ids.
      reports: of all K clients.
      is_kept: (K,) bool; dropped clients take no part in sums and maps.
    """

    def __init__(self, results: Sequence[TaskResult], pool: Pool, layout: Layout):
        self.results = tuple(results)
        self._pool, self._layout = pool, layout
        sizes = [len(result.reports.client) for result in results]
        ids = np.concatenate([result.reports.client for result in results])
        order = np.argsort(ids)
        self.clients = ids[order]
        self._owner = np.repeat(np.arange(len(sizes)), sizes)[order]
        self._row = np.concatenate([np.arange(size) for size in sizes])[order]
        self.reports = Reports.joined([result.reports for result in results], order)
        self.is_kept = np.ones(len(ids), bool)

    def drop(self, is_bad: np.ndarray) -> None:
        """Leave clients out of everything that follows. is_bad: (K,) bool."""
        self.is_kept &= ~is_bad

    def kept(self, array: np.ndarray) -> Tensor:
        """The rows of the kept clients. array: (K, ...)."""
        return torch.from_numpy(np.ascontiguousarray(array[self.is_kept]))

    def has_nonfinite_update(self) -> np.ndarray:
        """(K,) bool: an update or a reported Vector holds an infinity or NaN."""
        is_bad = np.zeros(len(self.clients), bool)
        for peaks in self.reports.peaks.values():
            is_bad |= ~np.isfinite(peaks).all(axis=1)
        return is_bad

    def total(self, vector: str, weights: Weights) -> Tensor:
        """Exact weighted sum over the kept clients, computed where the vectors lie.

        Args:
          vector: "update", or "method/name" of a reported Vector.
          weights: for the kept clients.
        Returns:
          float64: [num_state] for the update, else [num_params].
        """
        size = self._layout.num_state if vector == "update" else self._layout.num_params
        total = torch.zeros(size, dtype=torch.float64)
        parts = self._parts()
        if not parts:
            return total
        peaks = self.reports.peaks
        constants = rounding_constants(
            self._layout, weights, self.kept(peaks[vector]) if vector in peaks else torch.zeros(0, 0)
        )
        shares = [(result, Share(rows, pack(take(weights, places)))) for result, rows, places in parts]
        for partial in self._pool.at_results("fold", FoldRequest(vector, pack(constants)), shares, adds=True):
            total += readonly_tensor(partial)
        return total

    def map_updates(self, function: Callable[[Tensor, Any], Any], shared: Any = None) -> list[Any]:
        """function(update [num_params], shared) of every kept client in ascending order, run where the updates lie."""
        parts = self._parts()
        shares = [(result, Share(rows)) for result, rows, _ in parts]
        answers = self._pool.at_results("map_updates", MapRequest(function, pack(shared)), shares)
        ordered: list[Any] = [None] * int(self.is_kept.sum())
        for (_, _, places), values in zip(parts, answers, strict=True):
            for place, value in zip(places.tolist(), values, strict=True):
                ordered[place] = unpack(value)
        return ordered

    def _parts(self) -> list[tuple[TaskResult, np.ndarray, Tensor]]:
        """(result, kept rows in it, their places among the kept clients) for each task result that has any."""
        place = np.cumsum(self.is_kept) - 1
        parts = []
        for index, result in enumerate(self.results):
            kept = np.flatnonzero((self._owner == index) & self.is_kept)
            if len(kept):
                kept = kept[np.argsort(self._row[kept])]
                parts.append((result, self._row[kept], torch.from_numpy(place[kept])))
        return parts
