"""Federated-learning methods, each a function that returns a `Method`. A new one is a file and a line in `METHODS`."""

from __future__ import annotations

from collections.abc import Callable

from methods.ccvr import ccvr
from methods.fedavgm import fedavgm
from methods.fedproto import fedproto
from methods.fedprox import fedprox
from methods.fedvg import fedvg
from methods.fisher import fisher
from methods.livar import livar
from methods.regmean import regmean
from methods.uniform import uniform
from raysim.core.method import Method

METHODS: dict[str, Callable[..., Method]] = {
    "ccvr": ccvr,
    "fedavgm": fedavgm,
    "fedprox": fedprox,
    "fedproto": fedproto,
    "fedvg": fedvg,
    "fisher": fisher,
    "livar": livar,
    "regmean": regmean,
    "uniform": uniform,
}
