"""Tasks: loss, measurements of each scored example, and metrics computed from the measurements.

A task is a value, as a method is. Engine and methods call its functions and contain no code for single tasks.
Measurements are kept in the order of the set, so metrics have the same bits for any number of trainers.

    def median() -> Task:        # task: my_tasks:median
        return replace(REGRESSION, name="median", total=lambda outputs, targets: (outputs[:, 0] - targets).abs().sum())
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from raysim.base.direction import Direction
from raysim.core.method import Batch, LossFn, Outputs
from raysim.training import metrics as of
from raysim.training.inputs import constants

#: Name -> (n, ...) measurements of n scored examples.
Columns = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Task:
    """Kind of learning problem: loss, measurements and metrics.

    Attributes:
      name: name of the task in messages.
      total: total(outputs, targets) -> sum of the losses of B examples. Scalar. Arguments are (B, ...).
      measure: measure(outputs, targets) -> name -> (B, ...) measurements of each example; "labels" are classes, if any.
      metrics: metrics(columns, number of outputs) -> metrics of a whole set, including `main`.
      values: values(columns) -> (n,), one number for each example. finish(mean of the values of some examples) is the
        metric `of_part` of these examples.
      of_part: name of the metric of a part of the test set, such as a domain or a client's rows.
      main: name of the main metric, by which runs are compared.
      finish: finish(means) -> metric; see `values`.
      mean: mean(outputs, batch) -> mean loss of a batch; None: total / B.
      direction: which values of `main` and `of_part` are better, "max" or "min"; None: as for raysim's metrics of these
        names.
    """

    name: str
    total: Callable[[Tensor, Tensor], Tensor]
    measure: Callable[[Tensor, Tensor], Mapping[str, Tensor]]
    metrics: Callable[[Columns, int], dict[str, float]]
    values: Callable[[Columns], np.ndarray]
    of_part: str
    main: str
    finish: Callable[[np.ndarray], np.ndarray] = lambda means: means
    mean: LossFn | None = None
    direction: Direction | None = None

    @property
    def criterion(self) -> LossFn:
        """Return loss(outputs, batch), the mean loss of a batch: the loss of local training before any `loss` hook."""
        # A task made from CLASSES by replacing `total` must not keep the mean of CLASSES.
        is_of_total = self.mean is not cross_entropy or self.total is sum_of_cross_entropies
        if self.mean is not None and is_of_total:
            return self.mean
        return lambda outputs, batch: self.total(outputs.logits, batch.targets) / len(batch.targets)


def cross_entropy(outputs: Outputs, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of a batch. Scalar."""
    return F.cross_entropy(outputs.logits, batch.targets)


def sum_of_cross_entropies(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the cross-entropies of a batch. Scalar."""
    return F.cross_entropy(logits, targets, reduction="sum")


def _of_classes(columns: Columns, num_classes: int) -> dict[str, float]:
    hits = _hits(columns)
    balanced_accuracy, macro_f1 = of.class_scores(columns["labels"], columns["predictions"], num_classes)
    return {
        "accuracy": float(hits.sum()) / max(1, len(hits)),
        "balanced_accuracy": balanced_accuracy,
        "macro_f1": macro_f1,
        "calibration_error": of.calibration_error(columns["confidences"], hits),
    }


def _hits(columns: Columns) -> np.ndarray:
    """Return (n,) bool: whether the predicted class is the true class."""
    hits: np.ndarray = columns["predictions"] == columns["labels"]
    return hits


CLASSES = Task(
    "classes",
    total=sum_of_cross_entropies,
    measure=lambda logits, targets: {
        "labels": targets.int(),
        "predictions": logits.argmax(1).int(),
        "confidences": logits.softmax(1).amax(1),
    },
    metrics=_of_classes,
    values=_hits,
    of_part="accuracy",
    main="accuracy",
    mean=cross_entropy,
)


def _of_labels(columns: Columns, num_labels: int) -> dict[str, float]:
    """Return metrics as in scikit-learn. Constant labels are left out of the AUROC; F1 uses the threshold 0.5."""
    from sklearn.metrics import f1_score, roc_auc_score

    targets, scores = columns["targets"], columns["scores"].astype(np.float64)
    counts = targets.sum(0, dtype=np.int64)
    scored = (counts > 0) & (counts < len(targets))
    is_sound = bool(scored.any()) and bool(np.isfinite(scores).all())
    f1 = f1_score(targets, scores > 0, average="macro", zero_division=0) if len(targets) else float("nan")
    return {
        "auroc": float(roc_auc_score(targets[:, scored], scores[:, scored])) if is_sound else float("nan"),
        "macro_f1": float(f1),
        "exact_match": float((targets == (scores > 0)).all(1).sum()) / max(1, len(targets)),
    }


LABELS = Task(
    "labels",
    total=lambda logits, targets: (
        F.binary_cross_entropy_with_logits(logits, targets.float(), reduction="sum") / targets.shape[1]
    ),
    measure=lambda logits, targets: {"targets": targets, "scores": logits},
    metrics=_of_labels,
    values=lambda columns: (columns["targets"] == (columns["scores"] > 0)).mean(1),
    of_part="label_accuracy",
    main="auroc",
)


def _numbers(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs and targets, both (B, numbers)."""
    return logits, targets.reshape(len(targets), -1).to(logits.dtype)


def _of_numbers(columns: Columns, num_outputs: int) -> dict[str, float]:
    """Return RMSE and mean absolute error over all numbers, and R2 as in scikit-learn, the mean over the outputs."""
    targets, predictions = columns["targets"].astype(np.float64), columns["predictions"].astype(np.float64)
    errors = predictions - targets
    around = np.square(targets - targets.mean(0)).sum(0) if len(targets) else np.zeros(num_outputs)
    with np.errstate(divide="ignore", invalid="ignore"):
        explained = 1 - np.square(errors).sum(0) / around
    return {
        "rmse": float(np.sqrt(np.square(errors).mean())) if len(errors) else float("nan"),
        "mae": float(np.abs(errors).mean()) if len(errors) else float("nan"),
        "r2": float(explained.mean()) if (around > 0).all() else float("nan"),
    }


REGRESSION = Task(
    "regression",
    total=lambda logits, targets: F.mse_loss(*_numbers(logits, targets), reduction="sum") / logits.shape[1],
    measure=lambda logits, targets: dict(zip(("predictions", "targets"), _numbers(logits, targets), strict=True)),
    metrics=_of_numbers,
    values=lambda columns: np.square(
        columns["predictions"].astype(np.float64) - columns["targets"].astype(np.float64)
    ).mean(1),
    of_part="rmse",
    main="rmse",
    finish=np.sqrt,
)


def on_scaled_targets(task: Task, mean: Sequence[float], deviation: Sequence[float]) -> Task:
    """Return a regression task on targets (y - mean) / deviation, with predictions measured in the units of y.

    Args:
      mean, deviation: (numbers,), mean and standard deviation of each number of a target.
    """

    def total(outputs: Tensor, targets: Tensor) -> Tensor:
        numbers = targets.reshape(len(targets), -1)
        standard = (numbers - _beside(numbers, mean)) / _beside(numbers, deviation)
        return task.total(outputs, standard.reshape(targets.shape))

    def measure(outputs: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        return task.measure(unscaled(outputs, mean, deviation), targets)

    return replace(task, total=total, measure=measure)


def unscaled(outputs: Tensor, mean: Sequence[float], deviation: Sequence[float]) -> Tensor:
    """Return (B, numbers) predictions in the units of the targets."""
    return outputs * _beside(outputs, deviation) + _beside(outputs, mean)


def _beside(tensor: Tensor, numbers: Sequence[float]) -> Tensor:
    """Return numbers as a tensor of the type and on the device of `tensor`."""
    return constants(tuple(numbers), tensor.dtype, tensor.device)


def _of_tokens(columns: Columns, num_tokens: int) -> dict[str, float]:
    """Return accuracy and perplexity over tokens; sequences have equal lengths, so means over sequences suffice."""
    with np.errstate(over="ignore"):
        losses = columns["losses"].astype(np.float64)
        perplexity = float(np.exp(losses.mean())) if len(losses) else float("nan")
    return {"accuracy": float(columns["shares"].astype(np.float64).mean()), "perplexity": perplexity}


def _token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return (B,): mean cross-entropy of the tokens of each sequence. logits: (B, length, vocabulary)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.long().flatten(), reduction="none").view(targets.shape).mean(1)


TOKENS = Task(
    "tokens",
    total=lambda logits, targets: _token_losses(logits, targets).sum(),
    measure=lambda logits, targets: {
        "losses": _token_losses(logits, targets),
        "shares": (logits.argmax(2) == targets).float().mean(1),
    },
    metrics=_of_tokens,
    values=lambda columns: columns["shares"],
    of_part="accuracy",
    main="accuracy",
)

#: Tasks by name.
TASKS: dict[str, Task] = {task.name: task for task in (CLASSES, LABELS, REGRESSION, TOKENS)}


def fits(task: Task, logits: Tensor, targets: Tensor) -> str:
    """Return a sentence that says why outputs do not fit the targets; empty if they fit."""
    try:
        with torch.no_grad():
            total = task.total(logits, targets)
            columns = {name: part.numpy() for name, part in task.measure(logits, targets).items()}
        if task.main not in (names := task.metrics(columns, logits.shape[-1])):
            return f"the task {task.name} is judged by {task.main!r}, which is not among the metrics {', '.join(names)}"
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        shown = f"{type(error).__name__}: {error}"
        return f"the task {task.name} cannot score outputs of shape {tuple(logits.shape)} ({shown})"
    return "" if total.dim() == 0 else f"the task {task.name} gave a loss of shape {tuple(total.shape)}"
