"""Hostile files, own code and arguments of Python, drawn by a seed: each gives a result that is right, or one sentence."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import raysim
from raysim.base.errors import RaysimError
from raysim.data.readers.reader_options import ReaderOptions
from raysim.data.sources import prepare
from raysim.models import ModelSpec, build_model
from raysim.plan.check import check
from raysim.running.runner import execute
from tests.fuzz import configurations, own_code

OWN = "tests.fuzz.own_code"

#: Texts that are no partition, no description of a set, and no list of trials.
TEXTS = (
    *(
        "[[1, 2]]",
        "[NaN]",
        "3",
        "null",
        '"x"',
        "[3]",
        "[]",
        "{}",
        '{"0": 3}',
        '{"0": [NaN]}',
        '{"0": {"a": 1}}',
        "\xff\xfe",
    ),
    *("[" * 100_000, '{"a":' * 3000 + "1" + "}" * 3000, "9" * 5000, "-Infinity", '{"space": {}, "trials": [1]}'),
    *('[{"example": %s, "client": 0}]' % ("9" * count) for count in (20, 3000, 5000)),
    *(
        f'[{{"example": 0, "client": {client}}}]'
        for client in ("1e999", "-7", "null", "[0]", '"0"', "9223372036854775808")
    ),
)

#: Arguments that only Python can give.
PYTHON_VALUES: tuple[Any, ...] = (
    *(
        3,
        3.5,
        True,
        b"bytes",
        (1, 2),
        {3: 4},
        {None: 1},
        {(1, 2): 3},
        {"a"},
        object(),
        object,
        len,
        10**5000,
        complex(1, 2),
    ),
    *(
        np.zeros((2, 2)),
        np.float32("nan"),
        np.int64(3),
        torch.zeros(2),
        range(3),
        Path("gone"),
        [[1, 2], [3]],
        lambda: None,
    ),
)


def contained(kind: type) -> Any:
    """A list or dictionary that contains itself."""
    if kind is list:
        items: list[Any] = []
        items.append(items)
        return items
    group: dict[str, Any] = {}
    group["group"] = group
    return group


def python_value(rng: random.Random) -> Any:
    return rng.choice([*PYTHON_VALUES, contained(list), contained(dict)])


def special(rng: random.Random, path: Path) -> None:
    """A pipe, a link to a device or to nowhere, or a folder at a path."""
    path.unlink(missing_ok=True)
    kind = rng.choice(("pipe", "/dev/zero", "/dev/random", "/proc/self/mem", "/nonexistent", "folder"))
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(kind)


def tensors(rng: random.Random) -> Any:
    """What a file of weights may hold, for the small network of `configurations.base`."""
    state = build_model(ModelSpec("mlp", 10, (8, 8, 1), {"hidden": 8}), seed=1).state_dict()
    name = rng.choice(sorted(state))
    changes: dict[str, Callable[[torch.Tensor], Any]] = {
        "meta": lambda tensor: tensor.to("meta"),
        "integer": lambda tensor: tensor.long(),
        "truth values": lambda tensor: tensor.bool(),
        "complex": lambda tensor: tensor.to(torch.complex64),
        "half": lambda tensor: tensor.half(),
        "sparse": lambda tensor: tensor.to_sparse(),
        "not finite": lambda tensor: tensor * float(rng.choice(("nan", "inf"))),
        "scalar": lambda tensor: torch.tensor(1.0),
        "large": lambda tensor: torch.zeros(1).expand(10**6, 10**6),
        "no tensor": lambda tensor: [1.0],
    }
    forms = {
        "keys": lambda: dict(enumerate(state.values())),
        "one key": lambda: {**state, rng.choice((None, 3, (1,))): torch.zeros(1)},
        "list": lambda: list(state.values()),
        "nested": lambda: {"state_dict": state},
        "one": lambda: {**state, name: changes[rng.choice(sorted(changes))](state[name])},
        "all": lambda: {key: changes[chosen](value) for key, value in state.items()},
        "sound": lambda: state,
    }
    chosen = rng.choice(sorted(changes))
    return forms[rng.choice(sorted(forms))]()


def archive(rng: random.Random, path: Path) -> None:
    """An .npz: of any shapes, some said to be larger than what is there."""
    sides = [rng.choice((0, 1, 4, 4, 10**6, 2**32, -4)) for _ in range(rng.choice((1, 2, 3)))]
    count = rng.choice((0, 6, 6, 6, 10**13))
    shapes = {"images": (count, *sides), "labels": rng.choice(((count,), (6,), (10**13,), (6, 1), (2, 3), ()))}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, shape in shapes.items():
            head = io.BytesIO()
            kind = (
                rng.choice(("|u1", "|u1", "<i8", "<f4", "|O"))
                if rng.random() < 0.3
                else "|u1"
                if name == "images"
                else "<i8"
            )
            np.lib.format.write_array_header_1_0(head, {"descr": kind, "fortran_order": False, "shape": shape})
            file.writestr(f"{name}.npy", head.getvalue() + bytes(rng.choice((0, 100, 6 * 16, 6 * 16 * 8))))


def tree(rng: random.Random, folder: Path) -> None:
    """Folders of images, one of which is none."""
    for name in "ab":
        (folder / name).mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (4, 4)).save(folder / name / f"{number}.png")
    special(rng, folder / rng.choice("ab") / f"{rng.choice('01')}.png")


def description(rng: random.Random, path: Path) -> None:
    """The description of a prepared set, with a value or the whole of it changed by hand."""
    fields = json.loads(path.read_text())
    values = (
        None,
        3,
        -1,
        "x",
        "",
        [],
        [1],
        ["a"],
        ["a"] * 10,
        [8, 8],
        [8, 8, -1],
        [8.0, 8.0, 1.0],
        [10**6, 10**6, 1],
        {},
    )
    if rng.random() < 0.3:
        path.write_bytes(rng.choice(TEXTS).encode("latin-1"))
    else:
        key = rng.choice(
            ["classes", "shape", "domains", "num_examples", "checksum", rng.choice(sorted(fields)), "other"]
        )
        path.write_text(json.dumps(fields | {key: rng.choice(values)}))


def hostile_file(rng: random.Random, raw: dict[str, Any], here: Path, root: Path) -> Callable[[], object]:
    """What to do with one file that somebody else made, for data, a partition, weights or a configuration."""
    kind = rng.choice(("partition", "partition", "weights", "weights", "npz", "tree", "description", "pipe", "size"))
    here.mkdir(exist_ok=True)
    if kind == "partition":
        path = here / f"p{rng.choice(('.json', '.json', '.csv'))}"
        path.write_bytes(rng.choice(TEXTS).encode("latin-1"))
        return lambda: run(raw | {"partition": {"scheme": "file", "file": str(path), "num_clients": 6}})
    if kind == "weights":
        path = here / "weights.pt"
        torch.save(tensors(rng), path)
        return lambda: run(raw | {"model": raw["model"] | {"pretrained": str(path)}})
    if kind == "npz":
        archive(rng, here / "a.npz")
        return lambda: prepare("npz", here / "data", here / "a.npz")
    if kind == "tree":
        tree(rng, here / "tree")
        name = rng.choice(("folder", "domains", "npz", "parquet"))
        return lambda: prepare(name, here / "data", here / "tree", options=ReaderOptions(size=rng.choice((None, 8))))
    if kind == "description":
        shutil.copytree(root, here / "data")
        description(rng, here / "data" / "digits" / "digits.json")
        return lambda: run(raw | {"data": raw["data"] | {"root": str(here / "data")}})
    if kind == "size":
        size, count = rng.choice(((10**6, 10), (10**9, 1), (8, 10**12), (20_000, 10**5)))
        return lambda: prepare("shapes", here / "data", options=ReaderOptions(size=size, count=count))
    path = here / f"a{rng.choice(('.json', '.csv', '.pt', '.safetensors', '.yaml'))}"
    special(rng, path)
    uses: tuple[Callable[[], object], ...] = (
        lambda: raysim.run(str(path), quiet=True),
        lambda: run(raw | {"partition": {"scheme": "file", "file": str(path)}}),
        lambda: run(raw | {"model": raw["model"] | {"pretrained": str(path)}}),
        lambda: prepare(rng.choice(("npz", "folder", "parquet")), here / "data", path),
    )
    return rng.choice(uses)


def hostile_code(rng: random.Random, raw: dict[str, Any]) -> Callable[[], object]:
    """A run with a logger, a metric, a model or an augmentation that is none, or a bad one."""
    kind, factor = rng.choice(("logger", "logger", "numbers", "built-in")), rng.choice((1.0, 1e39, -1e39))
    if kind == "logger":
        options = {"where": rng.choice(("made", "start", "round", "end")), "act": rng.choice(sorted(own_code.ACTS))}
        return lambda: run(raw | {"loggers": [{f"{OWN}:logger": options}], "checkpoint": {"every_s": 0}})
    if kind == "numbers":
        if rng.random() < 0.5:
            return lambda: run(raw | {"model": {"name": f"{OWN}:net", "factor": factor}})
        return lambda: run(raw | {"data": raw["data"] | {"augment": {f"{OWN}:augment": {"factor": factor}}}})
    name = rng.choice(own_code.BUILT_IN)
    places: tuple[dict[str, Any], ...] = (
        {"loggers": [name]},
        {"methods": [name]},
        {"model": {"name": name}},
        {"evaluation": {"metrics": [name]}},
        {"partition": {"scheme": name, "num_clients": 6}},
        {"data": raw["data"] | {"augment": name}},
    )
    chosen = rng.choice(places)
    return lambda: run(raw | chosen)


def hostile_call(rng: random.Random, raw: dict[str, Any], root: Path) -> Callable[[], object]:
    """A call of the library with an argument that no file can hold."""
    value = python_value(rng)
    kind = rng.choice(("config", "value", "overrides", "on_round", "arrays", "report", "tune"))
    if kind == "config":
        return lambda: raysim.run(value, quiet=True)
    if kind == "overrides":
        given = rng.choice((value, {rng.choice(configurations.KEYS): value}, {3: value}, {"": value}, {"..": value}))
        return lambda: raysim.run(raw, given, quiet=True)
    if kind == "value":
        key = rng.choice(configurations.KEYS).replace(".", "__")
        return lambda: raysim.run(raw, quiet=True, **{key: value})
    if kind == "on_round":
        act = rng.choice(("word", "true", "array", "leave", "number", "text", "stop", "none", "two"))
        return lambda: raysim.run(raw, on_round=own_code.on_round(act), quiet=True)
    if kind == "arrays":
        key = rng.choice(("inputs", "targets", "name", "classes", "domains", "root"))
        given = {"inputs": np.zeros((2, 4, 4), np.uint8), "targets": [0, 1], "name": "a", "root": Path(raw["storage"])}
        return lambda: raysim.arrays(**{**given, key: value})
    if kind == "report":
        return lambda: raysim.report(value) if rng.random() < 0.5 else raysim.load(value)
    return lambda: raysim.tune(value if rng.random() < 0.5 else {**raw, "tune": value}, quiet=True)


def run(raw: dict[str, Any]) -> bool:
    """Check, and run if that is short: sizes that memory holds may still take hours."""
    plan = check(raw, "a hostile configuration")
    if plan.layout.num_params < 100_000:
        execute(plan)
    return True


def prepared_name(rng: random.Random, here: Path) -> bool:
    """Names of sets lead nowhere: whatever is written lies below the data root.

    And no control character or formula of a label reaches a page. False: something was written elsewhere.
    """
    root = here / "data"
    root.mkdir(parents=True)
    names = ("../outside", str(here / "outside"), "..", ".", "a/b", "", "a\x00b", "x\n# heading", "fine", "a" * 300)
    before = {path for path in here.rglob("*") if root not in path.parents}
    try:
        raysim.arrays(np.zeros((2, 4, 4), np.uint8), np.array([0, 1]), name=rng.choice(names), root=root)
    except RaysimError:
        if {path for path in here.rglob("*") if root not in path.parents} != before:
            return False
        raise
    return {path for path in here.rglob("*") if root not in path.parents} == before
