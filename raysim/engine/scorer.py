"""Scoring a global model: held-out sets in fixed slices, shared out over the trainers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from raysim.engine.messages import EvaluationPoint, MapRequest, Slice
from raysim.engine.pool import Pool
from raysim.engine.transport import pack, unpack
from raysim.training.evaluate import Score, joined

#: Rows of a slice: never a function of the trainers, so that sums of losses have the same bits.
EVALUATION_SLICE = 2048


class Scorer:
    """Scores models on the held-out sets.

    Args:
      counts: name of a held-out set ("test", "validation", "test-NAME") -> its number of examples.
    """

    def __init__(self, pool: Pool, counts: Mapping[str, int]):
        self._pool, self._counts = pool, {name: count for name, count in counts.items() if count}

    def scores(
        self,
        state: Tensor,
        counters: Mapping[str, int],
        override: Mapping[str, Tensor] | None = None,
        names: Iterable[str] | None = None,
    ) -> dict[str, Score]:
        """Scores of a model on the held-out sets that have examples, or on those named.

        Args:
          state: [num_state].
          override: leaf name -> what stands in its place, of any shape with which the model can run.
        """
        point = EvaluationPoint(pack(state), dict(counters), pack(dict(override or {})))
        slices = [part for name in (self._counts if names is None else names) for part in self._slices(name)]
        parts = list(zip(slices, self._pool.on_slices("evaluate", point, None, slices), strict=True)) if slices else []
        own = {name: [score for part, score in parts if part.held_out == name] for name in self._counts}
        return {name: joined(found) for name, found in own.items() if found}

    def map_features(
        self, function: Callable[[Tensor, Tensor, Any], Any], shared: Any, state: Tensor, counters: Mapping[str, int]
    ) -> list[Any]:
        """function(features, labels, shared) of each slice of the test set at a model, in their order."""
        point, request = EvaluationPoint(pack(state), dict(counters), {}), MapRequest(function, pack(shared))
        return [unpack(v) for v in self._pool.on_slices("map_features", point, request, self._slices("test"))]

    def _slices(self, name: str) -> list[Slice]:
        count = self._counts.get(name, 0)
        return [Slice(name, start, min(count, start + EVALUATION_SLICE)) for start in range(0, count, EVALUATION_SLICE)]
