"""Scores of a global model: held-out sets are cut into fixed slices, which the trainers share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from raysim.core.method import Value
from raysim.core.seeding import torch_generator
from raysim.engine.messages import EvaluationPoint, Packed, Slice, pack, unpack
from raysim.engine.pool import Pool
from raysim.engine.trainer import Trainer
from raysim.training.evaluate import Score, features_of, joined_slices
from raysim.training.inputs import bounds_of
from raysim.training.local import train_locally
from raysim.training.model import seed_global_stream

#: A slice of a large set has SLICE_ROWS rows. A small set has up to SLICES slices with at least FEWEST_ROWS rows each;
#: with fewer rows, the passes of a ResNet-18 cost a third more.
SLICE_ROWS, SLICES, FEWEST_ROWS = 512, 8, 64


def slices_of(name: str, count: int, batch_size: int) -> list[Slice]:
    """Cut a held-out set into slices of whole batches, or a small set into equal parts.

    Slices depend only on the set's size and the batch size, so that sums of losses have the same bits for any number of
    trainers.
    """
    num_slices = min(SLICES, 1 << max(1, count // FEWEST_ROWS).bit_length() - 1)  # a power of two
    rows = min(max(SLICE_ROWS, batch_size), max(1, math.ceil(count / num_slices)))
    rows = rows // batch_size * batch_size or rows
    return [Slice(name, start, end) for start, end in bounds_of(count, rows)]


#: call(trainer, slices) -> an answer for each slice; the global model to score is loaded in the trainer.
ModelCall = Callable[[Trainer, Sequence[Slice]], list[Packed]]


def map_features(
    trainer: Trainer, slices: Sequence[Slice], *, function: Callable[..., Value], shared: Packed
) -> list[Packed]:
    """Return function(features, labels, shared) for each slice; features: see `features_of`."""
    answers = []
    for part in slices:
        examples = trainer.data.slice(part)
        features = features_of(trainer.model, examples, trainer.transform, batch_size=trainer.evaluation_batch)
        # A copy for each slice: if the function writes to it, results must not depend on which slices a trainer has.
        unpacked = unpack(shared, trainer.model.device)
        answers.append(pack(function(features, examples.targets, unpacked)))
    return answers


@torch.no_grad()
def map_test(
    trainer: Trainer, slices: Sequence[Slice], *, function: Callable[..., Value], shared: Packed
) -> list[Packed]:
    """Return [function(model, batch, shared) for each batch] for each slice, in eval mode."""
    answers = []
    trainer.module.eval()
    for part in slices:
        unpacked = unpack(shared, trainer.model.device)
        answers.append(
            [pack(function(trainer.model, batch, unpacked)) for batch in trainer.batches_of(trainer.data.slice(part))]
        )
    return answers


def validation_gradient(
    trainer: Trainer, slices: Sequence[Slice], *, batch_size: int, seed: int, mode: str
) -> list[Packed]:
    """Return (num_params,), see `ServerView.validation_gradient`; `slices` is one slice of the whole set."""
    return [pack(trainer.on_validation(trainer.model.mean_gradient, batch_size, seed, mode)) for _ in slices]


def validation_update(
    trainer: Trainer, slices: Sequence[Slice], *, phase_index: int, lr: float, seed: int
) -> list[Packed]:
    """Return (num_params,), see `ServerView.validation_update`; `slices` is one slice of the whole set."""
    (part,), model = slices, trainer.model
    begin = model.params.clone()
    seed_global_stream(seed, model.device)
    examples, settings = trainer.data.slice(part), trainer.phases[phase_index].settings
    train_locally(
        model, model.criterion, None, examples, trainer.transform, settings, lr=lr, generator=torch_generator(seed)
    )
    return [pack(model.params - begin)]


class Scorer:
    """Scores models on the held-out sets.

    Args:
      counts: name of a held-out set ("test", "validation", "unseen", "test-NAME") -> number of examples.
      batch_size: batch size of the forward passes.
    """

    def __init__(self, pool: Pool, counts: Mapping[str, int], batch_size: int):
        self._pool, self._batch_size = pool, batch_size
        self._counts = {name: count for name, count in counts.items() if count}

    def scores(
        self,
        state: Tensor,
        counters: Mapping[str, int],
        override: Mapping[str, Tensor] | None = None,
        computed: Mapping[str, Score] | None = None,
        *,
        names: Iterable[str] | None = None,
    ) -> dict[str, Score]:
        """Return a model's scores on the named held-out sets, by default on all sets with examples.

        Args:
          state: [num_state].
          override: leaf name -> tensor that replaces the leaf, of any shape with which the model can run.
          computed: scores of this model that were computed before.
        """
        scores = dict(computed or {})
        missing = [name for name in (self._counts if names is None else names) if name not in scores]
        # One call for the slices of all sets, so that trainers do not wait at the end of each set.
        slices = [part for name in missing for part in self._slices(name)]
        if not slices:
            return scores
        point = EvaluationPoint(pack(state), dict(counters), pack(dict(override or {})))
        parts: dict[str, list[Score]] = {}
        for part, score in zip(slices, self._pool.on_slices(Trainer.evaluate, point, slices), strict=True):
            parts.setdefault(part.held_out, []).append(score)
        return scores | {name: joined_slices(of_slices) for name, of_slices in parts.items()}

    def on_test(self, call: ModelCall, state: Tensor, counters: Mapping[str, int]) -> list[Value]:
        """Return the answers of `map_features` or `map_test` for a model, one per slice of the test set, in order."""
        point = EvaluationPoint(pack(state), dict(counters), {})
        return [unpack(answer) for answer in self._pool.on_slices(call, point, self._slices("test"))]

    def on_validation(self, call: ModelCall, state: Tensor, counters: Mapping[str, int]) -> Tensor:
        """Return [num_params]: `validation_gradient` or `validation_update` of a model.

        One trainer computes it on the whole set: both process the batches in order.
        """
        point = EvaluationPoint(pack(state), dict(counters), {})
        (answer,) = self._pool.on_slices(call, point, [Slice("validation", 0, self._counts["validation"])])
        vector: Tensor = unpack(answer)
        return vector

    def _slices(self, name: str) -> list[Slice]:
        return slices_of(name, self._counts.get(name, 0), self._batch_size)
