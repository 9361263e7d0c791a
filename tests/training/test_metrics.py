"""Metrics against scikit-learn on the same logits, and by hand."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from scipy.special import softmax
from sklearn import metrics as theirs
from sklearn.calibration import calibration_curve

from raysim.training import metrics as ours


def scored(num_classes=5, n=400, seed=0, missing=()):
    """labels (n,), logits (n, classes) float32; some classes do not occur, and some logits are tied."""
    rng = np.random.default_rng(seed)
    present = [c for c in range(num_classes) if c not in missing]
    labels = rng.choice(present, n)
    logits = rng.normal(size=(n, num_classes)).astype(np.float32)
    logits[np.arange(n), labels] += 1.0
    logits[::7] = logits[0]
    return labels, logits


@pytest.mark.parametrize("missing", [(), (1, 3)])
@pytest.mark.parametrize("num_classes", [4, 7])
def test_counts_give_scikit_learns_numbers(num_classes, missing):
    labels, logits = scored(num_classes, missing=missing)
    predictions = logits.argmax(1)
    matrix = ours.confusion(labels, predictions, num_classes)
    assert (matrix == theirs.confusion_matrix(labels, predictions, labels=range(num_classes))).all()
    assert matrix.dtype == np.int64
    balanced, f1 = ours.class_scores(labels, predictions, num_classes)
    assert f1 == pytest.approx(theirs.f1_score(labels, predictions, average="macro"), abs=1e-12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of predictions of classes that do not occur
        want = theirs.balanced_accuracy_score(labels, predictions)
    assert balanced == pytest.approx(want, abs=1e-12)


def test_macro_f1_leaves_out_classes_that_neither_occur_nor_are_predicted():
    labels, predictions = np.array([0, 0, 1]), np.array([0, 1, 1])
    assert ours.class_scores(labels, predictions, 9) == pytest.approx((0.75, 2 / 3))
    assert np.isnan(ours.class_scores(labels[:0], predictions[:0], 9)).all()


@pytest.mark.parametrize("num_classes", [2, 6])
def test_auroc_is_scikit_learns_one_against_the_rest(num_classes):
    labels, logits = scored(num_classes)
    probabilities = softmax(logits.astype(np.float64), axis=1)
    if num_classes == 2:
        want = theirs.roc_auc_score(labels, probabilities[:, 1])
    else:
        want = theirs.roc_auc_score(labels, probabilities, multi_class="ovr", average="macro")
    assert ours.auroc(labels, logits) == pytest.approx(want, abs=1e-12)


def test_auroc_by_hand_and_at_its_limits():
    logits = np.array([[2.0, 0.0], [1.0, 0.0], [0.0, 0.0], [0.0, 1.0]], np.float32)
    assert ours.auroc(np.array([0, 1, 0, 1]), logits) == 0.75  # of the four pairs one is the wrong way round
    assert ours.auroc(np.array([0, 1, 0, 1]), np.zeros((4, 2), np.float32)) == 0.5
    assert np.isnan(ours.auroc(np.zeros(4, int), logits))
    assert np.isnan(ours.auroc(np.array([0, 1, 0, 1]), logits * np.nan))
    labels, wide = scored(5, missing=(2,))
    areas = [theirs.roc_auc_score(labels == c, softmax(wide.astype(np.float64), axis=1)[:, c]) for c in (0, 1, 3, 4)]
    assert ours.auroc(labels, wide) == pytest.approx(np.mean(areas), abs=1e-12)


def test_calibration_error_is_that_of_scikit_learns_calibration_curve():
    labels, logits = scored(4, n=1000)
    confidences = softmax(logits, axis=1).max(1)
    hits = logits.argmax(1) == labels
    right, believed = calibration_curve(hits, confidences, n_bins=ours.BINS)
    edges = np.linspace(0, 1, ours.BINS + 1)
    counts = np.histogram(confidences, edges)[0]
    want = np.abs(right - believed) @ counts[counts > 0] / len(hits)
    assert ours.calibration_error(confidences, hits) == pytest.approx(want, abs=1e-6)
    assert want > 0.01


def test_calibration_error_by_hand():
    confidences = np.array([0.95, 0.95, 0.55, 0.55])
    assert ours.calibration_error(confidences, np.array([1, 1, 1, 0], bool)) == pytest.approx(0.05)
    assert ours.calibration_error(np.ones(3), np.ones(3, bool)) == 0
    assert ours.calibration_error(np.zeros(2), np.zeros(2, bool)) == 0
    assert np.isnan(ours.calibration_error(np.zeros(0), np.zeros(0, bool)))


def test_a_confidence_on_an_edge_belongs_to_the_bin_below_it():
    edge = float(np.linspace(0, 1, ours.BINS + 1)[3])
    found = ours.calibration_error(np.array([edge, edge - 0.01]), np.array([True, False]))
    assert found == pytest.approx((1 - (2 * edge - 0.01)) / 2)


def test_expected_accuracy_weighs_domains_and_classes():
    hits = np.array([1, 0, 1, 1, 0, 0], bool)
    labels, domains = np.array([0, 0, 1, 0, 1, 1]), np.array([0, 0, 0, 1, 1, 1])
    table = ours.cell_means(hits, labels, domains, (2, 2))
    assert table.tolist() == [[0.5, 1.0], [1.0, 0.0]]
    counts = np.array([[[3, 1], [0, 0]], [[0, 0], [1, 1]], [[0, 0], [0, 0]]])
    found = ours.expected_means(counts, table)
    assert found[:2].tolist() == [0.625, 0.5]
    assert np.isnan(found[2])
    known = np.array([[0.5, np.nan], [1.0, 0.0]])  # no test example of class 1 in domain 0: it does not count
    assert ours.expected_means(counts, known)[0] == 0.5
    assert ours.cell_means(hits, labels, None, (1, 2))[0].tolist() == [2 / 3, 1 / 3]


def test_own_accuracy_goes_client_after_client():
    found = ours.client_means(np.array([1, 0, 0, 1, 1], bool), np.array([2, 0, 3]))
    assert found[0] == 0.5
    assert np.isnan(found[1])
    assert found[2] == pytest.approx(2 / 3)
