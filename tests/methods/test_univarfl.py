"""UniVarFL's property checks and degenerate batches."""

from __future__ import annotations

import math
from inspect import signature
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch

from methods.univarfl import (
    EPS,
    classifier_variance,
    gaussian_kernel,
    hyperspherical_energy,
    unit_rows,
    univarfl,
    variance_target,
)
from raysim.core.method import Batch, Outputs
from raysim.plan.find import build_methods
from raysim.training.tasks import cross_entropy
from tests.support.federations import plan_of, run

FORMS = ("masked", "literal")


def features(n, width, seed=0, dtype=torch.float64):
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def shares(n, classes, seed=0):
    return (3 * features(n, classes, seed)).softmax(1)


@pytest.mark.parametrize("classes", [2, 7, 10, 100])
def test_target_is_the_spread_of_the_identity(classes):
    assert variance_target(classes) == pytest.approx((classes - 1) / classes**2, rel=1e-12)
    assert variance_target(classes, variance="unbiased") == pytest.approx(1 / classes, rel=1e-12)
    assert variance_target(classes, variance="unbiased", spread="deviation") == pytest.approx(classes**-0.5, rel=1e-12)


@pytest.mark.parametrize("variance", ["biased", "unbiased"])
def test_classifier_variance_matches_a_double_loop(variance):
    p = shares(9, 4).tolist()
    n, classes = len(p), len(p[0])
    total = 0.0
    for j in range(classes):
        mean = sum(row[j] for row in p) / n
        spread = sum((row[j] - mean) ** 2 for row in p) / (n if variance == "biased" else n - 1)
        column = [1.0 if i == j else 0.0 for i in range(classes)]
        ideal = sum((v - 1 / classes) ** 2 for v in column) / (classes if variance == "biased" else classes - 1)
        total += max(0.0, ideal - spread)
    assert float(classifier_variance(shares(9, 4), variance=variance)) == pytest.approx(total / classes, rel=1e-9)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("eps", [1e-2, 1e-6])
def test_energy_matches_a_double_loop(form, eps):
    z = features(7, 5).tolist()
    n, total = len(z), 0.0
    for i in range(n):
        for j in range(n):
            if i == j and form != "literal":
                continue
            dot = sum(a * b for a, b in zip(z[i], z[j], strict=True))
            lengths = math.sqrt(sum(a * a for a in z[i])) * math.sqrt(sum(b * b for b in z[j]))
            total += 1 / (1 - dot / lengths + eps)
    assert float(hyperspherical_energy(features(7, 5), eps=eps, form=form)) == pytest.approx(total / n**2, rel=1e-9)


def test_classifier_variance_is_bounded_and_its_extremes_are_where_they_should():
    target = variance_target(5)
    for seed in range(20):
        assert 0 <= float(classifier_variance(shares(8, 5, seed))) <= target
    for rows in (torch.full((6, 5), 0.2), torch.eye(5)[[2] * 6]):
        assert float(classifier_variance(rows.double())) == pytest.approx(target)
    balanced = torch.eye(5, dtype=torch.float64).repeat(3, 1)
    assert float(classifier_variance(balanced)) == pytest.approx(0, abs=1e-15)
    assert float(classifier_variance(balanced, variance="unbiased")) > 1e-3  # 15 rows cannot reach 1/D
    absent = torch.eye(5, dtype=torch.float64)[[0, 1, 2, 3] * 3]
    assert float(classifier_variance(absent)) > 0
    assert float(classifier_variance(torch.eye(2, dtype=torch.float64))) == 0


def test_terms_are_invariant_to_what_they_should_be():
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    p, z = shares(8, 5), features(8, 6)
    assert torch.allclose(classifier_variance(p[order]), classifier_variance(p))
    assert torch.allclose(classifier_variance(p[:, [4, 2, 0, 1, 3]]), classifier_variance(p))
    energy = hyperspherical_energy(z)
    assert torch.allclose(hyperspherical_energy(z[order]), energy)
    rotation = torch.linalg.qr(features(6, 6, 3))[0]
    assert torch.allclose(hyperspherical_energy(z @ rotation), energy)
    assert torch.allclose(hyperspherical_energy(z * torch.rand(8, 1, dtype=z.dtype).add(0.1)), energy)


def test_energy_has_its_known_extremes():
    def mean(z, eps):
        return float(hyperspherical_energy(z.double(), eps=eps)) * len(z) / (len(z) - 1)

    assert mean(torch.tensor([[1.0, 2.0], [-1.0, -2.0]]), 1e-3) == pytest.approx(1 / 2.001)
    simplex = torch.eye(4) - 0.25
    assert mean(simplex, 1e-3) == pytest.approx(1 / (1 + 1 / 3 + 1e-3))
    assert mean(simplex, 1e-3) == pytest.approx(0.74944, abs=1e-5)
    assert mean(torch.eye(4), 1e-2) == pytest.approx(1 / 1.01)
    assert mean(torch.ones(5, 3), 1e-2) == pytest.approx(100)
    for seed in range(5):
        assert mean(features(4, 6, seed), 1e-3) > 0.74944 - 1e-5


@pytest.mark.parametrize("eps", [1e-4, 1e-2])
def test_literal_minus_masked_is_a_constant(eps):
    z = features(6, 4)
    gap = hyperspherical_energy(z, eps=eps, form="literal") - hyperspherical_energy(z, eps=eps)
    assert float(gap) == pytest.approx(1 / (6 * eps), rel=1e-9)


def test_energy_grows_with_a_cosine_and_its_gradient_is_tangential():
    energies = [
        float(hyperspherical_energy(torch.tensor([[1.0, 0.0], [math.cos(a), math.sin(a)]]))) for a in (2, 1, 0.5, 0.1)
    ]
    assert energies == sorted(energies)
    assert len(set(energies)) == 4
    z = features(6, 4).requires_grad_()
    hyperspherical_energy(z).backward()
    assert torch.allclose((z.grad * z).sum(1), torch.zeros(6, dtype=z.dtype), atol=1e-12)
    assert float(z.grad.norm()) > 1e-3


def test_terms_have_the_gradients_of_their_values():
    logits = features(5, 4).requires_grad_()
    for variance in ("biased", "unbiased"):
        for spread in ("variance", "deviation"):
            assert torch.autograd.gradcheck(
                lambda a, v=variance, s=spread: classifier_variance(a.softmax(1), variance=v, spread=s), logits
            )
    z = features(5, 4, 2).requires_grad_()
    for form in FORMS:
        assert torch.autograd.gradcheck(lambda a, f=form: hyperspherical_energy(a, form=f), z)


def test_masking_keeps_rounding_out_of_the_gradient():
    z = features(64, 32, dtype=torch.float32)
    sizes = {}
    for form in ("masked", "literal"):
        for dtype in (torch.float32, torch.float64):
            leaf = z.to(dtype).clone().requires_grad_()
            hyperspherical_energy(leaf, eps=1e-6, form=form).backward()
            sizes[form, dtype] = leaf.grad.double()
    exact = sizes["masked", torch.float64]
    assert torch.allclose(sizes["masked", torch.float32], exact, atol=1e-6)
    assert float((sizes["literal", torch.float32] - exact).norm()) > 10 * float(exact.norm())


def outputs_of(z, head):
    return Outputs(z @ head, z)


BATCHES = {
    "one class": (features(6, 4, dtype=torch.float32), [2] * 6),
    "one example": (features(1, 4, dtype=torch.float32), [1]),
    "zero features": (torch.zeros(5, 4), [0, 1, 2, 0, 1]),
    "one zero row": (torch.cat([torch.zeros(1, 4), features(4, 4, dtype=torch.float32)]), [0, 1, 2, 0, 1]),
    "duplicates": (features(1, 4, dtype=torch.float32).repeat(5, 1), [0, 1, 2, 0, 1]),
    "tiny": (1e-20 * features(5, 4, dtype=torch.float32), [0, 1, 2, 0, 1]),
    "saturated": (1e4 * features(5, 4, dtype=torch.float32), [0, 1, 2, 0, 1]),
}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"form": "literal"},
        {"variance": "unbiased"},
        {"spread": "deviation", "uniformity": "kernel"},
        {"spread": "deviation", "variance": "unbiased", "eps": 1e-6},
    ],
)
@pytest.mark.parametrize("case", BATCHES)
def test_gradients_are_finite_and_bounded(case, options):
    z, labels = BATCHES[case]
    z, head = z.clone().requires_grad_(), features(4, 3, 5, dtype=torch.float32).requires_grad_()
    loss = univarfl(**options).loss(cross_entropy, None)
    value = loss(outputs_of(z, head), Batch(z, torch.tensor(labels)))
    value.backward()
    assert bool(torch.isfinite(value))
    assert bool(torch.isfinite(z.grad).all())
    assert bool(torch.isfinite(head.grad).all())
    if case in ("zero features", "one zero row") and "uniformity" not in options:
        plain = z.detach().clone().requires_grad_()
        value = univarfl(**options, mu=0).loss(cross_entropy, None)
        value(outputs_of(plain, head.detach()), Batch(z, torch.tensor(labels))).backward()
        assert torch.equal(z.grad[0], plain.grad[0])  # no direction, no energy gradient


def test_total_collapse_is_a_stationary_point_of_the_variance():
    logits = torch.zeros(6, 3, requires_grad=True)
    classifier_variance(logits.softmax(1)).backward()
    assert logits.grad.abs().max() < 1e-7


def test_terms_do_not_see_labels_or_the_classifier():
    z, head = features(6, 4).requires_grad_(), features(4, 3).requires_grad_()
    hyper = hyperspherical_energy(z)
    assert torch.autograd.grad(hyper, head, allow_unused=True) == (None,)
    out = outputs_of(z.detach(), head.detach())
    for labels in ([0] * 6, [0, 1, 2, 0, 1, 2]):
        batch = Batch(z, torch.tensor(labels))
        added = univarfl().loss(cross_entropy, None)(out, batch) - cross_entropy(out, batch)
        want = 0.5 * hyperspherical_energy(z.detach().float()) + 0.75 * classifier_variance(
            out.logits.float().softmax(1)
        )
        assert float(added) == pytest.approx(float(want), rel=1e-5)


def test_half_precision_outputs_are_regularised_in_float32():
    z = features(6, 4).half()
    out = outputs_of(z.float(), features(4, 3, dtype=torch.float32))
    value = univarfl().loss(lambda o, b: torch.zeros(()), None)(Outputs(out.logits.half(), z), None)
    assert value.dtype == torch.float32


def kernel_by_hand(rows):
    """FedUV's uniformity: over distinct pairs, the median of the non-zero squared distances (the lower of two)."""
    squares = [float(sum((a - b) ** 2 for a, b in zip(x, y, strict=True))) for x, y in combinations(rows.tolist(), 2)]
    above = sorted(square for square in squares if square > 0)
    median = above[(len(above) - 1) // 2]
    return sum(math.exp(-square / median) for square in squares) / len(squares)


def test_kernel_is_feduvs_mean_over_distinct_pairs():
    z = features(6, 3)
    assert float(gaussian_kernel(z)) == pytest.approx(kernel_by_hand(z), rel=1e-9)
    twice = torch.cat([z, z[:3]])  # duplicates count as pairs, not in the median
    assert float(gaussian_kernel(twice)) == pytest.approx(kernel_by_hand(twice), rel=1e-9)


def test_kernels_gradient_goes_through_the_median():
    z = features(5, 3, 4)
    leaf = z.clone().requires_grad_()
    gaussian_kernel(leaf).backward()
    for row in range(5):
        for column in range(3):
            ahead, behind = z.clone(), z.clone()
            ahead[row, column] += 1e-6
            behind[row, column] -= 1e-6
            slope = (kernel_by_hand(ahead) - kernel_by_hand(behind)) / 2e-6
            assert float(leaf.grad[row, column]) == pytest.approx(slope, rel=1e-5, abs=1e-8)
    # Scaling all distances leaves it where it is, since the median scales as well.
    assert float((leaf.grad * (z - z.mean(0))).sum()) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("rows", [torch.ones(4, 3), torch.ones(1, 3), torch.zeros(3, 2)])
def test_kernel_of_equal_rows_pulls_nowhere(rows):
    leaf = rows.clone().requires_grad_()
    value = gaussian_kernel(leaf)
    value.backward()
    assert float(value.detach()) == (1.0 if len(rows) > 1 else 0.0)
    assert not leaf.grad.any()


@pytest.mark.parametrize("options", [{"eps": 0.1}, {"form": "literal"}])
def test_options_of_the_energy_are_not_the_kernels(options):
    (fault,) = build_methods([{"univarfl": {"uniformity": "kernel", **options}}])[1]
    assert f"{next(iter(options))}: has no effect with uniformity kernel" in str(fault)


def test_default_epsilon_bounds_what_one_pair_adds():
    """A pair's energy and its slope in the cosine are at most 1, however close the two are; 1/eps and 1/eps^2 else."""
    assert signature(univarfl).parameters["eps"].default == EPS
    for angle in (3.0, 1.0, 0.3, 0.05, 1e-3, 0.0):
        rows = torch.tensor([[1.0, 0.0], [math.cos(angle), math.sin(angle)]], dtype=torch.float64)
        assert float(hyperspherical_energy(rows, form="mean")) <= 1
        cosine = torch.tensor(math.cos(angle), dtype=torch.float64, requires_grad=True)
        (1 / (1 - cosine + EPS)).backward()
        assert float(cosine.grad) <= 1
    near = torch.tensor([[1.0, 0.0], [math.cos(1e-3), math.sin(1e-3)]])
    assert float(hyperspherical_energy(near, eps=0.01, form="mean")) > 99


def test_directions_are_unit_rows_or_zero():
    z = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    assert torch.allclose(unit_rows(z), torch.tensor([[0.6, 0.8], [0.0, 0.0]]))


def test_without_strength_it_is_fedavg_and_lambda_defaults_to_a_quarter_of_the_classes(root):
    digest = run(plan_of(root), root).params_sha256()
    assert run(plan_of(root, [{"univarfl": {"mu": 0, "lam": 0}}]), root).params_sha256() == digest
    default = run(plan_of(root, ["univarfl"]), root, rounds=1).params_sha256()
    assert default != digest
    assert run(plan_of(root, [{"univarfl": {"lam": 2.5}}]), root, rounds=1).params_sha256() == default


def test_warm_up_by_hand():
    """In round t the energy has mu min(1, t / warmup); the variance has lambda throughout."""
    z, head = features(6, 4), features(4, 3)
    out, batch = outputs_of(z, head), Batch(z, torch.tensor([0, 1, 2, 0, 1, 2]))

    def added(method, round_index):
        loss = method.loss(cross_entropy, SimpleNamespace(round_index=round_index))
        return float(loss(out, batch) - cross_entropy(out, batch))

    variance = 0.75 * float(classifier_variance(out.logits.float().softmax(1)))
    pushed = float(hyperspherical_energy(z.float()))
    warmed = univarfl(mu=0.8, warmup=4)
    for round_index, strength in ((0, 0.0), (1, 0.2), (3, 0.6), (4, 0.8), (9, 0.8)):
        assert added(warmed, round_index) == pytest.approx(variance + strength * pushed, rel=1e-5)
        assert added(univarfl(mu=0.8), round_index) == pytest.approx(variance + 0.8 * pushed, rel=1e-5)


def test_warm_up_of_a_run_begins_without_the_energy_and_ends_with_all_of_it(root):
    def state(rounds=1, **options):
        return run(plan_of(root, [{"univarfl": options}]), root, rounds=rounds).params_sha256()

    assert state(warmup=1) == state(mu=0) != state()
    assert state(rounds=2, warmup=1) != state(rounds=2, mu=0)
