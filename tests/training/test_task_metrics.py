"""Metrics of the tasks against scikit-learn on the same outputs, in their limits too."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn import metrics as theirs

from raysim.training.tasks import CLASSES, LABELS, REGRESSION, TOKENS, fits


def columns_of(task, logits, targets):
    """What the task keeps of outputs, measured in two batches."""
    parts = [task.measure(logits[part], targets[part]) for part in (slice(0, 150), slice(150, None))]
    return {name: torch.cat([part[name] for part in parts]).numpy() for name in parts[0]}


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def metrics_of(task, logits, targets):
    return task.metrics(columns_of(task, logits, targets), logits.shape[-1])


@pytest.mark.parametrize("missing", [(), (1, 4)], ids=["all classes", "two that never occur"])
def test_classes(missing):
    logits = drawn(400, 5)
    present = torch.tensor([label for label in range(5) if label not in missing])
    labels = present[torch.randint(len(present), (400,), generator=torch.Generator().manual_seed(1))]
    logits[torch.arange(400), labels] += 1
    numbers, predictions = metrics_of(CLASSES, logits, labels), logits.argmax(1)
    assert numbers["accuracy"] == theirs.accuracy_score(labels, predictions)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of predictions of classes that do not occur
        assert numbers["balanced_accuracy"] == pytest.approx(
            theirs.balanced_accuracy_score(labels, predictions), abs=1e-12
        )
    assert numbers["macro_f1"] == pytest.approx(theirs.f1_score(labels, predictions, average="macro"), abs=1e-12)
    assert numbers["calibration_error"] == pytest.approx(calibration_by_hand(logits, labels), abs=1e-6)


def calibration_by_hand(logits, labels):
    """Guo et al. 2017, eq. 3, bin by bin. scikit-learn has the curve alone, without the bins' sizes."""
    confidences, predictions = logits.softmax(1).max(1)
    error = 0.0
    for index in range(15):
        inside = (confidences > index / 15) & (confidences <= (index + 1) / 15)
        if inside.any():
            gap = (predictions[inside] == labels[inside]).float().mean() - confidences[inside].mean()
            error += float(gap.abs()) * int(inside.sum()) / len(labels)
    return error


@pytest.mark.parametrize("rare", [(), (2,)], ids=["all labels", "one that never occurs"])
def test_labels(rare):
    logits, targets = drawn(400, 4), (drawn(400, 4, seed=1) > 0.5).to(torch.uint8)
    targets[:, list(rare)] = 0
    numbers, truth, predictions = metrics_of(LABELS, logits, targets), targets.numpy(), (logits > 0).numpy()
    kept = [label for label in range(4) if label not in rare]
    assert numbers["auroc"] == pytest.approx(theirs.roc_auc_score(truth[:, kept], logits.numpy()[:, kept]), abs=1e-12)
    assert numbers["macro_f1"] == theirs.f1_score(truth, predictions, average="macro", zero_division=0)
    assert numbers["exact_match"] == theirs.accuracy_score(truth, predictions)
    mean_loss = LABELS.total(logits, targets) / 400
    assert float(mean_loss) == pytest.approx(
        float(F.binary_cross_entropy_with_logits(logits, targets.float())), rel=1e-5
    )


@pytest.mark.parametrize("value", [0, 1])
def test_labels_that_all_rows_have_alike_leave_no_auroc(value):
    numbers = metrics_of(LABELS, drawn(200, 3), torch.full((200, 3), value, dtype=torch.uint8))
    assert math.isnan(numbers["auroc"])
    assert 0 <= numbers["exact_match"] <= 1


@pytest.mark.parametrize("outputs", [1, 3])
def test_regression(outputs):
    predictions, targets = drawn(400, outputs), drawn(400, outputs, seed=1) * 2 + 3
    numbers = metrics_of(REGRESSION, predictions, targets if outputs > 1 else targets[:, 0])  # (n,) is (n, 1)
    truth, got = targets.double().numpy(), predictions.double().numpy()
    assert numbers["rmse"] == pytest.approx(math.sqrt(theirs.mean_squared_error(truth, got)), rel=1e-12)
    assert numbers["mae"] == pytest.approx(theirs.mean_absolute_error(truth, got), rel=1e-12)
    assert numbers["r2"] == pytest.approx(theirs.r2_score(truth, got), rel=1e-12)


def test_the_loss_of_an_example_in_regression_is_the_mean_over_its_numbers():
    predictions, targets = drawn(5, 2), drawn(5, 2, seed=1)
    assert float(REGRESSION.total(predictions, targets)) == pytest.approx(5 * float(F.mse_loss(predictions, targets)))


def test_regression_of_constant_targets_has_no_r2():
    numbers = metrics_of(REGRESSION, drawn(200, 1), torch.ones(200, 1))
    assert math.isnan(numbers["r2"])  # scikit-learn writes 0 there, which reads as a mean that is as good as the model
    assert numbers["mae"] == pytest.approx(theirs.mean_absolute_error(np.ones(200), drawn(200).double().numpy()))


def test_tokens():
    logits, targets = drawn(200, 6, 5) * 2, torch.randint(4, (200, 6), generator=torch.Generator().manual_seed(1)).int()
    numbers = metrics_of(TOKENS, logits, targets)
    truth, chances = targets.flatten().numpy(), logits.double().softmax(2).flatten(0, 1).numpy()
    assert numbers["accuracy"] == pytest.approx(theirs.accuracy_score(truth, chances.argmax(1)), abs=1e-6)
    loss = theirs.log_loss(truth, chances, labels=range(5))  # the fifth token never follows
    assert numbers["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)


@pytest.mark.parametrize(
    ("task", "logits", "targets"),
    [
        (CLASSES, torch.zeros(2, 3), torch.zeros(2, 4, dtype=torch.int64)),
        (LABELS, torch.zeros(2, 3), torch.zeros(2, 4)),
        (TOKENS, torch.zeros(2, 3), torch.zeros(2, 6, dtype=torch.int32)),
    ],
    ids=["classes", "labels", "tokens"],
)
def test_outputs_that_are_none_for_the_targets_are_named(task, logits, targets):
    shape = str(tuple(logits.shape))
    assert fits(task, logits, targets).startswith(f"the task {task.name} cannot score outputs of shape {shape}")
