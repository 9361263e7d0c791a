"""Federated-learning methods, each a function that returns a `Method`. A new one is a file and a line in `METHODS`."""

from __future__ import annotations

from collections.abc import Callable

from methods.fedacg import fedacg
from methods.fedavgm import fedavgm
from methods.fedlc import fedlc
from methods.fedprox import fedprox
from methods.fedrs import fedrs
from methods.fedsol import fedsol
from methods.fedvg import fedvg
from methods.feedback import dfa, fa
from methods.flfa import flfa
from methods.freeze import freeze
from methods.moon import moon
from methods.uniform import uniform
from methods.univarfl import univarfl
from raysim.core.method import Method

METHODS: dict[str, Callable[..., Method]] = {
    "dfa": dfa,
    "fa": fa,
    "fedacg": fedacg,
    "fedavgm": fedavgm,
    "fedlc": fedlc,
    "fedprox": fedprox,
    "fedrs": fedrs,
    "fedsol": fedsol,
    "fedvg": fedvg,
    "flfa": flfa,
    "freeze": freeze,
    "moon": moon,
    "uniform": uniform,
    "univarfl": univarfl,
}
