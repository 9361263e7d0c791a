"""No option without effect: each key and option, in every setting of the others, changes a run or is refused or warned of.

A probe lays one value over a configuration. Where it is accepted without a word, two rounds of a tiny run must differ
from those without it: in partition, parameters or recorded numbers.
"""

from __future__ import annotations

import copy
import itertools
import json
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Literal, get_args, get_origin

import numpy as np
import pytest
from pydantic import BaseModel

from methods import METHODS
from raysim.base.conditions import Condition
from raysim.base.errors import ConfigError, SettingIgnored
from raysim.base.settings import assign
from raysim.config.faults import options_model
from raysim.config.schema import Config
from raysim.plan.build import Plan
from raysim.plan.check import check
from tests.support.federations import LORA_VIT, server_on
from tests.support.method_cases import ASYNCHRONOUS, ATTACKS

TINY = {
    "seed": 3,
    "rounds": 2,
    "data": {"test": 0.05, "validation": 0.05},
    "partition": {"scheme": "iid", "num_clients": 4},
    "model": {"name": "mlp", "hidden": 4},
    "local": {"lr": 0.1, "epochs": 0.1, "batch_size": 16},
    "cohort": {"size": 3},
    "resources": {"backend": "serial"},
}

#: What a probe gives each key, and why a key has none.
PROBES = {
    "seed": [4],
    "rounds": [3],
    "methods": [["fedprox"]],
    "data.split_within_clients": [True],
    "data.test": [0.3],
    "data.validation": [0.3],
    "data.unseen_clients": [0.3],
    "data.unseen_choice": ["first", "last"],
    "data.validation_set.subset": [0.5],
    "data.validation_set.from_clients.share": [0.5],
    "data.validation_set.from_clients.clients": [[1]],
    "data.validation_set.imbalance": [0.5],
    "data.validation_set.label_noise": [0.5],
    "data.validation_set.external.unique": [False],
    "data.stored_size": [6],
    "data.fraction": [0.5],
    "data.normalise": ["half"],
    "data.resize": [6],
    "data.interpolation": ["bicubic"],
    "data.crop": [5],
    "data.channels": [3],
    "data.augment": ["flip"],
    "data.shift": ["noise"],
    "partition.scheme": ["shards"],
    "partition.form": ["balanced"],
    "partition.alpha": [0.5],
    "partition.num_clients": [5],
    "partition.min_samples": [500],
    "partition.shards_per_client": [3],
    "partition.labels_per_client": [3],
    "partition.domains_per_client": [2],
    "partition.samples_per_client": [200],
    "partition.file": ["no.csv"],
    "partition.seed": [9],
    "model.name": ["lenet"],
    "model.lora": [{"rank": 2}],
    "local.lr": [0.2],
    "local.epochs": [0.4],
    "local.steps": [1],
    "local.batch_size": [8],
    "local.momentum": [0.9],
    "local.weight_decay": [0.1],
    "local.lr_decay": [0.5],
    "local.schedule": ["cosine"],
    "local.optimizer": ["adamw"],
    "local.max_grad_norm": [0.1],
    "local.precision": ["bfloat16"],
    "cohort.size": [2],
    "cohort.fraction": [0.5],
    "cohort.sampling": ["poisson"],
    "cohort.dropout": [0.5],
    "cohort.stragglers": [1.0],
    "cohort.straggler_work": [0.7],
    "evaluation.every": [2],
    "evaluation.metrics": [["auroc"]],
    "stop.patience": [2, 5],
    "tune.grace_rounds": [2],
}

OUTSIDE = {
    "name, storage, loggers, labels, scale, checkpoint": "where and how a run is written, not what it computes",
    "report, calibrate, tune": "other verbs; a run refuses the groups tune and calibrate, see the cases below",
    "resources": "where a run computes; those that only Ray uses are silent in a serial run, see the schema",
    "task": "what the targets are for; a set fits one task, tests/training/test_tasks.py",
    "time, stop.simulated_s": "simulated time; tests/methods/test_asynchronous.py",
    "on_nonfinite, stop.score": "act upon an event: a number that is not finite, a score",
    "stop.epsilon": "what a method has spent; tests/methods/test_privacy.py",
    "evaluation.batch_size, local.stack, local.compile": "speed and rounding",
    "model.blocks": "the layout: what methods and traces call a layer block",
    "model.pretrained, model.head, data.reader, data.files": "files and code of one's own",
    "data.name, data.root, data.test_sets": "which sets; each has rows of its own",
    "data.validation_set.external.name, data.validation_set.external.mapping": "another prepared set; both or none",
    "data.validation_set.order, data.split": "order: seen by methods alone; split: tested below",
    "data.scale_targets": "of regressions; tests/plan/test_task.py",
    "model.lora.rank, model.lora.alpha, model.lora.targets, model.lora.dropout": "of adapters that are there: all count",
}

#: What is laid over TINY, and which groups are probed there.
CONTEXTS: list[tuple[dict[str, object], str]] = [
    ({}, ""),
    *(({"partition.scheme": scheme}, "partition.") for scheme in ("dirichlet", "shards", "quantity", "nine_plus_one")),
    ({"partition.scheme": "joint", "partition.num_clients": 20, "cohort": {}}, "partition."),
    ({"partition.scheme": "joint", "partition.num_clients": 20, "cohort": {}}, "cohort."),
    ({"partition.scheme": "dirichlet", "data.split_within_clients": True}, "data."),
    ({"data.validation": 0.0}, "data."),
    (
        {"data.unseen_clients": 0.25, "partition.seed": 4},
        "data.unseen_choice",
    ),  # neither the first nor the last is drawn
    ({"data.resize": 6}, "data."),
    ({"data.augment": "livar-vit"}, "data.interpolation"),
    ({"data.validation_set.subset": 0.5}, "data.validation_set"),
    ({"local.optimizer": "adamw"}, "local."),
    ({"local.schedule": "constant"}, "local."),
    ({"local.schedule": "cosine"}, "local."),
    ({"local.momentum": 0.9}, "local."),
    ({"local.epochs": None, "local.steps": 2}, "local."),
    ({"cohort": {"fraction": 0.75}}, "cohort."),
    ({"cohort.stragglers": 0.5}, "cohort."),
]


def leaves(model: type[BaseModel], prefix: str = ""):
    for name, field in model.model_fields.items():
        groups = [part for part in (field.annotation, *get_args(field.annotation)) if isinstance(part, type)]
        group = next((part for part in groups if issubclass(part, BaseModel)), None)
        if group is None or prefix + name in PROBES:
            yield prefix + name
        if group is not None:
            yield from leaves(group, f"{prefix}{name}.")


def test_every_key_of_the_schema_is_probed_or_named():
    named = [name for names in OUTSIDE for name in names.split(", ")]
    bare = [
        key for key in leaves(Config) if key not in PROBES and not any(f"{key}.".startswith(f"{n}.") for n in named)
    ]
    assert bare == []


def raw_of(root, settings: dict[str, object]) -> dict:
    raw = copy.deepcopy(TINY)
    raw["data"]["root"] = str(root)
    for key, value in settings.items():
        assign(raw, key, value)
    return raw


class Outcome:
    """What the rounds of a run come to. A round is trained when it is first looked at: most differ in the first one."""

    def __init__(self, rounds: Iterator[str]):
        self._rounds, self._seen = rounds, []

    def __iter__(self) -> Iterator[str]:
        for index in itertools.count():
            if index == len(self._seen):
                self._seen += itertools.islice(self._rounds, 1)
            if index == len(self._seen):
                return
            yield self._seen[index]

    def is_same(self, other: Outcome | None) -> bool:
        return other is not None and all(one == two for one, two in itertools.zip_longest(self, other))


def outcome(root, raw: dict) -> Outcome | None:
    """What two rounds come to; None where the configuration is refused or warned of."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", SettingIgnored)
        try:
            plan = check(raw, "a test")
        except (ConfigError, SettingIgnored):
            return None
    return Outcome(rounds_of(root, plan))


def rounds_of(root, plan: Plan) -> Iterator[str]:
    server = server_on(plan, root)
    for index in range(plan.num_rounds):
        record = server.run_round(index)
        numbers = {key: value for key, value in record.metrics.items() if not key.startswith("system/")}
        arrays = {name: np.asarray(array).tolist() for name, array in record.arrays.items()}
        yield json.dumps([plan.manifest.checksum, plan.num_rounds, server.params_sha256(), numbers, arrays])


def test_the_same_configuration_comes_to_the_same_and_another_seed_does_not(root):
    raw = raw_of(root, {"methods": ["fedvg"]})
    first, second, other = outcome(root, raw), outcome(root, raw), outcome(root, {**raw, "seed": 4})
    assert next(iter(first)) == next(iter(second))  # the second rounds of both come later
    assert first.is_same(second)
    assert not first.is_same(other)
    assert len(list(first)) == 2


@pytest.mark.parametrize(("settings", "group"), CONTEXTS, ids=lambda value: json.dumps(value) if value else "all")
def test_a_key_changes_the_run_or_is_refused(root, settings, group):
    base = raw_of(root, settings)
    without = outcome(root, base)
    assert without is not None
    silent = []
    for key, values in PROBES.items():
        if key in settings or not key.startswith(group):
            continue
        for value in values:
            raw = copy.deepcopy(base)
            assign(raw, key, value)
            if raw != base and without.is_same(outcome(root, raw)):
                silent.append((key, value))
    assert silent == []


# --- methods ----------------------------------------------------------------------------------------------------------

#: Clients without some of the classes.
SKEWED = {"scheme": "shards", "num_clients": 4}

#: Small networks that the options of methods can be seen in.
NORMED = {"model": {"name": "cnn", "width": 2, "hidden": 4, "norm": "batch"}}
ADAPTED = {"model": {**LORA_VIT, "dim": 4, "depth": 1, "heads": 1, "lora": {"rank": 2}}}
NETWORKS = dict.fromkeys(("livar", "flora", "ffa_lora", "keep_factors"), ADAPTED)
NETWORKS["dp"] = NETWORKS["local_dp"] = NETWORKS["dp_sgd"] = {"model": {**NORMED["model"], "norm": "group"}}

#: Rules that need more clients than the tiny run has.
VOTES = ("trimmed_mean", "krum", "bulyan", "clustering", "sign_guard", "dnc", "nnm", "bucketing")

#: Methods that need another one behind them.
BEHIND = {"nnm": ["coordinate_median"], "bucketing": ["coordinate_median"]}

FEDERATIONS = {name: {"partition": {**SKEWED, "num_clients": 8}, "cohort": {"size": 8}} for name in VOTES}
FEDERATIONS |= {name: {"time": {"step_s": {"lognorm": {"s": 1.0}}}} for name in ASYNCHRONOUS}
FEDERATIONS |= {name: {"partition": {**SKEWED, "num_clients": 6}, "cohort": {"size": 5}} for name in ATTACKS}

#: Settings of methods that take long at their defaults, or do nothing in so small a run.
SHORT = {
    "ccvr": {"num_samples": 16},
    "centered_clipping": {"tau": 0.05},
    "fedbuff": {"buffer": 2},
    "dnc": {"coordinates": 50},
    "krum": {"select": 3},
}

#: Values of options whose types do not say any.
VALUES = {
    ("personal", "layers"): ["norm", ["fc1"]],
    ("flfa", "candidates"): [["conv1", "conv2", "fc1"]],
    ("fa", "layers"): [["conv2"]],
    ("dfa", "blocks"): [["conv2"]],
    ("fedalign", "block"): ["conv2"],
    ("fedalign", "width"): [0.5],
    ("fedvg", "eps"): [1.0],
    ("fedvg_loss", "eps"): [1.0],
    ("flfa", "strategy"): ["highest"],
    ("fisher", "num_examples"): [3],
    ("diagnostics", "every"): [3],
    ("qsgd", "bucket"): [16],
    ("dp", "noise_cohort_size"): [4],
    ("dp", "epsilon"): [50.0],
    **{(name, "share"): [0.5] for name in ATTACKS},
    **{(name, "from_round"): [1] for name in ATTACKS},
    ("livar", "table"): ["paper", "online"],
    ("geometric_median", "iterations"): [1],
    ("geometric_median", "smoothing"): [1.0],
    ("trimmed_mean", "trim"): [0.25],
    ("krum", "attackers"): [0.0],
    ("bulyan", "attackers"): [0.0],
    ("sign_guard", "lower"): [0.99],
    ("sign_guard", "upper"): [1.01],
    ("dnc", "coordinates"): [20],
    ("diagnostics", "measures"): [["drift"]],
}

#: (method, option, beside which other one) that change nothing in a tiny run, and why.
UNSEEN: dict[tuple[str, str, str], str] = {
    ("flfa", "feedback", "strategy"): "the highest agreement is the first layer's here, where no feedback counts",
    ("flfa", "scale", "strategy"): "the same",
    ("livar", "evaluate", "layers"): "lambda is n_i / sum n with examples: the released form names both",
}


def values_of(make: object, name: str, annotation: object, default: object) -> list[object]:
    """Values of an option other than its default."""
    if (make, name) in VALUES:
        return VALUES[make, name]
    if get_origin(annotation) is Literal:
        return [value for value in get_args(annotation) if value != default]
    if isinstance(default, bool):
        return [not default]
    if isinstance(default, int):
        return [default + 1]
    if isinstance(default, float):
        return [default / 2] if default else [0.5]
    choices = [part for part in get_args(annotation) if part is not type(None)]
    return [value for part in choices for value in values_of(make, name, part, {int: 1, float: 1.0}.get(part))]


@cache
def probes_of(method: str) -> tuple[tuple[str, str], ...]:
    """(option, value as JSON) of a method."""
    fields = options_model(METHODS[method]).model_fields
    found = [
        (name, value)
        for name, field in fields.items()
        for value in values_of(method, name, field.annotation, field.default)
    ]
    return tuple((name, json.dumps(value)) for name, value in found)


def choices_of(method: str) -> list[tuple[str, str]]:
    """Of each option that is no number the values that a condition of another option names, and one that none names."""
    fields = options_model(METHODS[method]).model_fields.values()
    conditions = " or ".join(part.text for field in fields for part in field.metadata if isinstance(part, Condition))
    words = conditions.replace(",", " ").split()
    choices: list[tuple[str, str]] = []
    taken = set()
    for name, value in probes_of(method):
        if value[0].isdigit():
            continue
        if str(json.loads(value)) in words or name not in taken:
            choices.append((name, value))
            taken |= set() if str(json.loads(value)) in words else {name}
    return choices


#: Methods of more than 20 pairs of options.
DEAR = [name for name in METHODS if len(choices_of(name)) * len(dict(probes_of(name))) > 20]


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[pytest.mark.slow] * (name in DEAR)) for name in METHODS if probes_of(name)]
)
def test_an_option_of_a_method_changes_the_run_or_is_refused(root, method):
    """Alone, and beside values of each other option."""

    @cache
    def run(*chosen: tuple[str, str]) -> Outcome | None:
        options = SHORT.get(method, {}) | {name: json.loads(value) for name, value in chosen}
        raw = raw_of(
            root,
            {
                **NETWORKS.get(method, NORMED),
                "methods": [{method: options}, *BEHIND.get(method, [])],
                "local.momentum": 0.5,
                "partition": SKEWED,
                **FEDERATIONS.get(method, {}),
            },
        )
        return outcome(root, raw)

    assert run() is not None
    silent = [(*probe, "", "") for probe in probes_of(method) if run().is_same(run(probe))]
    firsts = {name: (name, value) for name, value in reversed(probes_of(method))}.values()
    for beside, probe in itertools.product(choices_of(method), firsts):
        if beside[0] != probe[0] and run(beside) and run(beside).is_same(run(*sorted((beside, probe)))):
            silent.append((*probe, *beside))
    unseen = {(option, beside) for name, option, beside in UNSEEN if name == method}
    assert [each for each in silent if (each[0], each[2]) not in unseen] == []
