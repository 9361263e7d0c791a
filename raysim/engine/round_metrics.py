"""A round in numbers: what goes into progress.csv, the clients' rows, the picture of the weights, the scores by name.

`Scorer` makes the scores on the trainers; here they become metrics.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from raysim.core.layout import Layout
from raysim.core.weights import RightMap, Weights
from raysim.engine.cohort import Cohort
from raysim.engine.messages import RoundMessage, num_bytes
from raysim.training import metrics as of
from raysim.training.evaluate import Score
from raysim.training.metrics import Metric


@dataclass(frozen=True)
class FederationSizes:
    """The federation in numbers.

    Attributes:
      examples: (N,) training examples; class_counts: (N, classes) of them.
      domain_counts: (N, domains, classes) of them; None for a set without domains.
      domains: names; test_domains: (num_test,) domain of each test row, None for a set without domains.
      test_sizes: (N,) test rows that are the clients' own and lie client after client; None where nobody has own ones.
      test_sets: examples of each further test set.
    """

    examples: np.ndarray
    class_counts: np.ndarray
    num_test: int
    num_validation: int = 0
    domain_counts: np.ndarray | None = None
    domains: Sequence[str] = ()
    test_domains: np.ndarray | None = None
    test_sizes: np.ndarray | None = None
    test_sets: Mapping[str, int] = field(default_factory=dict)

    @property
    def cells(self) -> np.ndarray:
        """(N, domains, classes) training examples; one domain where the set has none."""
        return self.class_counts[:, None] if self.domain_counts is None else self.domain_counts


@dataclass(frozen=True)
class RoundRecord:
    """What a round leaves behind.

    Attributes:
      metrics: tag -> number.
      clients: a column per fact about the cohort, (K,) each.
      weights: (K kept, num_blocks) float64, mean weight of each client in each layer block.
      arrays: what methods logged: `method.name`, and `:columns`, `:clients` that name its axes.
      confusion: (classes, classes) int64, test examples by true class (row) and predicted class; None where not scored.
      notes: lines for the user, of trainers that were ended.
    """

    round_index: int
    metrics: dict[str, float]
    clients: dict[str, np.ndarray]
    weights: np.ndarray
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    confusion: np.ndarray | None = None
    notes: Sequence[str] = ()


# --- of the cohort --------------------------------------------------------------------------------------------------------


def cohort_metrics(cohort: Cohort, message: RoundMessage, layout: Layout, sizes: FederationSizes) -> dict[str, float]:
    """Training loss, bytes up and down, dropped clients and, where layers are personal, accuracy of the cohort's own models."""
    reports, count = cohort.reports, len(cohort.clients)
    up = num_bytes(reports.methods) + sum(
        count * (layout.shared_bytes if vector == "update" else 4 * layout.num_params) for vector in reports.peaks
    )
    down = count * (layout.shared_bytes + num_bytes(message.fields))
    steps, losses = reports.num_steps[cohort.is_kept], reports.train_loss[cohort.is_kept]
    metrics = {
        "train/loss": float(np.nansum(losses * steps) / steps.sum()) if steps.sum() else math.nan,
        "comm/up_mb": up / 1e6,
        "comm/down_mb": down / 1e6,
        "clients/dropped": float((~cohort.is_kept).sum()),
    }
    if reports.personal is not None and sizes.num_test:
        metrics |= personal_metrics(reports.personal, cohort.clients, sizes)
    return metrics


def client_columns(cohort: Cohort, weights: Weights, layout: Layout) -> dict[str, np.ndarray]:
    """Columns of the clients' rows; weight: mean over the shared leaves, by their sizes."""
    weight = np.zeros(len(cohort.clients))
    if leaves := [leaf for leaf in layout.shared if leaf.name in weights]:
        shares = np.array([leaf.size for leaf in leaves], float) / sum(leaf.size for leaf in leaves)
        weight[cohort.is_kept] = np.stack([_per_client(weights[leaf.name]) for leaf in leaves], 1) @ shares
    names = ("client", "block", "num_examples", "num_steps", "seconds", "train_loss")
    columns = {name: getattr(cohort.reports, name) for name in names}
    return {**columns, "weight": weight, "is_dropped": ~cohort.is_kept}


def layer_block_weights(cohort: Cohort, weights: Weights, layout: Layout) -> np.ndarray:
    """(K kept, num_blocks): mean weight of each client over the leaves of each layer block; NaN where there is none."""
    count, columns = int(cohort.is_kept.sum()), []
    for block in layout.blocks:
        leaves = [leaf for leaf in layout.params if leaf.block == block and leaf.name in weights]
        inside = [_per_client(weights[leaf.name]) for leaf in leaves]
        columns.append(np.mean(inside, axis=0) if inside else np.full(count, math.nan))
    return np.stack(columns, axis=1) if columns else np.zeros((count, 0))


def _per_client(weight: Tensor | RightMap) -> np.ndarray:
    """(K,): a client's weight on a leaf as one number (mean over rows; the mean diagonal of a map)."""
    if isinstance(weight, RightMap):
        return weight.maps.diagonal(dim1=1, dim2=2).mean(1).numpy()
    return weight.flatten(1).mean(1).numpy() if weight.dim() > 1 else weight.numpy()


# --- of the global model's scores -----------------------------------------------------------------------------------------


def evaluation(
    scores: Mapping[str, Score], sizes: FederationSizes, metrics: Mapping[str, Metric]
) -> tuple[dict[str, float], np.ndarray | None]:
    """All metrics of a global model, and the confusion matrix of the test set if there is one.

    Args:
      scores: on the held-out sets "validation", "test" and "test-NAME".
      metrics: further metrics of the test set, by name: those that need every logit.
    """
    numbers: dict[str, float] = {}
    confusion = None
    if "validation" in scores:
        score = scores["validation"]
        numbers |= {"server/validation_accuracy": score.accuracy, "server/validation_loss": score.mean_loss}
    if "test" in scores:
        score = scores["test"]
        confusion = of.confusion(score.labels, score.predictions, sizes.class_counts.shape[1])
        numbers |= _of_test_set(score, confusion, sizes)
        if metrics:
            assert score.logits is not None
            labels = score.labels.astype(np.int64)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of scikit-learn, about classes that are not there
                numbers |= {f"server/{name}": float(metric(labels, score.logits)) for name, metric in metrics.items()}
    numbers |= {f"server/accuracy_{name}": scores[f"test-{name}"].accuracy for name in sizes.test_sets}
    return numbers, confusion


def _of_test_set(score: Score, confusion: np.ndarray, sizes: FederationSizes) -> dict[str, float]:
    """`server/*` and `clients/*` of a global model's score on the whole test set.

    `clients/accuracy_*` are measured on test rows of the clients' own. Where they have none, `clients/expected_accuracy_*`
    weigh the accuracies of every domain and class by what each client has of them for training: what is to be expected
    on its own mix, if nothing but domain and class sets its examples apart. All clients of the population count.

    Args:
      confusion: (classes, classes), of that score.
    """
    numbers = {
        "server/accuracy": score.accuracy,
        "server/loss": score.mean_loss,
        "server/balanced_accuracy": of.balanced_accuracy(confusion),
        "server/macro_f1": of.macro_f1(confusion),
        "server/calibration_error": of.calibration_error(score.confidences, score.hits),
    }
    if sizes.test_domains is not None:
        for index, name in enumerate(sizes.domains):
            is_here = sizes.test_domains == index
            if is_here.any():
                numbers[f"server/accuracy_domain_{'_'.join(name.split())}"] = float(score.hits[is_here].mean())
    if sizes.test_sizes is not None:
        return numbers | spread("clients/accuracy", of.own_accuracy(score.hits, sizes.test_sizes))
    cells = sizes.cells
    table = of.cell_accuracy(score.hits, score.labels, sizes.test_domains, (cells.shape[1], cells.shape[2]))
    return numbers | spread("clients/expected_accuracy", of.expected_accuracy(cells, table))


def spread(name: str, accuracies: np.ndarray) -> dict[str, float]:
    """Mean, 10 % quantile and worst of the clients with an accuracy; nothing where no client has one."""
    known = accuracies[~np.isnan(accuracies)]
    if not len(known):
        return {}
    return {
        f"{name}_mean": float(known.mean()),
        f"{name}_p10": float(np.quantile(known, 0.1)),
        f"{name}_worst": float(known.min()),
    }


def personal_metrics(tables: np.ndarray, clients: np.ndarray, sizes: FederationSizes) -> dict[str, float]:
    """Mean and worst accuracy of the cohort's own models, where layers are personal.

    Args:
      tables: (K, domains, classes) as `cell_accuracy` of each own model gives them; (K, 1, 1), the accuracy on the
        client's own test rows, where it has some.
    """
    if sizes.test_sizes is not None:
        numbers = spread("clients/personal_accuracy", tables[:, 0, 0])
    else:
        numbers = spread("clients/expected_personal_accuracy", of.expected_accuracy(sizes.cells[clients], tables))
    # A quantile of a few clients says little.
    return {name: value for name, value in numbers.items() if not name.endswith("p10")}
