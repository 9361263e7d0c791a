"""Random configurations: right ones that must run, and ones with a few values that nobody should give."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from methods import METHODS
from raysim.base.settings import assign
from raysim.config import Config
from raysim.config.faults import options_model

#: Values for any key: of wrong types, at the edges, and what a slip of the hand gives.
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 7, 10**6, 10**9, 10**12, 2**31, 2**63, 10**30, -(2**63), 1 << 20000),
    *(0.0, -0.5, 0.05, 0.5, 0.999, 1.0, 1.5, 1e-300, 1e30, 1e308, float("inf"), float("-inf"), float("nan")),
    *(
        "",
        " ",
        "auto",
        "none",
        "cnn",
        "fedvg",
        "true",
        "1e-3",
        "0x10",
        "ä" * 40,
        "a" * 5000,
        "a\x00b",
        "../..",
        "~nosuchuser/x",
    ),
    *(
        "/proc/self/mem",
        "/dev/null",
        "/dev/zero",
        "sys:exit",
        "os:getcwd",
        "no_such_module:f",
        ":",
        "a:b:c",
        "${x}",
        "{{x}}",
        "%s",
        "\n",
    ),
    *(
        [],
        [[]],
        [1, 2],
        ["fedvg"],
        ["fedvg", "fedvg"],
        [None],
        {},
        {"a": 1},
        {"a": {"b": {"c": [1]}}},
        {1: 2},
        {None: None},
    ),
)

#: What a run of a second can be made of.
RIGHT: dict[str, tuple[Any, ...]] = {
    "partition.scheme": ("dirichlet", "iid", "quantity", "shards"),
    "partition.alpha": (0.1, 1.0, 100.0),
    "partition.num_clients": (3, 8, 12),
    "cohort.size": (1, 2, 3),
    "cohort.stragglers": (0.0, 0.5),
    "cohort.dropout": (0.0, 0.4),
    "model.name": ("cnn", "mlp"),
    "local.lr": (1e-3, 0.1),
    "local.batch_size": (2, 16, 64),
    "local.epochs": (1, 2),
    "local.momentum": (0.0, 0.9),
    "local.optimizer": ("sgd", "adam", "adamw"),
    "local.precision": ("float32", "bfloat16"),
    "local.stack": ("auto", "off"),
    "local.compile": (False, "eager"),
    "data.split_within_clients": (False, True),
    "data.augment": ("none", "cifar", "flip"),
    "evaluation.every": (0, 1, 2),
    "on_nonfinite": ("error", "skip"),
}

#: Methods that may stand beside each other, or be refused for a reason that is told.
LISTS = sorted(METHODS)
#: Those that need a model with adapters, or are about it.
ADAPTERS = {"livar", "flora", "ffa_lora", "keep_factors", "regmean"}


def base(root: str, storage: str) -> dict[str, Any]:
    return {
        "name": "fuzz",
        "rounds": 2,
        "seed": 1,
        "storage": storage,
        "data": {"name": "digits", "root": root, "test": 0.2, "validation": 0.1},
        "partition": {"scheme": "iid", "num_clients": 6},
        "model": {"name": "mlp", "hidden": 8},
        "local": {"lr": 0.1, "batch_size": 32},
        "cohort": {"size": 2},
        "resources": {"backend": "serial"},
        "report": {},
    }


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The dotted name of every key and group."""
    for name, field in model.model_fields.items():
        yield prefix + name
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from keys_of(inner, f"{prefix}{name}.")


#: What a fuzzed configuration must not set: it would write elsewhere, start Ray, or take the machine.
LEFT_ALONE = {"storage", "name", "data.root", "resources", "resources.backend", "checkpoint.every_s", "data", "base"}

KEYS = [key for key in keys_of(Config) if key not in LEFT_ALONE]
OPTIONS = [(name, option) for name in sorted(METHODS) for option in options_model(METHODS[name]).model_fields]


def put(raw: dict[str, Any], key: str, value: object) -> None:
    """Set a key, whatever stands in its way."""
    try:
        assign(raw, key, value)
    except Exception:  # a part above it is not a group any more
        raw[key.partition(".")[0]] = value


def right(seed: int, root: str, storage: str) -> dict[str, Any]:
    """A configuration of allowed values, which may still contradict each other."""
    rng, raw = random.Random(f"right-{seed}"), base(root, storage)
    for key in rng.sample(sorted(RIGHT), rng.randint(1, 6)):
        put(raw, key, rng.choice(RIGHT[key]))
    raw["model"] = {"name": raw["model"]["name"]} | ({"hidden": 8} if raw["model"]["name"] == "mlp" else {"width": 4})
    raw["methods"] = rng.sample(LISTS, rng.choice((0, 1, 1, 2, 3)))
    if (ADAPTERS & set(raw["methods"]) and rng.random() < 0.8) or rng.random() < 0.1:
        raw["model"] = {"name": "vit", "dim": 16, "depth": 1, "heads": 2, "patch": 4, "lora": {"rank": 2}}
    return raw


def wrong(seed: int, root: str, storage: str) -> dict[str, Any]:
    """A configuration with one to three values that were drawn for no reason."""
    rng, raw = random.Random(f"wrong-{seed}"), base(root, storage)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        kind = rng.random()
        value = copy.deepcopy(rng.choice(VALUES))
        if kind < 0.65:
            put(raw, rng.choice(KEYS), value)
        elif kind < 0.9:
            name, option = rng.choice(OPTIONS)
            raw["methods"] = [{name: {option: value}}]
        else:
            key = rng.choice(KEYS)
            place = rng.randrange(len(key))
            put(raw, key[:place] + rng.choice("xyz._ ") + key[place + 1 :], value)  # a slip of the hand
    return raw
