"""Federated-learning methods: functions that return a `Method`. To add a method, write a file and add its function
to a group here.
"""

from __future__ import annotations

from collections.abc import Callable

from methods.apfl import apfl
from methods.asynchronous import fedasync, fedbuff
from methods.attack import additive_noise, gaussian, sign_flip
from methods.attack_data import backdoor, label_flip
from methods.attack_omniscient import alie, fang, ipm, min_max, min_sum
from methods.ccvr import ccvr
from methods.client_momentum import client_momentum
from methods.compression import power_sgd, qsgd, random_k, sign, sign_majority, top_k
from methods.diagnostics import diagnostics
from methods.ditto import ditto
from methods.dp import dp
from methods.elastic import elastic
from methods.fedacg import fedacg
from methods.fedala import fedala
from methods.fedalign import fedalign
from methods.fedavgm import fedavgm
from methods.feddyn import feddyn
from methods.fedlc import fedlc
from methods.fednova import fednova
from methods.fedopt import fedadagrad, fedadam, fedyogi
from methods.fedproto import fedproto
from methods.fedprox import fedprox
from methods.fedrep import fedbabu, fedrep
from methods.fedrs import fedrs
from methods.fedsol import fedsol
from methods.fedvg import fedvg
from methods.fedvg_cosine import fedvg_cosine
from methods.fedvg_loss import fedvg_loss
from methods.feedback import dfa, fa
from methods.ffa_lora import ffa_lora
from methods.fine_tune import fine_tune
from methods.fisher import fisher
from methods.flfa import flfa
from methods.flora import flora
from methods.freeze import freeze
from methods.keep_factors import keep_factors
from methods.livar import livar
from methods.local_dp import local_dp
from methods.moon import moon
from methods.per_fedavg import per_fedavg
from methods.personal import personal
from methods.pfedme import pfedme
from methods.regmean import regmean
from methods.robust_filters import clipped_clustering, clustering, dnc, fltrust, norm_bounding, sign_guard
from methods.robust_means import bulyan, centered_clipping, coordinate_median, geometric_median, krum, trimmed_mean
from methods.scaffold import scaffold
from methods.uniform import fedavg, uniform
from methods.univarfl import univarfl
from raysim.core.method import Method

#: What they are for -> the methods' functions.
GROUPS: dict[str, tuple[Callable[..., Method], ...]] = {
    "The four papers": (fedvg, flfa, livar, univarfl),
    "Weights and server steps": (
        fedavg,
        uniform,
        fedvg_loss,
        fedvg_cosine,
        fednova,
        fedavgm,
        fedadam,
        fedyogi,
        fedadagrad,
        fedacg,
        elastic,
    ),
    "Asynchronous rounds": (fedbuff, fedasync),
    "Local training": (fedprox, scaffold, feddyn, moon, fedsol, fedalign, client_momentum),
    "Label skew": (fedrs, fedlc, fedproto, ccvr, freeze),
    "Other backward passes": (fa, dfa),
    "Merging": (fisher, regmean),
    "Robust means": (coordinate_median, trimmed_mean, geometric_median, centered_clipping, krum, bulyan),
    "Robust filters": (norm_bounding, clustering, clipped_clustering, sign_guard, dnc, fltrust),
    "Attacks": (label_flip, backdoor, sign_flip, gaussian, additive_noise, alie, ipm, min_max, min_sum, fang),
    "Adapters": (flora, ffa_lora),
    "Personal models": (personal, fine_tune, ditto, pfedme, apfl, per_fedavg, fedrep, fedbabu, fedala),
    "Privacy": (dp, local_dp),
    "Compression": (top_k, random_k, qsgd, sign, sign_majority, power_sgd),
    "Measures": (diagnostics, keep_factors),
}

#: Name in a configuration -> the method's function.
METHODS: dict[str, Callable[..., Method]] = {make.__name__: make for group in GROUPS.values() for make in group}
