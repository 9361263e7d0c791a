"""UniVarFL: local training with varied classifier outputs and spread features, from a single forward pass."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor

from raysim.base.conditions import applies_with
from raysim.core.method import Amount, Batch, ClientView, LossFn, Method, Outputs, Positive, Whole

#: Rows of features shorter than this have no direction.
FLOOR = 1e-12

#: epsilon of the energy. A pair adds at most 1/eps, with a slope of at most 1/eps^2 in the cosine. With 1 both bounds
#: are 1, as in FedUV's kernel, from which mu = 0.5 comes.
EPS = 1.0

Variance = Literal["biased", "unbiased"]
Spread = Literal["variance", "deviation"]
Form = Literal["masked", "literal"]


def univarfl(
    *,
    mu: Amount = 0.5,
    lam: Amount | None = None,
    eps: Annotated[Positive, applies_with("uniformity", "energy")] = EPS,
    form: Annotated[Form, applies_with("uniformity", "energy")] = "masked",
    variance: Variance = "biased",
    spread: Spread = "variance",
    uniformity: Literal["energy", "kernel"] = "energy",
    warmup: Whole = 0,
) -> Method:
    """Adds classifier variance L_V and hyperspherical energy L_HE to the loss.

    UniVarFL, eqs. 1 to 4, on a batch of n examples, D classes, p = softmax(logits) and z the classifier's input, both
    in float32:
        L_V  = (1/D) sum_j max(0, c - Var_i(p_ij)),   c = the mean column variance of the D x D identity
        L_HE = (1/n^2) sum_ij 1 / (1 - cos(z_i, z_j) + eps)
        loss = inner + mu L_HE + lam L_V
    Choices of ours, where the paper is silent:
    - eps. The paper calls it a small constant for numerical stability, and the result depends on it: two features at an
      angle a push each other apart by sin a / (1 - cos a + eps)^2, whose peak is 459 for eps 0.01, 14 for 0.1 and 0.42
      for 1, and ReLU features begin nearly parallel. With 1 a pair's energy and its slope in the cosine are at most 1:
      mu weighs a term of the size that it weighs in FedUV, which has the same mu and lam.
    - The diagonal is left out: it is a constant whose rounding error, times 1/eps^2, swamps the gradient in float32 where
      eps is small. Rows of zeros have no direction (cosine 0, gradient 0).
    - The variance is biased. The features are the classifier's input, behind a projector, as in FedUV's code.
    With a batch of one both terms are constant. The variance term needs classes; `lam: 0` leaves the energy alone,
    which works for every task. Features of a sequence count as one vector, position after position.

    Args:
      mu: strength of the energy L_HE, >= 0.
      lam: strength of the variance term L_V, >= 0; null: D/4.
      eps: constant epsilon of the energy.
      form: pairs of the energy: "masked" leaves out i = j; "literal" includes i = j, as in eq. 3.
      variance: estimator of the variance in L_V and in c: "biased" (a balanced one-hot batch gives L_V = 0) or
        "unbiased".
      spread: measure of spread in L_V and in c: "variance", or "deviation", the standard deviation, as in FedUV's first
        term (unbiased there; Son et al., CVPR 2024).
      uniformity: second term of the loss: "energy", L_HE, or "kernel", the Gaussian kernel of FedUV's second term, see
        `gaussian_kernel`.
      warmup: number of rounds over which mu grows (ours): mu min(1, t / warmup) in round t, counted from 0. With 0, mu
        has its full value from the start. lam has no warm-up.
    """

    def loss(inner: LossFn, client: ClientView) -> LossFn:
        energy = mu * min(1.0, client.round_index / warmup) if warmup else mu
        if energy == 0 and lam == 0:
            return inner

        def value(outputs: Outputs, batch: Batch) -> Tensor:
            total = inner(outputs, batch)
            assert outputs.features is not None
            features = outputs.features.float().flatten(1)
            strength = outputs.logits.shape[1] / 4 if lam is None else lam
            if energy > 0:
                is_energy = uniformity == "energy"
                pushed = hyperspherical_energy(features, eps=eps, form=form) if is_energy else gaussian_kernel(features)
                total = total + energy * pushed
            if strength > 0:
                shares = outputs.logits.float().softmax(dim=1)
                total = total + strength * classifier_variance(shares, variance=variance, spread=spread)
            return total

        return value

    return Method("univarfl", loss=loss, needs=frozenset({"features"} if lam == 0 else {"classes", "features"}))


def classifier_variance(shares: Tensor, *, variance: Variance = "biased", spread: Spread = "variance") -> Tensor:
    """L_V of predicted probabilities, eqs. 1 and 2. Scalar in [0, c]; c with a zero gradient for one row.

    Args:
      shares: (n, D), rows that sum to one.
    """
    rows, classes = shares.shape
    correction = 1 if variance == "unbiased" else 0
    target = variance_target(classes, variance=variance, spread=spread)
    size = shares.var(dim=0, correction=min(correction, rows - 1))
    if spread == "deviation":  # the root has no finite slope at 0
        is_flat = size <= 0
        size = torch.where(is_flat, 0.0, torch.where(is_flat, 1.0, size).sqrt())
    return (target - size).clamp_min(0).mean()


def variance_target(classes: int, *, variance: Variance = "biased", spread: Spread = "variance") -> float:
    """c: mean column variance (or deviation) of the identity: (D-1)/D^2 biased, 1/D unbiased. One class: 0."""
    correction = 1 if variance == "unbiased" and classes > 1 else 0
    columns = torch.eye(classes, dtype=torch.float64).var(dim=0, correction=correction)
    return float((columns.sqrt() if spread == "deviation" else columns).mean())


def hyperspherical_energy(features: Tensor, *, eps: float = EPS, form: Form = "masked") -> Tensor:
    """L_HE of features (n, width), eq. 3. Scalar; see `univarfl` for the forms."""
    unit = unit_rows(features)
    # Not below 0: rounding can put a cosine above 1, and eps may be smaller than that.
    pairs = 1 / ((1 - unit @ unit.t()).clamp_min(0) + eps)
    if form == "masked":
        pairs = pairs.masked_fill(torch.eye(len(pairs), dtype=torch.bool, device=pairs.device), 0.0)
    return pairs.sum() / len(pairs) ** 2


def gaussian_kernel(features: Tensor) -> Tensor:
    """FedUV's uniformity of features (n, width): mean over distinct pairs of exp(-|z_i - z_j|^2 / m). Scalar.

    m is the median of the squared distances above 0, and part of the graph, as in the authors' code: scaling
    all features changes nothing. Equal features give 1 without a gradient, a batch of one gives 0.
    """
    squares = torch.pdist(features).square()
    above = squares[squares > FLOOR**2]
    median = above.median() if len(above) else squares.new_ones(())
    return torch.exp(-squares / median).mean() if len(squares) else squares.sum()


def unit_rows(features: Tensor) -> Tensor:
    """(n, width): rows scaled to length one; rows of zeros stay zero and pass no gradient."""
    squares = features.square().sum(dim=1, keepdim=True)
    is_zero = squares <= FLOOR**2
    scale = torch.where(is_zero, 0.0, torch.where(is_zero, 1.0, squares).rsqrt())
    return features * scale
