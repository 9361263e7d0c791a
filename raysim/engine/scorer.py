"""Scoring a global model: held-out sets in fixed slices, shared out over the trainers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from raysim.core.method import Value
from raysim.engine.messages import EvaluationPoint, GradientRequest, MapRequest, Slice, pack, unpack
from raysim.engine.pool import Pool
from raysim.engine.trainer import Trainer
from raysim.training.evaluate import Score, joined
from raysim.training.inputs import bounds_of

#: Rows of a slice of a large set; slices of a smaller one, as long as they have this many rows: with fewer, the passes of a
#: ResNet-18 cost a third more.
SLICE_ROWS, SLICES, FEWEST_ROWS = 512, 8, 64


def slices_of(name: str, count: int, batch_size: int) -> list[Slice]:
    """A held-out set in slices that share out well: whole batches, or equal parts of one where the set has few.

    They depend on the set's size and the batch size alone, never on the trainers, so that sums of losses have the same
    bits.
    """
    num_slices = min(SLICES, _power_of_two(count // FEWEST_ROWS))
    rows = min(max(SLICE_ROWS, batch_size), max(1, math.ceil(count / num_slices)))
    rows = rows // batch_size * batch_size or rows
    return [Slice(name, start, end) for start, end in bounds_of(count, rows)]


def _power_of_two(limit: int) -> int:
    """The largest one up to a limit; 1 for less."""
    return 1 << max(1, limit).bit_length() - 1


class Scorer:
    """Scores models on the held-out sets.

    Args:
      counts: name of a held-out set ("test", "validation", "unseen", "test-NAME") -> its number of examples.
      batch_size: of the forward passes.
    """

    def __init__(self, pool: Pool, counts: Mapping[str, int], batch_size: int):
        self._pool, self._batch_size = pool, batch_size
        self._counts = {name: count for name, count in counts.items() if count}

    def scores(
        self,
        state: Tensor,
        counters: Mapping[str, int],
        override: Mapping[str, Tensor] | None = None,
        known: Mapping[str, Score] | None = None,
        *,
        names: Iterable[str] | None = None,
    ) -> dict[str, Score]:
        """Scores of a model on the held-out sets that have examples, or on those named.

        Args:
          state: [num_state].
          override: leaf name -> what stands in its place, of any shape with which the model can run.
          known: scores of this model that are there already.
        """
        found = dict(known or {})
        missing = [name for name in (self._counts if names is None else names) if name not in found]
        # One call for the slices of all sets: the trainers then never wait for the end of one set.
        slices = [part for name in missing for part in self._slices(name)]
        if not slices:
            return found
        point = EvaluationPoint(pack(state), dict(counters), pack(dict(override or {})))
        parts: dict[str, list[Score]] = {}
        for part, score in zip(slices, self._pool.on_slices(Trainer.evaluate, point, None, slices), strict=True):
            parts.setdefault(part.held_out, []).append(score)
        return found | {name: joined(scores) for name, scores in parts.items()}

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

    def gradient(self, state: Tensor, counters: Mapping[str, int], request: GradientRequest) -> Tensor:
        """[num_params]: see `ServerView.validation_gradient`; one trainer takes it, since batches make one sum in order."""
        point, whole = (
            EvaluationPoint(pack(state), dict(counters), {}),
            Slice("validation", 0, self._counts["validation"]),
        )
        (answer,) = self._pool.on_slices(Trainer.validation_gradient, point, request, [whole])
        gradient: Tensor = unpack(answer)
        return gradient

    def _slices(self, name: str) -> list[Slice]:
        return slices_of(name, self._counts.get(name, 0), self._batch_size)
