"""Scoring a global model: held-out sets in fixed slices, shared out over the trainers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from raysim.core.method import Value
from raysim.engine.messages import EvaluationPoint, MapRequest, Slice
from raysim.engine.pool import Pool
from raysim.engine.trainer import Trainer
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
        # One call for the slices of all sets: the trainers then never wait for the end of one set.
        slices = [part for name in (self._counts if names is None else names) for part in self._slices(name)]
        if not slices:
            return {}
        point = EvaluationPoint(pack(state), dict(counters), pack(dict(override or {})))
        parts: dict[str, list[Score]] = {}
        for part, score in zip(slices, self._pool.on_slices(Trainer.evaluate, point, None, slices), strict=True):
            parts.setdefault(part.held_out, []).append(score)
        return {name: joined(scores) for name, scores in parts.items()}

    def map_features(
        self,
        function: Callable[[Tensor, Tensor, Value], Value],
        shared: Value,
        state: Tensor,
        counters: Mapping[str, int],
    ) -> list[Value]:
        """function(features, labels, shared) of each slice of the test set at a model, in their order."""
        point, request = EvaluationPoint(pack(state), dict(counters), {}), MapRequest(function, pack(shared))
        answers = self._pool.on_slices(Trainer.map_features, point, request, self._slices("test"))
        return [unpack(answer) for answer in answers]

    def _slices(self, name: str) -> list[Slice]:
        count = self._counts.get(name, 0)
        return [Slice(name, start, min(count, start + EVALUATION_SLICE)) for start in range(0, count, EVALUATION_SLICE)]
