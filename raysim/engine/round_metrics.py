"""Metrics of a round: numbers of progress.csv, columns of clients.parquet, weights by layer block, scores by name.

`Scorer` computes scores on the trainers; this module turns scores into metrics.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from torch import Tensor

from raysim.base.direction import direction_of
from raysim.base.errors import RaysimError
from raysim.core.layout import Layout
from raysim.core.weights import RightMap, Weights
from raysim.data.federation import Federation
from raysim.engine.cohort import Cohort
from raysim.engine.messages import RoundMessage, bytes_down, bytes_up
from raysim.training import metrics as of
from raysim.training.evaluate import Score
from raysim.training.metrics import Metric
from raysim.training.tasks import CLASSES, Task

#: Most classes for which a confusion matrix is kept: 32 MB.
MOST_CLASSES = 2000


#: All metrics of a global model, and the confusion matrix of the test set, if any.
Evaluation = tuple[dict[str, float], np.ndarray | None]


@dataclass(frozen=True)
class RoundRecord:
    """Record of a round.

    Attributes:
      metrics: tag -> number.
      clients: one column (K,) for each recorded property of the cohort's clients, such as their loss.
      weights: (K, num_blocks) float64, mean weight of each client whose update was kept, in each layer block.
      arrays: arrays that methods logged, by `method.name`; the names of an array's axes are under `method.name:columns`
        and `method.name:clients`.
      confusion: (classes, classes) int64, test examples by true class (row) and predicted class; None without a
        score of the test set, or with more than `MOST_CLASSES` classes.
      notes: lines for the user about trainers that were ended.
    """

    round_index: int
    metrics: dict[str, float]
    clients: dict[str, np.ndarray]
    weights: np.ndarray
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    confusion: np.ndarray | None = None
    notes: Sequence[str] = ()


def cohort_metrics(
    cohort: Cohort,
    message: RoundMessage,
    layout: Layout,
    federation: Federation,
    task: Task = CLASSES,
    *,
    num_late: int = 0,
) -> dict[str, float]:
    """Return training loss, megabytes up and down, dropped clients, and scores of the cohort's personal models, if any.

    Args:
      num_late: number of clients that received the model but whose updates came too late.
    """
    reports, count = cohort.reports, len(cohort.clients) + num_late
    steps, losses = reports.num_steps[cohort.is_kept], reports.train_loss[cohort.is_kept]
    metrics = {
        "train/loss": float(np.nansum(losses * steps) / steps.sum()) if steps.sum() else math.nan,
        "comm/up_mb": bytes_up(reports, layout) / 1e6,
        "comm/down_mb": count * bytes_down(message, layout) / 1e6,
        "clients/dropped": float((~cohort.is_kept).sum()),
    }
    if reports.personal is None or not federation.num_test or not cohort.is_kept.any():
        return metrics
    scores = reports.personal[cohort.is_kept]
    if federation.test_sizes is not None:  # (K, 1, 1), the mean over each client's test rows
        return metrics | spread_of(f"clients/personal_{task.of_part}", task.finish(scores[:, 0, 0]))
    means = of.expected_means(training_cells(federation)[cohort.clients[cohort.is_kept]], scores)
    return metrics | spread_of(f"clients/expected_personal_{task.of_part}", task.finish(means))


def client_columns(cohort: Cohort, weights: Weights, layout: Layout) -> dict[str, np.ndarray]:
    """Return the columns of clients.parquet for a cohort; `weight` is the mean over shared leaves, weighted by size."""
    weight = np.zeros(len(cohort.clients))
    if leaves := [leaf for leaf in layout.shared if leaf.name in weights]:
        shares = np.array([leaf.size for leaf in leaves], float) / sum(leaf.size for leaf in leaves)
        weight[cohort.is_kept] = np.stack([_per_client(weights[leaf.name]) for leaf in leaves], 1) @ shares
    names = ("client", "block", "num_examples", "num_steps", "seconds", "train_loss")
    columns = {name: getattr(cohort.reports, name) for name in names}
    return {**columns, "weight": weight, "is_dropped": ~cohort.is_kept}


def layer_block_weights(cohort: Cohort, weights: Weights, layout: Layout) -> np.ndarray:
    """Return (K kept, num_blocks): mean weight of each client over the leaves of a layer block; NaN without weights."""
    count, columns = int(cohort.is_kept.sum()), []
    for block in layout.blocks:
        leaves = [leaf for leaf in layout.params if leaf.block == block and leaf.name in weights]
        inside = [_per_client(weights[leaf.name]) for leaf in leaves]
        columns.append(np.mean(inside, axis=0) if inside else np.full(count, math.nan))
    return np.stack(columns, axis=1) if columns else np.zeros((count, 0))


def _per_client(weight: Tensor | RightMap) -> np.ndarray:
    """Return (K,): each client's weight on a leaf as one number: the mean over rows, or the mean diagonal of a map."""
    if isinstance(weight, RightMap):
        return weight.maps.diagonal(dim1=1, dim2=2).mean(1).numpy()
    return weight.flatten(1).mean(1).numpy() if weight.dim() > 1 else weight.numpy()


def evaluation(
    scores: Mapping[str, Score],
    federation: Federation,
    num_outputs: int,
    metrics: Mapping[str, Metric],
    task: Task = CLASSES,
) -> Evaluation:
    """Return the metrics of a global model, and its confusion matrix on the test set.

    Args:
      scores: scores on the held-out sets "validation", "test", "unseen" and "test-NAME".
      num_outputs: number of outputs of the model.
      metrics: further metrics of the test set by name, computed from all logits.
    """

    def of_rows(name: str) -> dict[str, float]:
        """Return main metric and loss on a held-out set."""
        main = task.metrics(scores[name].columns, num_outputs)[task.main]
        return {f"server/{name}_{task.main}": main, f"server/{name}_loss": scores[name].mean_loss}

    numbers = of_rows("validation") if "validation" in scores else {}
    confusion = None
    if "test" in scores:
        score = scores["test"]
        num_classes = federation.class_counts.shape[1]
        if {"predictions", "labels"} <= score.columns.keys() and num_classes <= MOST_CLASSES:
            confusion = of.confusion(score.labels, score.columns["predictions"], num_classes)
        numbers |= _of_test_set(score, federation, num_outputs, task)
        if metrics:
            assert score.logits is not None
            if not {"labels", "targets"} & score.columns.keys():
                what = f"the task {task.name} keeps neither labels nor targets"
                raise RaysimError(what, "evaluation.metrics", "keep `targets` in `measure`, or drop the metrics")
            labels = score.labels.astype(np.int64) if "labels" in score.columns else score.columns["targets"]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # scikit-learn warns of missing classes
                numbers |= {f"server/{name}": float(metric(labels, score.logits)) for name, metric in metrics.items()}
    if "unseen" in scores and federation.unseen_sizes is not None:
        by_client = of.client_means(task.values(scores["unseen"].columns), federation.unseen_sizes)
        numbers |= of_rows("unseen") | spread_of(f"clients/unseen_{task.of_part}", task.finish(by_client))
    for name in federation.test_sets:
        values = task.values(scores[f"test-{name}"].columns)
        numbers[f"server/{task.of_part}_{name}"] = float(task.finish(values.mean()))
    return numbers, confusion


def _of_test_set(score: Score, federation: Federation, num_outputs: int, task: Task) -> dict[str, float]:
    """Return the metrics `server/*` and `clients/*` of a global model's score on the whole test set.

    `clients/accuracy_*` are measured on the clients' test rows. If clients have no test rows,
    `clients/expected_accuracy_*` are computed: for each client the mean of the accuracies by domain and class, weighted
    by the client's numbers of training examples. This is the accuracy to expect on the client's data if the data differ
    from the test set in domains and classes only. All clients of the population are included. Other tasks use
    `Task.of_part` in place of the accuracy.
    """
    metrics = task.metrics(score.columns, num_outputs)
    first = {task.main: metrics.pop(task.main), "loss": score.mean_loss}
    numbers = {f"server/{name}": value for name, value in (first | metrics).items()}
    values = task.values(score.columns)
    if federation.test_domains is not None:
        means = task.finish(of.group_means(federation.test_domains, values, len(federation.domains)))
        for name, mean in zip(federation.domains, means.tolist(), strict=True):
            if not math.isnan(mean):
                numbers[f"server/{task.of_part}_domain_{'_'.join(name.split())}"] = mean
    if federation.test_sizes is not None:
        by_client = of.client_means(values, federation.test_sizes)
        return numbers | spread_of(f"clients/{task.of_part}", task.finish(by_client))
    cells = training_cells(federation)
    table = of.cell_means(values, score.labels, federation.test_domains, (cells.shape[1], cells.shape[2]))
    return numbers | spread_of(f"clients/expected_{task.of_part}", task.finish(of.expected_means(cells, table)))


@lru_cache(maxsize=1)  # a process has one federation
def training_cells(federation: Federation) -> np.ndarray:
    """Return (N, domains, classes) float64: numbers of training examples; one domain for a set without domains."""
    counts = federation.class_counts[:, None] if federation.domain_counts is None else federation.domain_counts
    return counts.astype(np.float64)


def spread_of(name: str, scores: np.ndarray) -> dict[str, float]:
    """Return mean, worst and worst-decile score of the clients; empty without scores."""
    scored = scores[~np.isnan(scores)]
    if not len(scored):
        return {}
    is_low_worse = direction_of(name) == "max"
    return {
        f"{name}_mean": float(scored.mean()),
        f"{name}_p10": float(np.quantile(scored, 0.1 if is_low_worse else 0.9)),
        f"{name}_worst": float(scored.min() if is_low_worse else scored.max()),
    }
