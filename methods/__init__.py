"""Federated-learning methods, each a function that returns a `Method`. A new one is a file and its import here."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from methods.ccvr import ccvr as ccvr
from methods.diagnostics import diagnostics as diagnostics
from methods.elastic import elastic as elastic
from methods.fedacg import fedacg as fedacg
from methods.fedalign import fedalign as fedalign
from methods.fedavgm import fedavgm as fedavgm
from methods.feddyn import feddyn as feddyn
from methods.fedlc import fedlc as fedlc
from methods.fednova import fednova as fednova
from methods.fedopt import fedadagrad as fedadagrad
from methods.fedopt import fedadam as fedadam
from methods.fedopt import fedyogi as fedyogi
from methods.fedproto import fedproto as fedproto
from methods.fedprox import fedprox as fedprox
from methods.fedrs import fedrs as fedrs
from methods.fedsol import fedsol as fedsol
from methods.fedvg import fedvg as fedvg
from methods.feedback import dfa as dfa
from methods.feedback import fa as fa
from methods.ffa_lora import ffa_lora as ffa_lora
from methods.fisher import fisher as fisher
from methods.flfa import flfa as flfa
from methods.flora import flora as flora
from methods.freeze import freeze as freeze
from methods.keep_factors import keep_factors as keep_factors
from methods.livar import livar as livar
from methods.moon import moon as moon
from methods.personal import personal as personal
from methods.regmean import regmean as regmean
from methods.scaffold import scaffold as scaffold
from methods.uniform import uniform as uniform
from methods.univarfl import univarfl as univarfl
from raysim.core.method import Method

#: Name in a configuration -> the method's function: every function imported above.
METHODS: dict[str, Callable[..., Method]] = {
    name: make for name, make in sorted(globals().items()) if inspect.isfunction(make)
}
