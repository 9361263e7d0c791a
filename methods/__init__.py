"""Federated-learning methods, each a function that returns a `Method`. A new one is a file and a line in `METHODS`."""

from __future__ import annotations

from collections.abc import Callable

from methods.ccvr import ccvr
from methods.diagnostics import diagnostics
from methods.elastic import elastic
from methods.fedacg import fedacg
from methods.fedalign import fedalign
from methods.fedavgm import fedavgm
from methods.feddyn import feddyn
from methods.fedlc import fedlc
from methods.fednova import fednova
from methods.fedopt import fedadagrad, fedadam, fedyogi
from methods.fedproto import fedproto
from methods.fedprox import fedprox
from methods.fedrs import fedrs
from methods.fedsol import fedsol
from methods.fedvg import fedvg
from methods.feedback import dfa, fa
from methods.ffa_lora import ffa_lora
from methods.fisher import fisher
from methods.flfa import flfa
from methods.flora import flora
from methods.freeze import freeze
from methods.keep_factors import keep_factors
from methods.livar import livar
from methods.moon import moon
from methods.personal import personal
from methods.regmean import regmean
from methods.scaffold import scaffold
from methods.uniform import uniform
from methods.univarfl import univarfl
from raysim.core.method import Method

METHODS: dict[str, Callable[..., Method]] = {
    "ccvr": ccvr,
    "dfa": dfa,
    "diagnostics": diagnostics,
    "elastic": elastic,
    "fa": fa,
    "fedacg": fedacg,
    "fedadagrad": fedadagrad,
    "fedadam": fedadam,
    "fedalign": fedalign,
    "fedavgm": fedavgm,
    "feddyn": feddyn,
    "fedlc": fedlc,
    "fednova": fednova,
    "fedproto": fedproto,
    "fedprox": fedprox,
    "fedrs": fedrs,
    "fedsol": fedsol,
    "fedvg": fedvg,
    "fedyogi": fedyogi,
    "ffa_lora": ffa_lora,
    "fisher": fisher,
    "flfa": flfa,
    "flora": flora,
    "freeze": freeze,
    "keep_factors": keep_factors,
    "livar": livar,
    "moon": moon,
    "personal": personal,
    "regmean": regmean,
    "scaffold": scaffold,
    "uniform": uniform,
    "univarfl": univarfl,
}
