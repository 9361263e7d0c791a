"""From the score of the test set to the metrics of a round."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

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


def evaluation(
    scores: Mapping[str, Score], sizes: FederationSizes, metrics: Mapping[str, Metric]
) -> tuple[dict[str, float], np.ndarray | None]:
    """All metrics of a global model, and the confusion matrix of the test set if there is one.

    Args:
      scores: on the held-out sets "validation", "test" and "test-NAME".
      metrics: further metrics of the test set, by name.
    """
    found: dict[str, float] = {}
    confusion = None
    if "validation" in scores:
        score = scores["validation"]
        found |= {"server/validation_accuracy": score.accuracy, "server/validation_loss": score.mean_loss}
    if "test" in scores:
        confusion = confusion_of(scores["test"], sizes)
        found |= metrics_of(scores["test"], sizes) | asked_metrics(scores["test"], metrics)
    return found | {f"server/accuracy_{name}": scores[f"test-{name}"].accuracy for name in sizes.test_sets}, confusion


def metrics_of(score: Score, sizes: FederationSizes) -> dict[str, float]:
    """`server/*` and `clients/*` of a global model's score on the whole test set.

    `clients/accuracy_*` are measured on test rows of the clients' own. Where they have none, `clients/expected_accuracy_*`
    weigh the accuracies of every domain and class by what each client has of them for training: what is to be expected
    on its own mix, if nothing but domain and class sets its examples apart. All clients of the population count.
    """
    hits, labels, cells = score.hits, score.labels, sizes.cells
    matrix = confusion_of(score, sizes)
    found = {
        "server/accuracy": score.accuracy,
        "server/loss": score.mean_loss,
        "server/balanced_accuracy": of.balanced_accuracy(matrix),
        "server/macro_f1": of.macro_f1(matrix),
        "server/calibration_error": of.calibration_error(score.confidences, hits),
    }
    if sizes.test_domains is not None:
        for index, name in enumerate(sizes.domains):
            is_here = sizes.test_domains == index
            if is_here.any():
                found[f"server/accuracy_domain_{'_'.join(name.split())}"] = float(hits[is_here].mean())
    if sizes.test_sizes is not None:
        return found | spread("clients/accuracy", of.own_accuracy(hits, sizes.test_sizes))
    table = of.cell_accuracy(hits, labels, sizes.test_domains, (cells.shape[1], cells.shape[2]))
    return found | spread("clients/expected_accuracy", of.expected_accuracy(cells, table))


def confusion_of(score: Score, sizes: FederationSizes) -> np.ndarray:
    """(classes, classes) int64: test examples by true class (row) and predicted class (column)."""
    return of.confusion(score.labels, score.predictions, sizes.class_counts.shape[1])


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
    """The same of the cohort's own models, where layers are personal.

    Args:
      tables: (K, domains, classes) as `cell_accuracy` of each own model gives them; (K, 1, 1), the accuracy on the
        client's own test rows, where it has some.
    """
    if sizes.test_sizes is not None:
        found = spread("clients/personal_accuracy", tables[:, 0, 0])
    else:
        found = spread("clients/expected_personal_accuracy", of.expected_accuracy(sizes.cells[clients], tables))
    return {name: value for name, value in found.items() if not name.endswith("p10")}  # of a few clients


def asked_metrics(score: Score, metrics: Mapping[str, Metric]) -> dict[str, float]:
    """`server/NAME` of the metrics that need every logit."""
    if not metrics:
        return {}
    assert score.logits is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of scikit-learn, about classes that are not there
        return {
            f"server/{name}": float(metric(score.labels.astype(np.int64), score.logits))
            for name, metric in metrics.items()
        }
