"""Statistics of a client's features, which several methods report, and the server's linear algebra on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from raysim.core.layout import Layout, Leaf
from raysim.core.method import ClientView


@dataclass(frozen=True)
class Features:
    """A client's local examples as a model sees them, in eval mode, without augmentation.

    values: (n, width) float32, the input of the head; labels: (n,) int64; is_correct: (n,) bool, by the model's logits.
    """

    values: Tensor
    labels: Tensor
    is_correct: Tensor


def local_features(client: ClientView, point: Tensor | None = None, *, is_normalised: bool = True) -> Features:
    """One pass over the local examples (needs "features").

    Args:
      point: [num_params], the model; None: the client's current model.
      is_normalised: see `ClientView.batches`.
    """
    parts = []
    for batch in client.batches(is_normalised=is_normalised):
        outputs = client.model.apply(client.params if point is None else point, batch.inputs)
        assert outputs.features is not None
        parts.append((outputs.features, batch.targets, outputs.logits.argmax(1) == batch.targets))
    values, labels, is_correct = (torch.cat(part) for part in zip(*parts, strict=True))
    return Features(values, labels, is_correct)


def mean_gradient(client: ClientView, point: Tensor) -> Tensor:
    """[num_params]: gradient of the mean cross-entropy over the client's examples at `point`, in the model's mode."""
    total = torch.zeros_like(point)
    for batch in client.batches():
        gradient = client.model.gradient(client.model.criterion, point, batch)
        total.add_(gradient, alpha=len(batch.targets) / client.num_examples)
    return total


def linear_head(layout: Layout, method: str) -> list[Leaf]:
    """Weight and optional bias of the classifier layer.

    Raises:
      ValueError: it is not one linear layer that is trained and shared.
    """
    leaves = [leaf for leaf in layout.params if leaf.is_head and leaf.is_shared]
    if [len(leaf.shape) for leaf in leaves] not in ([2, 1], [2]):
        names = [leaf.name for leaf in leaves]
        raise ValueError(f"{method}: the head must be a single linear layer, trained and shared, got {names}")
    return leaves


def refuse_personal(layout: Layout, text: str) -> None:
    """Raise ValueError for personal layers. text: the fault, with {names} for the names of the first three leaves."""
    if layout.personal:
        raise ValueError(text.format(names=", ".join(leaf.name for leaf in layout.personal[:3])))


def class_means(values: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """(classes, width) float64: mean feature of each class; NaN where a class has no example."""
    means = torch.full((num_classes, values.shape[1]), torch.nan, dtype=torch.float64, device=values.device)
    for label in set(labels.tolist()):
        means[label] = values[labels == label].double().mean(0)
    return means


def class_covariances(values: Tensor, labels: Tensor, num_classes: int, *, diagonal: bool = False) -> Tensor:
    """Unbiased covariance of each class, in float64, 0 where a class has fewer than two examples.

    Returns:
      (classes, width * (width + 1) / 2), see `pack_symmetric`, or with `diagonal` (classes, width).
    """
    width = values.shape[1]
    size = width if diagonal else width * (width + 1) // 2
    covariances = torch.zeros(num_classes, size, dtype=torch.float64, device=values.device)
    for label in set(labels.tolist()):
        examples = values[labels == label].double()
        if len(examples) < 2:
            continue
        centred = examples - examples.mean(0)
        if diagonal:
            covariances[label] = centred.square().sum(0) / (len(examples) - 1)
        else:
            covariances[label] = pack_symmetric(centred.T @ centred / (len(examples) - 1))
    return covariances


def pack_symmetric(matrix: Tensor) -> Tensor:
    """The upper triangle of (..., n, n) symmetric matrices, row by row: (..., n * (n + 1) / 2)."""
    rows, columns = torch.triu_indices(matrix.shape[-1], matrix.shape[-1], device=matrix.device)
    return matrix[..., rows, columns]


def unpack_symmetric(packed: Tensor, size: int) -> Tensor:
    """Return symmetric (..., size, size) matrices from the upper triangles of `pack_symmetric`."""
    rows, columns = torch.triu_indices(size, size, device=packed.device)
    matrix = packed.new_empty(*packed.shape[:-1], size, size)
    matrix[..., rows, columns] = packed
    matrix[..., columns, rows] = packed
    return matrix


@contextmanager
def one_thread() -> Iterator[None]:
    """Run linear algebra with one thread, since the bits may depend on the number of threads."""
    kept = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(kept)
