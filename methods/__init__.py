"""Federated-learning methods, each a function that returns a `Method`. A new one is a file and a line in `METHODS`."""

from __future__ import annotations

from collections.abc import Callable

from methods.ccvr import ccvr
from methods.elastic import elastic
from methods.fedavgm import fedavgm
from methods.feddyn import feddyn
from methods.fednova import fednova
from methods.fedopt import fedadagrad, fedadam, fedyogi
from methods.fedproto import fedproto
from methods.fedprox import fedprox
from methods.fedvg import fedvg
from methods.fisher import fisher
from methods.livar import livar
from methods.regmean import regmean
from methods.scaffold import scaffold
from methods.uniform import uniform
from raysim.core.method import Method

METHODS: dict[str, Callable[..., Method]] = {
    "ccvr": ccvr,
    "elastic": elastic,
    "fedadagrad": fedadagrad,
    "fedadam": fedadam,
    "fedavgm": fedavgm,
    "feddyn": feddyn,
    "fednova": fednova,
    "fedprox": fedprox,
    "fedproto": fedproto,
    "fedvg": fedvg,
    "fedyogi": fedyogi,
    "fisher": fisher,
    "livar": livar,
    "regmean": regmean,
    "scaffold": scaffold,
    "uniform": uniform,
}
