"""Scoring a global model: held-out sets in fixed slices, shared out over the trainers."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from raysim.engine.messages import EvaluationPoint, MapRequest
from raysim.engine.pool import Pool
from raysim.engine.transport import pack, unpack
from raysim.training.evaluate import Score

#: Rows of a slice: never a function of the trainers, so that sums of losses have the same bits.
EVALUATION_SLICE = 2048


class Scorer:
    """Scores models on the held-out sets.

    Args:
      counts: name of a held-out set ("test", "validation") -> its number of examples.
    """

    def __init__(self, pool: Pool, counts: Mapping[str, int]):
        self._pool, self._counts = pool, dict(counts)

    def score(
        self, name: str, state: Tensor, counters: Mapping[str, int], override: Mapping[str, Tensor] | None = None
    ) -> Score:
        """Score of a model on a held-out set.

        Args:
          state: [num_state].
          override: leaf name -> what stands in its place, of any shape with which the model can run.
        """
        point = EvaluationPoint(pack(state), dict(counters), pack(dict(override or {})))
        return functools.reduce(operator.add, self._pool.on_slices("evaluate", point, name, self._slices(name)))

    def map_features(
        self, function: Callable[[Tensor, Tensor, Any], Any], shared: Any, state: Tensor, counters: Mapping[str, int]
    ) -> list[Any]:
        """function(features, labels, shared) of each slice of the test set at a model, in their order."""
        point, request = EvaluationPoint(pack(state), dict(counters), {}), MapRequest(function, pack(shared))
        return [unpack(v) for v in self._pool.on_slices("map_features", point, request, self._slices("test"))]

    def _slices(self, name: str) -> list[tuple[int, int]]:
        count = self._counts[name]
        return [(start, min(count, start + EVALUATION_SLICE)) for start in range(0, count, EVALUATION_SLICE)]
