"""`make bench`: raysim as its users run it against a bare PyTorch loop; a block of lines for each workload, and a table.

    python -m tests.bench                             W1 to W5 on Ray, all but W4 serial: two hours on two cores
    python -m tests.bench W3 --system ray             one of them
    python -m tests.bench W3 --rounds 20 --repeats 1  quicker and noisier
    python -m tests.bench W3 --only raysim            no bare loop: times, parts and memory of a cold and a warm run
    python -m tests.bench scoring                     FedVG's score of a client against the released way
    python -m tests.bench scale                       100,000 clients, 1,000 a round
    python -m tests.bench local shards                what methods add to one step; the Ray Data pipeline
    python -m tests.bench layouts                     one step by memory layout, in float32 and bfloat16
    python -m tests.bench large many                  ViT-B/16 on emulated nodes; what the engine costs on 1 to 16 of them
    python -m tests.bench stacks                      small dense networks with and without stacked clients
    python -m tests.bench searches                    Optuna and random search for a learning rate

See `tests.bench.whole` for how runs are compared, and `tests.bench.workloads` for what they do.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.bench import large, layouts, local, many, scale, scoring, searches, shards, stacks, whole
from tests.bench.workloads import WORKLOADS, prepared

OTHERS = {
    "scoring": scoring.main,
    "scale": scale.main,
    "local": local.main,
    "layouts": layouts.main,
    "shards": shards.main,
    "large": lambda: large.main([]),
    "many": lambda: many.main([]),
    "searches": searches.main,
    "stacks": stacks.main,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"{', '.join([*WORKLOADS, *OTHERS])}; all that begin with W if none"
    )
    parser.add_argument("--system", choices=[*whole.SYSTEMS], help="ray or serial; both if not given (W4: ray)")
    parser.add_argument("--rounds", type=int, help="of each run")
    parser.add_argument("--repeats", type=int, default=3, help="runs that are compared with bare loops")
    parser.add_argument("--only", choices=["raysim"], help="no bare loop")
    parser.add_argument("--root", type=Path, help="folder to work in, kept; a temporary one if not given")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="then start no further run; goes on with --root"
    )
    given = parser.parse_args()
    until = time.monotonic() + given.seconds
    if unknown := [name for name in given.names if name not in {*WORKLOADS, *OTHERS}]:
        parser.error(f"unknown: {', '.join(unknown)}")
    print(
        f"{cpu()}, {os.cpu_count()} cores; Python {platform.python_version()}, PyTorch {torch.__version__}", flush=True
    )
    made: list[whole.Comparison] = []
    for name in given.names or [name for name in WORKLOADS if name.startswith("W")]:
        if name in OTHERS:
            OTHERS[name]()
            continue
        with tempfile.TemporaryDirectory() as folder:
            made += workload(name, given, (given.root or Path(folder)).resolve(), until)
    if made:
        print("\n".join(whole.table(made)))


def workload(name: str, given: argparse.Namespace, root: Path, until: float) -> list[whole.Comparison]:
    """Measure a workload and print its lines."""
    comparisons = []
    for system in [given.system] if given.system else ["ray"] if name == "W4" else [*whole.SYSTEMS]:
        # A folder for each: the shards of a cold run are not there yet.
        ready = prepared(WORKLOADS[name], root / system, given.rounds)
        if given.only:
            for kind in ("cold", "warm"):
                sample = whole.raysim_sample(ready, whole.SYSTEMS[system], kind, samples_memory=kind == "cold")
                print(f"{name} {system} {kind}: {json.dumps(sample.run.facts | {'parts_s': sample.parts})}", flush=True)
            continue
        made = whole.compare(ready, whole.SYSTEMS[system], given.repeats, until)
        if made is None:
            sys.exit(f"{name}: not finished within {given.seconds:g} s; the same command with the same --root goes on")
        print("\n".join(whole.describe(made)), flush=True)
        comparisons.append(made)
    return comparisons


def cpu() -> str:
    """The CPU's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


if __name__ == "__main__":
    main()
