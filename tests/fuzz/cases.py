"""Each kind of case: what is done with a seed, and what came of it."""

from __future__ import annotations

import importlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import yaml

import raysim
from raysim.base.errors import RaysimError
from raysim.config import read_config
from raysim.data.sources import prepare
from raysim.engine.simulation import Stopped
from raysim.plan.check import check
from raysim.running.runner import execute
from tests.fuzz import combinations, configurations, hostile, silent, tables, tasks
from tests.fuzz.verdicts import verdict_of

#: Rounds of a run that is damaged or killed, the method lists of those, and where the others stop.
ROUNDS, STOP_AFTER = 4, 2
METHODS: tuple[dict[str, Any], ...] = (
    {"methods": ["scaffold", {"fedvg": {"granularity": "block"}}]},
    {"methods": ["fedavgm", "feddyn"], "on_nonfinite": "skip"},
    {
        "methods": ["livar"],
        "model": {"name": "vit", "dim": 16, "depth": 1, "heads": 2, "patch": 4, "lora": {"rank": 2}},
        "local": {"lr": 1e-3, "optimizer": "adamw"},
    },
)


@dataclass
class Ground:
    """What the cases stand on: a prepared set, and for each method list a run to damage and the hash of it undisturbed."""

    folder: Path

    def __post_init__(self) -> None:
        self.root = self.folder / "data"
        prepare("digits", self.root)
        for library in (
            "peft",
            "timm",
            "torchvision",
        ):  # tens of seconds on a busy machine, which no case is to answer for
            importlib.import_module(library)

    @cached_property
    def hashes(self) -> list[str]:
        """Of the undisturbed runs."""
        return [run(self.raw(number, self.folder / "whole", self.root)) for number in range(len(METHODS))]

    @cached_property
    def halves(self) -> Path:
        """A folder for each method list, with a run that is not finished."""
        for number in range(len(METHODS)):
            with suppress(Stopped):
                run(self.raw(number, self.folder / "half" / str(number), self.root), stop_after=STOP_AFTER)
        return self.folder / "half"

    def raw(self, number: int, storage: Path, root: Path) -> dict[str, Any]:
        """The configuration of a run of a method list."""
        raw = configurations.base(str(root), str(storage)) | {"rounds": ROUNDS} | METHODS[number]
        return raw | {"name": f"run-{number}", "checkpoint": {"every_s": 0}}


def run(raw: dict[str, Any], stop_after: int = 0) -> str:
    """The hash of a run."""

    def on_round(record: Any) -> None:
        if record.round_index + 1 == stop_after:
            raise Stopped

    return str(execute(check(raw, "a fuzzed configuration"), on_round=on_round)["params_sha256"])


def right_configuration(ground: Ground, seed: int) -> str:
    """Allowed values must run, or be refused in one sentence, and give the same hash again."""
    storage = ground.folder / f"right-{seed}"
    raw = configurations.right(seed, str(ground.root), str(storage))

    def twice() -> bool:
        first = run(raw)
        return seed % 4 != 0 or first == run(raw | {"name": "again"})

    try:
        return verdict_of(twice, right=bool)
    finally:
        shutil.rmtree(storage, ignore_errors=True)


def wrong_configuration(ground: Ground, seed: int) -> str:
    """Values that nobody should give: refused, or, where they can be meant, run to the end if that is short."""
    storage = ground.folder / f"wrong-{seed}"
    raw = configurations.wrong(seed, str(ground.root), str(storage))

    def attempt() -> None:
        plan = check(raw, "a fuzzed configuration")
        local, config = plan.config.local, plan.config
        work = plan.num_rounds * (local.steps or 10 * (local.epochs or 1)) * min(config.num_clients, 50)
        if work < 2000 and plan.layout.num_params < 100_000 and plan.num_rounds < 5:
            execute(plan)

    try:
        return verdict_of(attempt)
    finally:
        shutil.rmtree(storage, ignore_errors=True)


def damaged_file(ground: Ground, seed: int) -> str:
    """One file of a prepared set, its shards or an unfinished run is damaged; then the same command."""
    rng = random.Random(f"damage-{seed}")
    number, here = rng.randrange(len(METHODS)), ground.folder / f"damaged-{seed}"
    root, storage = here / "data", here / "runs"
    try:
        shutil.copytree(ground.root, root)
        shutil.copytree(ground.halves / str(number), storage)
        files = [path for path in sorted(here.rglob("*")) if path.is_file()]
        damage(rng, rng.choice(files))
        return verdict_of(partial(run, ground.raw(number, storage, root)), right=ground.hashes[number].__eq__)
    finally:
        shutil.rmtree(here, ignore_errors=True)


def damaged_result(ground: Ground, seed: int) -> str:
    """One file of a finished run is damaged; then all is read of it that Python offers, and reported beside a whole run."""
    rng, here = random.Random(f"result-{seed}"), ground.folder / f"result-{seed}"
    assert ground.hashes
    whole = ground.folder / "whole" / f"run-{rng.randrange(len(METHODS))}"

    def read_all() -> None:
        run = raysim.load(here)
        assert isinstance(run, raysim.Run)
        sentences = []
        for read in (
            run.reload,
            run.model,
            lambda: run.arrays("fedvg.norms"),
            lambda: raysim.report([run, whole], out=here / "report"),
        ):
            try:
                read()
            except RaysimError as error:
                sentences.append(error)
            except KeyError as error:
                if not str(error).startswith("\"no array 'fedvg.norms'"):
                    raise
        if sentences:
            raise sentences[0]

    try:
        shutil.copytree(whole, here)
        damage(rng, rng.choice([path for path in sorted(here.rglob("*")) if path.is_file()]))
        return verdict_of(read_all)
    finally:
        shutil.rmtree(here, ignore_errors=True)


def damage(rng: random.Random, path: Path) -> None:
    """Do to a file what disks, editors and hands do."""
    content = path.read_bytes()
    place = rng.randrange(len(content)) if content else 0
    changed: dict[str, Callable[[], object]] = {
        "flip": lambda: path.write_bytes(
            content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]
        ),
        "cut": lambda: path.write_bytes(content[:place]),
        "empty": lambda: path.write_bytes(b""),
        "noise": lambda: path.write_bytes(rng.randbytes(200)),
        "more": lambda: path.write_bytes(content + rng.randbytes(20)),
        "twice": lambda: path.write_bytes(content + content),
        "gone": path.unlink,
        "folder": lambda: (path.unlink(), path.mkdir()),
    }
    changed[rng.choice(sorted(changed) if content else ["noise", "gone", "folder"])]()


def damaged_text(ground: Ground, seed: int) -> str:
    """A configuration file with some letters changed: a sentence, or a plan."""
    rng, path = random.Random(f"text-{seed}"), ground.folder / f"text-{seed}.yaml"
    text = yaml.safe_dump(ground.raw(rng.randrange(len(METHODS)), ground.folder / "none", ground.root))
    content = bytearray(text.encode())
    for _ in range(rng.choice((1, 1, 2, 5))):
        place = rng.randrange(len(content))
        content[place : place + rng.randrange(3)] = rng.choice(
            [rng.randbytes(1), b":", b"\n", b"- ", b"{", b"\t", b"&a ", b"*a"]
        )
    path.write_bytes(bytes(content))
    try:
        return verdict_of(lambda: check(read_config(path), str(path)))
    finally:
        path.unlink()


def drawn(ground: Ground, seed: int, kind: str) -> str:
    """A hostile file, own code, a call of Python, or a case whose wrong result would be a silent one."""
    rng, here = random.Random(f"{kind}-{seed}"), ground.folder / f"{kind}-{seed}"
    here.mkdir()
    raw = configurations.base(str(ground.root), str(here / "runs"))
    try:
        if kind == "file":
            return verdict_of(hostile.hostile_file(rng, raw, here, ground.root))
        if kind == "code":
            return verdict_of(hostile.hostile_code(rng, raw))
        if kind == "call":
            return verdict_of(hostile.hostile_call(rng, raw, ground.root))
        if kind == "name":
            return verdict_of(lambda: hostile.prepared_name(rng, here), right=bool)
        case = CHECKED.get(kind) or silent.CASES[rng.choice(sorted(silent.CASES))]
        return verdict_of(lambda: case(rng, raw, here, ground.root), right=bool)
    finally:
        shutil.rmtree(here, ignore_errors=True)


#: Kind -> a case that says itself whether its result is right.
CHECKED: dict[str, silent.Case] = {
    "table": tables.messy_table,
    "guarded": combinations.attacked_and_guarded,
    "task": tasks.best_of_a_drawn_task,
}


def killed(ground: Ground, seed: int, backend: str) -> str:
    """The command is killed at some moment, once or twice, and given again until it ends."""
    rng, here = random.Random(f"kill-{seed}"), ground.folder / f"killed-{seed}"
    number = rng.randrange(len(METHODS))
    raw = ground.raw(number, here, ground.root) | {"resources": {"backend": backend, "trainers": "auto"}}
    here.mkdir()
    (here / "config.yaml").write_text(yaml.safe_dump(raw))
    command = [sys.executable, "-m", "raysim", "run", str(here / "config.yaml")]
    moments = [rng.uniform(1, 14 if backend == "serial" else 25) for _ in range(rng.choice((1, 2)))]
    output = ""
    try:
        for moment in [*moments, None]:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
            )
            try:
                output, _ = process.communicate(timeout=300 if moment is None else moment)
            except subprocess.TimeoutExpired:
                if moment is None:
                    return "hang"
                process.send_signal(rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM)))
                output, _ = process.communicate(timeout=60)
            finally:
                end_group(process.pid)
        if "Traceback" in output:
            return f"traceback: {output[-300:]}"
        summary = here / f"run-{number}" / "summary.json"
        if not summary.exists():
            return f"traceback: no summary, {output[-300:]}"
        return "right" if ground.hashes[number] in summary.read_text() else "silent wrong result"
    finally:
        shutil.rmtree(here, ignore_errors=True)


def end_group(pid: int) -> None:
    """Kill what is left of a session of processes."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        time.sleep(0.2)


#: Kind -> (case, how many by `make fuzz`).
CASES: dict[str, tuple[Callable[[Ground, int], str], int]] = {
    "right configurations": (right_configuration, 400),
    "wrong configurations": (wrong_configuration, 1200),
    "damaged files": (damaged_file, 500),
    "damaged configuration files": (damaged_text, 500),
    "damaged results": (damaged_result, 200),
    "hostile files": (partial(drawn, kind="file"), 300),
    "hostile own code": (partial(drawn, kind="code"), 150),
    "calls of Python": (partial(drawn, kind="call"), 300),
    "names of sets": (partial(drawn, kind="name"), 30),
    "what would be silently wrong": (partial(drawn, kind="silent"), 70),
    "messy tables": (partial(drawn, kind="table"), 600),
    "attacks, rules and privacy": (partial(drawn, kind="guarded"), 300),
    "tasks and directions": (partial(drawn, kind="task"), 100),
    "kills, serial": (partial(killed, backend="serial"), 15),
    "kills, Ray": (partial(killed, backend="ray"), 20),
}
