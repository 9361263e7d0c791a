"""Scoring a global model: held-out sets in fixed slices, shared out over the trainers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from raysim.core.method import Value
from raysim.core.seeding import torch_generator
from raysim.engine.messages import (
    EvaluationPoint,
    GradientRequest,
    MapRequest,
    Packed,
    Slice,
    UpdateRequest,
    pack,
    unpack,
)
from raysim.engine.pool import Pool
from raysim.engine.trainer import Trainer
from raysim.training.evaluate import Score, features_of, joined_slices
from raysim.training.inputs import bounds_of
from raysim.training.local import train_locally
from raysim.training.model import seed_global_stream

#: Rows of a slice of a large set; slices of a smaller one, as long as they have this many rows: with fewer, the passes of a
#: ResNet-18 cost a third more.
SLICE_ROWS, SLICES, FEWEST_ROWS = 512, 8, 64


def slices_of(name: str, count: int, batch_size: int) -> list[Slice]:
    """Cut a held-out set into slices of whole batches, or into equal parts for a small set.

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


#: call(trainer, point, request, slices) -> an answer for each slice.
ModelCall = Callable[[Trainer, EvaluationPoint, Any, Sequence[Slice]], list[Packed]]


def map_features(
    trainer: Trainer, point: EvaluationPoint, request: MapRequest, slices: Sequence[Slice]
) -> list[Packed]:
    """function(features, labels, shared) of each slice; features: see `features_of`."""
    answers = []
    with trainer.global_model(point):
        for part in slices:
            examples = trainer.data.slice(part)
            features = features_of(trainer.model, examples, trainer.transform, batch_size=trainer.evaluation_batch)
            # Anew for each slice: a function that writes to it would else tell the trainers apart.
            shared = unpack(request.shared, trainer.model.device)
            answers.append(pack(request.function(features, examples.targets, shared)))
    return answers


def map_test(trainer: Trainer, point: EvaluationPoint, request: MapRequest, slices: Sequence[Slice]) -> list[Packed]:
    """[function(model, batch, shared) for each batch] of each slice, in eval mode."""
    answers = []
    with trainer.global_model(point), torch.no_grad():
        trainer.module.eval()
        for part in slices:
            shared = unpack(request.shared, trainer.model.device)
            batches = trainer.batches_of(trainer.data.slice(part))
            answers.append([pack(request.function(trainer.model, batch, shared)) for batch in batches])
    return answers


def validation_gradient(
    trainer: Trainer, point: EvaluationPoint, request: GradientRequest, slices: Sequence[Slice]
) -> list[Packed]:
    """(num_params,): see `ServerView.validation_gradient`; `slices` is the whole set as one."""
    with trainer.global_model(point):
        return [pack(trainer.on_validation(trainer.model.mean_gradient, *request)) for _ in slices]


def validation_update(
    trainer: Trainer, point: EvaluationPoint, request: UpdateRequest, slices: Sequence[Slice]
) -> list[Packed]:
    """(num_params,): see `ServerView.validation_update`; `slices` is the whole set as one."""
    answers, model = [], trainer.model
    for part in slices:
        with trainer.global_model(point):
            begin = model.params.clone()
            seed_global_stream(request.seed, model.device)
            examples, draws = trainer.data.slice(part), torch_generator(request.seed)
            settings = trainer.phases[request.phase_index].settings
            train_locally(
                model, model.criterion, None, examples, trainer.transform, settings, lr=request.lr, generator=draws
            )
            answers.append(pack(model.params - begin))
    return answers


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
        """Return a model's scores on the named held-out sets, by default on all sets with examples.

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
        return found | {name: joined_slices(scores) for name, scores in parts.items()}

    def on_test(self, call: ModelCall, request: MapRequest, state: Tensor, counters: Mapping[str, int]) -> list[Value]:
        """What `map_features` or `map_test` gives for the slices of the test set at a model, in their order."""
        point = EvaluationPoint(pack(state), dict(counters), {})
        return [unpack(answer) for answer in self._pool.on_slices(call, point, request, self._slices("test"))]

    def on_validation(
        self, call: ModelCall, request: GradientRequest | UpdateRequest, state: Tensor, counters: Mapping[str, int]
    ) -> Tensor:
        """[num_params]: `validation_gradient` or `validation_update` of a model.

        One trainer takes the whole set, since batches make one sum, or one path, in order.
        """
        point = EvaluationPoint(pack(state), dict(counters), {})
        (answer,) = self._pool.on_slices(call, point, request, [Slice("validation", 0, self._counts["validation"])])
        vector: Tensor = unpack(answer)
        return vector

    def _slices(self, name: str) -> list[Slice]:
        return slices_of(name, self._counts.get(name, 0), self._batch_size)
