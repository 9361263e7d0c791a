"""Federated-learning methods, each a function that returns a `Method`. A new one is a file and a line in `METHODS`."""

from __future__ import annotations

from collections.abc import Callable

from methods.fedavgm import fedavgm
from methods.fedprox import fedprox
from methods.fedvg import fedvg
from methods.uniform import uniform
from raysim.core.method import Method

METHODS: dict[str, Callable[..., Method]] = {
    "fedavgm": fedavgm,
    "fedprox": fedprox,
    "fedvg": fedvg,
    "uniform": uniform,
}
