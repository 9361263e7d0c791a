"""CCVR: the classifier is trained again on features drawn from Gaussians of the classes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from methods.moments import class_covariances, class_means, linear_head, local_features, one_thread, unpack_symmetric
from raysim.base.conditions import applies_with
from raysim.base.options import Bounds
from raysim.core.layout import Layout
from raysim.core.method import ClientView, Count, Decay, Method, Positive, ServerView, State

#: What fed-mammoth adds to every variance.
MAMMOTH_VARIANCE = 1e-8

#: values (n, d) float32 and labels (n,) int64.
FeatureSet = tuple[Tensor, Tensor]

#: G Gaussians per class: counts (G, classes), proportional to their shares; means, covariances as in `pooled_moments`.
Mixture = tuple[Tensor, Tensor, Tensor]


def ccvr(
    *,
    num_samples: Count = 256,
    epochs: Annotated[int, Bounds(ge=0, le=100_000)] = 5,
    lr: Positive = 0.01,
    momentum: Decay = 0.9,
    batch_size: Annotated[Count, applies_with("as_in", None)] = 32,
    as_in: Literal["fed-mammoth"] | None = None,
) -> Method:
    """Retrains the head on features drawn from one Gaussian per class, pooled from the clients' statistics.

    Luo et al. 2021 (NeurIPS). Clients report count, mean and unbiased covariance of each class's features (the input of
    the head, in eval mode); the server pools these statistics (`pooled_moments`), draws features with the random stream
    of the round (through eigenvectors, with negative eigenvalues set to 0), and trains the current head by SGD with a
    cosine schedule over the epochs. The body does not change. CCVR is a phase after the last round, with all clients
    and the final global model.

    Args:
      num_samples: features drawn per class (the paper's number depends on the data; 200 in FL-bench).
      epochs: epochs of the SGD that trains the head, over the drawn features; 0: the head does not change. The default
        values of this option and of lr, momentum and batch_size are fed-mammoth's.
      lr: learning rate of the SGD that trains the head.
      momentum: momentum of the SGD that trains the head.
      batch_size: features in a step of the SGD that trains the head.
      as_in: "fed-mammoth", LIVAR's baseline: runs in every round, with the statistics of the clients' own trained
        models, after the methods listed before have set the head. The features of a class come from a mixture of
        Gaussians, one for each client with two or more examples of the class; they have variances and no covariances,
        and 1e-8 is added to every variance. The loss is the cross-entropy of logits / (0.1 ||logits||). Every epoch
        draws num_samples * classes new features, divided among all classes at random, shuffles the features, and takes
        as many steps as the data have classes, each on num_samples features. If a class has no Gaussian, the last
        batches are short or empty; an empty batch is still a step of the momentum. The code takes statistics of pixels
        that were not normalised, unlike the inputs of training; raysim takes the model's own inputs.
    Degenerate cases: a class with one example is drawn as that example; a class without any is not drawn. The
    statistics of clients without a step are included.
    Raises:
      ValueError: when the run starts, a head that is not trained and shared.
    """
    is_mammoth = as_in == "fed-mammoth"

    def init(params: Tensor, layout: Layout) -> State:
        linear_head(layout, "ccvr")
        return {}

    def report(client: ClientView) -> dict[str, Tensor]:
        return class_statistics(client, diagonal=is_mammoth)

    @one_thread()
    def server_update(update: Tensor, state: State, server: ServerView) -> tuple[Tensor, State]:
        mixture = class_gaussians(server.report, is_mammoth=is_mammoth)
        head, now, generator = linear_head(server.layout, "ccvr"), server.start + update, server.generator
        trained = train_head(
            [server.layout.view(now, leaf) for leaf in head],
            feature_sets(mixture, num_samples, epochs, generator, anew=is_mammoth),
            rates=cosine_rates(lr, epochs),
            momentum=momentum,
            batch_size=num_samples if is_mammoth else batch_size,
            num_batches=mixture[0].shape[1] if is_mammoth else None,
            is_normalised=is_mammoth,
            generator=generator,
        )
        update = update.clone()
        for leaf, value in zip(head, trained, strict=True):
            server.layout.view(update, leaf).copy_(value - server.layout.view(server.start, leaf))
        return update, state

    return Method(
        "ccvr",
        init=init,
        report=report,
        server_update=server_update,
        claims=frozenset() if is_mammoth else frozenset({"weights:@head.*"}),
        needs=frozenset({"classes", "features", "linear-head"}),
        is_phase=not is_mammoth,
        excludes={
            "is_robust": "the statistics are sums over all clients, attackers included, and retrain the classifier"
        },
    )


def class_statistics(client: ClientView, *, diagonal: bool) -> dict[str, Tensor]:
    """Count, mean (0 without examples) and unbiased covariance of each class's features at a client's model."""
    features, classes = local_features(client), len(client.class_counts)
    covariances = class_covariances(features.values, features.labels, classes, diagonal=diagonal)
    means = class_means(features.values, features.labels, classes).nan_to_num(0.0)
    # Covariances grow with the square of the width and are sent as float32; means are subtracted and stay float64.
    return {"counts": client.class_counts, "means": means, "covariances": covariances.float()}


def class_gaussians(report: Mapping[str, Tensor], *, is_mammoth: bool) -> Mixture:
    """Return the pooled Gaussians; for fed-mammoth wider ones, of each client with two examples or more."""
    counts, means, covariances = report["counts"], report["means"], report["covariances"].double()
    if is_mammoth:
        return torch.where(counts >= 2, counts, 0), means, covariances + MAMMOTH_VARIANCE
    count, mean, pooled = pooled_moments(counts, means, unpack_symmetric(covariances, means.shape[2]))
    return count[None], mean[None], pooled[None]


def pooled_moments(counts: Tensor, means: Tensor, covariances: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and unbiased covariance of each class over all clients' examples.

    Luo et al. 2021, section 4.2, with the term of the means in a form without cancellation:
        N = sum n_k,  mu = sum (n_k / N) mu_k,
        S = sum ((n_k - 1) / (N - 1)) S_k + sum (n_k / (N - 1)) (mu_k - mu)(mu_k - mu)'

    Args:
      counts: (K, classes); means: (K, classes, d) float64; covariances: (K, classes, d, d); any finite value where the
        count is 0.
    Returns:
      (classes,), (classes, d), (classes, d, d); S is 0 where N < 2.
    """
    total = counts.sum(0)
    weights = counts.double() / total.clamp_min(1)
    mean = (weights[:, :, None] * means).sum(0)
    pooled = torch.zeros_like(covariances[0])
    for count, own_mean, covariance in zip(counts[:, :, None, None], means, covariances, strict=True):
        centred = own_mean - mean
        between = centred[:, :, None] * centred[:, None, :]
        pooled += (count - 1).clamp_min(0) * covariance + count * between
    return total, mean, pooled / (total - 1).clamp_min(1)[:, None, None]


def feature_sets(
    mixture: Mixture, num_samples: int, epochs: int, generator: torch.Generator, *, anew: bool
) -> Iterator[FeatureSet]:
    """Yield the features of each epoch: `num_samples` of each class, drawn once.

    Args:
      anew: whether every epoch draws new features, the same number in total, divided among the classes at random
        (fed-mammoth).
    """
    classes = mixture[0].shape[1]
    if not anew:
        yield from repeat(draw_features(*mixture, torch.full((classes,), num_samples), generator), epochs)
        return
    for _ in range(epochs):
        yield draw_features(*mixture, random_sizes(num_samples * classes, classes, generator), generator)


def random_sizes(count: int, num_classes: int, generator: torch.Generator) -> Tensor:
    """(classes,) int64: how many of `count` draws fall on each of equally likely classes."""
    drawn = torch.multinomial(torch.ones(num_classes), count, replacement=True, generator=generator)
    return torch.bincount(drawn, minlength=num_classes)


def draw_features(
    counts: Tensor, means: Tensor, covariances: Tensor, sizes: Tensor, generator: torch.Generator
) -> FeatureSet:
    """Draw features of each class with examples, from a mixture of G Gaussians with weights proportional to the counts.

    Args:
      counts: (G, classes); means, covariances: as in `pooled_moments`.
      sizes: (classes,) int64, number of features of each class.
    Returns:
      (n, d) float32 and (n,) int64, n the sum of the sizes of classes with examples.
    """
    values, labels = [], []
    for label, size in enumerate(sizes.tolist()):
        mixture = counts[:, label].double()
        if not size or not bool(mixture.any()):
            continue
        chosen = torch.multinomial(mixture, size, replacement=True, generator=generator)
        noise = torch.randn(size, means.shape[2], dtype=torch.float64, generator=generator)
        for component in sorted(set(chosen.tolist())):
            spread = _spread(noise[chosen == component], covariances[component, label])
            values.append(means[component, label] + spread)
            labels.append(torch.full((len(spread),), label))
    if not values:
        return torch.zeros(0, means.shape[2]), torch.zeros(0, dtype=torch.int64)
    return torch.cat(values).float(), torch.cat(labels)


def _spread(noise: Tensor, covariance: Tensor) -> Tensor:
    """Return rows with the given covariance, which may be rank-deficient, from standard normal rows."""
    if covariance.dim() == 1:
        return noise * covariance.clamp_min(0).sqrt()
    values, vectors = torch.linalg.eigh(covariance)
    rows: Tensor = (noise * values.clamp_min(0).sqrt()) @ vectors.T
    return rows


def cosine_rates(lr: float, epochs: int) -> list[float]:
    """The rate of each epoch: lr (1 + cos(pi e / E)) / 2 in epoch e of E."""
    return [lr * (1 + math.cos(math.pi * epoch / epochs)) / 2 for epoch in range(epochs)]


def train_head(
    head: Sequence[Tensor],
    sets: Iterable[FeatureSet],
    *,
    rates: Sequence[float],
    momentum: float,
    batch_size: int,
    num_batches: int | None = None,
    is_normalised: bool,
    generator: torch.Generator,
) -> list[Tensor]:
    """Train the head by SGD on features, in a new random order in each epoch.

    Args:
      head: weight (classes, d) and, if there is one, bias (classes,).
      sets: features of each epoch; rates: learning rate of each epoch.
      num_batches: steps per epoch, whatever n is: remaining features are not used, and an empty batch has no gradient
        but is a step of the momentum. None: an epoch uses every feature once.
    Returns:
      the trained head; `head` is not modified.
    """
    trained = [value.detach().clone().requires_grad_() for value in head]
    optimizer = torch.optim.SGD(trained, momentum=momentum)
    for rate, (values, labels) in zip(rates, sets, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        if not len(labels):
            continue
        order = torch.randperm(len(labels), generator=generator)
        steps = math.ceil(len(order) / batch_size) if num_batches is None else num_batches
        for step in range(steps):
            rows = order[step * batch_size : (step + 1) * batch_size]
            logits = F.linear(values[rows], *trained)
            if is_normalised:
                logits = logits / (0.1 * logits.norm(dim=1, keepdim=True).clamp_min(1e-7))
            optimizer.zero_grad()
            torch.autograd.backward(F.cross_entropy(logits, labels[rows]))
            optimizer.step()
    return [value.detach() for value in trained]
