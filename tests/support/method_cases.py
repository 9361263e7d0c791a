"""Every method, alone with options and with others: the one list that tests of bits, of precision, of GPUs and twins read.

A method that is in neither list fails `tests/methods/test_cases.py`.
"""

from __future__ import annotations

from typing import Any

from methods import GROUPS
from raysim.base.settings import Raw

Methods = list[str | Raw]

#: Methods that need simulated time.
ASYNCHRONOUS = set(GROUPS["Asynchronous rounds"])

#: Methods that attack.
ATTACKS = GROUPS["Attacks"]

FL_BENCH: dict[str, Any] = {"as_in": "fl-bench"}
MAMMOTH: dict[str, Any] = {"as_in": "fed-mammoth"}
FLFA: dict[str, Any] = {"candidates": ["conv2", "fc1"]}

#: What averages no statistics of clients.
PERSONAL_NORMS: Raw = {"personal": {"layers": "norm"}}

#: Name -> methods, for the small CNN of tests/support/federations.py.
CNN_CASES: dict[str, Methods] = {
    "fedavg": [],
    "fedavg-by-name": ["fedavg"],
    "uniform": ["uniform"],
    "fedprox": [{"fedprox": {"mu": 0.3}}],
    "fedavgm": [{"fedavgm": {"beta": 0.7}}],
    "fedavgm-nesterov": [{"fedavgm": {"beta": 0.7, "form": "nesterov"}}],
    "fedavgm-damped": [{"fedavgm": {"beta": 0.7, "form": "damped"}}],
    "fedavgm-fl-bench": [{"fedavgm": FL_BENCH}],
    "fedvg-model": ["fedvg"],
    "fedvg-layer": [{"fedvg": {"granularity": "layer", "norm": "l2", "val_mode": "eval"}}],
    "fedvg-block": [{"fedvg": {"granularity": "block", "mix": "average"}}],
    "fedvg-spectral": [{"fedvg": {"norm": "spectral", "granularity": "layer"}}],
    "fedvg-update": [{"fedvg": {"norm": "update"}}],
    "fedvg-every": [{"fedvg": {"every": 2, "granularity": "layer"}}],
    "fedvg-loss": ["fedvg_loss"],
    "fedvg-cosine": ["fedvg_cosine"],
    "fedprox-fedavgm-fedvg": ["fedprox", "fedavgm", {"fedvg": {"granularity": "block"}}],
    "fa": ["fa"],
    "dfa": ["dfa"],
    "flfa": [{"flfa": FLFA}],
    "flfa-direct": [{"flfa": {**FLFA, "feedback": "direct"}}],
    "flfa-resampled": [{"flfa": {"num_layers": 2, "feedback": "resampled"}}],
    "flfa-2": [{"flfa": {"num_layers": 2, "strategy": "lowest", "first_layer": False}}],
    "flfa-unscaled": [{"flfa": {**FLFA, "scale": "none", "strategy": "highest"}}],
    "flfa-random": [{"flfa": {"feedback": "random", "candidates": ["fc2"]}}],
    "univarfl": [{"univarfl": {"mu": 0.05, "lam": 1.5, "eps": 0.5}}],
    "moon": [{"moon": {"mu": 2.0}}],
    "moon-random": [{"moon": {"first": "random"}}],
    "fedsol": [{"fedsol": {"rho": 0.3}}],
    "fedsol-adaptive": [{"fedsol": {"rho": 0.3, "form": "adaptive"}}],
    "fedalign": [{"fedalign": {"mu": 0.3, "width": 0.5}}],
    "fedalign-convolution": [{"fedalign": {"width": 0.5, "block": "conv2"}}],
    "fedrs": [{"fedrs": {"alpha": 0.3}}],
    "fedlc": [{"fedlc": {"tau": 0.5}}],
    "fedacg": [{"fedacg": {"lam": 0.6, "beta": 0.1}}],
    "freeze": ["freeze"],
    "fedrs-moon-fedsol-flfa": ["fedrs", "moon", "fedsol", {"flfa": FLFA}],
    "scaffold": [{"scaffold": {"server_lr": 0.8}}],
    "scaffold-i": [{"scaffold": {"option": "i"}}],
    "scaffold-fl-bench": [{"scaffold": FL_BENCH}],
    "scaffold-fedvg": ["scaffold", "fedvg"],
    "feddyn": [{"feddyn": {"alpha": 0.2}}],
    "feddyn-clipped": [{"feddyn": {"alpha": 0.2, "max_grad_norm": 0.5}}],
    "feddyn-examples": [{"feddyn": {"alpha": 0.2, "weights": "examples"}}],
    "feddyn-fl-bench": [{"feddyn": {**FL_BENCH, "max_grad_norm": 0.5}}],
    "feddyn-clipped-fedvg": ["fedvg", {"feddyn": {"max_grad_norm": 0.5}}],
    "elastic": [{"elastic": {"tau": 0.4}}],
    "elastic-all": [{"elastic": {"sample_ratio": 1.0}}],
    "elastic-fl-bench": [{"elastic": FL_BENCH}],
    "elastic-fl-bench-fedvg": [{"elastic": FL_BENCH}, {"fedvg": {"granularity": "layer"}}],
    "fedadam": ["fedadam"],
    "fedadam-init-v": [{"fedadam": {"init_v": 1e-6, "beta2": 0.9}}],
    "fedyogi": ["fedyogi"],
    "fedadagrad": ["fedadagrad"],
    "fednova": ["fednova"],
    "fedvg-fednova-scaffold": ["fedvg", "fednova", "scaffold"],
    "toy-personal": ["tests.support.toys:personal_head"],
    "personal-body": [{"personal": {"layers": ["conv1", "fc1"]}}],
    "personal-norm": [{"personal": {"layers": "norm"}}],
    "personal-norm-fedavgm-fl-bench": [{"personal": {"layers": "norm"}}, {"fedavgm": FL_BENCH}],
    "personal-scaffold": [{"personal": {"layers": ["fc1"]}}, "scaffold"],
    "fedproto": [{"fedproto": {"strength": 0.5}}],
    "ccvr": ["ccvr"],
    "ccvr-mammoth": [{"ccvr": {**MAMMOTH, "epochs": 1}}],
    "fisher": [{"fisher": {"num_examples": 8}}],
    "fisher-mammoth": [{"fisher": MAMMOTH}],
    "regmean": ["regmean"],
    "coordinate-median": ["coordinate_median"],
    "trimmed-mean": ["trimmed_mean"],
    "krum": [{"krum": {"attackers": 1}}],
    "krum-multi-norm-bounding": [{"krum": {"attackers": 1, "select": 4}}, {"norm_bounding": {"bound": 0.05}}],
    "bulyan": [{"bulyan": {"attackers": 1}}],
    "geometric-median": ["geometric_median"],
    "centered-clipping": [{"centered_clipping": {"tau": 0.05, "iterations": 2}}],
    "norm-bounding": ["norm_bounding"],
    "clustering": ["clustering"],
    "clipped-clustering": ["clipped_clustering"],
    "sign-guard": ["sign_guard"],
    "nnm-trimmed_mean": [{"nnm": {"attackers": 1}}, "trimmed_mean"],
    "bucketing-geometric_median-fedavgm": ["bucketing", "geometric_median", "fedavgm"],
    "dnc": [{"dnc": {"iterations": 2, "coordinates": 500}}],
    "fltrust": ["fltrust"],
    "livar-head": [{"livar": {"components": "head"}}],
    "fine_tune-fedvg": [{"fine_tune": {"steps": 2}}, "fedvg"],
    "ditto": [{"ditto": {"lam": 0.7}}],
    "ditto-top_k": ["ditto", {"top_k": {"share": 0.2}}],
    "pfedme": [{"pfedme": {"inner_steps": 2}}],
    "apfl": [{"apfl": {"adaptive": True}}],
    "per_fedavg": [{"per_fedavg": {"delta": 0.01}}],
    "fedrep": [{"fedrep": {"head_epochs": 2.0}}],
    "fedbabu": [{"fedbabu": {"steps": 2}}],
    "fedala": [{"fedala": {"layers": 2, "first_passes": 2}}],
    "dp": [PERSONAL_NORMS, {"dp": {"clip": 0.3, "noise": 0.5}}],
    "dp-epsilon": [PERSONAL_NORMS, {"dp": {"clip": 0.3, "epsilon": 20.0}}],
    "dp-adaptive": [
        PERSONAL_NORMS,
        "fedprox",
        {"dp": {"clip": 0.3, "adaptive": 0.5, "noise_cohort_size": 12}},
        "fedavgm",
    ],
    "local_dp-fedvg": [PERSONAL_NORMS, {"local_dp": {"clip": 0.3, "noise": 0.1}}, "fedvg"],
    "dp_sgd-fedprox": [PERSONAL_NORMS, {"dp_sgd": {"clip": 0.5, "noise": 0.1}}, "fedprox"],
    "fedbuff": [{"fedbuff": {"buffer": 3}}],
    "fedvg-fedbuff-top_k": ["fedvg", {"fedbuff": {"buffer": 3}}, {"top_k": {"share": 0.2}}],
    "fedasync-fedprox": ["fedasync", {"fedprox": {"mu": 0.3}}],
    "client_momentum-krum": ["client_momentum", {"krum": {"attackers": 1}}],
    "attack-label_flip-source": [{"label_flip": {"share": 0.4, "source": 3, "target": 5}}],
    "dp-top_k": [PERSONAL_NORMS, {"top_k": {"share": 0.2}}, {"dp": {"clip": 0.3, "noise": 0.1}}],
    "top_k": [{"top_k": {"share": 0.2}}],
    "random_k": [{"random_k": {"share": 0.2}}],
    "random_k-unbiased": [{"random_k": {"share": 0.5, "error_feedback": False}}],
    "qsgd": [{"qsgd": {"levels": 3, "bucket": 64}}],
    "sign": ["sign"],
    "sign-scaffold": ["scaffold", "sign"],
    "sign_majority": [{"sign_majority": {"server_lr": 0.01}}],
    "power_sgd": ["power_sgd"],
    "quantised_broadcast-fedvg-top_k": [{"quantised_broadcast": {"bits": 4}}, "fedvg", {"top_k": {"share": 0.2}}],
    "power_sgd-personal": [{"personal": {"layers": ["conv1"]}}, {"power_sgd": {"rank": 1}}],
    "attack-label_flip": [{"label_flip": {"share": 0.4}}, "fedprox"],
    "attack-backdoor": [{"backdoor": {"share": 0.4, "scale": 2.0}}],
    "attack-sign_flip-fedvg": [{"sign_flip": {"share": 0.4}}, "fedvg"],
    "attack-noise": [{"additive_noise": {"sigma": 0.01, "share": 0.4}}],
    "attack-gaussian": [{"gaussian": {"sigma": 0.01, "share": 0.4}}],
    "attack-ipm": [{"ipm": {"share": 0.4}}],
    "attack-min_max": [{"min_max": {"share": 0.4}}],
    "attack-alie": [{"alie": {"share": 0.4}}],
    "attack-min_sum": [{"min_sum": {"share": 0.4, "from_round": 1}}],
    "attack-trimmed_mean": [{"fang": {"share": 0.4}}],
    "attack-krum": [{"fang": {"against": "krum", "share": 0.4}}],
}

#: Name -> methods, for the transformer with adapters.
ADAPTER_CASES: dict[str, Methods] = {
    "fedavg": [],
    "livar": ["livar"],
    "livar-factors-ccvr": [{"livar": {"evaluate": "factors"}}, {"ccvr": {"epochs": 1}}],
    "livar-ccvr": ["livar", {"ccvr": {**MAMMOTH, "epochs": 1}}],
    "livar-fedvg": [{"livar": {"components": "lora"}}, {"fedvg": {"leaves": "head"}}],
    "fedproto": ["fedproto"],
    "fisher-8": [{"fisher": {"num_examples": 8}}],
    "regmean": ["regmean"],
    "ffa_lora": ["ffa_lora"],
    "flora": ["flora"],
    "personal-ffa_lora": ["personal", "ffa_lora"],
    "flora-fedprox-keep_factors": ["fedprox", "flora", "keep_factors"],
}

#: Methods that measure and move no number: their own tests compare what they measure.
MEASURES = {"diagnostics"}


def names_of(methods: Methods) -> set[str]:
    """The methods of a list without their options."""
    return {spec if isinstance(spec, str) else next(iter(spec)) for spec in methods}
