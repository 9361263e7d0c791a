"""Privacy, robust rules and attacks together, with options drawn: the same twice and never without effect, or refused."""

from __future__ import annotations

import inspect
import random
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import numpy as np

import raysim
from methods import METHODS
from raysim.plan.check import check
from raysim.running.runner import execute
from tests.support.method_cases import ATTACKS

RULES = (
    *("bulyan", "centered_clipping", "clipped_clustering", "clustering", "coordinate_median", "dnc", "fltrust", "krum"),
    *("geometric_median", "norm_bounding", "sign_guard", "sign_majority", "trimmed_mean"),
    *("ccvr", "diagnostics", "dp", "fedadam", "feddyn", "fedproto", "fedvg", "moon", "personal", "scaffold", "top_k"),
)
#: Numbers for any option that takes them; most are out of some option's range.
NUMBERS: tuple[Any, ...] = (0, 1, 2, 3, 0.05, 0.5, 1.0, 1.5, 10.0, None)


def drawn_options(rng: random.Random, name: str) -> dict[str, Any]:
    """One or two options of a method, of the kind that its annotation says."""
    hints, given = get_type_hints(METHODS[name], include_extras=True), {}
    options = [key for key in inspect.signature(METHODS[name]).parameters if key in hints]
    for key in rng.sample(options, min(len(options), rng.choice((0, 1, 1, 2)))):
        hint = hints[key]
        while get_origin(hint) is Annotated:
            hint = get_args(hint)[0]
        words = [value for each in (hint, *get_args(hint)) if get_origin(each) is Literal for value in get_args(each)]
        given[key] = rng.choice(words) if words else rng.choice((True, False)) if hint is bool else rng.choice(NUMBERS)
    return given


def attacked_and_guarded(rng: random.Random, raw: dict[str, Any], here: Path, root: Path) -> bool:
    """An attack beside rules: equal hashes in two runs, and another hash than without the attack where attackers took part."""
    attack, *rules = rng.choice(ATTACKS), *rng.sample(RULES, rng.choice((0, 1, 1, 2)))
    methods = [{name: drawn_options(rng, name)} for name in (attack, *rules)]
    raw = raw | {
        "methods": methods,
        "partition": {"scheme": "iid", "num_clients": 10},
        "cohort": {
            "size": 8,
            "dropout": rng.choice((0.0, 0.0, 0.3)),
            "sampling": rng.choice(("fixed", "fixed", "poisson")),
        },
    }
    first = execute(check(raw, "a case"))
    again = execute(check(raw | {"name": "again"}, "a case"))
    honest = execute(check(raw | {"name": "honest", "methods": methods[1:]}, "a case"))
    history = raysim.load(here / "runs" / raw["name"]).history
    counts = [history[name].to_numpy(float) for name in history if name.endswith("/attackers")]
    has_attackers = bool(np.nansum(counts) > 0)
    if first["params_sha256"] != again["params_sha256"]:
        return False
    # A rule may leave out attackers, and then the same clients without their attack.
    return bool(rules) or has_attackers == (first["params_sha256"] != honest["params_sha256"])
