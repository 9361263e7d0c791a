"""`make bench-peers`: the workloads in other simulators, each in an environment of its own, in turns with the bare loop.

    python -m tests.bench.peers                   W1, W2 and W3 in all of them
    python -m tests.bench.peers W3 --tools pfl    one
    python -m tests.bench.peers --rounds 5        quicker and noisier

An environment is a folder below build/peers that sees the packages of the interpreter that runs this (PyTorch is not
installed again) and has the simulator at the pinned version on top, with what it wants otherwise. Every tool trains the
same clients in the same cohorts from the same initial model with plain SGD, and evaluates on the test set after each
round. What cannot be installed, or fails, is named with its reason.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tests.bench import whole
from tests.bench.__main__ import cpu
from tests.bench.watch import PROJECT, watch
from tests.bench.whole import Sample
from tests.bench.workloads import WORKLOADS, Prepared, prepared

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Tool:
    """A simulator. requirement: for pip; about: how it shares clients out; launcher: of its script, after the interpreter."""

    requirement: str
    about: str
    launcher: tuple[str, ...] = ()


TOOLS = {
    "pfl": Tool("pfl==0.6.0", "2 processes", ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")),
    "flower": Tool("flwr[simulation]==1.38.0", "2 processes, on Ray"),
    "fluke": Tool("fluke-fl==0.8.1", "1 process, 2 threads"),
    "blazefl": Tool("blazefl==3.0.0", "2 processes"),
}


def installed(name: str, folder: Path) -> Path:
    """The interpreter of a tool's environment, made if it is not there.

    Raises:
      RuntimeError: pip's reason.
    """
    place, requirement = folder / name, TOOLS[name].requirement
    python, stamp = place / "bin" / "python", place / requirement
    if not stamp.exists():
        venv.create(place, clear=True, symlinks=True)
        packages = next((place / "lib").iterdir()) / "site-packages"
        (packages / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
        command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", requirement]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"cannot be installed: {reason_of(done.stderr, requirement)}")
        stamp.touch()
    return python


def reason_of(output: str, requirement: str) -> str:
    """Why pip refused."""
    pinned = requirement.partition("==")[2]
    if wanted := re.search(rf"(?<![\d.]){re.escape(pinned)} Requires-Python ([^;\s]+)", output):
        return f"it needs Python {wanted[1]}"
    errors = [line.removeprefix("ERROR: ") for line in output.splitlines() if line.startswith("ERROR:")]
    return errors[-1][:160] if errors else output[-160:]


def tool_sample(name: str, python: Path, ready: Prepared) -> Sample:
    script = HERE / f"{name}_.py"
    return Sample(watch([python, *TOOLS[name].launcher, script, ready.job], samples_memory=False, cwd=HERE), {})


def cell(sample: Sample, before: Sample, after: Sample) -> str:
    """Sum of rounds after the first, and CPU time of these, over the bare loops around; seconds to the first round."""
    wall, cpu_time = (
        2 * own / (one + other)
        for own, one, other in (
            (sample.rounds_s, before.rounds_s, after.rounds_s),
            (sample.run.cpu_s, before.run.cpu_s, after.run.cpu_s),
        )
    )
    return f"{wall:.2f} (CPU {cpu_time:.2f}; start {sample.run.start_s + sample.run.round_s[0]:.0f} s)"


def row(ready: Prepared, names: list[str], pythons: dict[str, Path | str]) -> dict[str, str]:
    """Cells of one workload: bare loop, tool, bare loop, tool ..."""
    cells: dict[str, str] = {}
    systems: dict[str, Callable[[], Sample]] = {
        "raysim": lambda: whole.raysim_sample(ready, whole.SYSTEMS["ray"], "peers")
    }
    for name in names:
        python = pythons[name]
        if isinstance(python, str):
            cells[name] = "-"
        else:
            systems[name] = lambda name=name, python=python: tool_sample(name, python, ready)
    bare = [whole.bare_sample(ready, 2)]
    for name, make in systems.items():
        try:
            sample = make()
        except RuntimeError as error:
            print(f"{name}, {ready.load.name}: {error}", file=sys.stderr, flush=True)
            cells[name] = "failed"
            continue
        bare.append(whole.bare_sample(ready, 2))
        cells[name] = cell(sample, bare[-2], bare[-1])
    sums = [sample.rounds_s for sample in bare]
    cells["bare loop"] = f"1 ({min(sums) / float(np.mean(sums)):.2f} to {max(sums) / float(np.mean(sums)):.2f})"
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loads", nargs="*", default=["W1", "W2", "W3"], metavar="WORKLOAD")
    parser.add_argument("--tools", nargs="+", choices=[*TOOLS], default=[*TOOLS])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--folder", type=Path, default=PROJECT / "build" / "peers", help="of the environments")
    given = parser.parse_args()
    pythons: dict[str, Path | str] = {}
    for name in given.tools:
        try:
            pythons[name] = installed(name, given.folder.absolute())
        except RuntimeError as error:
            pythons[name] = str(error)
    table: dict[str, dict[str, str]] = {}
    for load in given.loads:
        with tempfile.TemporaryDirectory() as folder:
            table[load] = row(prepared(WORKLOADS[load], Path(folder), given.rounds), given.tools, pythons)
    machine = f"{cpu()}, {os.cpu_count()} cores, Python {platform.python_version()}, PyTorch {torch.__version__}"
    print(
        f"{machine}, {datetime.date.today()}: sum of all rounds after the first over the bare loop's, evaluation included"
    )
    print("| | " + " | ".join(table) + " |\n|---|" + "---|" * len(table))
    abouts = {"bare loop": "2 processes", "raysim": "2 trainers, on Ray, records on"}
    abouts |= {name: f"{TOOLS[name].requirement}, {TOOLS[name].about}" for name in given.tools}
    for name, about in abouts.items():
        reason = pythons.get(name)
        cells = [table[load].get(name, "") for load in table]
        print(f"| {name} ({about}) | " + (reason if isinstance(reason, str) else " | ".join(cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
