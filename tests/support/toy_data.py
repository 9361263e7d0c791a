"""Own code about data, in small: work on images, tasks, and models for rows and for tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import nn

from raysim.training.tasks import REGRESSION

# --- work on images ---------------------------------------------------------------------------------------------------


def brightens(images, *, by: int = 1):
    return images + np.uint8(by)


def halves(images):
    return np.ascontiguousarray(images[:, ::2, ::2])


def median_task(*, scale=1.0):
    """A task: absolute errors."""
    return replace(
        REGRESSION, name="median", total=lambda outputs, targets: scale * (outputs[:, 0] - targets).abs().sum()
    )


def no_task():
    return "accuracy"


def as_float_features(images):
    """The mean of each row of pixels: what a frozen network's features are to raysim."""
    return images.reshape(len(images), images.shape[1], -1).mean(2).astype(np.float32)


def as_features(images):
    return images.reshape(len(images), -1).mean(1, keepdims=True)


def centres(images):
    """Depends on the other images."""
    return images - images.mean(0).astype(np.uint8)


def writes_to_images(images):
    images[:] = 0
    return images


# --- models for rows and for tokens -----------------------------------------------------------------------------------


def linear_rows(*, num_classes, input_shape):
    """One linear layer on rows of numbers."""
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(input_shape)), num_classes))


def rows_net(*, num_classes, input_shape, hidden: int = 6):
    """Two smooth hidden layers on rows of numbers."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(int(np.prod(input_shape)), hidden),
        nn.Tanh(),
        nn.Linear(hidden, hidden),
        nn.Tanh(),
        nn.Linear(hidden, num_classes),
    )


def tokens_net(*, num_classes, input_shape, vocabulary: int = 5, hidden: int = 6):
    """Embeddings and two smooth hidden layers at every position, which sees nothing of the others."""
    return nn.Sequential(
        nn.Embedding(vocabulary, hidden),
        nn.Linear(hidden, hidden),
        nn.Tanh(),
        nn.Linear(hidden, hidden),
        nn.Tanh(),
        nn.Linear(hidden, num_classes),
    )


#: What `odd_task` changes; tests set it.
CHANGES: dict[str, object] = {}


def odd_task():
    """A regression with other fields."""
    return replace(REGRESSION, name="odd", **CHANGES)
