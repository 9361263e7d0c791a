"""Own code about data, in small: tasks, and models for rows and for tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import nn

from raysim.training.tasks import REGRESSION


def median_task(*, scale=1.0):
    """A task: absolute errors."""
    return replace(
        REGRESSION, name="median", total=lambda outputs, targets: scale * (outputs[:, 0] - targets).abs().sum()
    )


def no_task():
    return "accuracy"


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
