"""Small federations for tests."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from raysim.core.method import Method
from raysim.data.federation import build_all_shards
from raysim.data.manifest import Manifest
from raysim.data.shard_files import Write, write_serially
from raysim.engine.pool import SerialPool
from raysim.engine.server import Server
from raysim.plan.build import Made, Plan, Recipe, make_server, make_trainer
from raysim.plan.check import check
from tests.support.method_cases import ASYNCHRONOUS, names_of

#: A network without kinks: rounding moves its gradients as little as its parameters. With ReLU and max pooling one unit
#: in the last place flips a choice now and then, after which an engine and its twin part by 1e-4, and with BatchNorm by 1e-2
#: and more (tests/bench/rounding.py).
SMOOTH = {"activation": "tanh", "pool": "average"}

BASE = {
    "seed": 3,
    "rounds": 3,
    "partition": {"alpha": 0.3, "num_clients": 12, "min_samples": 2},
    "model": {"name": "cnn", "width": 4, "hidden": 16, **SMOOTH},
    "local": {"lr": 0.1, "epochs": 1, "batch_size": 16},
    "cohort": {"size": 7},
    "resources": {"backend": "serial"},
}


#: The share of the digits that is held out for testing: the 500 rows that are left are a step or two for each client, and
#: what a method does shows in a few steps.
FEW_ROWS = 0.6


#: A run of a second, as `raysim.run` takes it; the fixture `settings` adds where data and runs lie.
SMALL = {
    "seed": 3,
    "rounds": 3,
    "partition": {"alpha": 0.3, "num_clients": 6},
    "model": {"name": "mlp"},
    "local": {"lr": 0.1, "steps": 2, "batch_size": 16},
    "cohort": {"size": 3},
    "resources": {"backend": "serial"},
}


#: Simulated time for asynchronous methods: clients of different speed.
CLOCK = {"step_s": {"lognorm": {"s": 1.0, "scale": 0.5}}, "up_mbps": 1.0, "latency_s": 0.1}


def raw_config(root: Path, methods=(), **groups) -> dict:
    """The base configuration with groups laid over it; scalars, and a model with a name, replace."""
    raw = {key: dict(value) if isinstance(value, dict) else value for key, value in BASE.items()}
    raw["data"] = {"root": str(root), "validation": 0.1}  # the same rows train with FedVG and without
    if not {"name", "split"} & groups.get("data", {}).keys():  # these bring their own rows
        raw["data"]["test"] = FEW_ROWS
    raw["methods"] = list(methods)
    if names_of(raw["methods"]) & ASYNCHRONOUS and "time" not in groups:
        raw["time"] = CLOCK
    for key, value in groups.items():
        is_whole = not isinstance(value, dict) or (key == "model" and "name" in value)
        raw[key] = value if is_whole else {**raw.get(key, {}), **value}
    given = groups.get("partition", {})
    if "alpha" not in given and given.get("scheme", "dirichlet") not in ("dirichlet", "quantity", "nine_plus_one"):
        raw["partition"].pop("alpha", None)  # that of the base
    if given.get("scheme") == "joint":  # the base has clients and cohorts
        raw["partition"] = given
        raw = {key: value for key, value in raw.items() if key != "cohort" or "cohort" in groups}
    return raw


#: A two-block transformer with adapters, trained as LIVAR trains.
LORA_VIT = {"name": "vit", "dim": 16, "depth": 2, "heads": 2, "patch": 4, "lora": {"rank": 4}}
ADAMW = {"lr": 0.005, "epochs": 1, "batch_size": 16, "optimizer": "adamw", "weight_decay": 0.1, "max_grad_norm": 1.0}


def lora_plan(root: Path, methods=(), *, model=(), local=(), **groups) -> Plan:
    """A plan with adapters; `model` and `local` are laid over LORA_VIT and ADAMW."""
    raw = raw_config(root, methods, **groups)
    raw["model"], raw["local"] = LORA_VIT | dict(model), ADAMW | dict(local)
    return check(raw, "a test")


def plan_of(root: Path, methods=(), **groups) -> Plan:
    return check(raw_config(root, methods, **groups), "a test")


def steps_plan(root: Path, methods=(), *, steps: int, **groups) -> Plan:
    """As `plan_of`, with so many local steps a round instead of epochs."""
    raw = raw_config(root, methods, **groups)
    raw["local"] = {key: value for key, value in raw["local"].items() if key != "epochs"} | {"steps": steps}
    return check(raw, "a test")


def build_shards(manifest: Manifest, cache: Path, write: Write = write_serially) -> Path:
    """Return the shard folder of one manifest."""
    return build_all_shards([manifest], cache, write)[0]


def recipe_of(plan: Plan, root: Path, *, wants_gpu: bool = False) -> Recipe:
    return plan.recipe(Made(str(build_shards(plan.manifest, root / "shards"))), wants_gpu=wants_gpu)


def server_on(plan: Plan, root: Path, pool=None) -> Server:
    """A server in this process, on a serial pool unless one is given."""
    recipe = recipe_of(plan, root)
    return make_server(recipe, pool or SerialPool(partial(make_trainer, recipe), plan.keeps_memory))


def probe(**fields) -> Method:
    """A method made in a test."""
    return Method("probe", **fields)


def server_with(root: Path, method: Method, methods=(), **groups) -> Server:
    """A server whose only phase has one more method, which is checked against no other."""
    server = server_on(plan_of(root, methods, **groups), root)
    (phase,) = server.phases
    server.phases = [replace(phase, methods=(*phase.methods, method))]
    server.pool._trainer.phases = server.phases
    return server


def updates_of(server: Server) -> dict[int, Tensor]:
    """Client -> its update of the last round [num_state], as the trainer of a serial pool keeps it; ascending."""
    return dict(sorted(server.pool._trainer._vectors._rows["update"].items()))


def run(plan: Plan, root: Path, pool=None, rounds=None) -> Server:
    """The server after all rounds (or some)."""
    server = server_on(plan, root, pool)
    for index in range(plan.num_rounds if rounds is None else rounds):
        server.run_round(index)
    return server
