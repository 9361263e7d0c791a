"""Options of methods outside of their bounds: one fault each, which names the option, its value and the bound."""

from __future__ import annotations

import inspect
from typing import Annotated, get_args, get_origin

import pytest

from methods import METHODS
from raysim.base.options import Bounds
from raysim.plan.find import build_methods

ABOVE, AT_LEAST, BELOW, AT_MOST = "greater than ", "greater than or equal to ", "less than ", "less than or equal to "
POSITIVE, AMOUNT, COUNT = [(0, f"{ABOVE}0")], [(-1, f"{AT_LEAST}0")], [(0, f"{AT_LEAST}1")]
SHARE = [(-0.1, f"{AT_LEAST}0"), (1.2, f"{AT_MOST}1")]
FRACTION = [(0, f"{ABOVE}0"), (1.5, f"{AT_MOST}1")]
OPEN_SHARE = [(0, f"{ABOVE}0"), (1.0, f"{BELOW}1")]
DECAY = [(-0.1, f"{AT_LEAST}0"), (1, f"{BELOW}1")]
ITERATIONS = [*COUNT, (10**12, f"{AT_MOST}100000")]
ATTACK = {"share": SHARE, "from_round": AMOUNT}
FEDOPT = {"server_lr": POSITIVE, "beta1": DECAY, "beta2": DECAY, "tau": POSITIVE, "init_v": AMOUNT}
PRIVATE = {"clip": POSITIVE, "noise": [*AMOUNT, (1e9, f"{AT_MOST}10000")], "delta": OPEN_SHARE}

#: Method -> option -> values out of bounds, and the bound in words.
OUTSIDE = {
    "additive_noise": {**ATTACK, "sigma": POSITIVE},
    "alie": ATTACK,
    "apfl": {"alpha": SHARE},
    "backdoor": {**ATTACK, "scale": POSITIVE, "target": AMOUNT, "poison": FRACTION, "trigger": COUNT},
    "bucketing": {"size": COUNT},
    "ccvr": {
        "num_samples": COUNT,
        "epochs": [*AMOUNT, (10**30, f"{AT_MOST}100000")],
        "lr": POSITIVE,
        "momentum": DECAY,
        "batch_size": COUNT,
    },
    "centered_clipping": {"tau": POSITIVE, "iterations": ITERATIONS},
    "client_momentum": {"beta": DECAY},
    "diagnostics": {"every": COUNT},
    "ditto": {"lam": AMOUNT, "epochs": POSITIVE},
    "dnc": {"iterations": ITERATIONS, "coordinates": COUNT},
    "dp": {**PRIVATE, "epsilon": POSITIVE, "adaptive": OPEN_SHARE, "noise_cohort_size": COUNT},
    "dp_sgd": PRIVATE,
    "elastic": {"tau": AMOUNT, "mu": DECAY, "sample_ratio": FRACTION},
    "fang": ATTACK,
    "fedacg": {"lam": DECAY, "beta": AMOUNT},
    "fedadagrad": {name: values for name, values in FEDOPT.items() if name != "beta2"},
    "fedadam": FEDOPT,
    "fedala": {"layers": COUNT, "eta": POSITIVE, "share": FRACTION, "first_passes": COUNT},
    "fedalign": {"mu": AMOUNT, "width": OPEN_SHARE},
    "fedasync": {"alpha": FRACTION, "power": AMOUNT},
    "fedavgm": {"beta": DECAY, "server_lr": POSITIVE},
    "fedbabu": {"steps": COUNT, "lr": POSITIVE},
    "fedbuff": {"buffer": COUNT, "server_lr": POSITIVE, "power": AMOUNT},
    "feddyn": {"alpha": AMOUNT, "max_grad_norm": POSITIVE},
    "fedlc": {"tau": AMOUNT},
    "fednova": {"mu": AMOUNT},
    "fedproto": {"strength": AMOUNT},
    "fedprox": {"mu": AMOUNT},
    "fedrep": {"head_epochs": POSITIVE},
    "fedrs": {"alpha": SHARE},
    "fedsol": {"rho": AMOUNT, "temperature": POSITIVE},
    "fedvg": {"every": COUNT, "eps": AMOUNT},
    "fedvg_loss": {"every": COUNT, "eps": AMOUNT},
    "fedyogi": FEDOPT,
    "fine_tune": {"steps": COUNT, "lr": POSITIVE},
    "fisher": {"num_examples": COUNT},
    "flfa": {"num_layers": COUNT},
    "gaussian": {**ATTACK, "sigma": POSITIVE},
    "geometric_median": {"iterations": ITERATIONS, "smoothing": POSITIVE},
    "ipm": {**ATTACK, "scale": POSITIVE},
    "krum": {"select": COUNT},
    "label_flip": {**ATTACK, "source": AMOUNT, "target": AMOUNT},
    "local_dp": PRIVATE,
    "min_max": ATTACK,
    "min_sum": ATTACK,
    "moon": {"mu": AMOUNT, "temperature": POSITIVE},
    "norm_bounding": {"bound": POSITIVE},
    "per_fedavg": {"alpha": POSITIVE, "delta": POSITIVE},
    "pfedme": {"lam": POSITIVE, "inner_steps": COUNT},
    "power_sgd": {"rank": COUNT},
    "qsgd": {"levels": [*COUNT, (200, f"{AT_MOST}127")], "bucket": COUNT},
    "quantised_broadcast": {"bits": [*COUNT, (9, f"{AT_MOST}8")]},
    "random_k": {"share": FRACTION},
    "regmean": {"shrink": SHARE},
    "scaffold": {"server_lr": POSITIVE},
    "sign_flip": {**ATTACK, "scale": POSITIVE},
    "sign_guard": {"lower": POSITIVE, "upper": POSITIVE, "share": FRACTION},
    "sign_majority": {"server_lr": POSITIVE},
    "top_k": {"share": FRACTION},
    "univarfl": {"mu": AMOUNT, "lam": AMOUNT, "eps": POSITIVE, "warmup": AMOUNT},
}
CASES = [
    (name, option, value, words)
    for name, options in OUTSIDE.items()
    for option, values in options.items()
    for value, words in values
]


@pytest.mark.parametrize(("name", "option", "value", "words"), CASES)
def test_a_value_out_of_bounds_is_one_fault_with_the_bound(name, option, value, words):
    _, faults = build_methods([{name: {option: value}}])
    assert [fault.key for fault in faults] == [f"methods[0].{name}.{option}"]
    assert f"must be {words}, got {value}" in faults[0].message


def bounded(annotation: object) -> bool:
    """Whether a type, or a type inside a union or an annotation, has bounds."""
    parts = get_args(annotation)
    has_own = get_origin(annotation) is Annotated and any(isinstance(part, Bounds) for part in parts)
    return has_own or any(map(bounded, parts))


def test_every_option_with_bounds_is_in_the_table():
    signatures = {name: inspect.signature(make, eval_str=True) for name, make in METHODS.items()}
    found = {
        name: {option for option, each in signature.parameters.items() if bounded(each.annotation)}
        for name, signature in signatures.items()
    }
    assert {name: options for name, options in found.items() if options} == {n: {*o} for n, o in OUTSIDE.items()}
